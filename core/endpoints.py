"""Endpoints: names, routes, methods and where traffic goes; the rules for changing them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from understudy.core.errors import ConflictError, InvalidRequestError
from understudy.core.records import EndpointRecord
from understudy.core.tables import EndpointTable

HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
RESERVED_PREFIX = "/-"


def check_route(route: str | None) -> str | None:
    """Return the route, or raise InvalidRequestError saying what is wrong with it."""
    if route is None or route == "/":
        return route
    problem = None
    if not route.startswith("/"):
        problem = "must start with '/'"
    elif route.endswith("/"):
        problem = "must not end with '/'"
    elif re.search(r"[{}?#\s]", route):
        problem = "must not contain braces, '?', '#' or white space"
    elif (route + "/").startswith(RESERVED_PREFIX + "/"):
        problem = "is reserved for Understudy's own pages"
    if problem:
        raise InvalidRequestError(f"route {route!r} {problem}; for example '/predict'")
    return route


def check_methods(methods: Iterable[str]) -> tuple[str, ...]:
    """Return the methods in upper case, or raise InvalidRequestError naming the bad ones."""
    upper = tuple(dict.fromkeys(str(method).upper() for method in methods))
    bad = [method for method in upper if method not in HTTP_METHODS]
    if bad or not upper:
        raise InvalidRequestError(f"methods {bad or '()'}: expected some of {HTTP_METHODS}")
    return upper


def check_free(endpoints: Mapping[str, EndpointRecord], name: str, route: str | None) -> None:
    """Raise ConflictError naming the holder if another endpoint has the route."""
    if route is None:
        return
    for other in endpoints.values():
        if other.route == route and other.name != name:
            raise ConflictError(
                f"route {route!r} is taken by endpoint {other.name!r}; choose another route or "
                "delete that one first"
            )


def check_traffic(endpoint: str, weights: Mapping[str, float], known: Iterable[str]) -> None:
    """Raise InvalidRequestError unless ``weights`` gives all traffic to one known backend."""
    known = sorted(known)
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise InvalidRequestError(
            f"traffic of {endpoint!r}: no backend named {', '.join(unknown)}; there are: "
            f"{', '.join(known) or 'none'}"
        )
    if len(weights) != 1 or next(iter(weights.values())) != 1:
        raise InvalidRequestError(
            f"traffic of {endpoint!r}: {dict(weights)!r}; expected one backend with weight 1.0"
        )


def users_of(endpoints: Mapping[str, EndpointRecord], backend: str) -> list[str]:
    """Return the names of the endpoints with traffic to the backend."""
    return sorted(e.name for e in endpoints.values() if backend in e.traffic)


def table_of(record: EndpointRecord) -> EndpointTable:
    """Return what routers are told of an endpoint."""
    return EndpointTable(
        name=record.name,
        route=record.route,
        methods=record.methods,
        traffic=dict(record.traffic),
    )
