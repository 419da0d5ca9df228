"""Bounds on those who connect and have not yet shown who they are; and on what is said of them.

All are values without I/O: whoever uses them owns the clock and the log.

When there are too many, the *oldest* of the busiest source is turned away. Refusing the newest
instead would let a few hundred idle connections keep every peer out for as long as somebody renews
them; an honest handshake is over in milliseconds, so the oldest are not honest. And who opens many
pushes out his own first.
"""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_STRANGERS = 256  # descriptors; a process may have 1024 as a rule
PATIENCE_S = 5.0  # from the connection to the proof

WINDOW_S = 60.0
MAX_LINES = 50  # per window: a line is about 150 bytes, so at most 11 MB a day
MAX_SOURCE_LINES = 10

S = TypeVar("S")


class Strangers(Generic[S]):
    """The connections that are not authenticated, each hashable, and when each came."""

    def __init__(self, limit: int = MAX_STRANGERS, patience_s: float = PATIENCE_S) -> None:
        self.limit, self.patience_s = limit, patience_s
        self._sources: dict[S, str] = {}
        self._by_source: dict[str, dict[S, float]] = {}  # when they are overdue, oldest first

    def __len__(self) -> int:
        return len(self._sources)

    def came(self, stranger: S, source: str, now: float) -> S | None:
        """Note a connection from ``source``; return the one to turn away for it, if any."""
        oldest = None
        if len(self._sources) >= self.limit:
            busiest = max(self._by_source.values(), key=len)
            oldest = next(iter(busiest))
            self.left(oldest)
        self._sources[stranger] = source
        self._by_source.setdefault(source, {})[stranger] = now + self.patience_s
        return oldest

    def left(self, stranger: S) -> bool:
        """Note that one is authenticated or gone; return whether it was a stranger until then."""
        source = self._sources.pop(stranger, None)
        if source is None:
            return False
        same = self._by_source[source]
        del same[stranger]
        if not same:
            del self._by_source[source]
        return True

    def overdue(self, now: float) -> list[S]:
        """Return those that have had their time; they stay until they have ``left``."""
        return [
            stranger
            for same in self._by_source.values()
            for stranger, overdue_at in same.items()
            if overdue_at <= now
        ]


class Allowance:
    """How many connections may be taken: ``most`` at once, ``per_s`` in the long run."""

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left = float(most)
        self._at = 0.0

    def take(self, count: int, now: float) -> float:
        """Count so many that were taken; return how long to rest, 0 where more may be taken."""
        self._left = min(self._left + (now - self._at) * self._per_s, self._most) - count
        self._at = now
        return max(-self._left / self._per_s, 0.0)


class Refusals:
    """Decides which refusals are worth a line: each kind once per source and window."""

    def __init__(self) -> None:
        self._ends_at = 0.0
        self._lines = 0
        self._said: dict[str, set[str]] = {}
        self._unsaid = 0

    def say(self, source: str, reason: str, now: float) -> bool:
        """Return whether to log that ``source`` (a host) was refused for ``reason``."""
        if now >= self._ends_at:
            self._ends_at = now + WINDOW_S
            self._lines = 0
            self._said.clear()
        said = self._said.get(source, set())
        if reason in said or len(said) >= MAX_SOURCE_LINES or self._lines >= MAX_LINES:
            self._unsaid += 1
            return False
        self._said.setdefault(source, said).add(reason)
        self._lines += 1
        return True

    def unsaid(self, now: float) -> int:
        """Return, once per window, how many refusals were not said in it."""
        if now < self._ends_at or not self._unsaid:
            return 0
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid
