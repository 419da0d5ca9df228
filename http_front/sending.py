"""Whether a client takes what is sent to it; the kernel knows how much it has."""

from __future__ import annotations

import asyncio
import socket
import struct

MIN_RATE = 500  # bytes per second that a client must take of what waits for it
_ACKNOWLEDGED_AT = 120  # tcpi_bytes_acked in Linux's struct tcp_info


class Sending:
    """Looks at one connection, once a second or so.

    In any ``timeout_s`` during which something waits for it, the client must take MIN_RATE bytes a
    second.
    """

    __slots__ = ("_acknowledged", "_since")

    def __init__(self) -> None:
        self._since: float | None = None  # the last look that counts
        self._acknowledged = 0

    def is_stuck(self, transport: asyncio.Transport, now: float, timeout_s: float) -> bool:
        """Return whether the client has taken too little."""
        if not transport.get_write_buffer_size():
            self._since = None
            return False
        if self._since is not None and now - self._since < timeout_s:
            return False
        acknowledged = bytes_acknowledged(transport)
        taken, self._acknowledged = acknowledged - self._acknowledged, acknowledged
        is_first, self._since = self._since is None, now
        return not is_first and taken < MIN_RATE * timeout_s


def bytes_acknowledged(transport: asyncio.Transport) -> int:
    """Return how many bytes the other end's kernel has taken; 0 when that cannot be said."""
    connection = transport.get_extra_info("socket")
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED_AT + 8)
        return int(struct.unpack_from("=Q", state, _ACKNOWLEDGED_AT)[0])
    except (OSError, struct.error):  # closed, or no TCP; or a kernel that does not say
        return 0
