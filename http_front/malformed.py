"""Requests that the server lets through, and that HTTP wants refused.

The protocol refuses what it cannot frame: two lengths, a length beside Transfer-Encoding, a folded
header, a lone line feed, a NUL. What is looked at here is framed, but another server in front of us
may read it otherwise, which is what routing by Host lives on.
"""

from __future__ import annotations

import re
from functools import lru_cache

from greenroom.http_front.answers import error_reply
from greenroom.http_front.exchange import Exchange, Reply

# RFC 3986's host and port: a name or address, an IPv6 address in brackets; empty is allowed.
_is_authority = re.compile(
    rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(:[0-9]{0,5})?"
).fullmatch
_absolute = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE).match


_DEFAULT_PORTS = {"http": b":80", "https": b":443"}


def reply_at_once(exchange: Exchange) -> Reply | None:
    """Return the answer to a request that goes no further; None for nearly all."""
    head = exchange.head
    host = head.get(b"host")
    if host is None:
        if exchange.scope["http_version"] == "1.1":
            return _refused(exchange, "the Host header is missing, which HTTP/1.1 requires")
    elif not _is_host(host):
        shown = host[:100].decode("latin-1")
        return _refused(exchange, f"the Host header {shown!r} is no name or address with a port")
    if exchange.path[:1] != "/":
        return _reply_to_odd_target(exchange, host)
    return None


def _refused(exchange: Exchange, text: str) -> Reply:
    """Refuse this request alone: where it ends is clear, so the connection can go on."""
    return error_reply(400, "InvalidRequestError", text, exchange)


@lru_cache(maxsize=1024)
def _is_host(host: bytes) -> bool:
    return _is_authority(host) is not None


def _reply_to_odd_target(exchange: Exchange, host: bytes | None) -> Reply | None:
    target = exchange.raw_path.decode("latin-1")
    if target == "*" and exchange.method == "OPTIONS":  # asks whether the server is there
        return Reply(204, [], b"")
    absolute = _absolute(target)
    if absolute is None:
        text = f"the request target {target[:100]!r} is neither a path nor an http URL"
        return _refused(exchange, text)
    scheme, authority = absolute.groups()
    default_port = _DEFAULT_PORTS[scheme.lower()]
    named = authority.encode("latin-1", "replace").lower().removesuffix(default_port)
    if host is not None and named != host.lower().removesuffix(default_port):
        text = f"the request target {target[:100]!r} is for another host than the Host header"
        return _refused(exchange, text)
    return None
