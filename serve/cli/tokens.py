"""The commands ``greenroom token``: tokens for the HTTP API, made here and kept as hashes."""

from __future__ import annotations

import datetime as dt
import re
import secrets
import time

import click

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core import operations as ops
from greenroom.core.errors import InvalidRequestError
from greenroom.core.tokens import PREFIX, Role, digest_of
from greenroom.serve.cli.commands import connected

NEVER = "never"
MAX_DAYS = 3650
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def create(settings: HostSettings, name: str | None, role: Role, expires: str) -> None:
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


def show(settings: HostSettings) -> None:
    """Print the tokens' names, roles and ends."""
    with connected(settings) as connection:
        listed = connection.request(ops.ListTokens())
    if not listed:
        click.echo("there are no tokens")
    for each in sorted(listed, key=lambda each: str(each["name"])):
        made_at = dt.datetime.fromtimestamp(each["created_at"]).astimezone()
        until = _until(each["expires_at"])
        click.echo(f"{each['name']}  {each['role']}  made {made_at:%Y-%m-%d %H:%M}, {until}")


def revoke(settings: HostSettings, name: str) -> None:
    """Forget a token."""
    with connected(settings) as connection:
        connection.request(ops.RevokeToken(name=name))
    click.echo(f"revoked {name!r}; requests with it are refused within two seconds")


def _expiry(expires: str) -> float | None:
    if expires == NEVER:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([hdw])", expires)
    days = int(match[1]) * _DAYS[match[2]] if match else 0.0
    if not 0 < days <= MAX_DAYS:
        raise InvalidRequestError(
            f"--expires {expires!r}: expected hours, days or weeks, such as 12h, 30d or 8w, "
            f"{MAX_DAYS} days at most; or {NEVER}"
        )
    return time.time() + days * 86_400


def _until(expires_at: float | None) -> str:
    if expires_at is None:
        return "never expires"
    at = dt.datetime.fromtimestamp(expires_at).astimezone()
    return f"{'expired' if expires_at <= time.time() else 'expires'} {at:%Y-%m-%d %H:%M}"
