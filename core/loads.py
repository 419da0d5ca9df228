"""How much each backend has to do, as the proxies report it.

Each proxy's newest report stands for all that it has: what it does not name is idle there. So a
lost report is made good by the next, and a new controller is right again after one from each. A
proxy that has nothing need not report again; one that has something does, and counts no more once
it has fallen silent, as when it is gone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

EXPIRE_S = 10.0  # without a report, of a proxy that has queries or has not reported yet
SETTLE_S = 5.0  # after which proxies have found a new controller


class Load(NamedTuple):
    """Queries of one backend: those that wait for a replica, and those that replicas have."""

    queued: int = 0
    ongoing: int = 0

    @property
    def total(self) -> int:
        """All queries, wherever they are."""
        return self.queued + self.ongoing


IDLE = Load()


class Loads:
    """The sum over all proxies' newest reports. ``now`` is always monotonic seconds.

    Each method that changes loads returns the backends that it changed.
    """

    def __init__(self, now: float) -> None:
        self.check_at = math.inf  # when :meth:`expire` may have something to do
        self._complete_at = now + SETTLE_S
        self._silent: dict[Hashable, float] = {}  # those yet to report, since when
        self._reports: dict[Hashable, dict[str, Load]] = {}
        self._reported_at: dict[Hashable, float] = {}
        self._sums: dict[str, Load] = {}

    def expect(self, proxy: Hashable, now: float) -> None:
        """Know of a proxy, which will report."""
        if proxy not in self._reports and proxy not in self._silent:
            self._silent[proxy] = now
            self.check_at = min(self.check_at, now + EXPIRE_S)

    def report(self, proxy: Hashable, load: Mapping[str, tuple[int, int]], now: float) -> set[str]:
        """Take a proxy's report, backend -> (queued, ongoing)."""
        self._silent.pop(proxy, None)
        before = self._reports.get(proxy, {})
        after = {backend: Load(*each) for backend, each in load.items()}
        self._reports[proxy], self._reported_at[proxy] = after, now
        if after:
            self.check_at = min(self.check_at, now + EXPIRE_S)
        return self._replace(before, after)

    def forget(self, proxy: Hashable) -> set[str]:
        """Count a proxy no more, because it is gone."""
        self._silent.pop(proxy, None)
        self._reported_at.pop(proxy, None)
        return self._replace(self._reports.pop(proxy, {}), {})

    def expire(self, now: float) -> set[str]:
        """Count proxies no more that should have reported long ago; due at ``check_at``."""
        if now < self.check_at:
            return set()
        over = now - EXPIRE_S
        for proxy in [proxy for proxy, since in self._silent.items() if since <= over]:
            del self._silent[proxy]
        heard = {proxy: at for proxy, at in self._reported_at.items() if self._reports[proxy]}
        old = [proxy for proxy, at in heard.items() if at <= over]
        changed = {backend for proxy in old for backend in self.forget(proxy)}
        times = [*self._silent.values(), *(at for at in heard.values() if at > over)]
        self.check_at = min(times, default=math.inf) + EXPIRE_S
        return changed

    def of(self, backend: str) -> Load:
        """Return what a backend has to do on all hosts."""
        return self._sums.get(backend, IDLE)

    def queues(self, backend: str) -> tuple[int, ...]:
        """Return how many queries of a backend each proxy has waiting."""
        return tuple(load.get(backend, IDLE).queued for load in self._reports.values())

    def busy(self) -> dict[str, Load]:
        """Return the backends that have anything to do."""
        return dict(self._sums)

    def is_complete(self, now: float) -> bool:
        """Tell whether every proxy has reported; a new controller has to wait for them first."""
        return now >= self._complete_at and not self._silent

    def _replace(self, before: Mapping[str, Load], after: Mapping[str, Load]) -> set[str]:
        changed = {b for b in {*before, *after} if before.get(b, IDLE) != after.get(b, IDLE)}
        for backend in changed:
            old, new = before.get(backend, IDLE), after.get(backend, IDLE)
            present = self.of(backend)
            total = Load(
                present.queued + new.queued - old.queued,
                present.ongoing + new.ongoing - old.ongoing,
            )
            if total == IDLE:
                self._sums.pop(backend, None)
            else:
                self._sums[backend] = total
        return changed
