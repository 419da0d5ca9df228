"""The status of a system as tables; imported only where tables are printed, for Rich takes long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from greenroom.serve.admin.reports import problems_of

_COLOURS = {
    "green": "RUNNING HEALTHY",
    "yellow": "DEPLOYING UPDATING UPSCALING DOWNSCALING DELETING STARTING STOPPING DRAINING",
    "red": "UNHEALTHY LOST DEPLOY_FAILED",
}
_ANY_WIDTH = 10_000
_STYLES = {state: colour for colour, states in _COLOURS.items() for state in states.split()}


def _console() -> Console:
    """Return one that cuts nothing where it writes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_ANY_WIDTH)


def show_status(report: Mapping[str, Any]) -> None:
    """Print the controller's report."""
    console = _console()
    hosts, applications = report.get("hosts") or (), report.get("applications") or {}
    controller = report.get("controller") or {}
    columns = ("host", "state", "HTTP", "processes", "release")
    is_mixed = len({host.get("release") for host in hosts}) > 1  # during an upgrade
    shown = len(columns) if is_mixed else len(columns) - 1
    rows = [_host(host, controller)[:shown] for host in hosts]
    console.print(_table(columns[:shown], rows))
    if applications:
        console.print(_applications(applications, has_several_hosts=len(hosts) > 1))
    else:
        console.print("no applications")
    _print_lines(console, problems_of(report), style="red")
    _print_rows(
        console,
        ("endpoint", "route", "methods", "traffic", "shadows"),
        (
            (
                name,
                of.get("route"),
                " ".join(of.get("methods") or ()),
                _shares(of.get("traffic") or {}),
                _shares(of.get("shadows") or {}),
            )
            for name, of in (report.get("endpoints") or {}).items()
        ),
    )
    _print_rows(
        console,
        ("backend", "version", "replicas", "state", "pids"),
        (
            (tag, of.get("version"), _running_of(of), _state(of.get("status")), _pids(of))
            for tag, of in (report.get("backends") or {}).items()
            if not of.get("application")
        ),
    )
    _print_rows(
        console,
        ("replicas replaced", "how many, and why"),
        (
            (tag, ", ".join(f"{count} {why}" for why, count in of["restarts"].items()))
            for tag, of in (report.get("backends") or {}).items()
            if of.get("restarts")
        ),
    )
    for name, rollout in (report.get("rollouts") or {}).items():
        _print_lines(console, _rollout(name, rollout))
    _print_rows(
        console,
        ("resource", "taken", "of"),
        (
            (name, f"{amount['taken']:.9g}", f"{amount['total']:.9g}")
            for name, amount in (report.get("resources") or {}).items()
            if amount["taken"]
        ),
    )
    _print_rows(
        console,
        ("goal under way", "of", "what"),
        (
            (goal.get("id"), goal.get("subject"), goal.get("what"))
            for goal in report.get("goals") or ()
            if goal.get("state") == "pending"
        ),
    )


def show_autoscaling(report: Mapping[str, Any]) -> None:
    """Print what GetAutoscaling answered: a table of backends, then their latest decisions."""
    console = _console()
    if not report:
        console.print("no backend has an autoscaling_config")
        return
    rows = [
        (
            tag,
            backend["running_replicas"],
            backend["target_replicas"],
            f"{backend['config']['min_replicas']}..{backend['config']['max_replicas']}",
            backend.get("queued"),
            backend.get("ongoing"),
            f"{backend.get('average_load', 0):.4g}",
        )
        for tag, backend in report.items()
    ]
    columns = ("backend", "run", "target", "bounds", "queued", "ongoing", "average")
    console.print(_table(columns, rows))
    for tag, backend in report.items():
        if backend.get("decisions"):
            title = f"{tag}, by {backend['config']['policy']['policy_function']}"
            if failures := backend.get("policy_failures"):
                title += f", which failed {failures} times"
            decisions = map(_decision, backend["decisions"])
            table = _table(("at", "target", "decision", "why"), decisions)
            table.title, table.title_justify = Text(title), "left"
            console.print(table)


