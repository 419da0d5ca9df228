"""The database that leaders share: the real PostgresStore, with a simulated server.

A statement takes its time to the server and back. It is carried out there at one moment, once it
has the lock that it needs, also when whoever sent it is dead by then, or waits no more. The server
may be slow, full, restarted or away, and out of reach for some hosts; a connection may break before
a statement or after it, when the change is made and its answer lost. Its clock decides on leases.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from greenroom.persistence.kv import MemoryStore
from tests.simulation import threads

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import SimProcess

URL = "postgresql://greenroom@database/greenroom"
CONNECT_S = 2.0  # as libpq is set
IDLE_S = 5.0  # as PostgresStore asks, for a transaction
RESENT_S = 0.3
DELAY_S = (0.0002, 0.003)
SLOWEST_S = 2.0
FDS = 1_000_000  # where file descriptors of connections begin, that no real one is among
OPENING, ROW = "those that make the tables", "the row with the epoch"


@dataclass(frozen=True)
class Row:
    """The one row of ``greenroom_store``."""

    format: int
    id: str
    epoch: int = 0
    lease: bytes = b""
    over_at: float = float("-inf")


class Call:
    """A statement on its way."""

    def __init__(self, session: Session, sql: str, values: Sequence[Any]) -> None:
        self.session = session
        self.sql = sql
        self.values = values
        self.is_over = False
        self.error: Exception | None = None
        self.rows: list[Any] = []
        self.check: Callable[[], None] = lambda: None


class Session:
    """A connection, as psycopg's and as the server's."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.process = database.world.current
        self.fd = next(database.fds)
        self.closed = False  # by its client
        self.is_ended = False  # by the server, which has said so
        self.row: Row | None = None  # as changed by its transaction
        self.in_transaction = False
        self.statements = 0
        self.cut: tuple[float, Callable[[], None]] = (float("inf"), lambda: None)
        self.prepare_threshold: int | None = 5

    @property
    def info(self) -> Any:
        status = TransactionStatus.INTRANS if self.in_transaction else TransactionStatus.IDLE
        return SimpleNamespace(transaction_status=status)

    def fileno(self) -> int:
        return self.fd

    def execute(self, sql: str, values: Sequence[Any] = (), *, binary: bool = False) -> Any:
        del binary
        call = Call(self, " ".join(sql.split()), values)
        self.database.wait(call, self.cut[0])
        if not call.is_over:
            self.cut[1]()
            self.close()
            raise psycopg.OperationalError("the connection is lost")
        if call.error is not None:
            self.closed |= self.is_ended
            raise call.error
        return SimpleNamespace(description=True, fetchall=lambda: call.rows)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.database.left(self)


