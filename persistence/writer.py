"""The right to change a store, and the changes that it guards.

Two writers are kept apart twice. A lock for life stops a second writer of the same machine. Where
hosts share the folder nobody has that lock, for a host that is gone or stopped would keep it, and
the epoch alone decides: whoever opens writes a higher number and a token of its own into the epoch
file, and every writer reads that file before each rename and each unlink. Anything but its own
claim there means that it was superseded, and it refuses. Look and change are one, under a lock that
holds across hosts, as are the look and the change that make a claim.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from greenroom.persistence.disk import Disk
from greenroom.persistence.encoding import FrameError, frame, unframe
from greenroom.persistence.errors import CorruptValueError, StaleWriterError, StoreClosedError
from greenroom.persistence.folder import Folder
from greenroom.persistence.lock import ChangeLock, WriterLock

_TEMPORARY = ".tmp"


class Writer:
    """One claim to one folder, from ``claim`` to ``release``; methods raise OSError."""

    def __init__(
        self,
        folder: Folder,
        disk: Disk,
        lock: WriterLock | None,
        change: ChangeLock,
        epoch: int,
    ) -> None:
        self.epoch = epoch
        self.changes = 0  # that were begun: names given or removed
        self._change = change
        self._folder = folder
        self._disk = disk
        self._lock = lock
        self._set_aside = 0
        token = f"{epoch} {os.urandom(8).hex()}"
        self._claim = frame(token.encode())
        self._temporary = f".{token.replace(' ', '-')}{_TEMPORARY}"

    @classmethod
    def claim(
        cls, folder: Folder, disk: Disk, after: int | None = None, lease: bytes | None = None
    ) -> Writer:
        """Lock the folder, fence every earlier writer durably, remove what they left half-written.

        With ``after`` other hosts share the folder: the writer of that epoch is superseded, whether
        or not it lives, and StaleWriterError raised where there is another one, or another
        ``lease`` of it than this, where one is given. Raises StoreLockedError, or CorruptValueError
        where the epoch file is damaged.
        """
        lock = WriterLock.acquire(folder.lock) if after is None else None
        change = ChangeLock(folder.change)
        try:
            with change.held():
                epoch = _epoch_to_follow(folder, disk, after)
                if lease is not None:
                    _check_lease(folder, disk, lease)
                writer = cls(folder, disk, lock, change, epoch + 1)
                writer._fence()
            writer._remove_leftovers()
        except BaseException:
            change.release()
            if lock is not None:
                lock.release()
            raise
        return writer

    def write(self, path: Path, content: bytes) -> None:
        """Give ``path`` new content in one step; the name is durable only after ``sync``."""
        temporary = self._write_temporary(path, content)
        with self._guarded():
            self._disk.rename(temporary, path)

    def remove(self, path: Path) -> None:
        """Remove a file, if there; durable only after ``sync``."""
        with self._guarded(), suppress(FileNotFoundError):
            self._disk.unlink(path)

    def sync(self, folder: Path) -> None:
        """Make the names in ``folder`` durable."""
        self._disk.fsync_dir(folder)

    def set_aside(self, path: Path) -> Path:
        """Move a damaged file out of the way; return where it is now.

        Not made durable: if the move is lost, the damage is found again.
        """
        self._set_aside += 1
        kept = self._folder.corrupt / f"{self.epoch}-{self._set_aside}-{path.name}"
        with self._guarded():
            self._disk.rename(path, kept)
        return kept

    def release(self) -> None:
        """Give the locks up; every later change raises StoreClosedError."""
        self._change.release()
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if not self._change.is_held:
            raise StoreClosedError(
                f"the store {self._folder.root} was closed, or opened before a fork; open it again"
            )
        with self._change.held():
            self._check_claim()
            self.changes += 1
            yield

    def _check_claim(self) -> None:
        if self._disk.read(self._folder.epoch) != self._claim:
            raise StaleWriterError(
                f"this writer of {self._folder.root} has epoch {self.epoch}, and "
                f"{self._folder.epoch} now names another writer. Nothing more is written from "
                "here: end this process"
            )

    def _fence(self) -> None:
        # Unguarded, for it is what the guard looks at.
        self._disk.rename(
            self._write_temporary(self._folder.epoch, self._claim), self._folder.epoch
        )
        self._disk.fsync_dir(self._folder.root)

    def _remove_leftovers(self) -> None:
        for folder in (self._folder.root, self._folder.values):
            for name in self._disk.names(folder):
                if name.startswith(".") and name.endswith(_TEMPORARY):
                    self.remove(folder / name)

    def _write_temporary(self, path: Path, content: bytes) -> Path:
        # One name per writer and folder: what a failed write leaves, the next one reuses.
        temporary = path.with_name(self._temporary)
        fd = self._disk.create(temporary)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[self._disk.write(fd, rest) :]
            self._disk.fsync(fd)
        finally:
            self._disk.close(fd)
        return temporary


def _epoch_to_follow(folder: Folder, disk: Disk, after: int | None) -> int:
    epoch = epoch_on_disk(folder, disk)
    if after not in {None, epoch}:
        raise StaleWriterError(
            f"{folder.root} was to be taken over from epoch {after}, and {folder.epoch} names "
            f"{epoch}: another host was quicker"
        )
    return epoch


def _check_lease(folder: Folder, disk: Disk, lease: bytes) -> None:
    try:
        raw = disk.read(folder.lease)
    except FileNotFoundError:
        raw = frame(b"")
    if raw != frame(lease):
        raise StaleWriterError(
            f"{folder.root} was to be taken over, and {folder.lease} was renewed since it was "
            "looked at: its writer was only slow"
        )


def epoch_on_disk(folder: Folder, disk: Disk) -> int:
    """Return the epoch of the last writer, 0 for none; CorruptValueError."""
    try:
        raw = disk.read(folder.epoch)
    except FileNotFoundError:
        return 0
    try:
        return int(unframe(raw, folder.epoch).split()[0])
    except FrameError as error:
        # Not set aside: counting from 1 again must be a person's decision.
        raise CorruptValueError(
            f"{folder.epoch} is damaged ({error}), so the next epoch is unknown. Make sure that "
            "no other writer runs, then remove that file: epochs start again at 1"
        ) from error
