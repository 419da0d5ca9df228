"""A queue's jobs on disk: changes in the order in which they were made, many in one write.

A job is a record ``job/ID``; what it is called with is ``call/ID``, and its result ``result/ID``,
so that a change of its state does not write them again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from greenroom.core.backoff import pause_s
from greenroom.core.errors import StateNotSavedError
from greenroom.core.jobs import Job
from greenroom.persistence.kv import KVStore, StaleWriterError, StoreError, StoreLockedError

logger = logging.getLogger(__name__)
FORMAT = 1  # of a record
LOCKED_S = 0.1  # between tries to open a store that an earlier queue still has
FIRST_REPEAT_S, MOST_REPEAT_S = 0.1, 5.0
JOB, CALL, RESULT = "job/", "call/", "result/"

T = TypeVar("T")


class JobLog:
    """The store of one queue; on its event loop, but for a thread that the disk may block."""

    def __init__(self, open_store: Callable[[], KVStore]) -> None:
        self.problem = ""  # why nothing can be saved at present
        self.is_superseded = False  # another queue has the store, for good
        self._is_closed = False
        self._open_store = open_store
        self._store: KVStore | None = None
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._pending: dict[str, bytes | None] = {}
        self._changes = self._saved = 0  # how many there were, and how many of them are on disk
        self._moved = asyncio.Condition()  # that changed, or the problem
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> list[Job]:
        """Wait until no other process has the store, and return the jobs in it."""
        while self._store is None:
            try:
                self._store = await self._on_thread(self._open_store)
            except StoreLockedError:
                await asyncio.sleep(LOCKED_S)
        return await self._on_thread(self._read_jobs)

    async def get(self, key: str) -> bytes | None:
        """Return a value that is durable; raises StoreError."""
        assert self._store is not None, "open it first"
        return await self._on_thread(partial(self._store.get, key))

    def change(self, values: Mapping[str, bytes | None]) -> None:
        """Put these values, and delete those that are None, in a write that begins soon."""
        if not values or self._is_closed:
            return
        self._pending.update(values)
        self._changes += 1
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def durable(self) -> None:
        """Wait until all changes so far are on disk; StateNotSavedError where that fails."""
        number = self._changes
        async with self._moved:
            await self._moved.wait_for(lambda: self.problem or self._saved >= number)
        if self._saved < number:
            raise StateNotSavedError(self.problem)

    def close(self) -> None:
        """Close the store, once what is being written is; later changes are lost."""
        self._is_closed = True
        self._thread.shutdown()
        if self._store is not None:
            self._store.close()

    async def _write(self) -> None:
        """Write until nothing is pending; a write that fails is repeated with what came since."""
        assert self._store is not None, "open it first"
        failures = 0
        while self._pending:
            batch, self._pending, number = self._pending, {}, self._changes
            puts = {key: value for key, value in batch.items() if value is not None}
            deletes = [key for key, value in batch.items() if value is None]
            try:
                await self._on_thread(partial(self._store.apply, puts, deletes))
            except StoreError as error:
                failures += 1
                self.problem = f"the job is not saved: {error}"
                logger.warning("jobs cannot be saved: %s", error)
                self._pending = {**batch, **self._pending}
                self.is_superseded = isinstance(error, StaleWriterError)
            else:
                failures, self.problem, self._saved = 0, "", number
            async with self._moved:
                self._moved.notify_all()
            if self.is_superseded:
                return
            if failures:
                await asyncio.sleep(pause_s(failures, FIRST_REPEAT_S, MOST_REPEAT_S))
        self._writing = None

    def _read_jobs(self) -> list[Job]:
        assert self._store is not None, "open it first"
        jobs = [_job_of(json.loads(value)) for value in self._store.load(JOB).values()]
        for key, reason in self._store.lost.items():
            logger.warning("a job is lost: %s: %s", key, reason)
        return jobs

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def values_of(changes: Mapping[str, Job | None]) -> dict[str, bytes | None]:
    """Return what to write for changed jobs; the call of one that has ended is not needed."""
    values: dict[str, bytes | None] = {}
    for job_id, job in changes.items():
        if job is None:
            values |= {JOB + job_id: None, CALL + job_id: None, RESULT + job_id: None}
            continue
        values[JOB + job_id] = json.dumps({"format": FORMAT, **asdict(job)}).encode()
        if job.has_ended:
            values[CALL + job_id] = None
    return values


def _job_of(record: dict[str, Any]) -> Job:
    """Read a record, of this release or of another one that adds or lacks fields."""
    known = {name: value for name, value in record.items() if name in Job.__dataclass_fields__}
    return Job(**known)
