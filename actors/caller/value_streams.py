"""The caller's end of a stream of values, the answer to a handle's call with ``stream=True``.

Theory of operation. Parts arrive on the caller's loop and are put together to values there; whoever
iterates takes them, on any thread or event loop, and unpickles them. What was taken is told to the
replica when it is half of the window, so few messages go back; the replica sends at most a window
ahead. A value larger than the window is gathered here, one at a time: more of it is asked for only
when no other waits to be taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from greenroom.actors.messages.queries import MORE, Answer, FailedAnswer, StreamPart
from greenroom.actors.runtime.streams import WINDOW, Source, cost

Callback = Callable[[], None]


class _Value(NamedTuple):
    pickled: bytes
    cost: int  # of its parts, as far as the replica has not been told of them


class ValueStream:
    """Values that arrive. ``on_loop`` runs a callback on the loop that ``source`` belongs to.

    :meth:`arrived` and :meth:`ended` are called there, everything else on any thread.
    """

    def __init__(self, source: Source, on_loop: Callable[[Callback], None]) -> None:
        self._source = source
        self._on_loop = on_loop
        # Reentrant: closing may be left to the garbage collector, which runs anywhere.
        self._lock = threading.RLock()
        self._values: deque[_Value] = deque()
        self._gathered: list[bytes] = []  # of the value that is not complete
        self._gathered_cost = 0
        self._untold = 0  # taken, and the replica does not know
        self._end: Answer | None = None
        self._wake: Callback | None = None
        self._on_over: list[Callback] = []

    @property
    def end(self) -> Answer | None:
        """What ended it, when no value is left; None before."""
        return None if self._values else self._end

    def next(self, wake: Callback) -> bytes | None:
        """Return the next value; None when there is none: look whether this is the :attr:`end`.

        If it is not, ``wake`` is called when there is a value or the end; nobody knows on what
        thread.
        """
        with self._lock:
            if not self._values:
                self._wake = wake
                return None
            value = self._values.popleft()
            self._untold += value.cost
            if not self._values:
                self._take_gathered()
        self._tell()
        return value.pickled

    def close(self) -> None:
        """Want no more of it; harmless when it is over."""
        with self._lock:
            if self._end is not None:
                return
            self._values.clear()
            self._on_loop(self._source.stop)
        self.ended(FailedAnswer(0, "RequestCancelledError", "it was cancelled"))

    def when_over(self, callback: Callback) -> None:
        """Call when it has ended or was closed, or now."""
        with self._lock:
            if self._end is None:
                self._on_over.append(callback)
                return
        callback()

    def arrived(self, part: StreamPart) -> None:
        """Take the next part; a part has bytes of one value only."""
        with self._lock:
            if self._end is not None:
                return
            self._gather(part)
            wake = self._take_wake() if self._values else None
        self._tell()
        if wake is not None:
            wake()

    def ended(self, end: Answer) -> None:
        """Take the end."""
        with self._lock:
            if self._end is not None:
                return
            self._end = end
            self._gathered.clear()
            wake = self._take_wake()
            over, self._on_over = self._on_over, []
        for callback in over if wake is None else (*over, wake):
            callback()

    def _gather(self, part: StreamPart) -> None:
        self._gathered.append(part.data)
        self._gathered_cost += cost(part)
        if part.ends != MORE:
            pickled = part.data if len(self._gathered) == 1 else b"".join(self._gathered)
            self._values.append(_Value(pickled, self._gathered_cost))
            self._gathered, self._gathered_cost = [], 0
        elif not self._values:
            self._take_gathered()

    def _take_gathered(self) -> None:
        """Have the replica send the rest of a value: whoever iterates waits for it."""
        self._untold += self._gathered_cost
        self._gathered_cost = 0

    def _take_wake(self) -> Callback | None:
        wake, self._wake = self._wake, None
        return wake

    def _tell(self) -> None:
        with self._lock:
            if self._untold < WINDOW // 2 or self._end is not None:
                return
            told, self._untold = self._untold, 0
        self._on_loop(lambda: self._source.taken(told))
