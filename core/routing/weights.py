"""Weights: by how much a replica's load counts while it is new, or where it is slower than others.

Theory of operation. The replica of the lowest *level* is chosen. Its level is its load, of LEVELS a
slot, and more than that in two cases. Weights only order replicas, and never have a query wait.

*Slow start.* A new replica has the least load, so it would get the most queries of all, while its
caches are cold. Until it is *warm*, its load is divided by a weight that grows from LEAST to 1: it
has one query at a time at first. That lasts ``slow_start_s``, but no longer than the oldest replica
has been there: those that start together share alike, and one that is alone takes all. (Envoy's
slow start mode, with its linear ramp and its least weight:
https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/load_balancing/slow_start)

*Pace.* A replica on a slower machine takes longer for the same queries. Its load counts for more by
a power of how much longer, and where both are idle it comes second. Two cases are told apart by
their *elasticity*: by how many percent queries take longer where their replica has a percent more
of them, as measured at their ends.

- Queries delay each other, as those that share a processor do: the power is 1. That is least work
  in place of least count, as with the weights of IPVS' shortest expected delay, learned here:
  http://kb.linuxvirtualserver.org/wiki/Shortest_Expected_Delay_Scheduling
- Queries do not delay each other: the power is MOST_POWER. Then slow replicas get little more than
  what finds the quick ones full, as by Erlang's loss formula. No order gives them less without
  letting queries wait. A like power in the first case would crowd the quick ones until they are
  slower than the slow ones, and the learned pace would swing.

A caller with a lease knows of its own queries alone. Where many callers share a replica, each sees
queries delay each other less than they do.

What queries take varies much more than replicas do, so a difference counts only beyond noise.
Time is cut into windows of about ten service times. In each, a replica's mean is that of its
queries' *logarithms*, so that a few that take long do not decide it, less what all replicas have in
common there. Means over windows forget: the last ten count most, and what gets no queries is
unknown again soon, gets its share of them, and is measured anew. The noise is what queries differ
by within a window, or means by between windows if that is more, as it is where queries come in
batches. A replica is slower if it differs from the quickest by FIRM times the noise, and by
LEAST_FACTOR; then it stays so until it differs by less than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import NamedTuple

LEVELS = 4  # of a slot
MOST_POWER = 3.0  # of what replicas differ by
LEAST_ELASTICITY = 0.1  # with which the power is 1
LEAST = 0.1  # weight of one that is new

WINDOW, WINDOW_S = 10.0, 0.5  # service times, but no shorter than that
# Of each replica in a window: on average at least, and at most, so that loads differ in it.
QUERIES, ENOUGH = 20, 1_000
KEPT = 0.95  # of what was known before a window
WINDOWS = 4  # before anything is decided
FIRM = 5.0  # standard deviations
LEAST_FACTOR, MOST_FACTOR = 1.25, 10.0
CHANGE = 1.2  # smaller changes of what replicas differ by are not worth it
TICK_S = 1e-6  # what takes less takes so long


class Weight(NamedTuple):
    """A load counts ``pace`` times, and for more until ``warm_at``, which took ``warms_s``."""

    pace: float = 1.0
    warm_at: float = -inf
    warms_s: float = 0.0

    def level(self, load: int, now: float) -> int:
        """Return the level of a load."""
        level = LEVELS * load
        if self is EVEN:
            return level
        if self.pace > 1.0:
            level = int(level * self.pace) + 1
        if now < self.warm_at:
            level = int(level / max(1.0 - (self.warm_at - now) / self.warms_s, LEAST))
        return level

    def warm_in_s(self, now: float) -> float:
        """Return for how long it warms up from now on."""
        return max(self.warm_at - now, 0.0)


EVEN = Weight()


def first_weight(slow_start_s: float, came_at: Iterable[float], now: float) -> Weight:
    """Return how a new replica begins, beside those that came at these times."""
    warms_s = min(slow_start_s, now - min(came_at, default=now))
    return Weight(1.0, now + warms_s, warms_s) if warms_s > 0 else EVEN


class Sums(NamedTuple):
    """Over queries: logarithms of the seconds that they took, and loads when they ended."""

    queries: int = 0
    total: float = 0.0
    squares: float = 0.0
    loads: int = 0
    load_squares: int = 0
    products: float = 0.0


class Taken:
    """What queries have taken."""

    __slots__ = Sums._fields

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.queries = self.loads = self.load_squares = 0
        self.total = self.squares = self.products = 0.0

    def add(self, seconds: float, load: int) -> None:
        """Count a query that has left so many others at its replica."""
        logarithm = log(seconds) if seconds > TICK_S else log(TICK_S)
        self.queries += 1
        self.total += logarithm
        self.squares += logarithm * logarithm
        self.loads += load
        self.load_squares += load * load
        self.products += load * logarithm

    def join(self, sums: Sums) -> None:
        """Count queries that were counted elsewhere."""
        for name, value in zip(Sums._fields, sums, strict=True):
            setattr(self, name, getattr(self, name) + value)

    def take(self) -> Sums:
        """Return the sums, and begin anew."""
        taken = Sums(*(getattr(self, name) for name in Sums._fields))
        self._begin()
        return taken


@dataclass(slots=True)
class Pace:
    """What one replica takes for queries, beside the others of its backend."""

    taken: Taken = field(default_factory=Taken)  # within the window
    seen: float = 0.0  # queries of earlier windows, as far as they count
    mean: float = 0.0  # beside the others'
    factor: float = 1.0  # by which its load counts for more than the quickest one's


class Paces:
    """Compares the replicas of one backend."""

    def __init__(self) -> None:
        self.due_at = 0.0  # when :meth:`compare` is to be called
        self._windows = 0
        self._variance = 0.0  # of a query's logarithm
        self._between = 0.0  # the same by how means vary between windows
        self._spread = 0.0  # variance of loads
        self._growth = 0.0  # covariance of logarithms with loads, times the mean load

    def compare(self, paces: Collection[Pace], run_s: float, now: float) -> bool:
        """End the window, if it has enough queries; return whether any factor has changed.

        Queries take about ``run_s``.
        """
        self.due_at = now + max(WINDOW * run_s, WINDOW_S)
        if sum(pace.taken.queries for pace in paces) < max(QUERIES * len(paces), 1):
            return False
        self._windows += 1
        share = max(1.0 / self._windows, 1.0 - KEPT)  # of the newest window
        measured = [(pace, taken) for pace in paces if (taken := pace.taken.take()).queries]
        # What this window has in common is measured by those that were there before.
        known = [each for each in measured if each[0].seen] or measured
        common = sum(taken.total - taken.queries * pace.mean for pace, taken in known)
        common /= sum(taken.queries for _, taken in known)
        within = between = 0.0
        degrees, compared = 0, -1
        for pace in paces:
            pace.seen *= KEPT
        for pace, (count, total, squares, *_) in measured:
            off = total / count - common - pace.mean
            within += squares - total * total / count
            degrees += count - 1
            if pace.seen:
                between += off * off / (1.0 / count + KEPT / pace.seen)
                compared += 1
            pace.seen += count
            pace.mean += off * count / pace.seen
        self._variance += (within / max(degrees, 1) - self._variance) * share
        if compared > 0:
            self._between += (between / compared - self._between) * share
        self._relate([taken for _, taken in measured], share)
        return self._windows >= WINDOWS and self._decide(paces)

    def _relate(self, window: list[Sums], share: float) -> None:
        """Learn how what queries take depends on loads: within each replica, by this window."""
        count = sum(each.queries for each in window)
        load = sum(each.loads for each in window) / count
        growth = sum(each.products - each.loads * each.total / each.queries for each in window)
        spread = sum(each.load_squares - each.loads**2 / each.queries for each in window)
        self._growth += (load * growth / count - self._growth) * share
        self._spread += (spread / count - self._spread) * share

    @property
    def _power(self) -> float:
        elasticity = max(self._growth / self._spread, 0.0) if self._spread > 0 else 0.0
        return max(MOST_POWER - (MOST_POWER - 1.0) * elasticity / LEAST_ELASTICITY, 1.0)

    def _decide(self, paces: Collection[Pace]) -> bool:
        known = [pace for pace in paces if pace.seen >= QUERIES]
        quickest = min(known, key=lambda pace: pace.mean, default=None)
        variance, has_changed = max(self._variance, self._between), False
        # With more replicas there are more pairs that may differ by chance.
        evidence, power = FIRM * FIRM + 4.0 * log(len(paces)), self._power
        for pace in paces:
            factor = 1.0
            if quickest is not None and pace.seen >= QUERIES:
                more = pace.mean - quickest.mean
                noise = variance * (1.0 / pace.seen + 1.0 / quickest.seen)
                if pace.factor > 1.0 or more * more > noise * evidence:
                    factor = min(exp(more), MOST_FACTOR)
            factor = factor**power if factor >= LEAST_FACTOR else 1.0
            if not CHANGE**-power < factor / pace.factor < CHANGE**power:
                pace.factor, has_changed = factor, True
        return has_changed
