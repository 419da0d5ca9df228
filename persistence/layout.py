"""What a store on a file system consists of: system calls, names and frames.

One namespace is a folder:

    format    text: the version of everything below; written last, so its presence means complete
    lock      flock of the one writer, and its pid
    change    locked, by fcntl, while the epoch or the lease is written
    epoch     number and token of the writer that opened last, and the id of the store
    lease     which host leads, where several share the folder; renewed all the time
    log-E-N   log N of the writer of epoch E: all values that there were, then each change
    large/    values that are too long for a log, one file each
    *.copy    the same as format, epoch, a log, or a large value

``epoch``, ``lease`` and the heads in a log are frames: magic, version, length, checksum, payload.
The checksum covers everything else. Later versions must keep the frame, and ``epoch`` and
``lease``, by which hosts of different releases see who leads.
"""

from __future__ import annotations

import base64
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from greenroom.persistence.kv import CorruptValueError, OtherFormatError

FORMAT_VERSION = 2
"""Version of the files and folders that this code reads and writes."""

COPY = ".copy"
_FRAME_VERSION = 1
_MAGIC = b"GRNR"
_HEADER = struct.Struct(">4sHQ")  # magic, version, bytes of payload
_CHECKSUM = struct.Struct(">I")
FRAME_SIZE = _HEADER.size + _CHECKSUM.size
_MAX_NAME = 241  # file systems stop at 255 bytes, and a name may have to grow some day


class FrameError(ValueError):
    """These bytes are not a whole frame; the text says why."""


def frame(payload: bytes) -> bytes:
    """Return ``payload`` with its length and its checksum."""
    header = _HEADER.pack(_MAGIC, _FRAME_VERSION, len(payload))
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return b"".join((header, _CHECKSUM.pack(checksum), payload))


def unframe(raw: bytes) -> bytes:
    """Return the payload of a whole frame, or raise FrameError."""
    length = framed_length(raw)
    payload = raw[FRAME_SIZE:]
    if length != len(payload):
        raise FrameError(f"holds {len(payload)} bytes of value, its header says {length}")
    if _CHECKSUM.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(
        payload, zlib.crc32(raw[: _HEADER.size])
    ):
        raise FrameError("its checksum does not match")
    return payload


def framed_length(raw: bytes) -> int:
    """Return how long a payload is, by the start of its frame, or raise FrameError."""
    if len(raw) < FRAME_SIZE:
        raise FrameError(f"{len(raw)} bytes long, shorter than the {FRAME_SIZE} of a header")
    magic, _, length = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise FrameError(f"starts with {magic!r}, expected {_MAGIC!r}")
    return int(length)


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

    def read(self, path: Path, at: int = 0, size: int = -1) -> bytes:
        """Return ``size`` bytes from ``at`` on, fewer at the file's end; all by default."""
        # pathlib's read_bytes goes through a buffered reader and costs three times as much.
        fd = os.open(path, os.O_RDONLY)
        try:
            if size < 0:
                size = os.fstat(fd).st_size
            chunks = [os.pread(fd, size, at)]
            while chunks[-1] and sum(map(len, chunks)) < size:
                chunks.append(os.pread(fd, size, at + sum(map(len, chunks))))
        finally:
            os.close(fd)
        return b"".join(chunks)

    def size(self, path: Path) -> int:
        """Return how many bytes a file has."""
        return path.stat().st_size

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, in no order."""
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """Open a file for writing, emptied, readable by its owner only; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, chunk: memoryview) -> int:
        """Write some of ``chunk``; return how many bytes that was."""
        return os.write(fd, chunk)

    def fsync(self, fd: int) -> None:
        """Make a file's content durable."""
        os.fdatasync(fd)

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

    # --- Of these -------------------------------------------------------------------------------

    def write_all(self, fd: int, content: bytes | bytearray) -> None:
        """Write all of ``content``."""
        rest = memoryview(content)
        while rest:
            rest = rest[self.write(fd, rest) :]

    def write_new(self, path: Path, content: bytes, *, durable: bool = True) -> None:
        """Make a file; its name is durable only after :meth:`fsync_dir`."""
        fd = self.create(path)
        try:
            self.write_all(fd, content)
            if durable:
                self.fsync(fd)
        finally:
            self.close(fd)


def copy_of(path: Path) -> Path:
    """Return where the copy of a file is."""
    return path.with_name(path.name + COPY)


# --- The format file ----------------------------------------------------------------------------

_FORMAT_TITLE = "greenroom store format"
FORMAT_TEXT = f"{_FORMAT_TITLE} {FORMAT_VERSION}\n".encode()


def is_made(root: Path, disk: Disk) -> bool:
    """Return whether a folder has a store that was made to the end.

    Raises OtherFormatError, or CorruptValueError where neither copy names a version.
    """
    texts = []
    for path in (root / "format", copy_of(root / "format")):
        try:
            text = disk.read(path).decode(errors="replace").strip()
        except FileNotFoundError:
            continue
        title, _, version = text.rpartition(" ")
        if title == _FORMAT_TITLE and version.isdecimal():
            if int(version) == FORMAT_VERSION:
                return True
            raise OtherFormatError(
                f"{path} has store format {version}; this version reads {FORMAT_VERSION}. Run the "
                "version that wrote it, or use another state dir; nothing was changed"
            )
        texts.append(text)
    if texts:
        raise CorruptValueError(
            f"{root / 'format'} holds {texts[0]!r}, expected '{_FORMAT_TITLE} {FORMAT_VERSION}'. "
            "Check that this is a store's folder, then restore that line or remove the folder"
        )
    return False
