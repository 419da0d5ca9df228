"""What the controller reports: what is there by it, and what is not healthy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime.liveness import describe as describe_silence
from greenroom.core import operations as ops
from greenroom.core.validation import unknown_name

_HEALTHY = ("HEALTHY", "UPSCALING", "DOWNSCALING")  # what autoscaling does is not a problem


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


def front_url(report: Mapping[str, Any]) -> str | None:
    """Return the first host's HTTP address, where the report has it."""
    fronts = [host.get("front") or {} for host in report.get("hosts", ())]
    return next((str(front["url"]) for front in fronts if front.get("url")), None)


def canary_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an application's last canary, with what it found; nothing without one."""
    application = report["applications"].get(name) or {}
    canary: dict[str, Any] = application.get("canary") or {}
    return canary


def check_there(
    connection: Connection,
    needs: Iterable[tuple[str | None, str]],
    timeout_s: float | None = None,
) -> None:
    """Raise UnknownNameError unless there are these: an application's deployments, endpoints."""
    report = None
    for application, name in needs:
        report = report or read_report(connection, timeout_s)
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


def missing_of(
    connection: Connection, folders: Mapping[str, bytes], timeout_s: float | None = None
) -> tuple[bytes, ...]:
    """Return those zips, of ``folders`` by their digests, that are to be sent: not stored yet."""
    if not folders:
        return ()
    missing = connection.request(ops.ListMissing(digests=tuple(folders)), timeout_s=timeout_s)
    return tuple(folders[digest] for digest in missing)


# --- What is not healthy --------------------------------------------------------------------------


def problems_of(report: Mapping[str, Any]) -> list[str]:
    """Return what is not healthy in the controller's report, a line each; empty when all is."""
    problems = [*_saving_problems(report), *_damage(report), *_host_problems(report)]
    problems += map(describe_silence, report.get("silent") or ())
    problems += _troubles(report)
    for name, application in report.get("applications", {}).items():
        if application["status"] != "RUNNING":
            problems.append(_described(f"application {name!r}", application))
        problems += [
            _described(f"deployment {deployment!r} of {name!r}", state)
            for deployment, state in application["deployments"].items()
            if state["status"] not in _HEALTHY or state.get("policy_failure")
        ]
    problems += [
        _described(f"backend {tag!r}", state)
        for tag, state in report.get("backends", {}).items()
        if not state.get("application")
        and (state["status"] not in (*_HEALTHY, "DELETING") or state.get("policy_failure"))
    ]
    return problems


def _troubles(report: Mapping[str, Any]) -> Iterator[str]:
    for backend in report.get("backends", {}).values():
        for replica in backend.get("replicas") or ():
            if replica.get("trouble"):
                yield f"replica {replica['tag']}: {replica['trouble']}"


def show_silent(report: dict[str, Any], silent: list[dict[str, Any]]) -> None:
    """Show in a report which processes of this host are silent, also as their state."""
    if not silent:
        return
    report["silent"] = silent
    states = {each["pid"]: f"SILENT {each['silent_s']:.0f} s" for each in silent}

    def show(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("pid") in states and "state" in value:
                value["state"] = states[value["pid"]]
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                show(each)

    show([report.get(part) for part in ("hosts", "applications", "backends")])


def _saving_problems(report: Mapping[str, Any]) -> Iterator[str]:
    saving = report.get("saving") or {}
    if saving.get("failing_since") is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saving["failing_since"]))
        yield f"the state cannot be saved since {since}, so no change is made: {saving['error']}"
        if report.get("written_at") is not None:
            at = time.strftime("%H:%M:%S", time.localtime(report["written_at"]))
            yield f"what is shown here was so at {at}; it is not known what has changed by itself"


def _damage(report: Mapping[str, Any]) -> Iterator[str]:
    for damaged in report.get("damaged") or ():
        kind, name, reason = damaged["kind"], damaged["name"], damaged["reason"]
        advice = "deploy it again, or delete it"
        if kind not in {"backend", "endpoint", "application", "code"}:
            advice = "deploy again what is not there, then: greenroom ask forget_lost"
        yield f"{kind} {name!r} is lost from the store: {reason}; {advice}"


def _host_problems(report: Mapping[str, Any]) -> Iterator[str]:
    hosts = report.get("hosts") or ()
    if not hosts:
        yield "no host has reported to the controller yet"
    for host in hosts:
        if host.get("state") != "RUNNING":
            yield f"host {host['name']} is {host.get('state')}"
        if "host_pid" in host and not host["host_pid"]:
            yield (
                f"host {host['name']}: its host process does not run, so what dies there stays "
                "dead; `greenroom start` on that host brings it back"
            )
        if host.get("store_trouble"):
            why = host["store_trouble"]
            yield f"host {host['name']} cannot use the store, so it could not lead: {why}"
        if not (host.get("proxy") or {}).get("pid"):
            yield f"host {host['name']}: its proxy does not run"
        grpc = host.get("grpc")
        if grpc is not None and not grpc.get("pid"):
            yield f"host {host['name']}: its gRPC server does not run; see logs/grpc.log"
        front = host.get("front") or {}
        if not (front.get("pid") and front.get("workers")):
            yield f"host {host['name']}: its HTTP front does not run"


def _described(what: str, state: Mapping[str, Any]) -> str:
    message = str(state.get("message") or "").strip().splitlines()
    return f"{what} is {state['status']}" + (f": {message[-1]}" if message else "")
