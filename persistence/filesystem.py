"""A store on a file system: a log of changes by one writer at a time, and a copy of it.

Theory of operation. A writer that opens the store claims it, reads the newest log, and begins one
of its own with all values that there are. From then on a change is an entry that is appended to the
log and made durable, by one fsync; then the writer checks whether there was a later claim, and only
if not it answers. So writing needs no lock: what a superseded writer still appends is in a file
that nobody reads, and it answers nothing. What it had answered was there when the store was
claimed, and so was read.

Values above ``LARGE`` are files of their own, written before the entry that names them, and removed
after the one that replaces them. The store remembers where each value is, not the values. Once a
log has grown to twice what it began with, and ``SPARE``, each change also moves a piece of all
values to the next log, which gets the changes too, and takes over when it has all.

Each file has a copy, written after it and not waited for, and what is damaged in one is taken from
the other. A new log heals both. A value that is damaged in both is named in ``lost`` until it is
put or deleted: it is never taken for one that was not there.

A reader takes no lock and changes nothing. It reads one log to its end, which is one moment.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from greenroom.persistence.claims import Writer, claim_on_disk, lease_on_disk, lock_alone
from greenroom.persistence.kv import (
    CorruptValueError,
    NothingSavedError,
    Standing,
    StoreClosedError,
    StoreError,
    StoreMissingError,
    StoreNotReadableError,
    StoreNotWritableError,
    check_key,
    checked,
)
from greenroom.persistence.layout import FORMAT_TEXT, Disk, copy_of, file_name, is_made, key_of
from greenroom.persistence.log import (
    BOTH,
    UNNAMED,
    Contents,
    Log,
    Place,
    Reader,
    Readers,
    is_copied,
    read_log,
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
PIECE = 512 * 1024  # bytes that go to the next log with one change
_READINGS = 20  # of a log that is removed meanwhile, because there is a newer one
_LOG = re.compile(r"(log-(\d{10})-(\d{6}))(\.copy)?")
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
                store.open_for_writing(after, lease)
            except BaseException:
                store.close()
                raise
        return store

    def open_reader(self) -> FileStore:
        """Return the store for reading, which changes nothing; see StoreLocation."""
        store = FileStore(self._root, self._disk)
        with store.errors(partial(_not_readable, self._root)):
            if not is_made(self._root, self._disk):
                raise StoreMissingError(
                    f"there is no store at {self._root}: nothing was ever saved there, or the "
                    "path is wrong"
                )
        return store

    def namespaces(self) -> list[str]:
        """Return the namespaces that have stores here; see StoreLocation."""
        folders = [path.name for path in self.folder.glob("*") if path.is_dir()]
        return sorted(filter(None, map(key_of, folders)))

    def in_namespace(self, namespace: str) -> FileLocation:
        """Return where the store of another namespace is; see StoreLocation."""
        return FileLocation(self.folder, namespace, disk=self._disk)

    def read_claim(self) -> Standing:
        """Return what the store says of its last writer; see StoreLocation."""
        root, disk = self._root, self._disk
        try:
            claim = claim_on_disk(root, disk)
            return Standing(claim.epoch, claim.store_id, lease_on_disk(root, disk))
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
            sizes = _log_sizes(disk, root).values()
            try:
                disk.write_new(tried, bytes(max(_TRIED_BYTES, sum(sizes))))
            finally:
                with suppress(FileNotFoundError):
                    disk.unlink(tried)
        except OSError as error:
            raise _nothing_saved(root, error) from error


class FileStore:
    """A LeasedStore in a folder; FileLocation opens it."""

    renews_apart = False

    def __init__(self, root: Path, disk: Disk, writer: Writer | None = None) -> None:
        self._root = root
        self._disk = disk
        self._writer = writer
        self._is_closed = False
        self._is_read = False  # whether these are what the log says
        self._sizes: dict[str, int] = {}  # of the logs that a reader has read
        self._values: dict[str, Place] = {}
        self._lost: dict[str, str] = {}
        self._doubts: list[str] = []  # what is lost without a name
        self._readers = Readers(disk, root)
        self._losses = _Losses(disk, root / "lost")
        # What only a writer has:
        self._lock: int | None = None
        self._log = Log(disk, "", [])
        self._next: _NextLog | None = None
        self._is_sound = False  # whether both files of the log are whole
        self._logs = 0
        self._large = 0  # files that were made
        self._limit = 0  # bytes, from which on the log is begun anew

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
        """The keys that cannot be read, and why; see KVStore. A reader knows those it met."""
        if UNNAMED in self._lost and self._writer is not None:
            with suppress(OSError):  # it stands until the contrary is seen
                self._read_losses()
        return self._lost

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore."""
        check_key(key)
        if self._writer is None:
            value = self.load(key).get(key)
        else:
            self._refresh()
            with self.errors(partial(_not_readable, self._root)):
                value = self._value(key)
        if value is None and key in self._lost:
            raise CorruptValueError(
                f"key {key!r} is lost: {self._lost[key]}. Nothing of it was used. Save it again"
            )
        return value

    def list_keys(self) -> list[str]:
        """Return all keys, sorted; see KVStore."""
        self._refresh()
        return sorted((self._values.keys() | self._lost.keys()) - {UNNAMED})

    def load(self, prefix: str = "") -> dict[str, bytes]:
        """Return the values whose keys start with ``prefix``, sorted; see KVStore."""
        for _ in range(_READINGS):
            self._refresh()
            seen = self._values
            keys = sorted(key for key in seen if key.startswith(prefix))
            with self.errors(partial(_not_readable, self._root)):
                found = {key: self._value(key) for key in keys}
            values = {key: value for key, value in found.items() if value is not None}
            if self._writer is not None or len(values) == len(keys):
                return values
            self._refresh()
            if self._values == seen:  # else a file was removed before it was read
                return values
        raise self._changes_too_often()

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing, durable on return; see KVStore.

        One fsync; one more for each large value, and some where a log is begun. Raises
        StaleWriterError once another writer opened the store, StoreNotWritableError for a reader
        and where the disk refuses.
        """
        puts, deletes = checked(puts, deletes)
        self._check_open()
        writer = self._writer
        if writer is None:
            raise StoreNotWritableError(
                f"the store {self._root} was opened for reading; open it for writing, in the one "
                "process that should"
            )
        if not (puts or deletes):
            return
        with self.errors(partial(_nothing_saved, self._root)):
            log = self._log_with_room(writer)
            small = {key: value for key, value in puts.items() if len(value) <= LARGE}
            large = self._written_apart(writer, puts)
            content, places = log.entry(small, deletes, large=large)
            self._is_read = self._is_sound = False  # until this change is known to be made
            log.append(content)
        with self.errors(self._not_writable):
            log.sync()
            writer.check()
        self._keep(places, deletes)
        self._is_read = True
        try:
            log.append_copy(content)
        except OSError as error:  # the change is made, and the next one begins a new log
            _log.warning("cannot write %s.copy: %s", self._root / log.name, error)
        else:
            self._is_sound = True
        if self._next is not None and self._is_sound:
            with self._next_may_fail():
                self._next.change(small, deletes, large)

    def discard(self, key: str) -> None:
        """Delete a lost key, and record that; see KVStore."""
        if self._writer is None or key not in self._lost:
            return
        with self.errors(self._not_writable):
            self._losses.add(self._writer, f"{key} is given up: {self._lost[key]}")
            self._read_losses()
        self.apply({}, [key])

    def renew(self, lease: bytes, term_s: float) -> None:  # no clock is shared
        """Write the lease, as :meth:`FileLocation.read_claim` returns it; see LeasedStore."""
        self._check_open()
        assert self._writer is not None, "a reader has no lease"
        with self.errors(self._not_writable):
            self._writer.renew(lease)

    def close(self) -> None:
        """Release the lock and refuse every later call."""
        self._is_closed = True
        _stores.discard(self)
        self._log.close()
        if self._next is not None:
            self._next.log.close()
        if self._lock is not None:
            # Not LOCK_UN: in a forked child that would take the lock away from the parent.
            os.close(self._lock)
            self._lock = None

    # --- Opening --------------------------------------------------------------------------------

    def open_for_writing(self, after: int | None, lease: bytes | None) -> None:
        """Become the writer; see FileLocation, which alone calls this."""
        root, disk = self._root, self._disk
        was_made = is_made(root, disk)
        _make_folders(disk, root)
        if after is None:
            self._lock = lock_alone(root / "lock")
        least = max((int(name[4:14]) for name in self._names_of_logs()), default=0)
        writer = Writer.claim(root, disk, least=least, after=after, lease=lease)
        self._writer = writer
        self._reread()
        for name in self._names_of_logs()[-1:]:
            if not is_copied(disk, root, name):
                _log.warning("%s or its copy is damaged, and both are written anew", root / name)
        self._recover(writer)
        for path in (copy_of(root / "format"), root / "format"):
            with suppress(FileNotFoundError):
                if disk.read(path) == FORMAT_TEXT:
                    continue
            if was_made:
                _log.warning("%s is damaged or missing, and is written anew", path)
            writer.replace(path, FORMAT_TEXT)
        for key, reason in self.lost.items():
            _log.error("Lost in the store %s: %s: %s", root, key or "?", reason)

    def _recover(self, writer: Writer) -> None:
        """Begin a log with what was read, and have two sound copies of everything."""
        writer.check()
        for doubt in self._doubts:
            self._losses.add(writer, doubt)
        self._repair_large_ones(writer)
        self._begin(writer)
        self._read_losses()

    def _read_losses(self) -> None:
        """Read what is lost without a name; a person may have removed it."""
        described = self._losses.describe()
        self._lost.pop(UNNAMED, None)
        if described:
            self._lost[UNNAMED] = described

    def _names_of_logs(self) -> list[str]:
        try:
            names = self._disk.names(self._root)
        except FileNotFoundError:
            return []
        return sorted({found[1] for name in names if (found := _LOG.fullmatch(name))})

    def _refresh(self) -> None:
        """Read what there is, where this store does not know it."""
        self._check_open()
        with self.errors(partial(_not_readable, self._root)):
            sizes = _log_sizes(self._disk, self._root) if self._writer is None else {}
            if not self._is_read or sizes != self._sizes:
                self._reread()
                self._sizes = sizes
                self._is_read = bool(sizes) or self._writer is not None

    def _reread(self) -> None:
        is_new = not is_made(self._root, self._disk)
        contents = self._read_newest_log(is_new=is_new)
        self._values, self._lost, self._doubts = contents.values, contents.lost, contents.doubts
        if self._doubts:
            self._lost[UNNAMED] = "; ".join(self._doubts)

    def _read_newest_log(self, *, is_new: bool) -> Contents:
        for _ in range(_READINGS):
            names = self._names_of_logs()
            contents = read_log(self._disk, self._root, names[-1]) if names else Contents()
            if self._names_of_logs() == names:
                break
        else:
            raise self._changes_too_often()
        if contents.is_read or is_new:
            return contents
        raise CorruptValueError(
            f"{self._root} has no log that can be read, so all that was saved is lost. Nothing was "
            "changed: bring its log-* files back, or remove the folder and restore a backup"
        )

    def _value(self, key: str) -> bytes | None:
        """Return the value of a key, None where there is none or it is lost."""
        place = self._values.get(key)
        if place is None:
            return None
        value = self._readers.value(place)
        if value is None:
            self._lost[key] = f"{self._root / place.file} and its copy are damaged"
        else:
            self._lost.pop(key, None)
        return value

    # --- Logs -----------------------------------------------------------------------------------

    def _log_with_room(self, writer: Writer) -> Log:
        if not self._is_sound:
            self._refresh()
            self._recover(writer)
        elif self._next is not None or self._log.size > self._limit:
            with self._next_may_fail():
                following = self._next or self._start_next(writer)
                self._move(following, writer, PIECE)
                if following.left:
                    following.log.sync_files()  # else it all has to be written at the end
                else:
                    self._finish(following, writer)
        return self._log

    def _begin(self, writer: Writer) -> None:
        """Begin a log with all that there is, and remove those before."""
        try:
            following = self._start_next(writer)
            self._move(following, writer)
            self._finish(following, writer)
        except BaseException:
            self._drop_next()
            raise

    def _start_next(self, writer: Writer) -> _NextLog:
        self._drop_next()
        self._logs += 1
        name = f"log-{self.epoch:010d}-{self._logs:06d}"
        paths = [self._root / f"{name}{suffix}" for suffix in BOTH]
        files = {writer.temporary(path): path for path in paths}
        fds: list[int] = []
        following = _NextLog(Log(self._disk, name, fds), files, sorted(self._values, reverse=True))
        self._next = following
        fds.extend(self._disk.create(path) for path in files)
        cut_off = dict.fromkeys(sorted(self._values), f"{name} and its copy are cut off")
        following.log.add(lost={**cut_off, **self._lost})
        return following

    def _move(self, following: _NextLog, writer: Writer, limit: float = float("inf")) -> None:
        """Give the next log values that it lacks, of some ``limit`` bytes."""
        end = following.log.size + limit
        small: dict[str, bytes] = {}
        large: dict[str, Place] = {}
        while following.left and following.log.size < end:
            key = following.left.pop()
            place = self._values.get(key)
            if place is None or key in following.places:
                continue  # a change was quicker
            if _is_large(place):
                large[key] = place
            elif (value := self._value(key)) is not None:  # else it stays lost
                small[key] = value
            if sum(map(len, small.values())) > TOGETHER:
                following.change(small, large=large)
                small, large = {}, {}
        following.change(small, large=large)

    def _finish(self, following: _NextLog, writer: Writer) -> None:
        """Put the next log, which has all, in the place of this one."""
        following.log.sync_files()
        self._is_read = self._is_sound = False  # until one of both is the newest for sure
        for temporary, path in following.files.items():
            self._disk.rename(temporary, path)
        self._disk.fsync_dir(self._root)
        writer.check()
        self._log.close()
        self._log, self._values, self._next = following.log, following.places, None
        self._is_read = self._is_sound = True
        self._limit = 2 * self._log.size + SPARE
        self._remove_what_is_old(self._log)

    @contextmanager
    def _next_may_fail(self) -> Iterator[None]:
        """Go on with the log that there is, unless the next one may have its name already."""
        try:
            yield
        except OSError as error:
            self._drop_next()
            if not self._is_sound:
                raise
            _log.warning("the log %s is not begun anew: %s", self._log.name, error)
            self._limit = self._log.size + SPARE

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next.log.close()
            for temporary in self._next.files:
                with suppress(OSError):  # it takes room on a full disk
                    self._disk.unlink(temporary)
            self._next = None

    def _remove_what_is_old(self, log: Log) -> None:
        """Remove what no later writer can have need of: it reads this log, or one after it."""
        used = {place.file for place in self._large_ones().values()}
        for folder in ("", "large/"):
            for name in self._disk.names(self._root / folder):
                is_old_log = (found := _LOG.fullmatch(name)) and found[1] < log.name
                made = _MADE.fullmatch(name)
                is_left = made and int(made[2]) <= self.epoch and f"{folder}{made[1]}" not in used
                if is_old_log or is_left:
                    with suppress(FileNotFoundError):
                        self._disk.unlink(self._root / folder / name)

    # --- Values ---------------------------------------------------------------------------------

    def _large_ones(self) -> dict[str, Place]:
        return {key: place for key, place in self._values.items() if _is_large(place)}

    def _written_apart(self, writer: Writer, values: Mapping[str, bytes]) -> dict[str, Place]:
        """Write the large values to files of their own, durably."""
        places = {}
        for key, value in values.items():
            if len(value) > LARGE:
                self._large += 1
                file = f"large/{writer.epoch}-{self._large}"
                place = Place(file, 0, len(value), zlib.crc32(value))
                path = self._root / file
                try:
                    self._disk.write_new(path, value)
                    self._disk.write_new(copy_of(path), value, durable=False)
                except BaseException:
                    self._remove(place)  # it takes room on a full disk
                    raise
                places[key] = place
        if places:
            self._disk.fsync_dir(self._root / "large")
        return places

    def _remove(self, place: Place) -> None:
        for suffix in BOTH:
            with suppress(OSError):  # it goes when the next log is begun
                self._disk.unlink(self._root / f"{place.file}{suffix}")

    def _repair_large_ones(self, writer: Writer) -> None:
        for key, place in self._large_ones().items():
            if (value := self._value(key)) is None:
                del self._values[key]
                continue
            for suffix in BOTH:
                path = self._root / f"{place.file}{suffix}"
                if Reader(self._disk, path).read(0, place.size) != value:
                    _log.warning("%s is damaged or missing, and is written anew", path)
                    writer.replace(path, value)

    def _keep(self, places: Mapping[str, Place], deletes: Iterable[str]) -> None:
        """Take a change into account that is made."""
        for key in (*places, *deletes):
            self._lost.pop(key, None)
            before = self._values.pop(key, None)
            if before is not None and _is_large(before):
                self._remove(before)
        self._values.update(places)

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
            if self._writer is not None:
                with suppress(OSError, CorruptValueError):
                    self._writer.check()
            raise describe(error) from error

    def _changes_too_often(self) -> StoreError:
        return StoreNotReadableError(
            f"the store {self._root} was changed during each of {_READINGS} readings: try later"
        )

    def _not_writable(self, error: OSError) -> StoreError:
        return StoreNotWritableError(
            f"cannot write to the store {self._root} as uid {os.geteuid()}: {error}. The change "
            f"may or may not have been made: {_remedy(error)}, then repeat it"
        )


class _Losses:
    """What cannot be repaired and has no name, one a line, until a person removes the file."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def add(self, writer: Writer, text: str) -> None:
        """Add one, unless it is there; raises OSError."""
        texts = self._kept()
        if text not in texts:
            writer.replace(self._path, "\n".join((*texts, text, "")).encode())

    def describe(self) -> str:
        """Return all of them and what to do; empty for none."""
        hint = f"Deploy again what is not there, then remove {self._path}"
        return f"{texts}. {hint}" if (texts := "; ".join(self._kept())) else ""

    def _kept(self) -> list[str]:
        try:
            return self._disk.read(self._path).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []


@dataclass
class _NextLog:
    """A log that takes over once it has all: the values come piece by piece, and each change."""

    log: Log
    files: dict[Path, Path]  # the names that they have until then, and those from then on
    left: list[str]  # keys whose values are to come
    places: dict[str, Place] = field(default_factory=dict)

    def change(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        large: Mapping[str, Place] | None = None,
    ) -> None:
        """Add a change, or values that there were."""
        self.places |= self.log.add(puts, deletes, large=large)
        for key in deletes:
            self.places.pop(key, None)


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


def _log_sizes(disk: Disk, root: Path) -> dict[str, int]:
    """Return how long the logs and their copies are: what has not grown is the same."""
    sizes = {}
    for name in disk.names(root):
        if _LOG.fullmatch(name):
            with suppress(FileNotFoundError):  # there is a newer one
                sizes[name] = disk.size(root / name)
    return sizes


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
