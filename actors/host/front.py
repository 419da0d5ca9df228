"""The HTTP front and the gRPC server of a host: processes that the host process keeps up.

The front is a gunicorn master. The first one is forked, with everything that the host process has
imported. A later one is a program of its own, because by then the host process has threads.

Workers outlive their master and go on serving. So a master that dies costs no request: the host
process starts another on the same listening socket, and once that has workers, tells those of the
dead one to finish. A host process that finds a front running borrows the socket from a worker: who
connects when master and workers end together waits for the next ones, and is not refused.

The gRPC server is one process, where one is asked for, and always a program of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import ClassVar, NoReturn

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime import forking, settings as binding
from greenroom.actors.runtime.http_port import bind_http, borrow, turn_away
from greenroom.actors.runtime.logs import open_log_or_stderr
from greenroom.actors.runtime.processes import (
    child_pids,
    identify,
    is_alive,
    kill_all,
    parent_pid,
    send_signal,
    wait_gone,
)
from greenroom.actors.runtime.records import FRONT_ROLE, GRPC_ROLE, WORKER_ROLE, RunRecords, role_of
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.backoff import pause_s
from greenroom.core.errors import StartError

logger = logging.getLogger(__name__)

STABLE_S = 10.0  # a master or server that ran this long did not die of its start
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0  # where one after the other dies
BIND_TIMEOUT_S = 5.0
BIND_POLL_S = 0.02
WORKERS_POLL_S = 0.05
_MASTER, _FD = "greenroom.http_front.server:main", "GREENROOM_FRONT_FD"


class Service:
    """A process that the host process keeps up, and whose output goes to a log of its own."""

    role: ClassVar[str]
    name: ClassVar[str]
    log: ClassVar[str]

    def __init__(self, settings: HostSettings, records: RunRecords) -> None:
        self._settings = settings
        self._records = records
        self.process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Its pid while it lives."""
        return self.process.pid if self.process is not None and is_alive(self.process) else None

    async def ensure(self) -> None:
        """Start it unless it runs; StartError."""
        raise NotImplementedError

    async def take_over(self) -> None:
        """Take what there was before it, once it has been started; it may end meanwhile."""

    def _launch(
        self, entry: str, environ: Mapping[str, str], keep: Collection[int], *, by_fork: bool
    ) -> None:
        output = open_log_or_stderr(self._settings, self.log)
        try:
            pid = forking.launch(entry, output=output, keep=keep, environ=environ, by_fork=by_fork)
        finally:
            os.close(output)
        self.process = identify(pid)
        if self.process is not None:  # else it has ended already
            self._records.add(self.process, self.role)

    async def keep_up(self, ended: Callable[[Process], Awaitable[None]]) -> NoReturn:
        """Start it, and another whenever one has ended: later, where they end soon.

        ``ended`` returns with the end of a process.
        """
        failures = 0  # in a row
        while True:
            started_at, how = time.monotonic(), "died"
            try:
                await self.ensure()
                if self.process is not None:
                    taking_over = asyncio.ensure_future(self.take_over())
                    try:
                        await ended(self.process)
                    finally:
                        taking_over.cancel()
            except StartError as error:
                how = f"cannot start: {error}"
            failures = 1 if time.monotonic() - started_at > STABLE_S else failures + 1
            delay_s = pause_s(failures - 1, FIRST_PAUSE_S, MAX_PAUSE_S) if failures > 1 else 0.0
            text = "the %s %s (failure %d in a row, see %s.log); starting another in %g s"
            logger.error(text, self.name, how, failures, self.log, delay_s)
            await asyncio.sleep(delay_s)

    def stop(self, limit_s: float) -> None:
        """Let it finish what it has, and end. Blocks."""
        end_within(limit_s, [] if self.process is None else [self.process])


def end_within(limit_s: float, processes: Iterable[Process]) -> None:
    """Let processes finish what they have, and end. Blocks."""
    for process in processes:
        send_signal(process, signal.SIGTERM)
    wait_gone(processes, limit_s)


