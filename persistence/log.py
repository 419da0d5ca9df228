"""One log of a store, and its copy: how a change is written, and what is read of it.

A log is a sequence of entries. An entry is a *head*, which is a frame, and the values that it puts,
one after the other. The head has the place of the entry in the log, what is put with the size and
checksum of each value, what is deleted, and what is lost, with the reason. Both files have the same
bytes, so an entry or a value that is damaged in one is taken from the other.

The first entry calls all keys lost that the log begins with, and each of the next ones puts some of
them: what is cut off is missed by its name. A head that is damaged in both files is passed over, as
the next one names its own place. Where nothing follows, the entry was never written to its end if
its copy was not begun: the copy is written once the entry is durable. If it was begun and both are
cut off, the change counts as not made, and the error says that it may have been.
"""

from __future__ import annotations

import errno
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from greenroom.persistence.kv import UNNAMED, CorruptValueError, StoreNotReadableError
from greenroom.persistence.layout import (
    COPY,
    FRAME_SIZE,
    Disk,
    FrameError,
    frame,
    framed_length,
    unframe,
)

BOTH = ("", COPY)
_WINDOW = 64 * 1024  # that is read at a time
_CHUNK = 1024 * 1024  # that is written at a time
_MAGIC = frame(b"")[:6]
READINGS = 20  # of a log that is removed meanwhile, because there is a newer one
LOG = re.compile(r"(log-(\d{10})-(\d{6}))(\.copy)?")


class Place(NamedTuple):
    """Where a value is, in a file and its copy."""

    file: str
    at: int
    size: int
    checksum: int


class Entry(NamedTuple):
    """The head of an entry."""

    at: int
    puts: dict[str, tuple[int, int, str]]  # size, checksum, and the file of a large one
    deletes: list[str]
    lost: dict[str, str]

    def places(self, log: str, begin: int) -> dict[str, Place]:
        """Return where the values are, if those in the log begin there."""
        found = {}
        for key, (size, checksum, file) in self.puts.items():
            found[key] = Place(file or log, 0 if file else begin, size, checksum)
            begin += 0 if file else size
        return found


class Log:
    """The end of a log that entries are appended to. Methods raise OSError."""

    def __init__(self, disk: Disk, name: str, fds: list[int]) -> None:
        self.name = name
        self.size = 0
        self._disk = disk
        self._fds = fds
        self._pending = bytearray()

    def entry(
        self,
        puts: Mapping[str, bytes] | None = None,
        deletes: Iterable[str] = (),
        lost: Mapping[str, str] | None = None,
        large: Mapping[str, Place] | None = None,
    ) -> tuple[bytes, dict[str, Place]]:
        """Return an entry for the end of the log, and where its values will be."""
        values = dict(puts or {})
        described = {key: (len(value), zlib.crc32(value), "") for key, value in values.items()}
        apart = {key: (at.size, at.checksum, at.file) for key, at in (large or {}).items()}
        head = Entry(
            self.size,
            described | apart,
            list(deletes),
            dict(lost or {}),
        )
        framed = frame(json.dumps(head).encode())
        content = b"".join((framed, *values.values()))
        return content, head.places(self.name, self.size + len(framed))

    def add(
        self,
        puts: Mapping[str, bytes] | None = None,
        deletes: Iterable[str] = (),
        *,
        lost: Mapping[str, str] | None = None,
        large: Mapping[str, Place] | None = None,
    ) -> dict[str, Place]:
        """Append an entry to both files, which are whole after :meth:`sync_files`."""
        content, places = self.entry(puts, deletes, lost, large)
        self._pending += content
        self.size += len(content)
        if len(self._pending) > _CHUNK:
            self._write_pending()
        return places

    def sync_files(self) -> None:
        """Make what was added durable."""
        self._write_pending()
        for fd in self._fds:
            self._disk.fsync(fd)

    def _write_pending(self) -> None:
        for fd in self._fds:
            self._disk.write_all(fd, self._pending)
        self._pending.clear()

    def append(self, content: bytes) -> None:
        """Append an entry to the log; it is not durable yet, nor copied."""
        self._disk.write_all(self._fds[0], content)
        self.size += len(content)

    def sync(self) -> None:
        """Make what was appended durable."""
        self._disk.fsync(self._fds[0])

    def append_copy(self, content: bytes) -> None:
        """Append to the copy what was appended to the log."""
        self._disk.write_all(self._fds[1], content)

    def close(self) -> None:
        """Close the files; a repeat does nothing."""
        while self._fds:
            self._disk.close(self._fds.pop())