class Database:
    """The server, with the face of SharedDisk."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.trouble = 0.0
        self.slow_until = 0.0
        self.full_until = 0.0
        self.away_until = 0.0
        self.out_of_reach: set[int] = set()  # hosts that cannot reach it
        self.on_applied: Callable[[Mapping[str, bytes], list[str]], None] = lambda _p, _d: None
        self.fds = itertools.count(FDS)
        self.row: Row | None = None
        self.kept = MemoryStore()
        self._sessions: dict[int, Session] = {}
        self._locks: dict[str, Session] = {}
        self._waiting: deque[Call] = deque()

    def stand_ins(self) -> dict[str, Any]:
        """Return what stands in for what postgres.py imports, by full names."""
        module = "greenroom.persistence.postgres"
        return {
            "psycopg.connect": self.connect,
            f"{module}.select": SimpleNamespace(select=self._select),
            f"{module}.threading": SimpleNamespace(
                Timer=self._timer,
                Event=partial(threads.Event, self.world),
                Thread=partial(threads.Thread, self.world),
            ),
        }

    def _select(self, reads: list[int], *_: Any) -> tuple[list[int], list[int], list[int]]:
        ended = [fd for fd in reads if fd in self._sessions and self._sessions[fd].is_ended]
        return ended, [], []

    def _timer(self, seconds: float, cut: Callable[[Any], None], given: list[Session]) -> Any:
        (session,) = given
        at = self.world.clock() + seconds

        def start() -> None:
            session.cut = (at, lambda: cut(session))

        def cancel() -> None:
            session.cut = (float("inf"), lambda: None)

        return SimpleNamespace(start=start, cancel=cancel, join=lambda: None)  # it has no thread

    # --- Clients ----------------------------------------------------------------------------------

    def connect(self, **_: Any) -> Session:
        """Stand in for psycopg.connect."""
        session = Session(self)
        self._sessions[session.fd] = session
        call = Call(session, "connect", ())
        self.wait(call, self.world.clock() + CONNECT_S)
        if not call.is_over:
            session.close()
            raise psycopg.OperationalError("connection timeout expired")
        if call.error is not None:
            raise call.error
        return session

    def wait(self, call: Call, deadline: float) -> None:
        """Send a statement, and wait for its answer."""
        world, session = self.world, call.session
        process = world.current
        assert process is not None
        thread = world.thread
        if thread is None:
            process.acts()
        delay_s = world.elapsed + world.rng.uniform(*DELAY_S)
        world.after(delay_s, lambda: self._arrived(call))
        if thread is not None:
            call.check = thread.check
            thread.wait(lambda: call.is_over, deadline)
        else:
            world.stand_until(process, lambda: call.is_over, deadline)
            process.acts()
        session.statements += 1

    def died(self, process: SimProcess) -> None:
        """See the connections of a dead process end."""
        for session in list(self._sessions.values()):
            if session.process is process:
                session.close()

    def left(self, session: Session) -> None:
        """Hear that a connection was closed, after what was sent over it before."""
        self.world.after(self.world.rng.uniform(0.01, 0.1), lambda: self._left(session))

    def _left(self, session: Session) -> None:
        if session.process is not None and session.process.host in self.out_of_reach:
            self.world.after(RESENT_S, lambda: self._left(session))
        else:
            self._end(session)

    # --- The server -------------------------------------------------------------------------------

    def restart(self, seconds: float) -> None:
        """Be away for so long; what was not committed is undone."""
        self.away_until = self.world.now + seconds
        for session in list(self._sessions.values()):
            self._end(session)

    def _end(self, session: Session) -> None:
        session.is_ended = True
        self._sessions.pop(session.fd, None)
        for call in [each for each in self._waiting if each.session is session]:
            self._waiting.remove(call)
            self._answer(call, psycopg.OperationalError("server closed the connection"))
        self._finish(session)

    def _finish(self, session: Session) -> None:
        """End a transaction, and let those go on that wait for its locks."""
        session.in_transaction, session.row = False, None
        held = [lock for lock, holder in self._locks.items() if holder is session]
        for lock in held:
            del self._locks[lock]
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            self._run(call)

    def _arrived(self, call: Call) -> None:
        world, session = self.world, call.session
        assert session.process is not None
        if session.process.host in self.out_of_reach:
            world.after(RESENT_S, lambda: self._arrived(call))
        elif world.now < self.away_until or session.is_ended:
            session.is_ended = True
            self._answer(call, psycopg.OperationalError("connection refused"))
        elif world.now < self.slow_until:
            world.after(world.rng.uniform(0.0, SLOWEST_S), lambda: self._begin(call))
        else:
            self._begin(call)

    def _begin(self, call: Call) -> None:
        chance = self.world.rng.random() / self.trouble if self.trouble else 9.0
        if chance < 0.5:
            self._end(call.session)
        if call.session.is_ended:
            self._answer(call, psycopg.OperationalError("server closed the connection"))
            return
        if chance < 1.0:
            self.full_until = self.world.now + self.world.rng.uniform(0.0, 5.0)
        self._run(call)
        if chance > 1.5 or call.is_over:
            return
        self.world.log("database", "a connection breaks, and an answer is lost")
        self._end(call.session)

    def _run(self, call: Call) -> None:
        session = call.session
        lock = _lock_of(call.sql)
        if lock and self._locks.get(lock, session) is not session:
            self._waiting.append(call)
            return
        error: Exception | None = None
        try:
            if lock and session.in_transaction:
                self._locks[lock] = session
            call.rows = self._carry_out(session, call.sql, call.values)
        except psycopg.Error as found:
            error = found
        if session.in_transaction:
            self._watch_idle(session)
        self._answer(call, error)

    def _watch_idle(self, session: Session) -> None:
        done = session.statements

        def check() -> None:
            if session.in_transaction and session.statements <= done:
                self._end(session)

        self.world.after(IDLE_S, check)

    def _answer(self, call: Call, error: Exception | None) -> None:
        def answered() -> None:
            process = call.session.process
            if process is not None and process.host in self.out_of_reach:
                self.world.after(RESENT_S, answered)
                return
            is_lost = call.session.is_ended and error is None
            call.error = psycopg.OperationalError("connection lost") if is_lost else error
            call.is_over = True
            call.check()

        self.world.after(self.world.rng.uniform(*DELAY_S), answered)

    def _carry_out(self, session: Session, sql: str, values: Sequence[Any]) -> list[Any]:
        for begin, carry_out in _STATEMENTS.items():
            if sql.startswith(begin):
                return carry_out(self, session, *values) or []
        raise AssertionError(f"the simulated database does not know {sql}")

    def check_room(self) -> None:
        """Raise as for a full disk."""
        if self.world.now < self.full_until:
            raise psycopg.errors.DiskFull("could not extend file: No space left on device")

    def commit(self, session: Session) -> None:
        """Let a transaction's changes be."""
        if session.row is not None:
            if session.row.epoch != (self.row.epoch if self.row else 0):
                claims = self.simulation.checks.leaders.claims
                claims(session.process, session.row.epoch)
            self.row = session.row
        self._finish(session)

    def reader(self) -> MemoryStore:
        """Return what a next controller would find."""
        return self.kept


