"""Endpoints: names, routes, methods and where traffic goes; the rules for changing them."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from greenroom.core.errors import ConflictError
from greenroom.core.operations import CreateEndpoint, ShadowTraffic
from greenroom.core.records import (
    ENDPOINT,
    BackendRecord,
    Changes,
    CompareRecord,
    EndpointRecord,
    Key,
    Records,
)
from greenroom.core.routing.tables import EndpointTable


@dataclass(frozen=True, slots=True)
class Overlay:
    """What is laid over an endpoint while a rollout is under way; its definition stays as it is."""

    traffic: Mapping[str, float]
    shadows: Mapping[str, float] = field(default_factory=dict)
    compares: Mapping[str, CompareRecord] = field(default_factory=dict)

    def over(self, record: EndpointRecord) -> EndpointRecord:
        """Return the endpoint as routers are to serve it."""
        return replace(
            record,
            traffic=self.traffic,
            shadows={**record.shadows, **self.shadows},
            compares={**record.compares, **self.compares},
        )


class Endpoints(Records[EndpointRecord]):
    """Definitions of endpoints by name, and what is laid over them.

    By route, and by the backends that they are served by, they are found without reading each.
    """

    def __init__(self, saved: Mapping[str, EndpointRecord], changes: Changes) -> None:
        super().__init__(ENDPOINT, saved, changes)
        self._at: dict[str, str] = {}  # route -> name
        self._using: dict[str, set[str]] = {}  # backend -> names
        self._overlays: dict[str, Overlay] = {}
        for name in self:
            self._file(name)

    def __setitem__(self, name: str, record: EndpointRecord) -> None:
        self._unfile(name)
        super().__setitem__(name, record)
        self._file(name)

    def __delitem__(self, name: str) -> None:
        self._unfile(name)
        self._overlays.pop(name, None)
        super().__delitem__(name)

    def lay(self, name: str, overlay: Overlay | None) -> None:
        """Lay this over an endpoint, in place of what is there; None for nothing."""
        self._unfile(name)
        self._overlays.pop(name, None)
        if overlay is not None:
            self._overlays[name] = overlay
        self._file(name)

    def overlay(self, name: str) -> Overlay | None:
        """Return what is laid over an endpoint."""
        return self._overlays.get(name)

    def served(self, name: str) -> EndpointRecord:
        """Return an endpoint as routers are to serve it: its definition below its overlay."""
        overlay = self._overlays.get(name)
        return self[name] if overlay is None else overlay.over(self[name])

    def _file(self, name: str) -> None:
        record = self.served(name)
        if record.route is not None:
            self._at[record.route] = name
        for tag in self._used_by(name):
            self._using.setdefault(tag, set()).add(name)

    def _unfile(self, name: str) -> None:
        if name not in self:
            return
        record = self.served(name)
        if record.route is not None and self._at.get(record.route) == name:
            del self._at[record.route]
        for tag in self._used_by(name):
            self._using[tag].discard(name)
            if not self._using[tag]:
                del self._using[tag]

    def _used_by(self, name: str) -> set[str]:
        both = self[name], self.served(name)
        return {tag for each in both for tag in (*each.traffic, *each.shadows)}

    def at(self, route: str | None) -> list[EndpointRecord]:
        """Return the endpoint that has the route, if one has."""
        name = None if route is None else self._at.get(route)
        return [] if name is None else [self[name]]

    def uses(self, backend: str, but: Container[Key] = ()) -> str:
        """Say for an error which endpoints use a backend, and how; "" for none but those."""
        uses = []
        for name in sorted(self._using.get(backend, ())):
            if (ENDPOINT, name) not in but:
                use = "traffic" if backend in self[name].traffic else "a shadow"
                if name in self._overlays:
                    use = f"a part, so {to_end_rollout(name)}, in the rollout"
                uses.append(f"{use} of endpoint {name!r}")
        return ", ".join(uses)


def to_end_rollout(endpoint: str) -> str:
    """Return what to do about an endpoint's rollout."""
    return f"wait for it, or abort_rollout({endpoint!r}) or promote_rollout({endpoint!r}) first"


def new_endpoint(asked: CreateEndpoint) -> EndpointRecord:
    """Return an endpoint whose traffic all goes to one backend."""
    return EndpointRecord(
        name=asked.name,
        route=asked.route,
        methods=asked.methods,
        retryable=asked.retryable,
        traffic={asked.backend: 1.0},
        made_with=asked.backend,
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


def with_shadow(endpoint: EndpointRecord, asked: ShadowTraffic) -> EndpointRecord:
    """Return the endpoint with this proportion for a shadow, and this comparison; 0 ends both."""
    shadows = {tag: each for tag, each in endpoint.shadows.items() if tag != asked.backend}
    compares = {tag: each for tag, each in endpoint.compares.items() if tag != asked.backend}
    if asked.proportion:
        shadows[asked.backend] = asked.proportion
        if asked.compare is not None:
            settings = asked.compare.model_dump()
            present = endpoint.compares.get(asked.backend)
            if present is None or present.settings != settings:
                present = CompareRecord(id=secrets.token_hex(4), settings=settings)
            compares[asked.backend] = present
    return replace(endpoint, shadows=shadows, compares=compares)


def is_made_alike(present: EndpointRecord, asked: EndpointRecord) -> bool:
    """Return whether the call that asks for ``asked`` is the one that made ``present``."""
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


def table_of(record: EndpointRecord) -> EndpointTable:
    """Return what routers get of an endpoint."""
    return EndpointTable(
        name=record.name,
        route=record.route,
        methods=record.methods,
        retryable=record.retryable,
        traffic=dict(record.traffic),
        shadows=dict(sorted(record.shadows.items())),
        compares={tag: (each.id, each.settings) for tag, each in record.compares.items()},
    )
