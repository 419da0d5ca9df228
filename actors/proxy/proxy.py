"""The proxy's actor: converts messages, and leaves the rest to the dispatcher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from greenroom.actors.messages.control import Changed, EndDescribed, MeetController
from greenroom.actors.messages.queries import (
    Address,
    AskProxy,
    AskProxyReply,
    AttachCaller,
    DetachCaller,
    LeasesUsed,
    QueriesFinished,
    SubmitQueries,
)
from greenroom.actors.proxy.controller_link import ControllerLink
from greenroom.actors.proxy.dispatcher import Dispatcher, QueryFailedError
from greenroom.actors.proxy.host_metrics import HostMetrics
from greenroom.actors.runtime.actor import LoopActor
from greenroom.actors.runtime.logs import end_of_log
from greenroom.core.metrics import Group
from greenroom.core.routing import load


class Proxy(LoopActor):
    """Dispatches callers' queries to replicas, as the core's router says."""

    role = "proxy"
    carries_bodies = True

    def __init__(self) -> None:
        super().__init__()
        self._dispatcher: Dispatcher | None = None
        self._link: ControllerLink | None = None
        self._host_metrics: HostMetrics | None = None  # from the first scrape on

    @property
    def dispatcher(self) -> Dispatcher:
        """The router in its shell."""
        assert self._dispatcher is not None, "set with the first message"
        return self._dispatcher

    @property
    def link(self) -> ControllerLink:
        """The controller, as far as it is known."""
        assert self._link is not None, "set with the first message"
        return self._link

    def started(self) -> None:
        """See :meth:`LoopActor.started`."""
        loop, settings, process = self.loop, self.settings, self.process
        self._link = ControllerLink(loop, settings, process, self._met_controller)
        self._dispatcher = Dispatcher(
            loop, process, self.myAddress, settings, self.records, self._link.send
        )

    def survives(self, message: Any, sender: Address, error: Exception) -> bool:
        """Answer a question that failed; it has changed nothing."""
        if not isinstance(message, AskProxy):
            return False
        self.loop.send(sender, AskProxyReply(request_id=message.request_id, value=None))
        return True

    def owed(self, message: Any, sender: Address, error: Exception) -> Iterable[Any]:
        """Return the answer to the query that failed."""
        return self.dispatcher.failed(error) if isinstance(error, QueryFailedError) else ()

    def _met_controller(self) -> None:
        self.dispatcher.reports.report_load_now()  # a new controller waits for that

    def receiveMsg_MeetController(self, message: MeetController, _sender: Address) -> None:
        """Listen to this controller from now on, and beat for this host."""
        self.link.meet(message)

    def receiveMsg_Changed(self, message: Changed, sender: Address) -> None:
        """Take newer tables; tell the controller so when no lease is against them."""
        tables = self.link.take(message, sender)
        if tables is not None:
            self.dispatcher.take_tables(tables, time.monotonic())
            self.dispatcher.leases.when_confirmed(self.link.acknowledge)

    def receiveMsg_AttachCaller(self, message: AttachCaller, sender: Address) -> None:
        """Know a caller, so that it can be answered and its death noticed."""
        self.dispatcher.attach(message, sender)

    def receiveMsg_DetachCaller(self, message: DetachCaller, _sender: Address) -> None:
        """Forget a caller, as if its process had ended."""
        self.dispatcher.detach(message.incarnation)

    def receiveMsg_SubmitQueries(self, message: SubmitQueries, sender: Address) -> None:
        """Dispatch a caller's queries."""
        self.dispatcher.submit(message, sender)

    def receiveMsg_QueriesFinished(self, message: QueriesFinished, _sender: Address) -> None:
        """Take what a replica has done."""
        self.dispatcher.finished(message)

    def receiveMsg_EndDescribed(self, message: EndDescribed, _sender: Address) -> None:
        """Answer what a replica took along when it died."""
        self.dispatcher.end_described(message)

    def _metrics(self) -> list[Group]:
        if self._host_metrics is None:
            self._host_metrics = HostMetrics(self.records, self.settings.host_name)
        return self._host_metrics.groups(self.dispatcher.metrics())

    def receiveMsg_LeasesUsed(self, message: LeasesUsed, _sender: Address) -> None:
        """Take a caller's report of its leases."""
        self.dispatcher.leases.used(message)

    def receiveMsg_AskProxy(self, message: AskProxy, sender: Address) -> None:
        """Answer questions of the HTTP front."""
        if message.what == "logs":
            read = partial(end_of_log, self.settings.logs_dir, *message.arguments)
            answered = self.loop.asyncio.run_in_executor(None, read)  # a disk may be slow
            answered.add_done_callback(partial(self._answer_read, message.request_id, sender))
            return
        answers: dict[str, Callable[[], Any]] = {
            "routes": self.dispatcher.router.state.routes.all,
            "unready": lambda: load.unready(self.dispatcher.router.state),
            "lacking": lambda: load.lacking(self.dispatcher.router.state),
            "controller": lambda: self.link.known,
            "metrics": self._metrics,
        }
        value = answers[message.what]() if message.what in answers else None
        self.loop.send(sender, AskProxyReply(request_id=message.request_id, value=value))

    def _answer_read(self, request_id: str, sender: Address, read: asyncio.Future[Any]) -> None:
        value = None if read.exception() is not None else read.result()
        self.loop.send(sender, AskProxyReply(request_id=request_id, value=value))
