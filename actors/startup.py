"""What a host process does with its surroundings at its start: lock, check, tell who started it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from typing import Any

from greenroom.actors.settings import HostSettings
from greenroom.core.errors import StartError
from greenroom.persistence.errors import StoreError, StoreMissingError
from greenroom.persistence.filesystem import FileStore

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
