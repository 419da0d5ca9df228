"""Playing the controller by hand, toward real replicas and other actors."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import queue
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greenroom.actors.cluster.members import REPLICA
from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.runtime.port import ThreadPort
from greenroom.actors.runtime.processes import this_process
from greenroom.core.config import BackendConfig
from greenroom.serve.code.packing import pack_code
from tests.support.queries import python_call, query
from tests.support.systems import alive

DEADLINE_S = 30.0
_tickets = itertools.count(1)
HEARD = (cm.IdentifyReply, cm.ReplicaReported, m.QueriesFinished, m.AnswerQueries)


@dataclass(frozen=True)
class Heard:
    """A message that came, from whom and when."""

    message: Any
    sender: Any
    at: float


def packed(target: Any, *args: Any) -> bytes:
    """Return the code of a function or class as a controller would send it."""
    return pack_code("by hand", target, args, {}, None).pickled


class Hand:
    """One process of the actor system that says whatever a test wants."""

    def __init__(self, admin_port: int) -> None:
        self.process = this_process()
        self.port = ThreadPort(admin_port, self.process)
        self.inbox: queue.Queue[Heard] = queue.Queue()
        self._kept: list[Heard] = []
        for kind in HEARD:
            self.port.on(kind, self._heard)
        self.port.open(timeout_s=10)

    def close(self) -> None:
        self.port.close()

    @property
    def address(self) -> Any:
        return self.port.address

    def send(self, target: Any, message: Any) -> None:
        self.port.loop.post(lambda: self.port.loop.send(target, message))

    def locate(self, class_name: str, global_name: str) -> Any:
        locating = self.port.locate(class_name, global_name, timeout_s=DEADLINE_S)
        address = asyncio.run_coroutine_threadsafe(locating, self.port.loop.asyncio).result()
        assert address is not None, f"no actor for {global_name}"
        return address

    def wait_for(
        self,
        kind: type,
        matches: Callable[[Any], bool] = lambda _: True,
        timeout_s: float = DEADLINE_S,
    ) -> Heard:
        """Return the first message of this kind that matches; others are kept for later."""
        deadline = time.monotonic() + timeout_s
        checked = 0
        while True:
            while checked < len(self._kept):
                heard = self._kept[checked]
                if isinstance(heard.message, kind) and matches(heard.message):
                    return self._kept.pop(checked)
                checked += 1
            try:
                self._kept.append(self.inbox.get(timeout=max(deadline - time.monotonic(), 0.001)))
            except queue.Empty:
                kept = [str(heard.message) for heard in self._kept]
                text = f"no {kind.__name__} within {timeout_s:g} s; got {kept}"
                raise AssertionError(text) from None

    def identify(self, address: Any) -> tuple[m.Process, float]:
        """Return who an actor is, and how many seconds it took to answer."""
        request_id = secrets.token_hex(8)
        begun = time.monotonic()
        self.send(address, cm.Identify(request_id=request_id))
        heard = self.wait_for(cm.IdentifyReply, lambda reply: reply.request_id == request_id)
        return heard.message.process, heard.at - begun

    def replica(self, target: Any, *args: Any, **config: Any) -> ReplicaByHand:
        """Have a replica of this function or class, up and running."""
        replica = self.new_replica()
        report = replica.start(packed(target, *args), **config)
        assert report.state == "running", report.error
        return replica

    def new_replica(self) -> ReplicaByHand:
        """Have a replica process that has no order yet."""
        tag = f"by-hand#{secrets.token_hex(4)}"
        address = self.locate(REPLICA, f"replica {tag}")
        process, _ = self.identify(address)
        return ReplicaByHand(self, tag, address, process)

    def _heard(self, message: Any, sender: Any) -> None:
        self.inbox.put(Heard(message, sender, time.monotonic()))


class ReplicaByHand:
    """A real replica, told by a test what a controller would tell it, and a router at the least."""

    def __init__(self, hand: Hand, tag: str, address: Any, process: m.Process) -> None:
        self.hand = hand
        self.tag = tag
        self.address = address
        self.process = process
        self.queries_at: Any = None  # known when the replica has code

    @property
    def alive(self) -> bool:
        return alive(self.process.pid)

    def order(
        self, code: bytes, *, replica: str = "", config_id: int = 1, **config: Any
    ) -> cm.StartReplica:
        """Make an order to start with this code."""
        return cm.StartReplica(
            replica=replica or self.tag,
            backend="by-hand",
            deployment="by-hand",
            application="",
            version=None,
            code=code,
            code_hash="",
            config=BackendConfig(**config).model_dump(),
            config_id=config_id,
        )

    def start(self, code: bytes, **config: Any) -> cm.ReplicaReported:
        """Give the order to start; return the report that comes when it is carried out."""
        self.send(self.order(code, **config))
        return self.report(lambda report: report.state in {"running", "failed"})

    def send(self, message: Any) -> None:
        self.hand.send(self.address, message)

    def report(
        self, matches: Callable[[cm.ReplicaReported], bool] = lambda _: True
    ) -> cm.ReplicaReported:
        """Return the replica's next report that matches."""
        return self.heard_report(matches).message  # type: ignore[no-any-return]

    def heard_report(self, matches: Callable[[cm.ReplicaReported], bool]) -> Heard:
        heard = self.hand.wait_for(
            cm.ReplicaReported, lambda report: report.process == self.process and matches(report)
        )
        self.queries_at = heard.message.queries_at or self.queries_at
        return heard

    def reconfigure(self, config_id: int, **config: Any) -> cm.ReplicaReported:
        """Give newer settings; return the report that has them."""
        values = BackendConfig(**config).model_dump()
        self.send(cm.ReconfigureReplica(replica=self.tag, config=values, config_id=config_id))
        return self.report(lambda report: report.config_id == config_id)

    def check(self, check_id: int) -> tuple[cm.ReplicaReported, float]:
        """Ask for its health; return the report and how many seconds it took."""
        begun = time.monotonic()
        self.send(cm.CheckReplica(replica=self.tag, check_id=check_id))
        heard = self.heard_report(lambda report: report.check_id == check_id)
        return heard.message, heard.at - begun

    def stop(self, drain_s: float) -> float:
        """Have it drain; return how many seconds the first report of that took."""
        begun = time.monotonic()
        self.send(cm.StopReplica(replica=self.tag, drain_s=drain_s))
        return self.heard_report(lambda report: report.state == "draining").at - begun

    def calls(self, count: int, method: str) -> list[m.Assignment]:
        """Make assignments of calls to the user's code, answered to this process."""
        caller, incarnation = pickle.dumps(self.hand.address), self.hand.process.incarnation
        return [
            m.Assignment(ticket, asked, caller, incarnation, "by-hand", "/", None)
            for ticket in itertools.islice(_tickets, count)
            for asked in [query(ticket, retryable=False, **python_call(method=method))]
        ]

    def run(self, *assignments: m.Assignment) -> None:
        """Have the replica run these, as a router would."""
        router = self.hand.process._replace(incarnation=self.tag)
        self.hand.send(self.queries_at, m.RunQueries(self.process.incarnation, router, assignments))
