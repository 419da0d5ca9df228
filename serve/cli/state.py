"""The commands on a cluster's state: tokens of the admin API, backup, restore, store copy."""

from __future__ import annotations

import datetime as dt
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.settings import HostSettings, variable
from greenroom.core import operations as ops
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.tokens import PREFIX, Role, digest_of
from greenroom.persistence.backup import copy_store, restore_backup, write_backup
from greenroom.persistence.kv import StoreError, StoreLocation
from greenroom.persistence.locations import is_database, location_at
from greenroom.serve.cli.commands import print_json, request
from greenroom.serve.cli.flags import ANYWHERE, EXISTING, HERE, NEW, as_json, command, reading

T = TypeVar("T")
_NEVER = "never"
_MAX_TOKEN_DAYS = 3650
_TOKEN_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


@click.group()
def token() -> None:
    """Make, list and revoke tokens for the admin API over HTTP and the dashboard."""


@command(*ANYWHERE)
@click.argument("name", required=False)
@click.option(
    "--role",
    type=click.Choice(get_args(Role)),
    required=True,
    help="What it allows: to look; to deploy as well; or all, hosts included.",
)
@click.option(
    "--expires",
    metavar="TIME",
    default="30d",
    help="When it ends: 12h, 30d, 8w, or never [30d].",
)
def create(name: str | None, role: Any, expires: str, settings: HostSettings) -> None:
    """Make a token and print it, once. NAME is what the history shows [one by its role].

    Only its hash is kept. A deployer's runs code as the system's user.
    """
    with reading():
        expires_at = _expiry(expires)
    name = name or f"{role}-{secrets.token_hex(3)}"
    secret = PREFIX + secrets.token_urlsafe(32)
    asked = ops.CreateToken(
        name=name, digest=digest_of(secret), holder_role=role, expires_at=expires_at
    )
    request(settings, asked)
    click.echo(f"token {name!r}, role {role}, {_until(expires_at)}; shown only now:", err=True)
    click.echo(secret)


@command(*ANYWHERE, name="list")
@as_json
def list_tokens(as_json: bool, settings: HostSettings) -> None:
    """Show the tokens: names, roles and when they end."""
    listed = request(settings, ops.ListTokens())
    if as_json:
        print_json(listed)
        return
    if not listed:
        click.echo("there are no tokens")
    for each in sorted(listed, key=lambda each: str(each["name"])):
        made_at = dt.datetime.fromtimestamp(each["created_at"]).astimezone()
        until = _until(each["expires_at"])
        click.echo(f"{each['name']}  {each['role']}  made {made_at:%Y-%m-%d %H:%M}, {until}")


@command(*ANYWHERE, name="revoke")
@click.argument("name")
def revoke_token(name: str, settings: HostSettings) -> None:
    """Forget the token NAME: requests with it are refused from now on."""
    request(settings, ops.RevokeToken(name=name))
    click.echo(f"revoked {name!r}; requests with it are refused within two seconds")


for _each in (create, list_tokens, revoke_token):
    token.add_command(_each)


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


# --- Stores ---------------------------------------------------------------------------------------


@command(*HERE, "store")
@click.argument("file", type=NEW)
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
@click.option("--without-lost-jobs", is_flag=True, help="Also where jobs are damaged: the others.")
def copy(source: str, target: str, without_lost_jobs: bool) -> None:
    """Copy a cluster's state from SOURCE to TARGET, which must be empty.

    Each is a state dir, or postgresql://USER@HOST/DATABASE. Stop all hosts first: what changes
    later is not copied.
    """
    one, other = _named(source), _named(target)
    copied = _done(lambda: copy_store(one, other, without_lost_jobs=without_lost_jobs))
    for each in copied.left_out:
        click.echo(f"left out {each}")
    click.echo(f"copied {copied.values} values from {one} to {other}")


def _location(settings: HostSettings) -> StoreLocation:
    """Return the store of this host's system as it was started, or as the settings say."""
    store = (system.running_environ(settings) or {}).get(variable("store"))
    return _named(store) if store else location_at(settings.store_name)


def _named(name: str) -> StoreLocation:
    try:
        return location_at(name if is_database(name) else Path(name).absolute() / "store")
    except ValueError as error:
        raise GreenroomError(str(error)) from None


def _done(action: Callable[[], T]) -> T:
    try:
        return action()
    except FileExistsError as error:
        raise GreenroomError(
            f"{error.filename2 or error.filename} exists: name a new file"
        ) from None
    except (OSError, StoreError) as error:
        raise GreenroomError(str(error)) from error
