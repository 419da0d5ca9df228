"""Processes by pid: identity, life and death, signals, children, and the limit of open files.

A pid alone is not an identity, because the kernel uses it again; a pid with its start time is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import resource
import secrets
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from greenroom.actors.messages.queries import Process
from greenroom.core.errors import StartError

logger = logging.getLogger(__name__)

# Fields of /proc/PID/stat, see proc(5), counted after the command's closing parenthesis.
_STATE, _PARENT, _START_TICKS, _ENV_START, _ENV_END = 0, 1, 19, 47, 48


def identify(pid: int, incarnation: str = "") -> Process | None:
    """Return the live process ``pid``, or None when there is none (a zombie counts as none)."""
    fields = stat_fields(pid)
    if not fields or fields[_STATE] in "ZX":
        return None
    return Process(pid, int(fields[_START_TICKS]), incarnation)


def parent_pid(pid: int) -> int:
    """Return the pid of a process's parent, 0 when it is gone."""
    fields = stat_fields(pid)
    return int(fields[_PARENT]) if fields else 0


def stat_fields(pid: int, thread: int | None = None) -> list[str]:
    """Return what /proc/PID/stat has after the command, see proc(5); empty when it has ended.

    With ``thread``, what is there of one of its threads.
    """
    where = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        stat = Path(f"{where}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


INCARNATION = "GREENROOM_INCARNATION"  # left by a program that is replaced by exec


def shared_page(what: str, size: int) -> mmap.mmap:
    """Make memory in which this process shows something to others of its user; see open_page.

    Not written through a descriptor: user code may close all, and open others. Where there is none
    to be had, this logs that, and nothing is shown.
    """
    try:
        fd = os.memfd_create(_page_name(what, os.getpid()))
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)  # the mapping has one of its own
    except OSError as error:
        logger.warning("this process cannot show its %s: %s", what, error)
        return mmap.mmap(-1, size)


def open_page(process: Process, what: str) -> tuple[int, str] | None:
    """Open what another process shows; return the descriptor and the path, None for nothing."""
    folder, name = f"/proc/{process.pid}/fd", _page_name(what, process.pid)
    try:
        for number in sorted(map(int, os.listdir(folder))):  # it is among the first
            path = f"{folder}/{number}"
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(path) == f"/memfd:{name} (deleted)":
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if is_alive(process):
                        return fd, path
                    os.close(fd)  # of a later process with its pid
    except OSError:
        pass  # it is gone, or another user's
    return None


def _page_name(what: str, pid: int) -> str:
    return f"greenroom-{what}-{pid}"


def this_process() -> Process:
    """Identify the calling process, with a new random incarnation or that of its program before."""
    process = identify(os.getpid(), os.environ.pop(INCARNATION, "") or secrets.token_hex(8))
    assert process is not None, "the calling process is alive"
    return process


def is_alive(process: Process) -> bool:
    """Return whether this very process, not a later one of the same pid, is alive."""
    now = identify(process.pid)
    return now is not None and now.start_ticks == process.start_ticks


def open_pidfd(process: Process) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        # The last two are for a thread that has the number by now, which is common where numbers
        # are small, as in a container that was started again.
        if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
            return None
        raise
    if is_alive(process):
        return fd
    os.close(fd)
    return None


@contextlib.contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Keep signals from this thread meanwhile, and from what it begins until that unblocks them."""
    numbers = set(signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def send_signal(process: Process, number: int) -> bool:
    """Signal this very process; False when it is gone."""
    fd = open_pidfd(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until the processes are gone; return those that are not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.005)
        left = [process for process in left if is_alive(process)]
    return left


def kill_all(processes: Iterable[Process], timeout_s: float = 5.0) -> list[Process]:
    """SIGKILL the processes and wait; return those that outlive ``timeout_s``."""
    processes = list(processes)
    for process in processes:
        send_signal(process, signal.SIGKILL)
    return wait_gone(processes, timeout_s)


def command_line(pid: int) -> str:
    """Return a process's command line in one string, "" when it is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace").strip()


def describe_process(pid: int) -> str:
    """Return "pid N (command)", for messages."""
    return f"pid {pid} ({command_line(pid)[:80]})"


def child_pids(pid: int) -> list[int]:
    """Return the pids of the direct children, of all the process's threads."""
    pids: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, children.read_text(encoding="ascii").split())
    return pids


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the processes that live under these, at any depth."""
    found: dict[int, Process] = {}
    frontier = list(pids)
    while frontier:
        new = {pid for parent in frontier for pid in child_pids(parent)} - set(found)
        children = {pid: process for pid in new if (process := identify(pid)) is not None}
        found.update(children)
        frontier = list(children)
    return list(found.values())


def environ_block() -> range:
    """Return where in this process's memory is what ``/proc/PID/environ`` shows."""
    fields = stat_fields(os.getpid())
    return range(int(fields[_ENV_START]), int(fields[_ENV_END]))


MOST = 65_536  # open files: more than a process here can serve; some systems allow 1,000 million
LEAST = 256  # an idle process has 40; each connection, replica and caller is one more


def raise_limit() -> int:
    """Raise this process's limit as far as is of use, and its children's with it; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def require_open_files() -> None:
    """Raise the limit; StartError where a host cannot work with what is allowed."""
    limit = raise_limit()
    if 0 <= limit < LEAST:
        raise StartError(
            f"this user may have {limit} files open at once (ulimit -Hn), and a host needs "
            f"{LEAST}, better thousands: raise the hard limit, by `ulimit -Hn`, LimitNOFILE= of "
            "systemd, or --ulimit nofile= of a container"
        )
