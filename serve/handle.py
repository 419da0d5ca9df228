"""Handles: how Python code, in replicas and outside, calls a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from functools import partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypedDict,
    Unpack,
    overload,
)

from pydantic import AfterValidator, ConfigDict
from typing_extensions import TypeVar

from greenroom.actors.caller import client as query_client
from greenroom.actors.caller.client import PendingQuery, QueryClient
from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import (
    Answer,
    FailedAnswer,
    Input,
    PythonCall,
    Query,
    StreamEnded,
    ValueAnswer,
    exception_of,
    packed,
)
from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.context import Origin, RunningQuery
from greenroom.actors.runtime import tracing
from greenroom.core.errors import (
    GreenroomError,
    MethodNotAllowedError,
    RequestCancelledError,
    UserCodeError,
    error_from,
)
from greenroom.core.validation import Settings, validated
from greenroom.serve.admin.checks import check_timeout
from greenroom.serve.code.packing import pack_arguments

# --- From an answer to the value or exception that the caller gets --------------------------------


class Outcome(NamedTuple):
    """How a call ended: with a value, or with an exception to raise."""

    value: Any = None
    error: BaseException | None = None


def decode(answer: Answer | Stream, what: str) -> Outcome:
    """Unpickle an answer of ``what``; runs user code, so never on a message loop."""
    if isinstance(answer, FailedAnswer):
        return Outcome(error=_error_of(answer, what))
    if not isinstance(answer, ValueAnswer):
        return Outcome(error=GreenroomError(f"{what} answered a call with no value"))
    try:
        return Outcome(pickle.loads(answer.value))
    except Exception as error:  # the user's types may refuse in any way
        text = f"the result of {what} cannot be unpickled here: {type(error).__name__}: {error}"
        failed = UserCodeError(text)
        failed.__cause__ = error
        return Outcome(error=failed)


def _error_of(answer: FailedAnswer, what: str) -> BaseException:
    error = exception_of(answer.exception) or _described(answer)
    if answer.traceback:
        error.add_note(f"in {what}, on its replica:\n{answer.traceback.rstrip()}")
    return error


def _described(answer: FailedAnswer) -> GreenroomError:
    error = error_from(answer.kind, answer.text)
    if answer.retry_after_s is not None:
        error.retry_after_s = answer.retry_after_s
    if isinstance(error, MethodNotAllowedError):
        error.allowed = answer.allowed
    return error


# --- Responses ------------------------------------------------------------------------------------
#
# Theory of operation. A response holds the future of its answer. The message loop of the process
# completes that future, and only :meth:`DeploymentResponse.cancel` cancels it. The answer is
# unpickled once, by the thread that asks for it and never by the message loop, because unpickling
# runs user code. A call with responses among its arguments is pickled at once and sent when all of
# them have arrived. Their values are passed on still pickled, and are unpickled by the replica.

R_co = TypeVar("R_co", covariant=True, default=Any)  # what the call returns


class _Response:
    """What is known of a call whether its answer is one value or many."""

    __slots__ = ("_cancelled", "_pending", "_what")

    def __init__(self, what: str, pending: PendingQuery) -> None:
        self._what = what
        self._pending = pending
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """The request id of the call, which its logs show."""
        return self._pending.request_id

    def cancel(self) -> None:
        """Cancel the call, wherever it is; it does nothing when the answer is here already.

        Async code on the replica gets asyncio.CancelledError; sync code runs on unheard. Waiting
        for a value then raises RequestCancelledError.
        """
        self._cancelled = True
        self._pending.cancel()

    def cancelled(self) -> bool:
        """Return whether :meth:`cancel` was called, even if it came too late."""
        return self._cancelled

    def _cancelled_error(self) -> RequestCancelledError:
        text = f"the call to {self._what} was cancelled (request {self.request_id})"
        return RequestCancelledError(text)


class DeploymentResponse(_Response, Generic[R_co]):
    """The result of a handle's call; await it, or wait for it with :meth:`result`.

    Given as an argument to another handle's call, its value is what arrives there; the caller does
    not wait. Safe to use from several threads and event loops.
    """

    __slots__ = ("_outcome",)

    def __init__(self, what: str, pending: PendingQuery) -> None:
        super().__init__(what, pending)
        self._outcome: Outcome | None = None

    def result(self, timeout_s: float | None = None) -> R_co:
        """Wait for the value; raises what user code raised, or TimeoutError after ``timeout_s``.

        The call goes on after a TimeoutError, and can be waited for again. RuntimeError inside a
        running event loop, which it would block.
        """
        if in_event_loop():
            raise RuntimeError(
                f"result() of {self._what} would block the running event loop; await the response"
            )
        check_timeout("timeout_s", timeout_s)
        with contextlib.suppress(CancelledError):
            try:
                self._pending.future.exception(timeout_s)
            except TimeoutError:
                text = f"{self._what} has not answered within {timeout_s:g} s"
                raise TimeoutError(text) from None
        return self._take()

    def __await__(self) -> Generator[Any, None, R_co]:
        if not self._pending.future.done():
            yield from self._wait().__await__()
        return self._take()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the response of {self._what} must be an argument of its own, not inside another "
            "object; or wait for it and pass its value"
        )

    def __repr__(self) -> str:
        state = "done" if self._pending.future.done() else "pending"
        return f"<DeploymentResponse of {self._what}, {state}, request {self.request_id}>"

    def _take(self) -> R_co:
        value: Any
        value, error = self._resolve()
        if error is not None:
            raise error.with_traceback(None)  # or each wait would add its frames
        taken: R_co = value
        return taken

    def _resolve(self) -> Outcome:
        """Return how the call ended; only once the answer is there."""
        if self._outcome is None:
            try:
                self._outcome = decode(self._pending.future.result(), self._what)
            except CancelledError:
                self._outcome = Outcome(error=self._cancelled_error())
            except _InputFailedError as failure:
                self._outcome = failure.response._resolve()
            except Exception as error:  # it could not be sent when its arguments had come
                self._outcome = Outcome(error=error)
        return self._outcome

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        # Not asyncio.wrap_future: when the task is cancelled, it would cancel the answer's future
        # and leave the query running.
        self._pending.future.add_done_callback(lambda _: wake(loop, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise


class _InputFailedError(Exception):
    """A call was not sent, because a response among its arguments is no value."""

    def __init__(self, response: DeploymentResponse) -> None:
        super().__init__(response)
        self.response = response


def take_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[DeploymentResponse]]:
    """Return the arguments with an Input for each response among them, and the responses."""
    inputs: list[DeploymentResponse] = []

    def taken(value: Any) -> Any:
        if not isinstance(value, DeploymentResponse):
            return value
        inputs.append(value)
        return Input(len(inputs) - 1)

    return tuple(map(taken, args)), {name: taken(value) for name, value in kwargs.items()}, inputs


def send(
    pending: PendingQuery,
    inputs: list[DeploymentResponse],
    submit: Callable[[tuple[bytes, ...]], None],
) -> None:
    """Send a call with what its inputs returned, at once or when they have come.

    It raises what ``submit`` raises at once; what comes later is the call's outcome.
    """
    if inputs:
        _advance(pending, inputs, submit)
    else:
        submit(())


def _advance(
    pending: PendingQuery,
    inputs: list[DeploymentResponse],
    submit: Callable[[tuple[bytes, ...]], None],
) -> None:
    for response in inputs:
        future = response._pending.future
        if not future.done():
            future.add_done_callback(lambda _: _advance(pending, inputs, submit))
            return
    if pending.future.cancelled():
        return
    try:
        submit(tuple(map(_value_of, inputs)))
    except Exception as error:
        pending.failed(error)


def _value_of(response: DeploymentResponse) -> bytes:
    """Return what a call has returned, as it came."""
    future = response._pending.future
    if not future.cancelled() and future.exception() is None:
        answer = future.result()
        if isinstance(answer, ValueAnswer):
            return answer.value
    raise _InputFailedError(response)


def wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """Wake a task of that loop; from any thread."""

    def now() -> None:
        if not waiter.done():
            waiter.set_result(None)

    if asyncio._get_running_loop() is loop:  # in a replica answers arrive on user code's loop
        now()
        return
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile; nothing waits
        loop.call_soon_threadsafe(now)


def in_event_loop() -> bool:
    """Return whether the calling thread runs an event loop, which must not be blocked."""
    return asyncio._get_running_loop() is not None


# --- Streamed responses, for calls with ``stream=True`` -------------------------------------------

V_co = TypeVar("V_co", covariant=True, default=Any)  # what the generator yields


class DeploymentResponseGenerator(_Response, Generic[V_co]):
    """The values of a generator in a replica, as they are made: for ``for`` and ``async for``.

    The generator is at most 768 KiB ahead of what was taken. It ends when this is closed, or
    dropped before its end, and with the query on whose behalf it was called. What it raises is
    raised here, after the values before. For one thread or task at a time.
    """

    __slots__ = ("_is_over", "_stream")

    def __init__(self, what: str, pending: PendingQuery) -> None:
        super().__init__(what, pending)
        self._stream: Stream | None = None  # once it has begun
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> V_co:
        if in_event_loop():
            raise RuntimeError(
                f"a for loop over {self._what} would block the running event loop; use async for"
            )
        while True:
            woken = threading.Event()
            pickled = self._take(woken.set)
            if pickled is not None:
                return self._value(pickled)
            if self._is_over:
                raise StopIteration
            woken.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> V_co:
        loop = asyncio.get_running_loop()
        while True:
            waiter: asyncio.Future[None] = loop.create_future()
            pickled = self._take(partial(wake, loop, waiter))
            if pickled is not None:
                return self._value(pickled)
            if self._is_over:
                raise StopAsyncIteration
            try:
                await waiter
            except asyncio.CancelledError:
                self.close()
                raise

    def close(self) -> None:
        """Want no more values; ends the generator, and iteration here."""
        if not self._is_over:
            self._is_over = True
            self._pending.cancel()

    async def aclose(self) -> None:
        """Do what :meth:`close` does."""
        self.close()

    def __del__(self) -> None:
        self.close()  # else it would wait for its reader, and keep its slot

    def __await__(self) -> Any:
        raise TypeError(f"the response of {self._what} is a stream; use async for")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the response of {self._what} is a stream, which cannot be passed on; pass its values"
        )

    def __repr__(self) -> str:
        state = "over" if self._is_over else "pending" if self._stream is None else "streaming"
        of = f"{self._what}, {state}, request {self.request_id}"
        return f"<DeploymentResponseGenerator of {of}>"

    def _take(self, woken: Callable[[], None]) -> bytes | None:
        """Return the next value; None when it is over, or ``woken`` will be called."""
        if self._is_over:
            return None
        if self._stream is None and not self._begin(woken):
            return None
        stream = self._stream
        if stream is None:
            return None
        pickled = stream.take_value(woken)
        if pickled is None and (end := stream.end) is not None:
            self._end(end)
        return pickled

    def _begin(self, woken: Callable[[], None]) -> bool:
        """Take the stream, once it has begun; raise what came in its place."""
        future = self._pending.future
        if not future.done():
            future.add_done_callback(lambda _: woken())
            return False
        try:
            answer = future.result()
        except CancelledError:
            answer = FailedAnswer(0, "RequestCancelledError", "cancelled")
        except Exception:  # it could not be sent when its arguments had come
            self._is_over = True
            raise
        if isinstance(answer, Stream):
            self._stream = answer
        else:
            self._end(answer)
        return True

    def _end(self, end: Answer) -> None:
        """Stop here; raise what has ended the stream, unless that was its end."""
        self._is_over = True
        if self._cancelled or getattr(end, "kind", "") == "RequestCancelledError":
            raise self._cancelled_error()
        if isinstance(end, FailedAnswer):
            error = decode(end, self._what).error
            raise error or GreenroomError(f"{self._what} has failed")
        if not isinstance(end, StreamEnded):
            raise GreenroomError(f"{self._what} answered a call for a stream with a whole value")

    def _value(self, pickled: bytes) -> V_co:
        value: V_co
        value, error = decode(ValueAnswer(0, pickled), self._what)
        if error is not None:
            self.close()
            raise error
        return value


def _is_callable_name(name: str) -> str:
    if not name or (name[0] == "_" and name != "__call__"):
        raise ValueError("must be the name of a public method")
    return name


class HandleOptions(Settings):
    """How a handle makes its calls."""

    model_config = ConfigDict(strict=True)

    method_name: Annotated[str, AfterValidator(_is_callable_name)] = "__call__"
    shard_key: str | None = None
    retryable: bool | None = None  # None leaves it to the endpoint and its deployment
    multiplexed_model_id: str = ""
    session_id: str = ""
    stream: bool = False


class _CallChanges(TypedDict, total=False):
    shard_key: str | None
    retryable: bool | None
    multiplexed_model_id: str
    session_id: str


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
        return f"{user_context.called_as(self.app_name)}#{self.deployment_name}"

    @overload
    def options(
        self, *, method_name: str = ..., stream: Literal[True], **changes: Unpack[_CallChanges]
    ) -> _StreamingHandle: ...
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
        ``session_id``: calls with the same one go to the same replica while it runs; they wait
        until it has room.
        ``stream``: the method is a generator, whose values come one by one.
        """
        return self._with(validated(HandleOptions, {**dict(self._options), **changes}))

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
        span = None
        if tracing.active is not None:
            span = tracing.active.call(f"call {self._what()}", pending.request_id)
            pending.when_over(partial(_end_span, span, pending))
        send(pending, inputs, partial(self._submit, client, pending, origin, arguments, span))
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
        span: tracing.Span | None,
        inputs: tuple[bytes, ...],
    ) -> None:
        method = self._options.method_name
        trace = None if span is None else span.carried()
        call = PythonCall(method, arguments, inputs, self._options.stream, trace)
        deadline_at = origin.deadline_at
        query = Query(
            pending.id,
            call=packed(call),
            request_id=pending.request_id,
            endpoint=self.endpoint,
            path="",
            http_method="",
            call_method="" if method == "__call__" else method,
            timeout_s=None if deadline_at is None else deadline_at - time.monotonic(),
            retryable=self._options.retryable,
            shard_key=self._options.shard_key,
            for_shadow=origin.for_shadow,
            multiplexed_model_id=self._options.multiplexed_model_id,
            session_id=self._options.session_id,
        )
        client.send(query, pending)

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
        return self._with(self._options.model_copy(update={"method_name": name}))

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: a plain call would have to block."""
        raise TypeError(f"call {self._what()} with .remote(...), not directly")

    def __reduce__(self) -> Any:
        # By names alone: what is stored is for another release, too.
        options = self._options.model_dump(exclude_defaults=True)
        return _restore, (self.deployment_name, self.app_name, options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeploymentHandle) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.deployment_name, self.app_name, self._options))

    def __repr__(self) -> str:
        return f"DeploymentHandle({self._what()!r})"


if TYPE_CHECKING:

    class _StreamingHandle(DeploymentHandle[Any]):
        """A handle with ``options(stream=True)``, as type checkers see it."""

        def remote(  # type: ignore[override]
            self, *args: Any, **kwargs: Any
        ) -> DeploymentResponseGenerator: ...
        def __getattr__(self, name: str) -> _StreamingHandle: ...


def _restore(
    deployment_name: str, app_name: str | None, options: dict[str, Any]
) -> DeploymentHandle:
    return DeploymentHandle(deployment_name, app_name, options=HandleOptions.read(options))


def _end_span(span: tracing.Span, pending: PendingQuery) -> None:
    future = pending.future
    if future.cancelled():
        span.over("cancelled")
    elif error := future.exception():
        span.over(type(error).__name__)
    else:
        answer = future.result()
        span.over(answer.kind if isinstance(answer, FailedAnswer) else "")


def _belong(call: PendingQuery, query: RunningQuery) -> None:
    query.made(call)
    until_over = [call]  # which names this callback, for good
    call.when_over(lambda: query.over(until_over.pop()))


def _own_client() -> QueryClient:
    # Loaded only here, because replicas never need it and pay for what they import.
    from greenroom.serve.admin import session  # noqa: PLC0415

    return session.current().connect().queries
