"""Time series of the traffic: what proxies counted, kept for a while in steps of equal length.

Theory of operation. A proxy reports once a second what it counted since the report before, at the
full second of its clock. Reports only add up, so it does not matter which proxy a count is from,
and nothing has to be taken back when one dies. Each report is for the time before it: the step in
which it arrives, less :data:`LAG_S`. So a second has one report of each proxy whose clock is right.

There are two spans, fine steps for a short time and coarse ones for an hour. A step keeps a
histogram until it ends and is then packed into a row of a few bytes. Steps without traffic have no
row. Rows are dropped when they are older than their span, or when their endpoint or backend is
gone. Nothing is saved: a new controller begins anew.

Times are seconds since the epoch, so that the steps of all spans and controllers coincide.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple

from greenroom.core.rollouts.judging import BUCKETS, bound_of, bucket_of, percentile

REPORT_S = 1.0
LAG_S = 0.5  # a report that is late by less still counts for the step that it is about
MAX_CHANGES = 400  # of a backend's number of replicas that are remembered

Pair = tuple[str, str]  # endpoint and backend
PlainTraffic = tuple[int, int, int, int, int, dict[int, int]]  # the fields of Traffic

CLUSTER: Pair = ("", "")  # stands for all pairs that clients ask


@dataclass(slots=True)
class Traffic:
    """What was counted of one pair, or of several; adds up over proxies and over time."""

    ended: int = 0
    errors_4xx: int = 0
    errors_5xx: int = 0
    queued: int = 0  # at each report, so of several reports the sum
    ongoing: int = 0
    latencies: Counter[int] = field(default_factory=Counter)  # by core.rollouts.judging's buckets

    def count(self, status: int, took_s: Sequence[float]) -> None:
        """Count queries that have ended."""
        self.ended += len(took_s)
        self.errors_4xx += len(took_s) * (400 <= status < 500)
        self.errors_5xx += len(took_s) * (status >= 500)
        self.latencies.update(map(bucket_of, took_s))

    def add(self, more: PlainTraffic) -> None:
        """Add what another one counted."""
        ended, errors_4xx, errors_5xx, queued, ongoing, latencies = more
        self.ended += ended
        self.errors_4xx += errors_4xx
        self.errors_5xx += errors_5xx
        self.queued += queued
        self.ongoing += ongoing
        self.latencies.update(latencies)

    def plain(self) -> PlainTraffic:
        """Return it as a message carries it."""
        counts = (self.ended, self.errors_4xx, self.errors_5xx, self.queued, self.ongoing)
        return (*counts, dict(self.latencies))

    def latency_s(self, share: float) -> float:
        """Return what this share of the queries took at most; 0 without any."""
        bucket = percentile(self.latencies, share * self.ended)
        return bound_of(min(bucket, BUCKETS - 1)) if self.ended else 0.0


class Row(NamedTuple):
    """One step of one pair; see :class:`Traffic`."""

    step: int  # its number since the epoch
    ended: int
    errors_4xx: int
    errors_5xx: int
    queued: int
    ongoing: int
    p50_s: float
    p99_s: float


_ROW = Struct("=Q5Qff")  # in a tenth of the room of a tuple


@dataclass(frozen=True, slots=True)
class Span:
    """How long a step is, and how many are kept."""

    step_s: int
    kept: int


SPANS = {"live": Span(1, 120), "hour": Span(10, 360)}
MAX_STEPS = max(span.kept for span in SPANS.values())
LONGEST_S = max(span.kept * span.step_s for span in SPANS.values())


class _Steps:
    """The steps of one span: the open one, and the rows of those before."""

    def __init__(self, span: Span, step: int) -> None:
        self.span = span
        self.step = step  # the open one
        self.first = step  # of which all is known
        self._open: dict[Pair, Traffic] = {}
        self._rows: dict[Pair, deque[bytes]] = {}

    def add(self, pair: Pair, traffic: PlainTraffic) -> None:
        if pair not in self._open:
            self._open[pair] = Traffic()
        self._open[pair].add(traffic)

    def advance(self, step: int) -> None:
        """Close the open step, unless it is this one."""
        for pair, traffic in self._open.items():
            if pair not in self._rows:
                self._rows[pair] = deque(maxlen=self.span.kept)
            plain = traffic.plain()[:-1]
            latencies = (traffic.latency_s(0.5), traffic.latency_s(0.99))
            self._rows[pair].append(_ROW.pack(self.step, *plain, *latencies))
        self._open = {}
        self.step = step

    def keep(self, is_known: Callable[[Pair], bool]) -> None:
        """Drop the rows of pairs that are gone, or have had no traffic for the whole span."""
        oldest = self.step - self.span.kept
        for pair, rows in list(self._rows.items()):
            if _ROW.unpack(rows[-1])[0] < oldest or not (pair == CLUSTER or is_known(pair)):
                del self._rows[pair]

    def rows(self, pair: Pair) -> Iterator[Row]:
        for packed in self._rows.get(pair, ()):
            yield Row(*_ROW.unpack(packed))

    def pairs(self) -> Iterable[Pair]:
        return self._rows.keys() - {CLUSTER}


class Series:
    """The traffic of a cluster over time. ``now`` is in seconds since the epoch.

    ``is_known`` says whether a pair's endpoint and backend exist; others are not kept. ``is_inner``
    says whether only other deployments call an endpoint: the sum of the cluster leaves that out, or
    a request that takes three calls would be counted four times.
    """

    def __init__(
        self, is_known: Callable[[Pair], bool], is_inner: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._is_known = is_known
        self._is_inner = is_inner
        self._spans: dict[str, _Steps] = {}  # empty before the clock is first read
        self._replicas: dict[str, deque[tuple[float, int]]] = {}  # backend -> since when how many

    # --- Observations ---------------------------------------------------------------------------

    def reported(self, traffic: Mapping[Pair, PlainTraffic], now: float) -> None:
        """Take what a proxy counted since its last report."""
        self.advance(now)
        for pair, counted in traffic.items():
            if self._is_known(pair):
                is_inner = self._is_inner(pair[0])
                for steps in self._spans.values():
                    steps.add(pair, counted)
                    if not is_inner:
                        steps.add(CLUSTER, counted)

    def scaled(self, backend: str, running: int, now: float) -> None:
        """Note how many replicas of a backend run."""
        changes = self._replicas.get(backend)
        if changes is None:
            changes = self._replicas[backend] = deque(maxlen=MAX_CHANGES)
        if not changes or changes[-1][1] != running:
            changes.append((now, running))
            while len(changes) > 1 and changes[1][0] < now - LONGEST_S:
                changes.popleft()

    def removed(self, backend: str) -> None:
        """Forget a backend."""
        self._replicas.pop(backend, None)

    def advance(self, now: float) -> None:
        """Close the steps that are over. A clock that was set back begins everything anew."""
        for name, span in SPANS.items():
            step, steps = int((now - LAG_S) // span.step_s), self._spans.get(name)
            if steps is None or step < steps.step - 1:
                self._spans[name] = _Steps(span, step)
            elif step > steps.step:
                steps.advance(step)
                if span.step_s > 1:
                    self._keep()

    def _keep(self) -> None:
        for steps in self._spans.values():
            steps.keep(self._is_known)

    # --- For people -----------------------------------------------------------------------------

    def shown(
        self,
        name: str,
        last: int | None,
        pairs: Iterable[Pair],
        now: float,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Return the newest steps of a span: their times, and columns of all and of each pair.

        ``pairs`` are there also without traffic; others where they had some. With ``endpoint`` only
        those of this one.
        """
        self.advance(now)
        steps = self._spans[name]
        span = steps.span
        numbers = range(steps.step - min(last or span.kept, span.kept), steps.step)
        every = sorted(
            pair
            for pair in {*pairs, *filter(self._is_known, steps.pairs())}
            if endpoint is None or pair[0] == endpoint
        )
        replicas = {tag: self._replicas_in(tag, numbers, span) for tag in self._replicas}
        unknown = [None if number < steps.first else 0 for number in numbers]
        totals = [
            None if all(count is None for count in counts) else sum(filter(None, counts))
            for counts in zip(unknown, *replicas.values(), strict=True)
        ]
        return {
            "step_s": span.step_s,
            "times": [number * span.step_s for number in numbers],
            "cluster": {**_columns(steps, CLUSTER, numbers), "replicas": totals},
            "deployments": {
                pair: {
                    **_columns(steps, pair, numbers),
                    "replicas": replicas.get(pair[1]) or unknown,
                }
                for pair in every
            },
        }

    def _replicas_in(self, backend: str, numbers: Sequence[int], span: Span) -> list[int | None]:
        """Return how many replicas ran at the end of each step, None before that is known."""
        changes = list(self._replicas[backend])
        column: list[int | None] = []
        running: int | None = None
        for number in numbers:
            while changes and changes[0][0] < (number + 1) * span.step_s:
                running = changes.pop(0)[1]
            column.append(running)
        return column


def _columns(steps: _Steps, pair: Pair, numbers: range) -> dict[str, list[float | None]]:
    rows = {row.step: row for row in steps.rows(pair)}
    step_s = steps.span.step_s
    none = Row(0, 0, 0, 0, 0, 0, 0.0, 0.0)

    def column(value: Callable[[Row], float | None]) -> list[float | None]:
        return [
            None if number < steps.first else value(rows.get(number, none)) for number in numbers
        ]

    return {
        "requests_per_s": column(lambda row: row.ended / step_s),
        "errors_4xx_per_s": column(lambda row: row.errors_4xx / step_s),
        "errors_5xx_per_s": column(lambda row: row.errors_5xx / step_s),
        "p50_s": column(lambda row: _rounded(row.p50_s) if row.ended else None),
        "p99_s": column(lambda row: _rounded(row.p99_s) if row.ended else None),
        "queued": column(lambda row: row.queued * REPORT_S / step_s),
        "ongoing": column(lambda row: row.ongoing * REPORT_S / step_s),
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")
