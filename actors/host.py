"""The host process: starts this host's actor system and HTTP front, and restarts what dies.

Theory of operation. It holds no state. At its start it looks at what runs: a healthy system is
taken over, the remains of a broken one are killed, and what is missing is started. The death of the
admin, or of an actor system that cannot be repaired, is dealt with by starting over: kill the
actors, then become a new host process by exec, with the same pid and the same listening socket.

The actor system is forked from this process before it has a second thread, so that actors inherit
the loaded modules (and share their memory) but no locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from understudy.actors import thespian_repairs

thespian_repairs.apply()

from thespian.actors import ActorSystem, ActorSystemException

from understudy.actors import controller, proxy  # noqa: F401  # loaded once, before the fork
from understudy.actors.base import configure_logging
from understudy.actors.http_port import answers_http, bind_http, describe_holder, url_of
from understudy.actors.messages import (
    HostReported,
    MeetController,
    Process,
    RequestReply,
    StopCluster,
    StopHost,
)
from understudy.actors.port import CONTROLLER, PROXY, Finder, Port
from understudy.actors.processes import (
    RunRecords,
    child_pids,
    command_line,
    identify,
    is_alive,
    send_signal,
    this_process,
    wait_gone,
)
from understudy.actors.settings import STOCK, HostSettings, read_settings
from understudy.actors.system import HOST_ROLE, forget_state, kill_system
from understudy.actors.transport import base as own_base
from understudy.core.errors import StartError
from understudy.persistence.errors import StoreError, StoreMissingError
from understudy.persistence.filesystem import FileStore

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0
READY_TIMEOUT_S = 25.0
READY_POLL_S = 0.005
FRONT_STOP_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 30.0
FRONT_BACKOFF_S = 0.2
BIND_TIMEOUT_S = 5.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
FRONT_ROLE = "http master"
STOCK_BASE = "multiprocTCPBase"
ADMIN_ROLE = "thespian admin"
LOGGER_ROLE = "thespian logger"


class Host:
    """One host's system; :meth:`run` returns when it has been stopped."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.process = this_process()
        self.records = RunRecords(settings.run_dir)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._front: Process | None = None
        self._front_started_at = 0.0
        self._stopping = False
        self._forgetting = False
        self._admin: Process | None = None
        self._logger: Process | None = None

    # --- Start ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Take over or start everything; raises StartError with a reason for the user."""
        _become_subreaper()
        inherited = os.environ.pop("UNDERSTUDY_HOST_SOCKET_FD", "")
        if inherited:
            self._hold(socket.socket(fileno=int(inherited)))
        check_store(self.settings)
        self._adopt_or_clear()
        if self._front is None:
            self._hold(self._socket or bind_http(self.settings))
            self._start_front()
        if self._admin is None:
            self._start_actor_system()
        self._connect()

    def _hold(self, listener: socket.socket) -> None:
        """Keep the HTTP port; actors must not, or it stays open when we and the front are gone."""
        self._socket = listener
        os.set_inheritable(listener.fileno(), False)
        os.register_at_fork(after_in_child=listener.close)

    def _adopt_or_clear(self) -> None:
        by_role = {role: process for process, role in self.records.alive().items()}
        self._front = by_role.get(FRONT_ROLE)
        self._admin = by_role.get(ADMIN_ROLE)
        self._logger = by_role.get(LOGGER_ROLE)
        if self._admin is None:
            # Actors without their admin can be reached, but a new admin would make second ones of
            # the same names; the logger keeps the admin's port.
            spare = (HOST_ROLE, FRONT_ROLE, "http worker")
            killed = kill_system(self.records, spare=spare)
            if killed:
                logger.warning("killed %d processes left by a broken system", len(killed))
        if self._front is None:
            for worker in self.records.with_role("http worker"):
                send_signal(worker, signal.SIGTERM)

    def _start_actor_system(self) -> None:
        port = self.settings.admin_port
        holder = describe_holder(port)
        if holder is not None:
            raise StartError(
                f"admin port {port} is in use by {holder}; stop it, or choose another port with "
                "--admin-port or UNDERSTUDY_ADMIN_PORT"
            )
        try:
            base = STOCK_BASE if self.settings.transport == STOCK else own_base.install()
            ActorSystem(base, {"Admin Port": port}, logDefs=_thespian_logging())
        except ActorSystemException as error:
            raise StartError(f"the actor system does not start on port {port}: {error}") from error
        self._find_admin()

    def _find_admin(self) -> None:
        """Record the admin, which has become our child, and the logger, which is the admin's."""
        for pid in child_pids(self.process.pid):
            children = child_pids(pid)
            if "MultiProcAdmin" in command_line(pid):
                self._admin = identify(pid)
                loggers = [each for each in children if "logger" in command_line(each).lower()]
                self._logger = identify(loggers[0]) if loggers else None
        if self._admin is None:
            raise StartError("the actor system's admin died at its start; see logs/host.log")
        self.records.add(self._admin, ADMIN_ROLE)
        if self._logger is not None:
            self.records.add(self._logger, LOGGER_ROLE)

    def _connect(self) -> None:
        self.port = port = Port(self.settings.admin_port, self.process, self.settings.transport)
        port.on(RequestReply, lambda message, _: self._replied.set())
        port.on(StopHost, lambda message, _: self.request_stop(forget=message.forget))
        self._replied = threading.Event()
        port.open()
        self._controller = Finder(port, CONTROLLER, lambda *_: self._introduce())
        self._proxy = Finder(port, PROXY, lambda *_: self._introduce())
        port.loop.post(self._follow)

    def _follow(self) -> None:
        """Watch everything; on the port's thread."""
        self._controller.start()
        self._proxy.start()
        for process, what in ((self._admin, self._admin_died), (self._logger, self._logger_died)):
            if process is not None:
                self.port.loop.watch_process(process, self._later(what))
        self._watch_front()
        self._report()

    def _watch_front(self) -> None:
        if self._front is not None:
            self.port.loop.watch_process(self._front, self._later(self._front_died))

    def _watch_logger(self) -> None:
        if self._logger is not None:
            self.port.loop.watch_process(self._logger, self._later(self._logger_died))

    def _later(self, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._events.put(action)

    # --- Life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Deal with events until :meth:`request_stop`."""
        while not self._stopping:
            self._events.get()()
        self._stop()

    def request_stop(self, *, forget: bool = False) -> None:
        """Have :meth:`run` drain, stop everything and return; callable from a signal handler.

        With ``forget`` the state on disk goes too.
        """
        self._events.put(lambda: self._begin_stop(forget=forget))

    def reap(self) -> None:
        """Collect ended children, also the orphans that came to us; from a signal handler."""
        self._events.put(_reap)

    def _begin_stop(self, *, forget: bool) -> None:
        self.records.unmark_ready()
        self._stopping = True
        self._forgetting = forget

    def _introduce(self) -> None:
        if self._controller.found is not None and self._proxy.found is not None:
            address, process = self._controller.found
            meet = MeetController(controller=address, process=process)
            self.port.loop.send(self._proxy.found[0], meet)
        self._send_report()

    def _report(self) -> None:
        self._send_report()
        self.port.loop.call_later(REPORT_EVERY_S, self._report)

    def _send_report(self) -> None:
        if self._controller.found is not None:
            report = HostReported(host=socket.gethostname(), report=self._describe())
            self.port.loop.send(self._controller.found[0], report)

    def _describe(self) -> dict[str, Any]:
        found = self._proxy.found
        front_pid = self._front.pid if self._front is not None else None
        return {
            "name": socket.gethostname(),
            "address": f"127.0.0.1:{self.settings.admin_port}",
            "state": "DRAINING" if self._stopping else "RUNNING",
            "admin_pid": self._admin.pid if self._admin is not None else None,
            "logger_pid": self._logger.pid if self._logger is not None else None,
            "host_pid": self.process.pid,
            "proxy": {
                "pid": found[1].pid if found is not None else None,
                "state": "RUNNING" if found is not None else "STARTING",
            },
            "front": {
                "pid": front_pid,
                "url": url_of(self.settings),
                "workers": sorted(p.pid for p in self.records.with_role("http worker")),
            },
        }

    def _admin_died(self) -> None:
        logger.error("the actor system's admin died; starting over from the saved state")
        self._start_over()

    def _logger_died(self) -> None:
        """Learn the pid of the logger that the admin starts instead."""
        deadline = time.monotonic() + 2.0
        while self._admin is not None and is_alive(self._admin) and time.monotonic() < deadline:
            ours = {process.pid for process in self.records.alive()}  # a replica may be called so
            children = set(child_pids(self._admin.pid)) - ours
            loggers = [pid for pid in children if "ogger" in command_line(pid)]
            found = identify(loggers[0]) if loggers else None
            if found is not None:
                logger.warning("the actor system's logger died; its new pid is %d", found.pid)
                self._logger = found
                self.records.add(found, LOGGER_ROLE)
                self.port.loop.post(self._watch_logger)
                return
            time.sleep(READY_POLL_S)
        self._start_over()

    def _start_over(self) -> None:
        self.records.unmark_ready()
        os.environ["UNDERSTUDY_READY_FD"] = ""
        if self._socket is not None:
            os.set_inheritable(self._socket.fileno(), True)
            os.environ["UNDERSTUDY_HOST_SOCKET_FD"] = str(self._socket.fileno())
        if self._admin is not None:
            self.records.remove(self._admin)
        kill_system(self.records, spare=(HOST_ROLE, FRONT_ROLE, "http worker"))
        os.execv(sys.executable, [sys.executable, "-m", "understudy.actors.host"])

    # --- The HTTP front -------------------------------------------------------------------------

    def _start_front(self) -> None:
        environ = dict(os.environ)
        pass_fds: tuple[int, ...] = ()
        if self._socket is not None:
            environ["UNDERSTUDY_HTTP_FD"] = str(self._socket.fileno())
            pass_fds = (self._socket.fileno(),)
        with (self.settings.logs_dir / "front.log").open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "understudy.http_front.server"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
            )
        self._front = identify(child.pid)
        self._front_started_at = time.monotonic()
        if self._front is not None:
            self.records.add(self._front, FRONT_ROLE)

    def _front_died(self) -> None:
        if self._stopping:
            return
        logger.error("the HTTP front died; starting another")
        if time.monotonic() - self._front_started_at < FRONT_BACKOFF_S:
            time.sleep(FRONT_BACKOFF_S)  # it dies at its start: do not spin
        if self._socket is None:
            self._hold(self._bind_again())
        self._start_front()
        self.port.loop.post(self._watch_front)

    def _bind_again(self) -> socket.socket:
        """Bind anew after a take-over, when the dead front's workers have let go of the port."""
        for worker in self.records.with_role("http worker"):
            send_signal(worker, signal.SIGKILL)
        deadline = time.monotonic() + BIND_TIMEOUT_S
        while True:
            try:
                return bind_http(self.settings)
            except StartError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(READY_POLL_S)

    def wait_ready(self) -> None:
        """Wait until this host answers HTTP with its route table; StartError when it does not."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not answers_http(self.settings):
            if self._front is not None and not is_alive(self._front):
                raise StartError(f"the HTTP front ended: {_last_line(self.settings, 'front.log')}")
            if time.monotonic() > deadline:
                raise StartError(f"{url_of(self.settings)}/-/healthz does not answer 200")
            time.sleep(READY_POLL_S)
        self.port.loop.post(self._send_report)  # now with the front's workers

    # --- Stop -----------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Finish connections, drain replicas, end everything; state stays on disk."""
        if self._front is not None:
            send_signal(self._front, signal.SIGTERM)
            wait_gone([self._front], FRONT_STOP_TIMEOUT_S)
        found = self._controller.found
        if found is not None:
            request = StopCluster(request_id=self.process.incarnation)
            self.port.loop.post(lambda: self.port.loop.send(found[0], request))
            self._replied.wait(DRAIN_TIMEOUT_S)
        self._controller.stop()
        self._proxy.stop()
        self.port.close()
        kill_system(self.records, spare=(HOST_ROLE,), under=self.process.pid)
        self.records.remove(self.process)
        if self._forgetting:
            forget_state(self.settings)


