"""What every message is made of, and the messages of queries: callers, proxies and replicas.

The controller's messages with its proxies, replicas and hosts are in :mod:`.control`, those of
clients to the controller in :mod:`.admin`.

Requests are imperative, facts past tense, answers end in ``Reply``. Every message that crosses a
process boundary is a frozen, slotted dataclass of plain values, with a cheap ``__str__``, because
Thespian formats every message it sends for a log that is off. The messages that are sent for each
query, and the records that travel in batches, are NamedTuples, which are made and pickled fastest.

Addresses are Thespian's ActorAddress. Ports are reused, so whatever names a process carries its
``incarnation`` too: a random id made when the process started.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from greenroom.core import formats
from greenroom.core.errors import error_status
from greenroom.core.formats import fit, travels

Address = Any  # thespian.actors.ActorAddress, which ships no types
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, slotted dataclass with keyword-only fields, which travels."""
    return travels(dataclass(frozen=True, slots=True, kw_only=True)(cls))


class Message:
    """Base of all messages; gives them a cheap text."""

    __slots__ = ()

    def __str__(self) -> str:
        return type(self).__name__


@travels
class Process(NamedTuple):
    """One process of the system, recognisable even when its pid or port is used again."""

    pid: int
    start_ticks: int  # the kernel's start time of the process, in clock ticks since boot
    incarnation: str  # random, made when the process started


# --- Records that travel in batches -----------------------------------------------------------


@travels
class HttpCall(NamedTuple):
    """An HTTP request as the replica will see it; opaque to the router.

    It is pickled as a plain tuple, which takes a third of the time.
    """

    method: str
    path: str  # percent-decoded, with the route prefix
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    body: bytes
    scheme: str
    http_version: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    root_path: str
    trace: tuple[str, str, float] | None = None  # tracing.Carried, where the front traces


_HTTP_FIELDS = len(HttpCall._fields)


@travels
class PythonCall(NamedTuple):
    """A call through a handle: a method's name, and cloudpickle of (args, kwargs).

    ``inputs`` are what other calls have returned, cloudpickled, to be put where an
    :class:`Input` stands for them. With ``stream`` the answer is what a generator yields.
    """

    method: str
    arguments: bytes
    inputs: tuple[bytes, ...] = ()
    stream: bool = False
    trace: tuple[str, str, float] | None = None  # tracing.Carried, where the caller traces


@travels
class Input(NamedTuple):
    """Stands for an argument that another call returns, by its place in ``inputs``."""

    place: int


