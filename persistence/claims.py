"""The right to change a store, and the lease that goes with it.

Two mechanisms keep writers apart. A lock for the writer's life stops a second writer on the same
machine. Where hosts share the folder no writer takes that lock, because a host that is gone or
stopped would keep it. There the epoch alone decides: a writer that opens the store writes a higher
number and a token of its own into the epoch file, and every writer reads that file after each
change that it has made durable, before it answers. A writer that finds another claim there was
superseded, and refuses. Whoever made that claim has begun to read after it, and so has read
whatever an earlier writer answered.

The epoch file has a copy, written before it, which counts where the file itself is damaged or
missing. The copy's number may be that of an opening that died: too high, which does no harm.

Claims, and the lease, of which there is one for all writers, are written under a lock that holds
across hosts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from greenroom.persistence.kv import Claim, CorruptValueError, StaleWriterError, StoreLockedError
from greenroom.persistence.layout import Disk, FrameError, copy_of, frame, unframe
from greenroom.persistence.log import names_of_logs

_log = logging.getLogger(__name__)
CHANGE_TIMEOUT_S = 2.0
CHANGE_RETRY_S = 0.002


def lock_alone(path: Path) -> int:
    """Return the descriptor of a file that this process has locked for its life, with its pid.

    Raises StoreLockedError where another process has, or OSError.
    """
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
    return fd


@contextmanager
def change_lock(path: Path) -> Iterator[None]:
    """Keep other processes from the claim and the lease, for a few system calls.

    It is a POSIX lock, which holds across hosts that share the folder: NFSv4 has such locks, unlike
    most kinds. Raises StoreLockedError where another process keeps it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + CHANGE_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise StoreLockedError(
                        f"another process has held {path} for {CHANGE_TIMEOUT_S:g} s, which takes "
                        "milliseconds: it was stopped while it held it. Continue or end it"
                    ) from None
                time.sleep(CHANGE_RETRY_S)
        yield
    finally:
        os.close(fd)


def _framed(claim: Claim) -> bytes:
    """Return the content of the epoch file."""
    return frame(f"{claim.epoch} {claim.token} {claim.store_id}".encode())


class Writer:
    """The right to change one folder, once it is claimed; methods raise OSError."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.epoch = 0
        self.store_id = ""
        self._root = root
        self._disk = disk
        self._claim = Claim()
        self._lock: int | None = None

    def claim(self, *, after: int | None, lease: bytes | None) -> None:
        """Fence every earlier writer durably, and be of a later epoch than all logs.

        Without ``after``, alone. StaleWriterError where the last writer is another than that of
        epoch ``after``, or has another ``lease``, as far as these are given. Raises
        StoreLockedError, and CorruptValueError where the epoch file and its copy are damaged.
        """
        root, disk = self._root, self._disk
        if after is None:
            self._lock = lock_alone(root / "lock")
        with change_lock(root / "change"):
            before, damage = _read_claim(root, disk)
            for each in damage:
                _log.warning("%s, and is written anew", each)
            lease_now = b"" if lease is None else lease_on_disk(root, disk)
            before._replace(lease=lease_now).check_as_seen(root, after, lease)
            store_id = before.store_id or secrets.token_hex(8)
            epochs = [before.epoch, *(int(name[4:14]) for name in names_of_logs(disk, root))]
            claim = Claim(max(epochs) + 1, store_id, token=secrets.token_hex(8))
            self._claim = claim
            for path in (copy_of(root / "epoch"), root / "epoch"):
                self.replace(path, _framed(claim))
        self.epoch, self.store_id = claim.epoch, store_id

    def close(self) -> None:
        """Let another writer be alone; a repeat does nothing."""
        if self._lock is not None:
            # Not LOCK_UN: in a forked child that would take the lock away from the parent.
            os.close(self._lock)
            self._lock = None

    def check(self) -> None:
        """Raise StaleWriterError if there was a later claim."""
        path = self._root / "epoch"
        try:
            if self._disk.read(path) == _framed(self._claim):
                return
        except FileNotFoundError:
            pass  # the copy counts
        if claim_on_disk(self._root, self._disk) != self._claim:
            raise StaleWriterError(
                f"this writer of {self._root} has epoch {self.epoch}, and {path} now names another "
                "writer. Nothing more is written from here: end this process"
            )

    def renew(self, lease: bytes) -> None:
        """Write the lease, unless there was a later claim."""
        path = self._root / "lease"
        self._disk.write_new(self.temporary(path), frame(lease))
        with change_lock(self._root / "change"):
            self.check()
            self._disk.rename(self.temporary(path), path)

    def replace(self, path: Path, content: bytes) -> None:
        """Give a file new content in one step, durable on return."""
        self._disk.write_new(self.temporary(path), content)
        self._disk.rename(self.temporary(path), path)
        self._disk.fsync_dir(path.parent)

    def temporary(self, path: Path) -> Path:
        """Return the name that a file has until it is whole."""
        return path.with_name(f".{self._claim.epoch}-{path.name}-{self._claim.token}.tmp")


def lease_on_disk(root: Path, disk: Disk) -> bytes:
    """Return the last lease; nothing where there is none or it is damaged.

    It needs no copy: the leader writes it anew within a second, and a lease not renewed is over.
    """
    try:
        return unframe(disk.read(root / "lease"))
    except (FileNotFoundError, FrameError):
        return b""


def claim_on_disk(root: Path, disk: Disk) -> Claim:
    """Return the claim of the last writer; CorruptValueError where it and its copy are damaged."""
    return _read_claim(root, disk)[0]


def _read_claim(root: Path, disk: Disk) -> tuple[Claim, list[str]]:
    """Return the claim of the last writer, and what was damaged before it was found."""
    damage: list[str] = []
    for path in (root / "epoch", copy_of(root / "epoch")):
        try:
            epoch, token, store_id = unframe(disk.read(path)).decode().split()
            return Claim(int(epoch), store_id, token=token), damage
        except FileNotFoundError:
            continue
        except ValueError as error:  # a FrameError too
            damage.append(f"{path} is damaged ({error})")
    if not damage:
        return Claim(), damage
    # Not repaired: to take over from an unknown writer must be a person's decision.
    raise CorruptValueError(
        f"{' and '.join(damage)}, so the next epoch is unknown. Make sure that no other writer "
        "runs, then remove what is damaged"
    )
