"""The lock that keeps a second writer of the same machine away from a store."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from understudy.persistence.errors import StoreLockedError


class WriterLock:
    """An exclusive flock on a file that names its holder; the kernel drops it when we die."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _held.add(self)

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

    @property
    def is_held(self) -> bool:
        """Whether this process still holds the lock."""
        return self._fd is not None

    def release(self) -> None:
        """Close our descriptor; a repeat does nothing."""
        if self._fd is not None:
            # Not LOCK_UN: in a forked child that would take the lock away from the parent.
            os.close(self._fd)
            self._fd = None
            _held.discard(self)


_held: set[WriterLock] = set()


def _release_inherited() -> None:
    for lock in tuple(_held):
        lock.release()


# Actors are forked from one another. A child that kept the descriptor would keep the lock after
# its parent's death, and so keep the parent's successor out.
os.register_at_fork(after_in_child=_release_inherited)
