"""Unix sockets, and whose process is at the other end."""

from __future__ import annotations

import logging
import os
import socket
import struct

logger = logging.getLogger(__name__)

SEND_BUFFER = 1024 * 1024  # the kernel gives what it allows
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def local_socket() -> socket.socket:
    """Make a socket that never blocks."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return sock


def is_ours(sock: socket.socket) -> bool:
    """Return whether the kernel says that the peer is of this process's user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid == os.geteuid():
        return True
    logger.warning("refused a connection of user %d, process %d: not this user", uid, pid)
    return False
