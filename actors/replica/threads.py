"""The threads of sync user code.

Theory of operation. Calls go to the threads in a queue, and their results come back in another:
the first result that is put into an empty one wakes the event loop, and the loop takes all that
are there by then. So under load a call costs no wake-up of its own in either direction.

With room for a single call at a time there is a single thread, for all that is ever called on it.
Code that is bound to its thread, such as CUDA contexts and sqlite3 connections, then needs no care.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from typing import Any, NamedTuple

MAX_THREADS = 32
NO_KWARGS: dict[str, Any] = {}


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
    its caller gives it up, it is *unwanted*, and holds its thread until it returns.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int = MAX_THREADS) -> None:
        self.size = size  # may grow, and may be set by any thread
        self.taken = 0  # calls that run, or wait for a thread
        self._loop = loop
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._results: deque[_Call] = deque()
        self._is_loop_told = False  # of results that it has not taken
        self._started = 0
        self._unwanted = 0
        self._ended_at = self._full_at = self._abandoned_at = time.monotonic()

    async def run(self, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        """Call on a thread; an awaitable that comes of it is awaited here."""
        call = _Call(function, args, kwargs, self._loop.create_future())
        self.taken += 1
        if self.taken == self.size + 1:
            self._full_at = time.monotonic()
        if self._started < min(self.taken, self.size):  # never more than were let in
            self._started += 1
            name = f"user_{self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put(call)
        try:
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
            if call.claimed.acquire(blocking=False):
                call.run()
                self._ended_at = time.monotonic()
                self._results.append(call)
                # Whoever finds this False has appended before the loop looked, or tells it.
                if not self._is_loop_told:
                    self._is_loop_told = True
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._take_results)
            del call  # nothing of it is kept until the next one comes

    def _take_results(self) -> None:
        self._is_loop_told = False
        while self._results:
            call = self._results.popleft()
            call.is_over = True
            if not call.result.done():
                call.result.set_result(call.outcome)


def outcome_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Call, and return the exception: asyncio's futures refuse StopIteration, and hang."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error
