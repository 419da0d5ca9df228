"""Which items make a batch, and when it may begin.

Theory of operation. Items wait in *lines*, one per group, because only items of one group may share
a batch. The *head* of a line is its longest beginning that fits ``max_size``; it is *full* when it
has that size, or when the next item does not fit. A head is due when it is full, or once its first
item has waited for ``wait_s``. Of each group at most ``max_batches`` run; of the groups that may
begin, the due head whose first item came first is the next batch. So items of a group begin in the
order in which they came, and none waits for longer than ``wait_s`` while a batch may begin.

``size_of`` is a function of the user's that returns the size of a list of items; without it, each
item counts one. It is called with each head that an item may join. An item that has no size, or is
too large alone, is refused once it is the first.

In a continuous batch, a stream *waits* until there is a place, then it is *live* until it is
removed: finished, failed, left by its caller, or past its deadline. Places are given in the order
in which streams came, and only between steps. At most ``max_waiting`` wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from typing import Generic, TypeVar

from greenroom.core.errors import InvalidRequestError

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Line(Generic[T]):
    items: dict[T, float] = field(default_factory=dict)  # with when each came, in that order
    fitting: int = 0  # how many are its head
    is_full: bool = False

    @property
    def first_at(self) -> float:
        return next(iter(self.items.values()))

    def head(self) -> list[T]:
        return list(islice(self.items, self.fitting))


class Batches(Generic[T]):
    """The waiting items, and the number of running batches. ``now`` never goes back.

    ``refused`` collects items that can be in no batch, with the reason; the caller empties it.
    """

    def __init__(
        self,
        max_size: float,
        wait_s: float,
        max_batches: int = 1,
        size_of: Callable[[list[T]], float] | None = None,
    ) -> None:
        self.refused: list[tuple[T, Exception]] = []
        self._max_size = max_size
        self._wait_s = wait_s
        self._max_batches = max_batches
        self._size_of = size_of
        self._running: dict[Hashable, int] = {}  # batches by group, of those that have any
        self._lines: dict[Hashable, _Line[T]] = {}  # none is empty

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits or runs."""
        return not (self._running or self._lines)

    def add(self, item: T, group: Hashable, now: float) -> bool:
        """Add an item that waits; return whether it was refused, or another batch may be due."""
        line = self._lines.get(group)
        is_first = line is None
        if line is None:
            line = self._lines[group] = _Line()
        was_full = line.is_full
        line.items[item] = now
        self._grow(group, line)
        return is_first or line.is_full != was_full or bool(self.refused)

    def remove(self, item: T, group: Hashable) -> None:
        """Forget an item that waits; harmless when it does not."""
        line = self._lines.get(group)
        if line is not None and line.items.pop(item, None) is not None:
            self._measure(group, line)

    def set_limits(self, max_size: float, wait_s: float) -> None:
        """Change the limits of all batches that have not begun."""
        self._max_size, self._wait_s = max_size, wait_s
        for group, line in list(self._lines.items()):
            self._measure(group, line)

    def due_at(self) -> float | None:
        """Return when :meth:`take` has a batch; None when that takes another event."""
        return min((self._line_due_at(line) for _, line in self._free_lines()), default=None)

    def take(self, now: float) -> list[T] | None:
        """Begin a batch and return its items; None when none may begin."""
        due = [each for each in self._free_lines() if self._line_due_at(each[1]) <= now]
        if not due:
            return None
        group, line = min(due, key=lambda item: item[1].first_at)
        batch = line.head()
        for item in batch:
            del line.items[item]
        self._running[group] = self._running.get(group, 0) + 1
        self._measure(group, line)
        return batch

    def ended(self, group: Hashable) -> None:
        """Note the end of a batch of this group."""
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]

    def _free_lines(self) -> Iterator[tuple[Hashable, _Line[T]]]:
        """Give the lines whose groups may begin another batch."""
        for group, line in self._lines.items():
            if self._running.get(group, 0) < self._max_batches:
                yield group, line

    def _line_due_at(self, line: _Line[T]) -> float:
        return line.first_at if line.is_full else line.first_at + self._wait_s

    def _measure(self, group: Hashable, line: _Line[T]) -> None:
        line.fitting, line.is_full = 0, False
        self._grow(group, line)

    def _grow(self, group: Hashable, line: _Line[T]) -> None:
        """Take into the head what fits."""
        if self._size_of is None:
            number = len(line.items)
            line.is_full = number >= self._max_size
            line.fitting = int(self._max_size) if line.is_full else number
        while self._size_of is not None and not line.is_full and line.fitting < len(line.items):
            head = list(islice(line.items, line.fitting + 1))
            problem: Exception | None = None
            try:
                size = self._size(head)
            except Exception as error:  # it is the user's function
                size, problem = math.inf, error
            if size > self._max_size and len(head) == 1:
                del line.items[head[0]]
                self.refused.append((head[0], problem or _too_large(size, self._max_size)))
                continue
            line.fitting += size <= self._max_size
            line.is_full = size >= self._max_size
        if not line.items:
            del self._lines[group]

    def _size(self, items: list[T]) -> float:
        size = self._size_of(items) if self._size_of is not None else len(items)
        if not isinstance(size, Real) or math.isnan(size):
            raise TypeError(f"batch_size_fn returned {size!r}, which is no number")
        return float(size)


def _too_large(size: float, max_size: float) -> Exception:
    return InvalidRequestError(
        f"an item of size {size:g} is larger than max_batch_size={max_size:g}; split it, raise "
        "max_batch_size, or look at batch_size_fn"
    )


# --- Continuous batches ---------------------------------------------------------------------------


class ContinuousBatch(Generic[T]):
    """The streams of one batch, each with its deadline. ``now`` never goes back."""

    def __init__(self, max_size: int, max_waiting: int) -> None:
        self._max_size = max_size
        self._max_waiting = max_waiting
        self._live: dict[T, float] = {}  # with their deadlines, in the order of admission
        self._waiting: dict[T, float] = {}

    @property
    def live(self) -> list[T]:
        """The streams that have a place, those that came first before the others."""
        return list(self._live)

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    def add(self, stream: T, deadline_at: float | None) -> bool:
        """Let a stream wait for a place; return False where too many do."""
        free = self._max_size - len(self._live)
        if len(self._waiting) >= self._max_waiting + free:
            return False
        self._waiting[stream] = math.inf if deadline_at is None else deadline_at
        return True

    def remove(self, stream: T) -> None:
        """Forget a stream; harmless when it is not here."""
        self._live.pop(stream, None)
        self._waiting.pop(stream, None)

    def expire(self, now: float) -> list[T]:
        """Remove and return the streams whose deadlines are past."""
        late = [s for each in (self._live, self._waiting) for s, at in each.items() if at <= now]
        for stream in late:
            self.remove(stream)
        return late

    def admit(self) -> list[T]:
        """Give free places to those that wait; return the streams that got one."""
        number = min(self._max_size - len(self._live), len(self._waiting))
        admitted = list(self._waiting)[:number]
        for stream in admitted:
            self._live[stream] = self._waiting.pop(stream)
        return admitted
