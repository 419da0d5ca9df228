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
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from thespian.actors import ActorAddress, ActorSystem, ActorSystemException

from greenroom.actors.cluster.election import LeaderElection
from greenroom.actors.cluster.leader_lease import NAMESPACE
from greenroom.actors.cluster.membership import Membership
from greenroom.actors.host.front import answers_http, start_front, url_of
from greenroom.actors.host.http_port import bind_http, borrow, describe_holder
from greenroom.actors.host.records import (
    ADMIN_ROLE,
    FRONT_ROLE,
    HOST_ROLE,
    LOGGER_ROLE,
    WORKER_ROLE,
    RunRecords,
    forget_state,
    mark,
    records_of,
    role_of,
    show_title,
)
from greenroom.actors.messages.admin import RequestReply, StopCluster
from greenroom.actors.messages.control import MeetController, StopHost
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.replica import folders
from greenroom.actors.runtime import forking
from greenroom.actors.runtime import settings as binding
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.logs import configure_logging, prune_replica_logs, rotate_logs
from greenroom.actors.runtime.port import CONTROLLER, PROXY, Finder, ThreadPort
from greenroom.actors.runtime.processes import (
    child_pids,
    command_line,
    identify,
    is_alive,
    kill_all,
    parent_pid,
    require_open_files,
    send_signal,
    this_process,
    wait_gone,
)
from greenroom.actors.runtime.settings import HostSettings, read_settings, resolved_gates
from greenroom.actors.transport import base
from greenroom.actors.transport.addresses import parse_address
from greenroom.core.backoff import pause_s
from greenroom.core.errors import StartError
from greenroom.persistence.errors import StoreError, StoreMissingError
from greenroom.persistence.filesystem import FileStore

# What a host process does with its surroundings at its start: lock, check, tell who started it.

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
LOCK_VARIABLE = "GREENROOM_HOST_LOCK_FD"


def check_store(settings: HostSettings) -> None:
    """Raise StartError if the state on disk cannot be used by this version."""
    try:
        if settings.store_dir.exists():
            FileStore.open(settings.store_dir, namespace="controller", read_only=True).close()
    except StoreMissingError:
        return  # the folder is there, and nothing was saved yet
    except StoreError as error:
        raise StartError(str(error)) from error


def thespian_logging() -> dict[str, Any]:
    """Thespian's logger process writes warnings to the host process's log."""
    return {
        "version": 1,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["err"]},
    }


def become_subreaper() -> None:
    """Have orphans of this host's system become our children, so that none stays a zombie."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_children() -> None:
    """Collect all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def last_line(settings: HostSettings, log: str) -> str:
    """Return what a log says last, for the reason of a failure."""
    lines = (settings.logs_dir / log).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "it printed nothing"


def tell_starter(text: str) -> None:
    """Tell who started us how it went: one line, once."""
    fd = os.environ.pop("GREENROOM_READY_FD", "")
    if fd:
        with contextlib.suppress(BrokenPipeError):  # killed or interrupted; the system is up
            os.write(int(fd), (text.replace("\n", " ") + "\n").encode())
        os.close(int(fd))


def lock(settings: HostSettings) -> int | None:
    """Take the host lock; None when another host process of this state dir has it.

    Raises OSError where the disk does not allow it.
    """
    held = os.environ.pop(LOCK_VARIABLE, "")
    if held:  # by this process before it became this program
        os.set_inheritable(int(held), False)
        return int(held)
    path = settings.run_dir / "host.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A POSIX lock, because a flock would be inherited by the actors, and outlive this process.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return None
    return fd


# How a host process finds its cluster's controller, and what to say where it cannot.


def find_controller(
    port: ThreadPort,
    settings: HostSettings,
    membership: Membership,
    on_found: Callable[[], None],
) -> Finder | LeaderElection:
    """Return what finds the controller, not started: on this host, on others, or on either."""
    finder: Finder | LeaderElection
    if settings.leaders:
        finder = LeaderElection(
            port,
            settings,
            lambda *_: on_found(),
            membership.lost_controller,
            membership.silent_s,
            lambda: membership.hosts,
        )
    else:
        given = resolved_gates(settings)

        def gates() -> list[ActorAddress]:
            every = dict.fromkeys((*given, *membership.hosts)) if given else ()
            return [ActorAddress(parse_address(gate)) for gate in every]

        finder = Finder(port, CONTROLLER, lambda *_: on_found(), membership.lost_controller, gates)
    membership.on_silence = finder.doubt
    return finder


