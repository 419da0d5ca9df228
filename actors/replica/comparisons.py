"""Answers that are compared: kept and sent by each replica, compared in a replica of the shadow.

Theory of operation. The router names, for each mirrored query, a replica of the shadow at which
both answers are to meet. A query's caller has its answer first. Then a :class:`ResponseSampler`
keeps the answer, mostly until its router names the place; what has a place is sent when no query
runs, ``GATHER_S`` later at the earliest, or else after ``WAIT_S``. At that place
:class:`Comparisons` compares the two on a thread of its own, where a user's function may take its
time.

Everything is bounded: answers that are too large, that come too many at once or never meet their
counterpart count as not compared. Messages are not repeated; a lost one is an answer that never
came.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import cloudpickle

from greenroom.actors.messages.queries import (
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
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.port import Port
from greenroom.core.comparing.comparing import (
    MAX_BODY_BYTES,
    SAME,
    Compare,
    Differences,
    Function,
    Outcome,
    Place,
    Plain,
    Response,
    compare,
)
from greenroom.core.formats import fit

logger = logging.getLogger(__name__)

GATHER_S = 0.1
WAIT_S = 1.0
RETRY_S = 0.01
UNPLACED_S = 5.0
AT_ONCE = 32  # answers
MAX_KNOWN_PLACES = 1_000
MAX_GATHERED_BYTES = 8 * 1024 * 1024  # of answers that wait to be sent
TOO_LARGE = f"larger than {MAX_BODY_BYTES // 1024} KiB"
TOO_MANY = "too many at once"

MEET_S = 120.0  # how long one answer waits for the other
REPORT_S = 2.0
MAX_HELD_BYTES = 32 * 1024 * 1024  # of answers that wait for the other one
MAX_HELD = 10_000
MAX_PAIRS = 1_000  # that wait to be compared
MAX_PLACES = 20  # endpoints and settings that are counted apart

_Key = tuple[str, int]  # the proxy's incarnation, and its ticket


class ResponseSampler:
    """The answers that one replica has to send; all on user code's loop.

    ``is_busy`` returns whether queries run; ``here`` gets what this replica itself compares.
    """

    def __init__(
        self,
        loop: Loop,
        incarnation: str,
        backend: str,
        is_busy: Callable[[], bool],
        here: Comparisons,
    ) -> None:
        self._loop = loop
        self._incarnation = incarnation
        self._backend = backend
        self._is_busy = is_busy
        self.here = here
        self._unplaced: dict[_Key, tuple[ComparedAnswer, float]] = {}  # no place yet; since when
        self._places_of: dict[_Key, tuple[CompareAt, ...]] = {}  # of queries that still run
        self._kept: deque[tuple[tuple[CompareAt, ...], ComparedAnswer]] = deque()
        self._bytes = 0  # of all that is kept
        self._forget_due = False
        self._latest_at: float | None = None  # None while nothing is kept
        self._places: dict[bytes, tuple[str, Address]] = {}  # incarnation and address

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is kept, and no place is known of what is to come."""
        return not (self._bytes or self._kept or self._unplaced or self._places_of)

    def add(self, proxy: str, run: Assignment, answer: Answer | None) -> None:
        """Keep the answer to a query that is compared; None where it was cancelled."""
        kept = self._described(proxy, run, answer)
        self._bytes += _size(kept)
        key = (proxy, run.ticket)
        places = run.compare if run.compare is not None else self._places_of.pop(key, None)
        if places is not None:
            self._keep(places, kept)
            return
        self._unplaced[key] = kept, time.monotonic()
        if not self._forget_due:
            self._forget_due = True
            self._loop.call_later(UNPLACED_S, self._forget)

    def meet(self, key: _Key, places: tuple[CompareAt, ...], *, has_answer: bool) -> None:
        """Learn where the answer of a ticket is to be compared, whether or not it is here yet."""
        unplaced = self._unplaced.pop(key, None)
        if unplaced is not None:
            self._keep(places, unplaced[0])
        elif not has_answer:
            self._places_of[key] = places

    def forget(self, key: _Key) -> None:
        """Expect no answer: another replica is to run the query."""
        self._places_of.pop(key, None)

    def _described(self, proxy: str, run: Assignment, answer: Answer | None) -> ComparedAnswer:
        """Return the answer without number and settings, which each of its places has."""
        headers: tuple[tuple[bytes, bytes], ...] = ()
        status, body, value, missing = 0, b"", b"", "no answer"
        if isinstance(answer, HttpAnswer):
            status, headers, body, missing = answer.status, answer.headers, bytes(answer.body), ""
        elif isinstance(answer, ValueAnswer):
            status, value, missing = 200, answer.value, ""
        elif isinstance(answer, FailedAnswer):
            status, missing = 500, f"failed with {answer.kind}"
        elif answer is not None:
            status, missing = answer.status, "came in parts"
        size = len(body) + len(value)
        if size > MAX_BODY_BYTES or self._bytes + size > MAX_GATHERED_BYTES:
            missing = TOO_LARGE if size > MAX_BODY_BYTES else TOO_MANY
            headers, body, value = (), b"", b""
        request_id = run.query.request_id
        return ComparedAnswer(
            *(proxy, 0, b"", run.endpoint, self._backend, request_id),
            *(status, headers, body, value, missing),
        )

    def _keep(self, places: tuple[CompareAt, ...], kept: ComparedAnswer) -> None:
        if not places:
            self._bytes -= _size(kept)
            return
        self._kept.append((places, kept))
        if self._latest_at is None:
            self._latest_at = time.monotonic() + WAIT_S
            self._loop.call_later(GATHER_S, self._send_some)

    def _forget(self) -> None:
        """Drop answers whose routers have named no place: they are dead."""
        self._forget_due = False
        before = time.monotonic() - UNPLACED_S
        while self._unplaced:
            key, (kept, at) = next(iter(self._unplaced.items()))
            if at > before:
                self._forget_due = True
                self._loop.call_later(UNPLACED_S, self._forget)
                return
            del self._unplaced[key]
            self._bytes -= _size(kept)

    def _send_some(self) -> None:
        """Send a few while no query runs, or when it is time."""
        is_late = self._latest_at is not None and time.monotonic() >= self._latest_at
        if self._is_busy() and not is_late:
            self._loop.call_later(RETRY_S, self._send_some)
            return
        by_place: dict[bytes, list[tuple[Any, ...]]] = {}
        for _ in range(min(len(self._kept), AT_ONCE)):
            places, kept = self._kept.popleft()
            self._bytes -= _size(kept)
            for number, place, settings in places:
                # A plain tuple: the name of a class with each would double the time to pickle them.
                row = tuple(kept._replace(number=number, settings=settings))
                by_place.setdefault(place, []).append(row)
        for packed, rows in by_place.items():
            incarnation, address = self._place(packed)
            message = CompareAnswers(incarnation=incarnation, answers=tuple(rows))
            if incarnation == self._incarnation:
                self.here.arrived(message, address)
            else:
                self._loop.send(address, message)
        if self._kept:
            self._loop.call_later(0, self._send_some)
        else:
            self._latest_at = None

    def _place(self, packed: bytes) -> tuple[str, Address]:
        place = self._places.get(packed)
        if place is None:
            if len(self._places) >= MAX_KNOWN_PLACES:
                self._places.clear()
            place = self._places[packed] = pickle.loads(packed)
        return place


