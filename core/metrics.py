"""Counters, gauges and histograms, as Prometheus has them, and their text.

A process counts in the :class:`Metric` objects of a :class:`Registry`. What they have counted
travels as :class:`Family` values, which are plain and can be joined with those of other processes;
:func:`text` writes them all as Prometheus' text format 0.0.4.

Not prometheus_client, whose import is a tenth of a start's time, whose counters take a lock and
several calls each, and which cannot join what other processes have counted except through files.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
MAX_BOUNDS = 100
MAX_NAME = 200  # characters
MAX_VALUE = 256  # characters of a label's value; what is longer is cut

Kind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]
Values = tuple[str, ...]  # of labels, in the order of their names
Sample = float | tuple[tuple[int, ...], float]  # or a histogram's counts by bucket, and the sum

_is_name = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*").fullmatch
_is_label = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*").fullmatch


class Family(NamedTuple):
    """One metric with its samples, by the values of its labels."""

    name: str
    kind: Kind
    description: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]  # of a histogram's buckets, without the last, which is infinite
    samples: dict[Values, Sample]


class _Buckets:
    """A histogram's counts for one set of labels."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class Metric:
    """One metric, made by a :class:`Registry`. Not for several threads at once.

    New values of labels are refused, and counted as dropped, where the registry is full.
    """

    def __init__(self, family: Family, is_full: Callable[[Metric], bool]) -> None:
        self.name, self.kind, self.description, self.labels, self.bounds, _ = family
        self._is_full = is_full
        self._samples: dict[Values, Any] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, amount: float, *values: str) -> None:
        """Add to a counter."""
        samples = self._samples
        if values in samples:
            samples[values] += amount
        elif not self._is_full(self):
            samples[values] = amount

    def set(self, value: float, *values: str) -> None:
        """Set a gauge."""
        if values in self._samples or not self._is_full(self):
            self._samples[values] = value

    def observe(self, value: float, *values: str) -> None:
        """Add to a histogram."""
        buckets = self._samples.get(values) or self._begin(values)
        if buckets is not None:
            buckets.counts[bisect_left(self.bounds, value)] += 1
            buckets.total += value

    def observe_all(self, observed: Sequence[float], *values: str) -> None:
        """Add many to a histogram, at a tenth of what each would cost."""
        if len(observed) == 1:
            self.observe(observed[0], *values)
            return
        buckets = observed and (self._samples.get(values) or self._begin(values))
        if buckets:
            for place, count in Counter(map(partial(bisect_left, self.bounds), observed)).items():
                buckets.counts[place] += count
            buckets.total += sum(observed)

    def _begin(self, values: Values) -> _Buckets | None:
        if self._is_full(self):
            return None
        buckets = self._samples[values] = _Buckets(len(self.bounds) + 1)
        return buckets

    def forget(self, unwanted: Callable[[Values], bool]) -> None:
        """Drop the samples whose labels' values are unwanted."""
        self._samples = {v: each for v, each in self._samples.items() if not unwanted(v)}

    def family(self) -> Family:
        """Return what it has counted."""
        samples: dict[Values, Sample] = {
            values: (tuple(each.counts), each.total) if isinstance(each, _Buckets) else each
            for values, each in self._samples.copy().items()
        }
        return Family(self.name, self.kind, self.description, self.labels, self.bounds, samples)


class Registry:
    """The metrics of one process, with at most ``max_samples`` sets of labels in all.

    ``on_full`` gets the first metric of which something was dropped.
    """

    def __init__(
        self, max_samples: int = 100_000, on_full: Callable[[str], None] | None = None
    ) -> None:
        self.dropped = 0  # observations
        self._max_samples = max_samples
        self._on_full = on_full
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, description: str, *labels: str) -> Metric:
        """Return the counter of this name; its name ends in ``_total``."""
        return self.get(Family(name, "counter", description, labels, (), {}))

    def gauge(self, name: str, description: str, *labels: str) -> Metric:
        """Return the gauge of this name."""
        return self.get(Family(name, "gauge", description, labels, (), {}))

    def histogram(
        self, name: str, description: str, *labels: str, bounds: tuple[float, ...] = SECONDS
    ) -> Metric:
        """Return the histogram of this name."""
        return self.get(Family(name, "histogram", description, labels, bounds, {}))

    def get(self, wanted: Family) -> Metric:
        """Return a metric, made if there is none; ValueError if its name has another one."""
        metric = self._metrics.get(wanted.name)
        if metric is None:
            self._check_apart(wanted)
            metric = self._metrics[wanted.name] = Metric(wanted, self._is_full)
        elif (metric.kind, metric.labels, metric.bounds) != (
            wanted.kind,
            wanted.labels,
            wanted.bounds,
        ):
            raise ValueError(
                f"name={wanted.name!r}: there is a {_kind(metric)} of that name already, so there "
                f"cannot be a {_kind(wanted)}"
            )
        return metric

    def _check_apart(self, wanted: Family) -> None:
        for other in self._metrics.values():
            if not _lines(wanted).isdisjoint(_lines(other)):
                raise ValueError(
                    f"name={wanted.name!r}: the lines of this {wanted.kind} could not be told from "
                    f"those of {other.name!r}, a {other.kind}; use another name"
                )

    def families(self) -> list[Family]:
        """Return what was counted."""
        return [metric.family() for metric in list(self._metrics.values())]

    def forget(self, label: str, value: str) -> None:
        """Drop all samples in which a label has this value."""
        for metric in self._metrics.values():
            if label in metric.labels:
                place = metric.labels.index(label)
                metric.forget(lambda values, place=place: values[place] == value)  # type: ignore[misc]

    def _is_full(self, metric: Metric) -> bool:
        if sum(map(len, self._metrics.values())) < self._max_samples:
            return False
        self.dropped += 1
        if self.dropped == 1 and self._on_full is not None:
            self._on_full(metric.name)
        return True


