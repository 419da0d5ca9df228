"""What a proxy reports to the controller: its load for autoscaling, and tallies for rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable

from greenroom.actors.messages.control import LoadReported, TalliesReported
from greenroom.actors.messages.queries import Message, Process
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.core.rollouts.judging import OVERDUE_S, Tallies
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import EndpointTable
from greenroom.core.routing.tickets import Observer, Ticket

LOAD_REPORT_S = 0.5
TALLIES_REPORT_S = 1.0
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

    def accepted(self, ticket: Ticket, endpoint: EndpointTable) -> None:
        """See Observer."""
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
        load = self._router.busy()
        is_sent = self._send(LoadReported(proxy=self._process, load=load))
        again = load or not is_sent
        self._timer = self._loop.call_later(LOAD_REPORT_S, self._report) if again else None


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
            tallies = self._tallies.plain(self._router.overdue(time.monotonic() - OVERDUE_S))
            self._send(TalliesReported(proxy=self._process, tallies=tallies))
