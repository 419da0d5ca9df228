"""What commands show: progress while they wait, and the status as tables."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

QUIET_S = 1.0  # what takes less needs no progress
_STYLES = {
    "RUNNING": "green",
    "HEALTHY": "green",
    "DEPLOYING": "yellow",
    "UPDATING": "yellow",
    "UPSCALING": "yellow",
    "DOWNSCALING": "yellow",
    "DELETING": "yellow",
    "STARTING": "yellow",
    "STOPPING": "yellow",
    "UNHEALTHY": "red",
    "DEPLOY_FAILED": "red",
}


class Progress:
    """Shows on stderr what is being waited for, once it has taken over a second.

    On a terminal one line that counts the seconds and goes when it is over; elsewhere a line for
    each thing that :meth:`say` tells.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._said = ""
        self._since = time.monotonic()
        self._over = threading.Event()
        self._live = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def say(self, text: str) -> None:
        """Change the text; callable from any thread."""
        self._text = text

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._live and self._said:
            self._write("\r\x1b[K")

    def _show(self) -> None:
        delay = QUIET_S
        while not self._over.wait(delay):
            delay = 0.2
            if self._live:
                self._said = self._text
                self._write(f"\r\x1b[K{self._text} ... {time.monotonic() - self._since:.0f} s")
            elif self._text != self._said:
                self._said = self._text
                self._write(f"{self._text} ...\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def problems_of(report: Mapping[str, Any]) -> list[str]:
    """Return what is not healthy in the controller's report, a line each; empty when all is."""
    problems = [*_host_problems(report)]
    for name, application in report.get("applications", {}).items():
        if application["status"] != "RUNNING":
            problems.append(_told(f"application {name!r}", application))
        problems += [
            _told(f"deployment {deployment!r} of {name!r}", state)
            for deployment, state in application["deployments"].items()
            if state["status"] != "HEALTHY"
        ]
    return problems


def _host_problems(report: Mapping[str, Any]) -> Iterator[str]:
    hosts = report.get("hosts") or ()
    if not hosts:
        yield "no host has reported to the controller yet"
    for host in hosts:
        if host.get("state") != "RUNNING":
            yield f"host {host['name']} is {host.get('state')}"
        if not (host.get("proxy") or {}).get("pid"):
            yield f"host {host['name']}: its proxy does not run"
        if not (host.get("front") or {}).get("workers"):
            yield f"host {host['name']}: its HTTP front does not run"


def _told(what: str, state: Mapping[str, Any]) -> str:
    message = str(state.get("message") or "").strip().splitlines()
    return f"{what} is {state['status']}" + (f": {message[-1]}" if message else "")


def front_url(report: Mapping[str, Any]) -> str | None:
    """Return the first host's HTTP address, where the report has it."""
    fronts = [host.get("front") or {} for host in report.get("hosts", ())]
    return next((str(front["url"]) for front in fronts if front.get("url")), None)


def show_status(report: Mapping[str, Any]) -> None:
    """Print the controller's report as tables."""
    from rich.console import Console  # noqa: PLC0415  # 30 ms that --json does not need

    console = Console()
    _show_hosts(console, report)
    _show_applications(console, report)
    _show_backends(console, report)
    _show_goals(console, report)


def _show_hosts(console: Console, report: Mapping[str, Any]) -> None:
    controller = report.get("controller") or {}
    table = _table("host", "state", "HTTP", "processes")
    for host in report.get("hosts", ()):
        proxy, front = host.get("proxy") or {}, host.get("front") or {}
        pids = {
            "controller": controller.get("pid") if controller.get("host") == host["name"] else None,
            "host": host.get("host_pid"),
            "proxy": proxy.get("pid"),
            "front": front.get("pid"),
            "workers": " ".join(map(str, front.get("workers") or ())),
        }
        processes = ", ".join(f"{role} {pid}" for role, pid in pids.items() if pid)
        state = _state(host.get("state"))
        table.add_row(_text(host["name"]), state, _text(front.get("url")), processes)
    console.print(table)


def _show_applications(console: Console, report: Mapping[str, Any]) -> None:
    applications = report.get("applications") or {}
    if applications:
        console.print(_applications(applications))
    else:
        console.print("no applications")
    for problem in problems_of(report):
        console.print(problem, style="red", markup=False, highlight=False)


def _applications(applications: Mapping[str, Any]) -> Table:
    table = _table("application, deployments, replicas", "route", "state", "pid", "busy")
    for name, application in applications.items():
        route = _text(application.get("route_prefix"))
        table.add_row(_text(name), route, _state(application["status"]))
        for deployment, state in application["deployments"].items():
            replicas = state.get("replicas") or []
            told = f"  {deployment}: {len(replicas)} of {state.get('target_replicas', '?')}"
            table.add_row(_text(told), "", _state(state["status"]))
            for replica in replicas:
                table.add_row(*_replica(replica, f"{name}#{deployment}#"))
        table.add_section()
    return table


def _show_backends(console: Console, report: Mapping[str, Any]) -> None:
    endpoints = report.get("endpoints") or {}
    if not endpoints:
        return
    table = _table("endpoint", "route", "methods", "traffic")
    for name, endpoint in endpoints.items():
        traffic = (f"{tag} {weight:.0%}" for tag, weight in (endpoint.get("traffic") or {}).items())
        methods = " ".join(endpoint.get("methods") or ())
        table.add_row(name, _text(endpoint.get("route")), methods, ", ".join(traffic))
    console.print(table)


def _replica(replica: Mapping[str, Any], prefix: str) -> tuple[str, str, str, str, str]:
    tag = str(replica.get("tag")).removeprefix(prefix)
    pid, busy = _text(replica.get("pid")), _text(replica.get("ongoing"))
    return _text(f"    {tag}"), "", _state(replica.get("state")), pid, busy


def _show_goals(console: Console, report: Mapping[str, Any]) -> None:
    goals = [goal for goal in report.get("goals") or () if goal.get("state") == "pending"]
    if not goals:
        return
    table = _table("goal under way", "of", "what")
    for goal in goals:
        table.add_row(*(_text(goal.get(column)) for column in ("id", "subject", "what")))
    console.print(table)


def _table(*columns: str) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: Any) -> str:
    from rich.markup import escape  # noqa: PLC0415

    return "-" if value is None else escape(str(value))


def _state(value: Any) -> str:
    text = _text(value)
    style = _STYLES.get(text.upper())
    return f"[{style}]{text}[/]" if style else text