class Reader:
    """Reads pieces of one file, which may be missing and may grow. Methods raise OSError."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._window = b""
        self._begin = 0
        try:
            self.size = disk.size(path)
        except FileNotFoundError:
            self.size = 0

    def read(self, at: int, size: int) -> bytes:
        """Return so many bytes, fewer where they are not there or damaged."""
        skipped = at - self._begin
        if not 0 <= skipped <= skipped + size <= len(self._window):
            self._begin, skipped = at, 0
            self._window = self._read(at, max(size, _WINDOW)) or self._read(at, size)
        return self._window[skipped : skipped + size]

    def _read(self, at: int, size: int) -> bytes:
        try:
            return self._disk.read(self._path, at, size)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return b""  # damaged

    def head(self, at: int) -> tuple[Entry, int] | None:
        """Return the head of an entry and where that ends, or None."""
        try:
            length = FRAME_SIZE + framed_length(self.read(at, FRAME_SIZE))
            if at + length > self.size:
                return None
            entry = Entry(*json.loads(unframe(self.read(at, length))))
        except FrameError:
            return None
        return (entry, at + length) if entry.at == at else None

    def next_head(self, at: int) -> int:
        """Return where the first sound head after ``at`` is, or the size of the file."""
        at += 1
        while at < self.size:
            window = self.read(at, min(_WINDOW, self.size - at))
            found = window.find(_MAGIC)
            if found < 0:
                at += max(len(window) - len(_MAGIC), 0) + 1
            elif self.head(at + found):
                return at + found
            else:
                at += found + 1
        return self.size


class Readers:
    """Reads values, from a file or from its copy."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk = disk
        self._root = root
        self._file = ""
        self._readers: list[Reader] = []

    def of(self, file: str) -> list[Reader]:
        """Return readers of a file and its copy, kept until another one is asked for."""
        if file != self._file:
            # The copy first: beside a writer, the log then has all that the copy has.
            copy, first = (Reader(self._disk, self._root / f"{file}{s}") for s in (COPY, ""))
            self._file, self._readers = file, [first, copy]
        return self._readers

    def find(self, place: Place) -> bytes | None:
        """Return a value, None where it is damaged in both."""
        for reader in self.of(place.file):
            raw = reader.read(place.at, place.size)
            if len(raw) == place.size and zlib.crc32(raw) == place.checksum:
                return raw
        return None


class Contents:
    """What a log says, or a store has."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.values: dict[str, Place] = {}
        self.lost: dict[str, str] = {}  # keys, and why
        self.is_read = False  # whether there was anything
        self.readers = Readers(disk, root)
        self._root = root

    def value(self, key: str) -> bytes | None:
        """Return the value of a key, None where there is none or it is lost."""
        place = self.values.get(key)
        if place is None:
            return None
        value = self.readers.find(place)
        if value is None:
            self.lost[key] = f"{self._root / place.file} and its copy are damaged"
        else:
            self.lost.pop(key, None)
        return value

    def change(self, places: Mapping[str, Place], deletes: Iterable[str]) -> list[Place]:
        """Put and delete; return the places that are of no use any more."""
        replaced = []
        for key in (*places, *deletes):
            self.lost.pop(key, None)
            before = self.values.pop(key, None)
            if before is not None:
                replaced.append(before)
        self.values.update(places)
        return replaced


def is_copied(disk: Disk, root: Path, name: str) -> bool:
    """Return whether the copy of a log is like the log, but for an end that was not copied yet."""
    log, copy = Readers(disk, root).of(name)
    sizes = [(at, min(_WINDOW, copy.size - at)) for at in range(0, copy.size, _WINDOW)]
    return copy.size > 0 and all(log.read(at, size) == copy.read(at, size) for at, size in sizes)


def read_log(disk: Disk, root: Path, name: str) -> Contents:
    """Return what a log says, by whichever of both files is sound."""
    contents = Contents(disk, root)
    log, copy = contents.readers.of(name)
    doubts: list[str] = []
    at = 0
    while at < max(log.size, copy.size):
        found = log.head(at) or copy.head(at)
        if found is None:
            ends = {each.next_head(at) for each in (log, copy)} - {log.size, copy.size}
            if ends or copy.size > at:
                doubts.append(f"after {at} bytes {name} and its copy are damaged")
            if not ends:
                break
            at = min(ends)
            continue
        entry, begin = found
        places = entry.places(name, begin)
        inside = {key: place for key, place in places.items() if place.file == name}
        at = begin + sum(place.size for place in inside.values())
        damaged = [key for key in inside if contents.readers.find(inside[key]) is None]
        if damaged and log.size <= at and copy.size < at:  # written to its end it was in neither
            if copy.size > entry.at:  # but it was in one, before that was cut off
                doubts.append(f"the last change, of {', '.join(damaged)}, may be missing")
            break
        contents.is_read = True
        sound = {key: place for key, place in places.items() if key not in damaged}
        contents.change(sound, [*entry.deletes, *damaged, *entry.lost])
        why = dict.fromkeys(damaged, f"{name} and its copy are damaged")
        contents.lost.update({**entry.lost, **why})
    if doubts:
        known = contents.lost.get(UNNAMED)
        contents.lost[UNNAMED] = "; ".join(filter(None, (known, *doubts)))
    return contents


def names_of_logs(disk: Disk, root: Path) -> list[str]:
    """Return the names of the logs in a folder, the oldest first."""
    try:
        names = disk.names(root)
    except FileNotFoundError:
        return []
    return sorted({found[1] for name in names if (found := LOG.fullmatch(name))})


def read_newest_log(disk: Disk, root: Path, *, is_new: bool = False) -> Contents:
    """Return what the newest log says; CorruptValueError for none, unless the store ``is_new``."""
    for _ in range(READINGS):
        names = names_of_logs(disk, root)
        contents = read_log(disk, root, names[-1]) if names else Contents(disk, root)
        if names_of_logs(disk, root) == names:
            break
    else:
        raise changes_too_often(root)
    if contents.is_read or is_new:
        return contents
    raise CorruptValueError(
        f"{root} has no log that can be read, so all that was saved is lost. Nothing was "
        "changed: bring its log-* files back, or remove the folder and restore a backup"
    )


def changes_too_often(root: Path) -> StoreNotReadableError:
    """Return the error of a store that is not read to its end before it is changed."""
    return StoreNotReadableError(
        f"the store {root} was changed during each of {READINGS} readings: try later"
    )
