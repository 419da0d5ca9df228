"""The commands on hosts: those of a cluster, its file and its end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport.cluster_key import ClusterKeyError, create_key, make_key
from greenroom.core import operations as ops
from greenroom.core.errors import GreenroomError
from greenroom.serve.admin import session
from greenroom.serve.cli.commands import STATUS_TIMEOUT_S, request
from greenroom.serve.cli.display import Progress
from greenroom.serve.cli.flags import ANYWHERE, HERE, NEW, command, confirm

ROTATE_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
_command = command(*ANYWHERE)
_of_host = click.argument("host")


@_command
@_of_host
@click.option("--force", is_flag=True, help="Do so to the last host that takes replicas, too.")
def drain(host: str, force: bool, settings: HostSettings) -> None:
    """Move the replicas on HOST to others, and place none there until it is undrained.

    Each goes when another runs in its place.
    """
    with Progress(f"draining host {host!r}"):
        try:
            request(settings, ops.DrainHost(host=host, force=force), DRAIN_TIMEOUT_S)
        except TimeoutError:
            raise GreenroomError(
                f"host {host!r} takes no replicas any more, but has some after "
                f"{DRAIN_TIMEOUT_S:g} s: they go when others run in their place, and the same "
                "command waits again; `greenroom status` shows them, and what they wait for"
            ) from None
    click.echo(f"drained host {host!r}; `greenroom undrain {host}` lets it take replicas again")


@_command
@_of_host
def undrain(host: str, settings: HostSettings) -> None:
    """Let HOST take replicas again, which was drained."""
    request(settings, ops.UndrainHost(host=host), STATUS_TIMEOUT_S)
    click.echo(f"host {host!r} takes replicas; `greenroom rebalance` moves some there")


@_command
@_of_host
def evict(host: str, settings: HostSettings) -> None:
    """Forget HOST, which is lost and does not come back."""
    request(settings, ops.EvictHost(host=host), STATUS_TIMEOUT_S)
    click.echo(f"forgot host {host!r}")


@click.command()
@click.argument("file", type=NEW)
def keygen(file: Path) -> None:
    """Make FILE, the cluster file that all hosts of a cluster need: see --key-file."""
    try:
        is_new = create_key(file, make_key())
    except ClusterKeyError as error:
        raise GreenroomError(str(error)) from None
    if not is_new:
        raise GreenroomError(f"{file} exists; `greenroom rotate-key` replaces a cluster's file")
    click.echo(f"made {file}: give it to each host, and keep it private")


@_command
def rotate_key(settings: HostSettings) -> None:
    """Replace the cluster file on all hosts, while they serve.

    A host that is away needs the new one by hand; one that was evicted cannot come back.
    """
    with Progress("replacing the cluster's key"):
        try:
            done = request(settings, ops.RotateKey(), ROTATE_TIMEOUT_S)
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


@_command
def rebalance(settings: HostSettings) -> None:
    """Move replicas from hosts that have more of a deployment to those that have fewer.

    Each goes when another runs in its place.
    """
    moved = request(settings, ops.RebalanceHosts(), STATUS_TIMEOUT_S)
    click.echo(f"moving {moved} replicas" if moved else "nothing to move")


@command(*HERE)
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask; needed where nobody can answer.")
def destroy(settings: HostSettings, *, is_sure: bool) -> None:
    """Stop the whole cluster, every host of it, and delete its state."""
    _destroy(settings, is_sure=is_sure)


@command(*HERE)
@click.option("--yes", "is_sure", is_flag=True)
def shutdown(settings: HostSettings, *, is_sure: bool) -> None:
    """Do what "destroy" does, under its name of before."""
    click.echo(
        "`greenroom shutdown` is now `greenroom destroy`; `greenroom stop` keeps the state",
        err=True,
    )
    _destroy(settings, is_sure=is_sure)


def _destroy(settings: HostSettings, *, is_sure: bool) -> None:
    at = settings.address
    state = f"in {settings.store_name} and {settings.state_dir}" if at is None else f"of {at}"
    loss = (
        f"all hosts of the cluster stop, and the state {state} is deleted: applications, code, "
        "history and logs"
    )
    confirm(loss, is_sure=is_sure)
    with Progress("stopping"):
        did_run = session.destroy(settings, partial(Connection.open, settings)).did_run
    click.echo(f"{'stopped' if did_run else 'nothing was running'}; its state is deleted")


# --- Machines over SSH ----------------------------------------------------------------------------
