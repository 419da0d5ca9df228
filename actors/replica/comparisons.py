"""The comparison of shadows' answers with the primary's, in a replica of the shadow.

Theory of operation. The router names for each copy a replica of the shadow at which both answers
are to meet. Whoever has one, the primary's replica or the shadow's, sends it there some time after
its caller has had it (answer_copies.py). They are compared on a thread of their own, where a user's
function may take its time. Nothing of this is in a proxy.

Everything is bounded: answers that are too large, come too many at once or never meet their
counterpart are counted as not compared. Messages are not repeated; an answer that is lost is one
that never came.
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
from functools import partial
from typing import NamedTuple

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
    size_of,
)
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.port import Port
from greenroom.core.comparing.comparing import (
    MAX_BODY_BYTES,
    SAME,
    Compare,
    Function,
    Outcome,
    Response,
    compare,
)
from greenroom.core.comparing.differences import Differences, Place, Plain

# Answers to queries that are compared, on their way from whoever gave them to where that is done.
#
# Theory of operation. A query's caller has its answer first. All that is done then is to keep it:
# a query that does nothing takes a tenth of a millisecond here, and may not wait for what is no
# part of it. Where it is to be compared its router mostly tells some ms later, with the places of
# others. What has a place is sent when :data:`GATHER_S` have passed and no query runs, so that
# none has to wait for that either; where there always is one, after :data:`WAIT_S`. What is sent
# at once is so little that whoever comes meanwhile hardly waits.

GATHER_S = 0.1
WAIT_S = 1.0
LOOK_AGAIN_S = 0.01
UNTOLD_S = 5.0
AT_ONCE = 32  # answers
MAX_KNOWN_PLACES = 1_000  # that are known without unpickling them again
MAX_GATHERED_BYTES = 8 * 1024 * 1024  # of answers that wait to be sent
TOO_LARGE = f"larger than {MAX_BODY_BYTES // 1024} KiB"
TOO_MANY = "too many at once"

_Content = tuple[int, tuple[tuple[bytes, bytes], ...], bytes, bytes, str]
_Place = tuple[str, Address]  # an incarnation and its address


_Key = tuple[str, int]  # the proxy's incarnation, and its ticket


# Of an answer: the proxy's incarnation, endpoint, request id, answer, what is missing, size, time.
# No class, which would take as long to make as all the rest of what is done at once.
_Kept = tuple[str, str, str, Answer | None, str, int, float]


class ResponseSampler:
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
            if len(self._places) >= MAX_KNOWN_PLACES:
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


logger = logging.getLogger(__name__)

MEET_S = 120.0  # how long one answer waits for the other
REPORT_S = 2.0
MAX_HELD_BYTES = 32 * 1024 * 1024  # of answers that wait for the other one
MAX_HELD = 10_000
MAX_PAIRS = 1_000  # that wait to be compared
MAX_PLACES = 20  # endpoints and settings that are counted apart
MAX_SHOWN_BYTES = 512  # of a body in an example

_Found = Callable[[dict[Place, Plain]], None]


class _Held(NamedTuple):
    answer: ComparedAnswer
    until: float


class _Pair(NamedTuple):
    primary: ComparedAnswer | None
    shadow: ComparedAnswer


class Comparisons:
    """What a replica has to do with comparisons; all on user code's loop, but for the thread.

    ``on_found`` gets all that was found, whenever there is more, every :data:`REPORT_S`.
    """

    def __init__(self, port: Port, on_found: _Found) -> None:
        self._port = port
        self._loop = port.loop
        self._on_found = on_found
        self._held: OrderedDict[tuple[str, int], _Held] = OrderedDict()
        self._held_bytes = 0
        self._pairs = 0  # on the thread, or on their way there
        self._thread: ThreadPoolExecutor | None = None
        self._known: dict[bytes, tuple[Compare, Function | None]] = {}  # the thread's
        self._ids: dict[bytes, str] = {}  # of settings
        self._found: dict[Place, Differences] = {}
        self._report_due = False
        self._look_due = False
        port.on(CompareAnswers, self.arrived)

    def report(self) -> None:
        """Tell all that was found."""
        self._report_due = False
        if self._found:
            self._on_found({place: each.plain() for place, each in self._found.items()})

    def arrived(self, message: CompareAnswers, _sender: Address) -> None:
        """Compare what has its counterpart, keep the rest until that comes."""
        if message.incarnation != self._port.process.incarnation:
            return  # meant for a dead process whose address this one has
        pairs = []
        for answer in map(ComparedAnswer._make, message.answers):
            key = (answer.proxy, answer.number)
            held = self._held.pop(key, None)
            if held is None or _is_shadow(held.answer) == _is_shadow(answer):
                self._hold(key, answer)
                continue
            self._held_bytes -= _size(held.answer)
            first, second = held.answer, answer
            pairs.append(_Pair(second, first) if _is_shadow(first) else _Pair(first, second))
        room = max(MAX_PAIRS - self._pairs, 0)
        for pair in pairs[room:]:
            self._count(pair, Outcome(TOO_MANY, comparable=False))
        self._compare(pairs[:room])

    def _hold(self, key: tuple[str, int], answer: ComparedAnswer) -> None:
        self._held[key] = _Held(answer, time.monotonic() + MEET_S)
        self._held_bytes += _size(answer)
        while len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
            self._let_go(Outcome("one side's answer came too late", comparable=False))
        self._look_later()

    def _look_later(self) -> None:
        if self._held and not self._look_due:
            self._look_due = True
            self._loop.call_later(MEET_S / 10, self._look)

    def _look(self) -> None:
        self._look_due = False
        while self._held and next(iter(self._held.values())).until <= time.monotonic():
            self._let_go(Outcome("one side gave no answer", comparable=False))
        self._look_later()

    def _let_go(self, outcome: Outcome) -> None:
        _, held = self._held.popitem(last=False)
        self._held_bytes -= _size(held.answer)
        if _is_shadow(held.answer):  # of a primary's nobody knows by what it was to be compared
            self._count(_Pair(None, held.answer), outcome)

    def _compare(self, pairs: list[_Pair]) -> None:
        if not pairs:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "compare", _give_way)
        self._pairs += len(pairs)
        self._thread.submit(self._compare_on_thread, pairs)

    def _compare_on_thread(self, pairs: list[_Pair]) -> None:
        self._loop.post(partial(self._compared, [(pair, self._outcome(pair)) for pair in pairs]))

    def _compared(self, outcomes: list[tuple[_Pair, Outcome]]) -> None:
        self._pairs -= len(outcomes)
        for pair, outcome in outcomes:
            self._count(pair, outcome)

    def _outcome(self, pair: _Pair) -> Outcome:
        primary = pair.primary
        if primary is None:
            return Outcome("one side gave no answer", comparable=False)
        try:
            settings, function = self._settings(pair.shadow.settings)
            if settings.how != "function" and _is_alike(primary, pair.shadow):
                return SAME  # without reading what is in it
            return compare(settings, _response(primary), _response(pair.shadow), function)
        except BaseException as error:  # of a user's function, or of values that it cannot unpickle
            logger.info("an answer could not be compared", exc_info=error)
            told = f"comparing raised {type(error).__name__}"
            return Outcome(told, str(error)[:200], comparable=False)

    def _settings(self, packed: bytes) -> tuple[Compare, Function | None]:
        if packed not in self._known:
            if len(self._known) >= MAX_PLACES:
                self._known.clear()
            settings = Compare(**pickle.loads(packed)[1])
            self._known[packed] = settings, None  # so that loading it is tried once
            if settings.code:
                self._known[packed] = settings, cloudpickle.loads(settings.code)[0]
        return self._known[packed]

    def _count(self, pair: _Pair, outcome: Outcome) -> None:
        shadow = pair.shadow
        packed = shadow.settings
        if packed not in self._ids:
            if len(self._ids) >= MAX_PLACES:
                self._ids.clear()
            self._ids[packed] = pickle.loads(packed)[0]
        place = (shadow.endpoint, shadow.backend, self._ids[packed])
        if place not in self._found and len(self._found) >= MAX_PLACES:
            del self._found[next(iter(self._found))]
        found = self._found.setdefault(place, Differences())
        found.count(outcome, _example(pair, outcome) if outcome.cause else {})
        if not self._report_due:
            self._report_due = True
            self._loop.call_later(REPORT_S, self.report)


def _is_shadow(answer: ComparedAnswer) -> bool:
    return bool(answer.settings)


def _is_alike(primary: ComparedAnswer, shadow: ComparedAnswer) -> bool:
    return (primary.status, primary.body, primary.value, primary.missing, shadow.missing) == (
        shadow.status,
        shadow.body,
        shadow.value,
        "",
        "",
    )


def _give_way() -> None:
    """Have this thread run where nobody else wants to: the host's other work comes first."""
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
    primary = None if pair.primary is None else _side(pair.primary)
    return {
        "at": time.time(),
        "request_id": pair.shadow.request_id,
        "detail": outcome.detail,
        "primary": primary,
        "shadow": _side(pair.shadow),
    }


def _side(answer: ComparedAnswer) -> Plain:
    body = answer.body[:MAX_SHOWN_BYTES].decode("utf-8", "replace")
    return {"status": answer.status, "body": body, "missing": answer.missing}