def check_store(settings: HostSettings) -> None:
    """Raise StartError if the state on disk cannot be used by this version."""
    try:
        if settings.store_dir.exists():
            FileStore.open(settings.store_dir, namespace="controller", read_only=True).close()
    except StoreMissingError:
        return  # the folder is there, and nothing was saved yet
    except StoreError as error:
        raise StartError(str(error)) from error


def _thespian_logging() -> dict[str, Any]:
    """Thespian's logger process writes warnings to the host process's log."""
    return {
        "version": 1,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["err"]},
    }


def _become_subreaper() -> None:
    """Have orphans of this host's system become our children, so that none stays a zombie."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _last_line(settings: HostSettings, log: str) -> str:
    lines = (settings.logs_dir / log).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "it printed nothing"


def _tell(text: str) -> None:
    """Tell who started us how it went: one line, once."""
    fd = os.environ.pop("UNDERSTUDY_READY_FD", "")
    if fd:
        with contextlib.suppress(BrokenPipeError):  # killed or interrupted; the system is up
            os.write(int(fd), (text.replace("\n", " ") + "\n").encode())
        os.close(int(fd))


def _lock(settings: HostSettings) -> int | None:
    """Take the host lock; None when another host process of this state dir has it."""
    path = settings.run_dir / "host.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A POSIX lock, because a flock would be inherited by the actors, and outlive this process.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return None
    return fd


def main() -> int:
    """Run the host process; its settings come by environment."""
    settings = read_settings()
    settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _lock(settings) is None:
        _tell("running")
        return 0
    configure_logging(settings, HOST_ROLE)
    host = Host(settings)
    signal.signal(signal.SIGTERM, lambda *_: host.request_stop())
    signal.signal(signal.SIGINT, lambda *_: host.request_stop())
    host.records.add(host.process, HOST_ROLE, "host")
    try:
        host.start()
        host.wait_ready()
    except Exception as error:  # whatever it was, leave nothing that nobody looks after
        logger.exception("the host could not start")
        kill_system(host.records, spare=(HOST_ROLE,), under=host.process.pid)
        host.records.remove(host.process)
        _tell(str(error) or type(error).__name__)
        return 1
    signal.signal(signal.SIGCHLD, lambda *_: host.reap())
    host.reap()
    host.records.mark_ready(host.process)
    _tell("ready")
    host.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
