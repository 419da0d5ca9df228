"""Webhooks: notify a URL that a job has ended, signed as https://www.standardwebhooks.com has it.

A URL that a client names is a request that this host makes for a stranger. So none is called unless
``callback_hosts`` allows its host. ``*`` allows every host of the Internet, by HTTPS: its name is
resolved here, the address must be a public one, and the connection goes to that address, whatever
the name means a moment later. Private addresses are for hosts that are allowed by name. Redirects
are not followed, and nothing of the answer but its status is read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import ssl
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from greenroom.core.config import CALLBACK_SECRET
from greenroom.core.errors import InvalidRequestError

ANY = "*"
MAX_URL_CHARACTERS = 2_000
TIMEOUT_S = 10.0
_UNICAST = ipaddress.IPv6Network("2000::/3")  # without mapped IPv4 and NAT64
_ENCODED = "whsec_"  # before a secret in base64, as the specification has it


class CallbackRefusedError(Exception):
    """The URL may not be called, or its host did not take the callback."""


class Target(NamedTuple):
    """Where a URL leads."""

    scheme: str
    host: str
    port: int
    path: str  # with the query
    is_named: bool  # among the allowed hosts, not only by "*"


def target_of(url: str, allowed: tuple[str, ...], secret: str) -> Target:
    """Return where a callback goes; InvalidRequestError where it may not."""
    shown = f"Callback-URL={url[:200]!r}"
    if not allowed:
        raise InvalidRequestError(f"{shown}: callbacks are off; set callback_hosts to allow some")
    if not secret:
        raise InvalidRequestError(
            f"{shown}: callbacks are signed; set {CALLBACK_SECRET} in the deployment's env_vars "
            "or where the system is started"
        )
    try:
        parts: SplitResult = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidRequestError(f"{shown}: must be a URL: {error}") from None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if not is_plain or len(url) > MAX_URL_CHARACTERS or not host or parts.username is not None:
        raise InvalidRequestError(
            f"{shown}: must be a URL of at most {MAX_URL_CHARACTERS} characters, without a user"
        )
    name = f"[{host}]" if ":" in host else host
    default = 443 if parts.scheme == "https" else 80
    named = {each.lower() for each in allowed}
    is_named = host in named or f"{name}:{port or default}" in named
    if not is_named and ANY not in allowed:
        raise InvalidRequestError(f"{shown}: its host must be among callback_hosts={allowed}")
    if parts.scheme != "https" and not (is_named and parts.scheme == "http"):
        raise InvalidRequestError(
            f"{shown}: must begin with https://; http:// is for hosts that callback_hosts names"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or default, path, is_named)


def origin_of(url: str) -> str:
    """Return what is shown of a callback: its path and query may have the client's secrets."""
    if not url:
        return ""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/***"


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header ``webhook-signature``."""
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    encoded = secret.removeprefix(_ENCODED)
    key = secret.encode() if encoded == secret else base64.b64decode(encoded)
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


async def call_back(target: Target, secret: str, job: dict[str, Any], now: float) -> None:
    """Post a job to its URL; CallbackRefusedError unless that was answered with 2xx in time."""
    try:
        await asyncio.wait_for(_post(target, secret, job, int(now)), TIMEOUT_S)
    except (TimeoutError, OSError, ValueError, UnicodeError) as error:  # ssl's are OSErrors
        reason = str(error) or f"no answer within {TIMEOUT_S:g} s"
        raise CallbackRefusedError(f"{target.host}:{target.port}: {reason}") from error


async def _post(target: Target, secret: str, job: dict[str, Any], timestamp: int) -> None:
    body = json.dumps(job).encode()
    address = await _address_of(target)
    name = f"[{target.host}]" if ":" in target.host else target.host
    head = (
        f"POST {target.path} HTTP/1.1\r\nhost: {name}:{target.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        f"webhook-id: {job['id']}\r\nwebhook-timestamp: {timestamp}\r\n"
        f"webhook-signature: {signature(secret, job['id'], timestamp, body)}\r\n\r\n"
    )
    context = ssl.create_default_context() if target.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        address, target.port, ssl=context, server_hostname=target.host if context else None
    )
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        version, _, rest = (await reader.readline()).partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest.startswith(b"2"):
            raise CallbackRefusedError(
                f"{target.host}:{target.port} answered {rest[:40].decode('latin-1').strip()!r}"
            )
    finally:
        writer.close()


async def _address_of(target: Target) -> str:
    """Resolve the host; CallbackRefusedError where none of its addresses may be called."""
    found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=1)
    addresses = [str(each[4][0]) for each in found]
    public = [each for each in addresses if is_public(each)]
    usable = addresses if target.is_named else public
    if not usable or (not target.is_named and len(public) < len(addresses)):
        raise CallbackRefusedError(f"{target.host} has an address that is not public: {addresses}")
    return usable[0]


def is_public(address: str) -> bool:
    """Return whether an address is of the Internet, and stands for no other one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip not in _UNICAST or ip.sixtofour is not None or ip.teredo is not None
    ):
        return False
    return ip.is_global and not ip.is_multicast
