"""What decorated functions and methods keep, per instance and event loop.

Theory of operation. A decorator is applied where the class is written, and the class is pickled on
its way to replicas. So what calls need (futures, locks, tasks) is made at the first call, for the
instance and on the loop of that call, and none of it is ever pickled: an instance's is in its
``__dict__``, a function's with its decorator, and both pickle as nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class PicklesAsNew:
    """Base of what belongs to one process: its pickle and its copies are new ones."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _ByLoop(PicklesAsNew, Generic[S]):
    def __init__(self) -> None:
        self.states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, S] = (
            weakref.WeakKeyDictionary()
        )


class _Known(PicklesAsNew, Generic[S]):
    def __init__(self) -> None:
        self.states: weakref.WeakSet[S] = weakref.WeakSet()
        self.classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class PerInstance(Generic[S]):
    """The states of one decorated function; a state must not keep its loop alive."""

    def __init__(self, decorator: str, function: Any) -> None:
        self._decorator = decorator
        self._key = f"_greenroom {decorator} {function.__module__}.{function.__qualname__}"
        self._own: _ByLoop[S] = _ByLoop()
        self._known: _Known[S] = _Known()

    def owner(self, wrapper: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the instance of a call, in a tuple; an empty one where it is a function's.

        A method is one if its class has it, as it is or within what other decorators made of it.
        Its name would not do: a private one is written in another way in the class.
        """
        if not args:
            return ()
        kind = type(args[0])
        is_method = self._known.classes.get(kind)
        if is_method is None:
            values = [value for base in kind.__mro__ for value in vars(base).values()]
            is_method = self._known.classes[kind] = any(
                inspect.unwrap(value, stop=lambda each: each is wrapper) is wrapper
                for value in values
                if inspect.isfunction(value)
            )
        return args[:1] if is_method else ()

    def get(
        self, owner: tuple[Any, ...], loop: asyncio.AbstractEventLoop, make: Callable[[], S]
    ) -> S:
        """Return the state of an instance on a loop; TypeError where it can have none."""
        by_loop = self._own
        if owner:
            try:
                by_loop = vars(owner[0]).setdefault(self._key, _ByLoop())
            except TypeError:
                kind = type(owner[0]).__name__
                raise TypeError(
                    f"@{self._decorator} needs an instance with a __dict__: "
                    f"remove __slots__ from {kind}"
                ) from None
        state = by_loop.states.get(loop)
        if state is None:
            state = by_loop.states[loop] = make()
            self._known.states.add(state)
        return state

    def all(self) -> list[S]:
        """Return all states in this process that are in use."""
        return list(self._known.states)
