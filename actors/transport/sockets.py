"""Unix and TCP sockets, and the owner of the process at the other end.

Any user may take any name in the abstract namespace, as any port. So a process that connects asks
the kernel which user's process is there.

Files in a private folder would need none of these checks, but they outlive their processes, and
where they are is not known: a service or a container may have a /tmp of its own, and another user
may have made the folder there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)

SEND_BUFFER = 1024 * 1024  # the kernel gives what it allows
BACKLOG = 2048  # the kernel gives what it allows, as of the above
# A host that acknowledges nothing of what was sent for this long is gone. The kernels acknowledge,
# so a process that is busy or stopped still counts as alive.
SILENCE_S = 2.0
# Where nothing is sent, as a host may have thousands of idle connections. A proxy, who has to know
# sooner which replicas are gone, tries all that it has to a host that is silent (Links.try_host).
# A connection that is being made is probed sooner: messages wait for it.
_PROBE_EVERY_S, _PROBE_AGAIN_S = 15, 1
_TCP_THIN_LINEAR_TIMEOUTS = 16  # tcp(7); the socket module has no name for it
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LISTENS = re.compile(rb"[0-9a-f]+: [0-9A-F]+ 0+ 00010000 0001 01 +[0-9]+ @(.+)\n")
ASK_S, ASK_AGAIN_S = 1.0, 0.005
NON_BLOCKING_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK


def local_socket(kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Make a Unix socket that never blocks."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return sock


_kept: dict[bytes, int] = {}  # listening sockets that an earlier program of this process has left


def keep_listeners(numbers: dict[bytes, int]) -> None:
    """Have :func:`local_listener` return these open sockets for their names."""
    for fd in numbers.values():
        os.set_inheritable(fd, False)
    _kept.update(numbers)


def local_listener(name: bytes, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Listen at a name in the abstract namespace; OSError when it is taken."""
    if name in _kept:
        return socket.socket(fileno=_kept.pop(name))
    return _listening(local_socket(kind), name)


class AnotherUsersError(ConnectionRefusedError):
    """A process of another user listens at a name."""

    def __init__(self, holder: Credentials) -> None:
        super().__init__(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self.holder = holder


def own_connection(name: bytes) -> socket.socket:
    """Connect to the process of this user that listens at a name.

    BlockingIOError where it has too much to accept; ConnectionRefusedError where there is none, or
    one of another user; OSError without a socket.
    """
    sock = local_socket()
    try:
        sock.connect(name)
        holder = credentials_of(sock)
    except BlockingIOError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, error.strerror) from None
    if holder.is_ours:
        return sock
    sock.close()
    raise AnotherUsersError(holder)


def is_listening(names: Iterable[bytes]) -> bytes | None:
    """Return the first of some admins' names that a process of this user listens at.

    May block for ``ASK_S``: a process may be there with too much to accept.
    """
    asked, deadline = list(names), time.monotonic() + ASK_S
    while asked:
        full = []
        for name in asked:
            try:
                own_connection(name).close()
            except BlockingIOError:
                full.append(name)
            except OSError:
                continue
            else:
                return name
        asked = full if time.monotonic() < deadline else []
        if asked:
            time.sleep(ASK_AGAIN_S)
    return None


def names_taken() -> Iterator[bytes]:
    """Return the names in the abstract namespace that processes listen at, of whatever user."""
    with open("/proc/net/unix", "rb") as table:
        for line in table:  # a name can have anything in it, so believe none of them
            found = _LISTENS.match(line)
            if found is not None:
                yield b"\0" + found[1]


def holder_of(name: bytes) -> Credentials | None:
    """Return who listens at a name, None where that cannot be told; may block for ``ASK_S``."""
    deadline = time.monotonic() + ASK_S
    while time.monotonic() < deadline:
        with local_socket() as sock, contextlib.suppress(OSError):
            sock.connect(name)
            return credentials_of(sock)
        time.sleep(ASK_AGAIN_S)  # it may have been bound just now, or have much to accept
    return None


def tcp_listener(host: str, port: int, *, shares: bool = False) -> socket.socket:
    """Listen at one address of this host; OSError when it is not this host's, or taken.

    ``shares`` lets other processes of this user listen there, too.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, NON_BLOCKING_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
    return _listening(sock, (host, port))


def tcp_socket(host: str) -> socket.socket:
    """Make a socket that never blocks, to dial from ``host``, an address of this machine.

    The kernel probes it each second until it is :func:`established`.
    """
    sock = socket.socket(socket.AF_INET, NON_BLOCKING_STREAM)
    try:
        prepare_tcp(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AGAIN_S)
        sock.bind((host, 0))
    except OSError:
        sock.close()
        raise
    return sock


def established(sock: socket.socket) -> None:
    """Have the kernel probe a dialed connection as seldom as all others."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)


def prepare_tcp(sock: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice a host that is gone.

    While little is under way, the kernel sends lost packets again each 200 ms; for others it
    doubles the pause.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_AGAIN_S)
    # Instead of a number of probes, and for data under way too.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


def discard(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Close a socket that the loop may wait for."""
    if sock.fileno() >= 0:
        loop.remove_reader(sock.fileno())
        loop.remove_writer(sock.fileno())
        sock.close()


class Credentials(NamedTuple):
    """Whose process a peer was when it connected or listened."""

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Whether it is of this process's user."""
        return self.uid == os.geteuid()


def credentials_of(sock: socket.socket) -> Credentials:
    """Return what the kernel says of the peer of a Unix socket."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return Credentials(pid, uid)


def _listening(sock: socket.socket, name: bytes | tuple[str, int]) -> socket.socket:
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
