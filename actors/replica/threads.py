"""The threads of user code: the event loop's, and those of sync calls.

Theory of operation. Calls go to the threads in a queue, and their results come back in another:
the first result that is put into an empty one wakes the event loop, and the loop takes all that
are there by then. So under load a call costs no wake-up of its own in either direction.

A call that takes less time than this way to another thread and back is run by the loop's thread,
between two turns of the loop. The mean of the calls before says what to expect, and a *watcher*
is there for when that was wrong: it takes over the loop while the thread that had it goes on with
its call (Leader/Followers: Schmidt et al., Pattern-Oriented Software Architecture 2). A loop that
may change its thread is nothing for async code, so this is for deployments that have none.

With room for a single call at a time there is a single thread, for all that is ever called on it.
Code that is bound to its thread, such as CUDA contexts and sqlite3 connections, then needs no care.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import copy_context
from typing import Any, NamedTuple

from greenroom.actors.runtime.logs import one_record
from greenroom.actors.runtime.loop import new_event_loop

MAX_THREADS = 32
NO_KWARGS: dict[str, Any] = {}
SHORT_S = 0.0001  # about what it costs to have a call run by another thread
TURN_S = 0.001  # after which the loop has a turn, whatever short calls there are
COUNTED = 16  # the share of a call in the mean is one of so many
WATCH_S = 0.005  # short calls, a turn's, that the watcher finds running twice are not short
END_TIMEOUT_S = 1.0  # for cancelled tasks to end; those that will not are dropped
# The message thread waits for the interpreter lock at each of its twenty or so system calls per
# message, and asks for it only after a switch interval in which no thread released it. User code
# that releases it for a moment more often than that, say with a stat() per millisecond, starves it:
# with 1 ms, control messages were 4 s late; with 20 us, below 20 ms. Shorter intervals cost
# computing threads a third of their speed.
SWITCH_INTERVAL_S = 0.00002
# A thread asks for the lock after the interval and its timer slack. User code's threads have the
# slack that Linux gives: with as little as the message thread, the loop and short sync calls took
# the lock from each other so often that 16 connections cost half as much CPU time again.
MESSAGES_SLACK_NS, USERS_SLACK_NS = 1, 50_000
PR_SET_TIMERSLACK = 29  # prctl(2); for this thread, and for those that it starts


def yield_to_messages() -> None:
    """Let this thread, the message loop's, have the interpreter soon whatever user code does."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _set_timer_slack(MESSAGES_SLACK_NS)


