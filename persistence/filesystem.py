"""A store on a file system: a log of changes by one writer at a time, and a copy of it.

Theory of operation. A writer that opens the store claims it, reads the newest log, and begins one
of its own with all values that there are. From then on a change is an entry that is appended to the
log and made durable, by one fsync; then the writer checks whether there was a later claim, and only
if not it answers. So writing needs no lock: what a superseded writer still appends is in a file
that nobody reads, and it answers nothing. What it had answered was there when the store was
claimed, and so was read.

Values above ``LARGE`` are files of their own, written before the entry that names them, and removed
after the one that replaces them. The store remembers where each value is, not the values. Once a
log has grown to twice what it began with, and ``SPARE``, the next change begins a log anew first,
which takes as long as an opening: some 0.6 s for 10,000 records.

Each file has a copy, written after it and not waited for, and what is damaged in one is taken from
the other. A new log heals both. A value that is damaged in both is named in ``lost`` until it is
put or deleted: it is never taken for one that was not there. So is :data:`UNNAMED`, which stands
for changes that have lost their keys, too.

Reading takes no lock and changes nothing. It reads one log to its end, which is one moment.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from greenroom.persistence.claims import Writer, claim_on_disk, lease_on_disk
from greenroom.persistence.kv import (
    Claim,
    CorruptValueError,
    MemoryStore,
    NothingSavedError,
    StoreClosedError,
    StoreError,
    StoreMissingError,
    StoreNotReadableError,
    StoreNotWritableError,
    check_found,
    check_key,
    checked,
)
from greenroom.persistence.layout import FORMAT_TEXT, Disk, copy_of, file_name, is_made, key_of
from greenroom.persistence.log import (
    BOTH,
    LOG,
    READINGS,
    Contents,
    Log,
    Place,
    Reader,
    changes_too_often,
    is_copied,
    names_of_logs,
    read_newest_log,
)

_log = logging.getLogger(__name__)

_REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space, or have the quota raised",
    errno.EROFS: "mount the file system writable",
    errno.EIO: "see to the disk",
}
LARGE = 64 * 1024
SPARE = 4 * 1024 * 1024  # of changes, before it is worth beginning a log anew
_TRIED_BYTES = 64 * 1024  # what has to be free, at least, for writing to begin again
TOGETHER = 32 * 1024  # bytes of values in one entry of a new log
_MADE = re.compile(r"\.?((\d+)-.+?)(\.copy)?")  # a large value, or a file that is not whole yet


class FileLocation:
    """A StoreLocation in a folder; each namespace has a folder of its own below it."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        namespace: str = "default",
        *,
        disk: Disk | None = None,
    ) -> None:
        check_key(namespace, what="namespace")
        self.folder = Path(folder)
        self._namespace = namespace
        self._root = self.folder / file_name(namespace)
        self._disk = disk or Disk()

    def __str__(self) -> str:
        return str(self.folder)

    def open(self, *, after: int | None = None, lease: bytes | None = None) -> FileStore:
        """Become the writer; see StoreLocation.

        A writer makes what is missing, takes the lock, fences every earlier writer, and begins a
        log; it reads everything, blocks for some fsyncs, and holds the lock until ``close`` or the
        end of this process. With ``after`` other hosts share the folder, and it holds no lock.
        ``lease`` is the one that :meth:`read_claim` returned. Raises StoreLockedError,
        OtherFormatError, CorruptValueError, StaleWriterError, StoreNotWritableError.
        """
        store = FileStore(self._root, self._disk)
        _stores.add(store)
        with store.errors(partial(_nothing_saved, self._root)):
            try:
                store.open(after, lease)
            except BaseException:
                store.close()
                raise
        return store

    def read(self, wanted: Callable[[str], object] = bool) -> MemoryStore:
        """Return what is saved as of one moment; see StoreLocation."""
        root, disk = self._root, self._disk
        try:
            if not is_made(root, disk):
                raise StoreMissingError(
                    f"there is no store at {root}: nothing was ever saved there, or the path is "
                    "wrong"
                )
            for _ in range(READINGS):
                contents = read_newest_log(disk, root)
                found = {key: contents.value(key) for key in filter(wanted, contents.values)}
                values = {key: value for key, value in found.items() if value is not None}
                is_whole = len(values) == len(found)
                # Else it is damaged, or the file was removed before it was read.
                if is_whole or read_newest_log(disk, root).values == contents.values:
                    return MemoryStore(values, contents.lost)
        except OSError as error:
            raise _not_readable(root, error) from error
        raise changes_too_often(root)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have stores here; see StoreLocation."""
        folders = [path.name for path in self.folder.glob("*") if path.is_dir()]
        return sorted(filter(None, map(key_of, folders)))

    def in_namespace(self, namespace: str) -> FileLocation:
        """Return where the store of another namespace is; see StoreLocation."""
        return FileLocation(self.folder, namespace, disk=self._disk)

    def read_claim(self) -> Claim:
        """Return what the store says of its last writer; see StoreLocation."""
        root, disk = self._root, self._disk
        try:
            return claim_on_disk(root, disk)._replace(lease=lease_on_disk(root, disk))
        except OSError as error:
            raise _not_readable(root, error) from error

    def forget(self) -> None:
        """Delete all that is saved; see StoreLocation."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_to_write(self) -> None:
        """Write as much beside the store as an opening does, and remove it; see StoreLocation.

        It takes nothing over from a writer, and makes the folder where there is none yet: a disk
        may have been full since before the first opening.
        """
        root, disk = self._root, self._disk
        tried = root / f".0-try-{os.getpid()}.tmp"
        try:
            _make_folders(disk, root)
            size = _TRIED_BYTES
            for name in filter(LOG.fullmatch, disk.names(root)):
                with suppress(FileNotFoundError):  # there is a newer one
                    size += disk.size(root / name)
            try:
                disk.write_new(tried, bytes(size))
            finally:
                with suppress(FileNotFoundError):
                    disk.unlink(tried)
        except OSError as error:
            raise _nothing_saved(root, error) from error


