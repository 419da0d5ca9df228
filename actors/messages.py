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
from typing import Any, NamedTuple, TypeVar

from typing_extensions import dataclass_transform

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
    call: bytes  # pickled HttpCall or PythonCall
    request_id: str
    timeout_s: float | None  # from now; None leaves it to the backend's setting
    repeatable: bool
    shard_key: str | None


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


Answer = HttpAnswer | ValueAnswer | FailedAnswer


class Assignment(NamedTuple):
    """A query on its way from the router to one replica, with the address that wants the answer."""

    ticket: int  # the router's number for this assignment
    query: Query
    caller: Address
    caller_incarnation: str
    endpoint: str
    route: str
    timeout_s: float | None


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
    """Replica or proxy to the caller: answers, for the incarnation that asked."""

    incarnation: str
    answers: tuple[Answer, ...]


@message
class RunQueries(Message):
    """Proxy to replica: run these, cancel those. Each ticket ends in one outcome."""

    incarnation: str  # the replica's, as the router knows it
    proxy: Process
    assignments: tuple[Assignment, ...] = ()
    cancelled: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """How one ticket ended: its answer's HTTP status, and how long it ran."""

    ticket: int
    status: int
    seconds: float


@message
class QueriesFinished(Message):
    """Replica to proxy: these tickets are answered (the answer is acknowledged), those refused.

    ``rejected`` tickets were never run: the replica was at max_ongoing_requests, or draining.
    """

    replica: str
    incarnation: str
    finished: tuple[Outcome, ...] = ()
    rejected: tuple[int, ...] = ()
    draining: bool = False


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
    """Proxy to controller: what it holds. Answered by Changed once something newer exists."""

    listener: Process
    host: str
    known: dict[str, int] = field(default_factory=dict)


@message
class Changed(Message):
    """Controller to proxy: newer snapshots by key (None: deleted), with their snapshot ids."""

    controller: Process
    snapshots: dict[str, tuple[int, Any]]


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

    ``state`` is "idle" (no StartReplica yet), "starting", "running", "failed" (the constructor
    raised), "draining"; ``error`` is the constructor's, reconfigure's or check_health's, with its
    traceback; ``exception`` that exception, cloudpickled where it can be.
    """

    replica: str
    process: Process
    state: str
    config_id: int = 0
    check_id: int = 0
    ongoing: int = 0
    error: str = ""
    exception: bytes | None = None


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
    """Base of all admin requests. Each is idempotent; a client repeats it with the same id."""

    request_id: str


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
class StopCluster(Request):
    """Stop all replicas; answers True when they have drained.

    With ``forget`` instead have every host stop and delete its state; answers True at once.
    """

    forget: bool = False
