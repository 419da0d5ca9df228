"""The host process: starts this host's actor system and HTTP front, and restarts what dies.

Theory of operation. The host process holds no state. At its start it checks what runs: it adopts
a healthy system, kills the remains of a broken one, and starts what is missing (:func:`bring_up`).
The actor system is forked while this process has one thread, so that actors inherit the loaded
modules, and share their memory, but no locks.

From then on all of it runs on one asyncio loop (:class:`Host`), in these states:

    state       what it does                              ends
    starting    waits until the system answers HTTP       running; or stopping, by SIGTERM; or the
                                                          start fails, and all that was started is
                                                          killed
    running     keeps up the front, the host's place in   stopping, by SIGTERM or by the controller;
                the cluster                               or starting over
    stopping    drains the replicas, ends everything      the process ends

The death of the admin, or an unexpected exception, is dealt with by *starting over*: kill the
actors, then become a new host process by exec, with the same pid, lock and listening socket. The
HTTP front is left alone meanwhile. A process that started over never gives up: it also restarts
processes that die while it starts, and if its start fails, it starts over again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

from thespian.actors import ActorSystem, ActorSystemException

from greenroom.actors.cluster.membership import Membership
from greenroom.actors.environments import environment, folders
from greenroom.actors.host.ends import COUNT_EVERY_S, Ends, record_end
from greenroom.actors.host.front import Front, GrpcServer, answers_http, shown_url, url_of
from greenroom.actors.host.launcher import READY_FD, WAITING
from greenroom.actors.messages.admin import request_of
from greenroom.actors.messages.control import DescribeEnd, EndDescribed, StopHost
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime import draining, forking, settings as binding
from greenroom.actors.runtime.capacity import count_gpus
from greenroom.actors.runtime.cgroups import handed_on
from greenroom.actors.runtime.http_port import check_grpc, describe_holder
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.logs import (
    configure_logging,
    last_lines,
    prune_replica_logs,
    rotate_logs,
)
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.processes import (
    blocked,
    child_pids,
    describe_process,
    identify,
    is_alive,
    require_open_files,
    this_process,
)
from greenroom.actors.runtime.records import (
    ADMIN_ROLE,
    FRONT_ROLE,
    GRPC_ROLE,
    HOST_ROLE,
    WORKER_ROLE,
    RunRecords,
    forget_state,
    mark,
    records_of,
    role_of,
    show_title,
)
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.transport.addresses import admin_of_port, own_release
from greenroom.actors.transport.sockets import holder_of, local_listener
from greenroom.actors.transport.thespian_base import install
from greenroom.core.errors import StartError
from greenroom.core.operations import StopCluster
from greenroom.core.silence import TICK_S
from greenroom.persistence.checkpoints import Checkpoints, is_record
from greenroom.persistence.kv import OtherFormatError, StoreError, StoreMissingError
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

ROTATE_EVERY_S = 10.0
PRUNE_EVERY_S = 60.0  # logs and folders that are not needed, and actors that are not known
READY_TIMEOUT_S = 25.0  # for each thing that a start waits for
HEAR_AFTER_S = 1.0  # without progress; a start that goes on comes before the stop
READY_POLL_S = 0.005
JOIN_TIMEOUT_S = 5.0  # after which what keeps this host from joining, and may pass, is an error
START_AGAIN_S = 0.2  # so that starting over does not spin
RETRY_S = 1.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
# What starting over hands on to the next program of this process.
_LOCK_FD, _SOCKET_FD = "GREENROOM_HOST_LOCK_FD", "GREENROOM_HOST_SOCKET_FD"
_STARTS_OVER, _FORGETS = "GREENROOM_HOST_STARTS_OVER", "GREENROOM_HOST_FORGETS"
_ENTRY = "greenroom.actors.host.process:main"
_KEPT = (HOST_ROLE, FRONT_ROLE, WORKER_ROLE, GRPC_ROLE)
STOPS = (signal.SIGTERM, signal.SIGINT)


class Stop(asyncio.Event):
    """Is set when the host is to stop; ``forgets`` where the state on disk goes too."""

    forgets = False


def main() -> int:
    """Run the host process; its settings come by environment."""
    settings = read_settings()
    try:
        settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = lock(settings)
    except OSError as error:
        tell_outcome(f"the state dir {settings.state_dir} cannot be used: {error}")
        return 1
    if lock_fd is None:
        tell_outcome("running")
        return 0
    mark(settings.state_dir)
    configure_logging(settings, HOST_ROLE)
    settings = _with_gpus(settings)
    stop_wanted = Stop()
    stop_wanted.forgets = bool(os.environ.pop(_FORGETS, ""))
    for number in STOPS:
        signal.signal(number, lambda *_: stop_wanted.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # see start_over
    starts_over = bool(os.environ.pop(_STARTS_OVER, ""))
    had_key = settings.join is None or settings.cluster_key.exists()
    records, front, process = records_of(settings), None, this_process()
    title = f"{HOST_ROLE} (starting)"
    records.add(process, HOST_ROLE, title, **settings.to_environ())
    try:
        front = Front(settings, records)
        admin = bring_up(settings, records, front, process)
        loop = loop_of_host()
        port = Port(settings.admin_port, process, loop)
        host = Host(settings, records, front, admin, port, lock_fd, stop_wanted)
        loop.run_until_complete(host.start(starts_over=starts_over))
    except Exception as error:  # whatever it was, leave nothing unattended
        is_expected = isinstance(error, StartError)  # by its text
        logger.error("the host could not start: %s", error, exc_info=not is_expected)  # noqa: TRY400
        # A system that was up must not stay down for it.
        if starts_over and not stop_wanted.is_set():
            time.sleep(START_AGAIN_S)
            start_over(records, front, lock_fd, stop_wanted)
        records.kill(spare=(HOST_ROLE,), under=process.pid)
        if not had_key:  # of a first join that failed: the one given next time may be another
            settings.cluster_key.unlink(missing_ok=True)
        if stop_wanted.forgets:
            forget_state(settings)
        records.remove(process)
        tell_outcome(str(error) or type(error).__name__)
        return 1
    is_cut_short = stop_wanted.is_set()
    if not is_cut_short:
        show_title(HOST_ROLE)
    tell_outcome("the host process was told to stop" if is_cut_short else "ready")
    loop.run_until_complete(host.run())
    if is_cut_short and not had_key and not host.is_in_cluster():  # as above
        settings.cluster_key.unlink(missing_ok=True)
    return 0


# --- Starting: one thread, no loop ------------------------------------------------------------


def _with_gpus(settings: HostSettings) -> HostSettings:
    """Count the GPUs, for all processes to agree; it may take long."""
    if settings.num_gpus is not None or settings.no_replicas:
        return settings
    tell_starter("the count of GPUs")
    os.environ[binding.variable("num_gpus")] = str(count_gpus())
    return read_settings()


def lock(settings: HostSettings) -> int | None:
    """Take the host lock; None when another host process of this state dir has it; OSError."""
    held = os.environ.pop(_LOCK_FD, "")
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


def tell_starter(waits_for: str) -> None:
    """Tell the process that started this one what its start waits for from now on."""
    _tell(f"{WAITING}{waits_for}")


def tell_outcome(text: str) -> None:
    """Tell the process that started this one how it went, which is the last that it hears."""
    _tell(text)
    if fd := os.environ.pop(READY_FD, ""):
        os.close(int(fd))


def _tell(line: str) -> None:
    if fd := os.environ.get(READY_FD, ""):
        with contextlib.suppress(BrokenPipeError):  # it was killed or interrupted; we go on
            os.write(int(fd), (line.replace("\n", " ") + "\n").encode())


def bring_up(
    settings: HostSettings, records: RunRecords, front: Front, process: Process
) -> Process:
    """Adopt what runs, or kill its remains, and start what is missing; return the admin.

    StartError where that cannot be done.
    """
    # Orphans of this host's system become our children, so that none stays a zombie.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    require_open_files()
    inherited = os.environ.pop(_SOCKET_FD, "")
    if inherited:
        front.hold(socket.socket(fileno=int(inherited)))
    _check_store(settings)
    binding.prepare(settings)
    by_role: dict[str, Process] = {}
    for found, role in records.found().items():
        by_role.setdefault(role, found)  # what is on record comes first
    admin, front.process = by_role.get(ADMIN_ROLE), by_role.get(FRONT_ROLE)
    if admin is None:
        # Actors without their admin can be reached, but a new admin would make second ones of the
        # same names.
        tell_starter("the end of what is left of a broken system")
        killed = records.kill(spare=_KEPT)
        if killed:
            logger.warning("killed %d processes left by a broken system", len(killed))
    for role in (FRONT_ROLE, ADMIN_ROLE):
        if role in by_role and is_alive(by_role[role]):
            records.add(by_role[role], role)
    if GRPC_ROLE not in by_role:
        check_grpc(settings)  # before anything is started, though it is the last to be
    if front.process is None:
        tell_starter("the HTTP port")
        front.start(by_fork=forking.can_fork())
    if admin is not None:
        return admin
    admin = start_actor_system(settings, process)
    records.add(admin, ADMIN_ROLE)
    return admin


def _check_store(settings: HostSettings) -> None:
    """Raise StartError for a state that this version cannot use: no controller could, ever."""
    location = location_at(settings.store_name)
    tell_starter(f"the state in {location}")
    try:
        Checkpoints(location.read(is_record)).check_formats()
        if not settings.store:  # else another host may lead, whatever this one sees of the store
            location.read_claim()
    except StoreMissingError:
        return  # nothing was saved yet
    except OtherFormatError as error:
        raise StartError(f"the state in {location} is of another version: {error}") from error
    except StoreError as error:
        raise StartError(str(error)) from error


def start_actor_system(settings: HostSettings, process: Process) -> Process:
    """Have this process's child be the admin of an actor system; StartError where it cannot be."""
    port = settings.admin_port
    holder = describe_holder(port, settings.bind) or _describe_admin(port)
    if holder is not None:
        raise StartError(
            f"admin port {port} is in use by {holder}; stop it, or choose another port with "
            "--admin-port or GREENROOM_ADMIN_PORT"
        )
    tell_starter("the actor system (logs/host.log)")
    # For the fork; not before the front has been started, which has as much to import.
    with forking.uncollected():
        from greenroom.actors.controller import controller  # noqa: F401, PLC0415
        from greenroom.actors.proxy import proxy  # noqa: F401, PLC0415

        # What replicas have, they share.
        with contextlib.suppress(ImportError):
            import uvloop  # noqa: F401, PLC0415
    forking.share_memory()
    thespian_logging = {  # the admin writes warnings to this process's log
        "version": 1,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["err"]},
    }
    try:
        ended = partial(record_end, settings.run_dir)
        ActorSystem(
            install(_beat, ended), binding.capabilities_of(settings), logDefs=thespian_logging
        )
    except ActorSystemException as error:
        raise StartError(f"the actor system does not start on port {port}: {error}") from error
    tell_starter("the actor system's admin (logs/host.log)")
    # It answers before it is our child: the process that forked it has to end, and it to get its
    # title.
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (admin := _child_of(process, ADMIN_ROLE)) is None:
        if time.monotonic() > deadline:
            raise StartError("the actor system's admin died at its start; see logs/host.log")
        time.sleep(READY_POLL_S)
    return admin


