"""The key that makes hosts one cluster: 32 random bytes in a file that only its owner can read.

The file is whole or not there: it is written under a temporary name, synced, and linked to its own.
The key is never logged, and reaches child processes as the file's path. What stands beside it while
it is being replaced, key_files.py knows; the names of keys that were replaced are kept, so that a
host that is started with the file of its first start is not taken for one of another cluster.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from greenroom.actors.transport.greeting import LABEL
from greenroom.actors.transport.handshake import KEY_SIZE
from greenroom.actors.transport.keys import hkdf_expand, hkdf_extract

MAX_RETIRED = 100  # names of keys that were replaced


class ClusterKeyError(ValueError):
    """The key file cannot be used; the text says why, and what to do."""


def read_key(path: Path) -> bytes:
    """Return the key in ``path``; ClusterKeyError when it is not safe to use."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ClusterKeyError(
            f"the cluster key {path} cannot be read: {error.strerror}; a host that joins gets it "
            "from one that runs, by --key-file"
        ) from None
    try:
        _check(path, os.fstat(fd))  # a file object could not be made of a folder
        return os.read(fd, KEY_SIZE)
    finally:
        os.close(fd)


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ClusterKeyError(f"the cluster key {path} is no regular file")
    if status.st_uid != os.geteuid():
        raise ClusterKeyError(
            f"the cluster key {path} belongs to user {status.st_uid}, not to user "
            f"{os.geteuid()}, which this system runs as: `chown {os.geteuid()} {path}`"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ClusterKeyError(
            f"the cluster key {path} has mode {mode:04o}, so that others can use it: "
            f"`chmod 600 {path}`, or replace the key on all hosts if somebody may have read it"
        )
    if status.st_size != KEY_SIZE:
        raise ClusterKeyError(
            f"the cluster key {path} has {status.st_size} bytes, not {KEY_SIZE}: copy it again "
            "from a host of the cluster"
        )


def ensure_key(path: Path, given: Path | None = None) -> bytes:
    """Return the key in ``path``, made at the first call: a new one, or a copy of ``given``.

    ``given`` may hold a key that this host has replaced since. ClusterKeyError when either file is
    not safe to use, or ``given`` holds another key.
    """
    key = None if given is None else read_key(given)
    if not path.exists():
        _create(path, secrets.token_bytes(KEY_SIZE) if key is None else key)
    kept = read_key(path)
    if key is not None and not secrets.compare_digest(key, kept) and not _is_retired(path, key):
        raise ClusterKeyError(
            f"--key-file {given} is not the key that this host has in {path}; remove that one to "
            "move the host to another cluster or, if this cluster's key was replaced, to have the "
            "new one; or leave --key-file out"
        )
    return kept


def key_id(key: bytes) -> str:
    """Return a name by which holders of a key can speak of it, and which tells nothing of it."""
    return hkdf_expand(hkdf_extract(b"", key), LABEL + b"name of a key", 8).hex()


def write_key(path: Path, key: bytes) -> None:
    """Have a file hold a key, whatever it held; ClusterKeyError when that cannot be."""
    try:
        _write_beside(path, key).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise ClusterKeyError(
            f"the cluster key {path} cannot be written: {error.strerror}"
        ) from None


def retire(path: Path, name: str) -> None:
    """Remember that the key of this name was replaced by the one in ``path``."""
    names = _retired(path)
    if name not in names:
        text = "".join(f"{each}\n" for each in [*names, name][-MAX_RETIRED:])
        write_key(_list_of_retired(path), text.encode())


def _is_retired(path: Path, key: bytes) -> bool:
    return key_id(key) in _retired(path)


def _retired(path: Path) -> list[str]:
    try:
        return _list_of_retired(path).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []


def _list_of_retired(path: Path) -> Path:
    return path.with_name(path.name + ".retired")


def _create(path: Path, key: bytes) -> None:
    """Write a key file, unless somebody else does first."""
    try:
        temporary = _write_beside(path, key)
        try:
            os.link(temporary, path)  # unlike a rename it does not replace what is there
        except FileExistsError:
            return
        finally:
            temporary.unlink()
        _sync_folder(path.parent)
    except OSError as error:
        raise ClusterKeyError(f"the cluster key {path} cannot be made: {error.strerror}") from None


def _write_beside(path: Path, content: bytes) -> Path:
    """Return a new file in the same folder, private and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    return temporary


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
