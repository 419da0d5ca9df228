"""An HTTP worker's link to the router, on the worker's own event loop.

All queries that arrive in one pass of that loop, or while the last message is on its way, go to the
router in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from greenroom.actors.caller.caller import Caller
from greenroom.actors.caller.open_queries import OnUpload
from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer, Process, Query
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.loop import end_where_starved, resolve
from greenroom.actors.runtime.port import PROXY, Controller, Finder, Port, new_id
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import WORKER_ROLE, RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import (
    DeploymentUnavailableError,
    GreenroomError,
    NotRunningError,
    error_from,
)
from greenroom.core.metrics import Group, text

if TYPE_CHECKING:  # few workers need it
    from greenroom.core.operations import Operation

CONNECT_RETRY_S = 0.1
CONNECT_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 5.0
ABSENT_S = 1.5  # how long a request waits while there is no controller
LEAVE_TIMEOUT_S = 0.5
OWN_SCRAPE_TIMEOUT_S = 3.0
SCRAPE_TIMEOUT_S = 1.5  # for each question to another host


T = TypeVar("T")
Outcome = HttpAnswer | FailedAnswer | Stream


class Link:
    """Carries queries to the router and brings back the answers; lives in one worker's loop.

    ``ready`` is False until the router has its first route table, and while it cannot be reached.
    """

    def __init__(self, settings: HostSettings, role: str = WORKER_ROLE) -> None:
        self.ready = False
        self._role = role
        self._settings = settings
        self._process: Process = this_process()
        self._port: Port | None = None
        self._caller: Caller | None = None
        self._finder: Finder | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._records: RunRecords | None = None
        self._requests: Controller | None = None  # from the first one on
        self.next_id = itertools.count(1).__next__

    async def start(self) -> None:
        """Begin to connect, in the background, until an actor system answers."""
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(self._connect(loop))
        self._records = RunRecords(self._settings.run_dir, call_later=loop.call_later)
        self._records.add(self._process, self._role)

    async def stop(self) -> None:
        """Disconnect; queries under way are dropped."""
        self.ready = False
        if self._records is not None:
            self._records.remove(self._process)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._caller is not None and not self._caller.left:
            left = asyncio.Event()
            self._caller.leave(left.set)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(left.wait(), LEAVE_TIMEOUT_S)
        if self._port is not None:
            self._port.detach()

    async def ask(self, query: Query, on_upload: OnUpload | None = None) -> Outcome:
        """Run one query and return its answer; never raises for what went wrong with it.

        Past its time limit, that is a FailedAnswer. Cancelling this cancels the query wherever it
        is. ``on_upload`` gets what to send the rest of the request to, once a replica wants it.
        """
        caller = self._caller or await self._wait_connected()
        if caller is None:
            error = DeploymentUnavailableError
            text = "this host's actor system does not answer"
            return FailedAnswer(0, error.__name__, text, error.retry_after_s)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        caller.submit(query, partial(resolve, future), on_upload)
        try:
            return await future
        except asyncio.CancelledError:
            caller.cancel(query.id)
            raise

    def submit(self, query: Query, on_answer: Callable[[Any], None]) -> Callable[[], None] | None:
        """Run one query that nothing follows; return what cancels it.

        ``on_answer`` gets the answer, on the loop. None while there is no router to ask.
        """
        caller = self._caller
        if caller is None:
            return None
        caller.submit(query, on_answer)
        return partial(caller.cancel, query.id)

    async def routes(self) -> dict[str, str]:
        """Return prefix -> endpoint, as the router has it now."""
        return await self._ask_proxy("routes") or {}

    async def lacking(self) -> dict[str, dict[str, tuple[str, bool]] | None] | None:
        """Return what endpoints lack, as core.routing.load says; None without an answer."""
        lacking: dict[str, dict[str, tuple[str, bool]] | None] | None
        lacking = await self._ask_proxy("lacking")
        return lacking

    async def metrics(self, *, whole: bool) -> bytes:
        """Return the metrics of this host, or of the whole cluster, as Prometheus' text."""
        if self._caller is not None:
            self._caller.leases.report()  # so that the router has seen those of this worker
        own = self._ask_proxy("metrics", OWN_SCRAPE_TIMEOUT_S)
        asked = [own, self._metrics_elsewhere()] if whole else [own]
        return text([group for groups in await asyncio.gather(*asked) for group in groups or []])

    async def _metrics_elsewhere(self) -> list[Group]:
        own = self._settings.own_address
        asked = [self.ask_host(each, "metrics") for each in await self._hosts() if each != own]
        return [group for groups in await asyncio.gather(*asked) for group in groups or []]

    async def ask_host(self, address: str, what: str, *arguments: Any) -> Any:
        """Return what another host's proxy is asked for; None where it does not answer in time.

        A scrape has no use for later answers, and leaves such a host out.
        """
        await self._wait_connected()
        port = self._port
        if port is None:
            return None
        gate = port.loop.machine.address_of(address)
        proxy = await port.locate(*PROXY, gate, SCRAPE_TIMEOUT_S)
        if proxy is None:
            return None
        return await port.ask_proxy(proxy, what, *arguments, timeout_s=SCRAPE_TIMEOUT_S)

    async def request(
        self, operation: Operation, timeout_s: float, user: str = "", request_id: str = ""
    ) -> Any:
        """Have the controller carry out an operation, and return its answer or raise its error.

        NotRunningError where no controller is found, TimeoutError where none answers in time.
        """
        from greenroom.actors.messages.admin import request_of  # noqa: PLC0415

        await self._wait_connected()
        requests = self._requests or self._follow_controller()
        if requests is None:
            raise NotRunningError("this host's actor system does not answer")
        request = request_of(operation, request_id or new_id(), user)
        reply = await requests.ask(request, timeout_s)
        if reply.error_kind:
            raise error_from(reply.error_kind, reply.error)
        return reply.value

    async def _hosts(self) -> list[str]:
        """Return the addresses of all hosts; none while there is no controller."""
        from greenroom.core.operations import ListHosts  # noqa: PLC0415

        try:
            return list(await self.request(ListHosts(), SCRAPE_TIMEOUT_S))
        except (GreenroomError, TimeoutError):
            return []

    def _follow_controller(self) -> Controller | None:
        if self._port is None or self._caller is None:
            return None

        async def is_there() -> bool:
            return requests.found is not None

        why = "no controller was found: its host may be stopped or away"
        requests = self._requests = Controller(self._port, is_there, ABSENT_S, why)
        requests.start()
        return requests

    async def _wait_connected(self) -> Caller | None:
        """Wait for the link: a worker just started takes connections before it has its own."""
        if self._connecting is not None:
            await asyncio.wait([self._connecting], timeout=CONNECT_TIMEOUT_S)
        return self._caller

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        settings = self._settings
        port = self._port = Port(settings.admin_port, self._process, loop)
        is_well = partial(end_where_starved, port.loop)
        port.loop.keep_beating(Pulse(), settings.silence_timeout_s, is_well)
        while not await port.answers():
            await asyncio.sleep(CONNECT_RETRY_S)
        self._caller = caller = Caller(port.loop, self._process, self._met)
        self._finder = Finder(port, PROXY, caller.met_proxy, self._proxy_gone)
        caller.listen(port.on)
        self._finder.start()

    def _met(self) -> None:
        self.ready = True

    def _proxy_gone(self) -> None:
        self.ready = False
        if self._caller is not None:
            self._caller.proxy_gone()

    async def _ask_proxy(self, what: str, timeout_s: float = ASK_TIMEOUT_S) -> Any:
        if self._port is None or self._finder is None or self._finder.found is None:
            return None
        return await self._port.ask_proxy(self._finder.found[0], what, timeout_s=timeout_s)


class Kept(Generic[T]):
    """What ``read`` returns, kept for a time; all who wait for it share one question."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._asked_at = self._read_at = -math.inf
        self._value: T
        self._reading: asyncio.Future[None] | None = None

    async def get(self, within_s: float, *, strictly: bool = False) -> T:
        """Return what was read at most ``within_s`` ago; raises what reading it raises.

        The time counts from the answer, so that one that takes long is kept too; ``strictly``,
        from the question.
        """
        wanted_at = monotonic() - within_s
        while (self._asked_at if strictly else self._read_at) < wanted_at:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.ensure_future(self._read_once())
                self._reading.add_done_callback(_retrieved)
            await asyncio.shield(self._reading)  # others may wait for it, too
            if not strictly:
                break
        return self._value

    async def _read_once(self) -> None:
        asked_at = monotonic()
        self._value = await self._read()
        self._asked_at, self._read_at = asked_at, monotonic()


def _retrieved(reading: asyncio.Future[None]) -> None:
    """Take an error, which asyncio logs where all who waited have left."""
    if not reading.cancelled():
        reading.exception()
