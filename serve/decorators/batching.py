"""``serve.batch``: calls with one item each, run together as calls with lists.

Theory of operation. The decorator leaves a function of the same name that takes one item. Each
instance (or function) has one queue per event loop it is called on; the queue and all it holds are
used on that loop alone. :mod:`greenroom.core.batching` decides which items make a batch, and when.

A batch runs as a task, in the context of its first item: its request id and model are that item's.
Calls for different models, and for shadows and real queries, never share a batch. A batch is
cancelled only when all its items are.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Hashable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar, overload

from greenroom.actors.replica import context as user_context, metrics
from greenroom.actors.replica.context import RunningQuery
from greenroom.actors.runtime import tracing
from greenroom.core.batching import Batches
from greenroom.core.errors import GreenroomError
from greenroom.core.validation import is_number
from greenroom.serve.decorators.per_instance import (
    MAX_AHEAD,
    Args,
    Decorated,
    End,
    Failure,
    check_whole,
    received,
    streaming,
)

_ENDS = (StopIteration, StopAsyncIteration)


# --- What type checkers see -------------------------------------------------------------------

A = TypeVar("A")
B = TypeVar("B")
S = TypeVar("S")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
Item_P = ParamSpec("Item_P")


class _Limited(Protocol):
    def set_max_batch_size(self, max_batch_size: int) -> None: ...

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None: ...


class _Batched(_Limited, Protocol[Item_P, R_co]):
    """A batch function as it is called: with one item. Its limits can be changed."""

    def __call__(self, *args: Item_P.args, **kwargs: Item_P.kwargs) -> R_co: ...


class _BatchedMethod(_Limited, Protocol[S_contra, Item_P, R_co]):
    """The same for a method, which is called without its instance."""

    def __call__(
        self, instance: S_contra, /, *args: Item_P.args, **kwargs: Item_P.kwargs
    ) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(self, instance: Any, owner: type, /) -> _Batched[Item_P, R_co]: ...


class Batch(Protocol):
    """The decorator: types functions of one list or of two, and methods of one.

    Functions of more lists are untyped: no type checker can take the lists off a signature.
    """

    @overload
    def __call__(
        self, function: Callable[[list[A]], Coroutine[Any, Any, Sequence[R]]], /
    ) -> _Batched[[A], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A]], AsyncIterator[Sequence[R]]], /
    ) -> _Batched[[A], AsyncGenerator[R, None]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B]], Coroutine[Any, Any, Sequence[R]]], /
    ) -> _Batched[[A, B], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], Coroutine[Any, Any, Sequence[R]]], /
    ) -> _BatchedMethod[S, [A], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], AsyncIterator[Sequence[R]]], /
    ) -> _BatchedMethod[S, [A], AsyncGenerator[R, None]]: ...
    @overload
    def __call__(self, function: Callable[..., Any], /) -> Any: ...
    @overload
    def __call__(
        self,
        *,
        max_batch_size: int = ...,
        batch_wait_timeout_s: float = ...,
        max_concurrent_batches: int = ...,
        batch_size_fn: Callable[[list[Any]], float] | None = ...,
    ) -> Batch: ...


def _typed(decorator: Any) -> Batch:
    typed: Batch = decorator
    return typed


# --- The decorator ----------------------------------------------------------------------------


@_typed
def batch(
    function: Any = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
) -> Any:
    """Turn an async function or method that takes lists into one that takes one item.

    A batch begins when it has ``max_batch_size`` items, or ``batch_wait_timeout_s`` after its first
    one came, as soon as fewer than ``max_concurrent_batches`` of its model run. With
    ``batch_size_fn``, which is given a list of items, ``max_batch_size`` limits what it returns.
    Each parameter of the function becomes a list with one value per item. The function returns as
    many results in that order: an Exception among them is raised for its item only, one that the
    function raises for all. An async generator yields such lists, in which StopIteration ends an
    item's stream.

    ``set_max_batch_size(n)`` and ``set_batch_wait_timeout_s(s)`` of the decorated function change
    the limits of all instances in this process, from any thread. TypeError or ValueError for what
    cannot be decorated and for limits that make no sense.
    """
    check_whole("max_batch_size", max_batch_size, 1)
    _check_wait(batch_wait_timeout_s)
    check_whole("max_concurrent_batches", max_concurrent_batches, 1)
    if batch_size_fn is not None and not callable(batch_size_fn):
        raise TypeError(f"batch_size_fn={batch_size_fn!r}: must be a function of a list, or None")

    def decorate(target: Any) -> Any:
        _check_function(target)
        limits = max_batch_size, float(batch_wait_timeout_s), max_concurrent_batches
        return _Batching(target, _Options(*limits, batch_size_fn)).wrapped()

    return decorate if function is None else decorate(function)


def _check_wait(value: Any) -> None:
    if not is_number(value):
        raise TypeError(f"batch_wait_timeout_s={value!r}: must be a number of seconds, 0 or more")
    if not 0 <= value < math.inf:
        raise ValueError(f"batch_wait_timeout_s={value}: must be a number of seconds, 0 or more")


def _check_function(target: Any) -> None:
    if not (inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target)):
        raise TypeError(
            f"@serve.batch is for functions and methods made by 'async def', not for {target!r}"
        )
    parameters = list(inspect.signature(target).parameters.values())
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise TypeError(
                f"{target.__qualname__}: a batch function cannot take {parameter}: each of its "
                f"parameters becomes a list and needs a name"
            )
    if not parameters or (len(parameters) == 1 and parameters[0].name == "self"):
        raise TypeError(f"{target.__qualname__}: a batch function needs a parameter for the list")


class _Options(NamedTuple):
    max_batch_size: int
    batch_wait_timeout_s: float
    max_concurrent_batches: int
    batch_size_fn: Callable[[list[Any]], float] | None


class _Batching(Decorated["_Queue", _Options]):
    """A batch function, its options, and the queues of its instances."""

    decorator = "serve.batch"

    def wrapped(self) -> Any:
        """Return what users call in place of the batch function."""

        @functools.wraps(self.function)
        async def returning(*args: Any, **kwargs: Any) -> Any:
            call = self._begin(_Call, *self.split(returning, args, kwargs))
            try:
                result = await call.future
            except asyncio.CancelledError:  # the caller's own: a batch's is a GreenroomError
                call.leave()
                raise
            return received(result)

        wrapper: Any = returning
        if inspect.isasyncgenfunction(self.function):
            wrapper = streaming(self, partial(self._begin, _StreamCall))
        wrapper.set_max_batch_size = self.set_max_batch_size
        wrapper.set_batch_wait_timeout_s = self.set_batch_wait_timeout_s
        return self.known_by(wrapper)

    def make(self, loop: asyncio.AbstractEventLoop) -> _Queue:
        """Make an instance's queue."""
        return _Queue(self, loop)

    def call(self, calls: list[_Call]) -> Any:
        """Call the batch function with a list for each parameter."""
        owner = calls[0].owner
        columns = zip(*[call.values for call in calls], strict=True)
        positional, named = [], {}
        for parameter, column in zip(self.parameters(owner), columns, strict=True):
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = list(column)
            else:
                positional.append(list(column))
        return self.function(*owner, *positional, **named)

    @property
    def size_of(self) -> Callable[[list[_Call]], float] | None:
        """What returns the size of some calls; None to count them."""
        size_fn = self.options.batch_size_fn
        if size_fn is None:
            return None
        return lambda calls: size_fn([call.values[0] for call in calls])

    def _begin(self, kind: type[C], owner: Args, values: Args) -> C:
        call = kind(self.state(owner), owner, values)
        call.queue.add(call)
        return call

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Change the limit; ValueError below 1."""
        check_whole("max_batch_size", max_batch_size, 1)
        self._set(max_batch_size=max_batch_size)

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Change how long the first item of a batch waits for others; ValueError below 0."""
        _check_wait(batch_wait_timeout_s)
        self._set(batch_wait_timeout_s=float(batch_wait_timeout_s))

    def _set(self, **limits: float) -> None:
        for queue in self.change(**limits):
            queue.limits_changed()


