"""The query that user code runs and the replica that it runs in, as user code sees them.

A query costs one context variable; a :class:`RequestContext` is made from it only on demand. Calls
that user code makes through handles belong to the query that it runs: they inherit its id and its
remaining time, and are cancelled with it. Once the query has ended, calls of tasks that are left
running in the background belong to no query.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from greenroom.actors.caller.streams import NobodyListensError, Parts, Sender
from greenroom.actors.messages.queries import MORE, Answer, Assignment, StreamEnded
from greenroom.core.validation import explain_missing

if TYPE_CHECKING:
    from greenroom.actors.runtime.tracing import Span


Headers = tuple[tuple[bytes, bytes], ...]  # of HTTP


class DeploymentID(NamedTuple):
    """A deployment of an application, as Ray Serve names it."""

    name: str
    app_name: str


class ReplicaID(NamedTuple):
    """A replica of a deployment, as Ray Serve names it."""

    unique_id: str
    deployment_id: DeploymentID


class ReplicaRank(NamedTuple):
    """A replica's number among those of its deployment, from 0 and without gaps.

    ``node_rank`` is that of its host among the hosts that have any, ``local_rank`` its own there.
    """

    rank: int = 0
    node_rank: int = 0
    local_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaContext:
    """One replica; ``servable_object`` is None until the constructor has returned.

    ``rank`` and ``world_size`` are those of now: they change when replicas come and go.
    """

    app_name: str  # "" for a backend that belongs to no application
    deployment: str  # the backend's tag where it belongs to no application
    replica_tag: str
    backend: str
    version: str | None
    servable_object: Any = None
    rank: ReplicaRank = field(default_factory=ReplicaRank)
    world_size: int = 1  # how many replicas the deployment has

    hints: ClassVar[Mapping[str, str]] = {
        "code_version": "use version",
        "gang_context": "use rank and world_size",
    }
    if not TYPE_CHECKING:
        __getattr__ = explain_missing

    @property
    def replica_id(self) -> ReplicaID:
        """Return the tag with what it is a replica of."""
        return ReplicaID(self.replica_tag, DeploymentID(self.deployment, self.app_name))


class _OfQuery:
    """What looks at a query each time it is asked; no field, so copies do without."""

    __slots__ = ("_query",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext(_OfQuery):
    """One query, as user code sees it; all empty where none is being run.

    ``request_id`` is that of the query on whose behalf user code called, where it is a call of its.
    ``is_shadow``: a copy, whose result is discarded, or a call on behalf of one. Code that charges,
    mails or writes should not. ``deadline``, by :func:`time.monotonic` as ``asyncio.timeout_at``
    takes it, is when the answer is no longer wanted.
    """

    request_id: str = ""
    route: str = ""  # the endpoint's; "" for a call through a handle
    endpoint: str = ""
    app_name: str = ""
    backend: str = ""
    version: str | None = None
    replica_tag: str = ""
    is_shadow: bool = False
    is_http_request: bool = False
    multiplexed_model_id: str = ""
    deadline: float | None = None

    @property
    def is_cancelled(self) -> bool:
        """Return whether the answer is no longer wanted; sync code cannot be stopped, so look."""
        query = getattr(self, "_query", None)
        return query is not None and bool(query.is_cancelled)

    @property
    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, not below 0; None where there is none."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


class Call(Protocol):
    """A call made through a handle."""

    def cancel(self) -> None:
        """Cancel it wherever it is; harmless when it is over; callable from any thread."""


class RunningQuery:
    """A query, or batch of queries, that user code runs, and the calls that it has made meanwhile.

    ``deadline_at`` is in :func:`time.monotonic` seconds. Calls come from any thread; the end and
    the cancellation from that of user code's loop.
    """

    __slots__ = ("assignment", "calls", "deadline_at", "has_ended", "is_cancelled", "span", "task")

    def __init__(self, assignment: Assignment, deadline_at: float | None) -> None:
        self.assignment = assignment
        self.deadline_at = deadline_at
        self.calls: set[Call] = set()  # those that are under way
        self.is_cancelled = False
        self.has_ended = False
        self.span: Span | None = None  # where this process traces
        self.task: asyncio.Task[None] | None = None  # of a query, until it has ended

    def made(self, call: Call) -> None:
        """Cancel this call with the query, unless :meth:`over` comes before."""
        self.calls.add(call)
        if self.is_cancelled:  # on another thread, which has not seen this one perhaps
            call.cancel()

    def over(self, call: Call) -> None:
        """Forget a call that is over."""
        self.calls.discard(call)

    def cancel_calls(self) -> None:
        """Cancel all calls that are under way: their results are no longer wanted."""
        self.is_cancelled = True
        for call in list(self.calls):
            call.cancel()


class Reply(RunningQuery):
    """A query that user code runs, and the way its answer goes. Not answered, it was cancelled."""

    __slots__ = ("_completed", "extra_headers")

    upload: Parts | None = None  # what follows it
    sender: Sender | None = None  # of an answer in parts that has begun
    status: int = 0  # of its answer; 0 before that

    def __init__(self, assignment: Assignment, deadline_at: float | None) -> None:
        super().__init__(assignment, deadline_at)
        self.extra_headers: Headers = ()  # of an answer over HTTP
        self._completed: asyncio.Event | None = None  # where anything waits for that

    def check_wanted(self) -> None:
        """Raise NobodyListensError in a task that goes on after the end, or a cancellation."""
        if self.has_ended or self.is_cancelled:
            raise NobodyListensError("the query has ended")

    async def completed(self) -> None:
        """Return when all of its answer was given, or none will be."""
        while not (self.status or self.has_ended):
            if self._completed is None:
                self._completed = asyncio.Event()
            await self._completed.wait()

    def complete(self) -> None:
        """Take no more of what follows it, and let those go on who wait for that."""
        if self.upload is not None:
            self.upload.ended(StreamEnded(self.assignment.query.id, self.status))
        if self._completed is not None:
            self._completed.set()

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer in parts; any answer ends it, a StreamEnded when all went well."""
        raise NotImplementedError

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next part; return when more may be made."""
        raise NotImplementedError

    async def give(
        self,
        values: Any,
        pack: Callable[[Any], tuple[Headers, bytes]],
        ends: int = MORE,
        headers: Headers = (),
    ) -> None:
        """Answer with what a generator yields, as fast as the caller takes it.

        ``pack`` makes a part of a value, with headers; ``headers`` are those where nothing comes.
        """
        has_begun = False
        try:
            async for value in values:
                headers, part = pack(value)  # before it begins: a failure may come whole
                if not has_begun:
                    self.begin(200, headers)
                    has_begun = True
                await self.send(part, ends)
        finally:
            if hasattr(values, "aclose"):
                await values.aclose()
        if not has_begun:
            self.begin(200, headers)
        self.answer(StreamEnded(self.assignment.query.id, 200))

    def answer(self, answer: Answer) -> None:
        """Answer; user code may go on."""
        raise NotImplementedError

    def give_back(self) -> bool:
        """Have another replica run it when user code has returned; False where it is too late."""
        return False

    def end(self) -> None:
        """Note that user code has returned."""
        raise NotImplementedError


class Origin(NamedTuple):
    """What a call made through a handle inherits of the query on whose behalf it is made."""

    request_id: str = ""  # "" for none
    for_shadow: bool = False
    deadline_at: float | None = None
    query: RunningQuery | None = None  # with which to cancel it


running: ContextVar[RunningQuery | None] = ContextVar("greenroom_query", default=None)
running_batch: ContextVar[tuple[RunningQuery | None, ...]] = ContextVar(
    "greenroom_batch", default=()
)
_replica: ReplicaContext | None = None
_updating = threading.Lock()
# What stands for a replica in a process that has several: see serve.local_testing.
local_replica: ContextVar[ReplicaContext | None] = ContextVar("greenroom_replica", default=None)


def install(context: ReplicaContext | None) -> None:
    """Make ``context`` this process's; a replica does it before it loads user code."""
    global _replica  # noqa: PLW0603  # one per process, like the process's actor
    _replica = context


