"""Metrics of user code: counters, gauges and histograms, with Ray Serve's signatures.

::

    from greenroom.serve import metrics

    class Model:
        def __init__(self):
            self.rows = metrics.Counter("model_rows", "Rows seen", tag_keys=("kind",))

        def __call__(self, request):
            self.rows.inc(3, tags={"kind": "text"})

``/-/metrics`` of any host has what all replicas have counted. Each sample has the tags
``deployment``, ``replica`` and ``application`` besides, and ``host``. A metric may be made
anywhere, several times over, and used from any thread; it is pickled with the code that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from greenroom.actors.replica import metrics as of_replica
from greenroom.actors.replica.context import replica_context, request_context
from greenroom.core.errors import InvalidRequestError
from greenroom.core.metrics import (
    CONTENT_TYPE as CONTENT_TYPE,
    MAX_VALUE,
    SECONDS,
    Family,
    Kind,
    Metric,
    bounds_problem,
    label_problem,
    name_problem,
    text as as_text,
)
from greenroom.core.validation import is_number

ADDED = ("deployment", "replica", "application")
RESERVED = frozenset({*ADDED, "host", "le"})
ROUTE = "route"  # a tag with this name is the running query's route, unless it is given


class _UsersMetric:
    """What the three kinds have in common."""

    _kind: Kind
    _boundaries: Sequence[float] = ()

    def __init__(
        self,
        name: str,
        description: str = "",
        tag_keys: Sequence[str] | None = None,
    ) -> None:
        """Make it, or find it; ValueError or TypeError for a bad name or key."""
        self._name = _checked_name(name)
        if not isinstance(description, str):
            raise TypeError(f"description={description!r}: must be a string")
        self._description = description
        self._tag_keys = _checked_keys(tag_keys)
        self._default_tags: dict[str, str] = {}
        ending = "_total" if self._kind == "counter" and not name.endswith("_total") else ""
        family = Family(
            name + ending,
            self._kind,
            description,
            (*self._tag_keys, *ADDED),
            tuple(map(float, self._boundaries)),
            {},
        )
        try:
            with of_replica.lock:
                self._metric: Metric = of_replica.of_users.get(family)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def __reduce__(self) -> Any:
        return _restored, (type(self), self._arguments(), self._default_tags)

    def _arguments(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "description": self._description,
            "tag_keys": self._tag_keys,
        }

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, tag keys and default tags."""
        return {**self._arguments(), "default_tags": dict(self._default_tags)}

    def set_default_tags(self, default_tags: Mapping[str, str]) -> None:
        """Set values of tags for observations that do not give them.

        TypeError for a value that is no string, ValueError for a tag that is not among the keys.
        """
        self._default_tags = self._checked_tags("default_tags", default_tags)

    def _values(self, tags: Mapping[str, str] | None) -> tuple[str, ...]:
        given = self._default_tags
        if tags:
            given = {**given, **self._checked_tags("tags", tags)}
        values = [self._value(key, given) for key in self._tag_keys]
        replica = replica_context()
        if replica is None:
            return (*values, "", "", "")
        return (*values, replica.deployment, replica.replica_tag, replica.app_name)

    def _value(self, key: str, given: Mapping[str, str]) -> str:
        if key in given:
            return given[key]
        if key == ROUTE:
            return request_context().route
        raise InvalidRequestError(
            f"metric {self._name!r}: tag {key!r} has no value; give it in tags, or once and for "
            "all by set_default_tags"
        )

    def _checked_tags(self, what: str, tags: Mapping[str, str]) -> dict[str, str]:
        if not isinstance(tags, Mapping):
            raise TypeError(f"{what}={tags!r}: must be a dict of tags")
        for key, value in tags.items():
            if key not in self._tag_keys:
                keys = ", ".join(self._tag_keys) or "none"
                raise InvalidRequestError(
                    f"{what}={dict(tags)!r}: metric {self._name!r} has no tag {key!r}; its "
                    f"tag_keys are: {keys}"
                )
            if not isinstance(value, str):
                raise TypeError(f"{what}={dict(tags)!r}: the value of {key!r} must be a string")
        return {key: value[:MAX_VALUE] for key, value in tags.items()}


class Counter(_UsersMetric):
    """A number that only grows; its name in ``/-/metrics`` ends in ``_total``."""

    _kind: Kind = "counter"

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add ``value``, which is above 0."""
        amount = _checked_number(value)
        if not 0 < amount < math.inf:
            raise InvalidRequestError(f"value={value!r}: a counter takes finite numbers above 0")
        values = self._values(tags)
        with of_replica.lock:
            self._metric.add(amount, *values)


class Gauge(_UsersMetric):
    """A number that goes up and down."""

    _kind: Kind = "gauge"

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set it to ``value``."""
        number, values = _checked_number(value), self._values(tags)
        with of_replica.lock:
            self._metric.set(number, *values)


class Histogram(_UsersMetric):
    """How many values were up to each of ``boundaries``, and their sum."""

    _kind: Kind = "histogram"

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: Sequence[str] | None = None,
    ) -> None:
        """Make it, or find it; without ``boundaries`` for seconds, from a millisecond to 30."""
        if boundaries is None:
            boundaries = SECONDS
        if isinstance(boundaries, str) or not isinstance(boundaries, Sequence):
            raise TypeError(f"boundaries={boundaries!r}: must be a list of numbers")
        if problem := bounds_problem(boundaries):
            raise InvalidRequestError(f"boundaries={boundaries!r}: {problem}")
        self._boundaries = boundaries
        super().__init__(name, description, tag_keys)

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "boundaries": list(self._boundaries)}

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count ``value``."""
        number, values = _checked_number(value), self._values(tags)
        if math.isnan(number):
            raise InvalidRequestError(f"value={value!r}: a histogram takes numbers")
        with of_replica.lock:
            self._metric.observe(number, *values)


def text() -> str:
    """Return what this process has counted, as Prometheus' text: for local testing mode."""
    with of_replica.lock:
        families = of_replica.of_users.families()
    return as_text([({}, families)]).decode()


def _restored(
    kind: type[_UsersMetric], arguments: dict[str, Any], default_tags: dict[str, str]
) -> _UsersMetric:
    metric = kind(**arguments)
    metric.set_default_tags(default_tags)
    return metric


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be a string")
    if problem := name_problem(name):
        raise InvalidRequestError(f"name={name!r}: {problem}")
    return name


def _checked_keys(tag_keys: object) -> tuple[str, ...]:
    if tag_keys is None:
        return ()
    if not isinstance(tag_keys, tuple | list) or not all(isinstance(k, str) for k in tag_keys):
        raise TypeError(f"tag_keys={tag_keys!r}: must be a tuple of strings")
    for key in tag_keys:
        if problem := label_problem(key, RESERVED):
            raise InvalidRequestError(f"tag_keys={tag_keys!r}: {key!r} {problem}")
    return tuple(dict.fromkeys(tag_keys))


def _checked_number(value: Any) -> float:
    item = getattr(value, "item", None)  # of numpy's numbers, and of tensors with one
    number = item() if callable(item) else value
    if not is_number(number):
        raise TypeError(f"value={value!r}: must be a number")
    return float(number)
