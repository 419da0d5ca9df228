"""Every message between Understudy's processes.

Requests are imperative, facts past tense, answers end in ``Reply``. Every message that crosses a
process boundary is a frozen, slotted dataclass of plain values; the records that travel in batches
are NamedTuples, which pickle fastest. Each ``__str__`` is cheap, because Thespian formats every
message it sends for a log that is off.

Addresses are Thespian's ActorAddress. Ports are reused, so whatever names a process carries its
``incarnation`` too: a random id made when the process started.

The module is longer than others may be, because what processes say to each other is best read in
one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from typing_extensions import dataclass_transform

if TYPE_CHECKING:
    from understudy.actors.large_bytes import LargeAnswer, LargeBytes

Address = Any  # thespian.actors.ActorAddress, which ships no types
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, slotted dataclass with keyword-only fields."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


class Message:
    """Base of all messages; gives them a cheap text."""

    __slots__ = ()

    def __str__(self) -> str:
        return type(self).__name__


class Process(NamedTuple):
    """One process of the system, recognisable even when its pid or port is used again."""

    pid: int
    start_ticks: int  # the kernel's start time of the process, in clock ticks since boot
    incarnation: str  # random, made when the process started


# --- Records that travel in batches -----------------------------------------------------------


class HttpCall(NamedTuple):
    """An HTTP request as the replica will see it; pickled by the worker, opaque to the router."""

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


class PythonCall(NamedTuple):
    """A call through a handle: a method's name, and cloudpickle of (args, kwargs)."""

    method: str
    arguments: bytes


class Query(NamedTuple):
    """One call on its way. ``id`` is unique for its sender's incarnation; a repeat keeps it."""

    id: int
    endpoint: str | None  # None: the router matches ``path``
    path: str
    http_method: str  # "" for a call through a handle
    call_method: str  # method of the user's class, "" for __call__
    call: bytes | LargeBytes  # pickled HttpCall or PythonCall
    request_id: str
    timeout_s: float | None  # from now; None leaves it to the backend's setting
    repeatable: bool
    shard_key: str | None
    for_shadow: bool = False  # made by code that runs a copy for a shadow
    multiplexed_model_id: str = ""  # the model that user code is to use; "" for none


class HttpAnswer(NamedTuple):
    """A response from user code, whatever its status."""

    query_id: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ValueAnswer(NamedTuple):
    """What a PythonCall returned, cloudpickled."""

    query_id: int
    value: bytes


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


class StreamBegun(NamedTuple):
    """An HTTP answer that comes in parts has begun; parts follow, then one Answer ends it."""

    query_id: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    process: Process  # whose death ends it


class StreamPart(NamedTuple):
    """The next bytes of an answer that has begun."""

    query_id: int
    data: bytes


class StreamEnded(NamedTuple):
    """An answer in parts is complete; a FailedAnswer in its place says that it never will be."""

    query_id: int
    status: int


Answer = HttpAnswer | ValueAnswer | FailedAnswer | StreamEnded


class CompareAt(NamedTuple):
    """The replica at which a query's answer is compared with that of a copy of it.

    ``number`` is the copy's; ``settings``, for it, are (id, fields of core.comparing.Compare). Both
    and the address are pickled once and for all, for they go with every query.
    """

    number: int
    incarnation: str
    address: bytes
    settings: bytes  # b"" for the query itself


class ComparedAnswer(NamedTuple):
    """One side's answer, on its way to be compared; ``missing`` says why there is only a status."""

    proxy: str  # the incarnation of the proxy that has numbered it
    at: CompareAt
    endpoint: str
    backend: str
    request_id: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""  # of an answer over HTTP
    value: bytes = b""  # of a call through a handle, cloudpickled
    missing: str = ""


class Assignment(NamedTuple):
    """A query on its way from the router to one replica, with the address that wants the answer."""

    ticket: int  # the router's number for this assignment
    query: Query
    caller: Address | None  # None for a shadow's copy, whose answer is discarded
    caller_incarnation: str
    endpoint: str
    route: str
    timeout_s: float | None
    compare: tuple[CompareAt, ...] = ()


# --- Dispatch: workers and handles <-> proxy <-> replicas ---------------------------------------