def _lines(metric: Metric | Family) -> set[str]:
    """Return the names of its lines."""
    if metric.kind != "histogram":
        return {metric.name}
    return {metric.name, *(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))}


def _kind(metric: Metric | Family) -> str:
    labels = f" with {', '.join(metric.labels)}" if metric.labels else ""
    bounds = f" and boundaries {list(metric.bounds)}" if metric.bounds else ""
    return f"{metric.kind}{labels}{bounds}"


# --- Names that users give ------------------------------------------------------------------------


def name_problem(name: str) -> str | None:
    """Return what is wrong with a metric's name, or None."""
    if not _is_name(name) or len(name) > MAX_NAME:
        return "must be letters, digits, '_' and ':', and not begin with a digit"
    if name.startswith("greenroom_"):
        return "must not begin with 'greenroom_', which is for Greenroom's own"
    return None


def label_problem(label: str, reserved: Iterable[str]) -> str | None:
    """Return what is wrong with a label's name, or None."""
    if not _is_label(label) or len(label) > MAX_NAME:
        return "must be letters, digits and '_', and begin with a letter, or with one '_'"
    if label in reserved:
        return f"is reserved: {', '.join(sorted(reserved))} are added to all metrics"
    return None


def bounds_problem(bounds: Sequence[Any]) -> str | None:
    """Return what is wrong with a histogram's boundaries, or None."""
    if not 1 <= len(bounds) <= MAX_BOUNDS:
        return f"must be 1 to {MAX_BOUNDS} numbers"
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in bounds):
        return "must be finite numbers"
    if any(low >= high for low, high in pairwise(bounds)):
        return "must be in ascending order, each once"
    return None


# --- The text -------------------------------------------------------------------------------------

Group = tuple[Labels, Sequence[Family]]
"""Families with labels that all of their samples have besides."""


def text(groups: Iterable[Group]) -> bytes:
    """Return all samples in Prometheus' format, joined by the names of their metrics.

    A name can have one kind only. Where processes disagree, a comment is in place of the later one.
    """
    kinds: dict[str, Family] = {}
    lines: dict[str, list[str]] = {}
    for labels, families in groups:
        for family in families:
            first = kinds.setdefault(family.name, family)
            of_name = lines.setdefault(family.name, [])
            if first.kind == family.kind:
                of_name += _samples(family, labels)
            else:
                where = ", ".join(f"{name} {value}" for name, value in labels.items())
                of_name.append(f"# left out: a {family.kind} of this name ({_escaped(where)})")
    written = []
    for name, family in kinds.items():
        if family.description:
            description = family.description.replace("\\", r"\\").replace("\n", r"\n")
            written.append(f"# HELP {name} {description}")
        written.append(f"# TYPE {name} {family.kind}")
        written += lines[name]
    return ("\n".join(written) + "\n").encode()


def _samples(family: Family, more: Labels) -> Iterable[str]:
    name = family.name
    for values, sample in family.samples.items():
        labels = _braced({**dict(zip(family.labels, values, strict=True)), **more})
        if not isinstance(sample, tuple):
            yield f"{name}{{{labels}}} {_number(sample)}"
            continue
        counts, total = sample
        comma = "," if labels else ""
        for bound, count in zip((*family.bounds, math.inf), accumulate(counts), strict=True):
            yield f'{name}_bucket{{{labels}{comma}le="{_number(bound)}"}} {count}'
        yield f"{name}_sum{{{labels}}} {_number(total)}"
        yield f"{name}_count{{{labels}}} {sum(counts)}"


def _braced(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
