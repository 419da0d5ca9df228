"""``serve.continuous_batch``: one step function over all streams that are live.

Theory of operation. A call of the decorated function begins a *stream*, which waits for a place in
the batch of its instance (core/batching.py). While there are streams, one task admits those that
wait, calls the step function with the live ones, and hands out what they were given, round by
round. A stream that is left in the middle of a step leaves the batch after it. So the step function
owns the streams while it runs, on whichever thread, and nothing else needs a lock.

A stream whose caller is ``MAX_AHEAD`` values behind keeps its place and is not stepped until the
caller has caught up: a slow client holds up no other one.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from contextvars import Context
from typing import Any, Generic, NamedTuple, TypeVar

from greenroom.actors.replica import context as user_context, metrics
from greenroom.core.batching import ContinuousBatch
from greenroom.core.errors import BackPressureError, GreenroomError, QueryTimeoutError
from greenroom.serve.decorators.per_instance import (
    MAX_AHEAD,
    Args,
    Decorated,
    End,
    Failure,
    check_whole,
    streaming,
)

I = TypeVar("I")  # noqa: E741  # the item
V = TypeVar("V")


class Stream(Generic[I, V]):
    """One call of a continuous batch, as its step function sees it.

    ``item`` is what the caller passed. ``state`` is the step function's own, None at first: a cache
    of keys and values, say. It goes with the stream.
    """

    __slots__ = ("_made", "item", "state")

    def __init__(self, item: I) -> None:
        self.item = item
        self.state: Any = None
        self._made: list[Any] = []  # by the present step

    def put(self, value: V) -> None:
        """Give the caller a value; a step may give none, or several."""
        self._made.append(value)

    def end(self) -> None:
        """End the stream after the values given so far; it is not stepped again."""
        self._made.append(End)

    def fail(self, error: Exception) -> None:
        """End the stream with an exception, which its caller raises."""
        self._made.append(Failure.of(error))


class _Call(Stream[Any, Any]):
    """A stream, and what is on its way to the caller."""

    __slots__ = ("_batch", "added_at", "arrived")

    def __init__(self, batch: _Batch, item: Any) -> None:
        super().__init__(item)
        self.added_at = time.monotonic()
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._batch = batch

    def hand_out(self, failure: Failure | None) -> bool:
        """Give the caller what was made, or a step's failure; return whether that was the last."""
        made, self._made = self._made, []
        for value in made if failure is None else [failure]:
            self.arrived.put_nowait(value)
            if value is End or type(value) is Failure:
                return True
        return False

    def taken(self) -> None:
        """Let the batch go on that has waited for the caller."""
        self._batch.wake()

    def leave(self) -> None:
        """Leave the batch."""
        self._batch.leave(self)


def continuous_batch(function: Any = None, /, *, max_size: int = 16, max_waiting: int = 100) -> Any:
    """Turn a step function over live streams into a function that streams.

    The function or method takes a list of :class:`Stream`, does one step with each (puts values,
    ends it, or fails it), and returns None; it is called again as long as there are streams. If it
    is no coroutine function it runs on a thread. What it raises, all streams of that step raise,
    and the others go on. What is decorated takes one item and is an async generator of the values.

    Up to ``max_size`` streams are live, ``max_waiting`` more wait for a place, first in, first out,
    and beyond these a call raises BackPressureError. Between steps new streams join; those that
    have ended, were left by their caller, or are past their query's deadline (which raises
    QueryTimeoutError) leave. TypeError or ValueError for what cannot be decorated.
    """
    check_whole("max_size", max_size, 1)
    check_whole("max_waiting", max_waiting, 0)

    def decorate(target: Any) -> Any:
        _check_function(target)
        decorated = _Continuous(target, _Options(max_size, max_waiting))
        return decorated.known_by(streaming(decorated, decorated.begin))

    return decorate if function is None else decorate(function)


