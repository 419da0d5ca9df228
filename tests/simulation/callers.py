"""Callers: processes with the real :class:`Caller` that send queries, as workers and scripts do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from understudy.actors import messages as m
from understudy.actors.dispatch import Caller
from understudy.actors.port import PROXY, Finder, Port

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import SimProcess


ADMIN_PORT = 1900  # of the first host; the others' follow


class SimCaller:
    """One caller. It sends until the trouble ends."""

    def __init__(self, simulation: Simulation, process: SimProcess, host: int) -> None:
        self.process = process
        self.host = host
        self._simulation = simulation
        self._rng = simulation.world.rng
        self._pace_s = self._rng.choice([0.05, 0.2, 0.5])
        port = Port(ADMIN_PORT + host, process.identity, process)  # type: ignore[arg-type]
        self.caller = caller = Caller(port.loop, process.identity)
        port.on(m.AnswerQueries, caller.answered)
        port.on(m.AttachCallerReply, lambda message, _: caller.attached(message))
        Finder(port, PROXY, caller.met_proxy, caller.lost_proxy).start()
        process.call_later(self._rng.random(), self._submit)

    def _submit(self) -> None:
        if self._simulation.quiet:
            return
        for _ in range(1 if self._rng.random() < 0.8 else self._rng.randint(2, 8)):
            self._submit_one()
        self.process.call_later(self._rng.expovariate(1 / self._pace_s), self._submit)

    def _submit_one(self) -> None:
        rng, checks = self._rng, self._simulation.checks
        endpoint = rng.choice(checks.endpoint_names())
        http = rng.random() < 0.5
        query_id = self.caller.next_id()
        uid = f"{self.process.pid}.{query_id}"
        query = m.Query(
            id=query_id,
            endpoint=None if http else endpoint,
            path=f"/{endpoint}",
            http_method=rng.choice(["GET", "POST"]) if http else "",
            call_method="",
            call=uid.encode(),
            request_id=uid,
            timeout_s=rng.choice([None, None, None, 0.3, 2.0]),
            retryable=rng.choice([None, True, False]),
            shard_key=rng.choice([None, None, "a", "b"]),
        )
        checks.submitted(uid, query, self.process)
        self.caller.submit(query, partial(checks.answered, uid))
        if rng.random() < 0.05:
            self.process.call_later(rng.random(), lambda: self._cancel(uid, query_id))

    def _cancel(self, uid: str, query_id: int) -> None:
        self._simulation.checks.cancelled(uid)
        self.caller.cancel(query_id)

    @property
    def waits_for(self) -> list[Any]:
        """The queries that are not answered."""
        return list(self.caller._entries.values())
