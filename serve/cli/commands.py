"""What the commands of ``greenroom`` do with a system that runs, once their flags are read."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from greenroom.actors.host import launcher as system
from greenroom.actors.host.records import RunRecords
from greenroom.actors.runtime import liveness as silence
from greenroom.actors.runtime.connection import Connection
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport import admission
from greenroom.actors.transport.cluster_key import ClusterKeyError, create_key, make_key
from greenroom.core import operations as ops
from greenroom.core.errors import (
    DeployFailedError,
    GreenroomError,
    InvalidRequestError,
    UnknownNameError,
)
from greenroom.core.rollouts.judging import RULES
from greenroom.core.tokens import PREFIX, Role, digest_of
from greenroom.serve.admin import applications
from greenroom.serve.admin.session import delete_everything, wait_for_goal
from greenroom.serve.cli.display import Progress, note_silent, problems_of
from greenroom.serve.cli.logs import Line, Logs

STATUS_TIMEOUT_S = 10.0
COMPLETION_TIMEOUT_S = 2.0
WATCH_S = 1.0
ROTATE_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_LONGEST = 60  # characters of a value
_SHOWN_EXAMPLES = 3  # of each cause of a difference


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


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on standard output."""
    for line in lines:
        click.echo(line)


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


def delete(settings: HostSettings, name: str) -> None:
    """Delete an application and wait until it is gone."""
    with connected(settings) as connection, Progress(f"deleting {name!r}"):
        found = applications.delete(connection, name)
    click.echo(f"deleted {name!r}" if found else f"no application is named {name!r}")


def history(settings: HostSettings, *, as_json: bool, most: int) -> None:
    """Print the changes that are kept, the newest last."""
    with connected(settings) as connection:
        entries = list(connection.request(ops.ListHistory()))[-most:]
    if as_json:
        _print_json(entries)
        return
    if not entries:
        click.echo("nothing has been changed yet")
    for entry in entries:
        at = dt.datetime.fromtimestamp(entry["at"]).astimezone()
        who = "@".join(filter(None, (entry["user"] or "?", entry["address"])))
        click.echo(f"{entry['id']:>4}  {at:%Y-%m-%d %H:%M:%S}  {who}  {entry['what']}")
        print_lines(f"      {line}" for line in lines_of(entry["changes"]))


def undo(settings: HostSettings, change_id: int | None) -> None:
    """Undo a change, say what that changed, and wait until it is done."""
    with connected(settings) as connection:
        undone = connection.request(ops.UndoChange(change_id=change_id))
        print_lines(lines_of(undone["changes"]))
        failed = f"change {undone['id']} could not be undone"
        with constructor_errors(failed), Progress(f"undoing change {undone['id']}"):
            wait_for_goal(connection, undone["goal"])
    click.echo(f"undid change {undone['id']}: {undone['what']}")