def _beat(loop: asyncio.AbstractEventLoop) -> None:
    """Have an admin show its pulse."""
    Pulse().keep_beating(loop)


def _describe_admin(port: int) -> str | None:
    """Return who has the name of an admin that listens at no TCP port; None where it is free."""
    name = admin_of_port(port).socket_name
    try:
        local_listener(name).close()
    except OSError:
        holder = holder_of(name)
        return "a process that does not answer" if holder is None else describe_process(holder.pid)
    return None


def _child_of(parent: Process, role: str) -> Process | None:
    found = (identify(pid) for pid in child_pids(parent.pid) if role_of(pid) == role)
    return next((child for child in found if child is not None), None)


def start_over(
    records: RunRecords, front: Front | None, lock_fd: int, stop_wanted: Stop
) -> NoReturn:
    """Kill the actors, and become a new host process that starts them again; OSError.

    A stop that is asked for meanwhile is for that one, which hears of it once it can.
    """
    show_title(f"{HOST_ROLE} (starting)")
    os.environ[_STARTS_OVER] = "1"
    handed_on = {_LOCK_FD: lock_fd}
    if front is not None and front.listener is not None:
        handed_on[_SOCKET_FD] = front.listener.fileno()
    for variable, fd in handed_on.items():
        os.set_inheritable(fd, True)
        os.environ[variable] = str(fd)
    records.kill(spare=_KEPT)
    with blocked(STOPS):
        if stop_wanted.is_set():
            signal.raise_signal(signal.SIGTERM)
        if stop_wanted.forgets:
            os.environ[_FORGETS] = "1"
        os.execv(sys.executable, [sys.executable, "-c", forking.PROGRAM, _ENTRY])


