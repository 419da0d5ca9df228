"""What the controller reports, and what is there by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.core import operations as ops
from greenroom.core.validation import unknown_name


def read_report(connection: Connection, timeout_s: float | None = None) -> dict[str, Any]:
    """Return the object that ``greenroom status --json`` prints."""
    report: dict[str, Any] = connection.request(ops.GetStatus(), timeout_s=timeout_s)
    return report


def ingress_of(report: dict[str, Any], name: str) -> str:
    """Return the name of an application's ingress; UnknownNameError naming those there are."""
    return str(_entry(report.get("applications") or {}, name, "application")["ingress"])


def endpoint_named(connection: Connection, name: str) -> str:
    """Return the endpoint that a command's argument means: of an application its ingress.

    A name that is neither is returned as it is, for the error of what is asked for.
    """
    report = read_report(connection)
    if name in (report.get("endpoints") or {}) or name not in (report.get("applications") or {}):
        return name
    return f"{name}#{ingress_of(report, name)}"


def canary_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an application's last canary, with what it found; nothing without one."""
    application = report["applications"].get(name) or {}
    canary: dict[str, Any] = application.get("canary") or {}
    return canary


def check_there(connection: Connection, needs: Iterable[tuple[str | None, str]]) -> None:
    """Raise UnknownNameError unless there are these: an application's deployments, endpoints."""
    report = None
    for application, name in needs:
        report = report or read_report(connection)
        if application is None:
            _entry(report.get("endpoints") or {}, name, "endpoint")
        else:
            check_deployment(report, name, application)


def check_deployment(report: dict[str, Any], deployment: str, name: str) -> None:
    """Raise UnknownNameError unless the application has the deployment."""
    application = _entry(report.get("applications") or {}, name, "application")
    _entry(application["deployments"], deployment, f"deployment of application {name!r}")


def _entry(entries: dict[str, Any], name: str, what: str) -> Any:
    if name not in entries:
        raise unknown_name(what, name, entries)
    return entries[name]


def missing_of(connection: Connection, folders: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """Return those zips, of ``folders`` by their digests, that are to be sent: not stored yet."""
    if not folders:
        return ()
    missing = connection.request(ops.ListMissing(digests=tuple(folders)))
    return tuple(folders[digest] for digest in missing)
