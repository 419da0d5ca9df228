"""Annotations that are strings, in the endpoints and dependencies of a FastAPI app.

``from __future__ import annotations`` makes all of a module's annotations strings, and FastAPI
looks up their names in the globals of the function. A function that travels by value takes along
only the globals that its code uses. So a replica would not know ``Item``, and FastAPI would
silently take it for a query parameter and answer every request with 422. To prevent this,
annotations are evaluated before an app travels. If an app arrives in the replica with annotations
that cannot be evaluated, the deployment fails.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

MOST_NAMED = 3
_FRAMEWORKS = ("fastapi", "starlette")
_INSPECTED = ("endpoint", "dependency")  # what FastAPI looks at, by its attributes' names


def evaluate(app: Any) -> None:
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


def unresolved(app: Any) -> str:
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
    except Exception:  # it may say anything; it stays a string, which unresolved() tells of
        return annotation


def _functions(app: Any) -> Iterator[Any]:
    """Yield each function with annotations that FastAPI looks at."""
    fastapi = sys.modules.get("fastapi")
    if fastapi is None or not isinstance(app, fastapi.FastAPI):
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
