"""The cluster file: one private key and its self-signed certificate, which make hosts one cluster.

Every process of the cluster presents this certificate, and requires exactly it from the other end
(tls.py). The file is private, and whole or not there: it is written under a temporary name, synced,
and linked to its own. It is never logged, and reaches child processes as a path.

While the key is being replaced, the file also holds the next one, or the last one
(core/cluster/key_rotation.py). A process presents the current certificate, which comes first, and
takes peers with any of them. It reads the file whenever it dials, is dialed or beats: so what is
on a host's disk is in use on all of the host, and each step is one rename. The names of keys that
were replaced are kept, so that a host which is started with the file of its first start is not
taken for one of another cluster.

    private key and certificate, as PEM     all that there is in a file that was never replaced
    # next, or # last                       then another private key with its certificate
    # replaced                              then names, one a line
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import logging
import os
import re
import secrets
import ssl
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress
from greenroom.core.cluster.key_rotation import KeyIds

logger = logging.getLogger(__name__)

MAX_SIZE = 64 * 1024
MAX_REPLACED = 100  # names of keys
_HEADING = re.compile(rb"^# (next|last|replaced)\n", re.MULTILINE)

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
    _contexts(path, _Held.of(text).texts)
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
    if key is not None and key_id(key) not in _Held.of(kept).names:
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
        with _written(path, text) as temporary:
            os.link(temporary, path)  # unlike a rename it does not replace what is there
    except FileExistsError:
        return False
    except OSError as error:
        raise ClusterKeyError(f"the cluster file {path} cannot be made: {error.strerror}") from None
    return True


def write_key(path: Path, text: bytes) -> None:
    """Write this to a file, whatever it held; ClusterKeyError when that fails."""
    try:
        with _written(path, text) as temporary:
            temporary.replace(path)
    except OSError as error:
        raise ClusterKeyError(
            f"the cluster file {path} cannot be written: {error.strerror}"
        ) from None


@contextlib.contextmanager
def _written(path: Path, content: bytes) -> Iterator[Path]:
    """Give a new file in the same folder, private and on the disk, which is to get a name there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        yield temporary
    finally:  # also where the disk is full, which is tried again and again
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Tls(NamedTuple):
    """How to present this host's certificate, and whose to take."""

    dialing: ssl.SSLContext
    accepting: ssl.SSLContext
    own: bytes  # the certificate, as DER
    taken: frozenset[bytes]  # the certificates of others that are taken


class _Held(NamedTuple):
    """What a cluster file holds; b"" for a key that it does not."""

    current: bytes
    next: bytes = b""
    last: bytes = b""
    replaced: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: bytes) -> _Held:
        """Read a file's text."""
        current, *rest = _HEADING.split(text)
        others = dict(zip(rest[::2], rest[1::2], strict=True))
        replaced = tuple(others.get(b"replaced", b"").decode(errors="replace").split())
        return cls(current, others.get(b"next", b""), others.get(b"last", b""), replaced)

    def text(self) -> bytes:
        """Return the text of the file that holds this."""
        replaced = "".join(f"{name}\n" for name in self.replaced[-MAX_REPLACED:]).encode()
        others = {b"next": self.next, b"last": self.last, b"replaced": replaced}
        parts = (b"# %b\n%b\n" % (name, text.strip()) for name, text in others.items() if text)
        return b"".join((self.current.strip(), b"\n", *parts))

    @property
    def texts(self) -> list[bytes]:
        """The keys with their certificates, the current one first."""
        return [self.current, *filter(None, (self.next, self.last))]

    @property
    def ids(self) -> KeyIds:
        """The names of the keys."""
        return KeyIds(*(key_id(text) if text else "" for text in self[:3]))

    @property
    def names(self) -> set[str]:
        """The names of all keys that are here, or were."""
        return {*self.ids, *self.replaced}


class KeyFiles:
    """The keys in the cluster file at ``path``.

    ClusterKeyError when the file cannot be used. If that happens to a file that changes later, what
    was read last stays in use, and the reason is logged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = _mark(path)
        self._held = _Held.of(read_key(path))
        self._tls: Tls | None = None  # made when it is needed
        self._trouble = ""  # why what is in the file now is not in use

    def __call__(self) -> Sequence[bytes]:
        """Return the current key with its certificate, then the others that are taken."""
        self._refresh()
        return self._held.texts

    def tls(self) -> Tls:
        """Return what secures connections at present; ClusterKeyError if that cannot be made."""
        self._refresh()
        if self._tls is None:
            self._tls = _contexts(self._path, self._held.texts)
        return self._tls

    def ids(self) -> KeyIds:
        """Return the names of the current key, the next one and the last one."""
        self._refresh()
        return self._held.ids

    def begin(self) -> None:
        """Make the next key; harmless while there is one."""
        self._refresh()
        if len(self._held.texts) == 1:
            write_key(self._path, self._held._replace(next=make_key()).text())

    def hold(self, wanted: KeyIds, given: Sequence[bytes] = ()) -> None:
        """Have these keys, taken from those here and ``given``.

        ClusterKeyError where one is missing, or cannot be used or written.
        """
        known = {"": b"", **{key_id(text): text for text in (*self(), *given)}}
        missing = [name for name in wanted if name not in known]
        if missing:
            raise ClusterKeyError(f"the cluster file {missing[0]} is not here and was not given")
        gone = [name for name in self._held.ids if name and name not in wanted]
        replaced = (*(name for name in self._held.replaced if name not in gone), *gone)
        current, following, last = (known[name] for name in wanted)
        write_key(self._path, _Held(current, following, last, replaced).text())

    def _refresh(self) -> None:
        mark = _mark(self._path)
        if mark == self._mark:
            return
        try:
            held = _Held.of(read_key(self._path))
            if self._tls is not None:
                self._tls = _contexts(self._path, held.texts)
        except ClusterKeyError as error:  # tried again, for a lack of descriptors passes
            if str(error) != self._trouble:
                logger.warning("%s; what it held before stays in use", error)
            self._trouble = str(error)
        else:
            self._held, self._mark, self._trouble = held, mark, ""


def keys_of(own: ProcessAddress, environ: Mapping[str, str]) -> KeyFiles | None:
    """Return the cluster's files for the process at ``own``; None on a host that is not bound.

    ClusterKeyError when they cannot be used. Without one an admin raises, too; any other process,
    such as a command, then reaches this host's processes only.
    """
    if own.host == LOOPBACK:
        return None
    path = environ.get("GREENROOM_KEY_FILE")
    if path:
        files = KeyFiles(Path(path))
        files.tls()  # raises now rather than with the first connection
        return files
    if own.is_admin:
        raise ClusterKeyError(
            f"a system bound to {own.host} needs the cluster file: name it by GREENROOM_KEY_FILE"
        )
    return None


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
