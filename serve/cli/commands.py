"""What the commands of ``greenroom`` do, once their flags are read."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from greenroom.actors.host import launcher as system
from greenroom.actors.host.records import RunRecords
from greenroom.actors.runtime import liveness as silence
from greenroom.actors.runtime.connection import Connection
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport import admission
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.operations import (
    EvictHost,
    RebalanceHosts,
    RotateKey,
    StartRollout,
    StopCluster,
)
from greenroom.serve.admin import applications
from greenroom.serve.admin import client as differences
from greenroom.serve.admin.session import delete_everything
from greenroom.serve.cli import changes
from greenroom.serve.cli import display as rollouts
from greenroom.serve.cli.display import (
    Progress,
    front_url,
    note_silent,
    problems_of,
    show_autoscaling,
    show_status,
)
from greenroom.serve.cli.logs import Line, Logs
from greenroom.serve.cli.starting import usage
from greenroom.serve.code.importing import ImportFailedError, load_application, read_arguments
from greenroom.serve.deployments import Application

STATUS_TIMEOUT_S = 10.0
ROTATE_TIMEOUT_S = 60.0


@contextlib.contextmanager
def connected(settings: HostSettings) -> Iterator[Connection]:
    """Connect for the time of a command."""
    # What cannot be reached, and why, is in the error that follows, if nobody else can.
    warnings = logging.getLogger(admission.__name__)
    before = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        with contextlib.closing(Connection.open(settings)) as connection:
            yield connection
    finally:
        warnings.setLevel(before)


def shutdown(settings: HostSettings) -> None:
    """Delete everything, stop the system and delete its state."""
    with Progress("stopping"):
        with contextlib.suppress(GreenroomError, TimeoutError), connected(settings) as connection:
            delete_everything(connection, system.STOP_TIMEOUT_S)
            if len(applications.read_report(connection).get("hosts") or ()) > 1:
                stop_all = StopCluster(forget=True)
                connection.request(stop_all, timeout_s=STATUS_TIMEOUT_S)
        stopped = system.stop(settings, forget=True)
    click.echo("stopped; its state is deleted" if stopped else "nothing was running")


def deploy(settings: HostSettings, source: Source, *, plan: bool) -> None:
    """Bring up an application on a system that runs; with ``plan`` only say what would change."""
    application = source.load()
    with connected(settings) as connection:
        if plan:
            told = changes.plan(
                connection, application, source.name, source.route_prefix, source.working_dir
            )
            changes.show_plan(told, source.name)
        else:
            bring_up(connection, application, source)


def history(settings: HostSettings, *, as_json: bool, most: int) -> None:
    """Print who changed what."""
    with connected(settings) as connection:
        changes.show_history(connection, as_json=as_json, most=most)


def undo(settings: HostSettings, change_id: int | None) -> None:
    """Restore what was before a change."""
    with connected(settings) as connection:
        changes.undo(connection, change_id)


def start_rollout(settings: HostSettings, asked: StartRollout, *, wait: bool) -> None:
    """Move an endpoint's traffic to another backend step by step."""
    with connected(settings) as connection:
        rollouts.start(connection, asked, wait=wait)


def end_rollout(settings: HostSettings, endpoint: str, *, promote: bool) -> None:
    """End a rollout now, one way or the other."""
    with connected(settings) as connection:
        rollouts.end(connection, endpoint, promote=promote)


def diff(settings: HostSettings, endpoint: str, *, as_json: bool) -> None:
    """Print how the answers of an endpoint's shadows differ."""
    with connected(settings) as connection:
        differences.show(connection, endpoint, as_json=as_json)


def delete(settings: HostSettings, name: str) -> None:
    """Delete an application and wait until it is gone."""
    with connected(settings) as connection, Progress(f"deleting {name!r}"):
        found = applications.delete(connection, name)
    click.echo(f"deleted {name!r}" if found else f"no application is named {name!r}")


def evict(settings: HostSettings, host: str) -> None:
    """Have the cluster forget a host that is lost."""
    with connected(settings) as connection:
        connection.request(EvictHost(host=host), timeout_s=STATUS_TIMEOUT_S)
    click.echo(f"forgot host {host!r}")


def rotate_key(settings: HostSettings) -> None:
    """Have all hosts take another key."""
    with connected(settings) as connection, Progress("replacing the cluster's key"):
        try:
            done = connection.request(RotateKey(), timeout_s=ROTATE_TIMEOUT_S)
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
        moved = connection.request(RebalanceHosts(), timeout_s=STATUS_TIMEOUT_S)
    click.echo(f"moving {moved} replicas" if moved else "nothing to move")


def status(settings: HostSettings, *, as_json: bool) -> bool:
    """Print the state of everything; False if something is not healthy."""
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
    if as_json:
        click.echo(json.dumps(report, indent=2, default=str))
    else:
        show_status(report)
    return not problems_of(report)


def autoscaling(settings: HostSettings, *, as_json: bool) -> None:
    """Print what autoscaling goes by and has decided."""
    with connected(settings) as connection, Progress("asking the controller"):
        report = applications.read_autoscaling(connection, STATUS_TIMEOUT_S)
    if as_json:
        click.echo(json.dumps(report, indent=2, default=str))
    else:
        show_autoscaling(report)


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


class Source:
    """An application as a command names it, and what it is to be called and where to be served."""

    def __init__(
        self,
        target: str,
        *,
        arguments: Sequence[str],
        app_dir: str | None,
        working_dir: str | None,
        name: str,
        route_prefix: str,
    ) -> None:
        self.target = target
        self.working_dir = None if working_dir is None else Path(working_dir)
        self.app_dir = Path(app_dir or working_dir or ".")
        self.name = name
        self.route_prefix = None if route_prefix.lower() in ("", "none") else route_prefix
        with usage():
            self.arguments = read_arguments(arguments)
            applications.check_target(name, self.route_prefix)
            if self.working_dir is not None and not self.working_dir.is_dir():
                raise InvalidRequestError(f"--working-dir {working_dir!r}: no such folder")
            if target.endswith((".yaml", ".yml")):
                raise InvalidRequestError(f"{target!r}: files are not supported yet; name a module")

    def load(self) -> Application:
        """Import it; where the user's code fails, its traceback is shown."""
        try:
            return load_application(self.target, self.app_dir, self.arguments)
        except ImportFailedError as error:
            click.echo(error.traceback, err=True)
            raise


def bring_up(connection: Connection, application: Application, source: Source) -> None:
    """Deploy an application and say where; where its constructor fails, show the traceback."""
    text = f"deploying {source.name!r}"
    with (
        changes.told_of_user_code(f"{source.name!r} could not be deployed"),
        Progress(text) as progress,
    ):
        applications.deploy(
            connection,
            application,
            source.name,
            source.route_prefix,
            on_wait=lambda told: progress.say(f"{text}: {told}" if told else text),
            working_dir=source.working_dir,
        )
    click.echo(f"deployed {source.name!r}{_where(connection, source.route_prefix)}")


def _where(connection: Connection, route_prefix: str | None) -> str:
    if route_prefix is None:
        return " without a route"
    url = front_url(applications.read_report(connection, STATUS_TIMEOUT_S))
    return f" at {url.rstrip('/')}{route_prefix}" if url else f" at {route_prefix}"
