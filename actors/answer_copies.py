"""Answers to queries that are compared, on their way from whoever gave them to where that is done.

Theory of operation. A query's caller has its answer first. All that is done then is to add it to a
list: a query that does nothing takes half a millisecond, and may not wait for a message that is no
part of it. The list is sent when :data:`GATHER_S` have passed and no query runs, so that none has
to wait for that either; where there always is one, after :data:`WAIT_S`. What is sent at once is so
little that whoever comes meanwhile hardly waits.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from understudy.actors.loop import Loop
from understudy.actors.messages import (
    Address,
    Answer,
    Assignment,
    CompareAnswers,
    CompareAt,
    ComparedAnswer,
    FailedAnswer,
    HttpAnswer,
    ValueAnswer,
)
from understudy.core.comparing import MAX_BODY_BYTES

GATHER_S = 0.1
WAIT_S = 1.0
LOOK_AGAIN_S = 0.01
AT_ONCE = 32  # answers
MAX_PLACES = 1_000  # that are known without unpickling them again
MAX_GATHERED_BYTES = 8 * 1024 * 1024  # of answers that wait to be sent
TOO_LARGE = f"larger than {MAX_BODY_BYTES // 1024} KiB"
TOO_MANY = "too many at once"

_Content = tuple[int, tuple[tuple[bytes, bytes], ...], bytes, bytes, str]
_Place = tuple[str, Address]  # an incarnation and its address


class _Kept(NamedTuple):
    proxy: str
    compare: tuple[CompareAt, ...]
    endpoint: str
    request_id: str
    answer: Answer | None
    missing: str
    size: int


class AnswerCopies:
    """What one replica has to send; all on user code's loop.

    ``is_busy`` tells whether queries run; ``send_here`` gets what this replica itself compares.
    """

    def __init__(
        self,
        loop: Loop,
        incarnation: str,
        backend: str,
        is_busy: Callable[[], bool],
        send_here: Callable[[CompareAnswers, Address], None],
    ) -> None:
        self._loop = loop
        self._incarnation = incarnation
        self._backend = backend
        self._is_busy = is_busy
        self._send_here = send_here
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._latest_at: float | None = None  # None while nothing is kept
        self._places: dict[bytes, _Place] = {}

    def add(self, proxy: str, run: Assignment, answer: Answer | None) -> None:
        """Keep the answer to a query that is compared; None where it was cancelled."""
        size, missing = _size(answer), ""
        if size > MAX_BODY_BYTES:
            answer, size, missing = _without(answer), 0, TOO_LARGE
        elif self._bytes + size > MAX_GATHERED_BYTES:
            answer, size, missing = _without(answer), 0, TOO_MANY
        self._bytes += size
        request_id = run.query.request_id
        kept = _Kept(proxy, run.compare, run.endpoint, request_id, answer, missing, size)
        self._kept.append(kept)
        if self._latest_at is None:
            self._latest_at = time.monotonic() + WAIT_S
            self._loop.call_later(GATHER_S, self._send_some)

    def _send_some(self) -> None:
        """Send a few while no query runs, or it is time."""
        is_late = self._latest_at is not None and time.monotonic() >= self._latest_at
        if self._is_busy() and not is_late:
            self._loop.call_later(LOOK_AGAIN_S, self._send_some)
            return
        by_place: dict[bytes, list[ComparedAnswer]] = {}
        for _ in range(min(len(self._kept), AT_ONCE)):
            kept = self._kept.popleft()
            self._bytes -= kept.size
            for number, place, settings in kept.compare:
                row = self._row(kept, number, settings)
                by_place.setdefault(place, []).append(row)
        for place, rows in by_place.items():
            self._send(self._unpacked(place), rows)
        if self._kept:
            self._loop.call_later(0, self._send_some)
        else:
            self._latest_at = None

    def _row(self, kept: _Kept, number: int, settings: bytes) -> ComparedAnswer:
        status, headers, body, value, missing = _content_of(kept.answer)
        return ComparedAnswer(
            kept.proxy,
            number,
            settings,
            kept.endpoint,
            self._backend,
            kept.request_id,
            status,
            headers,
            body,
            value,
            kept.missing or missing,
        )

    def _send(self, place: _Place, rows: list[ComparedAnswer]) -> None:
        incarnation, address = place
        # As plain tuples: the name of a class with each would double the time to pickle them.
        message = CompareAnswers(incarnation=incarnation, answers=tuple(map(tuple, rows)))
        if incarnation == self._incarnation:
            self._send_here(message, address)
        else:
            self._loop.send(address, message)

    def _unpacked(self, packed: bytes) -> _Place:
        place = self._places.get(packed)
        if place is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            place = self._places[packed] = pickle.loads(packed)
        return place


def _size(answer: Answer | None) -> int:
    if isinstance(answer, HttpAnswer):
        return len(answer.body)
    return len(answer.value) if isinstance(answer, ValueAnswer) else 0


def _without(answer: Answer | None) -> Answer | None:
    """Return an answer with nothing but its status."""
    if isinstance(answer, HttpAnswer):
        return answer._replace(headers=(), body=b"")
    return answer._replace(value=b"") if isinstance(answer, ValueAnswer) else answer


def _content_of(answer: Answer | None) -> _Content:
    if isinstance(answer, HttpAnswer):
        return answer.status, answer.headers, answer.body, b"", ""
    if isinstance(answer, ValueAnswer):
        return 200, (), b"", answer.value, ""
    if isinstance(answer, FailedAnswer):
        return 500, (), b"", b"", f"failed with {answer.kind}"
    if answer is None:
        return 0, (), b"", b"", "no answer"
    return answer.status, (), b"", b"", "came in parts"
