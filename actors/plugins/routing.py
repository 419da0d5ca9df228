"""Request routers of users: the classes that they are made of, and the loop that asks one.

Theory of operation. One instance lives beside each proxy, in a process of its own. It hears of each
query before the proxy's router does, and names replicas in ranks, the best first. Questions are
coroutines side by side: one that waits for something does not hold up the next.

Frames that come are pickled tuples, so that the proxy need not import this module:

- ``BEGUN, backend, host, kwargs`` is the first, and says what to make the instance with;
- ``ASKED, number, query, max_ongoing_requests, candidates, timeout_s`` is a question; each
  candidate is a replica's (tag, host, ongoing queries, models);
- ``ROUTED, number, tag``: the query of that question went to that replica.

Those that go are JSON: ``{}`` when the instance is made, then to each question its number and
``ranks``, or ``error``.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.requests import Request

from greenroom.actors.messages.queries import HttpCall, Query, arguments_of, call_of
from greenroom.actors.plugins.program import ASKED, HEADER, ROUTED, begin, encoded, report_error
from greenroom.actors.replica.context import DeploymentID, ReplicaID
from greenroom.actors.replica.responses import Body, make_scope
from greenroom.core.validation import explain_missing

MAX_REMEMBERED = 10_000  # questions whose query may still be routed


# --- What users see -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunningReplica:
    """One replica as it was when the question was asked; ``node_id`` is the name of its host."""

    replica_id: ReplicaID
    node_id: str
    max_ongoing_requests: int
    num_ongoing_requests: int  # of this host's callers
    multiplexed_model_ids: frozenset[str] = frozenset()

    hints: ClassVar[Mapping[str, str]] = {
        "actor_id": "use replica_id",
        "availability_zone": "use node_id",
        "get_queue_len": "use num_ongoing_requests",
        "is_cross_language": "it is always Python",
        "routing_stats": "keep what on_request_routed tells: replicas report nothing to routers",
    }
    if not TYPE_CHECKING:
        __getattr__ = explain_missing

    @property
    def has_room(self) -> bool:
        """Whether it would take one more query."""
        return self.num_ongoing_requests < self.max_ongoing_requests


@dataclass(frozen=True, kw_only=True)
class RequestMetadata:
    """What is known of a query without reading it."""

    request_id: str
    app_name: str
    call_method: str = "__call__"
    route: str = ""  # the path of an HTTP request
    http_method: str = ""
    multiplexed_model_id: str = ""

    @property
    def is_http_request(self) -> bool:
        """Whether it came over HTTP, and not by a handle."""
        return bool(self.http_method)


@dataclass(eq=False)
class PendingRequest:
    """A query that is to be routed.

    ``args`` and ``kwargs`` are those of the call; of an HTTP request ``args`` has one Starlette
    request, whose body is empty where it is so large that it follows its query.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    metadata: RequestMetadata
    created_at: float = field(default_factory=time.time)


class RequestRouter:
    """Base of request routers: override :meth:`choose_replicas`, and what else you need.

    ``initialize_state`` is called first, with the ``request_router_kwargs``. An instance hears of
    the queries of one proxy only, and its state ends with its process.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "apply_locality_routing": "use rank_replicas_via_locality of LocalityMixin",
        "apply_multiplex_routing": "use rank_replicas_via_multiplex of MultiplexMixin",
    }
    if not TYPE_CHECKING:
        __getattr__ = explain_missing

    def __init__(self, deployment_id: DeploymentID, self_node_id: str) -> None:
        self.deployment_id = deployment_id
        self.self_node_id = self_node_id  # the proxy's host
        self.curr_replicas: dict[ReplicaID, RunningReplica] = {}

    @property
    def app_name(self) -> str:
        """The application of the deployment; "" for a backend that belongs to none."""
        return self.deployment_id.app_name

    def initialize_state(self, **kwargs: Any) -> None:
        """Prepare, before the first question."""
        if kwargs:
            names = ", ".join(kwargs)
            raise TypeError(f"request_router_kwargs has {names}; override initialize_state")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Hear of replicas that have come or gone, before the question that has the new ones."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[Sequence[RunningReplica]]:
        """Return ranks of replicas; of the first rank with room, the least loaded gets the query.

        Where none of them has room, or none is named, any other replica may get it.
        """
        raise NotImplementedError

    def select_available_replicas(
        self, candidates: Iterable[RunningReplica] | None = None
    ) -> list[RunningReplica]:
        """Return those with room of the candidates, or of all replicas."""
        among = self.curr_replicas.values() if candidates is None else candidates
        return [replica for replica in among if replica.has_room]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Hear which replica a query went to; after a retry, again. ``result`` is None."""


class FIFOMixin:
    """Queries are routed first in, first out: as always here."""


class LocalityMixin:
    """Ranks replicas by host."""

    self_node_id: str

    def rank_replicas_via_locality(
        self, replicas: Iterable[RunningReplica]
    ) -> list[list[RunningReplica]]:
        """Return those on the proxy's host, then the others."""
        near: list[RunningReplica] = []
        far: list[RunningReplica] = []
        for replica in replicas:
            (near if replica.node_id == self.self_node_id else far).append(replica)
        return [near, far]


