"""The cluster file: one private key and its self-signed certificate, which make hosts one cluster.

Every process of the cluster presents this certificate, and requires exactly it from the other end
(tls.py). The file is private, and whole or not there: it is written under a temporary name, synced,
and linked to its own. It is never logged, and reaches child processes as a path.

While the file is being replaced there may be the next one, and the last one, beside it
(core/cluster/key_rotation.py). A process presents the current certificate and takes peers with any
of them. It looks at the files whenever it dials, is dialed or beats: so a file is in use on all of
a host as soon as it is on its disk. A step of several files is made in such an order that no crash
amid it leaves a host without one that the others take. The names of those that were replaced are
kept, so that a host which is started with the file of its first start is not taken for one of
another cluster.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import logging
import os
import secrets
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from greenroom.core.cluster.key_rotation import KeyIds

logger = logging.getLogger(__name__)

MAX_SIZE = 64 * 1024
MAX_RETIRED = 100  # names of files that were replaced

_Mark: TypeAlias = "tuple[int, int, int, int] | None"


class ClusterKeyError(ValueError):
    """The cluster file cannot be used; the text says why, and what to do."""


def make_key() -> bytes:
    """Return the text of a new cluster file, as PEM."""
    try:  # an extra, which only the host that makes the file needs
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError:
        raise ClusterKeyError(
            "a new cluster file is made with the cryptography package: "
            "`pip install 'greenroom[cluster]'`, or give the file of a running host by --key-file"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    # A subject of its own, so that OpenSSL does not take one cluster file for another.
    common_name = x509.NameAttribute(
        x509.NameOID.COMMON_NAME, f"greenroom cluster {secrets.token_hex(8)}"
    )
    name = x509.Name([common_name])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Always valid: hosts' clocks need not be right, and `rotate-key` is what ends a file's use.
        .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(9999, 12, 31, tzinfo=dt.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return bytes(private + certificate.public_bytes(serialization.Encoding.PEM))


def read_key(path: Path) -> bytes:
    """Return the text of a cluster file; ClusterKeyError when it is not safe to use."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ClusterKeyError(
            f"the cluster file {path} cannot be read: {error.strerror}; a host that joins gets it "
            "from one that runs, by --key-file"
        ) from None
    try:
        _check(path, os.fstat(fd))
        text = os.read(fd, MAX_SIZE)
    finally:
        os.close(fd)
    _contexts(path, [text])
    return text


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ClusterKeyError(f"the cluster file {path} is no regular file")
    if status.st_uid != os.geteuid():
        raise ClusterKeyError(
            f"the cluster file {path} belongs to user {status.st_uid}, not to user "
            f"{os.geteuid()}, which this system runs as: `chown {os.geteuid()} {path}`"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ClusterKeyError(
            f"the cluster file {path} has mode {mode:04o}, so that others can use it: "
            f"`chmod 600 {path}`, or replace the file on all hosts if others may have read it"
        )


def _certificate(text: bytes, path: Path | str) -> bytes:
    """Return the certificate in a cluster file, as DER."""
    try:
        pem = text.decode("ascii")
        pem.index("PRIVATE KEY-----")
        first = pem[pem.index(ssl.PEM_HEADER) : pem.index(ssl.PEM_FOOTER)] + ssl.PEM_FOOTER
        return ssl.PEM_cert_to_DER_cert(first)
    except ValueError:
        raise ClusterKeyError(
            f"the cluster file {path} does not hold a private key and a certificate as PEM: copy "
            "it again from a host of the cluster, or make one by `greenroom keygen`"
        ) from None


def ensure_key(path: Path, given: Path | None = None) -> bytes:
    """Return the text of ``path``, which the first call makes: a new one, or a copy of ``given``.

    ``given`` may be one that this host has replaced since. ClusterKeyError when either file is
    not safe to use, or ``given`` is another one.
    """
    key = None if given is None else read_key(given)
    if not path.exists():
        create_key(path, make_key() if key is None else key)
    kept = read_key(path)
    if key is not None and key_id(key) != key_id(kept) and key_id(key) not in _retired(path):
        raise ClusterKeyError(
            f"--key-file {given} is not the cluster file that this host has in {path}; remove that "
            "one to move the host to another cluster or, if this cluster's was replaced, to have "
            "the new one; or leave --key-file out"
        )
    return kept


def key_id(text: bytes) -> str:
    """Return a name for a cluster file, which tells nothing of its key."""
    return hashlib.sha256(_certificate(text, "given")).hexdigest()[:16]


def create_key(path: Path, text: bytes) -> bool:
    """Write a cluster file and return True, unless there is one; ClusterKeyError if it cannot."""
    try:
        temporary = _write_beside(path, text)
        try:
            os.link(temporary, path)  # unlike a rename it does not replace what is there
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_folder(path.parent)
    except OSError as error:
        raise ClusterKeyError(f"the cluster file {path} cannot be made: {error.strerror}") from None
    return True


def write_key(path: Path, text: bytes) -> None:
    """Write this to a file, whatever it held; ClusterKeyError when that fails."""
    try:
        _write_beside(path, text).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise ClusterKeyError(
            f"the cluster file {path} cannot be written: {error.strerror}"
        ) from None


def _retire(path: Path, name: str) -> None:
    """Remember that the file of this name was replaced by the one in ``path``."""
    names = _retired(path)
    if name not in names:
        text = "".join(f"{each}\n" for each in [*names, name][-MAX_RETIRED:])
        write_key(_list_of_retired(path), text.encode())


def _retired(path: Path) -> list[str]:
    try:
        return _list_of_retired(path).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []


def _list_of_retired(path: Path) -> Path:
    return path.with_name(path.name + ".retired")


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


class Tls(NamedTuple):
    """How to present this host's certificate, and whose to take."""

    dialing: ssl.SSLContext
    accepting: ssl.SSLContext
    own: bytes  # the certificate, as DER
    taken: frozenset[bytes]  # the certificates of others that are taken


class KeyFiles:
    """The cluster file at ``path`` and those beside it.

    ClusterKeyError when the file cannot be used. If that happens to files that change later, what
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
        self._tls: Tls | None = None  # made when it is needed

    def __call__(self) -> Sequence[bytes]:
        """Return the text of the current file, then of the others that are taken."""
        self._refresh()
        return [text for text in self._slots if text]

    def tls(self) -> Tls:
        """Return what secures connections at present; ClusterKeyError if that cannot be made."""
        self._refresh()
        if self._tls is None:
            self._tls = _contexts(self._paths[0], self())
        return self._tls

    def ids(self) -> KeyIds:
        """Return the names of the current file, the next one and the last one."""
        self._refresh()
        current, following, last = (text and key_id(text) for text in self._slots)
        # Amid a step one text may be in two files.
        return KeyIds(
            str(current),
            "" if following == current else str(following or ""),
            "" if last == current else str(last or ""),
        )

    def get(self, name: str) -> bytes | None:
        """Return a cluster file's text by its name; None when it is not here."""
        return next((text for text in self() if key_id(text) == name), None)

    def begin(self) -> None:
        """Make the next file; harmless while there is one."""
        if self.ids() == KeyIds(self.ids().current):
            write_key(self._paths[1], make_key())

    def hold(self, wanted: KeyIds, given: Sequence[bytes] = ()) -> None:
        """Have these files, taken from those here and ``given``.

        ClusterKeyError where one is missing, or cannot be used or written.
        """
        known = {key_id(text): text for text in (*self(), *given)}
        missing = [name for name in wanted if name and name not in known]
        if missing:
            raise ClusterKeyError(f"the cluster file {missing[0]} is not here and was not given")
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
                _retire(current, name)
        for path, name in ((following, wanted.next), (last, wanted.last)):
            if not name:
                path.unlink(missing_ok=True)

    def _refresh(self) -> None:
        marks = self._look()
        if marks == self._marks:
            return
        self._marks = marks
        try:
            slots = self._read()
            if self._tls is not None:
                self._tls = _contexts(self._paths[0], [text for text in slots if text])
        except ClusterKeyError as error:
            logger.warning("%s; what it held before stays in use", error)
        else:
            self._slots = slots

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


def _contexts(path: Path, texts: Sequence[bytes]) -> Tls:
    certificates = [_certificate(text, path) for text in texts]
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is the cluster's, not a host's
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(path, password=_no_password)
            for certificate in certificates:
                context.load_verify_locations(cadata=certificate)
        except (OSError, ValueError) as error:
            raise ClusterKeyError(
                f"the cluster file {path} cannot be used, as OpenSSL does not take its key and its "
                f"certificate ({error}): copy it again from a host of the cluster"
            ) from None
        contexts.append(context)
    contexts[1].num_tickets = 0  # sessions are not resumed
    return Tls(contexts[0], contexts[1], certificates[0], frozenset(certificates))


def _no_password() -> bytes:
    raise ValueError("its key has a password, which nothing could type here")
