"""The transport that a response is written to, with its head and its first bytes joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LARGE = 64 * 1024  # bytes of a part that is not copied


class Joined:
    """The transport that a response is written to: what is written while held leaves at once."""

    __slots__ = ("_close", "_held", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self._held: list[bytes] | None = None
        self.is_closing = transport.is_closing

    def write(self, content: bytes) -> None:
        """Write, or keep what is written for :meth:`let_go`."""
        if self._held is None:
            self._transport.write(content)
        else:
            self._held.append(content)

    def hold(self) -> None:
        """Keep what is written from now on."""
        self._held = []

    def let_go(self) -> None:
        """Write what was kept, and keep no more."""
        held, self._held = self._held, None
        if held:
            self.write_all(held[:-1], held[-1])

    def write_all(self, parts: list[bytes], last: bytes) -> None:
        """Write several parts by one system call, unless the last is large."""
        if len(last) > LARGE:  # a system call more costs less than a copy
            self._transport.write(b"".join(parts))
            self._transport.write(last)
        else:
            parts.append(last)
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Write what was kept, and close."""
        self.let_go()
        self._close()