class MultiplexMixin:
    """Ranks replicas by multiplexed models."""

    def rank_replicas_via_multiplex(
        self, replicas: Iterable[RunningReplica], multiplexed_model_id: str
    ) -> list[list[RunningReplica]]:
        """Return those that have the model, then those with the fewest models, then the others."""
        having: list[RunningReplica] = []
        others: list[RunningReplica] = []
        for replica in replicas:
            has_model = multiplexed_model_id in replica.multiplexed_model_ids
            (having if has_model else others).append(replica)
        fewest = min((len(replica.multiplexed_model_ids) for replica in others), default=0)
        first = [each for each in others if len(each.multiplexed_model_ids) == fewest]
        return [having, first, [each for each in others if each not in first]]


# --- In the child process -------------------------------------------------------------------------


def main(*given: str) -> int:
    """Answer questions until the other end closes; return the exit code."""
    begun = begin(*given)
    if begun is None:
        return 1
    connection, load = begun
    return asyncio.run(_Asker(load).run(connection))


class _Asker:
    """Asks one instance of a user's class."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._deployment = DeploymentID("", "")
        self._router: Any = None
        self._known: frozenset[str] = frozenset()  # replicas
        self._pending: OrderedDict[int, PendingRequest] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, connection: socket.socket) -> int:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                kind, *given = pickle.loads(await reader.readexactly(length))
                if kind == ASKED:
                    task = asyncio.create_task(self._answer(writer, *given))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif kind == ROUTED:
                    self._routed(*given)
                else:
                    self._begin(*given)
                    writer.write(encoded({}))
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        except Exception as error:
            report_error(error)
            return 1

    def _begin(self, backend: str, host: str, kwargs: dict[str, Any]) -> None:
        application, _, name = backend.partition("#")
        self._deployment = DeploymentID(name or backend, application if name else "")
        self._router = self._load()(self._deployment, host)
        self._router.initialize_state(**kwargs)

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        number: int,
        query: Query,
        limit: int,
        candidates: Iterable[tuple[str, str, int, tuple[str, ...]]],
        timeout_s: float,
    ) -> None:
        replicas = {
            tag: RunningReplica(
                replica_id=ReplicaID(tag, self._deployment),
                node_id=host,
                max_ongoing_requests=limit,
                num_ongoing_requests=ongoing,
                multiplexed_model_ids=frozenset(models),
            )
            for tag, host, ongoing, models in candidates
        }
        answer: dict[str, Any]
        timeout = asyncio.timeout(timeout_s)
        try:
            async with timeout:
                answer = {"ranks": await self._ranks(number, query, replicas)}
        except (Exception, SystemExit) as error:
            if timeout.expired():
                return  # the query has gone on without it
            answer = {"error": report_error(error)}
        writer.write(encoded(answer, number=number))

    async def _ranks(
        self, number: int, query: Query, replicas: Mapping[str, RunningReplica]
    ) -> list[list[str]]:
        router, candidates = self._router, list(replicas.values())
        router.curr_replicas = {each.replica_id: each for each in candidates}
        if replicas.keys() != self._known:
            self._known = frozenset(replicas)
            router.update_replicas(candidates)
        pending = self._pending[number] = self._request(query)
        if len(self._pending) > MAX_REMEMBERED:
            self._pending.popitem(last=False)
        ranks = await router.choose_replicas(candidates, pending)
        if not isinstance(ranks, list | tuple):
            raise TypeError(f"choose_replicas returned {ranks!r:.200}; expected lists of replicas")
        return [list(dict.fromkeys(_tag(each, replicas) for each in rank)) for rank in ranks]

    def _request(self, query: Query) -> PendingRequest:
        metadata = RequestMetadata(
            request_id=query.request_id,
            app_name=self._deployment.app_name,
            call_method=query.call_method or "__call__",
            route=query.path,
            http_method=query.http_method,
            multiplexed_model_id=query.multiplexed_model_id,
        )
        call = call_of(query)
        if isinstance(call, HttpCall):
            request = Request(make_scope(call, "/"), Body(call.body, None).receive)
            return PendingRequest([request], {}, metadata)
        args, kwargs = arguments_of(call)
        return PendingRequest(list(args), kwargs, metadata)

    def _routed(self, number: int, tag: str) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            try:
                replica_id = ReplicaID(tag, self._deployment)
                self._router.on_request_routed(pending, replica_id, None)
            except Exception as error:
                report_error(error)  # it is in the log


def _tag(replica: Any, replicas: Mapping[str, RunningReplica]) -> str:
    """Return the tag of a replica that was named, if it is one of these."""
    tag = getattr(getattr(replica, "replica_id", None), "unique_id", None)
    if tag not in replicas:
        raise ValueError(f"choose_replicas returned {replica!r:.200}, which is no candidate")
    return str(tag)