def _lock_of(sql: str) -> str:
    if sql.startswith("SELECT pg_advisory"):
        return OPENING
    writes = ("SELECT id, epoch", "UPDATE greenroom_store", "WITH held")
    return ROW if sql.startswith(writes) else ""


def _begin(_database: Database, session: Session) -> None:
    session.in_transaction = True


def _commit(database: Database, session: Session) -> None:
    database.commit(session)


def _find_tables(database: Database, _session: Session) -> list[Any]:
    return [(1,)] if database.row is not None else []


def _newest_format(database: Database, _session: Session) -> list[Any]:
    return [(None if database.row is None else database.row.format,)]


def _make_row(
    database: Database, session: Session, _namespace: str, version: int, store_id: str
) -> None:
    session.row = database.row or Row(version, store_id)


def _claim(database: Database, session: Session, _namespace: str) -> list[Any]:
    row = session.row = database.row or session.row  # as it is, now that it is locked
    assert row is not None
    return [(row.id, row.epoch, row.lease, row.over_at <= database.world.now)]


def _take(database: Database, session: Session, epoch: int, term_s: float, _namespace: str) -> None:
    assert session.row is not None
    session.row = replace(session.row, epoch=epoch, over_at=database.world.now + term_s)


def _read_claim(database: Database, _session: Session, _namespace: str) -> list[Any]:
    if (row := database.row) is None:
        raise psycopg.errors.UndefinedTable("there is none")
    return [(row.epoch, row.id, row.lease, row.over_at <= database.world.now, row.format)]


def _renew(
    database: Database,
    _session: Session,
    lease: bytes,
    term_s: float,
    _namespace: str,
    epoch: int,
) -> list[Any]:
    if database.row is None or database.row.epoch != epoch:
        return []
    database.row = replace(database.row, lease=lease, over_at=database.world.now + term_s)
    return [(epoch,)]


def _apply(
    database: Database,
    session: Session,
    _namespace: str,
    epoch: int,
    deletes: list[bytes],
    keys: list[bytes],
    values: list[bytes],
) -> list[Any]:
    if database.row is None or database.row.epoch != epoch:
        return []
    database.check_room()
    assert session.process is not None
    database.simulation.checks.leaders.writes(session.process, "values")
    puts = {key.decode(): value for key, value in zip(keys, values, strict=True)}
    gone = [key.decode() for key in deletes]
    database.kept.apply(puts, gone)
    database.on_applied(puts, gone)
    return [(epoch,)]


def _list(database: Database, _session: Session, _namespace: str) -> list[Any]:
    return [(key.encode(),) for key in database.kept.load()]


def _load(database: Database, _session: Session, _namespace: str, keys: list[bytes]) -> list[Any]:
    values = database.kept.load()
    return [(key, values[key.decode()]) for key in keys if key.decode() in values]


def _size(database: Database, session: Session, namespace: str, keys: list[bytes]) -> list[Any]:
    return [(sum(len(value) for _, value in _load(database, session, namespace, keys)),)]


def _get(database: Database, _session: Session, _namespace: str, key: bytes) -> list[Any]:
    value = database.kept.get(key.decode())
    return [] if value is None else [(len(value), value)]


def _try(database: Database, _session: Session, _value: bytes) -> None:
    database.check_room()  # and what is written is undone


def _nothing(*_: Any) -> None:
    """Change nothing."""


_STATEMENTS: dict[str, Callable[..., Any]] = {
    "connect": _nothing,
    "SELECT set_config": _nothing,
    "BEGIN": _begin,
    "COMMIT": _commit,
    "SELECT pg_advisory": _nothing,
    "SELECT 1 WHERE to_regclass": _find_tables,
    "CREATE TABLE": _nothing,
    "INSERT INTO greenroom_store": _make_row,
    "SELECT max(format)": _newest_format,
    "SELECT id, epoch": _claim,
    "UPDATE greenroom_store SET epoch": _take,
    "SELECT epoch, id": _read_claim,
    "UPDATE greenroom_store SET lease": _renew,
    "WITH held": _apply,
    "SELECT sum(": _size,
    "SELECT octet_length": _get,
    "SELECT key, value": _load,
    "SELECT key FROM": _list,
    "INSERT INTO greenroom_values": _try,
}
