"""The commands on a cluster's state as a whole: backup, restore, store copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.settings import HostSettings, variable
from greenroom.core.errors import GreenroomError
from greenroom.persistence.backup import copy_store, restore_backup, write_backup
from greenroom.persistence.kv import StoreError, StoreLocation
from greenroom.persistence.locations import is_database, location_at
from greenroom.serve.cli.flags import EXISTING, HERE, command


@command(*HERE, "store")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(file: Path, settings: HostSettings) -> None:
    """Write the cluster's state to a new FILE, also while it runs."""
    location = _location(settings)
    count = _done(lambda: write_backup(location, file))
    click.echo(f"wrote {count} values of {location} to {file}, which is as secret as your code")


@command(*HERE, "store")
@click.argument("file", type=EXISTING)
def restore(file: Path, settings: HostSettings) -> None:
    """Put the state of FILE into an empty store; then start the hosts."""
    if system.is_running(settings):
        raise GreenroomError("this host's system runs: stop all hosts with `greenroom stop` first")
    location = _location(settings)
    count = _done(lambda: restore_backup(file, location))
    click.echo(f"restored {count} values to {location}; `greenroom start` goes on from there")


@click.group()
def store() -> None:
    """Move a cluster's state between stores."""


@store.command()
@click.argument("source")
@click.argument("target")
def copy(source: str, target: str) -> None:
    """Copy a cluster's state from SOURCE to TARGET, which must be empty.

    Each is a state dir, or postgresql://USER@HOST/DATABASE. Stop all hosts first: what changes
    later is not copied.
    """
    one, other = _named(source), _named(target)
    count = _done(lambda: copy_store(one, other))
    click.echo(f"copied {count} values from {one} to {other}")


def _location(settings: HostSettings) -> StoreLocation:
    """Return the store of this host's system as it was started, or as the settings say."""
    store = (system.running_environ(settings) or {}).get(variable("store"))
    return _named(store) if store else location_at(settings.store_name)


def _named(name: str) -> StoreLocation:
    try:
        return location_at(name if is_database(name) else Path(name).absolute() / "store")
    except ValueError as error:
        raise GreenroomError(str(error)) from None


def _done(action: Callable[[], int]) -> int:
    try:
        return action()
    except FileExistsError as error:
        raise GreenroomError(
            f"{error.filename2 or error.filename} exists: name a new file"
        ) from None
    except (OSError, StoreError) as error:
        raise GreenroomError(str(error)) from error