@message
class AttachCaller(Message):
    """A caller introduces itself to the proxy; answered by AttachCallerReply. Repeats are safe."""

    process: Process


@message
class AttachCallerReply(Message):
    """The proxy knows the caller. ``ready`` is False before its first route table."""

    proxy: Process
    ready: bool


@message
class DetachCaller(Message):
    """A caller takes its leave of the proxy, which drops its queries; its process may live on."""

    incarnation: str


@message
class SubmitQueries(Message):
    """Caller to proxy: new queries and ids to cancel. Answers come singly, in AnswerQueries.

    A repeat of a query id that the proxy still has is ignored.
    """

    incarnation: str
    queries: tuple[Query, ...] = ()
    cancelled: tuple[int, ...] = ()


@message
class AnswerQueries(Message):
    """Replica or proxy to the caller: answers, for the incarnation that asked, in their order."""

    incarnation: str
    answers: tuple[Answer | LargeAnswer | StreamBegun | StreamPart, ...]


@message
class ControlStreams(Message):
    """Caller to replica: (query id, bytes) taken of streams, and streams that nobody wants more of.

    A replica sends a bounded number of bytes ahead of what was taken.
    """

    incarnation: str  # the caller's
    taken: tuple[tuple[int, int], ...] = ()
    stopped: tuple[int, ...] = ()


@message
class RunQueries(Message):
    """Proxy to replica: run these, cancel those. Each ticket ends in one outcome."""

    incarnation: str  # the replica's, as the router knows it
    proxy: Process
    assignments: tuple[Assignment, ...] = ()
    cancelled: tuple[int, ...] = ()


@message
class QueriesFinished(Message):
    """Replica to proxy: what became of tickets. Slots are free, but for the ``delivered``.

    A ticket is ``rejected`` when it was never run, because the replica was at max_ongoing_requests
    or draining; ``begun`` when a part of its answer has left, which cannot be repeated;
    ``cancelled`` when there is no answer because nobody wanted one; else ``answered``, with the
    answer's HTTP status, and later ``delivered``: the caller has the answer, or is dead.
    A copy for a shadow is only ``answered``.

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
    rejected: tuple[int, ...] = ()
    draining: bool = False


@message
class CompareAnswers(Message):
    """Replica to a replica of a shadow: answers to compare. Nobody answers, nobody repeats."""

    incarnation: str
    answers: tuple[ComparedAnswer, ...]


@message
class AskProxy(Message):
    """Anyone to the proxy: ``what`` is "routes", "metrics" or "status"; AskProxyReply answers."""

    request_id: str
    what: str


@message
class AskProxyReply(Message):
    """The proxy's answer to AskProxy; ``value`` is plain."""

    request_id: str
    value: Any


# --- Long poll: proxy -> controller -----------------------------------------------------------


@message
class Listen(Message):
    """Proxy to controller: up to which id it holds all; answered by Changed once there is more.

    Repeated every two seconds, which is also how the controller knows that the proxy lives.
    """

    listener: Process
    host: str
    seen: int


@message
class Changed(Message):
    """Controller to proxy: newer snapshots by key (None: deleted), with their snapshot ids.

    ``upto`` is what the proxy has seen once it holds them. What is not in a ``complete`` one does
    not exist. A repeat, or one that a newer one has overtaken, is harmless.
    """

    controller: Process
    snapshots: dict[str, tuple[int, Any]]
    upto: int
    complete: bool


@message
class MeetController(Message):
    """Host process to proxy: the controller lives here (again). Repeats are safe."""

    controller: Address
    process: Process


@message
class ReplicaLost(Message):
    """Proxy to controller: the replica's process is gone."""

    replica: str
    incarnation: str


@message
class LoadReported(Message):
    """Proxy to controller: backend -> (queued, ongoing) of its router; repeats are safe.

    It stands for all that the proxy has: a backend that is not named has nothing there, and a later
    report replaces the earlier one. Sent every half second while there are queries, at once when
    one waits at a backend without replicas, and once more, empty, when the last has ended; also
    once to each controller that the proxy meets.
    """

    proxy: Process
    load: dict[str, tuple[int, int]]