@travels
class Query(NamedTuple):
    """One call on its way. ``id`` is unique for its sender's incarnation; a repeat keeps it."""

    id: int
    endpoint: str | None  # None: the router matches ``path``
    path: str
    http_method: str  # "" for a call through a handle
    call_method: str  # method of the user's class, "" for __call__
    call: bytes | LargeBytes  # see ``packed``
    request_id: str
    timeout_s: float | None  # from now; None leaves it to the backend's setting
    retryable: bool | None  # by its caller's word; None leaves it to endpoint, deployment, method
    shard_key: str | None
    for_shadow: bool = False  # made by code that runs a copy for a shadow
    multiplexed_model_id: str = ""  # the model that user code is to use; "" for none
    follows: str = ""  # BODY or SOCKET: what its caller sends on to its replica; "" for nothing
    session_id: str = ""  # by a handle: whose calls stay at one replica

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers of an HTTP request; this reads all of it."""
        return HttpCall(*pickle.loads(content_of(self.call))).headers if self.http_method else ()


@travels
class HttpAnswer(NamedTuple):
    """A response from user code, whatever its status."""

    query_id: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes | Pieces


@travels
class ValueAnswer(NamedTuple):
    """What a PythonCall returned, cloudpickled."""

    query_id: int
    value: bytes


@travels
class FailedAnswer(NamedTuple):
    """A query that user code, the router or a death ended; ``kind`` is a class in core.errors.

    ``exception`` is the cloudpickled original where there is one and it can be pickled.
    """

    query_id: int
    kind: str
    text: str
    retry_after_s: float | None = None
    allowed: tuple[str, ...] = ()  # for MethodNotAllowedError
    exception: bytes | None = None
    traceback: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()  # that its replica gives each answer over HTTP


@travels
class StreamBegun(NamedTuple):
    """An answer that comes in parts has begun; parts follow, then one Answer ends it.

    ``status`` and ``headers`` are those of an HTTP answer.
    """

    query_id: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    process: Process  # whose death ends it


# What a part ends: nothing yet, a text or a binary message of a WebSocket (or a value, for a call
# through a handle), or the whole stream. The END of a WebSocket holds the close code, in two bytes,
# and the reason in UTF-8.
MORE, TEXT, BINARY, END = range(4)


@travels
class StreamPart(NamedTuple):
    """The next bytes of an answer that has begun, or of what follows a query."""

    query_id: int  # of what follows a query, the FeedWanted's number
    data: bytes  # LargeBytes in a message, if there are many
    ends: int = MORE
    parts: int = 1  # how many were joined to this one


@travels
class FeedWanted(NamedTuple):
    """A replica runs a query that more follows: it is to be sent to the replica itself.

    ``number`` is the replica's own for it: the same query may run twice in one replica.
    """

    query_id: int
    number: int
    process: Process


@travels
class FeedTaken(NamedTuple):
    """So much of what followed has been taken, so that more may be sent."""

    query_id: int
    number: int
    size: int


@travels
class StreamEnded(NamedTuple):
    """An answer in parts is complete; a FailedAnswer in its place says that it never will be."""

    query_id: int
    status: int


Answer = HttpAnswer | ValueAnswer | FailedAnswer | StreamEnded


@travels
class AnswerPart(NamedTuple):
    """The next bytes of the content of an answer that is too large for one message.

    ``number`` is for this answer, of all replicas: the same query may be answered twice.
    """

    query_id: int
    number: int
    content: LargeBytes


@travels
class NotRun(NamedTuple):
    """A query under a lease that was not run: the lease is closed, or see ``rejected`` below."""

    query_id: int


@travels
class MayTryAgain(NamedTuple):
    """The answer that follows is a failure, and another replica may run the query instead."""

    query_id: int
    replica: str  # the tag of the one that failed


@travels
class RunEnded(NamedTuple):
    """A query under a lease has ended without an answer, as it was cancelled: its slot is free."""

    query_id: int


@travels
class StillRuns(NamedTuple):
    """A replica runs a query whose router has died; to cancel it, ask that replica."""

    query_id: int


# What comes before the one answer.
Piece = (
    StreamBegun
    | StreamPart
    | AnswerPart
    | FeedWanted
    | FeedTaken
    | StillRuns
    | NotRun
    | MayTryAgain
    | RunEnded
)


# Where a query's answer is compared with that of a copy of it: the copy's number; the replica, as
# (incarnation, address); for the copy, the settings, as (id, fields of core.comparing.Compare), and
# b"" for the query itself. The last two are pickled once and for all, for they go with every query;
# nor is it a class, whose name would take ten times as long to pickle as all the rest.
CompareAt = tuple[int, bytes, bytes]


@travels
class ComparedAnswer(NamedTuple):
    """One side's answer, on its way to be compared; ``missing`` says why there is only a status."""

    proxy: str  # the incarnation of the proxy that has numbered it
    number: int  # the copy's
    settings: bytes  # see CompareAt
    endpoint: str
    backend: str
    request_id: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""  # of an answer over HTTP
    value: bytes = b""  # of a call through a handle, cloudpickled
    missing: str = ""


@travels
class Assignment(NamedTuple):
    """A query on its way from the router to one replica, with the address that wants the answer.

    The address is pickled once and for all: a replica reads it with the caller's first query.
    """

    ticket: int  # the router's number for this assignment
    query: Query
    caller: bytes | None  # None for a shadow's copy, whose answer is discarded
    caller_incarnation: str
    endpoint: str
    route: str
    timeout_s: float | None
    compare: tuple[CompareAt, ...] | None = ()  # None: somewhere, which will be sent


# --- Dispatch: workers and handles <-> proxy <-> replicas ---------------------------------------


@message
class AttachCaller(Message):
    """A caller introduces itself to the proxy; AttachCallerReply answers once there are tables.

    ``splits``: with leases of several backends, it chooses among them as the router would.
    """

    process: Process
    splits: bool = False


@message
class AttachCallerReply(Message):
    """The proxy takes the caller's queries; unless ``ready`` it does not know the caller."""

    proxy: Process
    ready: bool


