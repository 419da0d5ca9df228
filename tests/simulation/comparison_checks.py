"""What comparing shadows' answers may find: no more than there was, and all of it bounded."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from greenroom.actors.messages import admin as am
from greenroom.core import operations as ops
from greenroom.core.comparing.differences import MAX_CAUSES, MAX_EXAMPLES

if TYPE_CHECKING:
    from tests.simulation.checks import Checks

Place = tuple[str, str, str]  # endpoint, shadow, the id of the settings


class ComparisonChecks:
    """Counts the copies that are to be compared, and those whose answers may differ."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._copies: Counter[Place] = Counter()
        self._odd: set[str] = set()  # queries of which some run was not answered as all others

    def assigned(self, ticket: Any) -> None:
        """A proxy sends a query, or a copy of one."""
        if ticket.is_mirrored:
            for pairing in ticket.compare:
                self._copies[ticket.endpoint, ticket.backend, pairing.settings[0]] += 1

    def is_odd(self, uid: str) -> None:
        """User code fails, streams, is cancelled, or gives another answer than others."""
        self._odd.add(uid)

    def told(self, request: ops.GetDifferences, reply: am.RequestReply) -> None:
        """A client has asked what was found."""
        if not reply.error_kind:
            self._checks.counts["comparisons told"] += bool(reply.value)
            for found in reply.value.values():
                self._is_bounded(request.endpoint, found)

    def at_the_end(self, differences: Any, endpoints: dict[str, Any]) -> None:
        """Look at what the controller knows once all has come to rest."""
        for name, record in endpoints.items():
            for tag, compare in record.compares.items():
                place = (name, tag, compare.id)
                found = differences.of(place)
                self._is_bounded(name, found)
                sum_of_all = found["compared"] + found["not_compared"]
                told = f"{place}: {found} of {self._copies[place]} copies"
                self._checks.expect(sum_of_all <= self._copies[place], told)
                self._checks.expect(found["different"] <= len(self._odd), told)
                self._checks.counts["comparison made"] += found["compared"]
                self._checks.counts["comparison different"] += found["different"]

    def _is_bounded(self, endpoint: str, found: Any) -> None:
        causes = found["causes"]
        told = f"{endpoint}: {found}"
        self._checks.expect(len(causes) <= MAX_CAUSES + 1, told)
        self._checks.expect(all(len(c["examples"]) <= MAX_EXAMPLES for c in causes), told)
        sums = [
            sum(c["count"] for c in causes if c["comparable"] == side) for side in (True, False)
        ]
        self._checks.expect(sums == [found["different"], found["not_compared"]], told)
