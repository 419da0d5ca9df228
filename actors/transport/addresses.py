"""Where a process is reached: its host and a number, and the socket name that follows from them."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

LOOPBACK = "127.0.0.1"
ADMIN_PORT = 1900  # Thespian's default
LAST_PORT = 65535  # up to here numbers are admin ports; above, they are drawn and not used again
_NUMBERS = 2**48
_ANYWHERE = frozenset({"", "0.0.0.0", "localhost"})  # names of this host that say nothing more


class ProcessAddress:
    """The details inside a Thespian ActorAddress: equal, hashed and pickled by value."""

    __slots__ = ("host", "number", "text")

    def __init__(self, host: str, number: int) -> None:
        self.host = host
        self.number = number
        self.text = f"{host}:{number}"

    def __eq__(self, other: object) -> bool:
        if type(other) is not ProcessAddress:
            return NotImplemented
        return self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessAddress, (self.host, self.number)

    def __str__(self) -> str:
        return f"(U|{self.text})"  # the form of Thespian's own, (T|host:port)

    def __repr__(self) -> str:
        return f"ProcessAddress({self.text})"

    @property
    def socket_name(self) -> bytes:
        """Return the name in Linux's abstract namespace, which leaves nothing on disk.

        It holds the uid, so that users cannot take each other's names by accident; that the peer
        *is* of this uid is checked with SO_PEERCRED.
        """
        return f"\0understudy-{os.geteuid()}/{self.text}".encode()


def own_host() -> str:
    """Return the address by which this host is known; loopback unless the environment says."""
    host = os.environ.get("THESPIAN_BASE_IPADDR", "")
    return LOOPBACK if host in _ANYWHERE else host


def drawn_address(host: str) -> ProcessAddress:
    """Return an address that no process had or will have, for anything but an admin."""
    return ProcessAddress(host, LAST_PORT + 1 + secrets.randbelow(_NUMBERS))


def parse_address(text: str) -> ProcessAddress:
    """Read ``host:number``, as in ``text``; ValueError when it is anything else."""
    host, _, number = text.rpartition(":")
    if not host or not number.isascii() or not number.isdecimal():
        raise ValueError(f"{text!r} is no address; host:number is")
    return ProcessAddress(host, int(number))


def admin_address(where: str | tuple[Any, ...]) -> ProcessAddress:
    """Read an admin's ``host``, ``host:port`` or (host, port), as capabilities have it."""
    parts = where if isinstance(where, tuple) else tuple(where.split(":"))
    port = int(parts[1]) if parts[1:] and parts[1] else ADMIN_PORT
    return ProcessAddress(resolved(str(parts[0] or "")), port)


def resolved(host: str) -> str:
    """Return the IPv4 address of ``host``; this host's own for any name of it."""
    if host in _ANYWHERE:
        return own_host()
    address = str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    return own_host() if address.startswith("127.") else address
