"""A store on a file system: one file per key, changed all or nothing, by one writer at a time.

Theory of operation. A file is only ever replaced whole: written under a temporary name, fsynced,
renamed over the old one; then its folder is fsynced. That alone makes a change of one key atomic
and durable. A larger change is first written, whole, to the redo file in that same way: from that
rename on it has happened, and what follows (each value, then the redo file's removal) only
carries it out. Whoever finds a redo file carries it out again, which changes nothing where it was
done before: the writer that opens next, or this one, where its disk failed half-way. The removal is
fsynced before ``apply`` returns: a redo file that came back would undo later changes.

A reader takes no lock. Every file it opens is whole, and keys named in a redo file that it finds
are taken from there, so once it has seen one key of a batch it sees them all. Several calls are
not one snapshot, though: a change may fall between them.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from greenroom.persistence.disk import Disk
from greenroom.persistence.encoding import (
    FrameError,
    decode_batch,
    encode_batch,
    frame,
    key_of,
    unframe,
)
from greenroom.persistence.errors import (
    CorruptValueError,
    NothingSavedError,
    StoreClosedError,
    StoreError,
    StoreMissingError,
    StoreNotReadableError,
    StoreNotWritableError,
)
from greenroom.persistence.folder import Folder
from greenroom.persistence.kv import Batch, check_key, checked_batch
from greenroom.persistence.writer import Writer, epoch_on_disk

_log = logging.getLogger(__name__)

_REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space, or have the quota raised",
    errno.EROFS: "mount the file system writable",
    errno.EIO: "see to the disk",
}
_TRIED_BYTES = 64 * 1024  # what has to be free for writing to begin again


class FileStore:
    """A KVStore in a folder; make it with ``open``."""

    def __init__(self, folder: Folder, disk: Disk, writer: Writer | None) -> None:
        self._folder = folder
        self._disk = disk
        self._writer = writer
        self._is_closed = False
        # Whether a redo file may be left, or its removal not yet be durable.
        self._is_unfinished = writer is not None
        self._before = 0  # changes of the writer that were there before the batch

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        namespace: str = "default",
        read_only: bool = False,
        after: int | None = None,
        lease: bytes | None = None,
        disk: Disk | None = None,
    ) -> FileStore:
        """Open the store of ``namespace`` under the folder ``path``.

        A writer makes what is missing, takes the lock, fences every earlier writer, and carries out
        a batch that one of them left; it blocks for some fsyncs, and holds the lock until ``close``
        or the end of this process. A reader changes nothing. With ``after`` other hosts share the
        folder, and the writer of that epoch is superseded, though it may live; StaleWriterError
        where there is another one by now, or where it has renewed its ``lease`` since the one that
        :meth:`look` returned. Raises StoreLockedError,
        NewerFormatError, CorruptValueError, StoreNotWritableError (writer), StoreNotReadableError
        or its subclass StoreMissingError where there is no store yet (reader).
        """
        check_key(namespace, what="namespace")
        disk = disk or Disk()
        folder = Folder(Path(path), namespace, disk)
        if read_only:
            return cls._open_reader(folder, disk)
        return cls._open_writer(folder, disk, after, lease)

    @property
    def epoch(self) -> int:
        """The number of this writer, higher than every earlier one's; 0 for a reader."""
        return self._writer.epoch if self._writer else 0

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore.

        A damaged file is set aside (by a writer), then CorruptValueError names it; from then on the
        key is absent. Raises NewerFormatError, or StoreNotReadableError where the system refuses.
        """
        check_key(key)
        self._check_open()
        with _system_errors(self._not_readable):
            batch = self._batch_under_way()
            if batch and key in batch.puts:
                return batch.puts[key]
            if batch and key in batch.deletes:
                return None
            return self._read(self._folder.value(key))

    def list(self, prefix: str = "") -> builtins.list[str]:
        """Return the keys that start with ``prefix``, sorted; see KVStore.

        Costs one pass over the names of all keys. Ignores files that no key is spelled like.
        """
        self._check_open()
        with _system_errors(self._not_readable):
            keys = {key_of(name) for name in self._disk.names(self._folder.values)} - {None}
            if batch := self._batch_under_way():
                keys = (keys | batch.puts.keys()) - set(batch.deletes)
        return sorted(key for key in keys if key is not None and key.startswith(prefix))

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing, durable on return; see KVStore.

        Two fsyncs for one key, four and one per put for more. Raises StaleWriterError once another
        writer opened the store, StoreNotWritableError for a reader and where the disk refuses.
        """
        batch = checked_batch(puts, deletes)
        self._check_open()
        if self._writer is None:
            raise StoreNotWritableError(
                f"the store {self._folder.root} was opened with read_only=True; open it for "
                "writing, in the one process that should"
            )
        if not batch:
            return
        with _system_errors(self._not_saved):
            if self._is_unfinished:
                self._finish(self._writer, self._read_redo())
            self._before = self._writer.changes
            if len(batch) == 1:
                self._carry_out(self._writer, batch)
                return
            self._is_unfinished = True
            self._writer.write(self._folder.redo, frame(encode_batch(batch)))
            self._writer.sync(self._folder.root)
            self._finish(self._writer, batch)

    def renew(self, lease: bytes) -> None:
        """Write the lease, as :meth:`look` returns it; raises what ``apply`` does."""
        self._check_open()
        assert self._writer is not None, "a reader has no lease"
        with _system_errors(self._not_writable):
            self._writer.write(self._folder.lease, frame(lease))

    @staticmethod
    def look(
        path: str | os.PathLike[str], *, namespace: str = "default", disk: Disk | None = None
    ) -> tuple[int, bytes]:
        """Return the epoch of the last writer and the last lease; 0 and nothing where is none.

        Needs no open store. Raises CorruptValueError or StoreNotReadableError.
        """
        disk = disk or Disk()
        folder = Folder(Path(path), namespace, disk)
        store = FileStore(folder, disk, writer=None)
        with _system_errors(store._not_readable):
            return epoch_on_disk(folder, disk), store._read(folder.lease) or b""

    @staticmethod
    def try_to_write(
        path: str | os.PathLike[str], *, namespace: str = "default", disk: Disk | None = None
    ) -> None:
        """Write some of nothing beside the store, and remove it; raises NothingSavedError.

        Needs no open store, takes nothing over from a writer, and makes the folder where there is
        none yet: a disk may have been full since before the first opening.
        """
        disk = disk or Disk()
        folder = Folder(Path(path), namespace, disk)
        tried = folder.root / f".try-{os.getpid()}.tmp"
        try:
            folder.make()
            fd = disk.create(tried)
            try:
                disk.write(fd, memoryview(bytes(_TRIED_BYTES)))
                disk.fsync(fd)
            finally:
                disk.close(fd)
                disk.unlink(tried)
        except OSError as error:
            raise _nothing_saved(folder.root, error) from error

    def close(self) -> None:
        """Release the lock and refuse every later call."""
        self._is_closed = True
        if self._writer:
            self._writer.release()

    @classmethod
    def _open_reader(cls, folder: Folder, disk: Disk) -> FileStore:
        store = cls(folder, disk, writer=None)
        with _system_errors(store._not_readable):
            if not folder.check_format():
                raise StoreMissingError(
                    f"there is no store at {folder.root}; check the path and the namespace, or "
                    "open it for writing once to make it"
                )
        return store

    @classmethod
    def _open_writer(
        cls, folder: Folder, disk: Disk, after: int | None, lease: bytes | None
    ) -> FileStore:
        with _system_errors(partial(_nothing_saved, folder.root)):
            is_complete = folder.check_format()
            folder.make()
            writer = Writer.claim(folder, disk, after, lease)
            store = cls(folder, disk, writer)
            try:
                store._recover(writer, is_complete=is_complete)
            except BaseException:
                store.close()
                raise
        return store

    def _recover(self, writer: Writer, *, is_complete: bool) -> None:
        # What a killed writer renamed is visible now, and must not be lost once somebody saw it.
        writer.sync(self._folder.values)
        self._finish(writer, self._read_redo())
        if not is_complete:
            writer.write(self._folder.format, self._folder.format_text())
            writer.sync(self._folder.root)
        if kept := sorted(self._disk.names(self._folder.corrupt)):
            _log.warning("Damaged files are kept in %s: %s", self._folder.corrupt, kept)

    def _finish(self, writer: Writer, batch: Batch | None) -> None:
        if batch:
            self._carry_out(writer, batch)
            writer.remove(self._folder.redo)
        writer.sync(self._folder.root)
        self._is_unfinished = False

    def _carry_out(self, writer: Writer, batch: Batch) -> None:
        for key, value in batch.puts.items():
            writer.write(self._folder.value(key), frame(value))
        for key in batch.deletes:
            writer.remove(self._folder.value(key))
        writer.sync(self._folder.values)

    def _batch_under_way(self) -> Batch | None:
        # A writer knows whether it left one, and so saves itself the look.
        return self._read_redo() if self._writer is None or self._is_unfinished else None

    def _read_redo(self) -> Batch | None:
        payload = self._read(self._folder.redo)
        return None if payload is None else decode_batch(payload)

    def _read(self, path: Path) -> bytes | None:
        try:
            return unframe(self._disk.read(path), path)
        except FileNotFoundError:
            return None
        except FrameError as error:
            kept = self._writer.set_aside(path) if self._writer else path
            raise CorruptValueError(
                f"{path} is damaged: {error}. Nothing of it was used, and it is kept as {kept}. "
                "Put a sound copy back in its place, or save its key again"
            ) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError(f"the store {self._folder.root} was closed; open it again")

    def _not_writable(self, error: OSError) -> StoreError:
        return StoreNotWritableError(
            f"cannot write to the store {self._folder.root} as uid {os.geteuid()}: {error}. The "
            f"change may or may not have been made: {_remedy(error)}, then repeat it"
        )

    def _not_saved(self, error: OSError) -> StoreError:
        """Return what an ``apply`` raises: before it renames anything, nothing has happened."""
        assert self._writer is not None
        if self._writer.changes == self._before:
            return _nothing_saved(self._folder.root, error)
        return self._not_writable(error)

    def _not_readable(self, error: OSError) -> StoreError:
        return StoreNotReadableError(
            f"cannot read the store {self._folder.root} as uid {os.geteuid()}: {error}. Make the "
            "folder readable for that user"
        )


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "make the folder writable")


def _nothing_saved(path: Path, error: OSError) -> NothingSavedError:
    return NothingSavedError(
        f"cannot write to the store {path} as uid {os.geteuid()}: {error}. Nothing was changed: "
        f"{_remedy(error)}, then repeat it"
    )


@contextmanager
def _system_errors(describe: Callable[[OSError], StoreError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise describe(error) from error
