"""Dispatch leases under steady load, in made-up time: who gets how much, and by which way."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from greenroom.core.routing.leases import IDLE_S, HeldLease, HeldShare
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign, Grant, NewQuery, Revoke
from tests.core.routing.queries import Query, endpoint, finished, replica

MESSAGE_S = 0.0003  # from one process to another
REPORT_S = 0.002  # until the router hears that a slot is free


class Flow:
    """A router, one replica, and callers that keep ``wants`` queries under way each."""

    def __init__(self, limit: int, query_s: float, wants: dict[str, int]) -> None:
        self.limit = limit
        self.now = 0.0
        self._query_s = query_s
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._router = Router(lambda: self.now)
        table = BackendTable(tag="b", replicas=(replica("b#1"),), max_ongoing_requests=limit)
        self._router.set_backend("b", table, 0.0)
        self._router.set_endpoint("e", endpoint("e", to="b"), 0.0)
        self._held: dict[str, HeldLease] = {}
        self._newest: Counter[str] = Counter()
        self.running = 0
        self.answered: Counter[str] = Counter()
        self.leased: Counter[str] = Counter()
        self._after(IDLE_S, self._tick)
        for caller, count in wants.items():
            self.join(caller, count)

    def join(self, caller: str, wants: int) -> None:
        """Have a caller send as many queries, and another one for each that is answered."""
        self._router.leases.lessees[caller] = True
        for _ in range(wants):
            self._send(caller)

    def run(self, seconds: float) -> tuple[Counter[str], Counter[str]]:
        """Return how many queries of each caller were answered, and how many under leases."""
        self.answered, self.leased = Counter(), Counter()
        until = self.now + seconds
        while self._due[0][0] <= until:
            self.now, _, step = heapq.heappop(self._due)
            self._perform(self._router.expire(self.now))
            step()
        self.now = until
        return self.answered, self.leased

    def _after(self, seconds: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), step))

    # --- Queries ----------------------------------------------------------------------------------

    def _send(self, caller: str) -> None:
        lease = self._held.get(caller)
        share = None if lease is None else lease.take(self.now)
        if share is not None:
            self._after(MESSAGE_S, partial(self._begin, partial(self._leased_ended, caller, share)))
        else:
            query = Query(next(self._order))
            self._after(
                MESSAGE_S,
                lambda: self._perform(self._router.submit(NewQuery(caller, query), self.now)),
            )

    def _begin(self, ended: Callable[[], None]) -> None:
        self.running += 1
        assert self.running <= self.limit
        self._after(self._query_s, partial(self._end, ended))

    def _end(self, ended: Callable[[], None]) -> None:
        self.running -= 1
        self._after(MESSAGE_S, ended)

    def _leased_ended(self, caller: str, share: HeldShare) -> None:
        share.lease.free(share, self.now)
        if share.lease.is_returned:
            self._report_returned(caller, share.lease)
        self.leased[caller] += 1
        self._answer(caller)

    def _answer(self, caller: str) -> None:
        self.answered[caller] += 1
        self._send(caller)

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Assign):
                ticket = effect.ticket
                ended = partial(self._answer, str(ticket.caller))
                self._after(MESSAGE_S, partial(self._begin, ended))
                self._after(
                    MESSAGE_S + self._query_s + REPORT_S, partial(self._finished, ticket.number)
                )
            elif isinstance(effect, Grant):
                lease = effect.lease
                slots = dict(lease.slots)
                heard = partial(self._granted, str(lease.caller), lease.number, slots)
                self._after(MESSAGE_S, heard)
            elif isinstance(effect, Revoke):
                lease = effect.lease
                self._after(MESSAGE_S, partial(self._revoked, str(lease.caller), lease.number))

    def _finished(self, number: int) -> None:
        self._perform(finished(self._router, "b#1", [(number, 200)], self.now))

    # --- Leases -----------------------------------------------------------------------------------

    def _granted(self, caller: str, number: int, slots: dict[str, int]) -> None:
        known = self._held.get(caller)
        if number > self._newest[caller]:
            self._newest[caller] = number
            shares = [HeldShare(tag, count) for tag, count in slots.items()]
            self._held[caller] = HeldLease(number, "", "e", "b", (), None, shares, self.now)
        elif known is not None and known.number == number:
            known.extend(slots)

    def _revoked(self, caller: str, number: int) -> None:
        lease = self._held.get(caller)
        if lease is not None and lease.number == number:
            self._return(caller)

    def _return(self, caller: str) -> None:
        lease = self._held.pop(caller)
        lease.is_returned = True
        self._report_returned(caller, lease)

    def _report_returned(self, caller: str, lease: HeldLease) -> None:
        in_use = lease.in_use()
        self._after(
            MESSAGE_S,
            lambda: self._perform(
                self._router.leases.returned(caller, lease.number, in_use, self.now)
            ),
        )

    def _tick(self) -> None:
        for caller, lease in list(self._held.items()):
            if lease.is_to_be_returned(self.now, 100.0):
                self._return(caller)
        self._after(IDLE_S, self._tick)


@pytest.mark.parametrize("wanted", [64, 90])
def test_a_burst_of_a_caller_comes_to_use_its_lease_and_goes_on_with_it(wanted: int) -> None:
    flow = Flow(100, 0.0005, {"c1": wanted})
    flow.run(0.2)
    answered, leased = flow.run(0.2)
    assert leased["c1"] >= 0.7 * min(75 / wanted, 1.0) * answered["c1"]


@pytest.mark.parametrize("query_s", [0.0005, 0.01])
@pytest.mark.parametrize(("first", "second"), [(75, 30), (75, 150)])
def test_callers_that_want_more_than_there_is_get_parts_as_they_want(
    first: int, second: int, query_s: float
) -> None:
    flow = Flow(100, query_s, {"first": first})
    flow.run(0.1)
    flow.join("second", second)
    flow.run(0.2)
    answered, _ = flow.run(0.2 + 20 * query_s)
    assert answered["second"] / answered["first"] == pytest.approx(second / first, rel=0.1)
