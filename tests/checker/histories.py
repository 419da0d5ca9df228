"""What clients and replicas write down, one JSON list a line, and how it is read back.

A request is written down before it is sent and again when it is answered, so one whose client was
killed is known, too. All times are of the machine's monotonic clock, which its processes share.
Nothing here is of the product.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Weights = tuple[tuple[str, float], ...]  # (version, weight), sorted
NEVER = math.inf

OK, REFUSED, UNKNOWN = (
    "ok",
    "refused",
    "unknown",
)  # unknown: it may have happened, at any time since


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One that an admin client asked for, of one endpoint.

    ``kind`` is "create", which asks for ``value`` if there is none, "set", "delete", or "read",
    whose ``value`` is what was answered: weights, or None for no endpoint.
    """

    endpoint: str
    kind: str
    value: Weights | None
    asked_at: float
    answered_at: float = NEVER
    outcome: str = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request; ``status`` is 0 where no answer came."""

    id: str
    host: str
    endpoint: str
    method: str
    asked_at: float
    answered_at: float = NEVER
    status: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One time that a replica ran user code for a request; ``process`` names its log."""

    id: str
    version: str
    process: str
    began_at: float
    ended_at: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """A host that was kept from the others for so long that they may have gone on without it."""

    host: str
    begun_at: float
    ended_at: float


@dataclass(slots=True, kw_only=True)
class History:
    """All that is known of a round; ``limit`` is how many requests a replica may run at a time."""

    limit: int
    operations: list[Operation] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    isolations: list[Isolation] = field(default_factory=list)


class Journal:
    """A file that lines are appended to, each by one write: a process that is killed loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *fields: Any) -> None:
        """Append a line: these fields behind the time."""
        os.write(self._fd, json.dumps([time.monotonic(), *fields]).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_history(folder: Path, runs_folder: Path, limit: int) -> History:
    """Return what the journals of a round have, and those of replicas, which go on for rounds."""
    history = History(limit=limit)
    for path in sorted(folder.glob("clients-*")):
        _read_clients(path, history)
    for path in sorted(runs_folder.glob("replica-*")):
        history.runs += _runs(path)
    for path in folder.glob("isolations"):
        for _, host, begun_at, ended_at in _lines(path):
            history.isolations.append(Isolation(host=host, begun_at=begun_at, ended_at=ended_at))
    return history


def _lines(path: Path) -> Iterator[list[Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _read_clients(path: Path, history: History) -> None:
    operations: dict[str, Operation] = {}
    requests: dict[str, Request] = {}
    for at, what, key, *fields in _lines(path):
        if what == "asked":
            endpoint, kind, value = fields
            operations[key] = Operation(
                endpoint=endpoint, kind=kind, value=weights_of(value), asked_at=at
            )
        elif what == "answered":
            outcome, value = fields
            operation = replace(operations[key], answered_at=at, outcome=outcome)
            if operation.kind == "read":
                operation = replace(operation, value=weights_of(value))
            operations[key] = operation
        elif what == "sent":
            host, endpoint, method = fields
            requests[key] = Request(
                id=key, host=host, endpoint=endpoint, method=method, asked_at=at
            )
        else:
            status, text = fields
            requests[key] = replace(requests[key], answered_at=at, status=status, text=text)
    history.requests += requests.values()
    history.operations += [
        each for each in operations.values() if each.kind != "read" or each.outcome == OK
    ]


def weights_of(traffic: dict[str, float] | None) -> Weights | None:
    """Return an endpoint's traffic as a value that can be compared."""
    if traffic is None:
        return None
    return tuple(sorted((version, round(weight, 6)) for version, weight in traffic.items()))


def _runs(path: Path) -> Iterator[Run]:
    began: dict[str, Run] = {}
    for at, what, key, version in _lines(path):
        if what == "began":
            began[key] = Run(id=key, version=version, process=path.name, began_at=at)
        else:
            yield replace(began.pop(key), ended_at=at)
    yield from began.values()  # when it was killed
