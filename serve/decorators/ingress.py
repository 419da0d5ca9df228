"""``serve.ingress``: an ASGI app, such as FastAPI's, that answers a deployment's HTTP requests."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.asgi import AppSource, is_app
from greenroom.actors.replica.user_code import ASGI_APP
from greenroom.serve.deployments import Deployment

T = TypeVar("T")


class AsgiDeployment:
    """What runs an app that comes without a class of its own."""


def ingress(app: Callable[..., Any]) -> Callable[..., Any]:
    """Have an ASGI app answer the HTTP requests of a class.

    ``app`` is an app (FastAPI, Starlette, or any other callable of scope, receive and send), or a
    function without arguments that returns one and is called in each replica. Below
    ``@serve.deployment``:

        @serve.deployment
        @serve.ingress(app)
        class Model:
            @app.get("/predict")
            def predict(self, x: int): ...

    FastAPI's routes may be methods: their ``self`` is the replica's instance. Without a class,
    ``serve.deployment(serve.ingress(app)())`` runs the app alone. Handles call the class's methods
    as ever. The route prefix is the scope's ``root_path``; the app's lifespan is run. TypeError
    for what is neither an app nor a factory, and for what is decorated and is no class.
    """
    source = AppSource(app) if callable(app) else None
    if source is None or not (source.is_factory or is_app(app)):
        raise TypeError(
            f"serve.ingress takes an ASGI app, or a function without arguments that returns one; "
            f"not {app!r}"
        )

    def decorate(cls: type[T] = AsgiDeployment) -> type[T]:  # type: ignore[assignment]
        if isinstance(cls, Deployment):
            raise TypeError("put @serve.ingress below @serve.deployment, next to the class")
        if not inspect.isclass(cls):
            raise TypeError(f"@serve.ingress is for classes, not for {cls!r}")
        if cls is AsgiDeployment:
            # Of the caller's module, as a named tuple is: its folder travels with the app.
            caller = sys._getframe(1).f_globals.get("__name__", cls.__module__)
            cls = type(cls.__name__, (cls,), {"__module__": caller})
        _give_self(app, cls)
        setattr(cls, ASGI_APP, source)
        return cls

    return decorate


async def _instance() -> Any:  # FastAPI runs what is not async on a thread
    replica = user_context.replica_context()
    return None if replica is None else replica.servable_object


def _give_self(app: Any, cls: type) -> None:
    """Make ``self`` of FastAPI routes that are methods of ``cls`` a dependency, not a parameter."""
    fastapi = sys.modules.get("fastapi")
    if fastapi is None or not isinstance(app, fastapi.FastAPI):
        return
    routes = app.router.routes
    own = [route for route in routes if _is_method(getattr(route, "endpoint", None), cls)]
    router = fastapi.APIRouter()
    for route in own:
        _depend_on_instance(route.endpoint, fastapi.Depends(_instance))
        router.routes.append(route)
        app.router.routes.remove(route)
    if own:
        app.include_router(router)  # which looks at the signatures anew


def _is_method(endpoint: Any, cls: type) -> bool:
    """Return whether the class or a base defined it, even if its name is another's by now."""
    return inspect.isfunction(endpoint) and any(_is_method_of(endpoint, b) for b in cls.__mro__)


def _is_method_of(endpoint: Any, base: type) -> bool:
    where = endpoint.__module__, endpoint.__qualname__
    if where == (base.__module__, f"{base.__qualname__}.{endpoint.__name__}"):
        held = vars(base).get(endpoint.__name__)
        return getattr(held, "__func__", None) is not endpoint  # that of a static or class method
    return any(endpoint is value for value in vars(base).values())


def _depend_on_instance(endpoint: Any, dependency: Any) -> None:
    signature = inspect.signature(endpoint)
    first, *others = signature.parameters.values()
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    endpoint.__signature__ = signature.replace(
        parameters=[
            first.replace(default=dependency, kind=keyword_only),
            *(parameter.replace(kind=keyword_only) for parameter in others),
        ]
    )