class _Pair(NamedTuple):
    primary: ComparedAnswer | None
    shadow: ComparedAnswer


class Comparisons:
    """The comparisons made in one replica; all on user code's loop, but for the thread.

    ``on_found`` gets all that was found, whenever there is more, every :data:`REPORT_S`.
    """

    def __init__(self, port: Port, on_found: Callable[[dict[Place, Plain]], None]) -> None:
        self._port = port
        self._loop = port.loop
        self._on_found = on_found
        self._held: OrderedDict[_Key, tuple[ComparedAnswer, float]] = OrderedDict()  # until when
        self._held_bytes = 0
        self._pairs = 0  # on the thread, or on their way there
        self._thread: ThreadPoolExecutor | None = None
        self._known: dict[bytes, tuple[Compare, Function | None]] = {}  # the thread's
        self._found: dict[Place, Differences] = {}
        self._report_due = False
        self._check_due = False
        port.on(CompareAnswers, self.arrived)

    def report(self) -> None:
        """Tell all that was found."""
        self._report_due = False
        if self._found:
            self._on_found({place: each.plain() for place, each in self._found.items()})

    def arrived(self, message: CompareAnswers, _sender: Address) -> None:
        """Compare answers whose counterpart is here, and hold the rest."""
        if message.incarnation != self._port.process.incarnation:
            return  # meant for a dead process whose address this one has
        pairs = []
        for answer in (fit(ComparedAnswer, each) for each in message.answers):
            key = (answer.proxy, answer.number)
            other, _ = self._held.pop(key, (None, 0.0))
            if other is None or _is_shadow(other) == _is_shadow(answer):
                self._hold(key, answer)
                continue
            self._held_bytes -= _size(other)
            pairs.append(_Pair(answer, other) if _is_shadow(other) else _Pair(other, answer))
        room = max(MAX_PAIRS - self._pairs, 0)
        for pair in pairs[room:]:
            self._count(pair, Outcome(TOO_MANY, comparable=False))
        if pairs[:room]:
            self._compare(pairs[:room])

    def _hold(self, key: _Key, answer: ComparedAnswer) -> None:
        self._held[key] = answer, time.monotonic() + MEET_S
        self._held_bytes += _size(answer)
        while len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
            self._let_go(Outcome("one side's answer came too late", comparable=False))
        self._check_later()

    def _check_later(self) -> None:
        if self._held and not self._check_due:
            self._check_due = True
            self._loop.call_later(MEET_S / 10, self._check)

    def _check(self) -> None:
        self._check_due = False
        while self._held and next(iter(self._held.values()))[1] <= time.monotonic():
            self._let_go(Outcome("one side gave no answer", comparable=False))
        self._check_later()

    def _let_go(self, outcome: Outcome) -> None:
        _, (answer, _) = self._held.popitem(last=False)
        self._held_bytes -= _size(answer)
        if _is_shadow(answer):  # only its settings say where to count it
            self._count(_Pair(None, answer), outcome)

    def _compare(self, pairs: list[_Pair]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "compare", _lower_priority)
        self._pairs += len(pairs)
        self._thread.submit(self._compare_on_thread, pairs)

    def _compare_on_thread(self, pairs: list[_Pair]) -> None:
        self._loop.post(partial(self._compared, [(pair, self._outcome(pair)) for pair in pairs]))

    def _compared(self, outcomes: list[tuple[_Pair, Outcome]]) -> None:
        self._pairs -= len(outcomes)
        for pair, outcome in outcomes:
            self._count(pair, outcome)

    def _outcome(self, pair: _Pair) -> Outcome:
        primary, shadow = pair
        if primary is None:
            return Outcome("one side gave no answer", comparable=False)
        try:
            settings, function = self._settings(shadow.settings)
            if settings.how != "function" and _is_alike(primary, shadow):
                return SAME  # without reading what is in it
            return compare(settings, _response(primary), _response(shadow), function)
        except BaseException as error:  # of a user's function, or of values that it cannot unpickle
            logger.info("an answer could not be compared", exc_info=error)
            problem = f"comparing raised {type(error).__name__}"
            return Outcome(problem, str(error)[:200], comparable=False)

    def _settings(self, packed: bytes) -> tuple[Compare, Function | None]:
        if packed not in self._known:
            if len(self._known) >= MAX_PLACES:
                self._known.clear()
            settings = Compare.read(pickle.loads(packed)[1])
            self._known[packed] = settings, None  # so that loading the function is tried once
            if settings.code:
                self._known[packed] = settings, cloudpickle.loads(settings.code)[0]
        return self._known[packed]

    def _count(self, pair: _Pair, outcome: Outcome) -> None:
        shadow = pair.shadow
        place = (shadow.endpoint, shadow.backend, _settings_id(shadow.settings))
        if place not in self._found and len(self._found) >= MAX_PLACES:
            del self._found[next(iter(self._found))]
        found = self._found.setdefault(place, Differences())
        found.count(outcome, _example(pair, outcome) if outcome.cause else {})
        if not self._report_due:
            self._report_due = True
            self._loop.call_later(REPORT_S, self.report)