class _Call:
    """One call, and the future of its result."""

    __slots__ = (
        *("added_at", "batch", "context", "future", "group", "is_wanted"),
        *("owner", "query", "queue", "values"),
    )

    def __init__(self, queue: _Queue, owner: Args, values: Args) -> None:
        self.queue = queue
        self.owner = owner  # the instance, in a tuple; empty for a function
        self.values = values  # of the parameters
        self.query = user_context.running.get()
        self.group = user_context.batching_group(self.query)  # what a batch's calls have in common
        self.context = copy_context()
        self.batch: _Batch | None = None  # once it has begun
        self.is_wanted = True
        self.added_at = queue.loop.time()
        self.future: asyncio.Future[Any] = queue.loop.create_future()

    @property
    def is_behind(self) -> bool:
        """Whether the batch has to wait for the caller."""
        return False

    def put(self, result: Any) -> None:
        """Give the caller its result, or a Failure."""
        if not self.future.done():
            self.future.set_result(result)

    def give(self, result: Any) -> None:
        """Give the caller what the batch function made for it."""
        self.put(Failure.of(result) if isinstance(result, Exception) else result)

    def leave(self) -> None:
        """Want nothing more. A batch in which nothing is wanted is cancelled."""
        was_wanted, self.is_wanted = self.is_wanted, False
        if self.batch is None:
            self.queue.remove(self)
        elif was_wanted:
            self.batch.left()


