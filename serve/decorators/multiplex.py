"""``serve.multiplexed``: many models on one deployment, each replica with those used last.

Theory of operation. The decorator leaves a function that takes a model id, and returns the model
from the instance's cache, or loads it with what is decorated. Loads are tasks of their own, one
after the other: a query that asks for a model which is being loaded waits for that load, and one
that is cancelled ends none. Before a load, the models used longest ago are unloaded, until there is
room: never are more than the limit there at a time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar, overload

from greenroom.actors.replica import context as user_context, metrics
from greenroom.actors.replica.modules import users_traceback
from greenroom.serve.decorators.per_instance import Args, Decorated, Failure, received

UNLIMITED = -1
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


def get_multiplexed_model_id() -> str:
    """Return the model that the running query asks for; "" where it asks for none.

    It comes with the HTTP header ``serve_multiplexed_model_id``, or from a handle's
    ``.options(multiplexed_model_id=...)``.
    """
    return user_context.multiplexed_model_id()


@overload
def multiplexed(function: F, /, max_num_models_per_replica: int = ...) -> F: ...
@overload
def multiplexed(*, max_num_models_per_replica: int = ...) -> Callable[[F], F]: ...


def multiplexed(function: Any = None, /, max_num_models_per_replica: int = 3) -> Any:
    """Cache the models that an async function or method loads.

    It takes the model's id, a string, and returns the model, once loaded, for as long as it is
    among the ``max_num_models_per_replica`` used last (-1: for ever). Calls for a model that is
    being loaded wait for it; a load that fails raises for all of them, and leaves nothing. A model
    with an ``async def __del__`` is unloaded by awaiting it, any other by letting go of it, away
    from the event loop. TypeError or ValueError for what cannot be decorated.
    """
    limit = max_num_models_per_replica
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"max_num_models_per_replica={limit!r}: must be a whole number")
    if limit < 1 and limit != UNLIMITED:
        raise ValueError(
            f"max_num_models_per_replica={limit}: must be 1 or more, or {UNLIMITED} for no limit"
        )

    def decorate(target: Any) -> Any:
        _check_function(target)
        return _Multiplexed(target, _Options(limit)).wrapped()

    return decorate if function is None else decorate(function)


def _check_function(target: Any) -> None:
    if not inspect.iscoroutinefunction(target):
        raise TypeError(
            f"@serve.multiplexed is for functions and methods made by 'async def', not {target!r}"
        )
    names = [name for name in inspect.signature(target).parameters if name != "self"]
    if len(names) != 1:
        raise TypeError(f"{target.__qualname__}: a model loader takes one argument, the model's id")


class _Options(NamedTuple):
    max_num_models_per_replica: int


class _Multiplexed(Decorated["_Cache", _Options]):
    """A loader, its options, and the caches of its instances."""

    decorator = "serve.multiplexed"

    def wrapped(self) -> Any:
        """Return what users call in place of the loader."""

        @functools.wraps(self.function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            owner, (model_id,) = self.split(wrapper, args, kwargs)
            _check_id(model_id)
            return await self.state(owner).get(owner, model_id)

        return self.known_by(wrapper)

    def make(self, loop: asyncio.AbstractEventLoop) -> _Cache:
        """Make an instance's cache."""
        return _Cache(self, loop)


def _check_id(model_id: Any) -> None:
    if not isinstance(model_id, str):
        raise TypeError(f"the model id must be a string, not {model_id!r}")
    if not model_id:
        raise ValueError(
            "the model id is empty; does the query have the header serve_multiplexed_model_id, "
            "or the handle the option multiplexed_model_id?"
        )


class _Cache:
    """The models of one instance, on one loop."""

    def __init__(self, multiplexing: _Multiplexed, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._multiplexing = multiplexing
        self._models: OrderedDict[str, Any] = OrderedDict()  # the one used longest ago is first
        self._loads: dict[str, asyncio.Task[Any]] = {}
        self._one_at_a_time = asyncio.Lock()

    @property
    def ids(self) -> tuple[str, ...]:
        """The models that are here, or being loaded."""
        return (*self._models, *self._loads)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of this cache; None when it is gone."""
        return self._loop()

    async def get(self, owner: Args, model_id: str) -> Any:
        """Return a model, loaded if it was not; raises what loading it raises."""
        if model_id in self._models:
            self._models.move_to_end(model_id)
            return self._models[model_id]
        load = self._loads.get(model_id)
        if load is None:
            load = asyncio.create_task(self._load(owner, model_id))
            self._loads[model_id] = load
            user_context.models_changed(self)
        return received(await asyncio.shield(load))

    async def _load(self, owner: Args, model_id: str) -> Any:
        user_context.detach()  # others may wait for it, too
        began_at = time.monotonic()
        model: Any
        try:
            async with self._one_at_a_time:
                limit = self._multiplexing.options.max_num_models_per_replica
                while limit != UNLIMITED and len(self._models) >= limit:
                    await self._unload_first()
                began_at = time.monotonic()
                model = self._models[model_id] = await self._multiplexing.function(*owner, model_id)
        except BaseException as error:  # SystemExit too ends its own queries, and nothing else
            model = Failure.of(error)
        del self._loads[model_id]
        metrics.model_loaded(time.monotonic() - began_at, ok=type(model) is not Failure)
        user_context.models_changed(self)
        return model

    async def unload_all(self) -> None:
        """Unload all models, after the loads that are under way."""
        async with self._one_at_a_time:
            while self._models:
                await self._unload_first()
        user_context.models_changed(self)

    async def _unload_first(self) -> None:
        model_id, model = self._models.popitem(last=False)
        user_context.models_changed(self)
        try:
            if inspect.iscoroutinefunction(getattr(type(model), "__del__", None)):
                await model.__del__()
                model.__class__ = _finalized(type(model))  # else Python calls it once more
            else:
                last = [model]
                del model
                await asyncio.to_thread(last.clear)  # which runs __del__ if no query uses it
        except Exception as error:  # it is gone for the cache, and the next load goes on
            trace = users_traceback(error)
            print(f"unloading the model {model_id!r}:\n{trace}", file=sys.stderr)  # noqa: T201


def _finalized(kind: type) -> type:
    """Return a class like ``kind`` whose instances Python does not finalize."""
    return type(kind.__name__, (kind,), {"__slots__": (), "__del__": lambda _self: None})
