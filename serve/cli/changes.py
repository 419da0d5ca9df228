"""The commands about changes: what a deploy would do, what was done by whom, and undoing it."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from greenroom.actors.runtime.connection import Connection
from greenroom.core.errors import GreenroomError
from greenroom.core.operations import ListHistory, PlanApplication, UndoChange
from greenroom.serve.admin.applications import build_in, check_needs
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.cli.display import Progress
from greenroom.serve.deployments import Application

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_LONGEST = 60  # characters of a value


def plan(
    connection: Connection,
    application: Application,
    name: str,
    route_prefix: str | None,
    working_dir: Path | None = None,
) -> list[dict[str, Any]]:
    """Return what deploying an application would change."""
    built, _ = build_in(working_dir, application, name, route_prefix)
    check_needs(connection, built)
    operation = PlanApplication(
        application=name,
        ingress=built.ingress,
        route_prefix=route_prefix,
        deployments=built.deployments,
    )
    return list(connection.request(operation))


def show_plan(changes: list[dict[str, Any]], name: str) -> None:
    """Print what would change."""
    for line in lines_of(changes):
        click.echo(line)
    told = "; nothing was changed yet" if changes else " would change nothing"
    click.echo(f"deploying {name!r}{told}")


def show_history(connection: Connection, *, as_json: bool, most: int) -> None:
    """Print the changes that are kept, the newest last."""
    entries = list(connection.request(ListHistory()))[-most:]
    if as_json:
        click.echo(json.dumps(entries, indent=2, default=str))
        return
    if not entries:
        click.echo("nothing has been changed yet")
    for entry in entries:
        at = dt.datetime.fromtimestamp(entry["at"]).astimezone()
        who = f"{entry['user'] or '?'}@{entry['address']}"
        click.echo(f"{entry['id']:>4}  {at:%Y-%m-%d %H:%M:%S}  {who}  {entry['what']}")
        for line in lines_of(entry["changes"]):
            click.echo(f"      {line}")


@contextlib.contextmanager
def told_of_user_code(what: str) -> Iterator[None]:
    """Show the traceback of a constructor that raised, and fail with one line about ``what``."""
    try:
        yield
    except (GreenroomError, TimeoutError, OSError):
        raise
    except Exception as error:  # the constructor's own
        click.echo("\n".join(getattr(error, "__notes__", ())), err=True)
        raise GreenroomError(f"{what}: {type(error).__name__}: {error}") from error


def undo(connection: Connection, change_id: int | None) -> None:
    """Undo a change, say what that changed, and wait until it is done."""
    undone = connection.request(UndoChange(change_id=change_id))
    for line in lines_of(undone["changes"]):
        click.echo(line)
    told = f"change {undone['id']} could not be undone"
    with told_of_user_code(told), Progress(f"undoing change {undone['id']}"):
        wait_for_goal(connection, undone["goal"])
    click.echo(f"undid change {undone['id']}: {undone['what']}")


def lines_of(changes: list[dict[str, Any]]) -> Iterator[str]:
    """Return a line for each thing that changes."""
    for change in changes:
        told = "; ".join(_fields_of(change))
        what = f"{_SIGNS[change['change']]} {change['kind']} {change['name']}"
        yield f"{what}: {told}" if told else what


def _fields_of(change: Mapping[str, Any]) -> Iterator[str]:
    fields: dict[str, list[Any]] = dict(change["fields"])
    if change["change"] == "removed":
        return
    if change["change"] == "added":
        shown = ("num_replicas", "version", "route", "route_prefix", "traffic")
        for name in shown:
            if name in fields and fields[name][1] is not None:
                yield f"{name} {_short(fields[name][1])}"
        return
    restarts = "code_hash" in fields or any(name.startswith("actor_options") for name in fields)
    if fields.pop("code_hash", None):
        yield "other code or version" if "version" in fields else "other code"
    for name, (old, new_value) in fields.items():
        yield f"{name} {_short(old)} -> {_short(new_value)}"
    if change["kind"] == "backend":
        yield "replicas are replaced one after another" if restarts else "in place"


def _short(value: Any) -> str:
    text = (
        "none"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, default=str, ensure_ascii=False)
    )
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
