"""Unix and TCP sockets, and whose process is at the other end."""

from __future__ import annotations

import logging
import os
import socket
import struct

logger = logging.getLogger(__name__)

SEND_BUFFER = 1024 * 1024  # the kernel gives what it allows
BACKLOG = 1024
# A host that says nothing for that long is gone: it acknowledges nothing, not even probes. The
# kernels see to it, so that a process which is busy or stopped counts as alive.
SILENCE_S = 2.0
_PROBE_EVERY_S = 1
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
NON_BLOCKING_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK


def local_socket(kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Make a Unix socket that never blocks."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return sock


def local_listener(name: bytes, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Listen at a name in the abstract namespace; OSError when it is taken."""
    return _listening(local_socket(kind), name)


def tcp_listener(host: str, port: int) -> socket.socket:
    """Listen at one address of this host; OSError when it is not this host's, or taken."""
    sock = socket.socket(socket.AF_INET, NON_BLOCKING_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listening(sock, (host, port))


def tcp_socket(host: str) -> socket.socket:
    """Make a socket that never blocks, to dial from ``host``, the address others know us by."""
    sock = socket.socket(socket.AF_INET, NON_BLOCKING_STREAM)
    try:
        prepare_tcp(sock)
        sock.bind((host, 0))
    except OSError:
        sock.close()
        raise
    return sock


def prepare_tcp(sock: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice a host that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    # Instead of a number of probes, and for data under way too.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))


def is_ours(sock: socket.socket) -> bool:
    """Return whether the kernel says that the peer is of this process's user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid == os.geteuid():
        return True
    logger.warning("refused a connection of user %d, process %d: not this user", uid, pid)
    return False


def _listening(sock: socket.socket, name: bytes | tuple[str, int]) -> socket.socket:
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
