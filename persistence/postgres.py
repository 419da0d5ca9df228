"""Stores in a PostgreSQL database: one row per key, one statement and one round trip a change.

Theory of operation. A database has several stores, the controller's and those of queues, by their
namespaces. ``greenroom_store`` has one row for each: the id of the store, the epoch of its last
writer, and the lease with the time until which it holds, by the database's clock. Each change is
one statement, and so one transaction, that locks this row if it still has the writer's epoch, and
otherwise changes nothing. A takeover raises the epoch in that row, so it waits for a change that is
being made, and no earlier writer's change comes after it.

A writer has two connections, for changes and for the lease, which is renewed on another thread: by
the leader's election, or here for a writer that was opened alone, as a lock that ends with its
process. Each is made again when it is needed, and each call has :data:`CALL_TIMEOUT_S`: if the
database has not answered by then, the connection is cut. A change may have been made then, or not.

Nothing here shows a password: errors name the user, the hosts and the database of the URL.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, LiteralString
from urllib.parse import urlsplit

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as _error:  # an extra
    raise ValueError(
        f"postgresql://...: the driver psycopg cannot be imported ({_error}); install it with "
        "pip install 'greenroom[postgres]'"
    ) from None

from greenroom.persistence.kv import (
    Claim,
    CorruptValueError,
    MemoryStore,
    NothingSavedError,
    OtherFormatError,
    StaleWriterError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StoreMissingError,
    StoreNotReadableError,
    StoreNotWritableError,
    check_key,
    checked,
)

_log = logging.getLogger(__name__)

FORMAT_VERSION = 2
CALL_TIMEOUT_S = 4.0  # less than a process may stand still
CONNECT_TIMEOUT_S = 2  # for each host of the URL; libpq's least
OPENED_FOR_S = 5.0  # that the lease is held for when it is taken over, before it is renewed
HOLD_EVERY_S = 1.0  # after which a writer that was opened alone renews it
BYTES_PER_S = 4e6  # by which a call with large values may take longer
_TRIED_BYTES = 64 * 1024
_LOCK = 0x677265656E726F6F  # of those that make the tables

# Acknowledged is durable, and what a client that is gone has begun keeps no lock.
_SETTINGS: LiteralString = """
    SELECT set_config(name, given, false) FROM pg_settings JOIN (VALUES
        ('synchronous_commit', 'on'), ('idle_in_transaction_session_timeout', '5000'),
        ('client_connection_check_interval', '2000')) AS wanted (name, given) USING (name)
     WHERE name <> 'synchronous_commit' OR setting IN ('off', 'local')
