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
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar, overload

from greenroom.actors.replica import context as user_context, metrics
from greenroom.actors.replica.context import RunningQuery
from greenroom.actors.runtime import tracing
from greenroom.core.batching import Batches
from greenroom.core.errors import GreenroomError
from greenroom.core.validation import is_number
from greenroom.serve.decorators.per_instance import Outcome, PerInstance, check_whole

__all__ = ["batch"]

MAX_AHEAD = 256  # values of a streaming batch that one item may be behind
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


class Batched(_Limited, Protocol[Item_P, R_co]):
    """A batch function as it is called: with one item. Its limits can be changed."""

    def __call__(self, *args: Item_P.args, **kwargs: Item_P.kwargs) -> R_co: ...


class BatchedMethod(_Limited, Protocol[S_contra, Item_P, R_co]):
    """The same for a method, which is called without its instance."""

    def __call__(
        self, instance: S_contra, /, *args: Item_P.args, **kwargs: Item_P.kwargs
    ) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(self, instance: Any, owner: type, /) -> Batched[Item_P, R_co]: ...


class Batch(Protocol):
    """The decorator: types functions of one list or of two, and methods of one.

    Functions of more lists are untyped: no type checker can take the lists off a signature.
    """

    @overload
    def __call__(
        self, function: Callable[[list[A]], Coroutine[Any, Any, Sequence[R]]], /
    ) -> Batched[[A], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A]], AsyncIterator[Sequence[R]]], /
    ) -> Batched[[A], AsyncGenerator[R, None]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B]], Coroutine[Any, Any, Sequence[R]]], /
    ) -> Batched[[A, B], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], Coroutine[Any, Any, Sequence[R]]], /
    ) -> BatchedMethod[S, [A], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], AsyncIterator[Sequence[R]]], /
    ) -> BatchedMethod[S, [A], AsyncGenerator[R, None]]: ...
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
        limits = _Limits(max_batch_size, float(batch_wait_timeout_s))
        return _wrapped(_Batching(target, limits, max_concurrent_batches, batch_size_fn))

    return decorate if function is None else decorate(function)


class _Limits(NamedTuple):
    max_size: int
    wait_s: float


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


