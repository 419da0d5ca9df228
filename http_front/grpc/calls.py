"""RPCs as queries: what a servicer's methods do in place of the servicer.

Theory of operation. The user's functions, ``add_XServicer_to_server``, say which methods there are
and how their messages are read and written. Each call of one becomes a query to the ingress of an
application, as a handle's call is: same routing, limits, deadline and cancellation. A client's
stream follows its query as a large body does; the method gets an async iterator of its messages.
What the method yields comes back in the parts of the answer.

The application is the one that the metadata names, or the only one. Clients of other makers name
none. So where several run, a call with one request and one answer goes from one to the next until
one has the method, and the model that it is about; which one that was is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self
from urllib.parse import unquote

import grpc

from greenroom.actors.caller.streams import NobodyListensError, Stream
from greenroom.actors.caller.uploads import Upload
from greenroom.actors.messages.protobuf import portable
from greenroom.actors.messages.queries import (
    BINARY,
    FailedAnswer,
    PythonCall,
    Query,
    StreamEnded,
    ValueAnswer,
    packed,
)
from greenroom.actors.runtime.loop import resolve
from greenroom.core.errors import GreenroomError
from greenroom.core.metrics import Family, Registry
from greenroom.core.operations import GetStatus
from greenroom.core.routing.tickets import BODY
from greenroom.http_front.clients import ClientCounts, TrustedProxies
from greenroom.http_front.connections import SHARE
from greenroom.http_front.link import Kept, Link

FRESH_S = 2.0  # how long the table of applications is believed
ASK_TIMEOUT_S = 5.0
RPCS = "RPCs (maximum_concurrent_rpcs)"
MAX_METADATA = 200  # characters of a value that is used, and of a model's name that is kept
INFERENCE = "inference.GRPCInferenceService"  # the Open Inference Protocol's
MOST_ASKED = 16  # applications that a call which names none goes to
MAX_KNOWN = 1000  # methods and models whose application is remembered
Code = grpc.StatusCode
_CODES = {
    "BackPressureError": Code.RESOURCE_EXHAUSTED,
    "DeploymentUnavailableError": Code.UNAVAILABLE,
    "ReplicaUnavailableError": Code.UNAVAILABLE,
    "QueryTimeoutError": Code.DEADLINE_EXCEEDED,
    "RequestCancelledError": Code.CANCELLED,
    "InvalidRequestError": Code.INVALID_ARGUMENT,
    "UnknownNameError": Code.NOT_FOUND,
}
_NAMES = {code.value[0]: code.name for code in Code}


class Applications:
    """Which applications there are, and the endpoints of their ingresses."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._endpoints: dict[str, str] | None = None
        self._kept = Kept(self._read)

    async def endpoints(self) -> dict[str, str]:
        """Return name -> endpoint, as it was up to FRESH_S ago; GreenroomError if never known.

        Those whose ingress has no replica come last: asking it might start one.
        """
        found = await self._kept.get(FRESH_S)
        if found is None:
            raise GreenroomError("no controller answers")
        return found

    async def _read(self) -> dict[str, str] | None:
        # While there is no controller, what was known last will do.
        with contextlib.suppress(GreenroomError, TimeoutError):
            report = await self._link.request(GetStatus(), ASK_TIMEOUT_S)
            found = report.get("applications") or {}
            ingresses = {n: each["ingress"] for n, each in found.items() if each.get("ingress")}
            asleep = {
                name
                for name, ingress in ingresses.items()
                if not found[name]["deployments"].get(ingress, {}).get("replicas")
            }
            names = sorted(ingresses, key=lambda name: (name in asleep, name))
            self._endpoints = {name: f"{name}#{ingresses[name]}" for name in names}
        return self._endpoints


