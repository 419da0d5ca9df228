"""What only a database does: it is restarted, hangs, refuses, and has passwords."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from greenroom.persistence import postgres as module
from greenroom.persistence.kv import (
    LeasedStore,
    NothingSavedError,
    OtherFormatError,
    StaleWriterError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StoreNotReadableError,
    StoreNotWritableError,
)
from greenroom.persistence.locations import location_at
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.systems import free_port, wait_until


class Relay:
    """A TCP proxy that delays what it passes on, or keeps it."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.passes = threading.Event()
        self.passes.set()
        self.taken = 0  # connections
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.taken += 1
                server = socket.create_connection(("127.0.0.1", self._port))
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError), one, other:
            while chunk := one.recv(65536):
                time.sleep(self.delay_s)
                self.passes.wait()
                other.sendall(chunk)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.passes.set()


@pytest.fixture
def relay(postgres: PostgresServer) -> Iterator[Relay]:
    relay = Relay(postgres.port)
    yield relay
    relay.close()


def _through(relay: Relay, postgres: PostgresServer) -> str:
    return postgres.new_database().replace(f":{postgres.port}/", f":{relay.port}/")


Change = Callable[[str], str]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda url: url.replace(PASSWORD, "wr0ng"), "check the user and the password"),
        (lambda url: url.replace(f":{PASSWORD}", ""), "give the password in the URL"),
        (lambda url: url.replace("/postgres?", "/nowhere?"), "createdb"),
        (lambda url: url.replace("127.0.0.1", "127.0.0.9"), "see whether the database runs"),
    ],
)
def test_what_is_wrong_with_a_url_is_reported_without_its_password(
    postgres: PostgresServer, change: Change, message: str
) -> None:
    url = change(postgres.new_database())
    if message.startswith("see"):
        url = url.replace(f":{postgres.port}", f":{free_port()}")
    location = location_at(url)
    for fails in (location.open, location.read_claim, location.try_to_write):
        with pytest.raises(StoreError, match=message) as raised:
            fails()  # type: ignore[operator]
        assert f"postgresql://postgres@127.0.0.{'9' if message.startswith('see') else '1'}" in str(
            raised.value
        )
        for secret in (PASSWORD, "wr0ng"):
            assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:se-cret@one:5,two/db?password=se-cret", "postgresql://me@one:5,two/db"),
        ("postgresql://me:se@cret@one/db", "postgresql://me@one/db"),
        ("postgresql:///db?host=/run&password=se-cret", "postgresql:///db"),
        ("postgresql://one/a b:se-cret", "postgresql://one/..."),
        ("postgresql://one;se-cret", "postgresql://..."),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert module.redacted(url) == shown


def test_a_missing_driver_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "greenroom.persistence.postgres")
    with pytest.raises(ValueError, match=r"pip install 'greenroom\[postgres\]'"):
        location_at("postgresql://me@db/x")


@pytest.mark.parametrize("number", [1, 3])
def test_another_format_is_refused(postgres: PostgresServer, number: int) -> None:
    url = postgres.new_database()
    location = location_at(url)
    location.open().close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE greenroom_store SET format = %s", [number])
    for fails in (location.open, location.read_claim, location.try_to_write):
        with pytest.raises(OtherFormatError, match=f"has format {number}; this version reads 2"):
            fails()  # type: ignore[operator]


def test_a_restarted_server_has_what_was_saved_and_takes_more(postgres: PostgresServer) -> None:
    store = location_at(postgres.new_database()).open(after=0)
    store.apply({"a": b"1"})
    postgres.stop(now=True)
    try:
        with pytest.raises(NothingSavedError, match="Nothing was changed"):
            store.apply({"a": b"2"})
        with pytest.raises(StoreNotReadableError):
            store.get("a")
    finally:
        postgres.start()
        postgres.wait()
    assert store.get("a") == b"1"
    postgres.stop(now=True)
    postgres.start()
    postgres.wait()
    store.apply({"a": b"3"})  # by a new connection
    store.renew(b"lease", 3.0)
    assert store.get("a") == b"3"
    store.close()


