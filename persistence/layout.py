"""What a store on a file system consists of: system calls, bytes, names and folders.

One namespace is a folder:

    format    text: the version of everything below; written last, so its presence means complete
    lock      flock of the one writer, and its pid
    change    locked, by fcntl, around each look at the epoch and the change after it
    epoch     number and token of the writer that opened last, and the id of the store
    lease     which host leads, where several share the folder; renewed all the time
    journal/  the changes made lately, one file each, by number
    head      the number of the last change that copies/ has
    values/   one file per key, without the changes in the journal
    copies/   the same with them
    corrupt/  what could not be repaired
    *.copy    the same as format and epoch

Every file but ``format``, ``lock`` and ``change`` is a frame: magic, version, length, checksum,
payload. The checksum covers everything else, so a flipped bit is never taken for a newer version.
Later versions must keep the frame.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Never
from urllib.parse import quote, unquote

from greenroom.persistence.kv import Batch, CorruptValueError, OtherFormatError

FORMAT_VERSION = 1
"""Version of the files and folders that this code writes; it reads no newer one."""

_MAGIC = b"GRNR"
_HEADER = struct.Struct(">4sHQ")  # magic, version, bytes of payload
_CHECKSUM = struct.Struct(">I")
_OVERHEAD = _HEADER.size + _CHECKSUM.size
_MAX_NAME = 241  # file systems stop at 255 bytes, and a name may have to grow some day


class FrameError(ValueError):
    """These bytes are not a whole frame; the text says why."""


class Entry(NamedTuple):
    """One change in the journal."""

    number: int  # one more than that of the change before
    since: int  # the first entry that is in the journal with it
    keys: int  # that there are after it
    batch: Batch


def frame(payload: bytes) -> bytes:
    """Return ``payload`` with its length and its checksum."""
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, len(payload))
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return b"".join((header, _CHECKSUM.pack(checksum), payload))


def unframe(raw: bytes, path: Path) -> bytes:
    """Return the payload of a whole frame read from ``path``.

    Raises FrameError for anything else, OtherFormatError for a whole frame of a newer version.
    """
    if len(raw) < _OVERHEAD:
        raise FrameError(f"{len(raw)} bytes long, shorter than the {_OVERHEAD} of a header")
    magic, version, length = _HEADER.unpack_from(raw)
    (checksum,) = _CHECKSUM.unpack_from(raw, _HEADER.size)
    payload = raw[_OVERHEAD:]
    if magic != _MAGIC:
        raise FrameError(f"starts with {magic!r}, expected {_MAGIC!r}")
    if length != len(payload):
        raise FrameError(f"holds {len(payload)} bytes of value, its header says {length}")
    if checksum != zlib.crc32(payload, zlib.crc32(raw[: _HEADER.size])):
        raise FrameError("its checksum does not match")
    check_version(version, path)
    return payload


def check_version(version: int, path: Path) -> None:
    """Raise OtherFormatError where ``path`` was written by code newer than this."""
    if version > FORMAT_VERSION:
        raise OtherFormatError(
            f"{path} has store format {version}; this version reads up to {FORMAT_VERSION}. "
            "Run the version that wrote it; nothing was changed"
        )


def encode_entry(entry: Entry) -> bytes:
    """Return the payload of a file in the journal."""
    number, since, keys, batch = entry
    return pickle.dumps((number, since, keys, dict(batch.puts), batch.deletes), protocol=5)


def decode_entry(payload: bytes) -> Entry:
    """Return what ``encode_entry`` was given."""
    try:
        number, since, keys, puts, deletes = _PlainUnpickler(io.BytesIO(payload)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise FrameError(f"holds {len(payload)} bytes, not an entry of a journal") from error
    return Entry(number, since, keys, Batch(puts=puts, deletes=deletes))


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, text, bytes, tuples and dicts."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def encode_head(number: int, keys: int) -> bytes:
    """Return the payload of the head: the last change that was carried out, and the keys since."""
    return f"{number} {keys}".encode()


def decode_head(payload: bytes) -> tuple[int, int]:
    """Return what ``encode_head`` was given."""
    try:
        number, keys = map(int, payload.split())
    except ValueError as error:
        raise FrameError(f"holds {payload[:40]!r}, not a head") from error
    return number, keys


def file_name(key: str) -> str:
    """Return the one file name of ``key``: percent-encoded, or ``=`` and base64 where too long.

    It never starts with a dot, which is left to temporary files.
    """
    name = quote(key, safe=":#@")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        name = "=" + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    return name


def key_of(name: str) -> str | None:
    """Return the key that ``file_name`` spells so, or None for any other file's name."""
    with suppress(ValueError):
        if name.startswith("="):
            key = base64.urlsafe_b64decode(name[1:] + "=" * (-len(name[1:]) % 4)).decode()
        else:
            key = unquote(name, errors="strict")
        if file_name(key) == name:
            return key
    return None


