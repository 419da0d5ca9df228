"""Answers to queries that are compared, on their way from whoever gave them to where that is done.

Theory of operation. A query's caller has its answer first. All that is done then is to keep it: a
query that does nothing takes a tenth of a millisecond here, and may not wait for what is no part of
it. Where it is to be compared its router mostly tells some ms later, with the places of others.
What has a place is sent when :data:`GATHER_S` have passed and no query runs, so that none has
to wait for that either; where there always is one, after :data:`WAIT_S`. What is sent at once is so
little that whoever comes meanwhile hardly waits.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable

from greenroom.actors.large_bytes import size_of
from greenroom.actors.loop import Loop
from greenroom.actors.messages import (
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
from greenroom.core.comparing import MAX_BODY_BYTES

GATHER_S = 0.1
WAIT_S = 1.0
LOOK_AGAIN_S = 0.01
UNTOLD_S = 5.0
AT_ONCE = 32  # answers
MAX_PLACES = 1_000  # that are known without unpickling them again
MAX_GATHERED_BYTES = 8 * 1024 * 1024  # of answers that wait to be sent
TOO_LARGE = f"larger than {MAX_BODY_BYTES // 1024} KiB"
TOO_MANY = "too many at once"

_Content = tuple[int, tuple[tuple[bytes, bytes], ...], bytes, bytes, str]
_Place = tuple[str, Address]  # an incarnation and its address


_Key = tuple[str, int]  # the proxy's incarnation, and its ticket


# Of an answer: the proxy's incarnation, endpoint, request id, answer, what is missing, size, time.
# No class, which would take as long to make as all the rest of what is done at once.
_Kept = tuple[str, str, str, Answer | None, str, int, float]


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
        self._untold: dict[_Key, _Kept] = {}  # answers whose place is not known yet
        self._told: dict[_Key, tuple[CompareAt, ...]] = {}  # places of what runs yet
        self._kept: deque[tuple[tuple[CompareAt, ...], _Kept]] = deque()
        self._bytes = 0  # of all that is kept
        self._forget_due = False
        self._latest_at: float | None = None  # None while nothing is kept
        self._places: dict[bytes, _Place] = {}

    def add(self, proxy: str, run: Assignment, answer: Answer | None) -> None:
        """Keep the answer to a query that is compared; None where it was cancelled."""
        size, missing = size_of(answer), ""
        if size > MAX_BODY_BYTES:
            answer, size, missing = _without(answer), 0, TOO_LARGE
        elif self._bytes + size > MAX_GATHERED_BYTES:
            answer, size, missing = _without(answer), 0, TOO_MANY
        self._bytes += size
        now = time.monotonic()
        kept = (proxy, run.endpoint, run.query.request_id, answer, missing, size, now)
        key = (proxy, run.ticket)
        places = run.compare if run.compare is not None else self._told.pop(key, None)
        if places is not None:
            self._keep(places, kept)
            return
        self._untold[key] = kept
        if not self._forget_due:
            self._forget_due = True
            self._loop.call_later(UNTOLD_S, self._forget)

    def meet(self, key: _Key, places: tuple[CompareAt, ...], *, has_answer: bool) -> None:
        """Know where the answer of a ticket is to be compared, whether or not it is here yet."""
        kept = self._untold.pop(key, None)
        if kept is not None:
            self._keep(places, kept)
        elif not has_answer:
            self._told[key] = places

    def _keep(self, places: tuple[CompareAt, ...], kept: _Kept) -> None:
        if not places:
            self._bytes -= kept[5]
            return
        self._kept.append((places, kept))
        if self._latest_at is None:
            self._latest_at = time.monotonic() + WAIT_S
            self._loop.call_later(GATHER_S, self._send_some)

    def _forget(self) -> None:
        """Drop answers whose routers have not told what to do with them: they are dead."""
        self._forget_due = False
        before = time.monotonic() - UNTOLD_S
        while self._untold:
            key, kept = next(iter(self._untold.items()))
            *_, size, at = kept
            if at > before:
                self._forget_due = True
                self._loop.call_later(UNTOLD_S, self._forget)
                return
            del self._untold[key]
            self._bytes -= size

    def _send_some(self) -> None:
        """Send a few while no query runs, or it is time."""
        is_late = self._latest_at is not None and time.monotonic() >= self._latest_at
        if self._is_busy() and not is_late:
            self._loop.call_later(LOOK_AGAIN_S, self._send_some)
            return
        by_place: dict[bytes, list[ComparedAnswer]] = {}
        for _ in range(min(len(self._kept), AT_ONCE)):
            places, kept = self._kept.popleft()
            self._bytes -= kept[5]
            for number, place, settings in places:
                row = self._row(kept, number, settings)
                by_place.setdefault(place, []).append(row)
        for place, rows in by_place.items():
            self._send(self._unpacked(place), rows)
        if self._kept:
            self._loop.call_later(0, self._send_some)
        else:
            self._latest_at = None

    def _row(self, kept: _Kept, number: int, settings: bytes) -> ComparedAnswer:
        proxy, endpoint, request_id, answer, dropped, _, _ = kept
        status, headers, body, value, missing = _content_of(answer)
        return ComparedAnswer(
            proxy,
            number,
            settings,
            endpoint,
            self._backend,
            request_id,
            status,
            headers,
            body,
            value,
            dropped or missing,
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


def _without(answer: Answer | None) -> Answer | None:
    """Return an answer with nothing but its status."""
    if isinstance(answer, HttpAnswer):
        return answer._replace(headers=(), body=b"")
    return answer._replace(value=b"") if isinstance(answer, ValueAnswer) else answer


def _content_of(answer: Answer | None) -> _Content:
    if isinstance(answer, HttpAnswer):
        return answer.status, answer.headers, bytes(answer.body), b"", ""
    if isinstance(answer, ValueAnswer):
        return 200, (), b"", answer.value, ""
    if isinstance(answer, FailedAnswer):
        return 500, (), b"", b"", f"failed with {answer.kind}"
    if answer is None:
        return 0, (), b"", b"", "no answer"
    return answer.status, (), b"", b"", "came in parts"
