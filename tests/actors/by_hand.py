"""Playing the controller, routers and callers by hand, toward real replica and other actors."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import queue
import secrets
import time
from collections.abc import Callable, Iterable
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
        self._tickets = itertools.count(1)
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

    def keep(self, heard: Heard) -> None:
        """Put back what somebody else waits for."""
        self._kept.append(heard)

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

    def router(self) -> m.Process:
        """Be one more router; replicas tell routers apart by this."""
        return m.Process(self.process.pid, self.process.start_ticks, secrets.token_hex(8))

    def next_ticket(self) -> int:
        return next(self._tickets)

    def _heard(self, message: Any, sender: Any) -> None:
        self.inbox.put(Heard(message, sender, time.monotonic()))


class ReplicaByHand:
    """A real replica, told by a test what a controller and routers would tell it."""

    def __init__(self, hand: Hand, tag: str, address: Any, process: m.Process) -> None:
        self.hand = hand
        self.tag = tag
        self.address = address
        self.process = process
        self.router = hand.router()
        self.queries_at: Any = None  # known when the replica has code
        self._outcomes: dict[int, int | str] = {}

    @property
    def alive(self) -> bool:
        return alive(self.process.pid)

    def order(self, code: bytes, **config: Any) -> cm.StartReplica:
        """Make an order to start with this code."""
        return cm.StartReplica(
            replica=self.tag,
            backend="by-hand",
            deployment="by-hand",
            application="",
            version=None,
            code=code,
            code_hash="",
            config=BackendConfig(**config).model_dump(),
            config_id=1,
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

    def calls(self, count: int, *args: Any, method: str = "") -> tuple[m.Assignment, ...]:
        """Make assignments of calls to the user's code, answered to this process."""
        return tuple(self._assignment(method, args) for _ in range(count))

    def run(
        self,
        assignments: Iterable[m.Assignment] = (),
        *,
        cancelled: Iterable[int] = (),
        router: m.Process | None = None,
        incarnation: str | None = None,
    ) -> None:
        """Have the replica run and cancel these, as a router would."""
        self.hand.send(
            self.queries_at,
            m.RunQueries(
                incarnation=self.process.incarnation if incarnation is None else incarnation,
                proxy=router or self.router,
                assignments=tuple(assignments),
                cancelled=tuple(cancelled),
            ),
        )

    def call(self, *args: Any, method: str = "") -> Any:
        """Run one call alone; return its answer."""
        (assignment,) = self.calls(1, *args, method=method)
        self.run([assignment])
        answer = self.answer(assignment)
        self.outcomes([assignment])
        return answer

    def value(self, *args: Any, method: str = "") -> Any:
        """Run one call alone; return the value that user code returned."""
        answer = self.call(*args, method=method)
        assert isinstance(answer, m.ValueAnswer), answer
        return pickle.loads(answer.value)

    def answer(self, assignment: m.Assignment) -> m.Answer:
        """Return the answer to an assignment."""
        heard = self.hand.wait_for(
            m.AnswerQueries,
            lambda message: any(a.query_id == assignment.query.id for a in message.answers),
        )
        for answer in heard.message.answers:
            if answer.query_id == assignment.query.id:
                found = answer
            else:
                self.hand.keep(_only(heard, answer))
        return found

    def outcomes(
        self, assignments: Iterable[m.Assignment], timeout_s: float = DEADLINE_S
    ) -> dict[int, int | str]:
        """Wait for the outcome of each ticket: its status, or "rejected"."""
        wanted = {assignment.ticket for assignment in assignments}
        while wanted - self._outcomes.keys():
            heard = self.hand.wait_for(
                m.QueriesFinished,
                lambda message: message.incarnation == self.process.incarnation,
                timeout_s,
            )
            update = heard.message
            self._outcomes |= {
                **dict(update.answered),
                **dict.fromkeys(update.cancelled, 499),
                **dict.fromkeys(update.rejected, "rejected"),
            }
        return {ticket: self._outcomes.pop(ticket) for ticket in wanted}

    def _assignment(self, method: str, args: tuple[Any, ...]) -> m.Assignment:
        ticket = self.hand.next_ticket()
        return m.Assignment(
            ticket=ticket,
            query=query(
                ticket, endpoint="by-hand", retryable=False, **python_call(*args, method=method)
            ),
            caller=pickle.dumps(self.hand.address),
            caller_incarnation=self.hand.process.incarnation,
            endpoint="by-hand",
            route="/",
            timeout_s=None,
        )


def _only(heard: Heard, answer: m.Answer) -> Heard:
    message = m.AnswerQueries(incarnation=heard.message.incarnation, answers=(answer,))
    return Heard(message, heard.sender, heard.at)