def leads(settings: HostSettings, controller: Finder | LeaderElection) -> bool:
    """Tell whether the controller belongs on this host at present."""
    return controller.leads if isinstance(controller, LeaderElection) else settings.join is None


def obstacle(
    settings: HostSettings, controller: Finder | LeaderElection, membership: Membership
) -> str:
    """Return why this host will not join or lead; "" while it still may."""
    trouble = membership.trouble
    if isinstance(controller, LeaderElection) and controller.never_led:
        trouble = controller.refusal or trouble
    if not trouble:
        return ""
    if isinstance(controller, LeaderElection) and not membership.is_refused:
        if not controller.never_led:
            return ""  # it will lead itself, if nobody else does
        first = settings.leader_addresses[0]
        begin = "" if first == settings.own_address else f"start {first} first, or "
        trouble += (
            f"; and nobody has led from the state dir {settings.state_dir} yet, where only the "
            f"first of --leaders may begin: {begin}name the folder that all leaders share with "
            "--state-dir"
        )
    return f"cannot join {', '.join(settings.gates)}: {trouble}"


# Replicas that nobody has ever told anything: whoever had one made could not reach it any more.
#
# An actor of ours is on record from its first message on. A replica whose controller was cut off,
# or died, just after it had asked this host's admin for it may never get one: the controller
# starts another elsewhere, forgets this one, and nobody knows that there is a process.

_TITLE = "Replica "  # Thespian's for the process, until that gives itself another


class Unasked:
    """Finds them among an admin's children: those that were there, unknown, two looks in a row."""

    def __init__(self) -> None:
        self._suspected: frozenset[Process] = frozenset()

    def look(self, children: Collection[Process], known: Collection[int]) -> list[Process]:
        """Return the children that are to go; ``known`` are the pids of processes on record."""
        unknown = frozenset(child for child in children if child.pid not in known)
        found = sorted(unknown & self._suspected)
        self._suspected = unknown
        return found

    def end(self, admin: Process, records: RunRecords, on_ended: Callable[[Process], None]) -> None:
        """Kill what a look finds."""
        known = {process.pid for process in records.alive()}
        if os.getpid() not in known:
            return  # the records are gone, as with an unmounted volume: they say nothing of anybody
        pids = [pid for pid in child_pids(admin.pid) if command_line(pid).startswith(_TITLE)]
        children = [child for child in map(identify, pids) if child is not None]
        for child in self.look(children, known):
            if send_signal(child, signal.SIGKILL):
                on_ended(child)


logger = logging.getLogger(__name__)

ROTATE_EVERY_S = 10.0
PRUNE_EVERY_S = 60.0  # logs and folders that nobody needs, and actors that nobody knows
READY_TIMEOUT_S = 25.0
READY_POLL_S = 0.005
FRONT_STOP_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 25.0
LEAVE_TIMEOUT_S = 25.0
JOIN_TIMEOUT_S = 5.0  # after which what keeps this host from joining, and may pass, is an error
FRONT_BACKOFF_S, MAX_FRONT_BACKOFF_S = 0.2, 10.0  # where one front after the other dies
FRONT_STABLE_S = 10.0  # one that ran this long did not die of its start
FRONT_RETRY_S = 1.0
BIND_TIMEOUT_S = 5.0
BIND_POLL_S = 0.02
BORROW_RETRY_S = 1.0
WORKERS_POLL_S = 0.05
START_AGAIN_S = 0.2
NUDGE_EVERY_S = 10.0
MAIN_THREAD_S = 60.0  # that it may take for one event, such as binding a port that is in use
DISK_RETRY_S = 1.0
_STARTS_OVER = "GREENROOM_HOST_STARTS_OVER"
_PROGRAM = "import sys; from greenroom.actors.host.process import main; sys.exit(main())"
FIND_ADMIN_S, FIND_ADMIN_POLL_S = 2.0, 0.005
# What serves HTTP goes on, whatever becomes of the actors.
_KEPT = (HOST_ROLE, FRONT_ROLE, WORKER_ROLE)


