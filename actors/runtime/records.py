"""Which processes belong to a host's system, and what each of them is.

Three things identify them, each for a reason of its own:

- Every process carries a *mark*: the variable GREENROOM_SYSTEM with the folder of the host's own
  files, in the memory that ``/proc/PID/environ`` shows. Children inherit it by fork and by exec,
  whatever becomes of their parent, so a start or a stop finds all of them. Processes of another
  user or of another PID namespace, such as a container's, never count.
- Its *title*, which ``ps`` shows, names its role.
- A *record* in ``run/`` adds what only the process itself knows: its incarnation, and for example
  the address of a replica. Reading records is cheap; finding marks reads all of ``/proc``. Records
  are soft state: if the disk cannot be written, a process does without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import setproctitle

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.processes import (
    command_line,
    descendants,
    environ_block,
    identify,
    is_alive,
    kill_all,
    send_signal,
)
from greenroom.actors.runtime.settings import HostSettings, variable
from greenroom.actors.runtime.state_dir import being_written, write_private
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

MARK = "GREENROOM_SYSTEM"
WRITE_AGAIN_S = 5.0
TITLE_BYTES = 256  # of the environment's memory, which titles may use; they begin before it

HOST_ROLE = "host"
FRONT_ROLE = "http master"
WORKER_ROLE = "http worker"
GRPC_ROLE = "grpc server"
ADMIN_ROLE = "thespian admin"
_TITLE = "greenroom: "
_BEGINNINGS = (  # of command lines: our titles, then Thespian's
    *(
        (_TITLE + role, role)
        for role in (
            *(HOST_ROLE, FRONT_ROLE, WORKER_ROLE, GRPC_ROLE, "proxy", "controller", "replica"),
        )
    ),
    ("RepairedMultiProcAdmin ", ADMIN_ROLE),
    ("MultiProcAdmin ", ADMIN_ROLE),
    ("Replica ", "replica"),
)
_PROGRAMS = (  # of ``python -c``, before the process has a title
    ("greenroom.actors.host.process:main", HOST_ROLE),
    ("greenroom.http_front.server:main", FRONT_ROLE),
    ("greenroom.actors.transport.thespian_base import go_on", "replica"),
)


def role_of(pid: int) -> str:
    """Return the role that a process's command line names, "" if it names none."""
    command = command_line(pid)
    for beginning, role in _BEGINNINGS:
        if command.startswith(beginning):
            return role
    return next((role for program, role in _PROGRAMS if program in command), "")


def is_ready(host: Process) -> bool:
    """Return whether the system of this host process answers: its title says so."""
    return command_line(host.pid) == _TITLE + HOST_ROLE


def show_title(title: str) -> None:
    """Have ``ps`` show the calling process under this title."""
    setproctitle.setproctitle(f"{_TITLE}{title}")
    if MARK in os.environ:
        _show_mark()


def mark_of(folder: Path) -> str:
    """Return the value of :data:`MARK` for the system whose host's own files are in ``folder``."""
    return os.path.realpath(folder)


def can_mark(folder: Path) -> bool:
    """Return whether this process can mark itself: there is room, and no other system's mark."""
    has_room = len(environ_block()) > len(_entry(folder)) + TITLE_BYTES
    return has_room and os.environ.get(MARK, mark_of(folder)) == mark_of(folder)


def mark(folder: Path) -> None:
    """Mark this process, and with it all that it starts."""
    is_possible = can_mark(folder)
    os.environ[MARK] = mark_of(folder)
    if is_possible:
        _show_mark()


def _show_mark() -> None:
    """Write the mark where ``/proc/PID/environ`` shows it; a title has overwritten that memory.

    The C library's own copy of the environment is elsewhere by then.
    """
    entry = os.fsencode(f"\0{MARK}={os.environ[MARK]}\0")
    block = environ_block()
    if len(block) >= len(entry):
        ctypes.memmove(block.stop - len(entry), entry, len(entry))


def is_marked(pid: int, folder: Path) -> bool:
    """Return whether a process, of this user and PID namespace, belongs to this folder's system."""
    return mark_of(folder) in _marks(pid)


def _marks(pid: int) -> list[str]:
    """Return the folders that a process of this user and PID namespace is marked with."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return []
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return []
    except OSError:  # it has ended, or shows nothing of itself
        return []
    mark = os.fsencode(f"{MARK}=")
    return [os.fsdecode(each.removeprefix(mark)) for each in environ if each.startswith(mark)]


def folder_of_port(admin_port: int) -> Path | None:
    """Return the state dir of this user's system that runs on that port; None without one."""
    wanted = {variable("admin_port"): str(admin_port)}
    for pid in _pids():
        for folder in map(Path, _marks(pid) if role_of(pid) == HOST_ROLE else ()):
            hosts = RunRecords(folder / "run").details(HOST_ROLE)
            if any(wanted.items() <= host.items() for host in hosts):
                return folder
    return None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _entry(folder: Path) -> bytes:
    return os.fsencode(f"{MARK}={mark_of(folder)}")


