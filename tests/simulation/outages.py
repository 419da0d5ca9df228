"""Outages: something is broken for hours or days, and then it heals.

``python -m tests.simulation --outages`` runs all of them. What goes on all the time (beats, polls,
looks) is stretched, as are the longest pauses, so that 300 hours take seconds and yet each thing is
tried well over a thousand times: more than the exponent of a float can count. Between a tenth of an
outage and its end nothing in the shells and in the core may have grown, and afterwards all comes to
rest as in any other run.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from greenroom.actors.cluster import controller_seeker, membership
from greenroom.actors.controller import read_only as unsaved
from greenroom.actors.proxy import controller_link
from greenroom.actors.runtime import actor as crash_loop, loop, port
from greenroom.core import operations as ops
from greenroom.core.config import BackendConfig
from greenroom.core.lifecycle.failures import OF_STARTS
from tests.simulation import processes
from tests.simulation.clients import Client, Script
from tests.simulation.scripted_code import DEPENDENT
from tests.simulation.simulation import Simulation

KINDS = ("start", "life", "health", "disk", "turns")
HOURS = (1, 24, 300)
LONGEST_PAUSE_S = 900.0  # 300 hours have 1,200 of them
MOST_MORE = 100  # entries of one kind, which come and go; a leak has one for each try
_BOUNDED = {"Port._unanswered"}  # by port.MAX_UNANSWERED
_STRETCHED: list[tuple[Any, str, float]] = [
    *((kind, "most_s", LONGEST_PAUSE_S) for kind in OF_STARTS),
    (crash_loop, "MOST_S", LONGEST_PAUSE_S),
    (loop, "TICK_S", 600.0),
    (processes, "TICK_S", 600.0),
    (controller_link, "LISTEN_AGAIN_S", 600.0),
    (membership, "REPORT_EVERY_S", 600.0),
    (controller_seeker, "LISTEN_S", 600.0),
    (unsaved, "CHECK_S", 600.0),
    (port, "FIND_RETRY_S", 60.0),
]


class Operator(Client):
    """Brings up what the outage is about, and waits until it serves."""

    def _work(self) -> Script:
        config = BackendConfig(num_replicas=1, health_check_period_s=900)
        yield ops.CreateBackend(
            tag=self.backends[0],
            code=DEPENDENT + b" 1",
            code_hash="1",
            config=config,
        )
        yield ops.CreateEndpoint(
            name=self.endpoint,
            backend=self.backends[0],
            route=f"/{self.endpoint}",
            methods=("GET",),
        )


class Outage(Simulation):
    """One run: all is well, then ``kind`` is broken for so long, then all is well again."""

    def __init__(self, kind: str, hours: float) -> None:
        super().__init__(KINDS.index(kind), hosts=1)
        self.kind = kind
        self.hours = hours
        self.converge_s = 4 * LONGEST_PAUSE_S
        for number, settings in self.settings.items():
            self.settings[number] = settings.model_copy(update={"silence_timeout_s": 0.0})

    def _run(self) -> None:
        with _stretched():
            self.admins.append(None)
            self.hosts.append(None)
            self.start_host(0)
            self.clients.append(Operator(self, 0))
            self._converge()
            self._break()
            seconds = self.hours * 3600
            self.world.run(self.world.now + seconds / 10)
            before = self.held()
            self.world.run(self.world.now + seconds * 9 / 10)
            after = self.held()
            more = (after - before).items()
            grown = {what: n for what, n in more if n > MOST_MORE and what not in _BOUNDED}
            self.checks.expect(not grown, f"has grown in {self.hours} hours: {grown}")
            self.broken, self.disk.full_until = "", 0.0
            self.quiet = True
            self._converge()

    def _break(self) -> None:
        self.broken = self.kind
        if self.kind == "disk":
            self.disk.full_until = float("inf")
        for process in list(self.world.processes.values()):
            if process.role == ("controller" if self.kind == "turns" else "replica"):
                self.world.kill(process)

    def held(self) -> Counter[str]:
        """Return how many entries there are in all lists, tables and files, by what has them."""
        counts: Counter[str] = Counter()
        counts["keys on disk"] = len(self.disk.reader().load())
        counts["files"] = sum(path.is_file() for path in Path(self.folder.name).rglob("*"))
        actors = [p.actor for p in self.world.processes.values() if p.actor is not None]
        left: list[tuple[str, Any]] = [(type(actor).__name__, actor) for actor in actors]
        seen: set[int] = set()
        while left:
            name, thing = left.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, dict):
                counts[name] += len(thing)
                left += [(name, each) for pair in thing.items() for each in pair]
            elif isinstance(thing, list | tuple | set | frozenset | deque):
                counts[name] += len(thing)
                left += [(name, each) for each in thing]
            elif isinstance(thing, type) and issubclass(thing, BaseModel):
                # Pydantic completes some when they are first used.
                continue
            elif type(thing).__module__.startswith(("greenroom.", "tests.simulation.hosts")):
                left += [(f"{type(thing).__name__}.{n}", each) for n, each in _attributes(thing)]
        return counts


def outcome(kind: str, hours: float) -> tuple[str, int]:
    """Run an outage; return how it failed ("" if it did not), and how many tries there were."""
    simulation = Outage(kind, hours)
    try:
        simulation.run()
    except Exception as error:
        return "\n".join([*simulation.world.trace(), f"{type(error).__name__}: {error}"]), 0
    return "", simulation.tries + simulation.disk.checks


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)


@contextlib.contextmanager
def _stretched() -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in _STRETCHED]
    try:
        for module, name, value in _STRETCHED:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
