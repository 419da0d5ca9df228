"""What commands show: progress while they wait, and the status as tables."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import Self

from greenroom.actors.runtime.connection import Connection
from greenroom.actors.runtime.liveness import told as told_of_silence
from greenroom.core.errors import InvalidRequestError
from greenroom.core.operations import AbortRollout, PromoteRollout, StartRollout
from greenroom.core.rollouts.judging import RULES
from greenroom.serve.admin.session import wait_for_goal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_HEALTHY = ("HEALTHY", "UPSCALING", "DOWNSCALING")  # what autoscaling does is no problem
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
    "LOST": "red",
    "DRAINING": "yellow",
    "DEPLOY_FAILED": "red",
}


class Progress:
    """Shows on stderr what is being waited for, once it has taken over a second.

    On a terminal one line that counts the seconds and goes when it is over; elsewhere a line for
    each thing that :meth:`say` tells. Without a text to begin with there is no thread before then.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._said = ""
        self._waits = False
        self._since = time.monotonic()
        self._over = threading.Event()
        self._live = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def say(self, text: str) -> None:
        """Change the text; callable from any thread."""
        self._text = text
        if self._waits:
            self._begin()

    def __enter__(self) -> Self:
        self._waits = not self._text
        if self._text:
            self._begin()
        return self

    def _begin(self) -> None:
        self._waits = False
        self._thread.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
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
    problems = [*_saving_problems(report), *_damage(report), *_host_problems(report)]
    problems += map(told_of_silence, report.get("silent") or ())
    problems += _troubles(report)
    for name, application in report.get("applications", {}).items():
        if application["status"] != "RUNNING":
            problems.append(_told(f"application {name!r}", application))
        problems += [
            _told(f"deployment {deployment!r} of {name!r}", state)
            for deployment, state in application["deployments"].items()
            if state["status"] not in _HEALTHY or state.get("policy_failure")
        ]
    problems += [
        _told(f"backend {tag!r}", state)
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


def note_silent(report: dict[str, Any], silent: list[dict[str, Any]]) -> None:
    """Show in a report which processes of this host are silent, also as their state."""
    if not silent:
        return
    report["silent"] = silent
    states = {each["pid"]: f"SILENT {each['silent_s']:.0f} s" for each in silent}

    def note(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("pid") in states and "state" in value:
                value["state"] = states[value["pid"]]
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                note(each)

    note([report.get(part) for part in ("hosts", "applications", "backends")])


def _saving_problems(report: Mapping[str, Any]) -> Iterator[str]:
    saving = report.get("saving") or {}
    if saving.get("failing_since") is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saving["failing_since"]))
        yield f"the state cannot be saved since {since}, so no change is made: {saving['error']}"
        if report.get("written_at") is not None:
            at = time.strftime("%H:%M:%S", time.localtime(report["written_at"]))
            yield f"what is shown here was so at {at}; it is not known what has changed by itself"


def _damage(report: Mapping[str, Any]) -> Iterator[str]:
    for lost in report.get("damaged") or ():
        what = f"{lost['kind']} {lost['name']!r}" if lost["kind"] else "something"
        advice = "; deploy it again, or delete it" if lost["kind"] else ""
        yield f"{what} is lost from the store: {lost['reason']}{advice}"


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
        if not (host.get("proxy") or {}).get("pid"):
            yield f"host {host['name']}: its proxy does not run"
        front = host.get("front") or {}
        if not (front.get("pid") and front.get("workers")):
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
    _show_endpoints(console, report)
    _show_backends(console, report)
    _show_rollouts(console, report)
    _show_resources(console, report)
    _show_goals(console, report)


def _show_rollouts(console: Console, report: Mapping[str, Any]) -> None:
    # it imports this module

    for line in lines_of(report.get("rollouts") or {}):
        console.print(line, markup=False, highlight=False)


