"""What decorated functions and methods keep, per instance and event loop.

Theory of operation. A decorator is applied where the class is written, and the class is pickled on
its way to replicas. So what calls need (queues, locks, tasks) is made at the first call, for the
instance and on the loop of that call, and none of it is pickled. An instance's states are in its
``__dict__``, a function's are kept here.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Outcome(NamedTuple):
    """A result, or an exception that several callers raise.

    The traceback is kept apart, because each ``raise`` of the same exception lengthens it. No
    future gets the exception itself: futures refuse StopIteration, and warn of those not asked for.
    """

    value: Any
    error: BaseException | None = None
    traceback: Any = None

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """Return the outcome of what raised ``error``."""
        return cls(None, error, error.__traceback__)

    def get(self) -> Any:
        """Return the value, or raise."""
        if self.error is not None:
            raise self.error.with_traceback(self.traceback)
        return self.value


class _ByLoop(Generic[S]):
    """The states of one instance. A pickle or copy of it is empty."""

    def __init__(self) -> None:
        self.states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, S] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> Any:
        return _ByLoop, ()


class PerInstance(Generic[S]):
    """The states of one decorated function; a state must not keep its loop alive."""

    def __init__(self, decorator: str, function: Any) -> None:
        self._decorator = decorator
        self._key = f"_greenroom {decorator} {function.__module__}.{function.__qualname__}"
        self._own: _ByLoop[S] = _ByLoop()
        self._states: weakref.WeakSet[S] = weakref.WeakSet()
        self._classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def owner(self, wrapper: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the instance of a call, in a tuple; an empty tuple for a function.

        It is a method if the class holds ``wrapper``, or something that other decorators made of
        it. Its name would not do: a class mangles private names.
        """
        if not args:
            return ()
        kind = type(args[0])
        is_method = self._classes.get(kind)
        if is_method is None:
            values = [value for base in kind.__mro__ for value in vars(base).values()]
            is_method = self._classes[kind] = any(
                inspect.unwrap(value, stop=lambda each: each is wrapper) is wrapper
                for value in values
                if inspect.isfunction(value)
            )
        return args[:1] if is_method else ()

    def get(self, owner: tuple[Any, ...], make: Callable[[asyncio.AbstractEventLoop], S]) -> S:
        """Return an instance's state on the running loop; TypeError where it can have none."""
        loop = asyncio.get_running_loop()
        by_loop = self._own
        if owner:
            try:
                kept = vars(owner[0])
            except TypeError:
                kind = type(owner[0]).__name__
                raise TypeError(
                    f"@{self._decorator} needs an instance with a __dict__: "
                    f"remove __slots__ from {kind}"
                ) from None
            by_loop = kept.get(self._key) or kept.setdefault(self._key, _ByLoop())
        state = by_loop.states.get(loop)
        if state is None:
            state = by_loop.states[loop] = make(loop)
            self._states.add(state)
        return state

    def all(self) -> list[S]:
        """Return all states in this process that are in use."""
        return list(self._states)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError unless a decorator's limit is a whole number, not below."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a whole number, {least} or more")
    if value < least:
        raise ValueError(f"{name}={value}: must be {least} or more")