class Disk:
    """The machine's file system. Every method blocks and raises OSError."""

    def read(self, path: Path) -> bytes:
        """Return the whole file."""
        # pathlib's read_bytes goes through a buffered reader and costs three times as much.
        fd = os.open(path, os.O_RDONLY)
        try:
            chunks = [os.read(fd, os.fstat(fd).st_size + 1)]
            while chunks[-1]:
                chunks.append(os.read(fd, 1 << 20))
        finally:
            os.close(fd)
        return b"".join(chunks)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, in no order."""
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """Open a file for writing, emptied, readable by its owner only; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(self, fd: int, chunk: memoryview) -> int:
        """Write some of ``chunk``; return how many bytes that was."""
        return os.write(fd, chunk)

    def fsync(self, fd: int) -> None:
        """Make a file's content durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its new name in one step, replacing what had it."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def mkdir(self, folder: Path) -> None:
        """Make a folder that only its owner may enter."""
        os.mkdir(folder, 0o700)

    def fsync_dir(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_FORMAT_TITLE = "greenroom store format"


def copy_of(path: Path) -> Path:
    """Return where the copy of a file is that is no key's."""
    return path.with_name(f"{path.name}.copy")


class Folder:
    """The paths of one namespace, and what is done to the folder as a whole."""

    def __init__(self, path: Path, namespace: str, disk: Disk) -> None:
        self.root = path / file_name(namespace)
        self.format = self.root / "format"
        self.lock = self.root / "lock"
        self.change = self.root / "change"
        self.epoch = self.root / "epoch"
        self.lease = self.root / "lease"
        self.head = self.root / "head"
        self.journal = self.root / "journal"
        self.copies = self.root / "copies"
        self.values = self.root / "values"
        self.corrupt = self.root / "corrupt"
        self.folders = (self.values, self.copies, self.journal, self.corrupt)
        self._disk = disk

    def value(self, key: str) -> Path:
        """Return the path of the file that holds ``key``."""
        return self.values / file_name(key)

    def copy(self, key: str) -> Path:
        """Return the path of the other file that holds ``key``."""
        return self.copies / file_name(key)

    def entry(self, number: int) -> Path:
        """Return the path of a change in the journal."""
        return self.journal / f"{number:012d}"

    def make(self) -> None:
        """Make the folders that are missing; claiming then fsyncs the root, and so their names."""
        self._make_ancestors(self.root.parent)
        for folder in (self.root, *self.folders):
            with suppress(FileExistsError):
                self._disk.mkdir(folder)
        # Also where nothing was missing: a writer may have died between mkdir and fsync.
        self._disk.fsync_dir(self.root.parent)

    def has_store(self) -> bool:
        """Return whether a store was made here to the end.

        Raises OtherFormatError, or CorruptValueError where neither copy names a version.
        """
        texts = []
        for path in (self.format, copy_of(self.format)):
            try:
                text = self._disk.read(path).decode(errors="replace").strip()
            except FileNotFoundError:
                continue
            title, _, version = text.rpartition(" ")
            if title == _FORMAT_TITLE and version.isdecimal():
                check_version(int(version), path)
                return True
            texts.append(text)
        if texts:
            raise CorruptValueError(
                f"{self.format} holds {texts[0]!r}, expected '{_FORMAT_TITLE} {FORMAT_VERSION}'. "
                "Check that this is a store's folder, then restore that line or remove the folder"
            )
        return False

    @staticmethod
    def format_text() -> bytes:
        """Return what the format file says."""
        return f"{_FORMAT_TITLE} {FORMAT_VERSION}\n".encode()

    def _make_ancestors(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_ancestors(path.parent)
        with suppress(FileExistsError):
            self._disk.mkdir(path)
        self._disk.fsync_dir(path.parent)
