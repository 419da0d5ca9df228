"""A store on a file system: one file per key, changed all or nothing, by one writer at a time.

Theory of operation. A file is only ever replaced whole: written under a temporary name, fsynced,
renamed over the old one; then its folder is fsynced. A change of any size is first written, whole,
to the journal in that way: from that rename on it has happened, and it costs two fsyncs. Then it is
carried out in ``copies/``, which is not waited for. The values themselves follow when there is time
(``settle``), or the journal too long: what a later entry changes again is left out.

So each value is on disk twice, as recovery.py explains. A writer compares the two when it opens the
store, and makes a damaged, torn or missing file again from the other. A value that is damaged in
both stays where it is, is named in ``lost``, and raises CorruptValueError until it is put or
deleted: it is never taken for one that was not there. The journal also says how many keys there
are, so that keys without a trace are missed too.

A reader takes no lock and repairs nothing. Keys named in the journal are taken from there, so once
it has seen one key of a batch it sees them all. Several calls are not one snapshot, though: a
change may fall between them.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from greenroom.persistence.kv import (
    Batch,
    CorruptValueError,
    NothingSavedError,
    Standing,
    StoreClosedError,
    StoreError,
    StoreMissingError,
    StoreNotReadableError,
    StoreNotWritableError,
    check_key,
    checked_batch,
)
from greenroom.persistence.layout import (
    Disk,
    Entry,
    Folder,
    FrameError,
    copy_of,
    encode_entry,
    encode_head,
    frame,
    unframe,
)
from greenroom.persistence.recovery import Repair, keys_in, read_journal
from greenroom.persistence.writer import Writer, claim_on_disk, lease_on_disk

_log = logging.getLogger(__name__)

_REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space, or have the quota raised",
    errno.EROFS: "mount the file system writable",
    errno.EIO: "see to the disk",
}
_TRIED_BYTES = 64 * 1024  # what has to be free for writing to begin again
KEPT_CHANGES = 256  # in the journal
KEPT_BYTES = 8 * 1024 * 1024  # of values there, but for the last change
UNNAMED = ""  # in ``lost``: keys of which no trace is left


class _Kept(NamedTuple):
    """A change in the journal."""

    number: int
    keys: tuple[str, ...]
    size: int


class FileStore:
    """A KVStore in a folder; make it with ``open``."""

    def __init__(self, folder: Folder, disk: Disk, writer: Writer | None) -> None:
        self._folder = folder
        self._disk = disk
        self._writer = writer
        self._is_closed = False
        self._before = 0  # changes of the writer that were there before the batch
        self._lost: dict[str, str] = {}
        # What only a writer has:
        self._is_unfinished = False  # a change failed half-way: look at what is on disk again
        self._keys: set[str] = set()
        self._journal: deque[_Kept] = deque()
        self._newest: dict[str, tuple[int, bytes | None]] = {}  # by key: entry, value
        self._last = 0  # the number of the last entry
        self._superfluous: set[int] = set()  # entries that are in values, to be removed

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

        A writer makes what is missing, takes the lock, fences every earlier writer, carries out
        a batch that one of them left, and repairs what is damaged; it reads everything, blocks for
        some fsyncs, and holds the lock until ``close`` or the end of this process. A reader
        changes nothing. With ``after`` other hosts share the folder, and the writer of that epoch
        is superseded, though it may live; StaleWriterError where there is another one by now, or
        where it has renewed its ``lease`` since the one that :meth:`look` returned. Raises
        StoreLockedError, OtherFormatError, CorruptValueError, StoreNotWritableError (writer),
        StoreNotReadableError or its subclass StoreMissingError where there is no store yet
        (reader).
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

    @property
    def store_id(self) -> str:
        """What tells this store from any other, for as long as it exists; "" for a reader."""
        return self._writer.store_id if self._writer else ""

    @property
    def lost(self) -> Mapping[str, str]:
        """The keys that could not be repaired, and why; see KVStore. A reader knows of none."""
        if UNNAMED in self._lost and self._writer is not None:
            with suppress(OSError):  # it stands until the contrary is seen
                self._lost[UNNAMED] = self._writer.notes()
                if not self._lost[UNNAMED]:
                    del self._lost[UNNAMED]
        return self._lost

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore.

        What is damaged or missing is taken from its copy, and repaired by a writer. Raises
        CorruptValueError where that is damaged too, until the key is put or deleted;
        OtherFormatError, or StoreNotReadableError where the system refuses.
        """
        check_key(key)
        self._check_open()
        with _system_errors(self._not_readable):
            if self._writer is None:
                return self._read_beside_writer(key)
            self._look_again(self._writer)
            if key in self._newest:
                return self._newest[key][1]
            return self._read(self._writer, key) if key in self._keys else None

    def list(self, prefix: str = "") -> builtins.list[str]:
        """Return the keys that start with ``prefix``, sorted; see KVStore.

        Ignores files that no key is spelled like.
        """
        self._check_open()
        with _system_errors(self._not_readable):
            if self._writer is None:
                keys = self._keys_beside_writer()
            else:
                self._look_again(self._writer)
                keys = self._keys
        return sorted(key for key in keys if key.startswith(prefix))

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing, durable on return; see KVStore.

        Two fsyncs; some more where :meth:`settle` was not called for hundreds of changes. Raises
        StaleWriterError once another writer opened the store, StoreNotWritableError for a reader
        and where the disk refuses.
        """
        batch = checked_batch(puts, deletes)
        self._check_open()
        writer = self._writer
        if writer is None:
            raise StoreNotWritableError(
                f"the store {self._folder.root} was opened with read_only=True; open it for "
                "writing, in the one process that should"
            )
        if not batch:
            return
        with _system_errors(partial(_nothing_saved, self._folder.root)):
            self._look_again(writer)
            self._make_room(writer)
        self._before = writer.changes
        try:
            with _system_errors(self._not_saved):
                entry = self._next_entry(batch)
                self._write_entry(writer, entry)
                self._keep(entry)
                self._carry_out(writer, entry)
        except BaseException:
            self._is_unfinished = writer.changes != self._before
            raise

    def give_up(self, key: str) -> None:
        """Delete a lost key, and keep a note of it; see KVStore."""
        if self._writer is None or key not in self._lost:
            return
        with _system_errors(self._not_writable):
            self._writer.note(f"{key} is given up: {self._lost[key]}")
            self._lost[UNNAMED] = self._writer.notes()
        self.apply({}, [key])

    def settle(self) -> bool:
        """Carry one change of the journal out in the values; see KVStore."""
        self._check_open()
        if self._writer is None:
            return False
        with _system_errors(partial(_nothing_saved, self._folder.root)):
            self._look_again(self._writer)
            if len(self._journal) > 1:
                self._settle_oldest(self._writer)
        return len(self._journal) > 1

    @property
    def renews_apart(self) -> bool:
        """No: its locks are those of a process; see LeasedStore."""
        return False

    def renew(self, lease: bytes, term_s: float) -> None:  # no clock is shared
        """Write the lease, as :meth:`look` returns it; see LeasedStore."""
        self._check_open()
        assert self._writer is not None, "a reader has no lease"
        with _system_errors(self._not_writable):
            self._writer.write(self._folder.lease, frame(lease))

    def last_change(self) -> int:
        """Return the number of the last change, for a reader to see whether there was another."""
        with _system_errors(self._not_readable):
            return read_journal(self._folder, self._disk).last

    @staticmethod
    def look(
        path: str | os.PathLike[str], *, namespace: str = "default", disk: Disk | None = None
    ) -> Standing:
        """Return what the store says of its last writer; nothing where there never was one.

        Needs no open store. Raises CorruptValueError or StoreNotReadableError.
        """
        disk = disk or Disk()
        folder = Folder(Path(path), namespace, disk)
        with _system_errors(FileStore(folder, disk, writer=None)._not_readable):
            claim = claim_on_disk(folder, disk)
            return Standing(claim.epoch, claim.store_id, lease_on_disk(folder, disk))

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
            if not folder.has_store():
                raise StoreMissingError(
                    f"there is no store at {folder.root}: nothing was ever saved there, or the "
                    "path is wrong"
                )
        return store

    @classmethod
    def _open_writer(
        cls, folder: Folder, disk: Disk, after: int | None, lease: bytes | None
    ) -> FileStore:
        with _system_errors(partial(_nothing_saved, folder.root)):
            has_store = folder.has_store()
            folder.make()
            writer = Writer.claim(folder, disk, after, lease)
            store = cls(folder, disk, writer)
            try:
                store._recover(writer, is_new=not has_store)
            except BaseException:
                store.close()
                raise
        return store

    def _recover(self, writer: Writer, *, is_new: bool) -> None:
        self._settle_on(writer, is_new=is_new)
        text = self._folder.format_text()
        for path in (copy_of(self._folder.format), self._folder.format):
            with suppress(FileNotFoundError):
                if self._disk.read(path) == text:
                    continue
            if not is_new:
                _log.warning("%s was damaged or missing, and is written anew", path)
            writer.write(path, text)
            writer.sync(self._folder.root)
        if kept := sorted(self._disk.names(self._folder.corrupt)):
            _log.warning("What could not be repaired is kept in %s: %s", self._folder.corrupt, kept)

    def _look_again(self, writer: Writer) -> None:
        if self._is_unfinished:
            self._settle_on(writer, is_new=False)

    def _settle_on(self, writer: Writer, *, is_new: bool) -> None:
        """Find out what the values are, and make both copies say so."""
        # What a killed writer renamed is visible now, and must not be lost once it was read.
        for folder in (self._folder.values, self._folder.copies, self._folder.journal):
            writer.sync(folder)
        journal = read_journal(self._folder, self._disk)
        # Without any of it the values may lack what it said.
        journal.trusts_copies |= not (is_new or journal.last)
        repair = Repair(self._folder, self._disk, writer, journal)
        repair.make()
        self._keys, self._lost, self._last = repair.keys, repair.lost, journal.last
        self._superfluous = {*journal.superfluous}
        self._journal.clear()
        self._newest.clear()
        if repair.begins_anew:
            for number, problem in journal.damaged.items():
                _log.warning("Change %d of the journal was damaged: %s", number, problem)
            self._superfluous.update(entry.number for entry in journal.entries)
            entry = self._next_entry(Batch(puts={}))  # the values have all
            self._write_entry(writer, entry)
            self._keep(entry)
        for entry in () if repair.begins_anew else journal.entries:
            self._keep(entry)
        if repair.begins_anew or journal.is_headless:
            self._write_head(writer)
            writer.sync(self._folder.root)  # from now on a power cut leaves a head, if an old one
        self._remove_superfluous(writer)
        self._is_unfinished = False
        self._tell(writer, repair, is_expected=is_new)

    def _tell(self, writer: Writer, repair: Repair, *, is_expected: bool) -> None:
        if repair.made and not is_expected:
            _log.warning("Repaired in the store %s: %s", self._folder.root, repair.told())
        if repair.doubts:
            writer.note("; ".join(repair.doubts))
        if notes := writer.notes():
            self._lost[UNNAMED] = notes
        for key, reason in self._lost.items():
            _log.error("Lost in the store %s: %s: %s", self._folder.root, key or "?", reason)

    # --- The journal ----------------------------------------------------------------------------

    def _next_entry(self, batch: Batch) -> Entry:
        number = self._last + 1
        since = self._journal[0].number if self._journal else number
        more = sum(key not in self._keys for key in batch.puts)
        fewer = sum(key in self._keys for key in batch.deletes)
        return Entry(number, since, len(self._keys) + more - fewer, batch)

    def _write_entry(self, writer: Writer, entry: Entry) -> None:
        writer.write(self._folder.entry(entry.number), frame(encode_entry(entry)))
        writer.sync(self._folder.journal)

    def _keep(self, entry: Entry) -> None:
        """Take an entry that is in the journal into account."""
        number, _, _, batch = entry
        self._last = max(self._last, number)
        self._journal.append(
            _Kept(number, (*batch.puts, *batch.deletes), sum(map(len, batch.puts.values())))
        )
        self._newest.update((key, (number, value)) for key, value in batch.puts.items())
        self._newest.update((key, (number, None)) for key in batch.deletes)
        self._keys.update(batch.puts)
        self._keys.difference_update(batch.deletes)

    def _carry_out(self, writer: Writer, entry: Entry) -> None:
        for key, value in entry.batch.puts.items():
            writer.write(self._folder.copy(key), frame(value), durable=False)
        for key in entry.batch.deletes:
            writer.remove(self._folder.copy(key))
            if key in self._lost:  # its damaged file would have it lost again
                writer.remove(self._folder.value(key))
        for key in (*entry.batch.puts, *entry.batch.deletes):
            self._lost.pop(key, None)
        self._write_head(writer)
        self._remove_superfluous(writer)

    def _write_head(self, writer: Writer) -> None:
        head = encode_head(self._last, len(self._keys))
        writer.write(self._folder.head, frame(head), durable=False)

    def _remove_superfluous(self, writer: Writer) -> None:
        for number in sorted(self._superfluous):
            writer.remove(self._folder.entry(number))
        self._superfluous.clear()

    def _make_room(self, writer: Writer) -> None:
        """Carry changes out in the values until the journal has room for another entry."""
        while self._journal and (
            len(self._journal) >= KEPT_CHANGES
            or sum(kept.size for kept in self._journal) > KEPT_BYTES
        ):
            self._settle_oldest(writer)

    def _settle_oldest(self, writer: Writer) -> None:
        number, keys, _ = self._journal[0]
        newest = {key: self._newest[key][1] for key in keys if self._newest[key][0] == number}
        for key, value in newest.items():
            if value is None:
                writer.remove(self._folder.value(key))
            else:
                writer.write(self._folder.value(key), frame(value))
        if newest:
            writer.sync(self._folder.values)
        if None in newest.values():
            # A name that came back after a power cut would be a key that came back.
            writer.sync(self._folder.copies)
        for key in newest:
            del self._newest[key]
        self._journal.popleft()
        self._superfluous.add(number)  # and removed when another entry says that it may be

    # --- Reading --------------------------------------------------------------------------------

    def _keys_beside_writer(self) -> set[str]:
        journal = read_journal(self._folder, self._disk)
        newest = journal.newest()
        values, copies = keys_in(self._disk, self._folder)
        keys = copies if journal.trusts_copies else values | copies
        return {key for key in keys | newest.keys() if newest.get(key, b"") is not None}

    def _read_beside_writer(self, key: str) -> bytes | None:
        journal = read_journal(self._folder, self._disk)
        newest = journal.newest()
        if key in newest:
            return newest[key]
        paths = [self._folder.value(key), self._folder.copy(key)]
        value, problems = self._first_sound(paths[::-1] if journal.trusts_copies else paths)
        if value is None and problems:
            raise self._corrupt(key, problems)
        return value

    def _read(self, writer: Writer, key: str) -> bytes:
        path, copy = self._folder.value(key), self._folder.copy(key)
        value, problems = self._first_sound([path, copy])
        if value is None:
            problems = problems or {path: "is missing", copy: "is missing"}
            error = self._corrupt(key, problems)
            if key not in self._lost:
                _log.error("Lost in the store %s: %s", self._folder.root, error)
            self._lost[key] = " and ".join(f"{each} {why}" for each, why in problems.items())
            raise error
        self._lost.pop(key, None)
        if problems:
            with _system_errors(self._not_writable):
                writer.write(path, frame(value))
                writer.sync(path.parent)
            _log.warning("Repaired in the store %s: %s", self._folder.root, path.name)
        return value

    def _first_sound(self, paths: Iterable[Path]) -> tuple[bytes | None, dict[Path, str]]:
        """Return the first value that is whole, and what is the matter with those before."""
        problems: dict[Path, str] = {}
        refused: OSError | None = None
        for path in paths:
            try:
                return unframe(self._disk.read(path), path), problems
            except FileNotFoundError:
                problems[path] = "is missing"
            except OSError as error:
                refused = error
                problems[path] = f"cannot be read: {error}"
            except FrameError as error:
                problems[path] = f"is damaged: {error}"
        if refused is not None:
            raise refused
        return None, {} if set(problems.values()) == {"is missing"} else problems

    def _corrupt(self, key: str, problems: Mapping[Path, str]) -> CorruptValueError:
        told = " and ".join(f"{path} {problem}" for path, problem in problems.items())
        return CorruptValueError(
            f"key {key!r} is lost: {told}. Nothing of it was used. Put a sound copy back in its "
            "place, or save the key again"
        )

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
