"""Applications in the calling process, without actors: for unit tests and debuggers.

Each deployment runs as in a replica: its code is pickled and unpickled, and so is every call; its
async code has a thread and event loop of its own. What a system adds is missing: replicas, limits,
time limits, HTTP, restarts. Handles given to constructors, and those made anew, find the other
deployments here.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from greenroom.actors.caller import client as query_client
from greenroom.actors.caller.client import PendingQuery, QueryClient
from greenroom.actors.caller.streams import Sender, Stream
from greenroom.actors.messages.queries import (
    MORE,
    Answer,
    Assignment,
    FailedAnswer,
    Query,
    StreamBegun,
    exception_of,
)
from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.context import Headers, ReplicaContext, Reply
from greenroom.actors.replica.user_code import Failure, UserCode
from greenroom.actors.runtime.processes import this_process
from greenroom.core.errors import DeployFailedError, UnknownNameError
from greenroom.core.operations import DeploymentSpec
from greenroom.serve.build import Built
from greenroom.serve.handle import DeploymentHandle

STOP_TIMEOUT_S = 5.0


class _Local(NamedTuple):
    user_code: UserCode
    context: Context  # which says what replica it stands for


class LocalClient(QueryClient):
    """Runs each call in the deployment's own loop, here."""

    def __init__(self) -> None:
        super().__init__(itertools.count(1).__next__)
        self.applications: dict[str, Any] = {}  # as a report has them
        self._deployments: dict[str, _Local] = {}  # by endpoint
        self._lock = threading.Lock()
        self._replies = WeakValueDictionary[int, _LocalReply]()  # by the call's id

    def add(self, application: str, spec: DeploymentSpec) -> None:
        """Load a deployment; raises what its constructor raises."""
        endpoint = f"{application}#{spec.name}"
        context = ReplicaContext(
            app_name=application,
            deployment=spec.name,
            replica_tag=f"{endpoint}#local",
            backend=endpoint,
            version=spec.version,
        )
        user_code = UserCode()
        user_code.start()
        failure = _as(context).run(user_code.load, spec.code, spec.config.user_config).result()
        if failure is not None:
            user_code.end()
            raise _error_of(failure, endpoint)
        context = replace(context, servable_object=user_code.servable.instance)
        with self._lock:
            self._deployments[endpoint] = _Local(user_code, _as(context))

    def check(self, built: Built) -> None:
        """Raise UnknownNameError unless there is all that the application has handles of."""
        for application, deployment in built.needs:
            endpoint = DeploymentHandle(deployment, application).endpoint
            if endpoint not in self._deployments:
                raise UnknownNameError(f"no deployment {endpoint!r} runs in this process")

    def remove_all(self, application: str) -> None:
        """Close an application's deployments; those that call others first."""
        self.applications.pop(application, None)
        with self._lock:
            names = [name for name in self._deployments if name.startswith(f"{application}#")]
            gone = [self._deployments.pop(name).user_code for name in reversed(names)]
        for user_code in gone:
            with contextlib.suppress(TimeoutError):  # it is stuck in user code
                user_code.close().exception(STOP_TIMEOUT_S)
            user_code.end()

    def send(self, query: Query, pending: PendingQuery) -> None:
        """See :meth:`QueryClient.send`."""
        with self._lock:  # so that the loop has not ended yet
            local = self._deployments.get(str(query.endpoint))
            if local is not None:
                run, context = local.user_code.run, local.context.copy()
                reply = self._replies[pending.id] = _LocalReply(pending, query, local.user_code)
                local.user_code.loop.call_soon_threadsafe(run, reply, context=context)
        if local is None:
            text = f"there is no endpoint {query.endpoint!r} in local testing mode"
            pending.answered(FailedAnswer(pending.id, "DeploymentUnavailableError", text))

    def cancel(self, pending: PendingQuery) -> None:
        """See :meth:`QueryClient.cancel`."""
        if (reply := self._replies.get(pending.id)) is not None:
            reply.stop()


class _LocalReply(Reply):
    """Gives the answer to the call that waits for it."""

    __slots__ = ("__weakref__", "_is_answered", "_pending", "_stream", "_user_code", "sender")

    def __init__(self, pending: PendingQuery, query: Query, user_code: UserCode) -> None:
        assignment = Assignment(
            ticket=pending.id,
            query=query,
            caller=b"this process",
            caller_incarnation="",
            endpoint=str(query.endpoint),
            route="/",
            timeout_s=query.timeout_s,
        )
        super().__init__(assignment, None)
        self._pending = pending
        self._user_code = user_code
        self._is_answered = False
        self.sender: Sender | None = None
        self._stream: Stream | None = None

    def begin(self, status: int, headers: Headers) -> None:
        """Answer the call with a stream."""
        self.check_wanted()
        query_id = self._pending.id
        begun = StreamBegun(query_id, status, headers, this_process())
        self._stream = stream = Stream(begun, self)
        self.sender = Sender(query_id, stream.arrived, self._user_code.loop.call_soon)
        self._pending.answered(stream)

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next part."""
        if self.sender is not None:
            await self.sender.send(data, ends)

    def answer(self, answer: Answer) -> None:
        """Pass the answer on."""
        self._is_answered = True
        if self._stream is None:
            self._pending.answered(answer)
        else:
            self._stream.ended(answer)

    def taken(self, size: int) -> None:
        """Tell the generator that so much was taken."""
        if self.sender is not None:
            self._on_loop(partial(self.sender.taken, size))

    def stop(self) -> None:
        """Cancel the generator."""
        self._on_loop(partial(self._user_code.cancel, self))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: nothing is sent any more
            self._user_code.loop.call_soon_threadsafe(callback)

    def end(self) -> None:
        """Note that user code has returned; there are no slots."""
        self.has_ended = True
        if not self._is_answered:
            text = f"{self.assignment.endpoint} was cancelled, or shut down while the call ran"
            self.answer(FailedAnswer(self._pending.id, "DeploymentUnavailableError", text))


_client: LocalClient | None = None


def run(built: Built) -> DeploymentHandle:
    """Bring one application up here, in place of an earlier one of its name."""
    global _client  # noqa: PLW0603  # one per process, as the connection is
    if _client is None:
        _client = LocalClient()
        query_client.install(_client)
    client = _client
    (application,) = built.applications
    name = application.name
    client.check(built)
    client.remove_all(name)
    client.applications[name] = {
        "ingress": application.ingress,
        "deployments": {spec.name: {} for spec in built.deployments},
    }
    try:
        for spec in built.deployments:
            client.add(name, spec)
    except BaseException:
        client.remove_all(name)
        raise
    return DeploymentHandle(application.ingress, name, client=client)


def report() -> dict[str, Any] | None:
    """Return what runs here, as a system's report has it; None where nothing does."""
    return {"applications": _client.applications} if _client and _client.applications else None


def delete(name: str) -> bool:
    """Close an application that runs here; False when none does."""
    if _client is None or name not in _client.applications:
        return False
    _client.remove_all(name)
    return True


def shutdown() -> None:
    """Close all that runs here, and let handles find a real system again."""
    global _client
    client, _client = _client, None
    if client is None:
        return
    query_client.install(None)
    for name in list(client.applications):
        client.remove_all(name)


def _as(replica: ReplicaContext) -> Context:
    context = copy_context()
    context.run(user_context.local_replica.set, replica)
    return context


def _error_of(failure: Failure, what: str) -> BaseException:
    error = exception_of(failure.exception)
    if error is None:
        return DeployFailedError(f"{what} could not start: {failure.text}")
    error.add_note(f"in the constructor of {what}:\n{failure.traceback.rstrip()}")
    return error
