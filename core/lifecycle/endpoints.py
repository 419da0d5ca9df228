"""Endpoints: names, routes, methods and where traffic goes; the rules for changing them."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from greenroom.core.comparing.comparing import check_compare
from greenroom.core.errors import ConflictError, InvalidRequestError
from greenroom.core.records import BackendRecord, CompareRecord, EndpointRecord
from greenroom.core.routing.tables import EndpointTable
from greenroom.core.validation import MAX_TAG_BYTES, is_number, wrong_with

HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
RESERVED_PREFIX = "/-"
_NEVER_ASKED_FOR = {"", ".", ".."}  # segments that clients take out of a path
SUM_TOLERANCE = 1e-6


def route_problem(parameter: str, route: object) -> str | None:
    """Say what is wrong with a route, or None; a route that is None is well, and "headless"."""
    if route is None or route == "/":
        return None
    if not isinstance(route, str) or not route.startswith("/"):
        return f"{parameter}={route!r}: must start with '/', or be None for no route"
    wrong = None
    if route.endswith("/"):
        wrong = "must not end with '/'"
    elif re.search(r"[{}?#%\s]", route):
        wrong = "must not contain braces, '?', '#', '%' or white space; paths are matched decoded"
    elif not _NEVER_ASKED_FOR.isdisjoint(route[1:].split("/")):
        wrong = "must not contain '//', nor '.' or '..' between slashes: no client asks for such"
    elif (route + "/").startswith(RESERVED_PREFIX + "/"):
        wrong = "is reserved for Greenroom's own pages"
    return f"{parameter}={route!r}: {wrong}; for example '/predict'" if wrong else None


def check_route(parameter: str, route: str | None) -> str | None:
    """Return the route, or raise InvalidRequestError saying what is wrong with it."""
    if problem := route_problem(parameter, route):
        raise InvalidRequestError(problem)
    return route


def check_methods(methods: object) -> tuple[str, ...]:
    """Return the methods in upper case, or raise InvalidRequestError saying what they may be."""
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        example = [methods] if isinstance(methods, str) else ["GET"]
        raise InvalidRequestError(f"methods={methods!r}: must be a list, such as {example!r}")
    upper = tuple(dict.fromkeys(str(method).upper() for method in methods))
    if not upper or not set(upper) <= set(HTTP_METHODS):
        known = ", ".join(HTTP_METHODS)
        raise InvalidRequestError(f"methods={methods!r}: expected some of {known}")
    return upper


class Endpoints(dict[str, EndpointRecord]):
    """Endpoints by name; by route and by backend they are found without a look at each.

    Changed by assignment and by :meth:`pop` only.
    """

    def __init__(self, records: Mapping[str, EndpointRecord]) -> None:
        super().__init__()
        self._at: dict[str, str] = {}  # route -> name
        self._using: dict[str, set[str]] = {}  # backend -> names
        for name, record in records.items():
            self[name] = record

    def __setitem__(self, name: str, record: EndpointRecord) -> None:
        self.pop(name, None)
        super().__setitem__(name, record)
        if record.route is not None:
            self._at[record.route] = name
        for tag in (*record.traffic, *record.shadows):
            self._using.setdefault(tag, set()).add(name)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove and return an endpoint."""
        record = super().pop(name, None)
        if record is None:
            return default
        if record.route is not None and self._at.get(record.route) == name:
            del self._at[record.route]
        for tag in {*record.traffic, *record.shadows}:
            self._using[tag].discard(name)
            if not self._using[tag]:
                del self._using[tag]
        return record

    def at(self, route: str | None) -> list[EndpointRecord]:
        """Return the endpoint that has the route, if one has."""
        name = None if route is None else self._at.get(route)
        return [] if name is None else [self[name]]

    def using(self, backend: str) -> list[EndpointRecord]:
        """Return the endpoints whose policy names the backend."""
        return [self[name] for name in self._using.get(backend, ())]


def new_endpoint(
    name: str, backend: str, route: str | None, methods: Iterable[str], retryable: object
) -> EndpointRecord:
    """Return an endpoint for one backend, or raise InvalidRequestError naming what is wrong."""
    if wrong := wrong_with(name, MAX_TAG_BYTES):
        raise InvalidRequestError(f"endpoint name {name!r}: {wrong}")
    return EndpointRecord(
        name=name,
        route=check_route("route", route),
        methods=check_methods(methods),
        retryable=check_retryable(name, retryable),
        traffic={backend: 1.0},
        made_with=backend,
    )


def check_retryable(endpoint: str, retryable: object) -> bool | None:
    """Return the value, or raise InvalidRequestError."""
    if retryable is None or isinstance(retryable, bool):
        return retryable
    raise InvalidRequestError(
        f"endpoint {endpoint!r}: retryable={retryable!r}: must be True, False, or None to leave it "
        "to the deployment"
    )


