"""Who a client is: its address, as its connection or a trusted proxy says, and what it has."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from greenroom.http_front.asgi import Headers

MAX_HOPS = 32  # of X-Forwarded-For that are read, the nearest first
_SCHEMES = frozenset({"http", "https", "ws", "wss"})

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Peer = tuple[str, int]  # address and port


class TrustedProxies:
    """The peers whose X-Forwarded headers are believed: addresses, networks, or ``*`` for all."""

    def __init__(self, trusted: Iterable[str]) -> None:
        names = set(trusted)
        self._trusts_all = "*" in names
        self._networks: list[_Network] = [ipaddress.ip_network(name) for name in names - {"*"}]
        self.trusts = lru_cache(maxsize=1024)(self._trusts)

    def _trusts(self, host: str) -> bool:
        if self._trusts_all:
            return True
        address = address_of(host)
        return address is not None and any(address in network for network in self._networks)

    def client_behind(self, peer: Peer | None, headers: Headers) -> tuple[Peer | None, str]:
        """Return the client of a request and its scheme, as its peer tells if that is trusted.

        Else that is the peer itself, and "".
        """
        scheme = ""
        if peer is None or not self.trusts(peer[0]):
            return peer, scheme
        hops: list[str] = []
        for name, value in headers:
            text = value.decode("latin-1").strip()
            if name == b"x-forwarded-for":
                hops += text.split(",")
            elif name == b"x-forwarded-proto" and text in _SCHEMES:
                scheme = text
        # The client is the last hop that is not trusted itself, or the first hop. Anybody may send
        # hops, and each costs time: past the limit the peer itself stays the client.
        for at, hop in enumerate(reversed(hops[-MAX_HOPS:]), 1):
            host, port = _host_and_port(hop.strip())
            if address_of(host) is None:
                break
            if at == len(hops) or not self.trusts(host):
                return (host, port), scheme
        return peer, scheme


def peer_of(name: Any) -> Peer | None:
    """Return address and port from a socket's name; None for a Unix socket's."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class ClientCounts:
    """How many of something each client has, of which it may have ``most_each``.

    A client is an address, or its network where that is IPv6: there, each client has one of its
    own, of at least 2**64 addresses. A trusted proxy stands for many, and may have any number, as
    may what has no address.
    """

    def __init__(self, most_each: int, proxies: TrustedProxies | None = None) -> None:
        self.most_each = most_each
        self._proxies = proxies
        self._counts: Counter[bytes] = Counter()

    @property
    def total(self) -> int:
        """How many all clients with an address have."""
        return self._counts.total()

    def has_room_for(self, host: str | None) -> bool:
        """Return whether the client may have one more."""
        if host is None or self._counts[_client_key(host)] < self.most_each:
            return True
        return self._proxies is not None and self._proxies.trusts(host)

    def add(self, host: str | None) -> None:
        """Count one more."""
        if host is not None:
            self._counts[_client_key(host)] += 1

    def remove(self, host: str | None) -> None:
        """Count one less."""
        if host is None:
            return
        key = _client_key(host)
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]


@lru_cache(maxsize=1024)
def _client_key(host: str) -> bytes:
    address = address_of(host)
    return host.encode() if address is None else address.packed[:8]


def address_of(host: str) -> _Address | None:
    """Return the IP address that a text is; None for any other."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _host_and_port(hop: str) -> tuple[str, int]:
    """Split ``1.2.3.4:5``, ``[::1]:5`` or either without a port, which is 0 then."""
    if hop[:1] == "[":
        host, _, port = hop[1:].partition("]")
        port = port[1:]
    elif hop.count(":") == 1:
        host, _, port = hop.partition(":")
    else:
        host, port = hop, ""
    return host, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
