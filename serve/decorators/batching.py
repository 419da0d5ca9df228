"""``serve.batch``: calls with one item each, run together as calls with lists.

Theory of operation. The decorator leaves a function with the same name that takes one item. What it
decorates is applied where the class is written and pickled on its way to the replicas, so nothing
of an event loop is made before the first call: each instance (or function) has one queue per loop
it is called on, which is used on that loop alone, and which pickles as nothing. Which items make a
batch, and when, is decided in :mod:`greenroom.core.batching`.

A batch is a task of its own. It runs in the context of its first item, so its request id and
multiplexed model are that item's; queries for different models, and copies for shadows and real
queries, never share a batch. Nobody's cancellation ends it but that of all its items.
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
    Mapping,
    Sequence,
)
from contextlib import aclosing
from contextvars import Context, copy_context
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from typing_extensions import Self

from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.context import RunningQuery
from greenroom.core.batching import Batches
from greenroom.core.errors import GreenroomError
from greenroom.core.validation import is_number
from greenroom.serve.decorators.per_instance import PerInstance, PicklesAsNew

# The calls that a batch is made of, and what becomes of them.

MAX_AHEAD = 256  # values of a streaming batch that one item may be behind


class Item:
    """One call."""

    __slots__ = ("batch", "context", "future", "owner", "query", "values")

    def __init__(self, owner: tuple[Any, ...], values: dict[str, Any]) -> None:
        self.owner = owner  # the instance, in a tuple; empty for a function
        self.values = values  # by parameter
        self.context: Context = copy_context()
        self.query = user_context.running.get()
        self.batch: Running | None = None  # once it has begun
        self.make_place()

    @property
    def group(self) -> Any:
        """What the items of a batch have in common."""
        return user_context.batching_group(self.query)

    def make_place(self) -> None:
        """Make what the outcome arrives in."""
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def put(self, outcome: Outcome) -> None:
        """Give it its outcome, if it has none yet."""
        if not self.future.done():
            self.future.set_result(outcome)

    async def result(self) -> Any:
        """Wait for the outcome, and return it or raise it."""
        return (await self.future).get()


class StreamedItem(Item):
    """One call of a streaming batch function."""

    __slots__ = ("arrived",)

    def make_place(self) -> None:
        """See :class:`Item`."""
        self.arrived: asyncio.Queue[Outcome | None] = asyncio.Queue()

    def put(self, outcome: Outcome | None) -> None:
        """Add the next value, or the end."""
        self.arrived.put_nowait(outcome)

    async def next(self) -> Outcome | None:
        """Wait for the next value; None at the end."""
        outcome = await self.arrived.get()
        if self.batch is not None:
            self.batch.moved.set()
        return outcome


class Outcome(NamedTuple):
    """A result or an exception.

    Futures are given it whole: they refuse StopIteration, and complain of exceptions that nobody
    has asked for. The traceback is kept beside, for each caller of a batch raises the same
    exception, and would lengthen that of the others.
    """

    value: Any
    error: BaseException | None = None
    traceback: Any = None

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """Return what was raised."""
        return cls(None, error, error.__traceback__)

    @classmethod
    def of(cls, result: Any) -> Outcome:
        """Return what a batch function has returned for one item."""
        return cls.failed(result) if isinstance(result, Exception) else cls(result)

    def get(self) -> Any:
        """Return the value, or raise."""
        if self.error is not None:
            raise self.error.with_traceback(self.traceback)
        return self.value


class Running:
    """A batch that has begun."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.wanted: dict[Any, None] = dict.fromkeys(items)  # those whose callers still wait
        self.moved = asyncio.Event()  # set when a caller has taken a value, or left
        self.task: asyncio.Task[None] | None = None
        self.query: RunningQuery | None = None  # what its calls through handles belong to

    def cancel(self) -> None:
        """End it: nobody wants it any more; harmless when it is done."""
        if self.task is not None:
            self.task.cancel()
        if self.query is not None:
            self.query.cancel_calls()

    def ended(self) -> None:
        """Note that user code has returned."""
        if self.query is not None:
            self.query.has_ended = True

    def put_all(self, outcome: Outcome | None) -> None:
        """Give it to all whose callers still wait."""
        for item in self.wanted:
            item.put(outcome)

    def drop(self, item: Item) -> bool:
        """Give an item nothing any more; tell whether there was anything to come."""
        self.moved.set()
        return self.wanted.pop(item, self) is None

    @property
    def is_ahead(self) -> bool:
        """Whether a caller has fallen too far behind."""
        return any(item.arrived.qsize() >= MAX_AHEAD for item in self.wanted)