def loop_of_host() -> asyncio.AbstractEventLoop:
    """Make the host process's loop, whose threads block STOPS."""
    loop = asyncio.new_event_loop()
    # The kernel gives a signal to any thread that does not block it, and what another thread takes
    # during start_over() is lost. What all of them block waits for the next program.
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOPS)
    loop.set_default_executor(ThreadPoolExecutor(initializer=block))
    return loop


# --- Running: everything on one loop ----------------------------------------------------------


class Host:
    """This host's system, once its processes have been started."""

    def __init__(
        self,
        settings: HostSettings,
        records: RunRecords,
        front: Front,
        admin: Process,
        port: Port,
        lock_fd: int,
        stop_wanted: Stop,
    ) -> None:
        self._settings = settings
        self._records = records
        self._front = front
        self._front.changed = self._report
        self._grpc = GrpcServer(settings, records)
        self._admin = admin
        self._lock_fd = lock_fd
        self._stop_wanted = stop_wanted
        self._is_stopping = False
        self._supervision: list[asyncio.Future[None]] = []
        self._port = port
        self._membership = Membership(settings, records, port, self._describe)
        self._ends = Ends(settings, groups=handed_on())
        port.on(StopHost, self._stop_as_ordered)
        port.on(DescribeEnd, self._describe_end)

    async def start(self, *, starts_over: bool) -> None:
        """Return once this host answers HTTP with its route table, or is to stop; StartError."""
        self._port.loop.keep_beating(Pulse(), self._settings.silence_timeout_s)
        if starts_over:
            self._supervise()
        elif self._grpc.is_wanted:
            await self._grpc.ensure()
        await self._wait_while(self._lacks_admin, may_fail=not starts_over)
        with blocked(STOPS):  # from the thread that looks who leads, as in loop_of_host()
            self._membership.begin()
        await self._wait_while(self._lacks, may_fail=not starts_over)
        if not starts_over and not self._stop_wanted.is_set():
            self._supervise()
        self._report()  # now with the front's workers

    async def _wait_while(self, lack: Callable[[], Awaitable[str]], *, may_fail: bool) -> None:
        """Return once nothing is lacking, or a stop is wanted and there is no progress; StartError.

        Where the start ``may_fail``, it does once waiting is no use.
        """
        begun_at = progress_at = time.monotonic()
        seen: set[str] = set()
        while lacks := await lack():
            now = time.monotonic()
            if lacks not in seen:  # what is lacked again is no progress
                seen.add(lacks)
                progress_at = now
                tell_starter(lacks)
            if now - progress_at > HEAR_AFTER_S and self._stop_wanted.is_set():
                return
            if may_fail:
                self._check_progress(now - begun_at)
            if now - progress_at > READY_TIMEOUT_S:
                raise StartError(f"after {now - begun_at:.0f} s this host still waits for {lacks}")
            await asyncio.sleep(READY_POLL_S)

    async def _lacks_admin(self) -> str:
        is_there = await self._port.answers()
        return "" if is_there else "an answer of the actor system's admin (logs/host.log)"

    async def _lacks(self) -> str:
        """Return what this host waits for until it answers HTTP; "" where it does."""
        controller = self._membership.controller
        if not self.is_in_cluster():
            return f"the controller of {self._membership.others}"
        if not self._grpc.is_ready:
            return "the gRPC server (logs/grpc.log)"
        if await asyncio.to_thread(answers_http, self._settings):
            return ""
        if not self._front.workers:
            return "the HTTP front's workers (logs/front.log)"
        if controller.found is None:
            return "the controller (logs/controller.log)"
        page = f"{url_of(self._settings)}/-/healthz"
        return f"the controller's tables (logs/controller.log, logs/proxy.log): {page} is not 200"

    def _report(self) -> None:
        self._port.loop.guarded(self._membership.report)

    def is_in_cluster(self) -> bool:
        """Return whether this host has joined the others, if there are any."""
        is_alone = not (self._settings.gates or self._settings.may_lead)
        return is_alone or self._membership.has_joined

    def _check_progress(self, passed_s: float) -> None:
        """Raise StartError where waiting is no use: the front has ended, or we cannot join."""
        if self._front.pid is None:
            raise StartError(f"the HTTP front ended: {self._last_line('front')}")
        if self._grpc.is_wanted and self._grpc.pid is None:
            raise StartError(f"the gRPC server ended: {self._last_line('grpc')}")
        reason, lasts = self._membership.obstacle()
        if reason and not self.is_in_cluster() and (lasts or passed_s > JOIN_TIMEOUT_S):
            raise StartError(reason)

    def _last_line(self, log: str) -> str:
        lines = last_lines(self._settings.logs_dir / f"{log}.log")
        return lines[-1] if lines else "it printed nothing"

    async def run(self) -> None:
        """Look after the system until it is to stop, and stop it."""
        # With this one, the loop wakes for those of STOPS, too.
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, reap_children)
        reap_children()
        while not self._stop_wanted.is_set():  # which a signal may do amid a step of wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_wanted.wait(), TICK_S)
        await self._stop()

    def _supervise(self) -> None:
        """Begin all that goes on until the stop; whatever of it fails starts the system over."""
        for work in (
            self._front.keep_up(self._end_of),
            self._grpc.keep_up(self._end_of),
            self._follow_admin(),
            every(PRUNE_EVERY_S, self._tidy, "what is left of dead replicas cannot be removed"),
            every(COUNT_EVERY_S, self._ends.count, "what the kernel has killed is not known"),
            every(ROTATE_EVERY_S, self._rotate_logs, "logs cannot be rotated"),
        ):
            self._supervision.append(asyncio.ensure_future(self._then_start_over(work)))

    async def _then_start_over(self, work: Awaitable[None]) -> None:
        """Wait for the end of ``work``, or its failure, and start the system over."""
        try:
            await work
        except Exception:
            logger.exception("the host process failed; starting over from the saved state")
            await asyncio.sleep(START_AGAIN_S)
        # Until the store can be written no controller could start a replica; what serves goes on.
        trouble = ""
        while found := await asyncio.to_thread(self._trouble_with_disk):
            if not trouble:
                logger.error("what runs is left alone until there can be a controller: %s", found)
            trouble = found
            await asyncio.sleep(RETRY_S)
        while True:
            try:
                start_over(self._records, self._front, self._lock_fd, self._stop_wanted)
            except OSError as error:  # there is no memory, say; nothing else would try again
                logger.error("the host process cannot become a new one yet: %s", error)  # noqa: TRY400
                await asyncio.sleep(RETRY_S)

    async def _end_of(self, process: Process) -> None:
        ended = asyncio.Event()
        cancel = self._port.loop.watch_process(process, ended.set)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            cancel()
            raise

    async def _follow_admin(self) -> None:
        """Return, for the system to start over, when the admin has died."""
        await self._end_of(self._admin)
        logger.error("the actor system's admin died; starting over from the saved state")

    async def _tidy(self) -> None:
        self._records.write_owed()
        self._ends.tidy()
        replicas = self._records.find("replica")
        prune_replica_logs(self._settings.logs_dir, replicas)
        # Else not all folders in use are known.
        if len(replicas) == len(self._records.with_role("replica")):
            # On a thread: a loop that is silent for long, as on a slow disk, is killed.
            await asyncio.to_thread(_prune_folders, self._settings)

    async def _rotate_logs(self) -> None:
        settings = self._settings
        if settings.log_max_bytes:  # on a thread, as above
            sizes = settings.log_max_bytes, settings.log_files
            await asyncio.to_thread(rotate_logs, settings.logs_dir, *sizes)

    def _trouble_with_disk(self) -> str:
        # Leaders have others to serve; and theirs may be a file system that never answers.
        if self._settings.may_lead or not self._settings.store_dir.exists():
            return ""
        try:
            location_at(self._settings.store_name).try_to_write()
        except StoreError as error:
            return str(error)
        return ""

    def _describe(self) -> dict[str, Any]:
        """Return what status shows of this host."""
        proxy, election = self._membership.proxy.found, self._membership.controller.election
        return {
            "name": self._settings.host_name,
            "address": self._settings.own_address,
            "state": "DRAINING" if self._is_stopping else "RUNNING",
            "release": own_release(),
            "takes_replicas": not self._settings.no_replicas,
            "store_trouble": "" if election is None else election.trouble,
            "admin_pid": self._admin.pid if is_alive(self._admin) else None,
            "logger_pid": None,  # a name of the contract; Thespian's logger is no process any more
            "host_pid": self._port.process.pid,
            "proxy": {
                "pid": proxy[1].pid if proxy is not None else None,
                "state": "RUNNING" if proxy is not None else "STARTING",
            },
            "front": {
                "pid": self._front.pid,
                "url": shown_url(self._settings),
                "workers": self._front.workers,
            },
            **(
                {"grpc": {"pid": self._grpc.pid, "port": self._settings.grpc_port}}
                if self._grpc.is_wanted
                else {}
            ),
        }

    def _stop_as_ordered(self, message: StopHost, sender: Address) -> None:
        if self._membership.obeys(message.epoch, sender):
            self._stop_wanted.forgets = message.forget
            self._stop_wanted.set()

    def _describe_end(self, message: DescribeEnd, sender: Address) -> None:
        async def answer() -> None:
            cause = await self._ends.cause(message.replica, message.address.addressDetails)
            reply = EndDescribed(request_id=message.request_id, cause=cause)
            self._port.loop.send(sender, reply)

        self._port.loop.start(answer())

    async def _stop(self) -> None:
        """Finish connections, drain replicas, end everything; state stays on disk."""
        show_title(f"{HOST_ROLE} (stopping)")
        self._is_stopping = True
        for task in self._supervision:
            task.cancel()
        settings, forget = self._settings, self._stop_wanted.forgets
        await self._membership.ask()  # for the limits of what was deployed last
        longest_s = draining.drain_s(settings)
        limit_s = draining.finish_s(longest_s)
        if binding.is_bound(settings) and not forget:
            await self._membership.drain(draining.move_s(longest_s), leave=False)
        await asyncio.gather(
            asyncio.to_thread(self._front.stop, limit_s),
            asyncio.to_thread(self._grpc.stop, limit_s),
        )
        if self._membership.controller.leads:
            await self._stop_controller(limit_s)
        elif not forget:
            await self._membership.drain(limit_s, leave=True)
        self._membership.stop()
        self._port.detach()
        self._records.kill(spare=(HOST_ROLE,), under=self._port.process.pid)
        self._records.remove(self._port.process)
        self._ends.tidy(kept_s=0)
        with contextlib.suppress(OSError):  # a read-only disk; its age tells that it is old
            settings.status_file.unlink(missing_ok=True)
        if forget:
            forget_state(settings)

    async def _stop_controller(self, limit_s: float) -> None:
        followed = self._membership.controller
        if followed.found is not None:
            address = followed.found[0]
            followed.stop()  # this host does not follow the next leader
            request = request_of(StopCluster(), self._port.process.incarnation)
            await self._port.ask(lambda: address, request, limit_s)


async def every(pause_s: float, work: Callable[[], Awaitable[None]], failure: str) -> NoReturn:
    """Do this again and again; what it raises is logged, as ``failure``.

    A read-only disk, say, is no reason to start over, and the next time must come.
    """
    while True:
        try:
            await work()
        except Exception:
            logger.exception(failure)
        await asyncio.sleep(pause_s)


def _prune_folders(settings: HostSettings) -> None:
    """Remove users' folders and environments that no replica of this host needs; blocks."""
    records = records_of(settings)  # its own, for it is on a thread

    def in_use(what: str) -> set[str]:
        return {
            name for each in records.details("replica") for name in each.get(what, "").split(",")
        }

    folders.prune(settings.folders_dir, lambda: in_use("folders"))
    environment.prune(settings.environments_dir, lambda: in_use("environment"))


def reap_children() -> None:
    """Collect all children that have ended, also the orphans that came to us."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