def lines_of(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Return a line for each thing that changes."""
    for change in changes:
        told = "; ".join(_fields_of(change))
        what = f"{_SIGNS[change['change']]} {change['kind']} {change['name']}"
        yield f"{what}: {told}" if told else what


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


# --- Traffic ------------------------------------------------------------------------------------


def rollout_from(
    endpoint: str, to: str, steps: str, abort_if: Sequence[str], **numbers: Any
) -> ops.StartRollout:
    """Read a rollout from flags; InvalidRequestError naming what is wrong."""
    shares = read_shares("--steps", steps)
    rules = dict(map(read_rule, abort_if)) or None
    return ops.StartRollout.of(endpoint=endpoint, to=to, steps=shares, abort_if=rules, **numbers)


def read_shares(flag: str, steps: str) -> list[float]:
    """Read numbers with commas between."""
    try:
        return [float(step) for step in steps.split(",")]
    except ValueError:
        raise InvalidRequestError(
            f"{flag} {steps!r}: expected shares with commas between, such as 0.01,0.1,1"
        ) from None


def read_rule(text: str) -> tuple[str, float]:
    """Read the flag ``--abort-if``."""
    name, _, limit = text.partition("=")
    try:
        return name, float(limit)
    except ValueError:
        raise InvalidRequestError(
            f"--abort-if {text!r}: expected RULE=NUMBER, with a rule of {', '.join(RULES)}"
        ) from None


def start_rollout(settings: HostSettings, rollout: ops.StartRollout, *, wait: bool) -> None:
    """Begin a rollout; with ``wait`` also see it through, and fail when it goes back."""
    with connected(settings) as connection:
        endpoint = applications.endpoint_named(connection, rollout.endpoint)
        goal = connection.request(rollout.model_copy(update={"endpoint": endpoint}))
        if goal is not None and not wait:
            click.echo(f"began, with goal {goal}; see it with: greenroom status")
            return
        if goal is not None:
            with Progress(f"rolling out {rollout.to!r} at {rollout.endpoint!r}"):
                wait_for_goal(connection, goal)
    already = " already" if goal is None else ""
    click.echo(f"{rollout.to!r} has all traffic of {rollout.endpoint!r}{already}")


def end_rollout(settings: HostSettings, endpoint: str, *, promote: bool) -> None:
    """End a rollout now, one way or the other."""
    kind = ops.PromoteRollout if promote else ops.AbortRollout
    with connected(settings) as connection:
        connection.request(kind(endpoint=applications.endpoint_named(connection, endpoint)))
    click.echo(f"{'promoted' if promote else 'went back'} at {endpoint!r}")


def diff(settings: HostSettings, endpoint: str, *, as_json: bool) -> None:
    """Print how the answers of an endpoint's shadows differ."""
    with connected(settings) as connection:
        named = applications.endpoint_named(connection, endpoint)
        found: dict[str, Any] = connection.request(ops.GetDifferences(endpoint=named))
    if as_json:
        _print_json(found)
        return
    if not found:
        click.echo(f"no shadow of {endpoint!r} is compared; see Client.shadow_traffic")
    for shadow, of_shadow in found.items():
        print_lines(differences(shadow, of_shadow))


def differences(shadow: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Return lines of what comparing a backend's answers has found."""
    yield (
        f"{shadow} ({found['by']}): {found['compared']} compared, {found['different']} different, "
        f"{found['not_compared']} not compared"
    )
    for cause in found["causes"]:
        mark = "" if cause["comparable"] else " (not compared)"
        yield f"{cause['count']:>8}  {cause['cause']}{mark}"
        for example in cause["examples"][-_SHOWN_EXAMPLES:]:
            yield f"          {example['request_id']}  {_example(example)}"


def _example(example: Mapping[str, Any]) -> str:
    if example["detail"]:
        return str(example["detail"])
    sides = []
    for side in ("primary", "shadow"):
        answer = example[side]
        said = "no answer" if answer is None else answer["missing"] or repr(answer["body"][:60])
        sides.append(f"{side} {said}")
    return ", ".join(sides)


# --- The system and its hosts -------------------------------------------------------------------


def application_names(settings: HostSettings) -> list[str]:
    """Return the names of all applications, soon or not at all: a shell waits for them."""
    with connected(settings) as connection:
        return sorted(applications.read_report(connection, COMPLETION_TIMEOUT_S)["applications"])


def watch_status(settings: HostSettings, name: str | None, *, as_json: bool) -> None:
    """Print the state again and again, until Ctrl-C; what cannot be asked is told."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            click.clear()  # does nothing where the output is no terminal
            try:
                status(settings, name, as_json=as_json)
            except (GreenroomError, TimeoutError, OSError) as error:
                click.echo(f"Error: {error}", err=True)
            time.sleep(WATCH_S)


def _of_application(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the report of one application alone."""
    found = report["applications"].get(name)
    if found is None:
        names = ", ".join(sorted(report["applications"])) or "none"
        raise UnknownNameError(f"no application is named {name!r}; there are: {names}")
    endpoints = {f"{name}#{deployment}" for deployment in found["deployments"]}
    own = {key: of for key, of in (report.get("endpoints") or {}).items() if key in endpoints}
    kept: dict[str, Any] = {key: report[key] for key in ("controller", "hosts") if key in report}
    return {**kept, "applications": {name: found}, "endpoints": own}


def status(settings: HostSettings, name: str | None = None, *, as_json: bool) -> bool:
    """Print the state of everything, or of an application; return whether that is healthy."""
    here = {} if settings.remote_addresses else RunRecords(settings.run_dir).alive()
    silent = silence.silent_among(here)
    try:
        with connected(settings) as connection, Progress("asking the controller"):
            report = applications.read_report(connection, STATUS_TIMEOUT_S)
    except (GreenroomError, TimeoutError) as error:
        if not silent:
            raise
        raise GreenroomError("; ".join([str(error), *map(silence.told, silent)])) from error
    note_silent(report, silent)
    if name is not None:
        report = _of_application(report, name)
    if as_json:
        _print_json(report)
    else:
        from greenroom.serve.cli.tables import show_status  # noqa: PLC0415  # imports Rich

        show_status(report)
    return not problems_of(report)


def autoscaling(settings: HostSettings, *, as_json: bool) -> None:
    """Print what autoscaling goes by and has decided."""
    with connected(settings) as connection, Progress("asking the controller"):
        report = applications.read_autoscaling(connection, STATUS_TIMEOUT_S)
    if as_json:
        _print_json(report)
    else:
        from greenroom.serve.cli.tables import show_autoscaling  # noqa: PLC0415  # imports Rich

        show_autoscaling(report)


def drain(settings: HostSettings, host: str, *, force: bool) -> None:
    """Replace elsewhere what is on a host, and wait for that."""
    with connected(settings) as connection, Progress(f"draining host {host!r}"):
        try:
            connection.request(ops.DrainHost(host=host, force=force), timeout_s=DRAIN_TIMEOUT_S)
        except TimeoutError:
            raise GreenroomError(
                f"host {host!r} takes no replicas any more, but has some after "
                f"{DRAIN_TIMEOUT_S:g} s: they go when others run in their place, and the same "
                "command waits again; `greenroom status` shows them, and what they wait for"
            ) from None
    click.echo(f"drained host {host!r}; `greenroom undrain {host}` lets it take replicas again")


def undrain(settings: HostSettings, host: str) -> None:
    """Let a host that was drained take replicas again."""
    with connected(settings) as connection:
        connection.request(ops.UndrainHost(host=host), timeout_s=STATUS_TIMEOUT_S)
    click.echo(f"host {host!r} takes replicas; `greenroom rebalance` moves some there")


def evict(settings: HostSettings, host: str) -> None:
    """Make the cluster forget a host that is lost."""
    with connected(settings) as connection:
        connection.request(ops.EvictHost(host=host), timeout_s=STATUS_TIMEOUT_S)
    click.echo(f"forgot host {host!r}")


def keygen(file: Path) -> None:
    """Make a cluster file."""
    try:
        is_new = create_key(file, make_key())
    except ClusterKeyError as error:
        raise GreenroomError(str(error)) from None
    if not is_new:
        raise GreenroomError(f"{file} exists; `greenroom rotate-key` replaces a cluster's file")
    click.echo(f"made {file}: give it to each host, and keep it private")


def rotate_key(settings: HostSettings) -> None:
    """Replace the key of all hosts."""
    with connected(settings) as connection, Progress("replacing the cluster's key"):
        try:
            done = connection.request(ops.RotateKey(), timeout_s=ROTATE_TIMEOUT_S)
        except TimeoutError:
            raise GreenroomError(
                f"not all hosts had stored the new key after {ROTATE_TIMEOUT_S:g} s; until they "
                "have, the key before is taken too. It goes on by itself, and the same command "
                "waits for it again; `greenroom status` shows the hosts"
            ) from None
    click.echo(f"the key is replaced on {', '.join(done['hosts'])}")
    for host in done["away"]:
        click.echo(
            f"host {host!r} is lost and lacks the new key: copy cluster.key from the state dir of "
            f"another host over its own, or forget it with `greenroom evict {host}`",
            err=True,
        )


def rebalance(settings: HostSettings) -> None:
    """Move replicas to hosts that have fewer."""
    with connected(settings) as connection:
        moved = connection.request(ops.RebalanceHosts(), timeout_s=STATUS_TIMEOUT_S)
    click.echo(f"moving {moved} replicas" if moved else "nothing to move")


def destroy(settings: HostSettings, *, is_sure: bool) -> None:
    """Delete everything, stop the system and delete its state; ask first unless ``is_sure``."""
    what = (
        f"all hosts of the cluster stop, and the state in {settings.store_name} and "
        f"{settings.state_dir} is deleted: applications, code, history and logs"
    )
    if not is_sure:
        if not sys.stdin.isatty():
            raise click.UsageError(f"{what}. Give --yes to do so where nobody can be asked")
        click.confirm(f"{what[0].upper()}{what[1:]}. Do it?", abort=True)
    with Progress("stopping"):
        with contextlib.suppress(GreenroomError, TimeoutError), connected(settings) as connection:
            delete_everything(connection)
            if len(applications.read_report(connection).get("hosts") or ()) > 1:
                connection.request(ops.StopCluster(forget=True), timeout_s=STATUS_TIMEOUT_S)
        stopped = system.stop(settings, forget=True)
    click.echo(f"{'stopped' if stopped else 'nothing was running'}; its state is deleted")


def logs(settings: HostSettings, name: str | None, *, follow: bool, lines: int) -> None:
    """Print the last lines of the logs that ``name`` picks, then what is added to them."""
    found = Logs(settings.logs_dir, name=name)
    if not found.names() and not follow:
        known = ", ".join(Logs(settings.logs_dir).names()) or "none"
        raise GreenroomError(f"no log matches {name!r} in {settings.logs_dir}; there are: {known}")
    for line in found.tail(lines):
        print_line(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for line in found.follow(threading.Event().wait):
                print_line(line)


def print_line(line: Line) -> None:
    """Print a line of a log, with its origin."""
    click.echo(f"{click.style(line.log.removeprefix('replica-'), dim=True)} | {line.text}")


# --- Tokens for the HTTP API, made here and kept as hashes ---------------------------------------

_NEVER = "never"
_MAX_TOKEN_DAYS = 3650
_TOKEN_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def create_token(settings: HostSettings, name: str | None, role: Role, expires: str) -> None:
    """Make a token and print it, which nothing does again."""
    expires_at = _expiry(expires)
    name = name or f"{role}-{secrets.token_hex(3)}"
    token = PREFIX + secrets.token_urlsafe(32)
    asked = ops.CreateToken(
        name=name, digest=digest_of(token), holder_role=role, expires_at=expires_at
    )
    with connected(settings) as connection:
        connection.request(asked)
    click.echo(f"token {name!r}, role {role}, {_until(expires_at)}; shown only now:", err=True)
    click.echo(token)


def list_tokens(settings: HostSettings, *, as_json: bool) -> None:
    """Print the tokens' names, roles and ends."""
    with connected(settings) as connection:
        listed = connection.request(ops.ListTokens())
    if as_json:
        _print_json(listed)
        return
    if not listed:
        click.echo("there are no tokens")
    for each in sorted(listed, key=lambda each: str(each["name"])):
        made_at = dt.datetime.fromtimestamp(each["created_at"]).astimezone()
        until = _until(each["expires_at"])
        click.echo(f"{each['name']}  {each['role']}  made {made_at:%Y-%m-%d %H:%M}, {until}")


def revoke_token(settings: HostSettings, name: str) -> None:
    """Forget a token."""
    with connected(settings) as connection:
        connection.request(ops.RevokeToken(name=name))
    click.echo(f"revoked {name!r}; requests with it are refused within two seconds")


def _expiry(expires: str) -> float | None:
    if expires == _NEVER:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([hdw])", expires)
    days = int(match[1]) * _TOKEN_DAYS[match[2]] if match else 0.0
    if not 0 < days <= _MAX_TOKEN_DAYS:
        raise InvalidRequestError(
            f"--expires {expires!r}: expected hours, days or weeks, such as 12h, 30d or 8w, "
            f"{_MAX_TOKEN_DAYS} days at most; or {_NEVER}"
        )
    return time.time() + days * 86_400


def _until(expires_at: float | None) -> str:
    if expires_at is None:
        return "never expires"
    at = dt.datetime.fromtimestamp(expires_at).astimezone()
    return f"{'expired' if expires_at <= time.time() else 'expires'} {at:%Y-%m-%d %H:%M}"
