"""A queue's log: many changes in one write, and nothing told that is not on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping

import pytest

from greenroom.core.errors import StateNotSavedError
from greenroom.core.jobs import Job
from greenroom.persistence.kv import (
    MemoryStore,
    NothingSavedError,
    StaleWriterError,
    StoreLockedError,
)
from greenroom.serve.tasks.log import CALL, JOB, RESULT, JobLog, values_of

pytestmark = pytest.mark.anyio


class Store(MemoryStore):
    """Counts writes, holds them up, and refuses with the next of ``errors``."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[str]] = []
        self.errors: list[Exception] = []
        self.may_write = threading.Event()
        self.may_write.set()

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        assert self.may_write.wait(10)
        if self.errors:
            raise self.errors.pop(0)
        self.writes.append(sorted(puts))
        super().apply(puts, deletes)


def job(name: str, **fields: object) -> Job:
    values = {"id": name, "number": 1, "task": "t", "created_at": 1.5, "size": 2}
    return Job(**{**values, **fields})  # type: ignore[arg-type]


async def opened(store: MemoryStore) -> JobLog:
    log = JobLog(lambda: store)
    await log.open()
    return log


async def test_changes_that_come_during_a_write_share_the_next_one():
    store = Store()
    log = await opened(store)
    store.may_write.clear()
    log.change({"a": b"1"})
    await asyncio.sleep(0)
    log.change({"b": b"1"})
    waiting = asyncio.ensure_future(log.durable())
    log.change({"c": b"1", "a": b"2"})
    await asyncio.sleep(0.01)
    assert not waiting.done()
    store.may_write.set()
    await waiting
    assert store.writes == [["a"], ["a", "b", "c"]]
    assert store.get("a") == b"2"
    await log.durable()  # there is nothing to wait for


async def test_a_refused_write_is_reported_and_repeated_with_what_came_since():
    store = Store()
    log = await opened(store)
    store.errors = [NothingSavedError("the disk is full")]
    log.change({"a": b"1", "b": b"1"})
    with pytest.raises(StateNotSavedError, match="the disk is full"):
        await log.durable()
    with pytest.raises(StateNotSavedError):
        await log.durable()
    log.change({"b": b"2", "c": b"2"})
    while log.problem:
        await asyncio.sleep(0.01)
    assert [store.get(key) for key in "abc"] == [b"1", b"2", b"2"]


async def test_a_log_whose_store_another_queue_has_taken_writes_no_more():
    store = Store()
    log = await opened(store)
    store.errors = [StaleWriterError("there is a later writer")]
    log.change({"a": b"1"})
    with pytest.raises(StateNotSavedError, match="later writer"):
        await log.durable()
    assert log.is_superseded
    log.change({"b": b"1"})
    await asyncio.sleep(0.05)
    assert store.load() == {}


async def test_it_waits_for_a_store_that_is_locked_and_reads_what_is_there():
    store = Store()
    ended = job("b", status="SUCCEEDED", ended_at=3.0)
    values = values_of({"a": job("a"), "b": ended, "c": None})
    assert values[CALL + "b"] is values[RESULT + "c"] is None
    assert CALL + "a" not in values
    store.apply({key: value for key, value in values.items() if value is not None})
    store.apply(
        {
            JOB + "d": b'{"format": 1, "id": "d", "number": 4, "task": "t", "later": 1, '
            b'"created_at": 1, "size": 2}'
        }
    )  # as another release may write it
    tries = iter([StoreLockedError("locked"), StoreLockedError("locked")])

    def open_store() -> Store:
        for error in tries:
            raise error
        return store

    log = JobLog(open_store)
    assert await log.open() == [job("a"), ended, job("d", number=4, created_at=1)]