class _StreamCall(_Call):
    """One call of a generator, and what arrives for its caller."""

    __slots__ = ("arrived",)

    def __init__(self, queue: _Queue, owner: Args, values: Args) -> None:
        super().__init__(queue, owner, values)
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, result: Any) -> None:
        """Give the caller another value, a Failure or End."""
        if self.is_wanted:
            self.is_wanted = not (result is End or type(result) is Failure)
            self.arrived.put_nowait(result)

    def give(self, result: Any) -> None:
        """Give the caller another value; StopIteration, or its class, ends the stream."""
        is_end = result in _ENDS if isinstance(result, type) else isinstance(result, _ENDS)
        self.put(End) if is_end else super().give(result)

    @property
    def is_behind(self) -> bool:
        """Whether the batch has to wait for the caller."""
        return self.is_wanted and self.arrived.qsize() >= MAX_AHEAD

    def taken(self) -> None:
        """Let a batch go on that has waited for the caller."""
        if self.batch is not None:
            self.batch.moved.set()


C = TypeVar("C", bound=_Call)


class _Batch:
    """A batch that has begun."""

    def __init__(self, batching: _Batching, calls: list[_Call]) -> None:
        self._batching = batching
        self.calls = calls
        self.moved = asyncio.Event()  # set when a caller has taken a value, or left
        self._query: RunningQuery | None = None  # what its calls through handles belong to
        for call in calls:
            call.batch = self
        self.task = calls[0].context.run(asyncio.create_task, self._run())

    @property
    def is_wanted(self) -> bool:
        """Whether any caller waits for more."""
        return any(call.is_wanted for call in self.calls)

    def left(self) -> None:
        """End the batch once all callers have left; harmless when it is over."""
        self.moved.set()
        if not self.task.done() and not self.is_wanted:
            self.task.cancel()
            if self._query is not None:
                self._query.cancel_calls()

    async def _run(self) -> None:
        self._query = user_context.begin_batch(call.query for call in self.calls)
        if tracing.active is None:
            await self._call()
            return
        spans = [None if call.query is None else call.query.span for call in self.calls]
        with tracing.active.batch(self._batching.name, spans):
            await self._call()

    async def _call(self) -> None:
        try:
            called = self._batching.call(self.calls)
            if isinstance(called, AsyncGenerator):
                await self._stream(called)
            else:
                self._put(await called, "returned")
        except asyncio.CancelledError as error:
            if not self.is_wanted:
                raise
            failure = GreenroomError(f"{self._batching.name} was cancelled with a batch under way")
            failure.__cause__ = error
            self._put_all(Failure.of(failure))
        except BaseException as error:  # SystemExit too ends its own queries, and nothing else
            self._put_all(Failure.of(error))
        finally:
            if self._query is not None:
                self._query.has_ended = True

    async def _stream(self, called: AsyncGenerator[Any, None]) -> None:
        async with aclosing(called) as steps:
            async for step in steps:
                self._put(step, "yielded")
                while any(call.is_behind for call in self.calls):
                    self.moved.clear()
                    await self.moved.wait()
                if not self.is_wanted:
                    return
        self._put_all(End)

    def _put_all(self, result: Any) -> None:
        for call in self.calls:
            call.put(result)

    def _put(self, results: Any, did: str) -> None:
        """Give each caller its result; GreenroomError where that does not work out."""
        name, number = self._batching.name, len(self.calls)
        is_list = hasattr(results, "__len__") and hasattr(results, "__getitem__")
        if not is_list or isinstance(results, str | bytes | Mapping):
            raise GreenroomError(
                f"{name} {did} a {type(results).__name__}; a batch function gives a list with one "
                "result per item"
            )
        if len(results) != number:
            raise GreenroomError(
                f"{name} {did} {len(results)} results for a batch of {number} items; it must give "
                "one per item, in their order"
            )
        for call, result in zip(self.calls, results, strict=True):
            call.give(result)


