"""The commands that read a system that runs, and what all commands on one use."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime import liveness as silence
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport import admission
from greenroom.core import operations as ops
from greenroom.core.errors import DeployFailedError, GreenroomError
from greenroom.core.validation import unknown_name
from greenroom.serve.admin import applications, reports
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.cli.display import Progress
from greenroom.serve.cli.flags import ANYWHERE, HERE, as_json, command, reading, settings_from
from greenroom.serve.cli.logs import Line, Logs

STATUS_TIMEOUT_S = 10.0
COMPLETION_TIMEOUT_S = 2.0
WATCH_S = 1.0
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_LONGEST = 60  # characters of a value


@contextlib.contextmanager
def connected(settings: HostSettings) -> Iterator[Connection]:
    """Connect for the time of a command."""
    # Where no address answers, the error that follows says which could not be reached, and why.
    warnings = logging.getLogger(admission.__name__)
    before = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        with contextlib.closing(Connection.open(settings)) as connection:
            yield connection
    finally:
        warnings.setLevel(before)


def request(
    settings: HostSettings, operation: ops.Operation, timeout_s: float | None = None
) -> Any:
    """Ask a system for an operation; return its answer."""
    with connected(settings) as connection:
        return connection.request(operation, timeout_s=timeout_s)


def print_json(value: Any) -> None:
    """Print a value as JSON, on several lines."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on standard output."""
    for line in lines:
        click.echo(line)


