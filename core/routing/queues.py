"""The queries that wait for one backend, and how fast it gets through them.

Theory of operation. Each endpoint has a line of its own at the backend, first in, first out, and
one more for each replica that queries of its sessions wait for (sessions.py). When a replica has
room, the line whose turn it is gives its first ticket and goes to the end of the order of turns;
lines for replicas without room let it pass. So a flood of one endpoint makes only its own line
long: an endpoint that shares a backend with it gets every second turn, or as many as it has queries
for.

New lines go before standing ones, as in RFC 8290 (4.1 and 4.2): an endpoint that asks for less than
its share never waits for the turns of others, only for a replica. A line that was served keeps its
place in the order when it runs empty, until its turn has come once. Otherwise an endpoint could
stay new for ever by asking for one thing at a time, and the standing ones would starve.

The *drain rate* is how many slots become free per second while queries wait: only then does it say
what the replicas can do, and not what they are asked to. What is longer ago counts less, with the
time constant MEMORY_S. The time in which nothing waited does not count and makes nothing older.
There is no rate before the first slot became free.

How long a query takes in a replica follows each sample by a part of the difference, down faster
than up, and no sample counts as more than twice the present value: the first query, which loads
something, and one that hangs, say little about the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Iterator
from math import exp

from greenroom.core.routing.tickets import NEW, QUEUED, Ticket

_Line = OrderedDict[int, Ticket]  # by number


class FairQueue:
    """Tickets in the order in which replicas get them; ``size`` is how many there are.

    Here alone a ticket becomes queued, and is it no more.
    """

    __slots__ = ("_lines", "_new", "_standing", "size")

    def __init__(self) -> None:
        self.size = 0
        self._lines: dict[Hashable, _Line] = {}  # by Ticket.line; each is in one of the two
        self._new: OrderedDict[Hashable, _Line] = OrderedDict()  # in the order of turns
        self._standing: OrderedDict[Hashable, _Line] = OrderedDict()

    def add(self, ticket: Ticket, *, first: bool = False) -> None:
        """Queue a ticket after all others of its line; or before all: it had its turn already."""
        ticket.become(QUEUED)
        name = ticket.line
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = self._new[name] = OrderedDict()
        line[ticket.number] = ticket
        self.size += 1
        if first:
            line.move_to_end(ticket.number, last=False)
            self._standing.pop(name, None)
            self._new[name] = line
            self._new.move_to_end(name, last=False)

    def remove(self, ticket: Ticket, *, had_turn: bool = False) -> None:
        """Remove a ticket; if its line ``had_turn`` with it, that goes to the end of the order."""
        ticket.become(NEW)
        name = ticket.line
        line = self._lines[name]
        del line[ticket.number]
        self.size -= 1
        if had_turn:
            self._new.pop(name, None)
            self._standing.pop(name, None)
            self._standing[name] = line
        if not self.size:  # no line waits, so none is owed a turn
            self._lines.clear()
            self._new.clear()
            self._standing.clear()

    def first(self) -> Ticket | None:
        """Return the ticket whose turn it is; None when none waits."""
        while self._new:
            name, line = next(iter(self._new.items()))
            if line:
                return next(iter(line.values()))
            del self._new[name]
            self._standing[name] = line
        while self._standing:
            name, line = next(iter(self._standing.items()))
            if line:
                return next(iter(line.values()))
            del self._standing[name], self._lines[name]
        return None

    def take_all(self, endpoint: str | None = None) -> list[Ticket]:
        """Remove all tickets, or those of one endpoint; return them in the order they came."""
        return self._take([name for name in self._lines if endpoint in (None, _endpoint(name))])

    def take_homeless(self, homes: Container[str]) -> list[Ticket]:
        """Remove the tickets that wait for replicas other than these, in the order they came."""
        away = [each for each in self._lines if isinstance(each, tuple) and each[1] not in homes]
        return self._take(away)

    def _take(self, names: Iterable[Hashable]) -> list[Ticket]:
        tickets = [ticket for name in names for ticket in self._lines[name].values()]
        tickets.sort(key=lambda ticket: ticket.number)
        for ticket in tickets:
            self.remove(ticket)
        return tickets

    def heads(self) -> Iterator[Ticket]:
        """Return the first ticket of each line, in the order of turns."""
        for line in [*self._new.values(), *self._standing.values()]:
            if line:
                yield next(iter(line.values()))

    @property
    def has_homes(self) -> bool:
        """Whether there are lines that wait for certain replicas."""
        return any(isinstance(name, tuple) for name in self._lines)

    def length(self, name: Hashable) -> int:
        """Return how many tickets wait in a line."""
        line = self._lines.get(name)
        return 0 if line is None else len(line)

    def ahead(self, name: Hashable) -> int:
        """Return how many tickets have their turn before one more of this line has."""
        own = self.length(name)
        return sum(min(len(line), own) for line in self._lines.values())

    def longest_other(self, name: Hashable) -> Ticket | None:
        """Return the newest ticket of the longest line; None where that is hardly longer.

        Without the ticket it must still be longer than this line with one more.
        """
        line = max(self._lines.values(), key=len, default=None)
        if line is None or len(line) < self.length(name) + 2:
            return None
        return next(reversed(line.values()))


def _endpoint(name: Hashable) -> Hashable:
    return name[0] if isinstance(name, tuple) else name


MEMORY_S = 10.0
MAX_RETRY_AFTER_S = 60.0
# The part of its time for which a query may wait. It has the rest to run: a rate that was measured
# wrong by a half lets no query run out of time in a replica, where it costs others theirs.
WAITING_SHARE = 0.5
STEP_UP, STEP_DOWN = 0.1, 0.3


class DrainRate:
    """How fast one backend gets through its queries. ``now`` is monotonic seconds."""

    __slots__ = ("_at", "_began_at", "_freed", "_span_s", "run_s")

    def __init__(self) -> None:
        self.run_s = 0.0  # how long a query takes in a replica; 0 until one has ended
        self._freed = 0.0  # slots, and in how much time; what is longer ago counts less
        self._span_s = 0.0
        self._at = 0.0  # until when both count
        self._began_at = 0.0

    def began(self, now: float) -> None:
        """Note that a query waits where none did."""
        self._at = self._began_at = now

    def freed(self, slots: int, now: float) -> None:
        """Count slots that became free while queries waited."""
        kept, span_s = self._counted(now)
        self._freed, self._span_s, self._at = kept + slots, span_s, now

    def resized(self, ratio: float) -> None:
        """Scale the rate with the number of slots, which is ``ratio`` times what it was."""
        self._freed *= ratio

    def ran(self, seconds: float) -> None:
        """Learn how long a query took in a replica, its answer included."""
        difference = min(seconds - self.run_s, self.run_s)
        if not self.run_s:
            self.run_s = seconds
        else:
            self.run_s += difference * (STEP_UP if difference > 0 else STEP_DOWN)

    def wait_s(self, ahead: int, now: float) -> float | None:
        """Return how long it takes until ``ahead`` tickets have got a slot; None if unknown."""
        freed, span_s = self._counted(now)
        return ahead * span_s / freed if freed and span_s else None

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Return when to come back, where so many wait: when these will have got a slot.

        Where no slot was free yet, that is after as long again as it takes already, or a second.
        """
        wait_s = self.wait_s(max(ahead, 1), now)
        if wait_s is None:
            wait_s = max(now - self._began_at, 1.0)
        return min(wait_s, MAX_RETRY_AFTER_S)

    def too_slow_for(self, ahead: int, left_s: float, now: float) -> float | None:
        """Return how long a query would wait if that is too long for the time it has left."""
        wait_s = self.wait_s(ahead, now)
        return wait_s if wait_s is not None and wait_s > left_s * WAITING_SHARE else None

    def _counted(self, now: float) -> tuple[float, float]:
        since_s = now - self._at
        kept = exp(-since_s / MEMORY_S)
        return self._freed * kept, self._span_s * kept + since_s