class _Queue:
    """What waits for one instance's batch function on one loop, and how many batches run."""

    def __init__(self, batching: _Batching, loop: asyncio.AbstractEventLoop) -> None:
        self._batching = batching
        # A strong reference would keep the loop, which is the key of this in a weak dict, for ever.
        self._loop = weakref.ref(loop)
        self._batches: Batches[_Call] = Batches(*batching.options[:3], batching.size_of)
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._running: set[_Batch] = set()  # loops do not keep their tasks alive

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; to ask asyncio for the running one takes a system call."""
        loop = self._loop()
        assert loop is not None, "it runs"
        return loop

    def add(self, call: _Call) -> None:
        """Add a call that waits."""
        if self._batches.add(call, call.group, call.added_at):
            self._arm()

    def remove(self, call: _Call) -> None:
        """Forget a call that waits."""
        self._batches.remove(call, call.group)
        self._arm()

    def limits_changed(self) -> None:
        """Take the batch function's limits; callable from any thread."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return
        if asyncio._get_running_loop() is loop:
            self._take_limits()
        else:
            loop.call_soon_threadsafe(self._take_limits)

    def _take_limits(self) -> None:
        self._batches.set_limits(*self._batching.options[:2])
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the next batch; fail calls that fit in none.

        No batch begins at once: calls made in the same pass of the loop belong in one batch.
        """
        for call, error in self._batches.refused:
            call.put(Failure.of(error))
        self._batches.refused.clear()
        due = self._batches.due_at()
        if self._timer is not None:
            if due == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            loop = asyncio.get_running_loop()
            is_now = due <= loop.time()
            self._timer = loop.call_soon(self._begin) if is_now else loop.call_at(due, self._begin)
            self._timer_at = due

    def _begin(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while (calls := self._batches.take(now)) is not None:
            metrics.batch_begun(self._batching.name, len(calls), [now - c.added_at for c in calls])
            batch = _Batch(self._batching, calls)
            self._running.add(batch)
            batch.task.add_done_callback(partial(self._ended, batch, calls[0].group))
        self._arm()

    def _ended(self, batch: _Batch, group: Hashable, _task: asyncio.Task[None]) -> None:
        """Free the place of a batch, even of one that was cancelled before it ran at all."""
        self._running.discard(batch)
        batch.calls.clear()  # a cycle, else, which takes the collector a seventh of a request
        self._batches.ended(group)
        self._arm()
