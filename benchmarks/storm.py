"""Many clients that count every response, which wrk does not: who failed, how, and when.

Each client sends the next request when it has the answer to the last, on a connection it keeps.
After a failure it waits a moment, so that a server that refuses quickly is not asked all the more.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

REQUEST_TIMEOUT_S = 15.0  # long, so that a system may queue requests while it recovers
LOST_AFTER_S = 5.0  # unanswered for so long when the load ends: it was lost
PAUSE_AFTER_FAILURE_S = 0.01


@dataclass(slots=True, kw_only=True)
class Counts:
    """What happened to the requests, and when the good answers came (`time.monotonic()`)."""

    ok_at: list[float] = field(default_factory=list)
    non_2xx: int = 0
    connection_errors: int = 0
    unanswered: int = 0

    @property
    def failed(self) -> int:
        return self.non_2xx + self.connection_errors + self.unanswered

    @property
    def total(self) -> int:
        return len(self.ok_at) + self.failed

    def longest_pause_s(self, since: float, until: float) -> float:
        """Return the longest time without a good answer."""
        moments = [since, *(at for at in self.ok_at if since < at < until), until]
        return max(b - a for a, b in pairwise(moments))


def request_bytes(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> None:
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        while size := int((await reader.readline()).split(b";")[0], 16):
            await reader.readexactly(size + 2)
        await reader.readline()
        return
    _, _, rest = lowered.partition(b"\r\ncontent-length:")
    await reader.readexactly(int(rest.partition(b"\r\n")[0]))


class Client:
    """One connection's worth of load."""

    def __init__(self, port: int, request: bytes, counts: Counts) -> None:
        self._port = port
        self._request = request
        self._counts = counts
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._sent_at = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Send requests until `stop` is set; to be cancelled too, for the one it waits for."""
        try:
            while not stop.is_set():
                if not await self._once():
                    self._drop()
                    await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
        finally:
            self._drop()

    def waits_in_vain(self) -> bool:
        """Return whether the request it waits for is to be counted as lost."""
        return time.monotonic() - self._sent_at > LOST_AFTER_S

    def _drop(self) -> None:
        if self._streams:
            self._streams[1].transport.abort()
            self._streams = None

    async def _once(self) -> bool:
        self._sent_at = time.monotonic()
        try:
            status = await asyncio.wait_for(self._exchange(), REQUEST_TIMEOUT_S)
        except TimeoutError:
            self._counts.unanswered += 1
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self._counts.connection_errors += 1
        else:
            if 200 <= status < 300:
                self._counts.ok_at.append(time.monotonic())
                return True
            self._counts.non_2xx += 1
        return False

    async def _exchange(self) -> int:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        await _read_body(reader, head)
        if b"\r\nconnection: close" in head.lower():
            self._drop()
        return int(head.split(b" ", 2)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of load: before the kill, after it, served steadily at the end, till giving up."""

    before_s: float = 2.0
    after_s: float = 8.0
    steady_s: float = 3.0
    give_up_s: float = 20.0


async def storm(
    port: int, request: bytes, *, connections: int, kill: Callable[[], None], times: Times
) -> tuple[Counts, float | None]:
    """Load, kill, go on; return the counts and the pause in seconds, None where it never ended."""
    counts = Counts()
    stop = asyncio.Event()  # not cancelling alone: wait_for loses some cancels before Python 3.12
    clients = [Client(port, request, counts) for _ in range(connections)]
    tasks = [asyncio.create_task(client.run(stop)) for client in clients]
    try:
        await asyncio.sleep(times.before_s)
        kill()
        killed_at = time.monotonic()
        serves = await _watch(counts, killed_at, times)
        pause_s = counts.longest_pause_s(killed_at, time.monotonic())
        counts.unanswered += sum(client.waits_in_vain() for client in clients)
    finally:
        stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return counts, pause_s if serves else None


async def _watch(counts: Counts, killed_at: float, times: Times) -> bool:
    """Wait until the load has been served steadily; return whether it is being served."""
    steady_since = None
    while True:
        await asyncio.sleep(0.05)
        now = time.monotonic()
        if not counts.ok_at or counts.ok_at[-1] <= max(killed_at, now - 1):
            steady_since = None
            if now - killed_at >= times.give_up_s:
                return False
            continue
        steady_since = steady_since or now
        if now - killed_at >= times.after_s and now - steady_since >= times.steady_s:
            return True
