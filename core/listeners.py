"""The proxies that have been told anything, as hard state.

Theory of operation. What is acknowledged is what every proxy routes by. The long poll knows who has
said what it holds, but a new controller has heard of nobody, while proxies route by the tables that
the last one gave them. So a proxy is recorded before it is told anything, and a new controller
waits for those on record: it hears of each, or of its end, or counts it as gone :data:`EXPECTED_S`
after it began itself, for a proxy that lives and can be reached has found it by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from greenroom.core.long_poll import News
from greenroom.core.records import ListenerRecord

if TYPE_CHECKING:
    from greenroom.core.cluster import Cluster

LISTENER = "listener"
EXPECTED_S = 30.0  # some times what a host takes to start its proxy anew


class Listeners:
    """Who listens, and who is expected to. ``now`` is always monotonic seconds."""

    def __init__(self, cluster: Cluster, records: Mapping[str, ListenerRecord], now: float) -> None:
        self._cluster = cluster
        self._recorded = {name: record.host for name, record in records.items()}
        self._expected = dict(records)
        self._expected_until = now + EXPECTED_S
        for name in records:
            cluster.long_poll.expect(name)

    def expected(self) -> list[ListenerRecord]:
        """Return those of an earlier controller that have not been heard of yet."""
        return list(self._expected.values())

    def listen(
        self, name: str, process: tuple[int, int, str], seen: int, host: str = ""
    ) -> News | None:
        """Take a proxy's call; return what it lacks, to be sent once what has changed is saved."""
        if name not in self._recorded:
            self._recorded[name] = host
            record = ListenerRecord(name=name, process=process, host=host)
            self._cluster.save(LISTENER, name, record)
        self._expected.pop(name, None)
        news = self._cluster.long_poll.listen(name, seen)
        self._cluster.listener_changed()
        return news

    def gone(self, name: str) -> None:
        """Wait for a proxy no more, and forget it; harmless when it is forgotten."""
        if name not in self._recorded:
            return
        del self._recorded[name]
        self._expected.pop(name, None)
        self._cluster.save(LISTENER, name, None)
        self._cluster.long_poll.forget(name)
        self._cluster.listener_changed()

    def host_gone(self, host: str) -> None:
        """Wait no more for the proxies of a host that is lost; they begin anew when it is back."""
        for name in [name for name, at in self._recorded.items() if at == host]:
            self.gone(name)

    def advance(self, now: float) -> None:
        """Give up those that were expected for long enough."""
        if now >= self.due_at():
            for name in list(self._expected):
                self.gone(name)

    def due_at(self) -> float:
        """Return when :meth:`advance` has something to do."""
        return self._expected_until if self._expected else float("inf")
