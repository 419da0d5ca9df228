"""What a proxy reports to the controller: load for autoscaling, traffic, tallies for rollouts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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
from greenroom.core.routing.tickets import Ejected, Ended, Observer, Ticket
from greenroom.core.series import REPORT_S, Pair, Traffic

logger = logging.getLogger(__name__)

LOAD_REPORT_S = 0.5
TALLIES_REPORT_S = 1.0
EARLY_S = 0.1  # a timer that fires earlier than it should by less is not armed for the same second
Send = Callable[[Message], bool]
"""Sends to the controller; False while none is known."""


class Reports(Observer):
    """Reports what there is to do while there is any, and what has become of queries.

    The load, for autoscaling, goes every LOAD_REPORT_S, and at once when a query is starved. What
    has ended goes at each full second with any, so that each second of the time series has one
    report of each proxy; of endpoints that have a rollout, all that was counted goes each second.
    """

    def __init__(self, loop: Loop, process: Process, router: Router, send: Send) -> None:
        self._loop = loop
        self._process = process
        self._state = router.state
        self._send = send
        self._traffic: dict[Pair, Traffic] = {}
        self._tallies = Tallies()
        self._load_timer: Timer | None = None  # armed while there are queries, as is the next
        self._traffic_timer: Timer | None = None
        self._tallies_timer: Timer | None = None  # armed while an endpoint has a rollout
        router.observers.add(self)
        router.observers.add(self._tallies)

    # --- What is heard --------------------------------------------------------------------------

    def accepted(self, ticket: Ticket) -> None:
        """See Observer."""
        if self._load_timer is None or self._traffic_timer is None:
            self._arm()

    def ended(self, event: Ended) -> None:
        """See Observer."""
        pair = event.endpoint, event.backend
        traffic = self._traffic.get(pair)
        if traffic is None:
            traffic = self._traffic[pair] = Traffic()
        traffic.count(event.status, event.took_s)
        if self._load_timer is None or self._traffic_timer is None:
            self._arm()

    def starved(self, backend: str) -> None:
        """See Observer."""
        self.report_load_now()

    def ejected(self, event: Ejected) -> None:
        """Report a replica that fails where others do not, or does so no more."""
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

    def watch(self, endpoint: str, token: str | None) -> None:
        """Count an endpoint's queries for the step that the token names; None ends it."""
        self._tallies.watch(endpoint, token)
        if self._tallies_timer is None:
            self._report_tallies()

    def report_load_now(self) -> None:
        """Report the load in this turn, also when there is nothing to do."""
        if self._load_timer is not None:
            self._load_timer.cancel()
        self._load_timer = self._loop.call_later(0, self._report_load)

    # --- What is reported -----------------------------------------------------------------------

    def _arm(self) -> None:
        if self._load_timer is None:
            self._load_timer = self._loop.call_later(LOAD_REPORT_S, self._report_load)
        if self._traffic_timer is None:
            self._arm_traffic()

    def _arm_traffic(self) -> None:
        into_s = (time.time() + EARLY_S) % REPORT_S
        after_s = REPORT_S + EARLY_S - into_s
        self._traffic_timer = self._loop.call_later(after_s, self._report_traffic)

    def _report_load(self) -> None:
        self._load_timer = None
        busy = load.busy(self._state)
        if not self._send(LoadReported(proxy=self._process, load=busy)) or busy:
            self._load_timer = self._loop.call_later(LOAD_REPORT_S, self._report_load)

    def _report_traffic(self) -> None:
        self._traffic_timer = None
        for pair, (queued, ongoing) in load.by_endpoint(self._state)[0].items():
            if queued or ongoing:
                traffic = self._traffic.setdefault(pair, Traffic())
                traffic.queued, traffic.ongoing = queued, ongoing
        counted, self._traffic = self._traffic, {}
        if counted:
            self._arm_traffic()
            traffic_by_pair = {pair: traffic.plain() for pair, traffic in counted.items()}
            self._send(TrafficReported(proxy=self._process, traffic=traffic_by_pair))

    def _report_tallies(self) -> None:
        self._tallies_timer = None
        if self._tallies:
            self._tallies_timer = self._loop.call_later(TALLIES_REPORT_S, self._report_tallies)
            overdue = load.overdue(self._state, time.monotonic() - OVERDUE_S)
            tallies = self._tallies.plain(overdue)
            self._send(TalliesReported(proxy=self._process, tallies=tallies))
