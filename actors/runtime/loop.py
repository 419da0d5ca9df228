"""The loop of a process as our code sees it: messages, timers, ends of processes.

Theory of operation. Every process of ours runs one asyncio event loop, with its transport on it: an
actor's own, a gunicorn worker's, or one on a thread where a script or the host process blocks. A
:class:`Loop` adds what asyncio lacks: sends with their outcome, the ends of other processes, and
callbacks that never let an exception out. All of them run on the thread of the asyncio loop, one at
a time; only :meth:`Loop.post` and :meth:`Loop.run` may be called from other threads.

A *turn* is what a process does for the messages that arrived together. What is put off to its end
runs just before the transport writes, so that what the turn produced travels together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.liveness import Pulse, SilenceWatch
from greenroom.actors.runtime.machine import MACHINE, Machine
from greenroom.actors.transport.beats import BeatLink
from greenroom.actors.transport.mailbox import Mailbox
from greenroom.core.silence import TICK_S

logger = logging.getLogger(__name__)
Callback = Callable[[], None]
Timer = asyncio.TimerHandle
L = TypeVar("L", bound="MayBeIdle")

MAX_BATCH = 256
# From so many items on, what a turn gathers is sent before its end: the receiver begins while the
# sender goes on. With 64 connections: 8,720 requests/s instead of 7,480, and 7,740 with 4.
GATHERED = 8
GATHERED_PARTS = 64  # of streams, which cost their receiver little: half the CPU of 8
MAX_BATCH_BYTES = 1_000_000  # a message occupies its connection for as long as it takes
MAX_BYTES_UNDER_WAY = 8_000_000  # to one target
STARVED_S = 5.0
# By how much uvloop's timers can be early: they count whole milliseconds, of a clock read before.
EARLY_S = 0.002
MAX_OUTBOXES = 256  # before idle ones are dropped


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a loop for what serves requests: uvloop's, where that is installed."""
    try:
        import uvloop  # noqa: PLC0415  # an extra, and 20 ms
    except ImportError:
        return asyncio.SelectorEventLoop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Loop:
    """One process's loop; ``on_error`` gets what a callback raises.

    By default that is logged, and all goes on.
    ``machine`` is what the loop and all on it have of the operating system.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        on_error: Callable[[Exception], None] | None = None,
        machine: Machine = MACHINE,
    ) -> None:
        self.asyncio = mailbox.loop  # for coroutines
        self._early_s = 0.0 if isinstance(self.asyncio, asyncio.BaseEventLoop) else EARLY_S
        self.machine = machine
        self.on_error = on_error
        self._is_stopped = False
        self.deliveries_at_once = mailbox.deliveries_at_once
        self._mailbox = mailbox
        mailbox.turn_end.on_error = self._failed
        # As the loop's own methods, and less than they do: what lanes are made of.
        self.flush_at_turn_end = mailbox.turn_end.add
        self.send_loosely = mailbox.send_loosely
        self._posted: deque[Callback] = deque()
        self._woken = False
        self._pidfds: dict[int, Process] = {}
        self._silence: SilenceWatch | None = None
        self._beating: Timer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def keep_beating(
        self, pulse: Pulse, silence_timeout_s: float, may_beat: Callable[[], bool] = lambda: True
    ) -> None:
        """Show by ``pulse`` that this loop goes on, and from now on watch others for silence, too.

        What is watched for its death and is silent for ``silence_timeout_s`` is killed, unless that
        is 0. See greenroom.core.silence. While ``may_beat`` returns False this process is silent.
        """
        if silence_timeout_s:
            self._silence = self.machine.silence_watch(silence_timeout_s)

        def tick() -> None:
            self._beating = self.call_later(TICK_S, tick)
            if may_beat():
                pulse.beat()
            if self._silence is not None:
                self._silence.check(self._pidfds.values())

        tick()

    def send(
        self,
        target: Address,
        message: Any,
        on_sent: Callback | None = None,
        on_failed: Callback | None = None,
    ) -> None:
        """Send without waiting; then one of the callbacks, once the receiver has taken it or not.

        A message whose delivery failed may still have been processed.
        """
        if on_sent is None and on_failed is None:
            self.send_loosely(target, message)
            return
        sent = None if on_sent is None else partial(self.guarded, on_sent)
        failed = None if on_failed is None else partial(self.guarded, on_failed)
        self._mailbox.send(target, message, sent, failed)

    def is_here(self, target: Address) -> bool:
        """Return whether ``target`` is on this host, where the end of a process is certain."""
        return self._mailbox.is_here(target)

    def post(self, callback: Callback) -> None:
        """Run ``callback`` on the loop soon; callable from any thread; dropped after its end."""
        self._posted.append(callback)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # closed
                self.asyncio.call_soon_threadsafe(self._run_posted)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine from now on; what it raises goes to ``on_error``."""
        task = self.asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error, task.get_coro())

    def run(self, callback: Callback) -> None:
        """Run ``callback`` at once where this is the running loop, else soon; from any thread."""
        if asyncio._get_running_loop() is self.asyncio:
            self.guarded(callback)
        else:
            self.post(callback)

    @property
    def starved_s(self) -> float:
        """Return for how long links that were needed could not be made, for lack of descriptors."""
        return self._mailbox.starved_s

    def at_turn_end(self, callback: Callback) -> None:
        """Run ``callback`` when the present messages or callback have been dealt with."""
        self.flush_at_turn_end(partial(self.guarded, callback))

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Run ``callback`` in ``delay_s`` seconds, never before; when idle, 3 ms late at most."""
        at_least_s = delay_s + self._early_s if delay_s > 0 else 0.0
        return self.asyncio.call_later(at_least_s, self.guarded, callback)

    def watch_process(
        self,
        process: Process | None,
        on_exit: Callback,
        at: Address | None = None,
        on_unreachable: Callback | None = None,
    ) -> Callback:
        """Run ``on_exit`` once when the process ends (soon, when it has); return a canceller.

        One of this host that stands still is ended, where this loop beats itself.
        ``at`` is an address of it, where it may be on another host. One there that cannot be
        reached counts as ended too, unless there is an ``on_unreachable`` to be run each time. Only
        there may its ``process`` be unknown.
        """
        cancel = None if at is None else self._watch_remote(at, on_exit, on_unreachable)
        if cancel is None:
            cancel = nothing if process is None else self._watch_here(process, on_exit)
        return cancel

    def try_host(self, gate: str) -> None:
        """See whether the host at HOST:PORT still answers, on every connection with it.

        Each that does not is lost within some two seconds. Idle ones take up to 15 s more else.
        """
        self._mailbox.try_host(self.machine.address_of(gate))

    def beat_link(self, target: Address, on_answer: Callable[[bytes], None]) -> BeatLink | None:
        """Return a link for beats to the process at ``target``; None for one on this host."""
        return self._mailbox.beat_link(target, partial(self.guarded, on_answer))

    def answer_beats(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer the beats of other hosts' processes so from now on; b"" is no answer."""
        self._mailbox.answer_beats(answer)

    def _watch_remote(
        self, at: Address, on_exit: Callback, on_unreachable: Callback | None
    ) -> Callback | None:
        def gone(is_certain: bool) -> None:
            if is_certain or on_unreachable is None:
                if cancel is not None:
                    cancel()
                self.guarded(on_exit)
            else:
                self.guarded(on_unreachable)

        cancel = self._mailbox.watch_remote(at, gone)
        return cancel

    def _watch_here(self, process: Process, on_exit: Callback) -> Callback:
        fd = self.machine.open_pidfd(process)
        if fd is None:
            return self.call_later(0, on_exit).cancel
        self._pidfds[fd] = process
        is_over = False

        def cancel() -> None:
            nonlocal is_over
            if not is_over and fd in self._pidfds:
                self._let_go(fd)
            is_over = True  # from now on another watch may have the descriptor's number

        def exited() -> None:
            cancel()
            self.guarded(on_exit)

        self.asyncio.add_reader(fd, exited)
        return cancel

    def close(self) -> None:
        """Watch no process any more, and do not beat."""
        if self._beating is not None:
            self._beating.cancel()
        if self._silence is not None:
            self._silence.close()
        for fd in list(self._pidfds):
            self._let_go(fd)

    def stop(self) -> None:
        """Run no callback or coroutine any more; what was sent still leaves."""
        self._is_stopped = True
        for task in list(self._tasks):
            task.cancel()

    def guarded(self, callback: Callable[..., None], *args: Any) -> None:
        """Call; what it raises goes to ``on_error``, for the loop may belong to other code."""
        if self._is_stopped:
            return
        try:
            callback(*args)
        except Exception as error:
            self._failed(error, callback)

    def _failed(self, error: Exception, what: object) -> None:
        if self.on_error is not None:
            self.on_error(error)
        else:
            logger.error("%r failed", what, exc_info=error)

    def _let_go(self, fd: int) -> None:
        del self._pidfds[fd]
        self.asyncio.remove_reader(fd)
        self.machine.close_pidfd(fd)

    def _run_posted(self) -> None:
        self._woken = False  # before the first is taken: what is posted from here on wakes again
        while self._posted:
            self.guarded(self._posted.popleft())


