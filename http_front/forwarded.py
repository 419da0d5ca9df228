"""What trusted proxies say of the client: X-Forwarded-For and X-Forwarded-Proto."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from greenroom.http_front.exchange import Scope

FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """The peers whose word is taken: addresses, networks, or ``*`` for everybody."""

    def __init__(self, trusted: Iterable[str]) -> None:
        names = set(trusted)
        self._trusts_all = "*" in names
        self._networks: list[_Network] = [ipaddress.ip_network(name) for name in names - {"*"}]
        self.trusts = lru_cache(maxsize=1024)(self._trusts)

    def _trusts(self, host: str) -> bool:
        """Return whether a peer's word is taken."""
        if self._trusts_all:
            return True
        address = _address(host)
        return address is not None and any(address in network for network in self._networks)

    def apply(self, scope: Scope) -> None:
        """Write into the scope what the peer says, if it is trusted and says it well."""
        client = scope["client"]
        if client is None or not self.trusts(client[0]):
            return
        hops: list[str] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                hops += value.decode("latin-1").split(",")
            elif name == b"x-forwarded-proto":
                self._set_scheme(scope, value.decode("latin-1").strip())
        if hops:
            self._set_client(scope, [hop.strip() for hop in hops])

    @staticmethod
    def _set_scheme(scope: Scope, scheme: str) -> None:
        if scheme in _SCHEMES:
            scope["scheme"] = _SCHEMES[scheme] if scope["type"] == "websocket" else scheme

    def _set_client(self, scope: Scope, hops: list[str]) -> None:
        """Take the last hop that is not trusted itself, or the first; ignore what is no address."""
        for at, hop in enumerate(reversed(hops), 1):
            host, port = _host_and_port(hop)
            if _address(host) is None:
                return
            if at == len(hops) or not self.trusts(host):
                scope["client"] = (host, port)
                return


def _address(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


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
