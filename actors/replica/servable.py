"""What a deployment's code makes of itself in a replica: an instance, its hooks and its methods.

A class or function becomes an instance, which may be, or have, an ASGI app. The replica calls its
hooks; queries name its methods, HTTP requests only those that are open to them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Collection
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.modules import is_users
from greenroom.actors.replica.threads import NO_KWARGS, Threads
from greenroom.core.errors import GreenroomError, InvalidRequestError, UnusableCodeError
from greenroom.core.validation import HOOKS

if TYPE_CHECKING:
    from greenroom.actors.replica.asgi import AsgiHost

ASGI_APP = "__greenroom_asgi_app__"  # the attribute of a class whose requests an app answers


class RefusedError(InvalidRequestError):
    """The query asks for something that does not exist; no user code has run for it."""


class Servable:
    """One copy of user code, on its event loop; sync code runs on ``threads``."""

    def __init__(self, threads: Threads) -> None:
        self.instance: Any = None  # None before it is constructed
        self.asgi: AsgiHost | None = None
        self.has_own_thread = False  # where all of a class's code runs
        self.http_call_methods: Collection[str] | None = ()  # as the setting says
        self._threads = threads
        self._manners: dict[str, tuple[Any, Manner]] = {}  # by the name of the method
        self._http_methods: frozenset[str] = frozenset()

    async def construct(self, target: Any, args: Any, kwargs: Any) -> None:
        """Make it of a class or function, and start its app."""
        if not inspect.isclass(target):
            self.instance = target
        elif inspect.iscoroutinefunction(target.__init__):
            self.instance = target.__new__(target)
            await self.instance.__init__(*args, **kwargs)
        elif self._threads.size == 1 and is_sync(target):
            self.has_own_thread = True
            # In a list, because what can be awaited is awaited.
            [self.instance] = await self._threads.run(lambda: [target(*args, **kwargs)], ())
        else:
            self.instance = target(*args, **kwargs)
        self._http_methods = http_methods(type(self.instance))
        user_context.constructed(self.instance)
        source = getattr(self.instance, ASGI_APP, None)
        if source is not None:
            from greenroom.actors.replica.asgi import AsgiHost  # noqa: PLC0415  # imports Starlette

            self.asgi = AsgiHost(source.app(type(self.instance)))
            await self.asgi.start()

    # --- Hooks ----------------------------------------------------------------------------------

    def hook(self, name: str) -> Any:
        """Return a method for the replica to call; None where there is none, as of a function."""
        has_none = inspect.isroutine(self.instance) or inspect.isclass(self.instance)
        return None if has_none else getattr(self.instance, name, None)

    async def warm_up(self) -> None:
        """Call ``warmup``."""
        method = self.hook("warmup")
        if method is None:
            return
        try:
            inspect.signature(method).bind()
        except TypeError as error:
            raise UnusableCodeError(f"warmup() is called without arguments: {error}") from None
        await self.run("warmup", method)

    async def reconfigure(self, user_config: Any) -> None:
        """Call ``reconfigure``, which there has to be."""
        method = self.hook("reconfigure")
        if method is None:
            raise UnusableCodeError(
                "user_config is set, but the deployment has no reconfigure(user_config) method"
            )
        await self.run("reconfigure", method, user_config)

    async def run(self, name: str, hook: Any, *args: Any) -> Any:
        """Call a hook, wherever it is to run."""
        return await self.call(self.manner(name, hook), hook, args)

    async def close(self) -> None:
        """End the app's lifespan, unload models, call ``__del__``, whatever one of them raises."""
        async with contextlib.AsyncExitStack() as last_first:
            finalizer = getattr(type(self.instance), "__del__", None)
            if finalizer is not None:
                last_first.push_async_callback(self.run, "__del__", finalizer, self.instance)
            last_first.push_async_callback(user_context.unload_models)
            if self.asgi is not None:
                last_first.push_async_callback(self.asgi.stop)

    # --- Methods --------------------------------------------------------------------------------

    def manner(self, name: str, function: Any) -> Manner:
        """Return how to call ``function``, which has this name for now: user code may change it."""
        source = function.__func__ if type(function) is MethodType else function
        known = self._manners.get(name)
        if known is None or known[0] is not source:
            known = self._manners[name] = source, Manner.of(function)
        return known[1]

    async def call(self, manner: Manner, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        """Call it on the loop or on a thread; a generator is returned as it is."""
        if manner.is_async:
            return await function(*args, **kwargs)
        if manner.makes_generator:
            return function(*args, **kwargs)
        return await self._threads.run(function, args, kwargs)

    def method(self, name: str, *, is_http: bool = False) -> Any:
        """Return what a query calls; RefusedError where there is no such method."""
        if name in {"", "__call__"}:
            if callable(self.instance):
                return self.instance
            name = "__call__"
        method = None if name.startswith("_") else getattr(self.instance, name, None)
        if callable(method):
            return method
        kind = type(self.instance)
        methods = [each for each in dir(kind) if callable(getattr(kind, each, None))]
        public = [each for each in methods if each == "__call__" or not each.startswith("_")]
        if not public:  # no mistake of the caller's
            raise GreenroomError("the deployment has no method that can be called")
        if is_http:
            can_be_named = "name one of its methods in the header X-Serve-Call-Method"
            only_by_handles = "no method is open to HTTP requests: see the option http_call_methods"
            hint = can_be_named if self._open_to_http() else only_by_handles
            raise RefusedError(f"the deployment has no {name}; {hint}")
        raise RefusedError(f"the deployment has no method {name!r}; it has: {', '.join(public)}")

    def check_method_header(self, name: str) -> None:
        """Refuse what HTTP requests may not call; clients do not learn what there is."""
        if self.asgi is not None:
            text = (
                "an ASGI app answers this deployment's requests, and the header "
                "X-Serve-Call-Method would go past it; leave the header out"
            )
        elif self.http_call_methods is not None and not self.http_call_methods:
            text = "this deployment takes no header X-Serve-Call-Method; leave it out"
        elif name == "__call__" or name in self._open_to_http():
            return
        else:
            text = (
                f"header X-Serve-Call-Method: {name[:100]!r} is no method that HTTP requests may "
                "call here"
            )
        raise RefusedError(text)

    def _open_to_http(self) -> frozenset[str]:
        named = self.http_call_methods
        return self._http_methods if named is None else self._http_methods.intersection(named)


def is_sync(target: Any) -> bool:
    """Return whether a function, or each method of a class, is sync, so it needs no event loop."""
    methods = [target]
    if inspect.isclass(target):
        methods = [inspect.getattr_static(target, name) for name in dir(target)]
    functions = [getattr(method, "__func__", method) for method in methods]  # of staticmethods too
    return not hasattr(target, ASGI_APP) and not any(
        is_async(function) or inspect.isasyncgenfunction(function) for function in functions
    )


# --- How methods are to be called, and which of them HTTP requests may name -----------------------


class Manner(NamedTuple):
    """How to call one function or method; what ``makes_generator`` then runs no user code yet."""

    takes_argument: bool
    is_async: bool
    makes_generator: bool

    @classmethod
    def of(cls, function: Any) -> Manner:
        """Look at ``function``."""
        generates = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
        return cls(_takes_argument(function), is_async(function), generates)


def is_async(function: Any) -> bool:
    """Return whether calling it gives an awaitable that runs it."""
    if inspect.iscoroutinefunction(function):
        return True
    if inspect.isfunction(function) or inspect.ismethod(function):
        return False
    call = getattr(type(function), "__call__", None)  # noqa: B004  # an instance's may be async
    return inspect.iscoroutinefunction(call)


def _takes_argument(function: Any) -> bool:
    try:
        return len(inspect.signature(function).parameters) > 0
    except (TypeError, ValueError):  # some callables in C have no signature
        return True


def http_methods(cls: type) -> frozenset[str]:
    """Return the methods that HTTP requests may name in X-Serve-Call-Method.

    These are the public functions (also async, generating, static or of the class) that the class,
    or a base of the user's, defines: nothing that comes from Python or an installed package, no
    callable attribute, no hook of the replica's.
    """
    methods: dict[str, bool] = {}
    for base in cls.__mro__:
        is_users = base is cls or _is_users_base(base, cls)
        for name, value in vars(base).items():
            methods.setdefault(name, is_users and _is_def(value))  # the first one is what is called
    public = {name for name, may in methods.items() if may and not name.startswith("_")}
    return frozenset(public - HOOKS)


def _is_def(value: Any) -> bool:
    is_wrapped = isinstance(value, staticmethod | classmethod)
    return inspect.isfunction(value.__func__ if is_wrapped else value)


def _is_users_base(base: type, cls: type) -> bool:
    package = base.__module__.partition(".")[0]
    if package in {"__main__", cls.__module__.partition(".")[0]}:
        return True
    module = sys.modules.get(base.__module__)
    return module is None or is_users(module)  # what is not there has come by value