def test_the_second_host_of_a_url_is_used_where_the_first_does_not_answer(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    both = url.replace("@", f"@127.0.0.1:{free_port()},")
    store = location_at(both).open()
    store.apply({"a": b"1"})
    assert store.get("a") == b"1"
    store.close()


def test_a_silent_first_host_of_a_url_is_waited_for_once(
    postgres: PostgresServer, relay: Relay
) -> None:
    relay.passes.clear()
    url = postgres.new_database()
    location = location_at(url.replace("@", f"@127.0.0.1:{relay.port},"))
    for _ in range(3):  # each with connections of its own
        store = location.open()
        store.apply({"a": b"1"})
        store.close()
    assert relay.taken == 1


def test_a_slow_server_is_waited_for_and_a_silent_one_is_not(
    postgres: PostgresServer, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = location_at(_through(relay, postgres))
    store = location.open(after=0)
    store.apply({"a": b"1"})
    store.renew(b"lease", 3.0)
    relay.delay_s = 0.5
    store.apply({"a": b"2"})
    store.renew(b"lease 2", 3.0)
    relay.delay_s = 0.0
    relay.passes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(module, "CALL_TIMEOUT_S", 0.5)
        with pytest.raises(StoreNotWritableError, match=r"not answer within 0\.5 s.*may or may"):
            store.apply({"a": b"3"})
        with pytest.raises(StoreNotWritableError, match=r"not answer within 0\.5 s"):
            store.renew(b"lease 3", 3.0)
    relay.passes.set()
    assert store.get("a") in {b"2", b"3"}
    store.apply({"a": b"4"})
    assert store.get("a") == b"4"
    store.close()


class LateTimer(threading.Timer):
    """A timer that was due just before it was cancelled, and whose thread goes on late."""

    def run(self) -> None:
        self.finished.wait()
        time.sleep(0.2)
        self.function(*self.args, **self.kwargs)


def test_a_call_that_ends_as_its_time_is_up_has_the_next_one_not_cut(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = location_at(postgres.new_database()).open(after=0)
    store.apply({"a": b"1"})
    with monkeypatch.context() as late:
        late.setattr(threading, "Timer", LateTimer)
        assert store.get("a") == b"1"
    assert not [each for each in threading.enumerate() if isinstance(each, LateTimer)]
    assert store.get("a") == b"1"
    store.close()


def test_a_write_that_is_refused_for_want_of_space_changes_nothing(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    location = location_at(url)
    store = location.open()
    store.apply({"a": b"1"})
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            """CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100';
               END $$"""
        )
        connection.execute(
            "CREATE TRIGGER full_disk BEFORE INSERT ON greenroom_values "
            "EXECUTE FUNCTION full_disk()"
        )
        for fails in (lambda: store.apply({"a": b"2"}, ["b"]), location.try_to_write):
            with pytest.raises(NothingSavedError, match="free space on the database's disk"):
                fails()
        assert store.get("a") == b"1"
        connection.execute("DROP TRIGGER full_disk ON greenroom_values")
    location.try_to_write()
    store.apply({"a": b"2"})
    store.close()


def test_a_change_that_is_being_made_ends_before_the_store_is_taken_over(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    location = location_at(url)
    first = location.open(after=0)
    first.apply({"a": b"1"})
    outcomes: list[Exception | None] = []

    def change() -> None:
        try:
            first.apply({"a": b"2"})
        except StoreError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    opened: list[LeasedStore] = []
    changing = threading.Thread(target=change)
    opening = threading.Thread(target=lambda: opened.append(location.open(after=1)))
    with psycopg.connect(url) as other, psycopg.connect(postgres.url, autocommit=True) as watching:

        def waiting() -> int:
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            (count,) = watching.execute(waits).fetchone() or (0,)
            return int(count)

        other.execute("UPDATE greenroom_values SET value = ''")  # which the change waits for
        changing.start()
        wait_until(lambda: waiting() == 1, 5, "the change waits")
        opening.start()
        wait_until(lambda: waiting() == 2, 5, "the next writer waits for the change")
        assert not opened
        other.rollback()
    changing.join(10)
    opening.join(10)
    (second,) = opened
    assert outcomes == [None]
    assert second.get("a") == b"2"
    second.close()
    first.close()


def test_a_writer_that_was_alone_and_died_is_replaced_once_its_lease_is_over(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = location_at(postgres.new_database(), "jobs")
    monkeypatch.setattr(module, "HOLD_EVERY_S", 0.1)
    monkeypatch.setattr(module, "OPENED_FOR_S", 1.0)
    first = location.open()
    assert isinstance(first, module.PostgresStore)
    renew, errors = first._renew, [RuntimeError("of whatever kind")]

    def renewed(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        renew(*arguments)

    monkeypatch.setattr(first, "_renew", renewed)
    held_until = time.monotonic() + 1.3
    while time.monotonic() < held_until:
        with pytest.raises(StoreLockedError, match="another process writes"):
            location.open()
    assert not errors
    monkeypatch.setattr(module, "HOLD_EVERY_S", 60.0)  # as if it were dead

    def opened() -> LeasedStore | None:
        with contextlib.suppress(StoreLockedError):
            return location.open()
        return None

    second = wait_until(opened, 5, "the lease is over")
    with pytest.raises(StaleWriterError):
        first.apply({"a": b"1"})
    for store in (first, second):
        store.close()


def test_a_closed_store_refuses_to_renew(postgres: PostgresServer) -> None:
    store = location_at(postgres.new_database()).open()
    store.close()
    with pytest.raises(StoreClosedError):
        store.renew(b"lease", 3.0)