def constructed(servable_object: Any) -> None:
    """Add what user code has made of itself to the replica's context."""
    _update(servable_object=servable_object)


def ranked(rank: ReplicaRank, world_size: int) -> None:
    """Change the rank in the replica's context."""
    _update(rank=rank, world_size=world_size)


def _update(**changes: Any) -> None:
    with _updating:  # user code's loop and the message loop both do
        if _replica is not None:
            install(replace(_replica, **changes))


def replica_context() -> ReplicaContext | None:
    """Return the replica that this is, or what stands for one; None outside of any."""
    return local_replica.get() if _replica is None else _replica


def called_as(application: str) -> str:
    """Return the application that handles of this one call.

    Code of a new version that runs beside the present one calls deployments of the new version.
    """
    replica = _replica
    if replica is None or replica.app_name != application:
        return application
    return replica.backend.partition("#")[0]


def request_context() -> RequestContext:
    """Return the query that the calling task or thread runs; an empty one where it runs none."""
    return _context_of(running.get())


def batch_request_context() -> list[RequestContext]:
    """Return the queries of the batch that the calling task runs, in the items' order."""
    return [_context_of(query) for query in running_batch.get()]


def _context_of(query: RunningQuery | None) -> RequestContext:
    replica = replica_context()
    if query is None or replica is None:
        return RequestContext()
    assignment = query.assignment
    is_http = bool(assignment.query.http_method)
    context = RequestContext(
        request_id=assignment.query.request_id,
        route=assignment.route if is_http else "",
        endpoint=assignment.endpoint,
        app_name=replica.app_name,
        backend=replica.backend,
        version=replica.version,
        replica_tag=replica.replica_tag,
        is_shadow=_is_for_shadow(query),
        is_http_request=is_http,
        multiplexed_model_id=assignment.query.multiplexed_model_id,
        deadline=query.deadline_at,
    )
    object.__setattr__(context, "_query", query)
    return context


