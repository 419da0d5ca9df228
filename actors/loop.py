"""What ties our actors to Thespian's blocking loop: timers, wake-ups, descriptors, deliveries.

Theory of operation. Thespian runs one loop per process and calls an actor for each message. Our
processes need more from that loop: to be woken by their own threads, to learn at once when another
process ends, timers that are not lost, and to know when a message was taken by its receiver. A
:class:`Loop` provides these. All its callbacks run on the thread that runs Thespian's loop, one at
a time; only :meth:`Loop.post` may be called from other threads.

All descriptors hang on one epoll descriptor, because Thespian makes a new selector per pass and
registers each watched descriptor with it anew.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from thespian.system.transport import TransmitIntent

from understudy.actors.messages import Address, Process
from understudy.actors.processes import open_pidfd

logger = logging.getLogger(__name__)
Callback = Callable[[], None]

DELIVERY_TIMEOUT_S = 30.0
MAX_BATCH = 256
MAX_BATCH_BYTES = 1_000_000  # the stock transport's cost per message is quadratic beyond


class Timer:
    """A callback due at a time; cancelling it is enough, the heap drops it when it comes up."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Never call it; harmless when it has been called."""
        self.callback = None


class Loop:
    """Timers, posted callbacks, watched descriptors; :meth:`send` is the subclass's."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posted: deque[Callback] = deque()
        self._woken = False
        self._wake_lock = threading.Lock()
        self._closed = False
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._watched: dict[int, Callback] = {}
        self._turn_end: list[Callback] = []
        self._in_turn = False
        self.watch(self._wake_fd, self._run_posted)

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
        raise NotImplementedError

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`run_ready` has work."""
        return self._epoll.fileno()

    def post(self, callback: Callback) -> None:
        """Run ``callback`` on the loop soon; callable from any thread; dropped after its end."""
        self._posted.append(callback)
        if not self._woken:
            with self._wake_lock:  # a closed descriptor's number may be another's at once
                if not self._closed:
                    self._woken = True
                    os.eventfd_write(self._wake_fd, 1)

    def at_turn_end(self, callback: Callback) -> None:
        """Run ``callback`` when the current message or callback has been dealt with."""
        self._turn_end.append(callback)

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Run ``callback`` in ``delay_s`` seconds; a millisecond or two late at worst when idle."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def watch(self, fd: int, callback: Callback) -> None:
        """Run ``callback`` whenever ``fd`` is readable, until :meth:`unwatch`."""
        self._watched[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``; harmless when it is not watched."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def watch_process(self, process: Process, on_exit: Callback) -> Callback:
        """Run ``on_exit`` once when the process ends (soon, when it has); return a canceller."""
        fd = open_pidfd(process)
        if fd is None:
            timer = self.call_later(0, on_exit)
            return timer.cancel

        def cancel() -> None:
            if fd in self._watched:
                self.unwatch(fd)
                os.close(fd)

        def exited() -> None:
            cancel()
            on_exit()

        self.watch(fd, exited)
        return cancel

    def run_ready(self) -> None:
        """Run the callbacks of readable descriptors."""
        for fd, _ in self._epoll.poll(0):
            callback = self._watched.get(fd)
            if callback is not None:
                self._guarded(callback)

    def begin_turn(self) -> None:
        """Note that a message is being handled, and :meth:`finish_turn` will follow."""
        self._in_turn = True

    def finish_turn(self) -> None:
        """Run due timers and end-of-turn callbacks; after every message and every pass."""
        self._in_turn = True
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                callback, timer.callback = timer.callback, None
                self._guarded(callback)
        while self._turn_end:
            callbacks, self._turn_end = self._turn_end, []
            for callback in callbacks:
                self._guarded(callback)
        self._in_turn = False

    def next_timer_at(self) -> float | None:
        """Return when the next timer is due, in ``time.monotonic()`` seconds."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def close(self) -> None:
        """Close the loop's own descriptors."""
        with self._wake_lock:
            self._closed = True
            for fd in list(self._watched):
                self.unwatch(fd)
                os.close(fd)
        self._epoll.close()

    def _run_posted(self) -> None:
        os.eventfd_read(self._wake_fd)
        # Only now: what is posted from here on wakes again. Reset before the read, a wake-up in
        # between would be read away with the flag left set, and no later post would ever wake us.
        self._woken = False
        while self._posted:
            self._guarded(self._posted.popleft())

    def _guarded(self, callback: Callback) -> None:
        # An exception must not reach Thespian, which would run the whole message again.
        before, self._in_turn = self._in_turn, True
        try:
            callback()
        except Exception:
            logger.exception("callback %r failed", callback)
        self._in_turn = before

    def _delivered(self, callback: Callback | None) -> Callback | None:
        """Make of a delivery's callback what Thespian may call, in a turn of ours or between two.

        Between two, a turn is finished for it: nothing else would before the next message comes.
        """
        if callback is None:
            return None

        def run() -> None:
            in_turn, due_at = self._in_turn, self.next_timer_at()
            self._guarded(callback)
            if in_turn:
                return
            self.finish_turn()
            if self.next_timer_at() != due_at:
                self.post(_nothing)  # for a loop that had chosen how long to sleep

        return run


def _nothing() -> None:
    return None


def intent(
    target: Address, message: Any, on_sent: Callback | None, on_failed: Callback | None
) -> Any:
    """Make Thespian's description of one delivery, with our callbacks and time limit."""
    return TransmitIntent(
        target,
        message,
        onSuccess=(lambda _result, _intent: on_sent()) if on_sent else None,
        onError=(lambda _result, _intent: on_failed()) if on_failed else None,
        maxPeriod=timedelta(seconds=DELIVERY_TIMEOUT_S),
    )


class ActorLoop(Loop):
    """The loop inside an actor; the actor calls it around each message."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager  # Thespian's ActorManager of this process
        self._wakeup_at: float | None = None

    def send(
        self,
        target: Address,
        message: Any,
        on_sent: Callback | None = None,
        on_failed: Callback | None = None,
    ) -> None:
        """See :meth:`Loop.send`."""
        sent, failed = self._delivered(on_sent), self._delivered(on_failed)
        self._manager._send_intent(intent(target, message, sent, failed))

    def woken(self) -> None:
        """Note that Thespian's wake-up came."""
        self._wakeup_at = None

    def finish_turn(self) -> None:
        """See :meth:`Loop.finish_turn`; then make sure that a wake-up is due for the next timer."""
        super().finish_turn()
        due = self.next_timer_at()
        if due is None:
            return
        now = time.monotonic()
        # Thespian loses a wake-up that expires while it drains an overload: an overdue one counts
        # as lost.
        if self._wakeup_at is None or due < self._wakeup_at or self._wakeup_at < now - 0.05:
            self._wakeup_at = max(due, now)
            self._manager.wakeupAfter(timedelta(seconds=max(due - now, 0.001)))


class Outbox:
    """What is to go to one target; one delivery at a time, and what gathers meanwhile goes next.

    ``pack`` makes a message of a list of items. ``on_sent`` and ``on_failed`` get the items of each
    delivery. Items put in the same turn travel together, as far as their bytes, told by ``weigh``,
    keep the message at a size that the transport is good at.
    """

    def __init__(
        self,
        loop: Loop,
        target: Address,
        pack: Callable[[list[Any]], Any],
        on_sent: Callable[[list[Any]], None] | None = None,
        on_failed: Callable[[list[Any]], None] | None = None,
        weigh: Callable[[Any], int] = lambda _item: 0,
    ) -> None:
        self._loop = loop
        self._target = target
        self._pack = pack
        self._weigh = weigh
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._items: list[Any] = []
        self._under_way = False
        self._flush_due = False

    def put(self, item: Any) -> None:
        """Add an item; it leaves at the end of this turn, or when the present delivery is done."""
        self._items.append(item)
        if not (self._under_way or self._flush_due):
            self._flush_due = True
            self._loop.at_turn_end(self._flush)

    def drop(self) -> list[Any]:
        """Forget and return what has not been given to the transport; for a dead target."""
        items, self._items = self._items, []
        return items

    def _flush(self) -> None:
        self._flush_due = False
        if self._under_way or not self._items:
            return
        count = self._batch_length()
        items, self._items = self._items[:count], self._items[count:]
        self._under_way = True
        self._loop.send(
            self._target,
            self._pack(items),
            lambda: self._done(items, self._on_sent),
            lambda: self._done(items, self._on_failed),
        )

    def _batch_length(self) -> int:
        size = 0
        for count, item in enumerate(self._items[:MAX_BATCH]):
            size += self._weigh(item)
            if count and size > MAX_BATCH_BYTES:
                return count
        return min(len(self._items), MAX_BATCH)

    def _done(self, items: list[Any], callback: Callable[[list[Any]], None] | None) -> None:
        self._under_way = False
        if callback is not None:
            callback(items)
        self._flush()
