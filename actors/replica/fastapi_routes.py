"""Routes of a FastAPI app that travels: their ``self``, and what their annotations mean.

Routes may be methods of a class: their ``self`` is the replica's instance. Several classes may
share one app. At its definition each makes its own routes' ``self`` a dependency
(:func:`give_self`); a replica of one class then runs the app without the routes of the others
(:func:`without_other_classes`).

``from __future__ import annotations`` makes all of a module's annotations strings, and FastAPI
looks up their names in the globals of the function. A function that travels by value takes along
only the globals that its code uses. So a replica would not know ``Item``, and FastAPI would
silently take it for a query parameter and answer every request with 422. To prevent this,
annotations of endpoints and dependencies are evaluated before an app travels. If an app arrives in
the replica with annotations that cannot be evaluated, the deployment fails.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

from greenroom.actors.replica import context as user_context

_GIVEN = "__greenroom_given_self__"  # the attribute of such a method
MOST_NAMED = 3
_FRAMEWORKS = ("fastapi", "starlette")
_INSPECTED = ("endpoint", "dependency")  # what FastAPI looks at, by its attributes' names


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


# --- Annotations that are strings -----------------------------------------------------------------


def evaluate_annotations(app: Any) -> None:
    """Evaluate, in place, the annotations that are strings; those that cannot be stay."""
    for function in _functions(app):
        names = inspect.unwrap(function).__globals__
        function.__annotations__ = {
            name: _evaluated(annotation, names)
            for name, annotation in function.__annotations__.items()
        }
        signature = vars(function).get("__signature__")
        if signature is not None:
            parameters = [
                each.replace(annotation=_evaluated(each.annotation, names))
                for each in signature.parameters.values()
            ]
            function.__signature__ = signature.replace(
                parameters=parameters,
                return_annotation=_evaluated(signature.return_annotation, names),
            )


def unresolved_annotations(app: Any) -> str:
    """Say which annotations cannot be evaluated here, and what to do; "" where there are none."""
    found = [
        f"{each.name}: {each.annotation} of {function.__module__}.{function.__qualname__}"
        for function in _functions(app)
        for each in inspect.signature(function).parameters.values()
        if isinstance(each.annotation, str)
        and not _is_dependency(each.default)
        and isinstance(_evaluated(each.annotation, inspect.unwrap(function).__globals__), str)
    ]
    if not found:
        return ""
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"FastAPI could not know what these annotations mean, and would answer 422: "
        f"{'; '.join(found[:MOST_NAMED])}{more}. They are strings, and a replica knows only the "
        "names that the code uses elsewhere too: make the app at the top of its module instead of "
        "in a function, define or import these names there, not only for type checkers, or leave "
        "out `from __future__ import annotations`"
    )


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)  # the user's code, as inspect.signature does
    except Exception:  # it may say anything; then it stays unresolved
        return annotation


def _functions(app: Any) -> Iterator[Any]:
    """Yield each function with annotations that FastAPI looks at."""
    if not _is_fastapi(app):
        return
    seen: dict[int, Any] = {}  # kept, so that no id is used again
    waiting: list[Any] = [app]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if inspect.isfunction(value):
            if _is_readable(value):
                yield value
                waiting += _within_function(value)
        elif isinstance(value, list | tuple | dict):
            held = value.values() if isinstance(value, dict) else value
            # A function in there is a middleware, or handles exceptions: nothing FastAPI looks at.
            waiting += [each for each in held if not inspect.isfunction(each)]
        elif _is_of_framework(value):
            waiting += _within_part(value)


def _is_readable(function: Any) -> bool:
    """Return whether its annotations can be asked for.

    From Python 3.14 on they are evaluated when they are, unless they are strings.
    """
    try:
        inspect.signature(function)
    except (NameError, TypeError, ValueError):
        return False
    return True


def _within_part(part: Any) -> Iterator[Any]:
    """Yield what an app, router, route or dependency holds."""
    is_fastapis = type(part).__module__.startswith("fastapi")
    for name, value in getattr(part, "__dict__", {}).items():
        if name in _INSPECTED:
            if is_fastapis:
                yield from _called(value)
        elif isinstance(value, list | tuple | dict) or _is_of_framework(value):
            yield value


def _called(value: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions whose signatures are those of an endpoint or dependency."""
    if isinstance(value, functools.partial):
        yield from _called(value.func)
    elif inspect.isclass(value):
        yield from _called(vars(value).get("__init__"))
    elif inspect.ismethod(value):
        yield value.__func__
    elif inspect.isfunction(value):
        yield value
        yield inspect.unwrap(value)
    elif hasattr(value, "__wrapped__"):  # by functools.lru_cache, say
        yield from _called(inspect.unwrap(value))
    elif inspect.isfunction(call := vars(type(value)).get("__call__")):
        yield call


def _within_function(function: Any) -> Iterator[Any]:
    """Yield the dependencies that a function's parameters name."""
    names = inspect.unwrap(function).__globals__
    for each in inspect.signature(function).parameters.values():
        annotation = _evaluated(each.annotation, names)
        kind, *marks = typing.get_args(annotation) or (annotation,)
        for value in (each.default, *marks):
            if _is_of_framework(value) and hasattr(value, "dependency"):
                yield value
                if value.dependency is None:  # Depends(), which takes the annotation
                    yield from _called(kind)


def _is_dependency(value: Any) -> bool:
    """Return whether it says by itself what to depend on."""
    return _is_of_framework(value) and getattr(value, "dependency", None) is not None


def _is_of_framework(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith(_FRAMEWORKS) and kind.__name__ != "State"
