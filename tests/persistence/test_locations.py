"""What every store that hosts share does: its epoch decides who may write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom.persistence.kv import (
    KVStore,
    StaleWriterError,
    StoreLocation,
    StoreLockedError,
    StoreMissingError,
)
from greenroom.persistence.locations import location_at
from tests.support.postgres import PostgresServer


@pytest.fixture(name="at", params=["on disk", "in a database"])
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "on disk":
        return tmp_path / "store"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture(name="location")
def make_location(at: Path | str) -> StoreLocation:
    return location_at(at)


def test_where_nothing_was_saved_there_is_no_store(location: StoreLocation) -> None:
    assert location.read_claim().epoch == 0
    assert not location.read_claim().store_id
    with pytest.raises(StoreMissingError):
        location.read()


def test_a_successor_fences_the_one_before(location: StoreLocation) -> None:
    location.try_to_write()
    first = location.open(after=0)
    first.apply({"a": b"1", "b": b"1"})
    first.renew(b"first, 1", 3.0)
    assert location.read_claim().epoch == first.epoch == 1
    assert location.read_claim().lease == b"first, 1"
    assert not location.read_claim().is_over
    second = location.open(after=1)
    assert (second.epoch, second.store_id) == (2, first.store_id)
    changes: list[Callable[[], None]] = [
        lambda: first.apply({"a": b"2"}),
        lambda: first.apply({}, ["a"]),
        lambda: first.apply({"c": b"2"}, ["a"]),
        lambda: first.renew(b"first, 2", 3.0),
    ]
    for change in changes:
        with pytest.raises(StaleWriterError, match="another writer"):
            change()
    assert _content(second) == {"a": b"1", "b": b"1"}
    second.renew(b"second, 1", 3.0)
    assert location.read_claim().lease == b"second, 1"
    first.close()
    second.close()


def test_a_writer_that_is_alone_keeps_others_out_until_it_is_closed(
    location: StoreLocation,
) -> None:
    first = location.open()
    with pytest.raises(StoreLockedError):
        location.open()
    first.apply({"a": b"1"})
    first.close()
    second = location.open()
    assert (second.epoch, second.get("a")) == (2, b"1")
    second.close()


def test_each_namespace_is_a_store_of_its_own(at: Path | str) -> None:
    one, other = location_at(at), location_at(at, "jobs a#b")
    first = one.open(after=0)
    first.apply({"a": b"1", "b": b"1"})
    assert not other.read_claim().store_id
    with pytest.raises(StoreMissingError):
        other.read()
    second = other.open()
    assert second.store_id != first.store_id
    assert not second.load()
    second.apply({"a": b"2"}, ["b"])
    assert _content(first) == _read(one) == {"a": b"1", "b": b"1"}
    assert _content(second) == _read(other) == {"a": b"2"}
    one.open(after=1).close()  # fences the first alone
    second.apply({"c": b"2"})
    with pytest.raises(StaleWriterError):
        first.apply({"c": b"1"})
    for store in (first, second):
        store.close()


def test_of_two_who_would_succeed_the_same_writer_one_does(location: StoreLocation) -> None:
    location.open(after=0).close()
    location.open(after=1).close()
    with pytest.raises(StaleWriterError, match=r"from epoch 1, and .* 2"):
        location.open(after=1)


def test_a_writer_that_has_renewed_since_it_was_read_is_not_superseded(
    location: StoreLocation,
) -> None:
    first = location.open(after=0, lease=b"")
    first.renew(b"first, 1", 3.0)
    seen = location.read_claim()
    first.renew(b"first, 2", 3.0)  # it was only slow
    with pytest.raises(StaleWriterError, match="renewed since it was looked at"):
        location.open(after=seen.epoch, lease=seen.lease)
    first.apply({"a": b"1"})
    first.close()


def test_what_is_read_is_of_one_moment_and_changes_nothing(location: StoreLocation) -> None:
    writer = location.open()
    writer.apply({"a": b"1"})
    first = location.read()
    writer.apply({"a": b"2", "b": b"1"})
    assert _content(first) == {"a": b"1"}, "it is of one moment"
    assert _content(location.read()) == {"a": b"2", "b": b"1"}
    assert _content(location.read(lambda key: key == "b")) == {"b": b"1"}
    first.apply({"a": b"3"})
    location.try_to_write()
    assert writer.get("a") == b"2"
    writer.close()


def _read(location: StoreLocation) -> dict[str, bytes]:
    return location.read().load()


def _content(store: KVStore) -> dict[str, bytes | None]:
    return store.load()


def test_a_name_that_cannot_be_of_a_store_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mysql://\.\.\.: must be the path of a folder, or"):
        location_at("mysql://root:secret@db/x")
    with pytest.raises(ValueError, match=r"must be postgresql://USER@HOST") as raised:
        location_at("postgresql://me:se-cret@db/x?sslmod=require")
    assert "se-cret" not in str(raised.value)