def check_free(endpoints: Iterable[EndpointRecord], name: str, route: str | None) -> None:
    """Raise ConflictError naming the holder if another of the endpoints has the route."""
    if route is None:
        return
    for other in endpoints:
        if other.route == route and other.name != name:
            raise ConflictError(
                f"route {route!r} is taken by endpoint {other.name!r}; choose another route or "
                "delete that one first"
            )


def check_weights(endpoint: str, weights: object) -> dict[str, float]:
    """Return the weights as numbers, or raise one InvalidRequestError naming all that is wrong."""
    problems = []
    if not isinstance(weights, Mapping) or not weights:
        problems.append(f"={weights!r}: must be a dict of at least one backend and its weight")
    else:
        problems += [
            f"[{tag!r}]={weight!r}: must be a number from 0 to 1"
            for tag, weight in weights.items()
            if not _is_share(weight)
        ]
    if not problems:
        total = math.fsum(weights.values())  # type: ignore[attr-defined]  # it is a Mapping
        if round(abs(total - 1), 12) > SUM_TOLERANCE:  # 1.000001 - 1 is a little more than 1e-6
            problems.append(f" sum to {total:.9g}: must be 1 within {SUM_TOLERANCE:g}")
    if problems:
        each = "; ".join(f"weights{problem}" for problem in problems)
        raise InvalidRequestError(f"traffic of endpoint {endpoint!r}: {each}")
    return {tag: float(weight) for tag, weight in weights.items()}  # type: ignore[attr-defined]


def check_proportion(endpoint: str, backend: str, proportion: object) -> float:
    """Return the proportion as a number, or raise InvalidRequestError."""
    if not _is_share(proportion):
        raise InvalidRequestError(
            f"shadow {backend!r} of endpoint {endpoint!r}: proportion={proportion!r}: must be a "
            "number from 0 to 1; 0 ends it"
        )
    return float(proportion)


def with_shadow(
    endpoint: EndpointRecord,
    backend: str,
    proportion: object,
    known: Collection[str],
    compare: object = None,
) -> EndpointRecord:
    """Return the endpoint with this proportion for a shadow, and this comparison; 0 ends both."""
    proportion = check_proportion(endpoint.name, backend, proportion)
    settings = None if compare is None else check_compare(compare).model_dump()
    shadows = {tag: each for tag, each in endpoint.shadows.items() if tag != backend}
    compares = {tag: each for tag, each in endpoint.compares.items() if tag != backend}
    if proportion:
        check_known(f"shadow of endpoint {endpoint.name!r}", "backend", [backend], known)
        shadows[backend] = proportion
        if settings is not None:
            present = endpoint.compares.get(backend)
            if present is None or present.settings != settings:
                present = CompareRecord(id=secrets.token_hex(4), settings=settings)
            compares[backend] = present
    return replace(endpoint, shadows=shadows, compares=compares)


def check_known(what: str, field: str, tags: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequestError unless all backends are known; lists them only then."""
    unknown = sorted(repr(tag) for tag in set(tags) if tag not in known)
    if unknown:
        raise InvalidRequestError(
            f"{what}: {field}: no backend is named {', '.join(unknown)}; it could be: "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _is_share(value: object) -> TypeGuard[float]:
    return is_number(value) and 0 <= value <= 1


def is_made_alike(present: EndpointRecord, asked: EndpointRecord) -> bool:
    """Tell whether the call that asks for ``asked`` is the one that made ``present``."""
    made_with = {present.made_with} if present.made_with else set(present.traffic)
    same = all(getattr(present, each) == getattr(asked, each) for each in ("route", "retryable"))
    return same and set(present.methods) == set(asked.methods) and made_with == {asked.made_with}


def described(record: EndpointRecord) -> str:
    """Return an endpoint's settings for an error that is about other ones."""
    retryable = "" if record.retryable is None else f", retryable {record.retryable}"
    return (
        f"route {record.route!r}, methods {record.methods}{retryable}, "
        f"traffic {dict(record.traffic)}"
    )


def owner_of(record: BackendRecord | EndpointRecord) -> str:
    """Name the application or deployment that something was made with; empty for none."""
    if record.application:
        return f"application {record.application!r}"
    return f"deployment {record.deployment!r}" if record.deployment else ""


def users_of(endpoints: Iterable[EndpointRecord], backend: str) -> dict[str, str]:
    """Return endpoint -> "traffic" or "shadow", of those whose policy names the backend."""
    named = sorted((e.name, e) for e in endpoints if backend in e.traffic or backend in e.shadows)
    return {name: "traffic" if backend in e.traffic else "a shadow" for name, e in named}


def table_of(record: EndpointRecord) -> EndpointTable:
    """Return what routers are told of an endpoint."""
    return EndpointTable(
        name=record.name,
        route=record.route,
        methods=record.methods,
        retryable=record.retryable,
        traffic=dict(record.traffic),
        shadows=dict(sorted(record.shadows.items())),
        compares={tag: (each.id, each.settings) for tag, each in record.compares.items()},
    )
