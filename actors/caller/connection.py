"""A script's connection to the host's actor system: admin requests and queries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from greenroom.actors.caller.caller import CLOSED, Caller
from greenroom.actors.caller.client import CallerClient, QueryClient
from greenroom.actors.messages.admin import RequestReply, request_of
from greenroom.actors.messages.queries import exception_of
from greenroom.actors.runtime.port import PROXY, Controller, Finder, ThreadPort, new_id
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import records_of
from greenroom.actors.runtime.settings import HostSettings, access_to
from greenroom.actors.transport.cluster_key import ClusterKeyError
from greenroom.core.errors import InvalidRequestError, NotRunningError, error_from
from greenroom.core.operations import ListHosts, Operation

GONE_POLL_S = 0.05
GONE_S = 15.0  # longer than any restart of the actor system takes
LEAVE_TIMEOUT_S = 1.0
OPEN_TIMEOUT_S = 5.0
UNMANAGED_TIMEOUT_S = 0.5  # without a host process nothing is about to come up
LIST_EVERY_S = 30.0
T = TypeVar("T")
LISTED = 8  # so many other hosts that one of them is there, whatever has happened


class Connection:
    """Admin requests to the controller, and queries to the proxy; thread-safe."""

    def __init__(self, port: ThreadPort, *, is_remote: bool = False, user: str = "") -> None:
        self._port = port
        self._user = user or user_name()
        self._caller = Caller(port.loop, port.process)
        self._waiting: set[Future[Any]] = set()
        why = (
            f"the actor system on port {port.admin_port} is gone; see `greenroom status`, or start "
            "it with `greenroom start`"
        )
        self._controller = Controller(port, port.answers, GONE_S, why)
        self._proxy = Finder(port, PROXY, self._caller.met_proxy, self._caller.proxy_gone)
        self._asked_proxy = False
        self._is_remote = is_remote  # to another host, whose cluster's other hosts will do too
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may close amid a request
        self._caller.listen(port.on)

    @classmethod
    def open(cls, settings: HostSettings, *, user: str = "") -> Connection:
        """Connect to this host's system; NotRunningError when none answers in time.

        InvalidRequestError when the cluster file cannot be used. ``user`` is who changes things, by
        default the user of this process.
        """
        is_unmanaged = settings.address is None and not records_of(settings).hosts()
        access = access_to(settings)
        try:
            port = ThreadPort(settings.admin_port, this_process(), access)
        except ClusterKeyError as error:
            raise InvalidRequestError(str(error)) from None
        connection = cls(port, is_remote=access is not None and bool(access.gates), user=user)
        port.open(UNMANAGED_TIMEOUT_S if is_unmanaged else OPEN_TIMEOUT_S)
        connection.start()
        return connection

    def start(self) -> None:
        """Look for the controller from now on."""
        self._port.loop.post(self._controller.start)
        if self._is_remote:
            self._post(self._list_hosts())

    @property
    def queries(self) -> QueryClient:
        """The way for handles."""
        self._check_open()
        with self._lock:
            if not self._asked_proxy:
                self._asked_proxy = True
                self._port.loop.post(self._proxy.start)
        return CallerClient(self._caller)

    def request(self, operation: Operation, *, timeout_s: float | None = None) -> Any:
        """Ask the controller to carry out an operation; block until it is answered.

        It is sent again, with its id, when the controller was restarted or an answer is late.
        Raises the error that the controller names (with a failed constructor's own exception as its
        cause), TimeoutError past ``timeout_s``, NotRunningError when the system is gone or this
        connection was closed.
        """
        self._check_open()
        request = request_of(operation, new_id(), self._user)
        with self._lock:  # what a loop is asked that has ended is never answered
            self._check_open()
            waiting = self._post(self._controller.ask(request, timeout_s))
            self._waiting.add(waiting)
        try:
            reply = waiting.result()
        except CancelledError:
            self._check_open()
            raise
        finally:
            self._waiting.discard(waiting)
            waiting.cancel()
        return result_of(reply)

    def _post(self, asking: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(asking, self._port.loop.asyncio)

    def close(self) -> None:
        """Disconnect; requests under way are abandoned, not undone, and calls of handles fail."""
        with self._lock:
            self._closed = True
        for waiting in list(self._waiting):
            waiting.cancel()
        if not self._caller.left:
            left = threading.Event()
            self._port.loop.post(lambda: self._caller.leave(left.set))
            left.wait(LEAVE_TIMEOUT_S)  # else the proxy would keep us until this process ends
        for finder in (self._controller, self._proxy):
            self._port.loop.post(finder.stop)  # which may be at work with what that lets go of
        self._port.close()

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the system has ended; False when it has not within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self._port.is_answered():
            if time.monotonic() > deadline:
                return False
            time.sleep(GONE_POLL_S)
        return True

    def _check_open(self) -> None:
        if self._pid != os.getpid():  # the thread that answers stayed behind
            raise NotRunningError("this connection was made before a fork; open another after it")
        if self._closed:
            raise NotRunningError(f"{CLOSED}; open another, for example with Client.connect()")

    async def _list_hosts(self) -> None:
        """Learn of the cluster's other hosts, for when the known ones are gone."""
        while True:
            with contextlib.suppress(NotRunningError):
                listed = await self._controller.ask(request_of(ListHosts(), new_id()))
                self._port.learn_gates((listed.value or ())[:LISTED])
            await asyncio.sleep(LIST_EVERY_S)


def user_name() -> str:
    """Return the name of the user that this process runs as, or the uid where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def result_of(reply: RequestReply) -> Any:
    """Return the value of a reply; raise the error that it names, caused by user code's own."""
    if not reply.error_kind:
        return reply.value
    raise error_from(reply.error_kind, reply.error) from exception_of(reply.exception)