def _show_resources(console: Console, report: Mapping[str, Any]) -> None:
    taken = {
        name: amounts
        for name, amounts in (report.get("resources") or {}).items()
        if amounts["taken"]
    }
    if not taken:
        return
    table = _table("resource", "taken", "of")
    for name, amounts in taken.items():
        table.add_row(_text(name), f"{amounts['taken']:.9g}", f"{amounts['total']:.9g}")
    console.print(table)


def show_autoscaling(report: Mapping[str, Any]) -> None:
    """Print what GetAutoscaling answered: a table of backends, then their latest decisions."""
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    if not report:
        console.print("no backend has an autoscaling_config")
        return
    table = _table("backend", "run", "target", "bounds", "queued", "ongoing", "average")
    for tag, backend in report.items():
        config = backend["config"]
        cells = (
            backend["running_replicas"],
            backend["target_replicas"],
            f"{config['min_replicas']}..{config['max_replicas']}",
            backend.get("queued"),
            backend.get("ongoing"),
            f"{backend.get('average_load', 0):.4g}",
        )
        table.add_row(_text(tag), *map(_text, cells))
    console.print(table)
    for tag, backend in report.items():
        if backend.get("decisions"):
            console.print(_decisions(_decided_by(tag, backend), backend["decisions"]))


def _decided_by(tag: str, backend: Mapping[str, Any]) -> str:
    told = f"{tag}, by {backend['config']['policy']['policy_function']}"
    failures = backend.get("policy_failures")
    return f"{told}, which failed {failures} times" if failures else told