class FileStore:
    """A LeasedStore in a folder; FileLocation opens it."""

    renews_apart = False

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._writer = Writer(root, disk)
        self._large = _LargeValues(root, disk, self._writer)
        self._is_closed = False
        self._contents = Contents(disk, root)
        self._is_read = False  # whether these are what the log says
        self._log = Log(disk, "", [])
        self._is_sound = False  # whether both files of the log are whole
        self._logs = 0
        self._limit = 0  # bytes, from which on the log is begun anew

    @property
    def epoch(self) -> int:
        """The number of this writer, higher than every earlier one's."""
        return self._writer.epoch

    @property
    def store_id(self) -> str:
        """What tells this store from any other, for as long as it exists."""
        return self._writer.store_id

    @property
    def lost(self) -> Mapping[str, str]:
        """The keys that cannot be read, and why; see KVStore."""
        return self._contents.lost

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore."""
        check_key(key)
        self._refresh()
        with self.errors(partial(_not_readable, self._root)):
            value = self._contents.value(key)
        check_found(self, key)
        return value

    def load(self, prefix: str = "") -> dict[str, bytes]:
        """Return the values whose keys start with ``prefix``, sorted; see KVStore."""
        self._refresh()
        keys = sorted(key for key in self._contents.values if key.startswith(prefix))
        with self.errors(partial(_not_readable, self._root)):
            found = {key: self._contents.value(key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing, durable on return; see KVStore.

        One fsync; one more for each large value, and some where a log is begun. Raises
        StaleWriterError once another writer opened the store, StoreNotWritableError where the disk
        refuses.
        """
        puts, deletes = checked(puts, deletes)
        self._check_open()
        if not (puts or deletes):
            return
        with self.errors(partial(_nothing_saved, self._root)):
            log = self._log_with_room()
            small = {key: value for key, value in puts.items() if len(value) <= LARGE}
            large = self._large.write(puts)
            content, places = log.entry(small, deletes, large=large)
            self._is_read = self._is_sound = False  # until this change is known to be made
            log.append(content)
        with self.errors(self._not_writable):
            log.sync()
            self._writer.check()
        self._large.remove(self._contents.change(places, deletes))
        self._is_read = True
        try:
            log.append_copy(content)
        except OSError as error:  # the change is made, and the next one begins a new log
            _log.warning("cannot write %s.copy: %s", self._root / log.name, error)
        else:
            self._is_sound = True

    def renew(self, lease: bytes, term_s: float) -> None:  # no clock is shared
        """Write the lease, as :meth:`FileLocation.read_claim` returns it; see LeasedStore."""
        self._check_open()
        with self.errors(self._not_writable):
            self._writer.renew(lease)

    def close(self) -> None:
        """Release the lock and refuse every later call."""
        self._is_closed = True
        _stores.discard(self)
        self._log.close()
        self._writer.close()

    # --- Opening --------------------------------------------------------------------------------

    def open(self, after: int | None, lease: bytes | None) -> None:
        """Become the writer; see FileLocation, which alone calls this."""
        root, disk = self._root, self._disk
        was_made = is_made(root, disk)
        _make_folders(disk, root)
        self._writer.claim(after=after, lease=lease)
        self._refresh()
        for name in names_of_logs(disk, root)[-1:]:
            if not is_copied(disk, root, name):
                _log.warning("%s or its copy is damaged, and both are written anew", root / name)
        self._recover()
        for path in (copy_of(root / "format"), root / "format"):
            with suppress(FileNotFoundError):
                if disk.read(path) == FORMAT_TEXT:
                    continue
            if was_made:
                _log.warning("%s is damaged or missing, and is written anew", path)
            self._writer.replace(path, FORMAT_TEXT)
        for key, reason in self.lost.items():
            _log.error("Lost in the store %s: %s: %s", root, key, reason)

    def _recover(self) -> None:
        """Begin a log with what was read, and have two sound copies of everything."""
        self._writer.check()
        self._large.repair(self._contents)
        self._begin_log()

    def _refresh(self) -> None:
        """Read what there is, where it is not known."""
        self._check_open()
        if not self._is_read:
            with self.errors(partial(_not_readable, self._root)):
                is_new = not is_made(self._root, self._disk)
                self._contents = read_newest_log(self._disk, self._root, is_new=is_new)
            self._is_read = True

    # --- Logs -----------------------------------------------------------------------------------

    def _log_with_room(self) -> Log:
        if not self._is_sound:
            self._refresh()
            self._recover()
        elif self._log.size > self._limit:
            try:
                self._begin_log()
            except OSError as error:
                if not self._is_sound:  # one of its files may have its name already
                    raise
                _log.warning("the log %s is not begun anew: %s", self._log.name, error)
                self._limit = self._log.size + SPARE
        return self._log

    def _begin_log(self) -> None:
        """Begin a log with all that there is, and go on with that."""
        self._logs += 1
        name = f"log-{self.epoch:010d}-{self._logs:06d}"
        paths = [self._root / f"{name}{suffix}" for suffix in BOTH]
        temporaries = [self._writer.temporary(path) for path in paths]
        fds: list[int] = []
        log = Log(self._disk, name, fds)
        try:
            fds.extend(self._disk.create(path) for path in temporaries)
            places = self._write_all(log)
            log.sync_files()
            self._is_read = self._is_sound = False  # until one of both is the newest for sure
            for temporary, path in zip(temporaries, paths, strict=True):
                self._disk.rename(temporary, path)
            self._disk.fsync_dir(self._root)
            self._writer.check()
        except BaseException:
            log.close()
            for path in temporaries:
                with suppress(OSError):  # it takes room on a full disk
                    self._disk.unlink(path)
            raise
        self._log.close()
        self._log, self._contents.values = log, places
        self._is_read = self._is_sound = True
        self._limit = 2 * log.size + SPARE
        self._remove_what_is_old()

    def _write_all(self, log: Log) -> dict[str, Place]:
        """Give a new log what is lost, and the values; return where these are."""
        keys = sorted(self._contents.values)
        cut_off = dict.fromkeys(keys, f"{log.name} and its copy are cut off")
        log.add(lost={**cut_off, **self._contents.lost})
        places: dict[str, Place] = {}
        small: dict[str, bytes] = {}
        for key in keys:
            place = self._contents.values[key]
            if _is_large(place):
                places |= log.add(large={key: place})
            elif (value := self._contents.value(key)) is not None:  # else it stays lost
                small[key] = value
            if sum(map(len, small.values())) > TOGETHER:
                places |= log.add(small)
                small = {}
        return places | log.add(small)

    def _remove_what_is_old(self) -> None:
        """Remove what no later writer can have need of: it reads this log, or one after it."""
        used = {place.file for place in self._contents.values.values()}
        for folder in ("", "large/"):
            for name in self._disk.names(self._root / folder):
                is_old_log = (found := LOG.fullmatch(name)) and found[1] < self._log.name
                made = _MADE.fullmatch(name)
                is_left = made and int(made[2]) <= self.epoch and f"{folder}{made[1]}" not in used
                if is_old_log or is_left:
                    with suppress(FileNotFoundError):
                        self._disk.unlink(self._root / folder / name)

    # --- Errors ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError(
                f"the store {self._root} was closed, or opened before a fork; open it again"
            )

    @contextmanager
    def errors(self, describe: Callable[[OSError], StoreError]) -> Iterator[None]:
        """Make the system's errors ours; of a writer that was superseded, that it was.

        The later one removes what it finds half made.
        """
        try:
            yield
        except OSError as error:
            if self.epoch:
                with suppress(OSError, CorruptValueError):
                    self._writer.check()
            raise describe(error) from error

    def _not_writable(self, error: OSError) -> StoreError:
        return StoreNotWritableError(
            f"cannot write to the store {self._root} as uid {os.geteuid()}: {error}. The change "
            f"may or may not have been made: {_remedy(error)}, then repeat it"
        )


