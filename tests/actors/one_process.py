"""A caller, a proxy and a replica in one process, on one event loop: the real ones, joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from greenroom.actors.caller import client as query_client
from greenroom.actors.caller.caller import Caller
from greenroom.actors.caller.client import CallerClient
from greenroom.actors.messages.queries import HttpCall, Process, packed
from greenroom.actors.proxy.proxy import Proxy
from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.comparisons import Comparisons
from greenroom.actors.replica.data_plane import Queries
from greenroom.actors.replica.user_code import Failure, UserCode
from greenroom.actors.runtime.loop import Loop, nothing
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import records_of
from greenroom.actors.runtime.settings import read_settings
from greenroom.actors.transport.mailbox import decode, encode
from greenroom.core.routing.tables import (
    BACKEND_PREFIX,
    ENDPOINT_PREFIX,
    BackendTable,
    EndpointTable,
    ReplicaTable,
)
from greenroom.serve.code.packing import pack_code
from greenroom.serve.handle import DeploymentHandle
from tests.support.lone_loop import LoneMachine, LoneTransport
from tests.support.queries import query

DEADLINE_S = 30.0

_places: WeakValueDictionary[int, Place] = WeakValueDictionary()


def _place(number: int) -> Place:
    return _places[number]


class Place:
    """An address, with whoever is there; what is sent to it arrives in a later pass of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.process = this_process()._replace(incarnation=f"{id(self):016x}")
        self.address = self
        self.handlers: dict[type, Callable[[Any, Any], None]] = {}
        transport: Any = _Transport(loop, self)
        self.machine = LoneMachine(transport)
        self.loop = Loop(transport, lambda _: None, self.machine)
        _places[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _place, (id(self),)

    def on(self, kind: type, handler: Callable[[Any, Any], None]) -> None:
        """Have a handler called for messages of this class, as a port does."""
        self.handlers[kind] = handler

    def arrived(self, message: Any, sender: Place) -> None:
        handler = self.handlers.get(type(message))
        if handler is not None:
            handler(message, sender)


class _Transport(LoneTransport):
    deliveries_at_once = 4
    carry: Callable[[Any], Any] = staticmethod(lambda message: message)

    def __init__(self, loop: asyncio.AbstractEventLoop, place: Place) -> None:
        super().__init__(loop)
        self._place = place

    def send(self, target: Any, message: Any, on_sent: Any, on_failed: Any) -> None:
        if not isinstance(target, Place):  # the host's admin, of which there is none
            self.loop.call_soon(on_failed or nothing)
            return
        self.loop.call_soon(target.arrived, self.carry(message), self._place)
        if on_sent is not None:
            self.loop.call_soon(on_sent)


def pickle_messages() -> None:
    """Have every message pickled and unpickled, as between processes: for those who measure."""
    _Transport.carry = staticmethod(lambda message: decode(encode(message)))


def packed_code(target: Any) -> bytes:
    """Return code as it travels to a replica."""
    return pack_code("a test's code", target, (), {}, None).pickled


def load(target: Any, user_config: Any = None, *, limit: int = 100) -> Failure | None:
    """Make what a replica makes of a function or class; return why that fails."""
    code = UserCode()
    code.configure({"max_ongoing_requests": limit})
    code.start()
    try:
        return code.load(packed_code(target), user_config).result(10)
    finally:
        code.end()


class OneProcess:
    """One replica of ``target`` at the endpoint "e"; everything runs on ``loop``.

    ``config`` are settings that replicas read, and ``table`` those that proxies do.
    """

    def __init__(
        self, target: Any, *, limit: int = 10, config: dict[str, Any] | None = None, **table: Any
    ) -> None:
        self.user_code = UserCode()
        self.user_code.configure({"max_ongoing_requests": limit, **(config or {})})
        self.loop = loop = self.user_code.loop
        self.proxy = self._make_proxy(Place(loop))
        port: Any = Place(loop)
        self.queries = Queries(
            port, self.user_code, "r1", "b", limit, Comparisons(port, lambda _: None)
        )
        place = Place(loop)
        self.caller = caller = Caller(place.loop, place.process)
        caller.listen(place.on)
        self.client = CallerClient(caller)
        loop.run_until_complete(self._begin(target, limit, port, table))

    @property
    def handle(self) -> DeploymentHandle:
        """A handle of the endpoint, for this caller."""
        return DeploymentHandle("e", None, client=self.client)

    def configure(self, config: dict[str, Any]) -> None:
        """Give the replica newer settings."""
        for part in (self.user_code, self.queries):
            part.configure(config)

    async def answer(self, *upload: Callable[[Any], None], **settings: Any) -> Any:
        """Send one query, whose body follows as ``upload`` says; return its answer or stream."""
        answered = self.loop.create_future()
        asked = query(self.caller.next_id(), **settings)
        self.caller.submit(asked, answered.set_result, *upload)
        return await answered

    async def http(
        self,
        *upload: Callable[[Any], None],
        path: str = "/",
        method: str = "GET",
        headers: Any = (),
        body: bytes = b"",
        **settings: Any,
    ) -> Any:
        """Send an HTTP request as a front does, and return its answer."""
        call = HttpCall(
            method, path, path.encode(), b"", headers, body, "http", "1.1", None, None, ""
        )
        asked = {"path": path, "http_method": method, "call": packed(tuple(call)), **settings}
        return await self.answer(*upload, **asked)

    def run(self, test: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, for DEADLINE_S at most; return what it returns."""
        return self.loop.run_until_complete(asyncio.wait_for(test, DEADLINE_S))

    def finalize(self) -> None:
        """End what user code has made of itself, as at the end of a replica."""

        async def close() -> None:
            await asyncio.wrap_future(self.user_code.close())

        self.run(close())

    def close(self) -> None:
        """End the threads and the loop; handles of later tests find their own way."""
        self.finalize()
        query_client.install(None)
        user_context.on_models_changed(None)
        user_context.install(None)
        for place in (self.proxy.loop, self.caller.loop, self.queries.port.loop):
            place.close()
        self.user_code.end()
        self.loop.run_forever()  # until end() stops it
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.proxy.link.seek_no_more()  # last: it begins to seek whenever its timer is due
        self.loop.close()

    def _make_proxy(self, place: Place) -> Proxy:
        proxy = Proxy()
        proxy._loop, proxy.process = place.loop, place.process
        proxy.settings = read_settings({})
        proxy.records = records_of(proxy.settings)
        proxy._myRef = SimpleNamespace(address=place)
        proxy.started()
        place.arrived = proxy.receiveMessage  # type: ignore[method-assign]
        return proxy

    async def _begin(self, target: Any, limit: int, port: Place, table: dict[str, Any]) -> None:
        user_context.install(
            user_context.ReplicaContext(
                app_name="", deployment="b", replica_tag="r1", backend="b", version="7"
            )
        )
        loading = self.user_code.load(packed_code(target), None)
        assert await asyncio.wrap_future(loading) is None
        self.queries.accepting = True
        process: Process = port.process
        replica = ReplicaTable(tag="r1", address=port, process=process)
        backend = BackendTable(tag="b", replicas=(replica,), max_ongoing_requests=limit, **table)
        endpoint = EndpointTable(name="e", traffic={"b": 1.0})
        tables = [(f"{BACKEND_PREFIX}b", backend), (f"{ENDPOINT_PREFIX}e", endpoint)]
        self.proxy.dispatcher.take_tables(tables, 0.0)
        self.caller.met_proxy(self.proxy.myAddress, self.proxy.process)