def _set_timer_slack(nanoseconds: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


class Stuck(NamedTuple):
    """How sync calls are stuck; zeros where they are not."""

    busy_s: float = 0.0  # all threads are taken, calls wait, and none has ended for so long
    threads: int = 0
    waiting: int = 0
    unwanted_s: float = 0.0  # so long all that may run is what no caller waits for any more


class _Call:
    """A call on its way to a thread and back."""

    __slots__ = ("args", "claimed", "context", "function", "is_over", "kwargs", "outcome", "result")

    def __init__(self, function: Any, args: Any, kwargs: Any, result: asyncio.Future[Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.context = copy_context()
        self.result = result  # what the loop waits for
        self.claimed = threading.Lock()  # taken by the thread that runs it, or to withdraw it
        self.outcome: tuple[Any, BaseException | None] = None, None
        self.is_over = False

    def run(self) -> None:
        self.outcome = self.context.run(outcome_of, self.function, self.args, self.kwargs)


class Threads:
    """Runs sync calls for an event loop, on at most ``size`` threads.

    All methods run on the loop, but for :meth:`stuck`. A call that has begun cannot be ended. When
    its caller abandons it, it is *unwanted*, and holds its thread until it returns.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int = MAX_THREADS) -> None:
        self.size = size  # may grow, and may be set by any thread
        self.taken = 0  # calls that run, or wait for a thread
        self.mean_s = 1.0  # how long calls take, the latest counting most; at first not short
        self._loop = loop
        self.takes_short_calls = False  # for run_short_call, for which the loop has to be stopped
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._short: deque[_Call] = deque()
        self._results: deque[_Call] = deque()
        self._is_loop_notified = False  # of results that it has not taken
        self._started = 0
        self._unwanted = 0
        self._ended_at = self._full_at = self._abandoned_at = time.monotonic()

    async def run(self, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        """Call on a thread; an awaitable that comes of it is awaited here."""
        call = _Call(function, args, kwargs, self._loop.create_future())
        self.taken += 1
        if self.taken == self.size + 1:
            self._full_at = time.monotonic()
        try:
            if self.mean_s < SHORT_S and self.takes_short_calls and self.size > 1:
                self._short.append(call)
                self._loop.stop()
            else:
                self._hand_over(call)
            result, error = await call.result
        except asyncio.CancelledError:
            if not call.claimed.acquire(blocking=False):
                await self._end_of(call)
            raise
        finally:
            self.taken -= 1
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    def _hand_over(self, call: _Call) -> None:
        if self._started < min(self.taken, self.size):  # never more than were let in
            name = f"user_{self._started + 1}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
            except RuntimeError:  # the system gives no more; those that there are will do
                if not self._started:
                    raise
        self._calls.put(call)

    async def _end_of(self, call: _Call) -> None:
        """Wait for a call that runs, though its result is no longer wanted."""
        if call.is_over:
            return
        call.result = self._loop.create_future()
        self._unwanted += 1
        self._abandoned_at = time.monotonic()
        try:
            await call.result
        finally:
            self._unwanted -= 1

    async def iterate(self, iterator: Iterator[Any]) -> AsyncIterator[Any]:
        """Run a generator on the threads, step by step."""
        end = object()
        try:
            while (item := await self.run(next, (iterator, end))) is not end:
                yield item
        finally:
            if hasattr(iterator, "close"):
                await self.run(iterator.close, ())

    def stuck(self, slots: int, now: float) -> Stuck:
        """Return how calls are stuck, where ``slots`` may run at once; from any thread."""
        waiting = max(self.taken - self.size, 0)
        is_unwanted = self._unwanted >= min(slots, self.size)
        return Stuck(
            busy_s=now - max(self._ended_at, self._full_at) if waiting else 0.0,
            threads=self.size,
            waiting=waiting,
            unwanted_s=now - max(self._ended_at, self._abandoned_at) if is_unwanted else 0.0,
        )

    def end(self) -> None:
        """End the threads when the calls that they have are over."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._run(call)
            self.notify_loop()
            del call  # nothing of it is kept until the next one comes

    def _run(self, call: _Call) -> None:
        if call.claimed.acquire(blocking=False):
            began_at = time.monotonic()
            call.run()
            self._ended_at = time.monotonic()
            self.mean_s += (self._ended_at - began_at - self.mean_s) / COUNTED
            self._results.append(call)

    def notify_loop(self) -> None:
        """Have the loop take the results; from any thread."""
        # Whoever finds this False has appended before the loop checked, or notifies it.
        if self._results and not self._is_loop_notified:
            self._is_loop_notified = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.take_results)

    def take_results(self) -> None:
        """Tell those who wait for calls that have returned."""
        self._is_loop_notified = False
        while self._results:
            call = self._results.popleft()
            call.is_over = True
            if not call.result.done():
                call.result.set_result(call.outcome)

    # --- Calls that the loop's thread runs between turns: see UserLoop --------------------------

    def run_short_call(self) -> bool:
        """Run a call that is to be short, if there is one, and return whether there was."""
        try:
            call = self._short.popleft()
        except IndexError:  # perhaps to hand_over_short_calls on another thread
            return False
        self._run(call)
        return True

    def has_short_calls(self) -> bool:
        """Return whether there are calls for :meth:`run_short_call`."""
        return bool(self._short)

    def hand_over_short_calls(self) -> None:
        """Give those to the threads: calls are not short any more."""
        self.mean_s = max(self.mean_s, 1.0)
        with contextlib.suppress(IndexError):  # to run_short_call on another thread
            while True:
                self._hand_over(self._short.popleft())


class UserLoop:
    """An event loop, the thread that has it, and the threads of sync calls.

    The process ends when user code closes the loop.
    """

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self.threads = Threads(self.loop)
        self.has_thread = False
        self._is_over = False
        # Of the short calls that run: who takes it has the loop after them.
        self._claim: threading.Lock | None = None
        self._has_watcher = False
        self._to_watch = threading.Event()

    def start(self) -> None:
        """Start the loop's thread."""
        self.has_thread = True
        self._start_thread(self._have_loop)

    def _start_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=_or_exit, args=(work,), name="user-loop", daemon=True).start()

    def end(self) -> None:
        """End the threads; whatever runs on the loop is cancelled. For a process that lives on."""
        self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_over = True
        self.threads.takes_short_calls = False
        self.loop.stop()

    def _have_loop(self) -> None:
        _set_timer_slack(USERS_SLACK_NS)
        while not (self._is_over or self.loop.is_closed()):
            self._run_until(None)
            if self.threads.has_short_calls() and not self._run_short_calls():
                return  # the watcher has the loop now
        if not self._is_over:
            os._exit(1)  # closed by user code: nothing can be answered any more
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self._run_until(asyncio.wait(tasks, timeout=END_TIMEOUT_S))
        self._run_until(self.loop.shutdown_asyncgens())
        self.threads.end()
        self.loop.close()
        self._to_watch.set()

    def _run_short_calls(self) -> bool:
        """Run short calls for a while; return whether this thread still has the loop then."""
        claim = self._claim = threading.Lock()  # before it checks whether it is watched: see _watch
        if not self._to_watch.is_set():
            self._to_watch.set()
            if not self._has_watcher:
                self._has_watcher = True
                self._start_watcher()
        until = time.monotonic() + TURN_S
        while time.monotonic() < until and self.threads.run_short_call():
            pass
        if not claim.acquire(blocking=False):
            self.threads.notify_loop()
            return False
        self._claim = None
        self.threads.take_results()
        if self.threads.has_short_calls():
            self.loop.stop()  # after the next turn
        return True

    def _start_watcher(self) -> None:
        try:
            self._start_thread(self._watch)
        except RuntimeError:  # the system gives no more: all calls go to the threads that there are
            self.threads.takes_short_calls = False

    def _watch(self) -> None:
        """Take over the loop when its thread does not come back from a call.

        That one sets its claim, then checks the event; this one clears it, then looks for a claim.
        """
        while not self.loop.is_closed():
            self._to_watch.wait()
            claim = self._claim
            time.sleep(WATCH_S)
            if claim is None:
                self._to_watch.clear()
                if self._claim is not None:
                    self._to_watch.set()
            elif claim is self._claim and claim.acquire(blocking=False):
                self._claim = None
                self._start_watcher()
                self.threads.take_results()
                self.threads.hand_over_short_calls()
                self._have_loop()
                return

    def _run_until(self, end: Coroutine[Any, Any, Any] | None) -> None:
        # A task of the user's own may raise SystemExit through the loop, or stop it.
        try:
            if end is None:
                self.loop.run_forever()
            else:
                self.loop.run_until_complete(end)
        except BaseException:
            _print_exception()


def _or_exit(work: Callable[[], None]) -> None:
    """Do what this process cannot do without: where it fails, the process ends, and is replaced."""
    try:
        work()
    except BaseException:
        _print_exception()
        os._exit(1)


def _print_exception() -> None:
    # The disk of the log may be full, and user code may have closed the file.
    with contextlib.suppress(OSError, ValueError):
        print(one_record(traceback.format_exc()), file=sys.stderr)  # noqa: T201


def outcome_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Call, and return the exception: asyncio's futures refuse StopIteration, and hang."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error