"""
_MAKE: tuple[LiteralString, ...] = (
    """CREATE TABLE IF NOT EXISTS greenroom_store (
        namespace text PRIMARY KEY, format int NOT NULL, id text NOT NULL,
        epoch bigint NOT NULL, lease bytea NOT NULL, over_at timestamptz NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS greenroom_values (
        namespace text, key bytea, value bytea NOT NULL, PRIMARY KEY (namespace, key))""",
)
_BEGIN: LiteralString = """
    INSERT INTO greenroom_store VALUES (%s, %s, %s, 0, '', '-infinity') ON CONFLICT DO NOTHING
"""
_CLAIM: LiteralString = """
    SELECT id, epoch, lease, over_at <= clock_timestamp() FROM greenroom_store
     WHERE namespace = %s FOR UPDATE
"""
_TAKE: LiteralString = """
    UPDATE greenroom_store SET epoch = %s, over_at = clock_timestamp() + %s * interval '1 second'
     WHERE namespace = %s
"""
_READ_CLAIM: LiteralString = """
    SELECT epoch, id, lease, over_at <= clock_timestamp(), format FROM greenroom_store
     WHERE namespace = %s
"""
_RENEW: LiteralString = """
    UPDATE greenroom_store SET lease = %s, over_at = clock_timestamp() + %s * interval '1 second'
     WHERE namespace = %s AND epoch = %s RETURNING epoch
"""
_APPLY: LiteralString = """
    WITH held AS (SELECT namespace, epoch FROM greenroom_store
                   WHERE namespace = %s AND epoch = %s FOR UPDATE),
         gone AS (DELETE FROM greenroom_values AS each USING held
                   WHERE each.namespace = held.namespace AND key = ANY(%b::bytea[])),
         put AS (INSERT INTO greenroom_values
                 SELECT namespace, k, v
                   FROM held, unnest(%b::bytea[], %b::bytea[]) AS given (k, v)
                 ON CONFLICT (namespace, key) DO UPDATE SET value = excluded.value)
    SELECT epoch FROM held
"""
_GET: LiteralString = """
    SELECT octet_length(value), CASE WHEN octet_length(value) <= 4194304 THEN value END
      FROM greenroom_values WHERE namespace = %s AND key = %s
"""
_GET_LONG: LiteralString = "SELECT value FROM greenroom_values WHERE namespace = %s AND key = %s"
_LIST: LiteralString = "SELECT key FROM greenroom_values WHERE namespace = %s"
# They are read once it is known how long they are, and so how long that may take.
_SIZE: LiteralString = """
    SELECT sum(octet_length(value)) FROM greenroom_values
     WHERE namespace = %s AND key = ANY(%b::bytea[])
"""
_LOAD: LiteralString = """
    SELECT key, value FROM greenroom_values WHERE namespace = %s AND key = ANY(%b::bytea[])
"""

_ADVICE = re.compile(" Is the server running.*| This probably means.*")  # libpq's
_EACH_HOST = re.compile(r"- host: .*?, hostaddr: '[^']*': ")  # of a URL with several
_REMEDIES = {  # by what the server's text holds, and by the code of its error
    "password authentication failed": "check the user and the password",
    "no password supplied": "give the password in the URL, PGPASSWORD or ~/.pgpass",
    "no pg_hba.conf entry": "let this host and user in, in the server's pg_hba.conf",
    "does not exist": "make the database and the user first (createdb, createuser)",
    "session is read-only": "see whether the primary runs, and the URL names it too",
    "server is in hot standby": "see whether the primary runs, and the URL names it too",
    "permission denied": "let that user make tables: GRANT CREATE ON SCHEMA public",
    "No space left": "free space on the database's disk",
    "could not translate host name": "check the host's name",
    "Name or service not known": "check the host's name",
}


class PostgresLocation:
    """A StoreLocation in a database, by its libpq URL."""

    def __init__(self, url: str, namespace: str) -> None:
        """Raise ValueError where the URL cannot be one."""
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise ValueError(
                f"{redacted(url)}: must be postgresql://USER@HOST[:PORT][,HOST...]/DATABASE, "
                "with special characters of a password as %XX"
            ) from None
        self._url = url
        self._text = redacted(url)
        self._namespace = namespace
        options = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "target_session_attrs": "read-write",
            "application_name": "greenroom",
            "tcp_user_timeout": int(CALL_TIMEOUT_S * 1000),
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
        }
        self._options = {**given, **{k: v for k, v in options.items() if k not in given}}
        self._reading = self._link()  # kept, for the claim is read again and again

    def __str__(self) -> str:
        return self._text

    def open(self, *, after: int | None = None, lease: bytes | None = None) -> PostgresStore:
        """Become the writer; see StoreLocation. Makes the tables where there are none."""
        if after is None:
            self._check_alone(self.read_claim())  # without another connection
        link = self._link()
        with link.errors(NothingSavedError, "Nothing was changed"), closing(link):
            link.run("BEGIN")
            before = _claim(link, self._namespace)
            if after is None:
                self._check_alone(before)
            before.check_as_seen(self, after, lease)
            link.run(_TAKE, before.epoch + 1, OPENED_FOR_S, self._namespace)
            link.run("COMMIT")
        if after is None:
            self._reading.close()  # it need not be read again
        taken = before._replace(epoch=before.epoch + 1)
        links = self._link(), self._link()
        return PostgresStore(*links, self._namespace, taken, is_alone=after is None)

    def read(self, wanted: Callable[[str], object] = bool) -> MemoryStore:
        """Return what is saved as of one moment; see StoreLocation."""
        if not self.read_claim().store_id:
            raise StoreMissingError(f"there is no store in {self} yet; check the database's name")
        link = self._link()
        with link.errors(StoreNotReadableError), closing(link):
            link.run("BEGIN ISOLATION LEVEL REPEATABLE READ")
            return MemoryStore(_load(link, self._namespace, wanted))

    def namespaces(self) -> list[str]:
        """Return the namespaces that have stores here; see StoreLocation."""
        return sorted(name for (name,) in self._rows("SELECT namespace FROM greenroom_store"))

    def in_namespace(self, namespace: str) -> PostgresLocation:
        """Return where the store of another namespace is; see StoreLocation."""
        return PostgresLocation(self._url, namespace)

    def read_claim(self) -> Claim:
        """Return what the store says of its last writer; see StoreLocation."""
        rows = self._rows(_READ_CLAIM, self._namespace)
        if not rows:
            return Claim()
        epoch, store_id, lease, is_over, version = rows[0]
        _check_format(self._reading, version)
        return Claim(epoch, store_id, lease, is_over)

    def forget(self) -> None:
        """Delete all that is saved; see StoreLocation."""
        with self._reading.errors(StoreNotWritableError):
            self._reading.run("DROP TABLE IF EXISTS greenroom_values, greenroom_store")

    def _rows(self, sql: LiteralString, *values: str) -> list[Any]:
        """Return what a statement finds, nothing where there are no tables yet."""
        with self._reading.errors(StoreNotReadableError):
            try:
                return self._reading.run(sql, *values)
            except psycopg.errors.UndefinedTable:
                return []

    def try_to_write(self) -> None:
        """Write some of nothing, and take it back; see StoreLocation."""
        link = self._link()
        with link.errors(NothingSavedError, "Nothing was changed"), closing(link):
            link.run("BEGIN")  # and what is not committed is undone
            _claim(link, self._namespace)
            link.run("INSERT INTO greenroom_values VALUES ('', '', %s)", os.urandom(_TRIED_BYTES))

    def _check_alone(self, claim: Claim) -> None:
        if claim.is_over is False:
            raise StoreLockedError(
                f"another process writes to {self}, in {self._namespace!r}: stop it, or wait until "
                f"{OPENED_FOR_S:g} s after its end"
            )

    def _link(self) -> _Link:
        return _Link(self._options, self._text)


class PostgresStore:
    """A LeasedStore in a database; make it with PostgresLocation."""

    renews_apart = True

    def __init__(
        self, link: _Link, lease_link: _Link, namespace: str, claim: Claim, *, is_alone: bool
    ) -> None:
        self._link = link
        self._lease_link = lease_link
        self._namespace = namespace
        self._closed = threading.Event()
        self.epoch = claim.epoch
        self.store_id = claim.store_id
        self.lost: Mapping[str, str] = {}  # the database's to notice
        self._holding = threading.Thread(target=self._hold, name="store lease", daemon=True)
        if is_alone:
            self._holding.start()

    def _hold(self) -> None:
        """Renew the lease until the store is closed, and release it then."""
        with suppress(StaleWriterError):
            while not self._closed.wait(HOLD_EVERY_S):
                try:  # it is tried again, whatever it is
                    with suppress(StoreNotWritableError):
                        self._renew(b"", OPENED_FOR_S)
                except StaleWriterError:
                    raise
                except Exception:
                    _log.exception("the lease in %s was not renewed", self._link)
            with suppress(StoreNotWritableError):
                self._renew(b"", 0.0)

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore."""
        check_key(key)
        self._check_open()
        with self._link.errors(StoreNotReadableError):
            try:
                rows = self._link.run(_GET, self._namespace, key.encode())
                if rows and rows[0][1] is None:
                    size = rows[0][0]
                    rows = self._link.run(_GET_LONG, self._namespace, key.encode(), size=size)
            except (psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted) as error:
                raise CorruptValueError(f"key {key!r} is lost in {self._link}: {error}") from error
        return rows[0][-1] if rows else None

    def load(self, prefix: str = "") -> dict[str, bytes]:
        """Return the values whose keys start with ``prefix``, sorted; see KVStore."""
        self._check_open()
        with self._link.errors(StoreNotReadableError):
            return _load(self._link, self._namespace, lambda key: key.startswith(prefix))

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing, durable on return; see KVStore. One round trip."""
        puts, deletes = checked(puts, deletes)
        self._check_open()
        if not (puts or deletes):
            return
        with self._link.errors(NothingSavedError, "Nothing was changed"):
            self._link.connected()
        with self._link.errors(StoreNotWritableError, "The change may or may not have been made"):
            rows = self._link.run(
                _APPLY,
                self._namespace,
                self.epoch,
                [key.encode() for key in deletes],
                [key.encode() for key in puts],
                [*puts.values()],
                size=sum(map(len, puts.values())),
            )
        self._check_epoch(rows)

    def renew(self, lease: bytes, term_s: float) -> None:
        """Write the lease, unless this writer is alone and does so itself; see LeasedStore."""
        self._check_open()
        self._renew(lease, term_s)

    def _renew(self, lease: bytes, term_s: float) -> None:
        with self._lease_link.errors(StoreNotWritableError, "The lease was not renewed"):
            values = (lease, term_s, self._namespace, self.epoch)
            self._check_epoch(self._lease_link.run(_RENEW, *values))

    def close(self) -> None:
        """Close the connections, and refuse every later call; see KVStore."""
        self._closed.set()
        self._link.close()
        if self._holding.is_alive():
            self._holding.join(CONNECT_TIMEOUT_S + CALL_TIMEOUT_S)
        self._lease_link.close()

    def _check_open(self) -> None:
        if self._closed.is_set() or self._link.is_of_other_process:
            raise StoreClosedError(
                f"the store {self._link} was closed, or opened before a fork; open it again"
            )

    def _check_epoch(self, rows: Sequence[Any]) -> None:
        if not rows:
            raise StaleWriterError(
                f"this writer of {self._link} has epoch {self.epoch}, and the database now has "
                "another writer's. Nothing more is written from here: end this process"
            )


def _load(link: _Link, namespace: str, wanted: Callable[[str], object]) -> dict[str, bytes]:
    keys = [key for (key,) in link.run(_LIST, namespace) if wanted(key.decode())]
    ((size,),) = link.run(_SIZE, namespace, keys)
    rows = link.run(_LOAD, namespace, keys, size=int(size or 0))
    return {key.decode(): value for key, value in sorted(rows)}


class _Link:
    """A connection, made when it is needed; every call ends within a time."""

    def __init__(self, options: dict[str, Any], text: str) -> None:
        self._options = options  # which all links of a location share
        self._text = text
        self._connection: psycopg.Connection[Any] | None = None
        self._pid = os.getpid()
        self._is_late = False

    def __str__(self) -> str:
        return self._text

    @property
    def is_of_other_process(self) -> bool:
        """Whether a fork has brought this here: the connection is its parent's."""
        return os.getpid() != self._pid

    def connected(self) -> psycopg.Connection[Any]:
        """Return the connection; raises psycopg.Error."""
        if self._connection is not None and _was_ended(self._connection):
            self.close()
        if self._connection is None or self._connection.closed:
            self._is_late = False
            self._connection = psycopg.connect(**self._options, autocommit=True)
            self._connection.prepare_threshold = None  # poolers between do not keep statements
            self._options.update(_with_first(self._options, self._connection.info))
            self.run(_SETTINGS)
        return self._connection

    def run(self, sql: LiteralString, *values: Any, size: int = 0) -> list[tuple[Any, ...]]:
        """Run one statement that moves ``size`` bytes; raises psycopg.Error."""
        connection = self.connected()
        timer = threading.Timer(CALL_TIMEOUT_S + size / BYTES_PER_S, self._cut, [connection])
        timer.daemon = True
        timer.start()
        try:
            cursor = connection.execute(sql, values, binary=True)
            return cursor.fetchall() if cursor.description else []
        finally:
            timer.cancel()
            timer.join()  # it may be late, and would cut the next call, or a stranger's socket

    def _cut(self, connection: psycopg.Connection[Any]) -> None:
        self._is_late = True
        with (
            suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(connection.fileno())) as link,
        ):
            link.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def errors(self, kind: type[StoreError], consequence: str = "") -> Iterator[None]:
        """Make the database's errors ours; a connection that is not sound is made anew."""
        try:
            yield
        except psycopg.Error as error:
            is_refusal = error.sqlstate is not None and error.sqlstate[:2] not in {"08", "57"}
            if not is_refusal:
                self.close()
            elif kind is StoreNotWritableError:
                kind, consequence = NothingSavedError, "Nothing was changed"
            reason = _reason(error)
            if self._is_late:
                reason = f"it did not answer within {CALL_TIMEOUT_S:g} s"
            remedy = next((r for text, r in _REMEDIES.items() if text in reason), "")
            remedy = remedy or "see whether the database runs and this host reaches it"
            then = f". {consequence}: {remedy}, then repeat it" if consequence else f"; {remedy}"
            raise kind(f"cannot use the store {self._text}: {reason}{then}") from None

    def __del__(self) -> None:
        """Close it, as a file is closed."""
        self.close()

    def close(self) -> None:
        """Close the connection; a repeat does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.is_of_other_process:
            connection.close()


def _with_first(options: Mapping[str, Any], info: psycopg.ConnectionInfo) -> dict[str, str]:
    """Return the hosts and ports of a URL with those of a connection first.

    Else each new connection waits for a server of before, which may be silent for long.
    """
    hosts = options.get("host", "").split(",")
    if len(hosts) == 1 or "hostaddr" in options:
        return {}
    ports = str(options.get("port", "")).split(",")
    ports = [port or "5432" for port in ports] * (len(hosts) if len(ports) == 1 else 1)
    pairs = sorted(
        zip(hosts, ports, strict=True), key=lambda pair: pair != (info.host, str(info.port))
    )
    first = zip(*pairs, strict=True)
    return dict(zip(("host", "port"), map(",".join, first), strict=True))


def _reason(error: psycopg.Error) -> str:
    """Return what went wrong in one line, with each host of the URL where all have failed."""
    _, _, hosts = str(error).partition("All failures were:")
    reasons = [each for each in _EACH_HOST.split(hosts) if each.strip()] or [str(error)]
    return "; ".join(_ADVICE.sub("", " ".join(each.split())).rstrip(".") for each in reasons)


def _was_ended(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the server has ended a connection that was idle, as when it was restarted.

    Only then has it sent anything. A transaction under way must not go on in another connection.
    """
    is_idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    return is_idle and bool(select.select([connection.fileno()], [], [], 0)[0])


