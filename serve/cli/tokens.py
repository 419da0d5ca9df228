"""Tokens for the admin API over HTTP, made here and kept as hashes."""

from __future__ import annotations

import datetime as dt
import re
import secrets
import time
from typing import Any, get_args

import click

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core import operations as ops
from greenroom.core.errors import InvalidRequestError
from greenroom.core.tokens import PREFIX, Role, digest_of
from greenroom.serve.cli.commands import connected, print_json
from greenroom.serve.cli.flags import ANYWHERE, as_json, command, reading

_NEVER = "never"
_MAX_TOKEN_DAYS = 3650
_TOKEN_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


@click.group()
def token() -> None:
    """Make, list and revoke tokens for the admin API over HTTP and the dashboard."""


@command(*ANYWHERE, name="create")
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
    with connected(settings) as connection:
        connection.request(asked)
    click.echo(f"token {name!r}, role {role}, {_until(expires_at)}; shown only now:", err=True)
    click.echo(secret)


@command(*ANYWHERE, name="list")
@as_json
def list_tokens(as_json: bool, settings: HostSettings) -> None:
    """Show the tokens: names, roles and when they end."""
    with connected(settings) as connection:
        listed = connection.request(ops.ListTokens())
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
    with connected(settings) as connection:
        connection.request(ops.RevokeToken(name=name))
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
