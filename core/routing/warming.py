"""Slow start: a new replica takes its share little by little, while its caches are cold.

The least loaded replica is chosen, so a new one would get more queries than any other. While it
*warms up* its load counts as more than it is: divided by a weight that grows from LEAST to 1. So it
has one query at a time at first. That lasts ``slow_start_s``, but no longer than the oldest replica
has been there: those that start together share alike, and one that is alone takes all. It only
orders replicas, and never has a query wait. (Envoy's slow start mode, with its linear ramp and its
least weight: https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/load_balancing/slow_start)
"""

from __future__ import annotations

from typing import NamedTuple

LEAST = 0.1


class Warming(NamedTuple):
    """How a replica takes its share: it is warm at ``until``, after ``lasts_s``."""

    until: float = float("-inf")
    lasts_s: float = 0.0

    def level(self, load: int, now: float) -> int:
        """Return what a load counts as."""
        if now >= self.until:
            return load
        return int(load / max(1.0 - (self.until - now) / self.lasts_s, LEAST))

    def left_s(self, now: float) -> float:
        """Return for how long it warms up from now on."""
        return max(self.until - now, 0.0)


WARM = Warming()