class Host:
    """One host's system; :meth:`run` returns when it has been stopped."""

    def __init__(self, settings: HostSettings, lock_fd: int) -> None:
        self.settings = settings
        self.process = this_process()
        self.records = records_of(settings)
        self._lock_fd = lock_fd
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._front: Process | None = None
        self._front_started_at = 0.0
        self._front_failures = 0  # in a row
        self._stopping = False
        self._forgetting = False
        self._nudge_at = 0.0
        self._nudged_at: float | None = None  # since when the main thread has an event to take
        self._must_stop = False
        self._waits_for_disk = False
        self._starts_over = bool(os.environ.pop(_STARTS_OVER, ""))
        self._admin: Process | None = None
        self._unasked = Unasked()
        self._logger: Process | None = None
        self._has_joined_before = settings.join is None or settings.cluster_key.exists()

    # --- Start ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Take over or start everything; raises StartError with a reason for the user."""
        become_subreaper()
        require_open_files()
        inherited = os.environ.pop("GREENROOM_HOST_SOCKET_FD", "")
        if inherited:
            self._hold(socket.socket(fileno=int(inherited)))
        check_store(self.settings)
        binding.prepare(self.settings)
        binding.remember(self.settings)
        self._adopt_or_clear()
        if self._front is None:
            self._hold(self._socket or self._bind())
            self._start_front()
        if self._admin is None:
            self._start_actor_system()
        self._connect()
        self._take_over_port()
        self._let_old_workers_go(self._front)

    def _hold(self, listener: socket.socket) -> None:
        """Keep the HTTP port; actors must not, or it stays open when we and the front are gone."""
        self._socket = listener
        os.set_inheritable(listener.fileno(), False)
        os.register_at_fork(after_in_child=listener.close)

    def _take_over_port(self) -> None:
        """Get the listening socket that a front has which an earlier host process started."""
        if self._socket is not None or self._stopping:
            return
        listener = borrow(self.records.find(WORKER_ROLE), self.settings)
        if listener is not None:
            self._hold(listener)
        else:  # the front's workers are about to start, or are of a version that lends nothing
            self._later_on(BORROW_RETRY_S, self._take_over_port)

    def _adopt_or_clear(self) -> None:
        by_role: dict[str, Process] = {}
        for process, role in self.records.found().items():
            by_role.setdefault(role, process)  # what is on record comes first
        self._front = by_role.get(FRONT_ROLE)
        self._admin = by_role.get(ADMIN_ROLE)
        self._logger = by_role.get(LOGGER_ROLE)
        if self._admin is None:
            # Actors without their admin can be reached, but a new admin would make second ones of
            # the same names; the logger keeps the admin's port.
            killed = self.records.kill(spare=_KEPT)
            if killed:
                logger.warning("killed %d processes left by a broken system", len(killed))
        elif self._logger is None:  # the admin starts, or started, another
            self._events.put(self._logger_died)
        for role in (FRONT_ROLE, ADMIN_ROLE, LOGGER_ROLE):
            if role in by_role and is_alive(by_role[role]):
                self.records.add(by_role[role], role)

    def _start_actor_system(self) -> None:
        port = self.settings.admin_port
        holder = describe_holder(port, self.settings.bind)
        if holder is not None:
            raise StartError(
                f"admin port {port} is in use by {holder}; stop it, or choose another port with "
                "--admin-port or GREENROOM_ADMIN_PORT"
            )
        # For the fork; not before the front has been started, which has as much to import.
        with forking.uncollected():
            from greenroom.actors.controller import actor as controller  # noqa: F401, PLC0415
            from greenroom.actors.proxy import actor as proxy  # noqa: F401, PLC0415
        forking.share_memory()
        try:
            name = base.install()
            ActorSystem(name, binding.capabilities_of(self.settings), logDefs=thespian_logging())
        except ActorSystemException as error:
            raise StartError(f"the actor system does not start on port {port}: {error}") from error
        self._find_admin()

    def _find_admin(self) -> None:
        """Record the admin, which becomes our child, and the logger, which is the admin's.

        It answers before it has: who forked it has to end first, and it to say its name.
        """
        deadline = time.monotonic() + FIND_ADMIN_S
        while (admin := self._look_for_admin()) is None:
            if time.monotonic() > deadline:
                raise StartError("the actor system's admin died at its start; see logs/host.log")
            time.sleep(FIND_ADMIN_POLL_S)
        self._admin = admin
        self.records.add(admin, ADMIN_ROLE)
        if self._logger is not None:
            self.records.add(self._logger, LOGGER_ROLE)

    def _look_for_admin(self) -> Process | None:
        for pid in child_pids(self.process.pid):
            if role_of(pid) == ADMIN_ROLE:
                loggers = [each for each in child_pids(pid) if role_of(each) == LOGGER_ROLE]
                self._logger = identify(loggers[0]) if loggers else None
                return identify(pid)
        return None

    def _connect(self) -> None:
        self.port = port = ThreadPort(self.settings.admin_port, self.process)
        port.on(StopHost, self._stop_as_told)
        self.membership = Membership(
            self.settings, self.process, self.records, port, self._describe
        )
        port.open()
        port.loop.post(self._begin_beating)
        self._controller = find_controller(port, self.settings, self.membership, self._introduce)
        self._proxy = Finder(port, PROXY, lambda *_: self._introduce())
        port.loop.post(self._follow)

    def _begin_beating(self) -> None:
        self.port.loop.keep_beating(Pulse(), self.settings.silence_timeout_s, self._may_beat)

    def _may_beat(self) -> bool:
        """Return whether the main thread, which restarts what dies, goes on too."""
        now = time.monotonic()
        if self._nudged_at is None and now >= self._nudge_at:
            self._nudged_at, self._nudge_at = now, now + NUDGE_EVERY_S
            self._events.put(self._nudge_taken)
        nudged_at = self._nudged_at
        return self._stopping or nudged_at is None or now - nudged_at < MAIN_THREAD_S

    def _nudge_taken(self) -> None:
        self._nudged_at = None

    def _stop_as_told(self, message: StopHost, sender: Address) -> None:
        if self.membership.obeys(message.epoch, sender):
            self.request_stop(forget=message.forget)

    def _follow(self) -> None:
        """Watch everything; on the port's thread."""
        self._controller.start()
        self._proxy.start()
        for process, what in ((self._admin, self._admin_died), (self._logger, self._logger_died)):
            if process is not None:
                self.port.loop.watch_process(process, self._later(what))
        self._watch_front()
        self.membership.begin()
        self._prune()
        if self.settings.log_max_bytes:
            # On a thread of its own: what is silent for long, as on a slow disk, is killed.
            threading.Thread(target=self._rotate_logs, name="greenroom-logs", daemon=True).start()

    def _rotate_logs(self) -> None:
        settings = self.settings
        while True:
            rotate_logs(settings.logs_dir, settings.log_max_bytes, settings.log_files)
            time.sleep(ROTATE_EVERY_S)

    def _watch_front(self) -> None:
        if self._front is None:  # it had ended before it could be identified
            self._events.put(self._front_died)
        else:
            self.port.loop.watch_process(self._front, self._later(self._front_died))

    def _watch_logger(self) -> None:
        if self._logger is not None:
            self.port.loop.watch_process(self._logger, self._later(self._logger_died))

    def _later(self, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._events.put(action)

    def _later_on(self, delay_s: float, action: Callable[[], None]) -> None:
        def wait() -> None:
            self.port.loop.call_later(delay_s, self._later(action))

        self.port.loop.post(wait)

    # --- Life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Deal with events until :meth:`request_stop`."""
        while not self._stopping:
            try:
                self._events.get()()
            except Exception:  # not even this may end what restarts all else
                logger.exception("the host process failed; starting over from the saved state")
                time.sleep(START_AGAIN_S)  # do not spin
                self._start_over()
        self._stop()

    def request_stop(self, *, forget: bool = False) -> None:
        """Have :meth:`run` drain, stop everything and return; callable from a signal handler.

        With ``forget`` the state on disk goes too.
        """
        self._must_stop = True
        self._events.put(lambda: self._begin_stop(forget=forget))

    def reap(self) -> None:
        """Collect ended children, also the orphans that came to us; from a signal handler."""
        self._events.put(reap_children)

    def _begin_stop(self, *, forget: bool) -> None:
        show_title(f"{HOST_ROLE} (stopping)")
        self._stopping = True
        self._forgetting = forget

    def _introduce(self) -> None:
        if self._controller.found is not None and self._proxy.found is not None:
            address, process = self._controller.found
            meet = MeetController(
                controller=address, process=process, by=self.process, epoch=self._controller.epoch
            )
            self.port.loop.send(self._proxy.found[0], meet)
        if self._controller.found is not None:
            self.membership.met_controller(*self._controller.found)

    def _prune(self) -> None:
        self.records.write_owed()
        replicas = self.records.find("replica")
        prune_replica_logs(self.settings.logs_dir, replicas)
        if len(replicas) == len(self.records.with_role("replica")):  # else not all uses are known
            folders.prune(self.settings.folders_dir, self._folders_in_use)
        if self._admin is not None:
            self._unasked.end(self._admin, self.records, _tell_of_unasked)
        self.port.loop.call_later(PRUNE_EVERY_S, self._prune)

    def _folders_in_use(self) -> set[str]:
        return {each.get("folder", "") for each in self.records.details("replica")}

    def _describe(self) -> dict[str, Any]:
        found = self._proxy.found
        front_pid = _pid(self._front)
        return {
            "name": self.settings.host_name,
            "address": self.settings.own_address,
            "state": "DRAINING" if self._stopping else "RUNNING",
            "admin_pid": _pid(self._admin),
            "logger_pid": _pid(self._logger),
            "host_pid": self.process.pid,
            "proxy": {
                "pid": found[1].pid if found is not None else None,
                "state": "RUNNING" if found is not None else "STARTING",
            },
            "front": {
                "pid": front_pid,
                "url": url_of(self.settings),
                "workers": [] if front_pid is None else _workers_of(front_pid),
            },
        }

    def _admin_died(self) -> None:
        logger.error("the actor system's admin died; starting over from the saved state")
        self._start_over()

    def _logger_died(self) -> None:
        """Learn the pid of the logger that the admin starts instead."""
        deadline = time.monotonic() + 2.0
        while self._admin is not None and is_alive(self._admin) and time.monotonic() < deadline:
            children = child_pids(self._admin.pid)
            loggers = [pid for pid in children if role_of(pid) == LOGGER_ROLE]
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
        """Become a new host process that starts all actors, once the store can be written.

        Until then no controller could start a replica, so what still serves is left alone.
        """
        if not self._waits_for_disk and (trouble := self._trouble_with_disk()):
            logger.error("what runs is left alone until there can be a controller: %s", trouble)
            self._waits_for_disk = True
            self._later_on(DISK_RETRY_S, self._look_at_disk)
        elif not self._waits_for_disk:
            self._be_anew()

    def _look_at_disk(self) -> None:
        if self._trouble_with_disk():
            self._later_on(DISK_RETRY_S, self._look_at_disk)
        else:
            self._be_anew()

    def _trouble_with_disk(self) -> str:
        # Leaders have others to serve; and theirs may be a file system that never answers.
        if self.settings.leaders or not self.settings.store_dir.exists():
            return ""
        try:
            FileStore.try_to_write(self.settings.store_dir, namespace=NAMESPACE)
        except StoreError as error:
            return str(error)
        return ""

    def _be_anew(self) -> NoReturn:
        show_title(f"{HOST_ROLE} (starting)")
        os.environ[_STARTS_OVER] = "1"
        self._pass_on(LOCK_VARIABLE, self._lock_fd)
        if self._socket is not None:
            self._pass_on("GREENROOM_HOST_SOCKET_FD", self._socket.fileno())
        self.records.kill(spare=_KEPT)
        os.execv(sys.executable, [sys.executable, "-c", _PROGRAM])

    def _pass_on(self, variable: str, fd: int) -> None:
        os.set_inheritable(fd, True)
        os.environ[variable] = str(fd)

    def could_not_start(self) -> None:
        """Start over again, if this was to bring back what had run; else return.

        Whatever died meanwhile, a system that was up must not stay down for it.
        """
        if self._starts_over:
            time.sleep(START_AGAIN_S)  # do not spin
            if not self._must_stop:
                self._be_anew()

    def forget_key(self) -> None:
        """Delete the key of a first join that failed: the one given next time may be another."""
        if not self._has_joined_before:
            self.settings.cluster_key.unlink(missing_ok=True)

    # --- The HTTP front -------------------------------------------------------------------------

    def _start_front(self) -> None:
        assert self._socket is not None, "bound before"
        self._front = start_front(self.settings, self.records, self._socket.fileno())
        self._front_started_at = time.monotonic()

    def _front_died(self) -> None:
        if self._stopping:
            return
        if time.monotonic() - self._front_started_at > FRONT_STABLE_S:
            self._front_failures = 0
        self._front_failures += 1
        if self._front_failures == 1:
            logger.error("the HTTP front died; starting another")
            self._start_front_again()
            return
        delay_s = pause_s(self._front_failures - 1, FRONT_BACKOFF_S, MAX_FRONT_BACKOFF_S)
        logger.error(
            "the HTTP front died, the %dth time in a row (see front.log); starting another in %g s",
            self._front_failures,
            delay_s,
        )
        self._later_on(delay_s, self._start_front_again)

    def _start_front_again(self) -> None:
        if self._stopping:
            return
        try:
            if self._socket is None:
                self._hold(self._bind())
        except StartError as error:
            logger.error("%s; trying again", error)  # noqa: TRY400  # no fault of ours to trace
            self._later_on(FRONT_RETRY_S, self._start_front_again)
            return
        self._start_front()
        self.port.loop.post(self._watch_front)
        self._let_old_workers_go(self._front)

    def _let_old_workers_go(self, front: Process | None) -> None:
        """Have a dead front's workers, which serve on, end once there are those of ``front``."""
        if front is None or front != self._front or not is_alive(front) or self._stopping:
            return
        if not _workers_of(front.pid):
            self._later_on(WORKERS_POLL_S, lambda: self._let_old_workers_go(front))
            return
        for worker in self._old_workers():
            send_signal(worker, signal.SIGTERM)  # they finish what they have
        self.port.loop.post(self.membership.report)

    def _old_workers(self) -> list[Process]:
        own = self._front.pid if self._front is not None else 0
        return [each for each in self.records.find(WORKER_ROLE) if parent_pid(each.pid) != own]

    def _bind(self) -> socket.socket:
        """Return the HTTP port's socket: the one that a dead front's workers have, or a new one.

        Workers that do not lend it let go of the port when they are told.
        """
        workers = self.records.find(WORKER_ROLE)
        listener = borrow(workers, self.settings)
        if listener is not None:
            return listener
        for worker in workers:
            send_signal(worker, signal.SIGTERM)  # they finish what they have
        deadline = time.monotonic() + BIND_TIMEOUT_S
        while workers := list(filter(is_alive, workers)):
            with contextlib.suppress(StartError):
                return bind_http(self.settings)
            if time.monotonic() > deadline:
                kill_all(workers)
            time.sleep(BIND_POLL_S)
        return bind_http(self.settings)

    def wait_ready(self) -> None:
        """Wait until this host answers HTTP with its route table; StartError when it does not."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not (self._is_in_cluster() and answers_http(self.settings)):
            if self._starts_over:
                self._deal_with_deaths()
            elif self._front is None or not is_alive(self._front):
                raise StartError(f"the HTTP front ended: {last_line(self.settings, 'front.log')}")
            self._check_joining(deadline - READY_TIMEOUT_S + JOIN_TIMEOUT_S)
            if time.monotonic() > deadline:
                raise StartError(
                    f"{url_of(self.settings)}/-/healthz does not answer 200"
                    if self._is_in_cluster()
                    else f"cannot join {', '.join(self.settings.gates)}: no controller answers"
                )
            time.sleep(READY_POLL_S)
        self.port.loop.post(self.membership.report)  # now with the front's workers

    def _is_in_cluster(self) -> bool:
        return not self.settings.gates or self.membership.has_joined

    def _check_joining(self, deadline: float) -> None:
        """Raise StartError where another host does not let this one join, or is not there."""
        is_hopeless = self.membership.is_hopeless and len(self.settings.gates) == 1
        if not self._starts_over and (is_hopeless or time.monotonic() > deadline):
            reason = obstacle(self.settings, self._controller, self.membership)
            if reason:
                raise StartError(reason)

    def _deal_with_deaths(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()()

    # --- Stop -----------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Finish connections, drain replicas, end everything; state stays on disk."""
        if binding.is_bound(self.settings) and not self._forgetting:
            self.membership.drain(DRAIN_TIMEOUT_S, leave=False)
        front = [*self._old_workers(), *([] if self._front is None else [self._front])]
        for process in front:
            send_signal(process, signal.SIGTERM)
        wait_gone(front, FRONT_STOP_TIMEOUT_S)
        if leads(self.settings, self._controller):
            self._stop_controller()
        elif not self._forgetting:
            self.membership.drain(LEAVE_TIMEOUT_S, leave=True)
        self._controller.stop()
        self._proxy.stop()
        self.port.close()
        self.records.kill(spare=(HOST_ROLE,), under=self.process.pid)
        self.records.remove(self.process)
        with contextlib.suppress(OSError):  # a read-only disk; its age tells that it is old
            self.settings.status_file.unlink(missing_ok=True)
        if self._forgetting:
            forget_state(self.settings)

    def _stop_controller(self) -> None:
        if self._controller.found is not None:
            controller = self._controller.found[0]
            self._controller.stop()  # whoever leads next is not for this host to follow
            request = StopCluster(request_id=self.process.incarnation)
            self.port.ask_until(lambda: controller, request, RequestReply, DRAIN_TIMEOUT_S)


def _tell_of_unasked(process: Process) -> None:
    logger.warning("killed process %d: it was made for a replica and never told", process.pid)


def _pid(process: Process | None) -> int | None:
    return process.pid if process is not None and is_alive(process) else None


def _workers_of(front: int) -> list[int]:
    return sorted(pid for pid in child_pids(front) if role_of(pid) == WORKER_ROLE)


def main() -> int:
    """Run the host process; its settings come by environment."""
    settings = read_settings()
    try:
        settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = lock(settings)
    except OSError as error:
        tell_starter(f"the state dir {settings.state_dir} cannot be used: {error}")
        return 1
    if lock_fd is None:
        tell_starter("running")
        return 0
    mark(settings.own_dir)
    configure_logging(settings, HOST_ROLE)
    host = Host(settings, lock_fd)
    signal.signal(signal.SIGTERM, lambda *_: host.request_stop())
    signal.signal(signal.SIGINT, lambda *_: host.request_stop())
    title = f"{HOST_ROLE} (starting)"
    host.records.add(host.process, HOST_ROLE, title, **settings.to_environ())
    try:
        host.start()
        host.wait_ready()
    except Exception as error:  # whatever it was, leave nothing that nobody looks after
        is_told = isinstance(error, StartError)  # by its text
        logger.error("the host could not start: %s", error, exc_info=not is_told)  # noqa: TRY400
        host.could_not_start()
        host.records.kill(spare=(HOST_ROLE,), under=host.process.pid)
        host.forget_key()
        host.records.remove(host.process)
        tell_starter(str(error) or type(error).__name__)
        return 1
    signal.signal(signal.SIGCHLD, lambda *_: host.reap())
    host.reap()
    show_title(HOST_ROLE)
    tell_starter("ready")
    host.run()
    return 0