def _decisions(title: str, decisions: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("at", "target", "decision", "why")
    table.title, table.title_justify = _text(title), "left"
    for decision in decisions:
        at, since = _clock(decision["at"]), _clock(decision["since"])
        when = at if decision["times"] == 1 else f"{since} to {at}"
        before, after = decision["from"], decision["to"]
        target = str(after) if before == after else f"{before} -> {after}"
        table.add_row(when, target, _text(decision["outcome"]), _text(decision["why"]))
    return table


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


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
        console.print(_applications(applications, len(report.get("hosts") or ()) > 1))
    else:
        console.print("no applications")
    for problem in problems_of(report):
        console.print(problem, style="red", markup=False, highlight=False)


def _applications(applications: Mapping[str, Any], has_several_hosts: bool) -> Table:
    columns = ("application, deployments, replicas", "route", "state", "pid", "busy")
    table = _table(*columns, *(("host",) if has_several_hosts else ()))
    for name, application in applications.items():
        route = _text(application.get("route_prefix"))
        table.add_row(_text(name), route, _state(application["status"]))
        for deployment, state in application["deployments"].items():
            replicas = state.get("replicas") or []
            told = f"  {deployment}: {_running_of(state)}"
            table.add_row(_text(told), "", _state(state["status"]))
            for replica in replicas:
                host = (_text(replica.get("host")),) if has_several_hosts else ()
                table.add_row(*_replica(replica, f"{name}#{deployment}#"), *host)
        table.add_section()
    return table


def _show_backends(console: Console, report: Mapping[str, Any]) -> None:
    """Show those that belong to no application; a deployment of its own is one."""
    backends = {
        tag: state
        for tag, state in (report.get("backends") or {}).items()
        if not state.get("application")
    }
    if not backends:
        return
    table = _table("backend", "version", "replicas", "state", "pids")
    for tag, state in backends.items():
        table.add_row(
            _text(tag),
            _text(state.get("version")),
            _running_of(state),
            _state(state.get("status")),
            " ".join(_text(replica.get("pid")) for replica in _running(state)),
        )
    console.print(table)


def _running(state: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = state.get("replicas") or ()
    return [replica for replica in replicas if replica.get("state") == "RUNNING"]


def _running_of(state: dict[str, Any]) -> str:
    return f"{len(_running(state))} of {state.get('target_replicas', '?')}"


def _show_endpoints(console: Console, report: Mapping[str, Any]) -> None:
    endpoints = report.get("endpoints") or {}
    if not endpoints:
        return
    table = _table("endpoint", "route", "methods", "traffic", "shadows")
    for name, endpoint in endpoints.items():
        methods = " ".join(endpoint.get("methods") or ())
        shares = [_shares(endpoint.get(policy) or {}) for policy in ("traffic", "shadows")]
        table.add_row(_text(name), _text(endpoint.get("route")), methods, *shares)
    console.print(table)


def _shares(policy: Mapping[str, float]) -> str:
    return ", ".join(f"{_text(tag)} {share * 100:.4g}%" for tag, share in policy.items())


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


# The command about rollouts, and what ``greenroom status`` shows of them.


def rollout_from(
    endpoint: str, to: str, steps: str, abort_if: Sequence[str], **numbers: Any
) -> StartRollout:
    """Read a rollout from flags; InvalidRequestError naming what is wrong."""
    try:
        shares = [float(step) for step in steps.split(",")]
    except ValueError:
        raise InvalidRequestError(
            f"--steps {steps!r}: expected shares with commas between, such as 0.01,0.1,1"
        ) from None
    rules = dict(_rule(text) for text in abort_if) or None
    return StartRollout.of(endpoint=endpoint, to=to, steps=shares, abort_if=rules, **numbers)


def _rule(text: str) -> tuple[str, float]:
    name, _, limit = text.partition("=")
    try:
        return name, float(limit)
    except ValueError:
        raise InvalidRequestError(
            f"--abort-if {text!r}: expected RULE=NUMBER, with a rule of {', '.join(RULES)}"
        ) from None


def start(connection: Connection, rollout: StartRollout, *, wait: bool) -> None:
    """Begin a rollout; with ``wait`` also see it through, and fail when it goes back."""
    goal = connection.request(rollout)
    if goal is None:
        click.echo(f"{rollout.to!r} has all traffic of {rollout.endpoint!r} already")
        return
    if not wait:
        click.echo(f"began, with goal {goal}; see it with: greenroom status")
        return
    with Progress(f"rolling out {rollout.to!r} at {rollout.endpoint!r}"):
        wait_for_goal(connection, goal)
    click.echo(f"{rollout.to!r} has all traffic of {rollout.endpoint!r}")


def end(connection: Connection, endpoint: str, *, promote: bool) -> None:
    """End a rollout now."""
    kind = PromoteRollout if promote else AbortRollout
    connection.request(kind(endpoint=endpoint))
    click.echo(f"{'promoted' if promote else 'went back'} at {endpoint!r}")


def lines_of(rollouts: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of each rollout, a headline and what it knows."""
    return [line for name, rollout in rollouts.items() for line in _lines(name, rollout)]


def _lines(endpoint: str, rollout: Mapping[str, Any]) -> list[str]:
    under_way = rollout["state"] == "under way"
    where = rollout["state"]
    if under_way:
        step, steps = rollout["step"], rollout["steps"]
        share = f", {steps[step - 1] * 100:.4g} %" if step else ""
        where = f"step {step} of {len(steps)}{share}"
    lines = [f"rollout of {endpoint} to {rollout['to']}: {where}: {rollout['why']}"]
    if rollout["step"]:
        lines += [f"  {side}: {_side(rollout[side])}" for side in ("new", "old")]
        needed = f"{rollout['evidence_to_go_back']:.4g} needed to go back"
        lines.append(f"  evidence {rollout['evidence']:.3g} of {needed}")
        lines += [
            f"    {name} {rule['limit']:.4g}: evidence {rule['evidence']:.3g}"
            for name, rule in rollout["rules"].items()
        ]
    return lines


def _side(side: Mapping[str, Any]) -> str:
    rate = "-" if side["error_rate"] is None else f"{side['error_rate'] * 100:.3g} %"
    p95 = "-" if side["p95_latency_s"] is None else f"{side['p95_latency_s'] * 1000:.3g} ms"
    overdue = f", {side['overdue']} open for long" if side["overdue"] else ""
    return f"{side['queries']} queries, {side['errors']} bad ({rate}), p95 {p95}{overdue}"
