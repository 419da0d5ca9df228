"""Where a process is reached: its host and a number, and the names of sockets that follow.

Numbers up to 65535 are those of admins, and the TCP port of their host where it has one. All others
are drawn, and end in the port of their admin: so an address says which port of its host leads to
it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import ipaddress
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from greenroom.actors.transport.sockets import is_listening, names_taken
from greenroom.core import formats

LOOPBACK = "127.0.0.1"
ADMIN_PORT = 1900  # Thespian's default
LAST_PORT = 65535  # up to here numbers are admin ports; above, they are drawn and not used again
_DRAWN = 2**47
_ANYWHERE = frozenset({"", "0.0.0.0", "localhost"})  # names of this host that say nothing more
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_OWN_NAMES = frozenset({LOOPBACK, "127.0.1.1"})  # the second is what Debian resolves host names to


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
    def is_admin(self) -> bool:
        """Return whether an admin's address is of this form, and no other process's."""
        return self.number <= LAST_PORT

    @property
    def port(self) -> int:
        """Return the TCP port of the host that leads to this process."""
        return self.number & LAST_PORT

    @property
    def gate(self) -> str:
        """Return HOST:PORT where its host listens for other hosts."""
        return f"{self.host}:{self.port}"

    @property
    def socket_name(self) -> bytes:
        """Return the name in Linux's abstract namespace, which leaves nothing on disk.

        It holds the uid, so that users cannot take each other's names by accident; that the peer
        *is* of this uid is checked with SO_PEERCRED.
        """
        return f"{_own_names()}{self.text}".encode()

    @property
    def fd_socket_name(self) -> bytes:
        """Return the name where the host's gate hands over connections from other hosts."""
        return self.socket_name + b"/door"


class Access(NamedTuple):
    """How a process that is no actor comes to a system, where its environment does not say it."""

    gates: tuple[str, ...]  # IP:PORT of hosts of another system; empty for this host's
    environ: Mapping[str, str]  # where the cluster file is


def _own_names() -> str:
    return f"\0greenroom-{os.geteuid()}/"


def own_host() -> str:
    """Return the address by which this host is known; loopback unless the environment says."""
    host = os.environ.get("GREENROOM_ADVERTISE") or os.environ.get("GREENROOM_BIND", "")
    return LOOPBACK if host in _ANYWHERE else host


def bound_host(own: ProcessAddress) -> str:
    """Return the address of this machine that a process here listens at, and dials from.

    It is that by which others know the host, unless that is translated on the way.
    """
    is_translated = own.host == os.environ.get("GREENROOM_ADVERTISE")
    return os.environ.get("GREENROOM_BIND", own.host) if is_translated else own.host


def host_of_admin(port: int) -> str:
    """Return the host in the address of this machine's admin of that port.

    Where the environment does not say, the kernel does, as it knows all names of the network
    namespace: a command need not be told to which address the system was bound. Names that only
    processes of other users listen at count for nothing.
    """
    if os.environ.get("GREENROOM_BIND"):
        return own_host()
    admins = re.compile(f"{_own_names()}([0-9.]+):{port}".encode())
    found = (admins.fullmatch(name) for name in names_taken())
    hosts = {each[1].decode() for each in found if each is not None}
    names = [ProcessAddress(host, port).socket_name for host in sorted(hosts - {LOOPBACK})]
    here = is_listening([ProcessAddress(LOOPBACK, port).socket_name, *names])
    return LOOPBACK if here is None else here[len(_own_names()) : -len(f":{port}")].decode()


def admin_of_port(port: int) -> ProcessAddress:
    """Return the address of this machine's admin of that port; see :func:`host_of_admin`."""
    return ProcessAddress(host_of_admin(port), port)


def host_towards(gate: ProcessAddress) -> str:
    """Return the address of this host from which the kernel would reach another's gate."""
    if ipaddress.IPv4Address(gate.host).is_loopback:
        return gate.host  # this very host; the kernel would say 127.0.0.1, whose sockets are others
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((gate.host, gate.port))  # sends nothing
        except OSError:  # no way there; dialing will say so
            return LOOPBACK
        return str(probe.getsockname()[0])


def drawn_address(host: str, port: int = 0) -> ProcessAddress:
    """Return an address that no process had or will have, for anything but an admin.

    ``port`` is the admin's.
    """
    return ProcessAddress(host, (1 + secrets.randbelow(_DRAWN)) * (LAST_PORT + 1) + port)


def drawn_for(admin: ProcessAddress) -> ProcessAddress:
    """Return an address that no process had or will have, in the actor system of ``admin``."""
    return drawn_address(admin.host, admin.number)


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
    return own_host() if address in _OWN_NAMES else address


# --- Releases -------------------------------------------------------------------------------------
#
# Messages are pickles and user code travels as bytecode. Another minor version of Python cannot run
# that code. Another release of Greenroom can read our messages if its format is ours or a
# neighbour.


@functools.cache
def own_release() -> str:
    """Return the versions of Greenroom and Python and the format, as refusals name them."""
    version = importlib.metadata.version("greenroom")
    return f"greenroom {version}, Python {_PYTHON}, {own_format()}"


def own_format() -> str:
    """Return what processes of one host say of their release."""
    return f"format {formats.FORMAT}"


def fits(release: str) -> bool:
    """Return whether hosts of that release can be in one cluster with this one."""
    same_python = f", Python {_PYTHON}, " in release
    return same_python and formats.reads_messages_of(formats.named_in(release))
