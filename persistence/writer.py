"""The right to change a store, and the changes that it guards.

Two mechanisms keep writers apart. A lock for the writer's life stops a second writer on the same
machine. Where hosts share the folder no writer takes that lock, because a host that is gone or
stopped would keep it. There the epoch alone decides: a writer that opens the store writes a higher
number and a token of its own into the epoch file, and every writer reads that file before each
rename and each unlink. A writer that finds another claim there was superseded, and refuses. The
look and the change happen under one lock that holds across hosts; so do those that make a claim.

The epoch file has a copy, written before it, which counts where the file itself is damaged or
missing. The copy's number may be that of an opening that died: too high, which does no harm.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from greenroom.persistence.kv import (
    CorruptValueError,
    StaleWriterError,
    Standing,
    StoreClosedError,
    StoreLockedError,
)
from greenroom.persistence.layout import Disk, Folder, FrameError, copy_of, frame, unframe

_log = logging.getLogger(__name__)

_TEMPORARY = ".tmp"
_NOTE = ".note"
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

    NFSv4 has such locks, unlike most kinds. It is held for a few system calls at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it within a block; StoreLockedError where another process keeps it."""
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
                        "takes milliseconds: it was stopped in the middle of a change. Continue or "
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


class Claim(NamedTuple):
    """What the epoch file says; nothing where there is none."""

    epoch: int = 0
    token: str = ""
    store_id: str = ""  # made with the store, and the same ever after


class Writer:
    """One claim to one folder, from ``claim`` to ``release``; methods raise OSError."""

    def __init__(
        self,
        folder: Folder,
        disk: Disk,
        lock: WriterLock | None,
        change: ChangeLock,
        before: Claim,
    ) -> None:
        self.epoch = before.epoch + 1
        self.store_id = before.store_id or secrets.token_hex(8)
        self.changes = 0  # that were begun: names given or removed
        self._change = change
        self._folder = folder
        self._disk = disk
        self._lock = lock
        self._notes = 0
        token = secrets.token_hex(8)
        self._claim = frame(f"{self.epoch} {token} {self.store_id}".encode())
        self._temporary = f".{self.epoch}-{token}{_TEMPORARY}"

    @classmethod
    def claim(
        cls, folder: Folder, disk: Disk, after: int | None = None, lease: bytes | None = None
    ) -> Writer:
        """Lock the folder, fence every earlier writer durably, remove what they left half-written.

        With ``after`` other hosts share the folder: the writer of that epoch is superseded, whether
        or not it lives, and StaleWriterError raised where there is another one, or another
        ``lease`` of it than this, where one is given. Raises StoreLockedError, or CorruptValueError
        where the epoch file and its copy are damaged.
        """
        lock = WriterLock.acquire(folder.lock) if after is None else None
        change = ChangeLock(folder.change)
        try:
            with change.held():
                before = claim_on_disk(folder, disk)
                lease_now = b"" if lease is None else lease_on_disk(folder, disk)
                found = Standing(before.epoch, before.store_id, lease_now)
                found.check_as_seen(folder.root, after, lease)
                writer = cls(folder, disk, lock, change, before)
                writer._fence()
            writer._remove_leftovers()
        except BaseException:
            change.release()
            if lock is not None:
                lock.release()
            raise
        return writer

    def write(self, path: Path, content: bytes, *, durable: bool = True) -> None:
        """Give ``path`` new content in one step; the name is durable only after ``sync``.

        What is not written as ``durable`` is not waited for: a power cut may leave anything there.
        """
        temporary = self._write_temporary(path, content, durable=durable)
        with self._guarded():
            self._disk.rename(temporary, path)

    def remove(self, path: Path) -> None:
        """Remove a file, if there; durable only after ``sync``."""
        with self._guarded(), suppress(FileNotFoundError):
            self._disk.unlink(path)

    def sync(self, folder: Path) -> None:
        """Make the names in ``folder`` durable."""
        self._disk.fsync_dir(folder)

    def note(self, text: str) -> None:
        """Keep a note of what could not be repaired, until a person removes it."""
        self._notes += 1
        self.write(self._folder.corrupt / f"{self.epoch}-{self._notes}{_NOTE}", text.encode())
        self.sync(self._folder.corrupt)

    def notes(self) -> str:
        """Return the notes that there are, and where."""
        names = sorted(n for n in self._disk.names(self._folder.corrupt) if n.endswith(_NOTE))
        if not names:
            return ""
        texts = [self._disk.read(self._folder.corrupt / n).decode(errors="replace") for n in names]
        return (
            f"{'; '.join(texts)}. Deploy again what is not there, then remove "
            f"{self._folder.corrupt}/*{_NOTE}"
        )

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
        if self._read_epoch() == self._claim:
            return
        if claim_on_disk(self._folder, self._disk) == _decoded(self._claim, self._folder.epoch):
            _log.warning("%s was damaged, and is written anew", self._folder.epoch)
            self._fence()
        else:
            raise StaleWriterError(
                f"this writer of {self._folder.root} has epoch {self.epoch}, and "
                f"{self._folder.epoch} now names another writer. Nothing more is written from "
                "here: end this process"
            )

    def _read_epoch(self) -> bytes:
        try:
            return self._disk.read(self._folder.epoch)
        except FileNotFoundError:
            return b""

    def _fence(self) -> None:
        # Unguarded, for it is what the guard looks at.
        for path in (copy_of(self._folder.epoch), self._folder.epoch):
            self._disk.rename(self._write_temporary(path, self._claim), path)
            self._disk.fsync_dir(self._folder.root)

    def _remove_leftovers(self) -> None:
        for folder in (self._folder.root, *self._folder.folders):
            for name in self._disk.names(folder):
                if name.startswith(".") and name.endswith(_TEMPORARY):
                    self.remove(folder / name)

    def _write_temporary(self, path: Path, content: bytes, *, durable: bool = True) -> Path:
        # One name per writer and folder: what a failed write leaves, the next one reuses.
        temporary = path.with_name(self._temporary)
        fd = self._disk.create(temporary)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[self._disk.write(fd, rest) :]
            if durable:
                self._disk.fsync(fd)
        finally:
            self._disk.close(fd)
        return temporary


def lease_on_disk(folder: Folder, disk: Disk) -> bytes:
    """Return the last lease; nothing where there is none or it is damaged.

    It needs no copy: the leader writes it anew within a second, and a lease not renewed is over.
    """
    try:
        return unframe(disk.read(folder.lease), folder.lease)
    except (FileNotFoundError, FrameError):
        return b""


def claim_on_disk(folder: Folder, disk: Disk) -> Claim:
    """Return the claim of the last writer; CorruptValueError where it and its copy are damaged."""
    damage: list[str] = []
    for path in (folder.epoch, copy_of(folder.epoch)):
        try:
            return _decoded(disk.read(path), path)
        except FileNotFoundError:
            continue
        except FrameError as error:
            damage.append(f"{path} is damaged ({error})")
    if not damage:
        return Claim()
    # Not repaired: counting from 1 again must be a person's decision.
    raise CorruptValueError(
        f"{' and '.join(damage)}, so the next epoch is unknown. Make sure that no other writer "
        "runs, then remove what is damaged: epochs start again at 1"
    )


def _decoded(raw: bytes, path: Path) -> Claim:
    epoch, *rest = unframe(raw, path).decode().split()
    return Claim(int(epoch), *rest)