@message
class TalliesReported(Message):
    """Proxy to controller: what became of the queries of endpoints with a rollout; may repeat.

    ``tallies`` is endpoint -> (the step's name, backend -> core.tallies.PlainTally): all that this
    proxy has counted in that step. Sent every second while there is a rollout.
    """

    proxy: Process
    tallies: dict[str, tuple[str, dict[str, tuple[int, int, int, dict[int, int]]]]]


# --- Replica lifecycle: controller -> replica ---------------------------------------------------


@message
class StartReplica(Message):
    """Controller to replica: become this one. Repeats are safe; answered by ReplicaReported."""

    replica: str
    backend: str
    deployment: str
    application: str
    version: str | None
    code: bytes  # cloudpickle of (function or class, args, kwargs)
    code_hash: str
    config: dict[str, Any]
    config_id: int  # grows with each change of the config


@message
class ReconfigureReplica(Message):
    """Controller to replica: newer settings; answered by ReplicaReported with that config_id."""

    replica: str
    config: dict[str, Any]
    config_id: int


@message
class CheckReplica(Message):
    """Controller to replica: run check_health; answered by ReplicaReported with check_id."""

    replica: str
    check_id: int


@message
class StopReplica(Message):
    """Controller to replica: finish what you have within ``drain_s``, then exit; may repeat.

    ``replica`` names the receiver, which may not have been started yet.
    """

    replica: str
    drain_s: float


@message
class ReplicaReported(Message):
    """Replica to controller: its state, after any of the above.

    ``queries_at`` is where it takes queries, once it has code.
    ``state`` is "idle" (no StartReplica yet), "starting", "running", "failed" (the constructor
    raised), "draining"; ``error`` is the constructor's, reconfigure's or check_health's, with its
    traceback; ``exception`` that exception, cloudpickled where it can be.
    """

    replica: str
    process: Process
    state: str
    queries_at: Address | None = None
    config_id: int = 0
    check_id: int = 0
    ongoing: int = 0
    error: str = ""
    exception: bytes | None = None


@message
class ComparisonsReported(Message):
    """Replica of a shadow to controller: all that its comparisons have found; may repeat.

    By endpoint, shadow and the id of the settings, as core.differences tells it.
    """

    process: Process
    found: dict[tuple[str, str, str], dict[str, Any]]


@message
class MeetProxy(Message):
    """Proxy to replica: handles made here send their queries to this proxy. Repeats are safe."""

    proxy: Address
    process: Process


# --- Identity and hosts -------------------------------------------------------------------------


@message
class Identify(Message):
    """Anyone to any of our actors: who are you; answered by IdentifyReply."""

    request_id: str


@message
class IdentifyReply(Message):
    """An actor's process, and the title it shows in process lists."""

    request_id: str
    process: Process
    title: str


@message
class StopHost(Message):
    """Controller to host process: stop this host's system; ``forget`` deletes its state too."""

    forget: bool


@message
class HostReported(Message):
    """Host process to controller: what runs on this host, for status. Repeats are safe."""

    host: str
    report: dict[str, Any]


# --- Admin: clients -> controller ---------------------------------------------------------------


@message
class Request(Message):
    """Base of all admin requests. Each is idempotent; a client repeats it with the same id.

    ``user`` is who asks, as the client's system names them; nobody vouches for it.
    """

    request_id: str
    user: str = ""


@message
class RequestReply(Message):
    """The controller's answer; ``error_kind`` is a class in core.errors, "" for success.

    ``exception`` is the user code's own, cloudpickled, for a deployment that failed.
    """

    request_id: str
    value: Any = None
    error_kind: str = ""
    error: str = ""
    exception: bytes | None = None


@message
class CreateBackend(Request):
    """Run code; answers the goal's id, or None when nothing changed."""

    tag: str
    code: bytes
    code_hash: str
    config: dict[str, Any]
    actor_options: dict[str, Any] = field(default_factory=dict)
    version: str | None = None


@message
class UpdateBackendConfig(Request):
    """Change the fields given in ``changes``; answers the goal's id or None."""

    tag: str
    changes: dict[str, Any]


@message
class DeleteBackend(Request):
    """Stop a backend's replicas and forget it; refused while an endpoint names it."""

    tag: str
    force: bool = False