def _check_function(target: Any) -> None:
    if not inspect.isfunction(target) or inspect.isasyncgenfunction(target):
        raise TypeError(f"@serve.continuous_batch is for functions and methods, not for {target!r}")
    if inspect.isgeneratorfunction(target):
        raise TypeError(f"{target.__qualname__}: a step function puts values, and yields none")
    names = [name for name in inspect.signature(target).parameters if name != "self"]
    if len(names) != 1:
        raise TypeError(f"{target.__qualname__}: a step function takes one argument, the streams")


class _Options(NamedTuple):
    max_size: int
    max_waiting: int


class _Continuous(Decorated["_Batch", _Options]):
    """A step function, its options, and the batches of its instances."""

    decorator = "serve.continuous_batch"

    def make(self, _loop: asyncio.AbstractEventLoop) -> _Batch:
        """Make an instance's batch."""
        return _Batch(self)

    def begin(self, owner: Args, values: Args) -> _Call:
        """Begin a stream."""
        return self.state(owner).begin(owner, values[0])


class _Batch:
    """The streams of one instance on one loop, and the task that steps them while there are any."""

    def __init__(self, continuous: _Continuous) -> None:
        self._function = continuous.function
        self._name = continuous.name
        self._max_waiting = continuous.options.max_waiting
        self._streams: ContinuousBatch[_Call] = ContinuousBatch(*continuous.options)
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None  # an Event would keep the loop alive

    def begin(self, owner: tuple[Any, ...], item: Any) -> _Call:
        """Begin a stream; BackPressureError where too many wait."""
        call, query = _Call(self, item), user_context.running.get()
        if not self._streams.add(call, None if query is None else query.deadline_at):
            raise BackPressureError(f"{self._name}: {self._max_waiting} streams wait for a place")
        if self._task is None:
            # Of no query's context, except for what stands for the replica in tests.
            context = Context()
            context.run(user_context.local_replica.set, user_context.local_replica.get())
            self._task = context.run(asyncio.create_task, self._run(owner))
        self.wake()
        return call

    def leave(self, call: _Call) -> None:
        """Forget a stream that nothing reads any more."""
        self._streams.remove(call)
        self.wake()

    def wake(self) -> None:
        """Look again whether there is a stream to step."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _run(self, owner: tuple[Any, ...]) -> None:
        streams = self._streams
        try:
            while streams.live or streams.waiting:
                for call in streams.expire(time.monotonic()):
                    late = QueryTimeoutError("the deadline passed before the stream's end")
                    call.arrived.put_nowait(Failure.of(late))
                admitted = streams.admit()
                ready = [call for call in streams.live if call.arrived.qsize() < MAX_AHEAD]
                if ready:
                    now = time.monotonic()
                    waits_s = [now - call.added_at for call in admitted]
                    metrics.batch_begun(self._name, len(ready), waits_s)
                    await self._step(owner, ready)
                    await asyncio.sleep(0)  # callers may leave and new ones join
                elif streams.live:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self._task = self._waiter = None

    async def _step(self, owner: Args, calls: list[_Call]) -> None:
        failure = await self._failure(*owner, calls.copy())  # user code may change its list
        for call in calls:
            if call.hand_out(failure):
                self._streams.remove(call)

    async def _failure(self, *arguments: Any) -> Failure | None:
        """Call the step function, and return what it raised."""
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(*arguments)
            else:
                result = await asyncio.to_thread(self._function, *arguments)
            if result is None:
                return None
            kind = type(result).__name__
            text = f"{self._name} returned a {kind}: a step puts values into streams"
            return Failure.of(GreenroomError(text))
        except asyncio.CancelledError as error:  # by user code, or with the loop
            failure = GreenroomError(f"{self._name} was cancelled with streams under way")
            failure.__cause__ = error
            return Failure.of(failure)
        except BaseException as error:  # SystemExit too ends its own streams, and nothing else
            return Failure.of(error)
