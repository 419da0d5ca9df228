"""HTTP requests at times of their own, whether or not earlier ones are answered."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TICK_S = 0.001


@dataclass(slots=True)
class Seen:
    """What the clients of one path saw."""

    took_s: list[float] = field(default_factory=list)  # of each 200, from when it was due
    refused_s: list[float] = field(default_factory=list)  # of each 503
    retry_after_s: list[int] = field(default_factory=list)
    timed_out: int = 0  # 408
    failed: int = 0  # anything else, and lost connections

    def add(self, other: "Seen") -> None:
        """Add what the clients of another path saw."""
        self.took_s += other.took_s
        self.refused_s += other.refused_s
        self.retry_after_s += other.retry_after_s
        self.timed_out += other.timed_out
        self.failed += other.failed


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, on_idle: Callable[["_Connection"], None]) -> None:
        self._on_idle = on_idle
        self._seen: Seen | None = None
        self._due = 0.0
        self._received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, request: bytes, seen: Seen, due: float) -> None:
        self._seen, self._due, self._received = seen, due, b""
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) >= int(headers[b"content-length"]):
            self._answered(int(head[9:12]), headers)

    def _answered(self, status: int, headers: dict[bytes, bytes]) -> None:
        seen, self._seen = self._seen, None
        took_s = time.monotonic() - self._due
        if status == 200:
            seen.took_s.append(took_s)
        elif status == 503:
            seen.refused_s.append(took_s)
            seen.retry_after_s.append(int(headers[b"retry-after"]))
        elif status == 408:
            seen.timed_out += 1
        else:
            seen.failed += 1
        self._on_idle(self)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._seen is not None:
            self._seen.failed += 1
            self._seen = None
        self.transport = None


class Clients:
    """As many clients as it takes; each has a connection, used again when it is idle."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, path: str, rate: float, seconds: float, *, timeout_s: float | None) -> Seen:
        """Send requests at random times, so many a second; return when all are answered."""
        seen, rng = Seen(), random.Random(path)
        limit = f"X-Request-Timeout-Seconds: {timeout_s}\r\n" if timeout_s else ""
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n{limit}\r\n".encode()
        due = time.monotonic()
        until, sent = due + seconds, 0
        while due < until:
            while due <= time.monotonic():
                sent += 1
                self._send(request, seen, due)
                due += rng.expovariate(rate)
            await asyncio.sleep(TICK_S)
        while len(seen.took_s) + len(seen.refused_s) + seen.timed_out + seen.failed < sent:
            await asyncio.sleep(TICK_S)
        return seen

    def _send(self, request: bytes, seen: Seen, due: float) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None:
                connection.send(request, seen, due)
                return
        task = asyncio.create_task(self._connect(request, seen, due))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _connect(self, request: bytes, seen: Seen, due: float) -> None:
        loop = asyncio.get_running_loop()
        make = lambda: _Connection(self._idle.append)  # noqa: E731
        try:
            _, connection = await loop.create_connection(make, "127.0.0.1", self._port)
        except OSError:
            seen.failed += 1
            return
        connection.send(request, seen, due)

    def close(self) -> None:
        """Close the idle connections, which are all once every answer is there."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.abort()