@message
class CreateEndpoint(Request):
    """Name a backend, with a route or without; answered when every proxy knows it."""

    name: str
    backend: str
    route: str | None
    methods: tuple[str, ...]


@message
class DeleteEndpoint(Request):
    """Forget an endpoint; answered when no proxy routes to it any more."""

    name: str


@message
class SetTraffic(Request):
    """Give an endpoint's traffic to backends by weight; answered when every proxy knows it."""

    endpoint: str
    weights: dict[str, float]


@message
class ShadowTraffic(Request):
    """Have a proportion of an endpoint's queries copied to a backend; 0 ends it.

    Answered when every proxy knows it.
    """

    endpoint: str
    backend: str
    proportion: float
    compare: dict[str, Any] | None = None  # fields of core.comparing.Compare


@message
class GetDifferences(Request):
    """Answers shadow -> what comparing its answers has found."""

    endpoint: str


@message
class StartRollout(Request):
    """Move an endpoint's traffic to a backend step by step; answers the goal's id or None.

    The goal fails when the traffic goes back.
    """

    endpoint: str
    to: str
    steps: tuple[float, ...]
    hold_s: float
    abort_if: dict[str, float]
    alpha: float
    min_samples: int
    ready_timeout_s: float


@message
class AbortRollout(Request):
    """Go back to the traffic before a rollout; answered when every proxy knows it."""

    endpoint: str


@message
class PromoteRollout(Request):
    """End a rollout with all traffic at its new backend; answered when every proxy knows it."""

    endpoint: str


@message
class ListRollouts(Request):
    """Answers endpoint -> where its last rollout stands, and why."""


class DeploymentSpec(NamedTuple):
    """One deployment of an application, as DeployApplication carries it."""

    name: str
    code: bytes
    code_hash: str
    version: str | None
    config: dict[str, Any]
    actor_options: dict[str, Any]


@message
class DeployApplication(Request):
    """Bring up these deployments together; the last one named ``ingress`` gets the route.

    Deployments of the application that are not in ``deployments`` are deleted. Answers the goal's
    id, or None when nothing changed.
    """

    application: str
    ingress: str
    route_prefix: str | None
    deployments: tuple[DeploymentSpec, ...]


@message
class PlanApplication(DeployApplication):
    """Change nothing; answers what DeployApplication would change, as core.history tells it."""


@message
class DeployDeployment(Request):
    """Bring up a deployment of its own, with the endpoint of its name.

    Refused unless ``prev_version`` is None or the version that is deployed. Answers the goal's id,
    or None when nothing changed.
    """

    spec: DeploymentSpec
    route_prefix: str | None
    prev_version: str | None = None


@message
class DeleteDeployment(Request):
    """Delete a deployment of its own; answers the goal's id or None."""

    name: str


@message
class DeleteEverything(Request):
    """Delete all applications, deployments, endpoints and backends; answers the goals' ids."""


@message
class GetDeployment(Request):
    """Answers the settings and the state of a deployment of its own."""

    name: str


@message
class ListDeployments(Request):
    """Answers name -> what GetDeployment answers."""


@message
class ListHistory(Request):
    """Answers the changes that are kept, oldest first."""


@message
class UndoChange(Request):
    """Restore what was before a change, by default the last; answers what it undid, and the goal.

    Refused with the reason where that cannot be.
    """

    change_id: int | None = None


@message
class DeleteApplication(Request):
    """Delete an application's deployments; answers the goal's id or None."""

    application: str


@message
class WaitForGoal(Request):
    """Answered when the goal completes (value True) or fails (DeployFailedError)."""

    goal_id: str


@message
class ListBackends(Request):
    """Answers tag -> settings and state."""


@message
class GetBackendConfig(Request):
    """Answers the backend's config as a dict."""

    tag: str


@message
class ListEndpoints(Request):
    """Answers name -> {route, methods, traffic, shadows}."""


@message
class GetStatus(Request):
    """Answers the object that ``understudy status --json`` prints."""


@message
class GetAutoscaling(Request):
    """Answers tag -> bounds, load and latest decisions of each autoscaled backend."""


@message
class StopCluster(Request):
    """Stop all replicas; answers True when they have drained.

    With ``forget`` instead have every host stop and delete its state; answers True at once.
    """

    forget: bool = False
