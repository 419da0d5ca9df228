"""Whether a shadow's answers are the same as the primary's, and how they differ if not.

Differences are grouped by *cause*, a text that leaves out whatever varies from query to query; for
example, it has ``*`` for a position in a list. A pair of answers has at most one cause, that of the
first difference. Answers that cannot be compared also have a cause, but count as neither equal nor
different.

Replicas of a shadow :func:`compare` answers, and count the :class:`Differences` by cause, with a
few examples of each, all bounded. The controller adds up their reports (:class:`AllDifferences`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator

from greenroom.core.errors import InvalidRequestError
from greenroom.core.validation import Settings, describe, is_number

MAX_BODY_BYTES = 256 * 1024  # of an answer that is compared by more than its status
MAX_DEPTH = 100  # of JSON
MAX_SHOWN = 200  # characters of a value
MAX_SHOWN_BYTES = 512  # of a body in an example
_NOTHING = object()
_SCALARS = frozenset({str, int, float, bool, type(None)})
_LISTS = (list, tuple)
_POSITION = "\0"  # before a position in a list, which no name begins with


class Compare(Settings):
    """How a shadow's answers are compared with the primary's.

    By ``status`` alone; or as ``json``, with numbers equal within ``relative_tolerance`` or
    ``absolute_tolerance``, and without what the JSON pointers in ``ignore`` lead to, in which ``*``
    stands for any name or position; or by a ``function`` of the user's.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "tolerance": "say relative_tolerance or absolute_tolerance",
    }

    how: Literal["status", "json", "function"] = "json"
    relative_tolerance: float = Field(default=0.0, ge=0, le=1)
    absolute_tolerance: float = Field(default=0.0, ge=0)
    ignore: tuple[str, ...] = ()
    function: str = ""  # its name
    code: bytes = Field(default=b"", repr=False, max_length=256 * 1024)  # cloudpickle of it

    @field_validator("ignore")
    @classmethod
    def _are_pointers(cls, pointers: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [pointer for pointer in pointers if not pointer.startswith("/")]:
            raise ValueError(f"{bad[0]!r} is no JSON pointer; for example '/items/*/id'")
        return pointers


def check_compare(compare: object) -> Compare:
    """Return settings from a name, a dict or settings; one InvalidRequestError otherwise."""
    if isinstance(compare, Compare):
        return compare
    values = {"how": compare} if isinstance(compare, str) else compare
    if not isinstance(values, Mapping):
        raise InvalidRequestError(
            f"compare={compare!r}: must be 'status', 'json', a dict of settings or a function"
        )
    try:
        made = Compare.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidRequestError(describe("compare", error)) from None
    if (made.how == "function") != bool(made.code):
        raise InvalidRequestError("compare: give the function itself to compare by a function")
    return made


class Response(NamedTuple):
    """One side's answer, as a user's compare function gets it.

    ``value`` is what a call through a handle returned; None over HTTP, and of what failed.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()  # names in lower case
    body: bytes = b""
    value: Any = None
    missing: str = ""  # why there is nothing but the status to compare

    @property
    def shown(self) -> dict[str, Any]:
        """What an example of a difference shows."""
        body = self.body[:MAX_SHOWN_BYTES].decode("utf-8", "replace")
        return {"status": self.status, "body": body, "missing": self.missing}

    def json(self) -> Any:
        """Return the body's JSON, or the value; ValueError where it is none."""
        return json.loads(self.body) if self.body or self.value is None else self.value


class Outcome(NamedTuple):
    """The result of a comparison; without a cause there is no difference."""

    cause: str = ""
    detail: str = ""
    comparable: bool = True


SAME = Outcome()
Function = Callable[[Response, Response], Any]


def compare(
    settings: Compare, primary: Response, shadow: Response, function: Function | None = None
) -> Outcome:
    """Compare two answers; ``function`` is the user's, and may raise."""
    if settings.how != "function" or primary.missing or shadow.missing:
        if primary.status != shadow.status:
            return Outcome(f"status {primary.status} became {shadow.status}")
        if settings.how == "status":
            return SAME
    for side, response in (("primary", primary), ("shadow", shadow)):
        if response.missing:
            return Outcome(f"{side}: {response.missing}", comparable=False)
    if settings.how == "function":
        return _by_function(function, primary, shadow)
    return _by_json(settings, primary, shadow)


def _by_function(function: Function | None, primary: Response, shadow: Response) -> Outcome:
    if function is None:
        return Outcome("the compare function could not be loaded", comparable=False)
    found = function(primary, shadow)
    if found is None or found is True or found == "":
        return SAME
    return Outcome(found[:MAX_SHOWN] if isinstance(found, str) else "the compare function says so")


def _by_json(settings: Compare, primary: Response, shadow: Response) -> Outcome:
    parsed = []
    for side, response in (("primary", primary), ("shadow", shadow)):
        try:
            parsed.append(response.json())
        except (ValueError, RecursionError):
            parsed.append(_NOTHING)
            if not response.body:
                continue  # two empty bodies are equal
            return Outcome(f"{side}: no JSON", comparable=False)
    ignored = [tuple(map(_unescaped, pointer.split("/")[1:])) for pointer in settings.ignore]
    return _difference(settings, ignored, (), *parsed) or SAME


def _unescaped(token: str) -> str:
    return token.replace("~1", "/").replace("~0", "~")


def _difference(
    settings: Compare, ignored: list[tuple[str, ...]], path: tuple[str, ...], old: Any, new: Any
) -> Outcome | None:
    if ignored and any(_leads_to(pointer, path) for pointer in ignored):
        return None
    if len(path) > MAX_DEPTH:
        return Outcome("deeper than can be compared", comparable=False)
    pairs: Iterable[tuple[Any, Any, Any]]
    if type(old) is type(new) is dict:
        pairs = [(name, old[name], new.get(name, _NOTHING)) for name in old]
        pairs += [(name, _NOTHING, new[name]) for name in new if name not in old]
    elif isinstance(old, _LISTS) and isinstance(new, _LISTS) and len(old) == len(new):
        pairs = zip(itertools.count(), old, new)
    else:
        return _leaf_difference(settings, path, old, new)
    for name, one, other in pairs:
        if type(one) in _SCALARS and type(one) is type(other) and one == other:
            continue  # most of what is compared; the same as below, but ten times as quick
        step = name if type(name) is str else f"{_POSITION}{name}"
        found = _difference(settings, ignored, (*path, step), one, other)
        if found is not None:
            return found
    return None


def _leaf_difference(
    settings: Compare, path: tuple[str, ...], old: Any, new: Any
) -> Outcome | None:
    if old is new or _is_equal(settings, old, new):
        return None
    where = _pointer(path)
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return Outcome(f"{where}: other length", f"{len(old)} became {len(new)}")
    what = "appeared" if old is _NOTHING else "is missing" if new is _NOTHING else "other value"
    if what == "other value" and type(old) is not type(new):
        what = "other type"
    return Outcome(f"{where}: {what}", f"{_shown(old)} became {_shown(new)}")


def _leads_to(pointer: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return len(pointer) == len(path) and all(
        token in {"*", name.removeprefix(_POSITION)}
        for token, name in zip(pointer, path, strict=True)
    )


def _pointer(path: tuple[str, ...]) -> str:
    return "".join(f"/{'*' if name.startswith(_POSITION) else name}" for name in path) or "/"


def _is_equal(settings: Compare, old: Any, new: Any) -> bool:
    if not (is_number(old) and is_number(new)):
        return type(old) is type(new) and bool(old == new)
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    relative, absolute = settings.relative_tolerance, settings.absolute_tolerance
    return math.isclose(old, new, rel_tol=relative, abs_tol=absolute)


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# --- What was found of many answers ---------------------------------------------------------------

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
class Differences:
    """The comparisons of one shadow of an endpoint, as one replica or all have made them."""

    compared: int = 0
    different: int = 0
    not_compared: int = 0
    causes: dict[str, Plain] = field(default_factory=dict)  # as they travel

    def count(self, outcome: Outcome, example: Plain) -> None:
        """Count a comparison."""
        self.compared += outcome.comparable
        self.not_compared += not outcome.comparable
        if outcome.cause:
            self.different += outcome.comparable
            self._add(outcome.cause, 1, [example], comparable=outcome.comparable)

    def add(self, plain: Plain) -> None:
        """Add what another replica has made plain."""
        self.compared += plain["compared"]
        self.different += plain["different"]
        self.not_compared += plain["not_compared"]
        for each in plain["causes"]:
            self._add(**each)

    def _add(self, cause: str, count: int, examples: list[Plain], *, comparable: bool) -> None:
        if cause not in self.causes and len(self.causes) >= MAX_CAUSES:
            cause = OTHER_CAUSES
        mine = self.causes.setdefault(
            cause, {"cause": cause, "count": 0, "comparable": comparable, "examples": []}
        )
        newest = sorted([*mine["examples"], *examples], key=lambda each: each["at"])
        mine["count"] += count
        mine["examples"] = newest[-MAX_EXAMPLES:]

    def plain(self) -> Plain:
        """Return it as plain values, the most frequent cause first."""
        causes = sorted(self.causes.values(), key=lambda each: -each["count"])
        return {
            "compared": self.compared,
            "equal": self.compared - self.different,
            "different": self.different,
            "not_compared": self.not_compared,
            "causes": [dict(each) for each in causes],
        }


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
            summed.add(plain)
        return summed.plain()
