"""What is not healthy in the controller's report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from greenroom.actors.runtime.liveness import describe as describe_silence

_HEALTHY = ("HEALTHY", "UPSCALING", "DOWNSCALING")  # what autoscaling does is not a problem


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
        what = f"{damaged['kind']} {damaged['name']!r}" if damaged["kind"] else "something"
        advice = "; deploy it again, or delete it" if damaged["kind"] else ""
        yield f"{what} is lost from the store: {damaged['reason']}{advice}"


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


def front_url(report: Mapping[str, Any]) -> str | None:
    """Return the first host's HTTP address, where the report has it."""
    fronts = [host.get("front") or {} for host in report.get("hosts", ())]
    return next((str(front["url"]) for front in fronts if front.get("url")), None)