def end_where_starved(*loops: Loop) -> bool:
    """End this process where it could make no link that it needs for STARVED_S; else return True.

    Processes that wait for an answer over that link would wait for ever, while all else looks well.
    """
    starved_s = max(loop.starved_s for loop in loops)
    if starved_s >= STARVED_S:
        logger.critical(
            "no link to another process could be made for %.0f s, for lack of descriptors (%d at "
            "most): ending. What opens files or connections has to close them",
            starved_s,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
        os._exit(1)
    return True


def resolve(future: asyncio.Future[Any], value: Any) -> None:
    """Give a future its result, unless it has one, or was cancelled."""
    if not future.done():
        future.set_result(value)


def nothing() -> None:
    """Stand in for a callback."""


class Repeats:
    """Sends what is repeated until it is answered, but not while it is still on its way.

    A model's weights may take some seconds, and would again for each repeat.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._under_way: set[str] = set()  # targets

    def send(self, target: Address, message: Any, on_failed: Callback = nothing) -> None:
        """Send ``message`` unless the last one has yet to arrive at ``target``."""
        name = str(target)
        if name in self._under_way:
            return
        self._under_way.add(name)

        def failed() -> None:
            self._under_way.discard(name)
            on_failed()

        self._loop.send(target, message, lambda: self._under_way.discard(name), failed)


class Lane:
    """Items for one process of this host; those that gather in a turn travel in one message.

    ``pack`` makes a message of a list of items. Nobody hears whether they arrive, so something else
    has to notice the death of the target, and to bound what is on the way. Items of many bytes
    (``weigh``) are spread over several messages of a size that the transport is good at.
    """

    def __init__(
        self,
        loop: Loop,
        target: Address,
        pack: Callable[[list[Any]], Any],
        weigh: Callable[[Any], int] = lambda _item: 0,
    ) -> None:
        self._loop = loop
        self._target = target
        self._pack = pack
        self._weigh = weigh
        self._items: list[Any] = []
        self._flush_due = False

    def put(self, item: Any, gathered: int = GATHERED) -> None:
        """Add an item; it leaves at the end of this turn, or earlier with ``gathered`` items."""
        self._items.append(item)
        is_due = self._flush_due
        if len(self._items) >= gathered:
            self._flush()
            self._flush_due = is_due  # the callback of the turn's end may be still to come
        elif not is_due:
            self._flush_due = True
            self._loop.flush_at_turn_end(self._flush)

    def put_all(self, items: list[Any]) -> None:
        """Add items that are to leave in as few messages as they fit in."""
        self._items += items
        if not self._flush_due:
            self._flush_due = True
            self._loop.flush_at_turn_end(self._flush)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits."""
        return not self._items

    def drop(self) -> list[Any]:
        """Forget and return what has not been given to the transport; for a dead target."""
        items, self._items = self._items, []
        return items

    def _flush(self) -> None:
        self._flush_due = False
        while self._items:
            count = 1 if len(self._items) == 1 else self._next_batch()[0]
            items, self._items = self._items[:count], self._items[count:]
            self._loop.send_loosely(self._target, self._pack(items))

    def _next_batch(self) -> tuple[int, int]:
        size = 0
        for count, item in enumerate(self._items[:MAX_BATCH]):
            weight = self._weigh(item)
            if count and size + weight > MAX_BATCH_BYTES:
                return count, size
            size += weight
        return min(len(self._items), MAX_BATCH), size


class Outbox(Lane):
    """A lane to any process, whose items are delivered or fail.

    ``on_sent`` and ``on_failed`` get the items of each delivery. While ``most_under_way`` bytes are
    under way, the rest waits, so that it can be joined.
    """

    def __init__(
        self,
        loop: Loop,
        target: Address,
        pack: Callable[[list[Any]], Any],
        on_sent: Callable[[list[Any]], None] | None = None,
        on_failed: Callable[[list[Any]], None] | None = None,
        weigh: Callable[[Any], int] = lambda _item: 0,
        most_under_way: int = MAX_BYTES_UNDER_WAY,
    ) -> None:
        super().__init__(loop, target, pack, weigh)
        self._most_under_way = most_under_way
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._under_way = 0  # deliveries
        self._bytes_under_way = 0
        self._patience: Timer | None = None  # armed while what waits can wait

    def put_patiently(self, item: Any, within_s: float) -> None:
        """Add an item that may wait so long for others; it leaves with the next that may not."""
        self._items.append(item)
        if not self._flush_due and self._patience is None:
            self._patience = self._loop.call_later(within_s, self._flush)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits or is under way."""
        return not (self._items or self._under_way)

    def _flush(self) -> None:
        self._flush_due = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        while (
            self._items
            and self._under_way < self._loop.deliveries_at_once
            and self._bytes_under_way < self._most_under_way
        ):
            count, size = self._next_batch()
            items, self._items = self._items[:count], self._items[count:]
            self._under_way += 1
            self._bytes_under_way += size
            self._loop.send(
                self._target,
                self._pack(items),
                partial(self._done, items, size, self._on_sent),
                partial(self._done, items, size, self._on_failed),
            )

    def _done(
        self, items: list[Any], size: int, callback: Callable[[list[Any]], None] | None
    ) -> None:
        self._under_way -= 1
        self._bytes_under_way -= size
        if callback is not None:
            callback(items)
        if not self._flush_due and self._patience is None:  # else the rest of this turn goes along
            self._flush()


class MayBeIdle(Protocol):
    """A lane, or what has some."""

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits or is under way."""


class Outboxes(dict[str, L]):
    """Lanes by the incarnation of their target, whose death may go unnoticed.

    So idle ones are dropped before there are more than MAX_OUTBOXES.
    """

    def __setitem__(self, incarnation: str, lane: L) -> None:
        if len(self) >= MAX_OUTBOXES:
            for known in [each for each, old in self.items() if old.is_idle]:
                del self[known]
        super().__setitem__(incarnation, lane)