def origin() -> Origin:
    """Return what calls made here inherit.

    A query that has ended or was cancelled passes on no deadline: what is called then, to clean up
    or in the background, has all the time it takes.
    """
    query = running.get()
    if query is None:
        return Origin()
    request_id, for_shadow = query.assignment.query.request_id, _is_for_shadow(query)
    if query.has_ended or query.is_cancelled:
        return Origin(request_id, for_shadow)
    return Origin(request_id, for_shadow, query.deadline_at, query)


def is_cancelled() -> bool:
    """Return whether the running query was cancelled."""
    query = running.get()
    return query is not None and query.is_cancelled


def begin_batch(queries: Iterable[RunningQuery | None]) -> RunningQuery | None:
    """Run these queries as a batch, in the calling task; return the batch, or None without queries.

    It runs as long as one of them is wanted, so its deadline is the latest of theirs.
    """
    of_items = tuple(queries)
    running_batch.set(of_items)
    first = of_items[0]
    if first is None:
        return None
    deadlines = [None if query is None else query.deadline_at for query in of_items]
    known = [deadline for deadline in deadlines if deadline is not None]
    latest = max(known) if len(known) == len(deadlines) else None
    batch = RunningQuery(first.assignment, latest)
    running.set(batch)
    return batch


def call_id() -> str:
    """Return what the running query has in common with its own repeats and no other query."""
    query = running.get()
    if query is None:
        return ""
    return f"{query.assignment.caller_incarnation} {query.assignment.query.id}"


def detach() -> None:
    """Detach the calling task from the running query's end and deadline; it keeps the id."""
    query = running.get()
    if query is not None:
        running.set(RunningQuery(query.assignment, None))


def batching_group(query: RunningQuery | None) -> Hashable:
    """Return what queries must have in common to be run in one batch.

    Calls made by a batch are made for its first query, and inherit what that is; and its model is
    that of all.
    """
    if query is None:
        return None
    return _is_for_shadow(query), query.assignment.query.multiplexed_model_id


def multiplexed_model_id() -> str:
    """Return the model that the running query asks for; "" for none."""
    query = running.get()
    return "" if query is None else query.assignment.query.multiplexed_model_id


def _is_for_shadow(query: RunningQuery) -> bool:
    assignment = query.assignment
    return assignment.caller is None or assignment.query.for_shadow


# --- The multiplexed models of this process -------------------------------------------------------
#
# A replica reports its models to its proxies, which prefer it for queries for those models. Models
# that are still being loaded are included, because the next query for one should wait for it here.


class ModelCache(Protocol):
    """What keeps models: see :mod:`greenroom.serve.decorators.multiplex`."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The models that it has, or loads."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it belongs to; None when that is gone."""

    def unload_all(self) -> Awaitable[None]:
        """Unload them; called on that loop when the replica stops."""


_lock = threading.Lock()
_models: dict[ModelCache, tuple[str, ...]] = {}
_on_models: Callable[[], None] | None = None


def on_models_changed(listener: Callable[[], None] | None) -> None:
    """Call ``listener`` after each change, on the thread that made it; a replica does it."""
    global _on_models  # noqa: PLW0603  # one per process, like the process's actor
    _on_models = listener


def model_ids() -> tuple[str, ...]:
    """Return the ids of all models here, in their order."""
    with _lock:
        return tuple(sorted({model_id for ids in _models.values() for model_id in ids}))


def models_changed(cache: ModelCache) -> None:
    """Note what a cache has now, if that changed; one without any is forgotten."""
    ids = cache.ids
    with _lock:
        if set(ids) == set(_models.get(cache, ())):
            return
        if ids:
            _models[cache] = ids
        else:
            del _models[cache]
    if _on_models is not None:
        _on_models()


async def unload_models() -> None:
    """Unload all models that belong to the running event loop."""
    loop = asyncio.get_running_loop()
    with _lock:
        caches = [each for each in _models if each.loop is loop]
    for cache in caches:
        await cache.unload_all()
