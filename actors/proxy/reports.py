"""What a proxy reports to the controller: load for autoscaling, tallies for rollouts, traffic."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from greenroom.actors.messages.control import (
    LoadReported,
    ReplicaEjected,
    TalliesReported,
    TrafficReported,
)
from greenroom.actors.messages.queries import Message, Process
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.core.rollouts.judging import OVERDUE_S, Tallies
from greenroom.core.routing import load
from greenroom.core.routing.router import Router
from greenroom.core.routing.tickets import Ejected, Leased, Observer, Ticket
from greenroom.core.series import REPORT_S, Pair, Traffic

logger = logging.getLogger(__name__)

LOAD_REPORT_S = 0.5
TALLIES_REPORT_S = 1.0
EARLY_S = 0.1  # a timer that fires earlier than it should by less is not armed for the same second
Send = Callable[[Message], bool]
"""Sends to the controller; False while none is known."""


class LoadReports(Observer):
    """Reports what there is to do while there is any, and at once when a query is starved."""

    def __init__(self, loop: Loop, process: Process, router: Router, send: Send) -> None:
        self._loop = loop
        self._process = process
        self._router = router
        self._send = send
        self._timer: Timer | None = None  # armed while there are queries
        router.observers.add(self)

    def accepted(self, ticket: Ticket) -> None:
        """See Observer."""
        self._arm()

    def leased(self, event: Leased) -> None:
        """See Observer."""
        self._arm()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOAD_REPORT_S, self._report)

    def starved(self, backend: str) -> None:
        """See Observer."""
        self.report_now()

    def report_now(self) -> None:
        """Report in this turn, also when there is nothing to do."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(0, self._report)

    def _report(self) -> None:
        busy = load.busy(self._router.state)
        is_sent = self._send(LoadReported(proxy=self._process, load=busy))
        again = busy or not is_sent
        self._timer = self._loop.call_later(LOAD_REPORT_S, self._report) if again else None


class TrafficReports(Observer):
    """Reports what queries have ended, and how many there are, at each full second with any.

    At full seconds, so that each second of the time series has one report of each proxy.
    """

    def __init__(self, loop: Loop, process: Process, router: Router, send: Send) -> None:
        self._loop = loop
        self._process = process
        self._router = router
        self._send = send
        self._traffic: dict[Pair, Traffic] = {}
        self._timer: Timer | None = None  # armed while there are queries
        router.observers.add(self)

    def accepted(self, ticket: Ticket) -> None:
        """See Observer."""
        if self._timer is None:
            self._arm()

    def finished(self, ticket: Ticket) -> None:
        """See Observer."""
        if not ticket.is_mirrored:
            self._count(ticket.endpoint, ticket.backend, ticket.status, (ticket.took_s,))

    def leased(self, event: Leased) -> None:
        """See Observer."""
        self._count(*event)

    def _count(self, endpoint: str, backend: str, status: int, took_s: Sequence[float]) -> None:
        traffic = self._traffic.get((endpoint, backend))
        if traffic is None:
            traffic = self._traffic[endpoint, backend] = Traffic()
        traffic.count(status, took_s)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        into_s = (time.time() + EARLY_S) % REPORT_S
        self._timer = self._loop.call_later(REPORT_S + EARLY_S - into_s, self._report)

    def _report(self) -> None:
        self._timer = None
        for pair, (queued, ongoing) in load.by_endpoint(self._router.state)[0].items():
            if queued or ongoing:
                traffic = self._traffic.setdefault(pair, Traffic())
                traffic.queued, traffic.ongoing = queued, ongoing
        counted, self._traffic = self._traffic, {}
        if counted:
            self._arm()
            traffic_by_pair = {pair: traffic.plain() for pair, traffic in counted.items()}
            self._send(TrafficReported(proxy=self._process, traffic=traffic_by_pair))


class EjectionReports(Observer):
    """Reports replicas that fail where others do not, and those that do so no more."""

    def __init__(self, process: Process, router: Router, send: Send) -> None:
        self._process = process
        self._send = send
        router.observers.add(self)

    def ejected(self, event: Ejected) -> None:
        """See Observer."""
        _, replica, times = event
        if times:
            logger.warning(
                "%s fails where other replicas do not: for a while it gets no queries, "
                "for the time no. %d in a row",
                replica,
                times,
            )
        else:
            logger.info("%s gets queries again", replica)
        self._send(ReplicaEjected(proxy=self._process, replica=replica, times=times))


class TallyReports:
    """Reports what has become of the queries of endpoints that have a rollout."""

    def __init__(self, loop: Loop, process: Process, router: Router, send: Send) -> None:
        self._loop = loop
        self._process = process
        self._router = router
        self._send = send
        self._tallies = Tallies()
        self._timer: Timer | None = None  # armed while an endpoint has a rollout
        router.observers.add(self._tallies)

    def watch(self, endpoint: str, token: str | None) -> None:
        """Count an endpoint's queries for the step that the token names; None ends it."""
        self._tallies.watch(endpoint, token)
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        self._timer = None
        if self._tallies:
            self._timer = self._loop.call_later(TALLIES_REPORT_S, self._report)
            overdue = load.overdue(self._router.state, time.monotonic() - OVERDUE_S)
            tallies = self._tallies.plain(overdue)
            self._send(TalliesReported(proxy=self._process, tallies=tallies))
