"""A gunicorn worker's link to the router: batches queries, from asyncio to the port's thread.

All queries that arrive in one pass of the event loop cross to the port's thread together, and all
answers of one message come back together, so a busy worker pays for the crossings once per batch.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from typing import Any

from understudy.actors.dispatch import Caller
from understudy.actors.messages import (
    Address,
    Answer,
    AnswerQueries,
    AskProxy,
    AskProxyReply,
    AttachCallerReply,
    FailedAnswer,
    HttpAnswer,
    Process,
    Query,
)
from understudy.actors.port import PROXY, Finder, Port
from understudy.actors.processes import RunRecords, this_process
from understudy.actors.settings import OWN, HostSettings
from understudy.core.errors import DeploymentUnavailableError, NotRunningError

CONNECT_RETRY_S = 0.1
CONNECT_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 5.0


class Link:
    """See :class:`understudy.http_front.dispatcher.Dispatcher`, which it implements."""

    def __init__(self, settings: HostSettings) -> None:
        self.ready = False
        self._settings = settings
        self._on_one_loop = settings.transport == OWN  # then nothing has to cross
        self._process: Process = this_process()
        self._records = RunRecords(settings.run_dir)
        self._port: Port | None = None
        self._caller: Caller | None = None
        self._finder: Finder | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._outgoing: list[Callable[[Caller], None]] = []
        self._incoming: list[tuple[asyncio.Future[Any], Any]] = []
        self._lock = threading.Lock()
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def start(self) -> None:
        """Begin to connect, in the background, until an actor system answers."""
        self._loop = asyncio.get_running_loop()
        self._records.add(self._process, "http worker")
        self._connecting = asyncio.create_task(self._connect())

    async def stop(self) -> None:
        """Disconnect; queries under way are dropped."""
        self.ready = False
        self._records.remove(self._process)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._port is not None:
            await asyncio.to_thread(self._port.close)

    async def ask(
        self,
        *,
        path: str,
        http_method: str,
        call_method: str,
        call: bytes,
        request_id: str,
        timeout_s: float | None,
        repeatable: bool,
        shard_key: str | None,
    ) -> HttpAnswer | FailedAnswer:
        """Have a query answered; cancelling this cancels the query wherever it is."""
        caller = self._caller or await self._wait_connected()
        if caller is None:
            error = DeploymentUnavailableError
            text = "this host's actor system does not answer"
            return FailedAnswer(0, error.__name__, text, error.retry_after_s)
        query = Query(
            id=caller.next_id(),
            endpoint=None,
            path=path,
            http_method=http_method,
            call_method=call_method,
            call=call,
            request_id=request_id,
            timeout_s=timeout_s,
            repeatable=repeatable,
            shard_key=shard_key,
        )
        future: asyncio.Future[HttpAnswer | FailedAnswer] = self._loop.create_future()
        self._out(lambda caller: caller.submit(query, lambda answer: self._in(future, answer)))
        try:
            return await future
        except asyncio.CancelledError:
            self._out(lambda caller: caller.cancel(query.id))
            raise

    async def routes(self) -> dict[str, str]:
        """Return prefix -> endpoint, as the router has it now."""
        return await self._ask_proxy("routes") or {}

    async def metrics(self) -> bytes:
        """Return the host's metrics as Prometheus text."""
        return await self._ask_proxy("metrics") or b""

    async def _wait_connected(self) -> Caller | None:
        """Wait for the link: a worker just started takes connections before it has its own."""
        assert self._connecting is not None, "start() comes first"
        await asyncio.wait([self._connecting], timeout=CONNECT_TIMEOUT_S)
        return self._caller

    async def _connect(self) -> None:
        while self._port is None:
            settings = self._settings
            port = Port(settings.admin_port, self._process, settings.transport, self._loop)
            try:
                await asyncio.to_thread(port.open)
            except NotRunningError:
                await asyncio.sleep(CONNECT_RETRY_S)
            else:
                self._connected(port)

    def _connected(self, port: Port) -> None:
        caller = Caller(port.loop, self._process)
        caller.on_ready = lambda: self._set_ready(ready=True)
        self._finder = finder = Finder(port, PROXY, caller.met_proxy, lambda: self._lost(caller))
        port.on(AnswerQueries, lambda message, _: caller.answered(message))
        port.on(AttachCallerReply, lambda message, _: caller.attached(message))
        port.on(AskProxyReply, self._proxy_replied)
        self._port, self._caller = port, caller
        port.loop.post(finder.start)

    def _lost(self, caller: Caller) -> None:
        caller.lost_proxy()
        self._set_ready(ready=False)

    def _set_ready(self, *, ready: bool) -> None:
        def set_it() -> None:
            self.ready = ready

        self._loop.call_soon_threadsafe(set_it)

    async def _ask_proxy(self, what: str) -> Any:
        request_id = secrets.token_hex(8)
        future = self._asked[request_id] = self._loop.create_future()

        def send(_caller: Caller) -> None:
            found = self._finder.found if self._finder is not None else None
            if found is not None and self._port is not None:
                self._port.loop.send(found[0], AskProxy(request_id=request_id, what=what))

        self._out(send)
        try:
            return await asyncio.wait_for(future, ASK_TIMEOUT_S)
        except asyncio.TimeoutError:  # its own class until 3.11
            return None
        finally:
            del self._asked[request_id]

    def _proxy_replied(self, message: AskProxyReply, _sender: Address) -> None:
        future = self._asked.get(message.request_id)
        if future is not None:
            self._in(future, message.value)

    # --- The two crossings --------------------------------------------------------------------

    def _out(self, action: Callable[[Caller], None]) -> None:
        if self._on_one_loop:
            if self._caller is not None:
                action(self._caller)
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush_out)
        self._outgoing.append(action)

    def _flush_out(self) -> None:
        actions, self._outgoing = self._outgoing, []
        caller, port = self._caller, self._port
        if caller is None or port is None:
            return

        def run() -> None:
            for action in actions:
                action(caller)

        port.loop.post(run)

    def _in(self, future: asyncio.Future[Any], value: Answer | Any) -> None:
        if self._on_one_loop:
            if not future.done():
                future.set_result(value)
            return
        with self._lock:
            first = not self._incoming
            self._incoming.append((future, value))
        if first:
            self._loop.call_soon_threadsafe(self._flush_in)

    def _flush_in(self) -> None:
        with self._lock:
            arrived, self._incoming = self._incoming, []
        for future, value in arrived:
            if not future.done():
                future.set_result(value)