__all__ = ["batch"]

_ENDS = (StopIteration, StopAsyncIteration)

A = TypeVar("A")
B = TypeVar("B")
S = TypeVar("S")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
Item_P = ParamSpec("Item_P")


class Batched(Protocol[Item_P, R_co]):
    """A batch function as it is called: with one item, and what can be changed of it."""

    def __call__(self, *args: Item_P.args, **kwargs: Item_P.kwargs) -> R_co: ...

    def set_max_batch_size(self, max_batch_size: int) -> None: ...

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None: ...


class BatchedMethod(Protocol[S_contra, Item_P, R_co]):
    """The same of a method, which is called without its instance."""

    def __call__(
        self, instance: S_contra, /, *args: Item_P.args, **kwargs: Item_P.kwargs
    ) -> R_co: ...

    def set_max_batch_size(self, max_batch_size: int) -> None: ...

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(self, instance: Any, owner: type, /) -> Batched[Item_P, R_co]: ...


class _Batch(Protocol):
    """Types what is decorated: a function of one list, or of two, or a method of one.

    More lists than these are left untyped: no type checker can take the lists off a signature.
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
def batch(
    function: Callable[[list[A]], Coroutine[Any, Any, Sequence[R]]], /
) -> Batched[[A], Coroutine[Any, Any, R]]: ...
@overload
def batch(
    function: Callable[[list[A]], AsyncIterator[Sequence[R]]], /
) -> Batched[[A], AsyncGenerator[R, None]]: ...
@overload
def batch(
    function: Callable[[list[A], list[B]], Coroutine[Any, Any, Sequence[R]]], /
) -> Batched[[A, B], Coroutine[Any, Any, R]]: ...
@overload
def batch(
    function: Callable[[S, list[A]], Coroutine[Any, Any, Sequence[R]]], /
) -> BatchedMethod[S, [A], Coroutine[Any, Any, R]]: ...
@overload
def batch(
    function: Callable[[S, list[A]], AsyncIterator[Sequence[R]]], /
) -> BatchedMethod[S, [A], AsyncGenerator[R, None]]: ...
@overload
def batch(function: Callable[..., Any], /) -> Any: ...
@overload
def batch(
    *,
    max_batch_size: int = ...,
    batch_wait_timeout_s: float = ...,
    max_concurrent_batches: int = ...,
    batch_size_fn: Callable[[list[Any]], float] | None = ...,
) -> _Batch: ...


def batch(
    function: Any = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
) -> Any:
    """Have an async function or method that takes lists be called with one item at a time.

    A batch begins when it has ``max_batch_size`` items, or ``batch_wait_timeout_s`` after its first
    one came, as soon as fewer than ``max_concurrent_batches`` run. With ``batch_size_fn``, which is
    given a list of items, ``max_batch_size`` limits what it returns. Each parameter of the function
    becomes a list, with one value per item, and it returns as many results in that order: an
    Exception among them is raised for its item only, one that it raises for all. An async generator
    yields such lists, in which StopIteration ends an item's stream.

    ``set_max_batch_size(n)`` and ``set_batch_wait_timeout_s(s)`` of the decorated function change
    the limits in this process, of all instances, from any thread. TypeError or ValueError for what
    cannot be decorated and for limits that make no sense.
    """
    _check_count("max_batch_size", max_batch_size)
    _check_wait(batch_wait_timeout_s)
    _check_count("max_concurrent_batches", max_concurrent_batches)
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


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a whole number, 1 or more")
    if value < 1:
        raise ValueError(f"{name}={value}: must be 1 or more")


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
    """Return what users call in place of the batch function.

    It may be pickled by value, with copies of the globals that it uses: only classes keep identity.
    """
    streams = inspect.isasyncgenfunction(batching.function)
    wrapper: Any = _streaming(batching) if streams else _returning(batching)
    wrapper.set_max_batch_size = batching.set_max_batch_size
    wrapper.set_batch_wait_timeout_s = batching.set_batch_wait_timeout_s
    return wrapper


def _returning(batching: _Batching) -> Any:
    @functools.wraps(batching.function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        item = Item(*batching.bind(wrapper, args, kwargs))
        queue = batching.queue_of(item)
        queue.add(item)
        try:
            return await item.result()
        finally:
            queue.leave(item)

    return wrapper


def _streaming(batching: _Batching) -> Any:
    @functools.wraps(batching.function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        item = StreamedItem(*batching.bind(wrapper, args, kwargs))
        queue = batching.queue_of(item)
        queue.add(item)
        try:
            while (outcome := await item.next()) is not None:
                yield outcome.get()
        finally:
            queue.leave(item)

    return wrapper


class _Batching:
    """A batch function and its settings; the queues of its instances find here what they need."""

    def __init__(
        self, function: Any, limits: _Limits, max_batches: int, size_fn: Callable[..., float] | None
    ) -> None:
        self.function = function
        self.limits = limits
        self.max_batches = max_batches
        self._size_fn = size_fn
        self._queues: PerInstance[_Queue] = PerInstance("serve.batch", function)
        self._signatures = _Signatures()

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Change the limit; ValueError below 1."""
        _check_count("max_batch_size", max_batch_size)
        self._set(self.limits._replace(max_size=max_batch_size))

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Change how long the first item of a batch waits for others; ValueError below 0."""
        _check_wait(batch_wait_timeout_s)
        self._set(self.limits._replace(wait_s=float(batch_wait_timeout_s)))

    def _set(self, limits: _Limits) -> None:
        self.limits = limits
        for queue in self._queues.all():
            queue.limits_changed()

    def bind(
        self, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the instance, if any, and the values of one call by their parameters' names."""
        owner = self._queues.owner(wrapper, args)
        bound = self.signature(is_method=bool(owner)).bind(*args[len(owner) :], **kwargs)
        bound.apply_defaults()
        return owner, bound.arguments

    def signature(self, *, is_method: bool) -> inspect.Signature:
        """Return the function's parameters that become lists; TypeError where there is none."""
        return self._signatures.of(self.function, is_method=is_method)

    def queue_of(self, item: Item) -> _Queue:
        """Return the queue of an item's instance on the running loop."""
        loop = asyncio.get_running_loop()
        return self._queues.get(item.owner, loop, lambda: _Queue(self, loop))

    @property
    def size_of(self) -> Callable[[list[Item]], float] | None:
        """What tells the size of some items; None to count them."""
        size_fn = self._size_fn
        if size_fn is None:
            return None
        return lambda items: size_fn([next(iter(item.values.values())) for item in items])


