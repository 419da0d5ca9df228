"""Callers: processes with the real :class:`Caller` that send queries, as workers and scripts do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from greenroom.actors.caller.caller import Caller
from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages import queries as m
from greenroom.actors.runtime.loop import Callback, nothing
from greenroom.actors.runtime.port import PROXY, Finder, Port
from tests.simulation.coroutines import Task, pause
from tests.simulation.links import PORT

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import SimProcess

POISONED = 0.002  # how many queries no router can take
REFUSED = {"BackPressureError", "DeploymentUnavailableError", "RouteNotFoundError"}


class SimCaller:
    """One caller. It sends until the trouble ends."""

    def __init__(self, simulation: Simulation, process: SimProcess) -> None:
        self.process = process
        self._simulation = simulation
        self._rng = simulation.world.rng
        self._pace_s = self._rng.choice([0.05, 0.2, 0.5])
        self._in_a_row = self._rng.choice([0, 50, 150])  # queries of a client that leases pay for
        loop: Any = process
        port = Port(PORT, process.identity, loop, machine=simulation.machine)
        self.caller = caller = Caller(port.loop, process.identity)
        self._readers: dict[str, tuple[Stream, Task]] = {}
        caller.listen(port.on)
        Finder(port, PROXY, caller.met_proxy, caller.proxy_gone).start()
        process.call_later(self._rng.random(), self._submit)

    def _submit(self) -> None:
        if self._simulation.quiet:
            return
        for _ in range(1 if self._rng.random() < 0.8 else self._rng.randint(2, 8)):
            self._submit_one()
        if self._in_a_row and self._rng.random() < 0.3:
            there = self._simulation.checks.on_disk
            names = [name for kind, name in there if kind == "endpoint"] or ["none"]
            for _ in range(self._rng.randint(1, 4)):
                self._submit_one(self._rng.choice(names), self._in_a_row)
        self.process.call_later(self._rng.expovariate(1 / self._pace_s), self._submit)

    def _submit_one(self, endpoint: str = "", more: int = 0) -> None:
        """Send a query, and ``more`` to that endpoint, each when the last one is answered."""
        rng, checks = self._rng, self._simulation.checks
        endpoint = endpoint or rng.choice(checks.endpoint_names())
        http = rng.random() < 0.5
        query_id = self.caller.next_id()
        uid = f"{self.process.pid}.{query_id}"
        query = m.Query(
            id=query_id,
            endpoint=None if http else endpoint,
            path=f"/{endpoint.partition('#')[0]}",
            http_method=rng.choice(["GET", "POST"]) if http else "",
            call_method="",
            call=uid.encode(),
            request_id=uid,
            timeout_s=rng.choice([None, None, None, 0.3, 2.0]),
            retryable=rng.choice([None, True, False]),
            shard_key=rng.choice([None, None, "a", "b"]),
        )
        checks.queries.submitted(uid, query, self.process)
        if rng.random() < POISONED and not self._simulation.faults.calm:
            checks.queries.poisoned.add(uid)
        then = partial(self._submit_one, endpoint, more - 1) if more else nothing
        self.caller.submit(query, partial(self._answered, uid, then))
        if rng.random() < 0.05:
            self.process.call_later(rng.random(), lambda: self._cancel(uid, query_id))

    def _answered(self, uid: str, then: Callback, answer: m.Answer | Stream) -> None:
        queries = self._simulation.checks.queries
        if not self._simulation.quiet:
            is_refused = isinstance(answer, m.FailedAnswer) and answer.kind in REFUSED
            wait_s = self._rng.uniform(0.0, 2 * self._pace_s) if is_refused else 0.0
            self.process.call_later(wait_s, then)
        if isinstance(answer, Stream):
            queries.stream_begun(uid)
            ended = partial(queries.stream_ended, uid)
            self._readers[uid] = answer, Task(self._read(uid, answer), ended)
        else:
            queries.answered(uid, answer)

    async def _read(self, uid: str, stream: Stream) -> str:
        rng = self._rng
        reads = rng.randint(0, 8) if rng.random() < 0.2 else 99
        for _ in range(reads):
            if (data := await stream.next_bytes()) is None:
                return "to its end"
            self._simulation.checks.queries.part(uid, data)
            await pause(self.process, 0.0 if rng.random() < 0.5 else rng.expovariate(5.0))
        stream.close()
        return "until it was closed"

    def _cancel(self, uid: str, query_id: int) -> None:
        stream, reader = self._readers.get(uid, (None, None))
        if stream is None:
            self._simulation.checks.queries.cancelled(uid)
            self.caller.cancel(query_id)
        elif reader is not None and not reader.is_over:
            reader.cancel()
            stream.close()
            self._simulation.checks.queries.stream_ended(uid, "until it was closed")
