"""Handles: how Python code, in replicas and outside, calls a deployment."""

from __future__ import annotations

import pickle
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from typing_extensions import TypedDict, Unpack

from greenroom.actors import query_client, user_context
from greenroom.actors.messages import PythonCall
from greenroom.actors.query_client import PendingQuery, QueryClient
from greenroom.actors.user_context import Origin, RunningQuery
from greenroom.core.errors import InvalidRequestError, RequestCancelledError
from greenroom.serve.packing import pack_arguments
from greenroom.serve.response_generator import DeploymentResponseGenerator
from greenroom.serve.responses import (
    DeploymentResponse,
    R_co,
    in_event_loop,
    send,
    take_inputs,
)

__all__ = ["DeploymentHandle", "DeploymentResponse", "DeploymentResponseGenerator"]


@dataclass(frozen=True, slots=True)
class HandleOptions:
    """How a handle makes its calls."""

    method_name: str = "__call__"
    shard_key: str | None = None
    retryable: bool | None = None  # None leaves it to the endpoint and its deployment
    multiplexed_model_id: str = ""
    stream: bool = False


class _CallChanges(TypedDict, total=False):
    shard_key: str | None
    retryable: bool | None
    multiplexed_model_id: str


class DeploymentHandle(Generic[R_co]):
    """Calls a deployment's replicas: ``handle.remote(x)``, or ``handle.method.remote(x)``.

    It never changes, can be pickled, and finds its way from any process: in a replica by the
    replica's proxy, elsewhere by the process's connection to the local system. With ``app_name``
    None, ``deployment_name`` is the name of an endpoint.
    """

    __slots__ = ("_client", "_options", "app_name", "deployment_name")

    def __init__(
        self,
        deployment_name: str,
        app_name: str | None = "default",
        *,
        options: HandleOptions | None = None,
        client: QueryClient | None = None,
    ) -> None:
        self.deployment_name = deployment_name
        self.app_name = app_name
        self._options = options or HandleOptions()
        self._client = client

    @property
    def endpoint(self) -> str:
        """The endpoint that the calls go to."""
        if self.app_name is None:
            return self.deployment_name
        return f"{self.app_name}#{self.deployment_name}"

    @overload
    def options(
        self, *, method_name: str = ..., stream: Literal[True], **changes: Unpack[_CallChanges]
    ) -> StreamingHandle: ...
    @overload
    def options(
        self, *, method_name: str, stream: Literal[False] = ..., **changes: Unpack[_CallChanges]
    ) -> DeploymentHandle: ...
    @overload
    def options(
        self, *, stream: Literal[False] = ..., **changes: Unpack[_CallChanges]
    ) -> DeploymentHandle[R_co]: ...

    def options(self, **changes: Any) -> DeploymentHandle[Any]:
        """Return a handle with some of these changed.

        ``method_name``: which method is called. ``shard_key``: calls with the same key go to the
        same backend. ``retryable``: whether a call may be run again when its replica died under
        it; None leaves it to the endpoint and the deployment, without whose word it may not.
        ``multiplexed_model_id``: which model it is for; a replica that has it is preferred.
        ``stream``: the method is a generator, whose values come one by one.
        """
        if problems := _problems(changes):
            raise InvalidRequestError(f"bad options of a handle: {'; '.join(problems)}")
        return self._with(replace(self._options, **changes))

    def remote(self, *args: Any, **kwargs: Any) -> DeploymentResponse[R_co]:
        """Call the deployment; returns at once.

        It returns a DeploymentResponse; of a handle with ``options(stream=True)``, a
        DeploymentResponseGenerator.

        A DeploymentResponse among the arguments is waited for, in the background, and its value
        passed. A call made by a replica's code belongs to the query that it runs: it has the same
        request id, ends by the same deadline, and is cancelled with it. InvalidRequestError when
        the arguments cannot be pickled; NotRunningError when there is no system to call;
        RequestCancelledError in sync code whose query was cancelled.
        """
        if user_context.is_cancelled() and not in_event_loop():
            # Sync code cannot be stopped anywhere else. Async code was: it cleans up.
            raise RequestCancelledError(f"the query that calls {self._what()} was cancelled")
        client = self._client or query_client.current() or _own_client()
        origin = user_context.origin()
        values, named, inputs = take_inputs(args, kwargs)
        arguments = pack_arguments(self._what(), values, named)
        pending = client.pending(origin.request_id or secrets.token_hex(16))
        send(pending, inputs, partial(self._submit, client, pending, origin, arguments))
        if origin.query is not None:
            _belong(pending, origin.query)
        make: Any = DeploymentResponseGenerator if self._options.stream else DeploymentResponse
        response: DeploymentResponse[R_co] = make(self._what(), pending)
        return response

    def _submit(
        self,
        client: QueryClient,
        pending: PendingQuery,
        origin: Origin,
        arguments: bytes,
        inputs: tuple[bytes, ...],
    ) -> None:
        method = self._options.method_name
        call = PythonCall(method, arguments, inputs, self._options.stream)
        deadline_at = origin.deadline_at
        client.submit(
            pending,
            endpoint=self.endpoint,
            call_method="" if method == "__call__" else method,
            call=pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL),
            timeout_s=None if deadline_at is None else deadline_at - time.monotonic(),
            retryable=self._options.retryable,
            shard_key=self._options.shard_key,
            for_shadow=origin.for_shadow,
            multiplexed_model_id=self._options.multiplexed_model_id,
        )

    def _what(self) -> str:
        method = self._options.method_name
        return self.endpoint if method == "__call__" else f"{self.endpoint}.{method}"

    def _with(self, options: HandleOptions) -> DeploymentHandle:
        return DeploymentHandle(
            self.deployment_name, self.app_name, options=options, client=self._client
        )

    def __getattr__(self, name: str) -> DeploymentHandle:
        if name.startswith("_"):  # pickle, copy and others ask for such
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._with(replace(self._options, method_name=name))

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: a plain call would have to block."""
        raise TypeError(f"call {self._what()} with .remote(...), not directly")

    def __reduce__(self) -> Any:
        return _restore, (self.deployment_name, self.app_name, self._options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeploymentHandle) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.deployment_name, self.app_name, self._options))

    def __repr__(self) -> str:
        return f"DeploymentHandle({self._what()!r})"


if TYPE_CHECKING:

    class StreamingHandle(DeploymentHandle[Any]):
        """A handle with ``options(stream=True)``, as type checkers see it."""

        def remote(  # type: ignore[override]
            self, *args: Any, **kwargs: Any
        ) -> DeploymentResponseGenerator: ...
        def __getattr__(self, name: str) -> StreamingHandle: ...


def _restore(
    deployment_name: str, app_name: str | None, options: HandleOptions
) -> DeploymentHandle:
    return DeploymentHandle(deployment_name, app_name, options=options)


def _belong(call: PendingQuery, query: RunningQuery) -> None:
    query.made(call)
    call.when_over(lambda: query.over(call))


def _own_client() -> QueryClient:
    # Loaded only here, because replicas never need it and pay for what they import.
    from greenroom.serve import session  # noqa: PLC0415

    return session.current().connect().queries


def _problems(changes: dict[str, Any]) -> list[str]:
    problems = []
    for name, value in changes.items():
        if name not in HandleOptions.__dataclass_fields__:
            known = ", ".join(HandleOptions.__dataclass_fields__)
            problems.append(f"{name}: no such option; there are {known}")
        elif problem := _value_problem(name, value):
            problems.append(f"{name}={value!r}: {problem}")
    return problems


_EXPECTED: dict[str, tuple[tuple[type, ...], str]] = {
    "stream": ((bool,), "must be True or False"),
    "retryable": ((bool, type(None)), "must be True, False or None"),
    "multiplexed_model_id": ((str,), "must be a string"),
    "shard_key": ((str, type(None)), "must be a string or None"),
}


def _value_problem(name: str, value: Any) -> str | None:
    if name in _EXPECTED:
        kinds, problem = _EXPECTED[name]
        return None if isinstance(value, kinds) else problem
    if not isinstance(value, str) or not value:
        return "must be the name of a method"
    if value.startswith("_") and value != "__call__":
        return "private methods cannot be called through a handle"
    return None