def _wrapped(batching: _Batching) -> Any:
    """Return what users call in place of the batch function."""

    @functools.wraps(batching.function)
    async def returning(*args: Any, **kwargs: Any) -> Any:
        item = batching.submit(_Call, returning, args, kwargs)
        try:
            return (await item.future).get()
        finally:
            item.leave()

    @functools.wraps(batching.function)
    async def streaming(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        item = batching.submit(_StreamCall, streaming, args, kwargs)
        try:
            while (outcome := await item.next()) is not None:
                yield outcome.get()
        finally:
            item.leave()

    wrapper: Any = streaming if inspect.isasyncgenfunction(batching.function) else returning
    wrapper.set_max_batch_size = batching.set_max_batch_size
    wrapper.set_batch_wait_timeout_s = batching.set_batch_wait_timeout_s
    return wrapper


class _Batching:
    """A batch function, its settings, and the queues of its instances. Pickles without queues."""

    def __init__(
        self, function: Any, limits: _Limits, max_batches: int, size_fn: Callable[..., float] | None
    ) -> None:
        self.function = function
        self.limits = limits
        self.max_batches = max_batches
        self._size_fn = size_fn
        self._queues: PerInstance[_Queue] = PerInstance("serve.batch", function)
        self._signatures: dict[int, inspect.Signature] = {}  # without so many first parameters

    def __getstate__(self) -> Any:
        return self.function, self.limits, self.max_batches, self._size_fn

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a copy begins anew

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Change the limit; ValueError below 1."""
        check_whole("max_batch_size", max_batch_size, 1)
        self._set(self.limits._replace(max_size=max_batch_size))

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Change how long the first item of a batch waits for others; ValueError below 0."""
        _check_wait(batch_wait_timeout_s)
        self._set(self.limits._replace(wait_s=float(batch_wait_timeout_s)))

    def _set(self, limits: _Limits) -> None:
        self.limits = limits
        for queue in self._queues.all():
            queue.limits_changed()

    def submit(
        self, kind: type[I], wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> I:
        """Put one call into the queue of its instance on the running loop."""
        owner = self._queues.owner(wrapper, args)
        values = self._values(self._signature(len(owner)), args[len(owner) :], kwargs)
        queue = self._queues.get(owner, lambda loop: _Queue(self, loop))
        item = kind(queue, owner, values)
        queue.add(item)
        return item

    @staticmethod
    def _values(
        signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return what a call gives each parameter; TypeError as for any function."""
        if len(args) == 1 == len(signature.parameters) and not kwargs:  # binding takes 8 us
            (parameter,) = signature.parameters.values()
            if parameter.kind is not parameter.KEYWORD_ONLY:
                return args
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def call(self, items: list[_Call]) -> Any:
        """Call the batch function with a list for each parameter."""
        owner = items[0].owner
        positional, named = [], {}
        for number, parameter in enumerate(self._signature(len(owner)).parameters.values()):
            column = [item.values[number] for item in items]
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = column
            else:
                positional.append(column)
        return self.function(*owner, *positional, **named)

    def _signature(self, skipped: int) -> inspect.Signature:
        """Return the parameters that become lists; TypeError where there is none."""
        signature = self._signatures.get(skipped)
        if signature is None:
            signature = inspect.signature(self.function)
            parameters = list(signature.parameters.values())[skipped:]
            if not parameters:
                raise TypeError(
                    f"{self.function.__qualname__}: a batch function needs a parameter for the list"
                )
            self._signatures[skipped] = signature = signature.replace(parameters=parameters)
        return signature

    @property
    def size_of(self) -> Callable[[list[_Call]], float] | None:
        """What tells the size of some items; None to count them."""
        size_fn = self._size_fn
        if size_fn is None:
            return None
        return lambda items: size_fn([item.values[0] for item in items])


class _Call:
    """One call, and the future of its outcome."""

    __slots__ = ("added_at", "batch", "context", "future", "owner", "query", "queue", "values")

    def __init__(self, queue: _Queue, owner: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.queue = queue
        self.owner = owner  # the instance, in a tuple; empty for a function
        self.values = values  # of the parameters
        self.context: Context = copy_context()
        self.query = user_context.running.get()
        self.batch: _Running | None = None  # once it has begun
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.added_at = 0.0

    @property
    def group(self) -> Any:
        """What the items of a batch have in common."""
        return user_context.batching_group(self.query)

    def put(self, outcome: Outcome | None) -> None:
        """Give the caller its outcome."""
        if not self.future.done() and outcome is not None:
            self.future.set_result(outcome)

    @property
    def is_behind(self) -> bool:
        """Whether the batch has to wait for the caller."""
        return False

    def leave(self) -> None:
        """Want nothing more. A batch with no other item is cancelled."""
        if self.batch is None:
            self.queue.remove(self)
        elif self.batch.drop(self) and not self.batch.wanted:
            self.batch.cancel()


class _StreamCall(_Call):
    """One call of a generator, and what arrives for its caller: outcomes, and None at the end."""

    __slots__ = ("arrived",)

    def __init__(self, queue: _Queue, owner: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        super().__init__(queue, owner, values)
        self.arrived: asyncio.Queue[Outcome | None] = asyncio.Queue()

    def put(self, outcome: Outcome | None) -> None:
        """Give the caller another outcome."""
        self.arrived.put_nowait(outcome)

    @property
    def is_behind(self) -> bool:
        """Whether the batch has to wait for the caller."""
        return self.arrived.qsize() >= MAX_AHEAD

    async def next(self) -> Outcome | None:
        """Wait for the next value; None at the end."""
        outcome = await self.arrived.get()
        if self.batch is not None:
            self.batch.moved.set()
        return outcome


I = TypeVar("I", bound=_Call)  # noqa: E741  # the item


class _Running:
    """A batch that has begun."""

    def __init__(self, batching: _Batching, items: list[_Call]) -> None:
        self._batching = batching
        self._name = batching.function.__qualname__
        self._items = items
        self.wanted: dict[_Call, None] = dict.fromkeys(items)  # those whose callers still wait
        self.moved = asyncio.Event()  # set when a caller has taken a value, or left
        self._task: asyncio.Task[None] | None = None
        self._query: RunningQuery | None = None  # what its calls through handles belong to

    def start(self) -> asyncio.Task[None]:
        """Begin, in the context of the first item."""
        for item in self._items:
            item.batch = self
        self._task = self._items[0].context.run(asyncio.create_task, self._run())
        return self._task

    def cancel(self) -> None:
        """End it: its callers have left; harmless when it is done."""
        if self._task is not None:
            self._task.cancel()
        if self._query is not None:
            self._query.cancel_calls()

    def drop(self, item: _Call) -> bool:
        """Give an item nothing any more; return whether there was anything to come."""
        self.moved.set()
        return self.wanted.pop(item, self) is None

    async def _run(self) -> None:
        self._query = user_context.begin_batch(item.query for item in self._items)
        if tracing.active is None:
            await self._call()
            return
        spans = [None if item.query is None else item.query.span for item in self._items]
        with tracing.active.batch(self._name, spans):
            await self._call()

    async def _call(self) -> None:
        try:
            called = self._batching.call(self._items)
            if isinstance(called, AsyncGenerator):
                await self._stream(called)
            else:
                for item, result in self._pairs(await called, "returned"):
                    item.put(_outcome(result))
                self.wanted.clear()
        except asyncio.CancelledError as error:
            if not self.wanted:
                raise
            failure = GreenroomError(f"{self._name} was cancelled with a batch under way")
            failure.__cause__ = error
            self._put_all(Outcome.failed(failure))
        except BaseException as error:  # SystemExit too ends its own queries, and nothing else
            self._put_all(Outcome.failed(error))
        finally:
            if self._query is not None:
                self._query.has_ended = True

    async def _stream(self, called: AsyncGenerator[Any, None]) -> None:
        async with aclosing(called) as steps:
            async for step in steps:
                for item, result in self._pairs(step, "yielded"):
                    if item in self.wanted:
                        self._put_step(item, result)
                if not self.wanted:
                    return
                while any(item.is_behind for item in self.wanted):
                    self.moved.clear()
                    await self.moved.wait()
        self._put_all(None)

    def _put_step(self, item: _Call, result: Any) -> None:
        if result in _ENDS if isinstance(result, type) else isinstance(result, _ENDS):
            item.put(None)
            self.drop(item)
        else:
            item.put(_outcome(result))
            if isinstance(result, Exception):
                self.drop(item)

    def _put_all(self, outcome: Outcome | None) -> None:
        for item in self.wanted:
            item.put(outcome)

    def _pairs(self, results: Any, did: str) -> Any:
        """Pair the items with their results; GreenroomError where that does not work out."""
        is_list = hasattr(results, "__len__") and hasattr(results, "__getitem__")
        if not is_list or isinstance(results, str | bytes | Mapping):
            raise GreenroomError(
                f"{self._name} {did} a {type(results).__name__}; a batch function gives a list "
                "with one result per item"
            )
        if len(results) != len(self._items):
            raise GreenroomError(
                f"{self._name} {did} {len(results)} results for a batch of {len(self._items)} "
                "items; it must give one per item, in their order"
            )
        return zip(self._items, results, strict=True)


def _outcome(result: Any) -> Outcome:
    return Outcome.failed(result) if isinstance(result, Exception) else Outcome(result)


class _Queue:
    """What waits for one instance's batch function on one loop, and how many batches run."""

    def __init__(self, batching: _Batching, loop: asyncio.AbstractEventLoop) -> None:
        self._batching = batching
        # A strong reference would keep the loop, which is the key of this in a weak dict, for ever.
        self._loop = weakref.ref(loop)
        self._batches: Batches[_Call] = Batches(
            *batching.limits, batching.max_batches, batching.size_of
        )
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()  # loops do not keep their tasks alive

    def add(self, item: _Call) -> None:
        """Add an item that waits."""
        item.added_at = asyncio.get_running_loop().time()
        if self._batches.add(item, item.group, item.added_at):
            self._arm()

    def remove(self, item: _Call) -> None:
        """Forget an item that waits."""
        self._batches.remove(item, item.group)
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
        self._batches.set_limits(*self._batching.limits)
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the next batch; fail items that fit in none.

        No batch begins at once: calls made in the same pass of the loop belong in one batch.
        """
        for item, error in self._batches.refused:
            item.put(Outcome.failed(error))
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
        while (items := self._batches.take(now)) is not None:
            waits_s = [now - item.added_at for item in items]
            metrics.batch_begun(self._batching.function.__qualname__, len(items), waits_s)
            task = _Running(self._batching, items).start()
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, items[0].group))
        self._arm()

    def _ended(self, group: Hashable, task: asyncio.Task[None]) -> None:
        """Free the place of a batch, even of one that was cancelled before it ran at all."""
        self._tasks.discard(task)
        self._batches.ended(group)
        self._arm()
