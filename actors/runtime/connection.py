"""A script's connection to the host's actor system: admin requests and queries."""

from __future__ import annotations

import os
import pwd
import threading
import time
from concurrent.futures import (
    CancelledError,
    Future,
    TimeoutError as FutureTimeoutError,  # its own class until 3.11
)
from functools import partial
from typing import Any

import cloudpickle

from greenroom.actors.caller.caller import CLOSED, Caller
from greenroom.actors.caller.client import CallerClient, QueryClient
from greenroom.actors.host.launcher import is_running
from greenroom.actors.messages.admin import Request, RequestReply, request_of
from greenroom.actors.runtime.asking import LOOK_AGAIN_S, ControllerRequests, new_id
from greenroom.actors.runtime.port import PROXY, Finder, ThreadPort
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.settings import HostSettings, way_to
from greenroom.actors.transport.cluster_key import ClusterKeyError
from greenroom.core.errors import InvalidRequestError, NotRunningError, error_from
from greenroom.core.operations import ListHosts, Operation

GONE_POLL_S = 0.05
GONE_S = 15.0  # longer than any restart of the actor system takes
LEAVE_TIMEOUT_S = 1.0
OPEN_TIMEOUT_S = 5.0
UNMANAGED_TIMEOUT_S = 0.5  # without a host process nothing is about to come up
LIST_EVERY_S = 30.0
LISTED = 8  # so many other hosts that one of them is there, whatever has happened


class Connection:
    """Admin requests to the controller, and queries to the proxy; thread-safe."""

    def __init__(self, port: ThreadPort, *, is_remote: bool = False, user: str = "") -> None:
        self._port = port
        self._user = user or user_name()
        self._caller = Caller(port.loop, port.process)
        self._waiting: dict[str, Future[RequestReply]] = {}
        self._controller = ControllerRequests(port)
        self._proxy = Finder(port, PROXY, self._caller.met_proxy, self._caller.lost_proxy)
        self._asked_proxy = False
        self._is_remote = is_remote  # to another host, whose cluster's other hosts will do too
        self._listing = ""  # the id of the request for the cluster's hosts
        self._closed = False
        self._lock = threading.Lock()
        self._caller.listen(port.on)

    @classmethod
    def open(cls, settings: HostSettings, *, user: str = "") -> Connection:
        """Connect to this host's system; NotRunningError when none answers in time.

        InvalidRequestError when the cluster file cannot be used. ``user`` is who changes things, by
        default the user of this process.
        """
        is_unmanaged = settings.address is None and not is_running(settings)
        way = way_to(settings)
        try:
            port = ThreadPort(settings.admin_port, this_process(), way)
        except ClusterKeyError as error:
            raise InvalidRequestError(str(error)) from None
        connection = cls(port, is_remote=way is not None and bool(way.gates), user=user)
        port.open(UNMANAGED_TIMEOUT_S if is_unmanaged else OPEN_TIMEOUT_S)
        connection.start()
        return connection

    def start(self) -> None:
        """Look for the controller from now on."""
        self._port.loop.post(self._controller.start)
        if self._is_remote:
            self._port.loop.post(self._list_hosts)

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
        waiting: Future[RequestReply] = Future()
        self._waiting[request.request_id] = waiting
        self._controller.ask(request, partial(_settle, waiting))
        try:
            reply = self._wait(waiting, request, timeout_s)
        finally:
            del self._waiting[request.request_id]
            self._controller.forget(request.request_id)
        if reply.error_kind:
            raise error_from(reply.error_kind, reply.error) from _cause(reply)
        return reply.value

    def close(self) -> None:
        """Disconnect; requests under way are abandoned, not undone, and calls of handles fail."""
        self._closed = True
        for waiting in list(self._waiting.values()):
            waiting.cancel()
        if not self._caller.left:
            left = threading.Event()
            self._port.loop.post(lambda: self._caller.leave(left.set))
            left.wait(LEAVE_TIMEOUT_S)  # else the proxy would keep us until this process ends
        self._controller.stop()
        self._proxy.stop()
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
        if self._closed:
            raise NotRunningError(f"{CLOSED}; open another, for example with Client.connect()")

    def _absence(self) -> str:
        if self._controller.is_found:
            return ""
        return ", for no controller was found: the host that leads may be stopped, or cut off"

    def _wait(
        self, future: Future[RequestReply], request: Request, timeout_s: float | None
    ) -> RequestReply:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Of this request alone: what an earlier one has seen says nothing of the time since.
        gone_since: float | None = None
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            try:
                return future.result(LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S))
            except CancelledError:
                self._check_open()
                raise
            except FutureTimeoutError:
                self._controller.ask_again(request.request_id)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{request.operation} was not answered within {timeout_s:g} s"
                    f"{self._absence()}; it may have been carried out"
                )
            gone_since = None if self._port.is_answered() else gone_since or time.monotonic()
            if gone_since is not None and time.monotonic() - gone_since > GONE_S:
                raise NotRunningError(
                    f"the actor system on port {self._port.admin_port} is gone; see `greenroom "
                    "status`, or start it with `greenroom start`"
                )

    def _list_hosts(self) -> None:
        """Learn of the cluster's other hosts, for when the known ones are gone."""
        self._controller.forget(self._listing)
        self._listing = new_id()
        self._controller.ask(request_of(ListHosts(), self._listing), self._listed)
        self._port.loop.call_later(LIST_EVERY_S, self._list_hosts)

    def _listed(self, reply: RequestReply) -> None:
        self._port.learn_gates((reply.value or ())[:LISTED])


def _settle(waiting: Future[RequestReply], reply: RequestReply) -> None:
    if not waiting.done():  # closed meanwhile
        waiting.set_result(reply)


def user_name() -> str:
    """Return the name of the user that this process runs as, or the uid where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def _cause(reply: RequestReply) -> BaseException | None:
    if reply.exception is None:
        return None
    try:
        error = cloudpickle.loads(reply.exception)
    except Exception:  # a type of the user's that this process lacks; the text tells of it
        return None
    return error if isinstance(error, Exception) else None