def _claim(link: _Link, namespace: str) -> Claim:
    """Return what the store says, and keep others from changing it in this transaction."""
    link.run("SELECT pg_advisory_xact_lock(%s)", _LOCK)
    if not link.run("SELECT 1 WHERE to_regclass('greenroom_values') IS NOT NULL"):
        for statement in _MAKE:
            link.run(statement)
    for (version,) in link.run("SELECT max(format) FROM greenroom_store"):
        _check_format(link, version or FORMAT_VERSION)
    link.run(_BEGIN, namespace, FORMAT_VERSION, secrets.token_hex(8))
    ((store_id, epoch, lease, is_over),) = link.run(_CLAIM, namespace)
    return Claim(epoch, store_id, bytes(lease), is_over)


def _check_format(link: _Link, version: int) -> None:
    if version != FORMAT_VERSION:
        raise OtherFormatError(
            f"the store {link} has format {version}; this version reads {FORMAT_VERSION}. Run the "
            "version that wrote it, or use another database; nothing was changed"
        )


def redacted(url: str) -> str:
    """Return the URL for people: without a password, and without what may hold one."""
    with suppress(ValueError):
        parts = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        path = parts.path if re.fullmatch(r"/[\w.-]*", parts.path) else "/..."
        if re.fullmatch(r"[\w.,:\[\]-]*", hosts):
            return f"postgresql://{user.partition(':')[0]}{at}{hosts}{path}"
    return "postgresql://..."