class Front(Service):
    """The front's master process and listening socket, in the host process.

    ``changed`` is called once a master has workers.
    """

    role, name, log = FRONT_ROLE, "HTTP front", "front"

    def __init__(self, settings: HostSettings, records: RunRecords) -> None:
        super().__init__(settings, records)
        self.changed: Callable[[], None] = lambda: None
        self.listener: socket.socket | None = None  # None while only the workers have it

    @property
    def workers(self) -> list[int]:
        """The pids of the master's workers that are ready."""
        children = [] if self.pid is None else child_pids(self.pid)
        return sorted(pid for pid in children if role_of(pid) == WORKER_ROLE)

    def hold(self, listener: socket.socket) -> socket.socket:
        """Keep the listening socket, but not in actors: it would outlive this process there."""
        self.listener = listener
        os.set_inheritable(listener.fileno(), False)
        os.register_at_fork(after_in_child=listener.close)
        return listener

    def start(self, *, by_fork: bool) -> None:
        """Start a master on the listening socket, after getting that. Blocks; StartError."""
        listener = self.listener or self.hold(self._bind())
        held = os.dup(listener.fileno())
        try:
            self._launch(_MASTER, {_FD: str(held)}, [held], by_fork=by_fork)
        finally:
            os.close(held)

    async def ensure(self) -> None:
        """See Service; by a program, as a fork would close what the loop has, by its number."""
        if self.pid is not None:
            return
        if self.listener is None:
            # On a thread, for it may wait; but only this loop starts anything, so that nothing
            # starts once this is cancelled.
            self.hold(await asyncio.to_thread(self._bind))
        self.start(by_fork=False)

    async def take_over(self) -> None:
        """Hold the socket, and end workers of dead masters, once there are others."""
        while not self.workers:
            await asyncio.sleep(WORKERS_POLL_S)
        listener = self.listener or borrow(self._records.find(WORKER_ROLE), self._settings)
        if listener is not None and self.listener is None:
            self.hold(listener)
        for worker in self._old_workers():
            send_signal(worker, signal.SIGTERM)  # they finish what they have
        self.changed()

    def stop(self, limit_s: float) -> None:
        """Let the master and all workers finish what they have, and end. Blocks."""
        listener = self.listener or borrow(self._records.find(WORKER_ROLE), self._settings)
        end_within(limit_s, [*self._old_workers(), *filter(None, [self.process])])
        if listener is not None:
            turn_away(listener, is_tls=self._settings.http.ssl_certfile is not None)

    def _old_workers(self) -> list[Process]:
        own = self.process.pid if self.process is not None else 0
        return [each for each in self._records.find(WORKER_ROLE) if parent_pid(each.pid) != own]

    def _bind(self) -> socket.socket:
        """Return the port's listening socket: the one that a dead master's workers have, or new.

        Workers that do not lend it let go of the port when they are asked to end.
        """
        workers = self._records.find(WORKER_ROLE)
        listener = borrow(workers, self._settings)
        if listener is not None:
            return listener
        for worker in workers:
            send_signal(worker, signal.SIGTERM)
        deadline = time.monotonic() + BIND_TIMEOUT_S
        while workers := list(filter(is_alive, workers)):
            with contextlib.suppress(StartError):
                return bind_http(self._settings)
            if time.monotonic() > deadline:
                kill_all(workers)
            time.sleep(BIND_POLL_S)
        return bind_http(self._settings)


def url_of(settings: HostSettings) -> str:
    """Return the front's URL as a client on this host reaches it."""
    return _url(settings, {"0.0.0.0": "127.0.0.1", "::": "::1"})


def shown_url(settings: HostSettings) -> str:
    """Return the front's URL for status: at a host's own address where it listens at all of them.

    A host that is bound to none is shown with the address that it listens at.
    """
    own = settings.own_address.rpartition(":")[0]
    return _url(settings, {"0.0.0.0": own} if binding.is_bound(settings) else {})


def _url(settings: HostSettings, reached_at: Mapping[str, str]) -> str:
    host = reached_at.get(settings.http.host, settings.http.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.http.ssl_certfile else "http"
    return f"{scheme}://{host}:{settings.http.port}"


def answers_http(settings: HostSettings) -> bool:
    """Return whether the front answers its health page with 200. Blocks."""
    address = url_of(settings).partition("://")[2]
    connection: http.client.HTTPConnection
    if settings.http.ssl_certfile:
        context = ssl._create_unverified_context()  # our own front, asked only for its health
        connection = http.client.HTTPSConnection(address, timeout=2, context=context)
    else:
        connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request("GET", f"{settings.http.root_path}/-/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class GrpcServer(Service):
    """The gRPC server's process, in the host process; does nothing where none is asked for."""

    role, name, log = GRPC_ROLE, "gRPC server", "grpc"

    def __init__(self, settings: HostSettings, records: RunRecords) -> None:
        super().__init__(settings, records)
        self.process = next(iter(records.find(GRPC_ROLE)), None)

    @property
    def is_wanted(self) -> bool:
        """Return whether the settings ask for one."""
        return self._settings.grpc_port is not None

    @property
    def is_ready(self) -> bool:
        """Return whether it takes calls, or none has to."""
        return not self.is_wanted or (
            self.process is not None and role_of(self.process.pid) == GRPC_ROLE
        )

    async def ensure(self) -> None:
        """See Service; StartError where the extra is missing. Waits for ever if none is wanted."""
        if not self.is_wanted:
            await asyncio.Event().wait()
        if self.pid is not None:
            return
        if importlib.util.find_spec("grpc_health") is None:
            raise StartError("gRPC needs the extra 'grpc': pip install 'greenroom[grpc]'")
        self._launch("greenroom.http_front.grpc.serving:main", {}, (), by_fork=False)
