r"""A cluster's state as one file, and from one store into another.

A backup is a line that says what it is, the values by key, and a SHA-256 of all that. It is checked
whole before anything is written.

    greenroom backup 1\n, then per value: length of key u32, length of value u64, key, value;
    then the digest
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import (
    CorruptValueError,
    MemoryStore,
    StoreLocation,
    StoreMissingError,
    StoreNotWritableError,
)
from greenroom.persistence.locations import NAMESPACE

_MAGIC = b"greenroom backup 1\n"
_LENGTHS = struct.Struct(">IQ")
_DIGEST = hashlib.sha256().digest_size


class Copied(NamedTuple):
    """What a copy has, and what it lacks."""

    values: int  # how many
    left_out: list[str]  # each with its store and the reason


def copy_store(
    source: StoreLocation, target: StoreLocation, *, without_lost_jobs: bool = False
) -> Copied:
    """Copy the controller's state and all jobs to an empty place.

    Each store is copied as of one moment. Raises StoreError, also where anything is lost; with
    ``without_lost_jobs`` only for the controller's state, which has operations to mend that.
    """
    left_out: list[str] = []
    values = {NAMESPACE: _read_store(source)}
    for name in source.namespaces():
        if name != NAMESPACE:
            jobs = source.in_namespace(name)
            if without_lost_jobs:
                values[name], why = _read_whole_jobs(jobs)
                left_out += [f"{key} of {name}: {reason}" for key, reason in sorted(why.items())]
            else:
                advice = f"To copy the other jobs of {name}, give --without-lost-jobs"
                values[name] = _read_store(jobs, advice)
    for name in values:
        _check_empty(target.in_namespace(name))
    for name, some in reversed(values.items()):  # the controller's last: it makes it a state
        _fill(target.in_namespace(name), some)
    return Copied(sum(map(len, values.values())), left_out)


def write_backup(source: StoreLocation, path: Path) -> int:
    """Write all values as of one moment to a new file; return their number.

    Raises FileExistsError rather than replace a file, OSError and StoreError.
    """
    values = _read_store(source)
    parts = [_MAGIC]
    for key, value in sorted(values.items()):
        name = key.encode()
        parts += [_LENGTHS.pack(len(name), len(value)), name, value]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.writelines([*parts, digest.digest()])
            f.flush()
            os.fsync(f.fileno())
        os.link(temporary, path)  # which never replaces a file
    finally:
        temporary.unlink(missing_ok=True)
    return len(values)


def restore_backup(path: Path, target: StoreLocation) -> int:
    """Put the values of a backup into an empty store; return their number.

    Raises OSError and StoreError, before anything is written where the file is not whole.
    """
    values = _read(path)
    Checkpoints(MemoryStore(values)).check_formats()
    _check_empty(target)
    _fill(target, values)
    return len(values)


def _read(path: Path) -> dict[str, bytes]:
    content = path.read_bytes()
    body = content[:-_DIGEST]
    if not content.startswith(_MAGIC):
        raise CorruptValueError(f"{path} is no backup: expected a file of `greenroom backup`")
    if hashlib.sha256(body).digest() != content[-_DIGEST:]:
        raise CorruptValueError(f"{path} is damaged or cut short; nothing of it was used")
    values = {}
    at = len(_MAGIC)
    while at < len(body):
        name_length, length = _LENGTHS.unpack_from(body, at)
        at += _LENGTHS.size
        name = body[at : at + name_length].decode()
        at += name_length
        values[name] = body[at : at + length]
        at += length
    return values


def _read_store(source: StoreLocation, advice: str = "See greenroom status") -> dict[str, bytes]:
    found = source.read()
    if found.lost:
        losses = "; ".join(f"{key}: {why}" for key, why in sorted(found.lost.items()))
        raise CorruptValueError(
            f"{source} lacks what is lost there, so it is not read: {losses}. {advice}"
        )
    return found.load()


def _read_whole_jobs(source: StoreLocation) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the values of the jobs of which nothing is lost, and why the others are left out.

    A job has up to three values, ``job/ID``, ``call/ID`` and ``result/ID``. Without one of them the
    others are of no use, or wrong: a job without its call cannot run.
    """
    found = source.read()
    values, why = found.load(), dict(found.lost)
    lost_in = {_job_of(key): key for key in sorted(found.lost)}
    for key in [key for key in values if _job_of(key) in lost_in]:
        del values[key]
        why[key] = f"{lost_in[_job_of(key)]} is lost"
    return values, why


def _job_of(key: str) -> str:
    return key.rpartition("/")[2]


def _check_empty(target: StoreLocation) -> None:
    with suppress(StoreMissingError):
        found = target.read()
        if found.load() or found.lost:
            raise StoreNotWritableError(
                f"{target} has a state already, which is never overwritten: name an empty store, "
                "or end that cluster with `greenroom destroy` first"
            )


def _fill(target: StoreLocation, values: dict[str, bytes]) -> None:
    with closing(target.open()) as store:
        store.apply(values)