@message
class DetachCaller(Message):
    """A caller takes its leave of the proxy, which drops its queries; its process may live on."""

    incarnation: str


@message
class SubmitQueries(Message):
    """Caller to proxy: new queries and ids to cancel. Answers come singly, in AnswerQueries.

    A repeat of a query id that the proxy still has is ignored. ``resent`` are ids of queries that
    were sent before, to a proxy that has died or may not have taken them: they may have run.
    ``lost`` are (id, count) of queries under leases, with which so many replicas have died, and
    ``died`` (id, replica) name the last of these. ``refused`` are those that a replica had no room
    for. ``failed`` (id, replica, seconds) have failed there under another id, are under way for so
    long, and are to be tried elsewhere.
    """

    incarnation: str
    queries: tuple[Query, ...] = ()
    cancelled: tuple[int, ...] = ()
    resent: tuple[int, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    refused: tuple[int, ...] = ()
    failed: tuple[tuple[int, str, float], ...] = ()
    died: tuple[tuple[int, str], ...] = ()


@travels
class AnswerQueries(NamedTuple):
    """Replica or proxy to the caller: answers, for the incarnation that asked, in their order."""

    incarnation: str
    answers: tuple[Answer | PartedAnswer | Piece, ...]


@message
class ControlStreams(Message):
    """Caller to replica: (query id, bytes) taken of streams, and streams that are no longer wanted.

    A replica sends a bounded number of bytes ahead of what was taken.
    """

    incarnation: str  # the caller's
    taken: tuple[tuple[int, int], ...] = ()
    stopped: tuple[int, ...] = ()


@message
class FeedQueries(Message):
    """Caller to replica: parts of what follows queries, and those that will never be complete.

    A caller sends a bounded number of bytes ahead of what was taken.
    """

    incarnation: str  # the replica's
    process: Process  # the caller's, whose death ends all that it sends
    parts: tuple[StreamPart, ...] = ()
    stopped: tuple[int, ...] = ()


@travels
class RunQueries(NamedTuple):
    """Proxy to replica: run these, cancel those. Each ticket ends in one outcome.

    ``compared`` are tickets, running or answered, whose assignment did not say where their answers
    are to be compared, with where that is; nowhere is an empty tuple.
    """

    incarnation: str  # the replica's, as the router knows it
    proxy: Process
    assignments: tuple[Assignment, ...] = ()
    cancelled: tuple[int, ...] = ()
    compared: tuple[tuple[int, tuple[CompareAt, ...]], ...] = ()


@travels
class QueriesFinished(NamedTuple):
    """Replica to proxy: what became of tickets. Slots are free, but for the ``delivered``.

    A ticket is ``rejected`` when it was never run, because the replica was at max_ongoing_requests
    or draining, or its code gave it back (NotBegunError); ``begun`` when a part of its answer has
    left, which cannot be repeated; ``cancelled`` when there is no answer because none was wanted;
    else ``answered``, with the answer's HTTP status, and later ``delivered``: the caller has the
    answer. It is ``undelivered`` when the caller could not be reached, with its answer or a part:
    it is dead, or behind a broken link. A copy for a shadow is only ``answered``.

    ``models`` says which multiplexed models the replica has, each time that changed; the last one
    counts.
    """

    replica: str
    incarnation: str
    models: tuple[tuple[str, ...], ...] = ()
    begun: tuple[int, ...] = ()
    answered: tuple[tuple[int, int], ...] = ()
    cancelled: tuple[int, ...] = ()
    delivered: tuple[int, ...] = ()
    undelivered: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    draining: bool = False


# --- Dispatch leases: see greenroom.core.routing.leases ------------------------------------------


@travels
class LeasedSlots(NamedTuple):
    """Slots of one replica, which comes to take its share within ``warm_in_s`` of ``warms_s``.

    A query there takes ``pace`` times as long as at the quickest one.
    """

    replica: str  # its tag
    process: Process
    address: Address
    slots: int
    warm_in_s: float = 0.0
    warms_s: float = 0.0
    pace: float = 1.0


@message
class OpenLease(Message):
    """Caller to replica of the same host: it may send queries of an endpoint itself.

    The proxy has granted that. A replica that was asked to close the lease refuses it.
    """

    incarnation: str  # the replica's
    lease: str
    proxy: str  # its incarnation
    caller: Process
    endpoint: str
    route: str


@message
class CloseLeases(Message):
    """Caller to replica: no more comes of these leases. Proxy to replica: refuse what may come.

    For what a proxy says ``is_fence``: a lease that the replica does not know may be on its way.
    """

    incarnation: str
    leases: tuple[str, ...]
    is_fence: bool = False


@message
class LeaseGranted(Message):
    """Proxy to caller: it may use these slots of a backend for queries of an endpoint.

    ``timeout_s`` is the backend's, ``route`` and ``traffic`` the endpoint's. ``routes`` is
    prefix -> endpoint, where the caller does not have the present ones.
    """

    proxy: Process
    lease: str
    number: int
    endpoint: str
    methods: tuple[str, ...]
    timeout_s: float | None
    slots: tuple[LeasedSlots, ...]
    routes: dict[str, str] | None = None
    route: str = "/"
    backend: str = ""
    traffic: Mapping[str, float] = field(default_factory=dict)


@message
class RevokeLeases(Message):
    """Proxy to caller: return these leases."""

    proxy: Process
    numbers: tuple[int, ...]


@travels
class RunLeased(NamedTuple):
    """Caller to replica: run (lease, query), cancel those ids. Answers come as for any query."""

    incarnation: str  # the replica's
    caller: str  # its incarnation
    queries: tuple[tuple[str, Query], ...] = ()
    cancelled: tuple[int, ...] = ()


@message
class LeasesUsed(Message):
    """Caller to proxy: (number, fields of a Used), and (number, replica -> slots in use).

    The latter are of leases that the caller returns, or has returned. ``failed``, ``took`` and
    ``overdue`` are the last fields of a Used by number, where they have anything.
    """

    incarnation: str  # the caller's
    used: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    returned: tuple[tuple[int, dict[str, int]], ...] = ()
    failed: dict[int, Mapping[str, int]] = field(default_factory=dict)
    took: dict[int, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    overdue: dict[int, int] = field(default_factory=dict)


@message
class CompareAnswers(Message):
    """Replica to a replica of a shadow: answers to compare. Neither answered nor repeated."""

    incarnation: str
    answers: tuple[tuple[Any, ...], ...]  # the fields of ComparedAnswers


@message
class AskProxy(Message):
    """Anyone to the proxy: what is known there; AskProxyReply answers.

    ``what`` is "routes", "lacking", "metrics" (of the host, as core.metrics.Group), "logs" (with
    the name of one and an offset: runtime.logs.end_of_log), or "controller": its address, process
    and epoch, if known.
    """

    request_id: str
    what: str
    arguments: tuple[Any, ...] = ()


@message
class AskProxyReply(Message):
    """The proxy's answer to AskProxy; ``value`` is plain."""

    request_id: str
    value: Any


# --- Bytes that travel out of band, beside the pickle of their message ----------------------------
#
# Large bytes are not pickled, so that no process on the way copies them. ``out_of_band`` wraps
# bytes of ``LARGE`` and more; the router passes the wrapper on without looking inside, and
# ``content_of`` unwraps it.
#
# An answer with such bytes is sent in parts of ``PART`` bytes, so that other answers to the same
# caller can go in between: ``in_parts`` cuts it and ``put_together`` joins it again. It is still
# one answer, which can be retried until its last part has arrived. That is why it is not a stream:
# a stream cannot be retried, and it holds its slot for as long as a slow client takes. With answers
# of 50 MB, sending them uncut delayed other answers by 135 ms instead of 30 ms.

LARGE = 64 * 1024  # copying less costs less than avoiding the copy
PART = 450_000  # two to a message


class LargeBytes:
    """Read-only bytes, pickled out of band where the transport can."""

    __slots__ = ("view",)

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        self.view = memoryview(content).toreadonly()

    def __len__(self) -> int:
        return len(self.view)

    def __repr__(self) -> str:
        return f"LargeBytes(<{len(self)} bytes>)"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol < 5:
            return LargeBytes, (bytes(self.view),)
        return LargeBytes, (pickle.PickleBuffer(self.view),)


class Pieces:
    """Bytes that came in pieces, for code that does not need them joined; they are taken once."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = list(reversed(pieces))
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        """Return how many bytes there were at first."""
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self)

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the pieces, keeping none."""
        while self._pieces:
            yield self._pieces.pop()


@travels
class PartedAnswer(NamedTuple):
    """An answer without its body or value, whose ``size`` bytes have gone ahead in parts."""

    answer: HttpAnswer | ValueAnswer
    number: int
    size: int


def out_of_band(content: bytes) -> bytes | LargeBytes:
    """Return what to put in a message for ``content``."""
    return content if len(content) < LARGE else LargeBytes(content)


def packed(call: PythonCall | tuple[Any, ...]) -> bytes | LargeBytes:
    """Return a call as a query carries it; ``call_of`` is the other way."""
    return out_of_band(pickle.dumps(call, pickle.HIGHEST_PROTOCOL))


def content_of(sent: bytes | LargeBytes) -> bytes | memoryview:
    """Return what ``out_of_band`` was given; not copied."""
    return sent.view if isinstance(sent, LargeBytes) else sent


def call_of(query: Query) -> HttpCall | PythonCall:
    """Return the call that a query carries, of whatever format."""
    pickled = content_of(query.call)
    try:
        call = pickle.loads(pickled)
    except TypeError:  # a PythonCall with more fields
        call = formats.read(pickled)
    if isinstance(call, PythonCall):
        return call
    if len(call) == _HTTP_FIELDS:
        return tuple.__new__(HttpCall, call)
    return fit(HttpCall, call)


def arguments_of(call: PythonCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call through a handle; unpickles what its caller sent."""
    args, kwargs = pickle.loads(call.arguments)
    if not call.inputs:
        return args, kwargs

    def resolved(value: Any) -> Any:
        return pickle.loads(call.inputs[value.place]) if type(value) is Input else value

    return tuple(map(resolved, args)), {name: resolved(value) for name, value in kwargs.items()}


def part_travelling(part: StreamPart) -> StreamPart:
    """Return what to put in a message for a part of a stream."""
    if len(part.data) < LARGE:
        return part
    large: Any = LargeBytes(part.data)
    return part._replace(data=large)


def part_arrived(part: StreamPart) -> StreamPart:
    """Return what ``part_travelling`` was given."""
    sent: Any = part.data
    return part._replace(data=bytes(sent.view)) if isinstance(sent, LargeBytes) else part


def size_of(answer: Any) -> int:
    """Return the bytes of an answer's body or value, 0 for one that has neither."""
    if isinstance(answer, HttpAnswer):
        return len(answer.body)
    return len(answer.value) if isinstance(answer, ValueAnswer) else 0


def status_of(answer: Any) -> int:
    """Return the HTTP status that an answer has, or stands for."""
    if isinstance(answer, HttpAnswer | StreamEnded):
        return answer.status
    return error_status(answer.kind) if isinstance(answer, FailedAnswer) else 200


def in_parts(answer: HttpAnswer | ValueAnswer, number: int) -> list[AnswerPart | PartedAnswer]:
    """Cut an answer; its parts go the same way as the rest of it, which comes last."""
    rest: HttpAnswer | ValueAnswer
    if isinstance(answer, HttpAnswer):
        whole, rest = memoryview(bytes(answer.body)), answer._replace(body=b"")
    else:
        whole, rest = memoryview(answer.value), answer._replace(value=b"")
    pieces = (whole[start : start + PART] for start in range(0, len(whole), PART))
    parts = [AnswerPart(answer.query_id, number, LargeBytes(piece)) for piece in pieces]
    return [*parts, PartedAnswer(rest, number, len(whole))]


def put_together(sent: PartedAnswer, parts: Sequence[LargeBytes]) -> Answer:
    """Return the answer whose parts these are; an HTTP answer's body may stay in pieces."""
    answer, pieces = sent.answer, [part.view for part in parts]
    if sum(map(len, pieces)) != sent.size:
        text = "its answer did not arrive in full"
        return FailedAnswer(answer.query_id, "ReplicaUnavailableError", text, 1.0)
    if isinstance(answer, ValueAnswer):
        return answer._replace(value=b"".join(pieces))
    return answer._replace(body=bytes(pieces[0]) if len(pieces) == 1 else Pieces(pieces))


# --- Messages as plain tuples ---------------------------------------------------------------------
#
# Only the messages that are sent thousands of times a second are turned into tuples; all others are
# pickled as they are. To pickle an instance, Python looks its class up by name and calls its
# methods. A tuple of plain values costs neither; see docs/performance.md for the figures.

Plain = tuple[Any, ...]  # begins with one of these numbers; then all fields, in their order
ITSELF, SUBMIT, RUN, ANSWER, FINISHED, LEASED = range(6)


def _plain_submit(message: SubmitQueries) -> Plain | SubmitQueries:
    if message.failed or message.died:  # few have them; hosts of this format may not know them
        return message
    queries = list(map(tuple, message.queries))
    special = message.resent, message.lost, message.refused
    return SUBMIT, message.incarnation, queries, message.cancelled, *special


def _plain_leased(message: RunLeased) -> Plain:
    queries = [(lease, tuple(query)) for lease, query in message.queries]
    return LEASED, message.incarnation, message.caller, queries, message.cancelled


def _plain_run(message: RunQueries) -> Plain:
    assignments = [(each[0], tuple(each[1]), *each[2:]) for each in message.assignments]
    proxy, cancelled = tuple(message.proxy), message.cancelled
    return RUN, message.incarnation, proxy, assignments, cancelled, message.compared


def _plain_answer(message: AnswerQueries) -> Plain:
    answers = [tuple(each) if type(each) is HttpAnswer else each for each in message.answers]
    return ANSWER, message.incarnation, answers


def _exact(kind: type) -> Callable[[Plain], Any]:
    return partial(tuple.__new__, kind)


def _fitted(kind: type) -> Callable[[Plain], Any]:
    return partial(fit, kind)


def _makers(made: Callable[[type], Callable[[Plain], Any]]) -> dict[int, Callable[..., Any]]:
    """Return what makes messages of plain tuples, by their numbers."""
    query, assignment, http_answer, process = map(made, (Query, Assignment, HttpAnswer, Process))
    run_leased, run_queries = made(RunLeased), made(RunQueries)
    answer_queries, queries_finished = made(AnswerQueries), made(QueriesFinished)

    def submit(
        incarnation: str,
        queries: list[Plain],
        cancelled: tuple[int, ...],
        resent: tuple[int, ...],
        lost: tuple[tuple[int, int], ...],
        refused: tuple[int, ...],
        *_: Any,
    ) -> SubmitQueries:
        return SubmitQueries(
            incarnation=incarnation,
            queries=tuple(map(query, queries)),
            cancelled=cancelled,
            resent=resent,
            lost=lost,
            refused=refused,
        )

    def leased(incarnation: str, caller: str, queries: list[Plain], *others: Any) -> Any:
        runs = tuple([(lease, query(each)) for lease, each in queries])
        return run_leased((incarnation, caller, runs, *others))

    def run(incarnation: str, proxy: Plain, assignments: list[Plain], *others: Any) -> Any:
        runs = tuple([assignment((each[0], query(each[1]), *each[2:])) for each in assignments])
        return run_queries((incarnation, process(proxy), runs, *others))

    def answer(incarnation: str, answers: list[Any], *others: Any) -> Any:
        items = [http_answer(each) if type(each) is tuple else each for each in answers]
        return answer_queries((incarnation, tuple(items), *others))

    return {
        ITSELF: lambda message, *_: message,
        SUBMIT: submit,
        RUN: run,
        ANSWER: answer,
        FINISHED: lambda *values: queries_finished(values),
        LEASED: leased,
    }


PLAIN: dict[type, Callable[[Any], Any]] = {
    tuple: lambda message: (ITSELF, message),
    SubmitQueries: _plain_submit,
    RunQueries: _plain_run,
    AnswerQueries: _plain_answer,
    QueriesFinished: lambda message: (FINISHED, *message),
    RunLeased: _plain_leased,
}
"""What makes the tuple to pickle, by the class of a message; others are pickled as they are."""

RESTORED, FITTED = _makers(_exact), _makers(_fitted)
"""What makes the message again, by the number in the tuple; FITTED of another format's fields."""


def exception_of(pickled: bytes | None) -> Exception | None:
    """Return what user code raised; None where it cannot be made here, and its text must do.

    It may be of a type that this process lacks, or whose constructor takes more than its args.
    """
    error = None
    if pickled is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(pickled)
    return error if isinstance(error, Exception) else None
