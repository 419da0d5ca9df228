"""Routes of a FastAPI app that are methods of a class: their ``self`` is the replica's instance.

Several classes may share one app. At its definition each makes its own routes' ``self`` a
dependency (:func:`give_self`); a replica of one class then runs the app without the routes of the
others (:func:`without_other_classes`).
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

from greenroom.actors.replica import context as user_context

_GIVEN = "__greenroom_given_self__"  # the attribute of such a method


async def _instance() -> Any:  # FastAPI runs what is not async on a thread
    replica = user_context.replica_context()
    return None if replica is None else replica.servable_object


def _is_fastapi(app: Any) -> bool:
    fastapi = sys.modules.get("fastapi")
    return fastapi is not None and isinstance(app, fastapi.FastAPI)


def give_self(app: Any, cls: type) -> None:
    """Make ``self`` of the routes that are methods of ``cls`` a dependency, not a parameter."""
    if not _is_fastapi(app):
        return
    import fastapi  # noqa: PLC0415  # only where the user has it

    routes = app.router.routes
    own = [route for route in routes if _is_method(getattr(route, "endpoint", None), cls)]
    router = fastapi.APIRouter()
    for route in own:
        _depend_on_instance(route.endpoint, fastapi.Depends(_instance))
        router.routes.append(route)
        routes.remove(route)
    if own:
        app.include_router(router)  # which looks at the signatures anew


def without_other_classes(app: Any, cls: type) -> Any:
    """Return the app, or a copy of it without the routes that are methods of other classes."""
    if not _is_fastapi(app) or all(_serves(route, cls) for route in _flat(app.router.routes)):
        return app
    import fastapi  # noqa: PLC0415  # as above

    alone = copy.copy(app)
    alone.router = copy.copy(app.router)
    alone.router.routes = []
    alone.router.middleware_stack = alone.router.app  # not that of the router it is a copy of
    alone.middleware_stack = alone.openapi_schema = None
    alone.setup()  # the pages of documentation, which would show the whole app
    own = fastapi.APIRouter()
    for route in app.router.routes:
        flat = _flat([route])
        if any(hasattr(getattr(each, "endpoint", None), _GIVEN) for each in flat):
            own.routes.extend(each for each in flat if _serves(each, cls))
        elif not _name(route).startswith("FastAPI.setup."):
            alone.router.routes.append(route)
    alone.include_router(own)
    return alone


def _flat(routes: list[Any]) -> list[Any]:
    """Return the routes; FastAPI keeps those of an included router below it since 0.137."""
    flat: list[Any] = []
    for route in routes:
        router = getattr(route, "original_router", None)
        flat.extend([route] if router is None else router.routes)
    return flat


def _serves(route: Any, cls: type) -> bool:
    endpoint = getattr(route, "endpoint", None)
    return not hasattr(endpoint, _GIVEN) or _is_method(endpoint, cls)


def _name(route: Any) -> str:
    return getattr(getattr(route, "endpoint", None), "__qualname__", "")


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
    setattr(endpoint, _GIVEN, True)