class Places:
    """Places for calls: so many in all, of which one client has no more than its share."""

    def __init__(self, most: int, proxies: TrustedProxies) -> None:
        self._most = most
        self._clients = ClientCounts(max(1, most // SHARE), proxies)

    @contextlib.asynccontextmanager
    async def place(self, context: Any, what: str) -> AsyncIterator[None]:
        """Hold a place; aborts the call where there is none."""
        clients, host = self._clients, _host_of(context.peer())
        if clients.total >= self._most:
            text = f"{self._most} {what} are under way; try again"
            await context.abort(Code.RESOURCE_EXHAUSTED, text)
        if not clients.has_room_for(host):
            text = f"{clients.most_each} {what} of this client are under way; try again"
            await context.abort(Code.RESOURCE_EXHAUSTED, text)
        clients.add(host)
        try:
            yield
        finally:
            clients.remove(host)


def _host_of(peer: str) -> str:
    """Return the address in what grpc calls a peer, as ``ipv6:%5B::1%5D:50051``."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


class Servicers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """The methods of all servicers; what their functions take in place of a server."""

    def __init__(
        self,
        link: Link,
        applications: Applications,
        request_timeout_s: float | None,
        places: Places,
    ) -> None:
        self.names: list[str] = []  # of the services
        self._link = link
        self._applications = applications
        self._declared: list[Any] = []
        self._request_timeout_s = request_timeout_s
        self._known: dict[tuple[str, str], str] = {}  # method and model -> endpoint
        self._places = places  # health and reflection take none of them
        self._registry = registry = Registry()
        self._ended = registry.counter(
            "greenroom_grpc_requests_total", "RPCs ended, by status", "service", "method", "code"
        )
        self._seconds = registry.histogram(
            "greenroom_grpc_request_seconds", "RPCs: how long they took", "service", "method"
        )

    def metrics(self) -> list[Family]:
        """Return what was counted of RPCs of these servicers."""
        return self._registry.families()

    def add(self, function: Callable[[Any, Any], None]) -> None:
        """Take the methods of a servicer from its ``add_XServicer_to_server``."""
        function(_Anything(), self)

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Take what a servicer's function declares."""
        for handler in handlers:
            self._declared.append(handler)
            self.names.append(handler.service_name())

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Ignore what comes by the other way, too."""

    def service(self, details: Any) -> Any:
        """Return what answers an RPC; None where no servicer has it."""
        for declared in self._declared:
            found = declared.service(details)
            if found is not None:
                _, service, method = details.method.split("/")
                return self._handler(found, service, method)
        return None

    def _handler(self, found: Any, service: str, method: str) -> Any:
        def call_of(request: Any, context: Any, model: str = "") -> _Call:
            began_at = time.monotonic()

            def ended(code: str) -> None:
                self._ended.add(1, service, method, code)
                self._seconds.observe(time.monotonic() - began_at, service, method)

            limit_s = self._request_timeout_s
            return _Call(self._link, method, found, request, model, context, limit_s, ended)

        async def whole(request: Any, context: Any) -> Any:
            model = _model(service, request)
            asked = None if found.request_streaming else (method, model)
            async with self._places.place(context, RPCS), call_of(request, context, model) as call:
                endpoints = await self._endpoints(context, asked)
                value, endpoint = await call.value(endpoints)
                if asked is not None and len(endpoints) > 1:
                    self._remember(asked, endpoint)
                return value

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._places.place(context, RPCS), call_of(request, context) as call:
                (endpoint,) = await self._endpoints(context)
                async for value in call.values(endpoint):
                    yield value

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[found.request_streaming, found.response_streaming]
        behaviour = stream if found.response_streaming else whole
        return make(behaviour, found.request_deserializer, found.response_serializer)

    def _remember(self, asked: tuple[str, str], endpoint: str) -> None:
        if len(asked[1]) > MAX_METADATA:
            return  # a client may send megabytes
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[asked] = endpoint

    async def _endpoints(self, context: Any, asked: tuple[str, str] | None = None) -> list[str]:
        """Return whom to ask, in this order: one, or of a call without streams several."""
        try:
            endpoints = await self._applications.endpoints()
        except GreenroomError as error:
            await context.abort(Code.UNAVAILABLE, str(error))
        name = await metadata_of(context, "application")
        if name in endpoints:
            return [endpoints[name]]
        if not name and len(endpoints) == 1:
            return list(endpoints.values())
        if not name and endpoints and asked is not None:
            first = (self._known.get(asked, ""), endpoints.get(asked[1], ""))
            there = set(endpoints.values())
            order = dict.fromkeys((*first, *endpoints.values()))
            return [each for each in order if each in there][:MOST_ASKED]
        known = ", ".join(sorted(endpoints)) or "none"
        given = f"application={name!r}" if name else "the call has no metadata 'application'"
        text = f"{given}: give it the name of one, such as metadata=[('application', NAME)]; there "
        await context.abort(Code.NOT_FOUND, f"{text}are: {known}"[:1000])
        raise AssertionError("abort raises")


class _Anything:
    """Has every method of every servicer; none is called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


async def metadata_of(context: Any, key: str) -> str:
    """Return a value of the client's metadata, "" without; aborts on what is none of ours."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            if isinstance(value, str) and value.isprintable() and len(value) <= MAX_METADATA:
                return value
            text = f"metadata {key!r}: must be printable, of at most {MAX_METADATA} characters"
            await context.abort(Code.INVALID_ARGUMENT, text)
    return ""


@dataclass(eq=False)
class _Call:
    """One RPC on its way; a context manager, so that nothing of it is left at its end."""

    _link: Link
    _method: str
    _found: Any
    _request: Any  # a message, or an iterator of them
    _model: str
    _context: Any
    _limit_s: float | None
    _ended: Callable[[str], None]
    _sending: asyncio.Task[None] | None = None
    _stream: Stream | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_cut_off = kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit)
        code = self._context.code()  # grpc has a number or a StatusCode, by the way it was set
        name = code.name if isinstance(code, Code) else _NAMES.get(code, "OK")
        self._ended("CANCELLED" if is_cut_off else name)
        if self._sending is not None:
            self._sending.cancel()
        if self._stream is not None:
            self._stream.close()  # which cancels it, unless it is over

    async def value(self, endpoints: Sequence[str]) -> tuple[Any, str]:
        """Return the only answer, and who gave it: the first that has the method and the model."""
        unavailable = None
        for endpoint in endpoints:
            answer = await self._ask(endpoint)
            if isinstance(answer, ValueAnswer):
                return pickle.loads(answer.value), endpoint
            if isinstance(answer, FailedAnswer) and answer.kind == "DeploymentUnavailableError":
                unavailable = unavailable or answer  # and may be the one
            elif not self._is_of_another(answer):
                return await self._abort(answer)
        return await self._abort(unavailable or answer)

    def _is_of_another(self, answer: Any) -> bool:
        """Return whether an application has no such method or model: then nothing of it ran."""
        if not isinstance(answer, FailedAnswer):
            return False
        is_unknown = answer.kind == "GrpcStatusError" and answer.text.startswith("NOT_FOUND: ")
        return answer.kind == "InvalidRequestError" or (is_unknown and bool(self._model))

    async def values(self, endpoint: str) -> AsyncIterator[Any]:
        """Yield the answers of a stream."""
        answer = await self._ask(endpoint)
        if not isinstance(answer, Stream):
            await self._abort(answer)
        self._stream = stream = answer
        loop = asyncio.get_running_loop()
        while True:
            arrival: asyncio.Future[None] = loop.create_future()
            value = stream.take_value(partial(resolve, arrival, None))
            if value is not None:
                yield pickle.loads(value)
            elif stream.end is None:
                await arrival
            elif isinstance(stream.end, StreamEnded):
                return
            else:
                await self._abort(stream.end)

    async def _ask(self, endpoint: str) -> Any:
        streams_in = self._found.request_streaming
        try:
            arguments = pickle.dumps((() if streams_in else (portable(self._request),), {}))
        except pickle.PicklingError as error:
            text = f"a {type(self._request).__name__} cannot be passed on: {error}"
            await self._context.abort(Code.INTERNAL, text)
        call = PythonCall(self._method, arguments, stream=self._found.response_streaming)
        request_id = await metadata_of(self._context, "request_id") or secrets.token_hex(16)
        self._context.set_trailing_metadata((("request_id", request_id),))
        query = Query(
            self._link.next_id(),
            call=packed(call),
            request_id=request_id,
            endpoint=endpoint,
            path="",
            http_method="",
            call_method=self._method,
            timeout_s=_shorter(self._context.time_remaining(), self._limit_s),
            retryable=None,
            shard_key=None,
            multiplexed_model_id=await metadata_of(self._context, "multiplexed_model_id"),
            follows=BODY if streams_in else "",
        )
        return await self._link.ask(query, self._upload if streams_in else None)

    def _upload(self, upload: Upload) -> None:
        if self._sending is None:  # else another replica gets what was sent, from the upload itself
            self._sending = asyncio.create_task(self._send(upload))

    async def _send(self, upload: Upload) -> None:
        with contextlib.suppress(NobodyListensError):
            try:
                async for message in self._request:
                    await upload.send(pickle.dumps(portable(message)), BINARY)
                upload.end()
            except grpc.RpcError as error:
                upload.fail("RequestCancelledError", f"the client's stream broke off: {error}")

    async def _abort(self, answer: Any) -> NoReturn:
        """End the RPC with the status of a failed query."""
        code, text = Code.INTERNAL, "the deployment's method does not stream as the servicer says"
        if isinstance(answer, FailedAnswer):
            code, text = _CODES.get(answer.kind, Code.INTERNAL), answer.text
            if answer.kind == "GrpcStatusError":
                name, _, text = text.partition(": ")
                code = Code[name]
            elif answer.kind == "UserCodeError":
                text = "the deployment raised an exception"
        await self._context.abort(code, text[:1000])
        raise AssertionError("abort raises")


def _model(service: str, request: Any) -> str:
    """Return the model that a request of the Open Inference Protocol is about; "" for another."""
    if service != INFERENCE:
        return ""
    return str(getattr(request, "model_name", "") or getattr(request, "name", ""))


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)
