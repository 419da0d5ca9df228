"""What decorated functions and methods are made of: options, and states by instance and loop.

Theory of operation. A decorator is applied where the class is written, and the class is pickled on
its way to replicas. So what calls need (queues, locks, tasks) is made at the first call, for the
instance and on the loop of that call, and none of it is pickled. An instance's states are in its
``__dict__``, a function's are kept here. Where code travels by value, what users call is written as
the public decorator, its options and the function, and decorated again: what is stored names
nothing else of ours, so the next release can load it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

MAX_AHEAD = 256  # values that the caller of a stream may be behind
Args = tuple[Any, ...]
S = TypeVar("S")
Options = TypeVar("Options", bound=NamedTuple)  # what the decorator takes
DECORATED = "_greenroom_decorated"  # of what users call


class Failure(NamedTuple):
    """An exception on its way to callers, in the place of a result.

    The traceback is kept apart, because each ``raise`` of the same exception lengthens it. No
    future gets the exception itself: futures refuse StopIteration, and warn of those not asked for.
    """

    error: BaseException
    traceback: Any

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what stands for ``error``."""
        return cls(error, error.__traceback__)


def received(result: Any) -> Any:
    """Return a result, or raise what a Failure stands for."""
    if type(result) is Failure:
        raise result.error.with_traceback(result.traceback)
    return result


class End:
    """The end of a stream: this class itself, which is one object in all pickles."""


class StreamCall(Protocol):
    """A call of a function that streams."""

    @property
    def arrived(self) -> asyncio.Queue[Any]:
        """Values for its caller; End or a Failure is the last."""

    def taken(self) -> None:
        """Note that the caller has taken a value."""

    def leave(self) -> None:
        """Note that the caller wants nothing more."""


def streaming(decorated: Decorated[Any, Any], begin: Callable[[Args, Args], StreamCall]) -> Any:
    """Return what users call in place of a function whose calls are streams."""

    @functools.wraps(decorated.function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        call = begin(*decorated.split(wrapper, args, kwargs))
        try:
            while (value := await call.arrived.get()) is not End:
                call.taken()
                yield received(value)
        finally:
            call.leave()

    return wrapper


class _ByLoop(Generic[S]):
    """The states of one instance. A pickle or copy of it is empty."""

    def __init__(self) -> None:
        self.states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, S] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> Any:
        return _ByLoop, ()


