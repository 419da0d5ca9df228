"""Load from many keep-alive connections that counts every answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Tally:
    """What came back; ``longest_gap_s`` is the longest pause between two good answers."""

    ok: int = 0
    failures: list[tuple[float, int, str]] = field(default_factory=list)  # (at, connection, what)
    texts: list[str] = field(default_factory=list)  # the bodies of error answers
    last_ok_at: float = 0.0
    longest_gap_s: float = 0.0
    slowest_s: float = 0.0  # of all answers

    def note_ok(self, now: float) -> None:
        """Count a 200."""
        if self.last_ok_at:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_ok_at)
        self.last_ok_at = now
        self.ok += 1

    def summary(self) -> str:
        """Return one line for people."""
        kinds = Counter(what for _, _, what in self.failures)
        failed = f"{len(self.failures)} failed {dict(kinds)}"
        texts = f" {self.texts[:3]}" if self.texts else ""
        pauses = f"gap {self.longest_gap_s:.2f} s, slowest {self.slowest_s:.2f} s"
        return f"{self.ok} ok, {failed}{texts}, {pauses}"


class GetLoad:
    """GETs from ``connections`` connections on a thread, from ``start`` to ``stop``.

    Each waits ``pause_s`` between two requests, without which the load takes all of two cores, and
    what it is to look at takes twice as long.
    """

    def __init__(
        self, port: int, path: str = "/", connections: int = 32, pause_s: float = 0.02
    ) -> None:
        self._port = port
        self._pause_s = pause_s
        self._connections = connections
        self._request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        self._ending = threading.Event()
        self.tally = Tally()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> Tally:
        """Let every connection finish its request, its first at least; return the tally."""
        self._ending.set()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "a request was never answered"
        return self.tally

    async def _main(self) -> None:
        await asyncio.gather(*(self._connection(n) for n in range(self._connections)))

    async def _connection(self, number: int) -> None:
        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            writer.write(self._request)
            asked_at = time.monotonic()
            status, body, is_kept = await read_answer(reader)
            self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - asked_at)
            if status == 200:
                self.tally.note_ok(time.monotonic())
            else:
                self.tally.texts.append(body.decode(errors="replace"))
                self._failed(number, str(status))
            return is_kept

        def failed(error: Exception) -> None:
            self._failed(number, type(error).__name__)

        await ask_on(self._port, ask, self._ending, lambda: self._pause_s, failed)

    def _failed(self, number: int, what: str) -> None:
        self.tally.failures.append((time.monotonic(), number, what))


async def ask_on(
    port: int,
    ask: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]],
    ending: threading.Event,
    pause_s: Callable[[], float],
    failed: Callable[[Exception], None],
) -> None:
    """Ask on one connection, or on one after the other, until ``ending``; once at least.

    ``ask`` returns whether the connection stays.
    """
    has_asked = False
    while not (has_asked and ending.is_set()):
        has_asked = True
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                while await ask(reader, writer) and not ending.is_set():
                    await asyncio.sleep(pause_s())
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            failed(error)
            await asyncio.sleep(0.02)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Return the status, the body, and whether the connection stays."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    body = await reader.readexactly(length)
    return int(head[9:12]), body, b"connection: close" not in head