def complete_names(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an application that runs on the system of the environment."""
    try:
        with connected(settings_from({})) as connection:  # soon or not at all: a shell waits
            names = reports.read_report(connection, COMPLETION_TIMEOUT_S)["applications"]
    except (GreenroomError, TimeoutError, OSError, click.ClickException):
        return []  # none runs, or a variable is wrong
    return sorted(name for name in names if name.startswith(incomplete))


def _complete_operations(_ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return sorted(name for name in ops.OPERATIONS if name.startswith(begun))


# --- Applications and their changes -------------------------------------------------------------


@contextlib.contextmanager
def constructor_errors(what: str) -> Iterator[None]:
    """Show the traceback of a constructor that raised, and fail with one line about ``what``."""
    try:
        yield
    except DeployFailedError as error:
        if (cause := error.__cause__) is None:
            raise
        click.echo(str(error), err=True)
        raise GreenroomError(f"{what}: {type(cause).__name__}: {cause}") from error


@contextlib.contextmanager
def going_on(what: str) -> Iterator[None]:
    """Say at Ctrl-C that what is waited for goes on without this command."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"{what} goes on; `greenroom status` shows how far it is", err=True)
        raise


@command(*ANYWHERE)
@click.argument("name", shell_complete=complete_names)
def delete(name: str, settings: HostSettings) -> None:
    """Delete an application."""
    what = f"deleting {name!r}"
    with connected(settings) as connection, going_on(what), Progress(what):
        if not applications.delete(connection, name):
            raise unknown_name("application", name, reports.read_report(connection)["applications"])
    click.echo(f"deleted {name!r}")


@command(*ANYWHERE)
@as_json
@click.option("-n", "most", type=click.IntRange(1), default=20, help="How many changes [20].")
def history(as_json: bool, most: int, settings: HostSettings) -> None:
    """Show the last changes: when, which user, and what they changed."""
    entries = list(request(settings, ops.ListHistory()))[-most:]
    if as_json:
        print_json(entries)
        return
    if not entries:
        click.echo("nothing has been changed yet")
    for entry in entries:
        at = dt.datetime.fromtimestamp(entry["at"]).astimezone()
        who = "@".join(filter(None, (entry["user"] or "?", entry["address"])))
        click.echo(f"{entry['id']:>4}  {at:%Y-%m-%d %H:%M:%S}  {who}  {entry['what']}")
        print_lines(f"      {line}" for line in lines_of(entry["changes"]))


@command(*ANYWHERE)
@click.argument("change_id", metavar="[ID]", type=int, required=False)
def undo(change_id: int | None, settings: HostSettings) -> None:
    """Restore what was before a change, by default the last one.

    This is a change of its own, which can be undone too. ID is what history shows.
    """
    with connected(settings) as connection:
        undone = connection.request(ops.UndoChange(change_id=change_id))
        print_lines(lines_of(undone["changes"]))
        failed, what = (
            f"change {undone['id']} could not be undone",
            f"undoing change {undone['id']}",
        )
        with constructor_errors(failed), going_on(what), Progress(what):
            wait_for_goal(connection, undone["goal"])
    click.echo(f"undid change {undone['id']}: {undone['what']}")


@command(*ANYWHERE)
@click.argument("operation", shell_complete=_complete_operations)
@click.argument("fields", metavar="[JSON]", default="{}")
def ask(operation: str, fields: str, settings: HostSettings) -> None:
    """Ask for any OPERATION of the admin API, such as set_traffic; print its answer as JSON.

    Its fields are a JSON object, as over HTTP: '{"endpoint": "e", "weights": {"v1": 1}}'.
    """
    with reading():
        asked = ops.read_given(ops.named(operation), fields)
    print_json(request(settings, asked))


def lines_of(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Return a line for each thing that changes."""
    for change in changes:
        fields = "; ".join(_fields_of(change))
        what = f"{_SIGNS[change['change']]} {change['kind']} {change['name']}"
        yield f"{what}: {fields}" if fields else what


def _fields_of(change: Mapping[str, Any]) -> Iterator[str]:
    fields: dict[str, list[Any]] = dict(change["fields"])
    if change["change"] == "added":
        for name in ("num_replicas", "version", "route", "route_prefix", "traffic"):
            if fields.get(name, (None, None))[1] is not None:
                yield f"{name} {_short(fields[name][1])}"
    elif change["change"] == "changed":
        restarts = "code_hash" in fields or any(name.startswith("actor_options") for name in fields)
        if fields.pop("code_hash", None):
            yield "other code or version" if "version" in fields else "other code"
        for name, (old, new) in fields.items():
            yield f"{name} {_short(old)} -> {_short(new)}"
        if change["kind"] == "backend":
            yield "replicas are replaced one after another" if restarts else "in place"


def _short(value: Any) -> str:
    if value is None:
        return "none"
    is_text = isinstance(value, str)
    text = str(value) if is_text else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


# --- What runs, and its logs ----------------------------------------------------------------------


def _watch_status(settings: HostSettings, name: str | None, *, as_json: bool) -> None:
    """Print the state again and again, until Ctrl-C; what cannot be asked is shown."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            click.clear()  # does nothing where the output is no terminal
            try:
                _show_status(settings, name, as_json=as_json)
            except (GreenroomError, TimeoutError, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise  # what reads this has ended
                click.echo(f"Error: {error}", err=True)
            time.sleep(WATCH_S)


def _of_application(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the report of one application alone."""
    found = report["applications"].get(name)
    if found is None:
        raise unknown_name("application", name, report["applications"])
    endpoints = {f"{name}#{deployment}" for deployment in found["deployments"]}
    own = {key: of for key, of in (report.get("endpoints") or {}).items() if key in endpoints}
    kept: dict[str, Any] = {key: report[key] for key in ("controller", "hosts") if key in report}
    return {**kept, "applications": {name: found}, "endpoints": own}


@command(*ANYWHERE)
@click.argument("name", required=False, shell_complete=complete_names)
@as_json
@click.option("--autoscaling", is_flag=True, help="Show what autoscaling decided, and why.")
@click.option("-w", "--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
def status(
    name: str | None, as_json: bool, autoscaling: bool, watch: bool, settings: HostSettings
) -> None:
    """Show hosts, applications, deployments and replicas; or the application NAME alone.

    The exit code is 0 only when all that is shown is healthy; always, with --autoscaling.
    """
    if autoscaling:
        if name or watch:
            raise click.UsageError("--autoscaling shows all backends, once")
        _show_autoscaling(settings, as_json=as_json)
    elif watch:
        _watch_status(settings, name, as_json=as_json)
    elif not _show_status(settings, name, as_json=as_json):
        sys.exit(1)


def _show_status(settings: HostSettings, name: str | None, *, as_json: bool) -> bool:
    """Print the state of everything, or of an application; return whether that is healthy."""
    here = {} if settings.remote_addresses else RunRecords(settings.run_dir).alive()
    silent = silence.silent_among(here)
    try:
        with connected(settings) as connection, Progress("asking the controller"):
            report = reports.read_report(connection, STATUS_TIMEOUT_S)
    except (GreenroomError, TimeoutError) as error:
        if not silent:
            raise
        raise GreenroomError("; ".join([str(error), *map(silence.describe, silent)])) from error
    reports.show_silent(report, silent)
    if name is not None:
        report = _of_application(report, name)
    if as_json:
        print_json(report)
    else:
        from greenroom.serve.cli.tables import show_status  # noqa: PLC0415  # imports Rich

        show_status(report)
    return not reports.problems_of(report)


def _show_autoscaling(settings: HostSettings, *, as_json: bool) -> None:
    """Print what autoscaling goes by and has decided."""
    with Progress("asking the controller"):
        report = request(settings, ops.GetAutoscaling(), STATUS_TIMEOUT_S)
    if as_json:
        print_json(report)
    else:
        from greenroom.serve.cli.tables import show_autoscaling  # noqa: PLC0415  # imports Rich

        show_autoscaling(report)


@command(*HERE)
@click.argument("name", required=False, shell_complete=complete_names)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=100,
    help="Lines of each log to begin with [100].",
)
def logs(name: str | None, follow: bool, lines: int, settings: HostSettings) -> None:
    """Show logs: those whose name contains NAME, or all.

    NAME can be an application, a deployment, a replica, or "controller".
    """
    found = Logs(settings.logs_dir, name=name)
    if not found.names() and not follow:
        known = ", ".join(Logs(settings.logs_dir).names()) or "none"
        raise GreenroomError(
            ("no log is" if name is None else f"no log matches {name!r}")
            + f" in {settings.logs_dir}; there are: {known}; the logs of a system that does not "
            "run are found by --state-dir, if it was started with that"
        )
    for line in found.tail(lines):
        print_line(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for line in found.follow(threading.Event().wait):
                print_line(line)


def print_line(line: Line) -> None:
    """Print a line of a log, with its origin."""
    click.echo(f"{click.style(line.log.removeprefix('replica-'), dim=True)} | {line.text}")
