"""How a store spells keys as file names, and values and batches as bytes.

A frame is ``magic, version, length, checksum, payload``. The checksum covers everything else, so
a flipped bit is never taken for a newer version. Later versions must keep the frame.
"""

from __future__ import annotations

import base64
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from greenroom.persistence.errors import NewerFormatError
from greenroom.persistence.kv import Batch

FORMAT_VERSION = 2
"""Version of the files and folders that this code writes; it reads no newer one."""

_MAGIC = b"UNDR"
_HEADER = struct.Struct(">4sHQ")  # magic, version, bytes of payload
_CHECKSUM = struct.Struct(">I")
_OVERHEAD = _HEADER.size + _CHECKSUM.size
_CHANGE = struct.Struct(">?BQ")  # a put (or a delete), bytes of key, bytes of value
_ENTRY = struct.Struct(">QQQ")  # the numbers of an Entry, before its changes
_HEAD = struct.Struct(">QQ")
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

    Raises FrameError for anything else, NewerFormatError for a whole frame of a newer version.
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
    """Raise NewerFormatError where ``path`` was written by code newer than this."""
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} has store format {version}; this version reads up to {FORMAT_VERSION}. "
            "Run the version that wrote it; nothing was changed"
        )


def encode_batch(batch: Batch) -> bytes:
    """Return the change as bytes."""
    parts = []
    for key, value in batch.puts.items():
        name = key.encode()
        parts += [_CHANGE.pack(True, len(name), len(value)), name, value]
    for key in batch.deletes:
        name = key.encode()
        parts += [_CHANGE.pack(False, len(name), 0), name]
    return b"".join(parts)


def decode_batch(payload: bytes) -> Batch:
    """Return the change that ``encode_batch`` was given; its frame vouches for the payload."""
    puts: dict[str, bytes] = {}
    deletes: list[str] = []
    at = 0
    while at < len(payload):
        is_put, key_size, value_size = _CHANGE.unpack_from(payload, at)
        key_at = at + _CHANGE.size
        value_at = key_at + key_size
        at = value_at + value_size
        key = payload[key_at:value_at].decode()
        if is_put:
            puts[key] = payload[value_at:at]
        else:
            deletes.append(key)
    return Batch(puts=puts, deletes=tuple(deletes))


def encode_entry(entry: Entry) -> bytes:
    """Return the payload of a file in the journal."""
    return _ENTRY.pack(entry.number, entry.since, entry.keys) + encode_batch(entry.batch)


def decode_entry(payload: bytes) -> Entry:
    """Return what ``encode_entry`` was given."""
    if len(payload) < _ENTRY.size:
        raise FrameError(f"holds {len(payload)} bytes, no entry of a journal")
    number, since, keys = _ENTRY.unpack_from(payload)
    return Entry(number, since, keys, decode_batch(payload[_ENTRY.size :]))


def encode_head(number: int, keys: int) -> bytes:
    """Return the payload of the head: the last change that was carried out, and the keys since."""
    return _HEAD.pack(number, keys)


def decode_head(payload: bytes) -> tuple[int, int]:
    """Return what ``encode_head`` was given."""
    if len(payload) != _HEAD.size:
        raise FrameError(f"holds {len(payload)} bytes, no head")
    number, keys = _HEAD.unpack(payload)
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