@lru_cache(maxsize=MAX_PLACES)
def _settings_id(packed: bytes) -> str:
    return str(pickle.loads(packed)[0])


def _is_shadow(answer: ComparedAnswer) -> bool:
    return bool(answer.settings)


def _is_alike(primary: ComparedAnswer, shadow: ComparedAnswer) -> bool:
    return not (primary.missing or shadow.missing) and (
        (primary.status, primary.body, primary.value) == (shadow.status, shadow.body, shadow.value)
    )


def _lower_priority() -> None:
    """Give this thread the lowest priority: the host's other work comes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _size(answer: ComparedAnswer) -> int:
    return len(answer.body) + len(answer.value)


def _response(answer: ComparedAnswer) -> Response:
    headers = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers
    )
    value = pickle.loads(answer.value) if answer.value else None
    return Response(answer.status, headers, answer.body, value, answer.missing)


def _example(pair: _Pair, outcome: Outcome) -> Plain:
    return {
        "at": time.time(),
        "request_id": pair.shadow.request_id,
        "detail": outcome.detail,
        "primary": None if pair.primary is None else _side(pair.primary),
        "shadow": _side(pair.shadow),
    }


def _side(answer: ComparedAnswer) -> Plain:
    return Response(answer.status, body=answer.body, missing=answer.missing).shown