class Decorated(Generic[S, Options]):
    """A decorated function or method, its options, and its states. Pickles without states."""

    decorator: ClassVar[str]

    def __init__(self, function: Any, options: Options) -> None:
        self.function = function
        self.options = options
        self.name = function.__qualname__
        self._key = f"_greenroom {self.decorator} {function.__module__}.{self.name}"
        self._own: _ByLoop[S] = _ByLoop()
        self._states: weakref.WeakSet[S] = weakref.WeakSet()
        self._changing = threading.RLock()  # of the options, and of which states there are
        self._classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
        self._signatures: dict[int, tuple[inspect.Signature, bool]] = {}

    def __getstate__(self) -> Any:
        return self.function, self.options

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a copy begins anew

    def known_by(self, wrapper: Any) -> Any:
        """Note what users call, and return it."""
        setattr(wrapper, DECORATED, self)
        self.wrapper, self.names = wrapper, frozenset(vars(wrapper))
        return wrapper

    def make(self, loop: asyncio.AbstractEventLoop) -> S:
        """Make a state, which must not keep its loop alive."""
        raise NotImplementedError

    def split(self, wrapper: Any, args: Args, kwargs: dict[str, Any]) -> tuple[Args, Args]:
        """Return the instance of a call, in a tuple, and what the call gives each parameter.

        A function has an empty tuple instead. TypeError where the arguments do not fit.
        """
        owner = args[:1] if args and self._is_method(wrapper, type(args[0])) else ()
        values = args[len(owner) :]
        signature, takes_one = self._signature(len(owner))
        if kwargs or not takes_one or len(values) != 1:  # binding takes 8 us
            bound = signature.bind(*values, **kwargs)
            bound.apply_defaults()
            values = tuple(bound.arguments.values())
        return owner, values

    def parameters(self, owner: Args) -> Iterable[inspect.Parameter]:
        """Return the parameters after the instance's."""
        return self._signature(len(owner))[0].parameters.values()

    def state(self, owner: Args) -> S:
        """Return an instance's state on the running loop; TypeError where it can have none."""
        loop = asyncio.get_running_loop()
        by_loop = self._own
        if owner:
            try:
                kept = owner[0].__dict__
            except AttributeError:
                kind = type(owner[0]).__name__
                raise TypeError(
                    f"@{self.decorator} needs an instance with a __dict__: "
                    f"remove __slots__ from {kind}"
                ) from None
            by_loop = kept.get(self._key) or kept.setdefault(self._key, _ByLoop())
        state = by_loop.states.get(loop)
        if state is None:
            with self._changing:
                state = by_loop.states[loop] = self.make(loop)
                self._states.add(state)
        return state

    def change(self, **options: Any) -> list[S]:
        """Change some options, on any thread; return all states that were made with the others."""
        with self._changing:
            self.options = self.options._replace(**options)
            return list(self._states)

    def _is_method(self, wrapper: Any, kind: type) -> bool:
        """Return whether the class holds ``wrapper``, or what other decorators made of it.

        Its name would not do: a class mangles private names.
        """
        is_method = self._classes.get(kind)
        if is_method is None:
            values = [value for base in kind.__mro__ for value in vars(base).values()]
            is_method = self._classes[kind] = any(
                inspect.unwrap(value, stop=lambda each: each is wrapper) is wrapper
                for value in values
                if inspect.isfunction(value)
            )
        return is_method

    def _signature(self, skipped: int) -> tuple[inspect.Signature, bool]:
        """Return the signature without its first parameters, and whether one argument is all.

        TypeError where no parameter is left.
        """
        known = self._signatures.get(skipped)
        if known is None:
            signature = inspect.signature(self.function)
            parameters = list(signature.parameters.values())[skipped:]
            if not parameters:
                raise TypeError(f"{self.name}: @{self.decorator} needs a parameter for its items")
            takes_one = len(parameters) == 1 and parameters[0].kind != parameters[0].KEYWORD_ONLY
            known = signature.replace(parameters=parameters), takes_one
            self._signatures[skipped] = known
        return known


def decorated_part(value: Any) -> Any:
    """Return how code that travels by value has what users call, and its parts; else None.

    Other decorators copy the attributes of what they decorate.
    """
    if isinstance(value, Decorated):
        return getattr, (value.wrapper, DECORATED)
    if isinstance(value, MethodType) and isinstance(value.__self__, Decorated):
        return getattr, (value.__self__.wrapper, value.__name__)
    decorated = vars(value).get(DECORATED) if isinstance(value, FunctionType) else None
    if decorated is None or decorated.wrapper is not value:
        return None
    added = {name: each for name, each in vars(value).items() if name not in decorated.names}
    options = decorated.options._asdict()
    return decorated_again, (decorated.decorator, options, decorated.function), added


def decorated_again(decorator: str, options: dict[str, Any], function: Any) -> Any:
    """Decorate a function; what pickles of code call."""
    name = decorator.removeprefix("serve.")
    return getattr(importlib.import_module("greenroom.serve"), name)(**options)(function)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError unless a decorator's limit is a whole number, not below."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a whole number, {least} or more")
    if value < least:
        raise ValueError(f"{name}={value}: must be {least} or more")


def check_class(decorator: str, target: object) -> None:
    """Raise TypeError for what a decorator of classes is given and is none: a deployment, say."""
    if not inspect.isclass(target):
        raise TypeError(f"@{decorator} is for classes, below @serve.deployment; not for {target!r}")
