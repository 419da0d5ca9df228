"""How shadows' answers differ: counted by cause, with a few examples of each, all bounded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from greenroom.core.comparing.comparing import Outcome

MAX_CAUSES = 30
MAX_EXAMPLES = 5  # of each cause: the newest
MAX_REPLICAS = 100  # whose counts are kept apart
MAX_PLACES = 1_000  # of which findings are kept: the newest
OTHER_CAUSES = "other causes"

Plain = dict[str, Any]
Place = tuple[str, str, str]
"""Endpoint, shadow, and the id of its comparison's settings."""


class Counts(NamedTuple):
    """How many answers were compared, how many of these were different, and how many could not."""

    compared: int = 0
    different: int = 0
    not_compared: int = 0


@dataclass(slots=True)
class Cause:
    """How often a cause was found, and the newest examples."""

    comparable: bool
    count: int = 0
    examples: list[Plain] = field(default_factory=list)


@dataclass(slots=True)
class Differences:
    """The comparisons of one shadow of an endpoint, as one replica or all have made them."""

    compared: int = 0
    different: int = 0
    not_compared: int = 0
    causes: dict[str, Cause] = field(default_factory=dict)

    def count(self, outcome: Outcome, example: Plain) -> None:
        """Count a comparison."""
        if not outcome.cause:
            self.compared += 1
            return
        if outcome.comparable:
            self.compared += 1
            self.different += 1
        else:
            self.not_compared += 1
        cause = self._cause(outcome.cause, comparable=outcome.comparable)
        cause.count += 1
        cause.examples = [*cause.examples, example][-MAX_EXAMPLES:]

    def _cause(self, text: str, *, comparable: bool) -> Cause:
        if text not in self.causes and len(self.causes) >= MAX_CAUSES:
            text = OTHER_CAUSES
        return self.causes.setdefault(text, Cause(comparable))

    def add(self, other: Differences) -> None:
        """Add another replica's."""
        self.compared += other.compared
        self.different += other.different
        self.not_compared += other.not_compared
        for text, cause in other.causes.items():
            mine = self._cause(text, comparable=cause.comparable)
            mine.count += cause.count
            examples = sorted([*mine.examples, *cause.examples], key=lambda each: each["at"])
            mine.examples = examples[-MAX_EXAMPLES:]

    def plain(self) -> Plain:
        """Return it as plain values, the most frequent cause first."""
        causes = sorted(self.causes.items(), key=lambda item: -item[1].count)
        return {
            "compared": self.compared,
            "equal": self.compared - self.different,
            "different": self.different,
            "not_compared": self.not_compared,
            "causes": [
                {
                    "cause": text,
                    "count": cause.count,
                    "comparable": cause.comparable,
                    "examples": cause.examples,
                }
                for text, cause in causes
            ],
        }


def from_plain(plain: Plain) -> Differences:
    """Return what :meth:`Differences.plain` was made of."""
    causes = {
        each["cause"]: Cause(each["comparable"], each["count"], list(each["examples"]))
        for each in plain["causes"]
    }
    return Differences(plain["compared"], plain["different"], plain["not_compared"], causes)


class AllDifferences:
    """The newest reports of all replicas that compare; a later one replaces the earlier.

    Each report contains all that a replica has found, so a new controller gets it again.
    """

    def __init__(self) -> None:
        self._reports: dict[Place, dict[Hashable, Plain]] = {}

    def reported(self, replica: Hashable, found: Mapping[Place, Plain]) -> None:
        """Take a replica's report."""
        for place, plain in found.items():
            reports = self._reports.pop(place, {})
            self._reports[place] = reports
            reports.pop(replica, None)
            reports[replica] = plain
            if len(reports) > MAX_REPLICAS:
                del reports[next(iter(reports))]
        while len(self._reports) > MAX_PLACES:
            del self._reports[next(iter(self._reports))]

    def counts(self, place: Place) -> Counts:
        """Return how many all replicas have compared."""
        reports = self._reports.get(place, {}).values()
        return Counts(*(sum(each[name] for each in reports) for name in Counts._fields))

    def of(self, place: Place) -> Plain:
        """Return the sum of all replicas' findings."""
        summed = Differences()
        for plain in self._reports.get(place, {}).values():
            summed.add(from_plain(plain))
        return summed.plain()
