"""The key that makes hosts one cluster: 32 random bytes in a file that only its owner can read.

The file is whole or not there: it is written under a temporary name, synced, and linked to its own.
The key is never logged, and reaches child processes as the file's path. :class:`KeyFiles` knows
what stands beside it while it is being replaced. The names of keys that were replaced are kept, so
that a host that is started with the file of its first start is not taken for one of another
cluster.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from greenroom.actors.transport.handshake import KEY_SIZE, LABEL, hkdf_expand, hkdf_extract
from greenroom.core.cluster.key_rotation import KeyIds

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
    """Write a key file, unless another process does first."""
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


# --- The cluster's keys as files ------------------------------------------------------------------
#
# Theory of operation. While the key is being replaced, the next key or the last one lies beside it
# (core/cluster/key_rotation.py). A process proves that it holds the current key, and accepts peers
# that hold any of the keys. It checks the files whenever it dials, is dialed or sends a heartbeat.
# So all processes of a host use a new key as soon as it is on disk, without being told.
#
# Each file is either complete or absent. When a step changes several files, it does so in an order
# in which a crash never leaves the host without a key that the others accept. The step is repeated
# after a crash.

logger = logging.getLogger(__name__)

# The keys of the moment: the first is what to prove, and all are what to take.
Keys: TypeAlias = Callable[[], Sequence[bytes]]
_Mark: TypeAlias = "tuple[int, int, int, int] | None"


class KeyFiles:
    """The keys in ``path`` and beside it; callable, for :data:`Keys`.

    ClusterKeyError when the key cannot be used. If that happens to files that change later, what
    was read last stays in use, and the reason is logged.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (
            path,
            path.with_name(path.name + ".next"),
            path.with_name(path.name + ".last"),
        )
        self._marks = self._look()
        self._slots = self._read()

    def __call__(self) -> Sequence[bytes]:
        """Return the key, then the others that are taken."""
        self._refresh()
        return [key for key in self._slots if key]

    def ids(self) -> KeyIds:
        """Return the names of the key, the next one and the last one."""
        self._refresh()
        current, following, last = (key and key_id(key) for key in self._slots)
        # Amid a step one key may be in two files.
        return KeyIds(
            str(current),
            "" if following == current else str(following or ""),
            "" if last == current else str(last or ""),
        )

    def get(self, name: str) -> bytes | None:
        """Return a key by its name; None when it is not here."""
        return next((key for key in self() if key_id(key) == name), None)

    def begin(self) -> None:
        """Make the next key; harmless while there is one."""
        if self.ids() == KeyIds(self.ids().current):
            write_key(self._paths[1], secrets.token_bytes(KEY_SIZE))

    def hold(self, wanted: KeyIds, *given: bytes) -> str:
        """Have the files hold these keys, taken from those here and ``given``.

        Return the name of one that is missing, "" when it is done. ClusterKeyError where a file
        cannot be written.
        """
        known = {key_id(key): key for key in (*self(), *given)}
        missing = [name for name in wanted if name and name not in known]
        if missing:
            return missing[0]
        before = self.ids()
        current, following, last = self._paths
        for path, name in (
            (last, wanted.last),
            (following, wanted.next),
            (current, wanted.current),
        ):
            if name:
                write_key(path, known[name])
        for name in before:
            if name and name not in wanted:
                retire(current, name)
        for path, name in ((following, wanted.next), (last, wanted.last)):
            if not name:
                path.unlink(missing_ok=True)
        return ""

    def _refresh(self) -> None:
        marks = self._look()
        if marks == self._marks:
            return
        self._marks = marks
        try:
            self._slots = self._read()
        except ClusterKeyError as error:
            logger.warning("%s; what it held before stays in use", error)

    def _look(self) -> list[_Mark]:
        return [_mark(path) for path in self._paths]

    def _read(self) -> list[bytes | None]:
        current, *others = self._paths
        return [read_key(current), *(read_key(path) if path.exists() else None for path in others)]


def _mark(path: Path) -> _Mark:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
    return None


# --- Sending a key to another host ----------------------------------------------------------------
#
# Theory of operation. Without TLS, messages between hosts can be read on the wire, and an evicted
# host still holds the key that is being replaced. So a new key must not be sent as it is. Both ends
# agree on a secret by Diffie-Hellman, in the 2048-bit group of RFC 3526 (section 3), with 256-bit
# exponents that are used for one key and then forgotten. The session, whose every frame is
# authenticated, proves that the two ends talk to each other and not to a relay.
#
#     PRK    = HKDF-Extract(salt = the key that both hold, secret)         HKDF as in handshake.py
#     sealed = key XOR HKDF-Expand(PRK, label + publics)
#            + HMAC(HKDF-Expand(PRK, another label + publics), the 32 bytes before it)
#     publics = of the end that asks + of the end that gives

GENERATOR = 2
PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22"
    "514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6"
    "F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3D"
    "C2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3BE39E772C180E8603"
    "9B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
SIZE = 256  # bytes of a public number


class SealError(ValueError):
    """What came is not what the other end can have sealed for this one."""


class Exchange:
    """One end of one exchange."""

    def __init__(self) -> None:
        self._secret = secrets.randbits(256)
        self.public = pow(GENERATOR, self._secret, PRIME).to_bytes(SIZE, "big")

    def seal(self, key: bytes, asker: bytes, held: bytes) -> bytes:
        """Return ``key`` for the end whose public number is ``asker``; ``held`` is on both."""
        stream, mac_key = self._keys(asker, asker + self.public, held)
        hidden = bytes(a ^ b for a, b in zip(key, stream, strict=True))
        return hidden + hmac.digest(mac_key, hidden, "sha256")

    def open(self, sealed: bytes, giver: bytes, held: bytes) -> bytes:
        """Return what the end whose public number is ``giver`` has sealed; SealError."""
        stream, mac_key = self._keys(giver, self.public + giver, held)
        hidden, mac = sealed[:KEY_SIZE], sealed[KEY_SIZE:]
        if not hmac.compare_digest(hmac.digest(mac_key, hidden, "sha256"), mac):
            raise SealError("a key that was not sealed for this host")
        return bytes(a ^ b for a, b in zip(hidden, stream, strict=True))

    def _keys(self, other: bytes, publics: bytes, held: bytes) -> tuple[bytes, bytes]:
        number = int.from_bytes(other, "big")
        if len(other) != SIZE or not 1 < number < PRIME - 1:
            raise SealError(f"a public number of {len(other)} bytes that is none of the group")
        prk = hkdf_extract(held, pow(number, self._secret, PRIME).to_bytes(SIZE, "big"))
        return (
            hkdf_expand(prk, LABEL + b"key under way" + publics),
            hkdf_expand(prk, LABEL + b"seal of a key" + publics),
        )