class _Signatures(PicklesAsNew):
    """Which parameters become lists."""

    def __init__(self) -> None:
        self._known: dict[bool, inspect.Signature] = {}

    def of(self, function: Any, *, is_method: bool) -> inspect.Signature:
        """Return the signature, without self; TypeError where nothing is left."""
        signature = self._known.get(is_method)
        if signature is None:
            signature = inspect.signature(function)
            if is_method:
                parameters = list(signature.parameters.values())[1:]
                if not parameters:
                    raise TypeError(
                        f"{function.__qualname__}: a batch function needs a parameter for the list"
                    )
                signature = signature.replace(parameters=parameters)
            self._known[is_method] = signature
        return signature


class _Queue:
    """What waits for one instance's batch function on one loop, and the batches that run."""

    def __init__(self, batching: _Batching, loop: asyncio.AbstractEventLoop) -> None:
        self._batching = batching
        # A strong reference would keep the loop, which is the key of this in a weak dict, for ever.
        self._loop = weakref.ref(loop)
        limits = batching.limits
        self._batches: Batches[Item] = Batches(
            limits.max_size, limits.wait_s, batching.max_batches, batching.size_of
        )
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()  # loops do not keep their tasks alive

    def add(self, item: Item) -> None:
        """Have an item wait."""
        self._batches.add(item, item.group, asyncio.get_running_loop().time())
        self._arm()

    def leave(self, item: Item) -> None:
        """Forget an item whose caller wants nothing more; a batch without any is cancelled."""
        running = item.batch
        if running is None:
            self._batches.remove(item, item.group)
            self._arm()
            return
        if running.drop(item) and not running.wanted:
            running.cancel()

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
        """Look when the next batch is due; tell those that can be in none.

        Never at once: what is called in the same pass of the loop belongs into the same batch.
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
            self._timer = loop.call_soon(self._look) if is_now else loop.call_at(due, self._look)
            self._timer_at = due

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while (items := self._batches.take(now)) is not None:
            running = Running(items)
            for item in items:
                item.batch = running
            # The context of the timer is that of whoever armed it.
            running.task = items[0].context.run(asyncio.create_task, self._run(running))
            self._tasks.add(running.task)
            running.task.add_done_callback(self._ended)
        self._arm()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Free the place of a batch, even of one that was cancelled before it ran at all."""
        self._tasks.discard(task)
        self._batches.ended()
        self._arm()

    async def _run(self, running: Running) -> None:
        running.query = user_context.begin_batch(item.query for item in running.items)
        try:
            called = self._call(running.items)
            if isinstance(called, AsyncGenerator):
                await self._stream(running, called)
            else:
                await self._complete(running, called)
        except asyncio.CancelledError as error:
            if not running.wanted:
                raise
            text = f"{self._batching.function.__qualname__} was cancelled with a batch under way"
            failure = GreenroomError(text)
            failure.__cause__ = error
            running.put_all(Outcome.failed(failure))
        except BaseException as error:  # SystemExit too ends its own queries, and nothing else
            running.put_all(Outcome.failed(error))
        finally:
            running.ended()

    def _call(self, items: list[Item]) -> Any:
        function = self._batching.function
        owner = items[0].owner
        positional, named = [], {}
        parameters = self._batching.signature(is_method=bool(owner)).parameters
        for name in items[0].values:
            column = [item.values[name] for item in items]
            if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
                named[name] = column
            else:
                positional.append(column)
        return function(*owner, *positional, **named)

    async def _complete(self, running: Running, called: Coroutine[Any, Any, Any]) -> None:
        results = self._checked(await called, len(running.items), "returned")
        for item, result in zip(running.items, results, strict=True):
            item.put(Outcome.of(result))

    async def _stream(self, running: Running, called: AsyncGenerator[Any, None]) -> None:
        async with aclosing(called) as steps:
            async for step in steps:
                results = self._checked(step, len(running.items), "yielded")
                for item, result in zip(running.items, results, strict=True):
                    self._put_step(running, item, result)
                if not running.wanted:
                    return
                while running.is_ahead:
                    running.moved.clear()
                    await running.moved.wait()
        running.put_all(None)

    def _put_step(self, running: Running, item: StreamedItem, result: Any) -> None:
        if item not in running.wanted:
            return
        if result in _ENDS if isinstance(result, type) else isinstance(result, _ENDS):
            item.put(None)
            running.drop(item)
        elif isinstance(result, Exception):
            item.put(Outcome.failed(result))
            running.drop(item)
        else:
            item.put(Outcome(result))

    def _checked(self, results: Any, count: int, did: str) -> Any:
        name = self._batching.function.__qualname__
        is_list = hasattr(results, "__len__") and hasattr(results, "__getitem__")
        if not is_list or isinstance(results, str | bytes | Mapping):
            kind = type(results).__name__
            raise GreenroomError(
                f"{name} {did} a {kind}; a batch function gives a list with one result per item"
            )
        if len(results) != count:
            raise GreenroomError(
                f"{name} {did} {len(results)} results for a batch of {count} items; "
                f"it must give one per item, in their order"
            )
        return results