class RunRecords:
    """The processes of one host's system; ``folder`` is the ``run/`` of its state dir."""

    def __init__(self, folder: Path, *, call_later: Callable[..., object] | None = None) -> None:
        self._folder = folder
        self._owed: dict[Process, dict[str, object]] = {}  # records that the disk has not taken
        self._call_later = call_later

    def add(self, process: Process, role: str, title: str | None = None, **more: str) -> None:
        """Record a process under its role and, for the calling one, show its title.

        ``more`` is what :meth:`details` returns. A record that the disk does not take is written
        later: by itself with ``call_later``, else by :meth:`write_owed`.
        """
        if title is not None:
            show_title(title)
        self._owed[process] = {"role": role, **process._asdict(), "more": more}
        self.write_owed()

    def write_owed(self) -> None:
        """Write the records that the disk has not taken so far, if it takes them now."""
        for process, record in list(self._owed.items()):
            path = self._path(process)
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(path, json.dumps(record))
            except OSError as error:
                logger.warning(
                    "process %d, %s, is not on record for now: %s: %s",
                    process.pid,
                    record["role"],
                    path,
                    error.strerror,
                )
                if self._call_later is not None:
                    self._call_later(WRITE_AGAIN_S, self.write_owed)
                return
            del self._owed[process]

    def remove(self, process: Process) -> None:
        """Forget a process; harmless when there is no record, or it cannot be removed."""
        self._owed.pop(process, None)
        with contextlib.suppress(OSError):  # readers see that the process is gone
            self._path(process).unlink(missing_ok=True)

    def alive(self) -> dict[Process, str]:
        """Return the recorded processes that live, with their roles; drop the other records."""
        return {process: role for process, role, _ in self._read()}

    def with_role(self, *roles: str) -> list[Process]:
        """Return the recorded live processes of these roles."""
        return [process for process, role, _ in self._read() if role in roles]

    def details(self, role: str) -> list[dict[str, str]]:
        """Return what the live processes of a role have recorded besides."""
        return [more for _, each, more in self._read() if each == role]

    def described(self) -> list[tuple[Process, str, dict[str, str]]]:
        """Return the recorded live processes, with their roles and what they recorded besides."""
        return list(self._read())

    def found(self) -> dict[Process, str]:
        """Return all processes of the system but the calling one, on record or not, with roles."""
        found = self.alive()
        known = {(process.pid, process.start_ticks) for process in found}
        for pid in _pids():
            process = identify(pid) if is_marked(pid, self._folder.parent) else None
            if process is not None and (process.pid, process.start_ticks) not in known:
                found[process] = role_of(pid)
        return {process: role for process, role in found.items() if process.pid != os.getpid()}

    def find(self, *roles: str) -> list[Process]:
        """Return the live processes of these roles, on record or not."""
        return [process for process, role in self.found().items() if role in roles]

    def hosts(self) -> list[Process]:
        """Return the host process; two while one starts and finds that another runs."""
        return self.with_role(HOST_ROLE) or self.find(HOST_ROLE)

    def kill(self, *, spare: Collection[str] = (), under: int | None = None) -> list[Process]:
        """SIGKILL all processes of the system and those under them; return what was alive.

        Killing is the normal way to end an actor that has nothing left to finish: all that must
        outlive it is on disk. Roles in ``spare`` are left alone, with what those of the HTTP front
        have started. ``under`` is the pid of a process, itself left alone, that has inherited what
        dead processes had started.
        """
        victims: dict[Process, str] = {}
        # Look again until nothing is new: a process that is stopped starts no further ones.
        while new := self._victims(spare, under, victims):
            for process in new:
                send_signal(process, signal.SIGSTOP)
            victims.update(new)
        # The proxy first: it would answer with errors what replicas had when they were killed. If
        # it does not answer, its callers send again what they may.
        kill_all(sorted(victims, key=lambda process: victims[process] != "proxy"))
        for process in victims:
            self.remove(process)
        return list(victims)

    def _victims(
        self, spare: Collection[str], under: int | None, known: Collection[Process]
    ) -> dict[Process, str]:
        found = self.found()
        spared = [process for process, role in found.items() if role in spare]
        others = [process for process in spared if found[process] != HOST_ROLE]
        left_alone = {os.getpid(), *(process.pid for process in known)}
        for process in (*spared, *descendants(process.pid for process in others)):
            left_alone.add(process.pid)
        victims = {process: role for process, role in found.items() if role not in spare}
        roots = [process.pid for process in victims] + ([] if under is None else [under])
        on_record = {process.pid for process in victims}
        for process in descendants(roots):
            if process.pid not in on_record:
                victims[process] = ""
        return {each: role for each, role in victims.items() if each.pid not in left_alone}

    def _read(self) -> Iterable[tuple[Process, str, dict[str, str]]]:
        """Read all records of live processes: process, role, details."""
        try:
            paths = list(self._folder.glob("*.json"))
        except PermissionError:  # another user's: nothing of ours can be there
            return
        for path in paths:
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                role, more = record.pop("role"), record.pop("more", None)
                process = Process(**record)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # removed meanwhile, or written by something else
            if is_alive(process):
                yield process, role, dict(more or {})
            else:
                self.remove(process)

    def _path(self, process: Process) -> Path:
        return self._folder / f"{process.pid}-{process.start_ticks}.json"


def records_of(settings: HostSettings) -> RunRecords:
    """Return the processes of this host's system."""
    return RunRecords(settings.run_dir)


def forget_state(settings: HostSettings) -> None:
    """Delete the state on disk of a system that has ended, as far as the disk lets it."""
    location_at(settings.store_name).forget()
    for folder in (
        *(settings.store_dir, settings.run_dir, settings.logs_dir),
        *(settings.folders_dir, settings.environments_dir),
    ):
        shutil.rmtree(folder, ignore_errors=True)
    files = (being_written(settings.status_file), settings.host_id_file, settings.known_store_file)
    for left in files:
        with contextlib.suppress(OSError):
            left.unlink(missing_ok=True)


# setproctitle finds the memory for titles by the first variable that this process began with, so
# it must look before any variable is set. The environment that /proc shows is gone after that.
setproctitle.getproctitle()
if MARK in os.environ:
    _show_mark()