def _decision(decision: Mapping[str, Any]) -> tuple[Any, ...]:
    at, since = (
        time.strftime("%H:%M:%S", time.localtime(decision[when])) for when in ("at", "since")
    )
    before, after = decision["from"], decision["to"]
    return (
        at if decision["times"] == 1 else f"{since} to {at}",
        after if before == after else f"{before} -> {after}",
        decision["outcome"],
        decision["why"],
    )


def _host(host: Mapping[str, Any], controller: Mapping[str, Any]) -> tuple[Any, ...]:
    front = host.get("front") or {}
    pids = {
        "controller": controller.get("pid") if controller.get("host") == host["name"] else None,
        "host": host.get("host_pid"),
        "proxy": (host.get("proxy") or {}).get("pid"),
        "front": front.get("pid"),
        "workers": " ".join(map(str, front.get("workers") or ())),
        "gRPC": (host.get("grpc") or {}).get("pid"),
    }
    processes = ", ".join(f"{role} {pid}" for role, pid in pids.items() if pid)
    release = host.get("release")
    state = _state(host.get("state"))
    if not host.get("takes_replicas", True):
        state.append(", no replicas")
    return host["name"], state, front.get("url"), processes, release


def _applications(applications: Mapping[str, Any], *, has_several_hosts: bool) -> Table:
    columns = ("application, deployments, replicas", "route", "state", "pid", "busy", "host")
    table = _table(columns if has_several_hosts else columns[:-1], ())
    for name, application in applications.items():
        _add(table, name, application.get("route_prefix"), _state(application["status"]))
        for deployment, state in application["deployments"].items():
            _add(table, f"  {deployment}: {_running_of(state)}", "", _state(state["status"]))
            for replica in state.get("replicas") or ():
                tag = str(replica.get("tag")).removeprefix(f"{name}#{deployment}#")
                host = (replica.get("host"),) if has_several_hosts else ()
                busy = (replica.get("pid"), replica.get("ongoing"))
                for resource, numbers in (replica.get("devices") or {}).items():
                    tag += f" on {resource} {' '.join(map(str, numbers))}"
                _add(table, f"    {tag}", "", _state(replica.get("state")), *busy, *host)
        table.add_section()
    return table


def _running(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in state.get("replicas") or () if each.get("state") == "RUNNING"]


def _running_of(state: Mapping[str, Any]) -> str:
    return f"{len(_running(state))} of {state.get('target_replicas', '?')}"


def _pids(state: Mapping[str, Any]) -> str:
    return " ".join(str(replica.get("pid")) for replica in _running(state))


def _shares(policy: Mapping[str, float]) -> str:
    return ", ".join(f"{tag} {share * 100:.4g}%" for tag, share in policy.items())


def _rollout(endpoint: str, rollout: Mapping[str, Any]) -> list[str]:
    where = rollout["state"]
    if where == "under way":
        step, steps = rollout["step"], rollout["steps"]
        share = f", {steps[step - 1] * 100:.4g} %" if step else ""
        where = f"step {step} of {len(steps)}{share}"
    lines = [f"rollout of {endpoint} to {rollout['to']}: {where}: {rollout['why']}"]
    if rollout["step"] and rollout["state"] == "under way":  # of one that has ended, why is enough
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


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        _add(table, *row)
    return table


def _add(table: Table, *cells: Any) -> None:
    table.add_row(*(each if isinstance(each, Text) else Text(_shown(each)) for each in cells))


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _state(value: Any) -> Text:
    text = _shown(value)
    return Text(text, style=_STYLES.get(text.upper(), ""))


def _print_rows(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table, unless it is empty."""
    table = _table(columns, rows)
    if table.row_count:
        console.print(table)


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False)
