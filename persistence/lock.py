"""The locks of a store: a writer's for as long as it lives, and one around each single change."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from greenroom.persistence.errors import StoreLockedError

CHANGE_TIMEOUT_S = 2.0
CHANGE_RETRY_S = 0.002


class _Lock:
    """A descriptor whose locks the kernel drops when we die."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this process still has the descriptor."""
        return self._fd is not None

    def release(self) -> None:
        """Close our descriptor; a repeat does nothing."""
        if self._fd is not None:
            # Not LOCK_UN: in a forked child that would take the lock away from the parent.
            os.close(self._fd)
            self._fd = None
            _held.discard(self)


class WriterLock(_Lock):
    """An exclusive flock on a file that names its holder."""

    @classmethod
    def acquire(cls, path: Path) -> WriterLock:
        """Take the lock without waiting; raises StoreLockedError or OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise StoreLockedError(
                f"cannot open the store {path.parent} for writing: another writer, pid {holder}, "
                f"holds {path}. Stop that process, or open the store read-only"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)


class ChangeLock(_Lock):
    """A POSIX lock for the moment of one change, which holds across hosts that share the folder.

    NFSv4 has such locks, unlike most kinds; nobody holds one for longer than a few system calls.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it meanwhile; StoreLockedError where another process does not let go of it."""
        assert self._fd is not None, "checked by the writer"
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise StoreLockedError(
                        f"another process has held {self._path} for {CHANGE_TIMEOUT_S:g} s, which "
                        "takes milliseconds: it was stopped in the midst of a change. Continue or "
                        "end it"
                    ) from None
                time.sleep(CHANGE_RETRY_S)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


_held: set[_Lock] = set()


def _release_inherited() -> None:
    for lock in tuple(_held):
        lock.release()


# Actors are forked from one another. A child that kept the descriptor would keep the lock after
# its parent's death, and so keep the parent's successor out.
os.register_at_fork(after_in_child=_release_inherited)