class _LargeValues:
    """The files of values that are too long for a log, each with a copy."""

    def __init__(self, root: Path, disk: Disk, writer: Writer) -> None:
        self._root = root
        self._disk = disk
        self._writer = writer
        self._count = 0  # of files that were made

    def write(self, values: Mapping[str, bytes]) -> dict[str, Place]:
        """Write those of these values that are large, durably."""
        places = {}
        for key, value in values.items():
            if len(value) > LARGE:
                self._count += 1
                file = f"large/{self._writer.epoch}-{self._count}"
                place = Place(file, 0, len(value), zlib.crc32(value))
                path = self._root / file
                try:
                    self._disk.write_new(path, value)
                    self._disk.write_new(copy_of(path), value, durable=False)
                except BaseException:
                    self.remove([place])  # it takes room on a full disk
                    raise
                places[key] = place
        if places:
            self._disk.fsync_dir(self._root / "large")
        return places

    def remove(self, places: Iterable[Place]) -> None:
        """Remove the files of those of these that are large."""
        for file in [place.file for place in places if _is_large(place)]:
            for suffix in BOTH:
                with suppress(OSError):  # it goes when the next log is begun
                    self._disk.unlink(self._root / f"{file}{suffix}")

    def repair(self, contents: Contents) -> None:
        """Write anew what is damaged in one of two; what is in both leaves the values."""
        for key, place in [each for each in contents.values.items() if _is_large(each[1])]:
            if (value := contents.value(key)) is None:
                del contents.values[key]
                continue
            for suffix in BOTH:
                path = self._root / f"{place.file}{suffix}"
                if Reader(self._disk, path).read(0, place.size) != value:
                    _log.warning("%s is damaged or missing, and is written anew", path)
                    self._writer.replace(path, value)


def _is_large(place: Place) -> bool:
    return place.file.startswith("large/")


_stores: set[FileStore] = set()  # of writers


def _close_inherited() -> None:
    for store in tuple(_stores):
        store.close()


# Actors are forked from one another. A child that kept the descriptor would keep the lock after
# its parent's death, and so keep the parent's successor out.
os.register_at_fork(after_in_child=_close_inherited)


def _make_folders(disk: Disk, root: Path) -> None:
    for folder in (*reversed(root.parents), root, root / "large"):
        if not folder.is_dir():
            with suppress(FileExistsError):
                disk.mkdir(folder)
            disk.fsync_dir(folder.parent)
    # Also where nothing was missing: a writer may have died between mkdir and fsync.
    disk.fsync_dir(root.parent)


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "make the folder writable")


def _nothing_saved(path: Path, error: OSError) -> NothingSavedError:
    return NothingSavedError(
        f"cannot write to the store {path} as uid {os.geteuid()}: {error}. Nothing was changed: "
        f"{_remedy(error)}, then repeat it"
    )


def _not_readable(root: Path, error: OSError) -> StoreError:
    return StoreNotReadableError(
        f"cannot read the store {root} as uid {os.geteuid()}: {error}. Make the folder readable "
        "for that user"
    )
