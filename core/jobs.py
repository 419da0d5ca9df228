"""Jobs: requests that outlive their connection. What a queue decides; the shell is serve/tasks.

Theory of operation. A job is one frozen record, and ``Jobs`` is the table of one queue's. Each
change of a job goes through :meth:`Jobs.take_changes`, and counts only when it is durable: the
queue reports nothing that is not. So a queue that is killed at any moment makes its table anew of
what was saved, and no client has seen anything else. A job that ran when its queue died runs again.
A job that has ended never changes again, but for the tries of its callback, and is forgotten
``result_ttl_s`` later.

Jobs begin in the order in which they came, ``max_running`` at a time. A run that fails is repeated
after a pause that doubles, ``max_retries`` times. A run that was cut short by the end of its queue
does not count as failed, but a job that was there each time, :data:`MAX_CUT` times, is abandoned.

Times are in seconds since the epoch, because they outlive processes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from greenroom.core.agenda import NEVER, Agenda
from greenroom.core.backoff import pause_s
from greenroom.core.errors import (
    ConflictError,
    JobsTooLargeError,
    OtherJobError,
    TooManyJobsError,
    UnknownNameError,
)
from greenroom.core.transitions import follow
from greenroom.core.validation import Settings

RUN, CALL_BACK, FORGET = "run", "call back", "forget"
MAX_CUT = 20
MAX_ERROR_CHARACTERS = 2_000
MAX_KEY_CHARACTERS = 255
DEFER_S, MOST_DEFER_S = 0.2, 5.0  # before a job that found no replica is tried again
CALLBACK_TRIES = 12  # over some 65 minutes
FIRST_CALLBACK_S, MOST_CALLBACK_S = 2.0, 1800.0

Status = Literal["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
ENDED: tuple[Status, ...] = ("SUCCEEDED", "FAILED", "CANCELLED")
NEXT: dict[Status, tuple[Status, ...]] = {
    "QUEUED": ("RUNNING", "CANCELLED"),
    "RUNNING": ("QUEUED", *ENDED),
    **{each: (each,) for each in ENDED},  # only its callback is tried
}


class TaskProcessorConfig(Settings):
    """How a task consumer's jobs are kept and run; sizes in bytes, durations in seconds."""

    max_running: int = Field(default=8, ge=1, le=1_000)
    max_retries: int = Field(default=3, ge=0, le=1_000)
    retry_pause_s: float = Field(default=1, ge=0)
    max_retry_pause_s: float = Field(default=300, ge=0)
    result_ttl_s: float = Field(default=3600, gt=0)
    max_jobs: int = Field(default=10_000, ge=1, le=100_000)
    max_job_bytes: int = Field(default=1024**2, ge=1)
    max_kept_bytes: int = Field(default=256 * 1024**2, ge=1)
    callback_hosts: tuple[str, ...] = ()
    list_jobs: bool = Field(default=False, description="GET / shows every client's jobs")

    hints: ClassVar[Mapping[str, str]] = {
        "adapter": "leave it out: there is one kind of queue",
        "adapter_config": "leave it out: jobs are in the system's own store, without a broker",
        "queue_name": "leave it out: jobs are kept by the names of application and deployment",
        "failed_task_queue_name": "failed jobs are kept with their errors: list_tasks('FAILED')",
        "unprocessable_task_queue_name": "a job that cannot be read is refused when it is posted",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job; what it is called with and its result are kept beside it."""

    id: str
    number: int  # in the order in which they came
    task: str
    created_at: float
    size: int  # of the call, or once it has ended of the result, in bytes
    key: str = ""  # what makes two requests one job
    digest: str = ""  # of task and call
    status: Status = "QUEUED"
    runs: int = 0  # begun
    failures: int = 0
    cut: int = 0
    deferred: int = 0  # in a row, as no replica could take it
    due_at: float = 0.0
    ended_at: float | None = None
    error: str = ""
    callback: str = ""  # a URL
    callback_tries: int = 0
    callback_at: float | None = None  # None for none that is due

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self.status in ENDED


class Jobs:
    """One queue's jobs, those that ``saved`` has among them."""

    def __init__(self, config: TaskProcessorConfig, saved: Iterable[Job] = (), now: float = 0):
        self.config = config
        self.bytes = 0
        self.running = 0
        self._jobs: dict[str, Job] = {}
        self._keys: dict[str, str] = {}  # -> id
        self._changes: dict[str, Job | None] = {}
        self._agenda = Agenda()  # when jobs may run, are called back, and are forgotten
        self._ready: list[tuple[int, str]] = []  # a heap of those that may run, by number
        for job in saved:
            self._put(job)
        self._changes.clear()  # they are saved
        self._last = max((job.number for job in self._jobs.values()), default=0)
        for job in [each for each in self._jobs.values() if each.status == "RUNNING"]:
            cut = job.cut + 1
            if cut > MAX_CUT:
                text = f"its queue ended {cut} times while it ran"
                self._end(replace(job, cut=cut), "FAILED", now, error=text)
            else:
                self._put(replace(job, status="QUEUED", cut=cut, due_at=0.0))

    # --- What is asked ------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """Return a job; UnknownNameError for none."""
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownNameError(
                f"there is no job {job_id!r}: its id is wrong, or it ended more than "
                f"{self.config.result_ttl_s:g} s ago (result_ttl_s)"
            )
        return job

    def latest(self, status: str | None, most: int) -> list[Job]:
        """Return the newest jobs, of one status or of all; the newest first."""
        jobs = [job for job in self._jobs.values() if status in (None, job.status)]
        return heapq.nlargest(most, jobs, key=lambda job: job.number)

    def counts(self) -> dict[str, int]:
        """Return status -> number of jobs."""
        return dict(Counter(job.status for job in self._jobs.values()))

    def take_changes(self) -> dict[str, Job | None]:
        """Return what is to be saved since this was last asked; None for what is forgotten."""
        changes, self._changes = self._changes, {}
        return changes

    def wake_at(self) -> float | None:
        """Return when there is something to do that depends on time alone."""
        due_at = self._agenda.next_at()
        return due_at if due_at < NEVER else None

    # --- What changes -------------------------------------------------------------------------

    def submit(self, job: Job) -> Job:
        """Take a job, or return the one that its key stands for; ``number`` is given here.

        OtherJobError where the key stands for another call; TooManyJobsError and JobsTooLargeError
        where there is no room.
        """
        known = self._jobs.get(self._keys.get(job.key, "")) if job.key else None
        if known is not None:
            if known.digest != job.digest:
                raise OtherJobError(
                    f"this idempotency key was given with another call before, for job {known.id}"
                )
            return known
        limits = self.config
        if len(self._jobs) >= limits.max_jobs:
            raise TooManyJobsError(
                f"the queue has {len(self._jobs)} jobs, those among them that ended within "
                f"{limits.result_ttl_s:g} s: max_jobs={limits.max_jobs}; try again later"
            )
        if self.bytes + job.size > limits.max_kept_bytes:
            raise JobsTooLargeError(
                f"the queue's jobs and results have {self.bytes} bytes, and this one {job.size}: "
                f"max_kept_bytes={limits.max_kept_bytes}; try again later"
            )
        self._last += 1
        job = replace(job, number=self._last)
        self._put(job)
        return job

    def begin(self, now: float) -> Job | None:
        """Return the next job to run, which counts as running from now on, or None.

        None begins while results fill what may be kept, so that none is lost for want of room.
        """
        for due in self._due(RUN, now):
            heapq.heappush(self._ready, (due.number, due.id))
        if self.running >= self.config.max_running or self.bytes > self.config.max_kept_bytes:
            return None
        while self._ready:
            job = self._jobs.get(heapq.heappop(self._ready)[1])
            if job is not None and job.status == "QUEUED" and job.due_at <= now:
                job = replace(job, status="RUNNING", runs=job.runs + 1)
                self._put(job)
                return job
        return None

    def succeeded(self, job_id: str, size: int, now: float) -> bool:
        """Note that a run has a result of so many bytes; return whether it counts."""
        job = self._running(job_id)
        if job is None:
            return False
        self._end(job, "SUCCEEDED", now, size=size)
        return True

    def failed(self, job_id: str, error: str, now: float, *, is_final: bool = False) -> None:
        """Note that a run has failed: it is repeated later, or the job has failed."""
        job = self._running(job_id)
        if job is None:
            return
        limits = self.config
        error = error[:MAX_ERROR_CHARACTERS]
        job = replace(job, failures=job.failures + 1, deferred=0, error=error)
        if is_final or job.failures > limits.max_retries:
            self._end(job, "FAILED", now)
            return
        pause = pause_s(job.failures, limits.retry_pause_s, limits.max_retry_pause_s)
        self._put(replace(job, status="QUEUED", due_at=now + pause))

    def defer(self, job_id: str, now: float) -> None:
        """Note that a job was not run, because no replica could take it; that is no failure."""
        job = self._running(job_id)
        if job is None:
            return
        job = replace(job, status="QUEUED", runs=job.runs - 1, deferred=job.deferred + 1)
        self._put(replace(job, due_at=now + pause_s(job.deferred, DEFER_S, MOST_DEFER_S)))

    def cancel(self, job_id: str, now: float) -> Job:
        """Cancel a job that has not ended; ConflictError for one that has, in another way."""
        job = self.get(job_id)
        if job.status == "CANCELLED":
            return job
        if job.has_ended:
            raise ConflictError(f"job {job_id} is {job.status}: it cannot be cancelled any more")
        return self._end(job, "CANCELLED", now)

    def due_callbacks(self, now: float) -> list[Job]:
        """Return the jobs whose callbacks are to be tried now; each counts as being tried."""
        return self._due(CALL_BACK, now)

    def called_back(
        self, job_id: str, *, was_taken: bool, now: float, is_final: bool = False
    ) -> None:
        """Note what became of a try of a callback; ``is_final``: another would fail, too."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        tries = job.callback_tries + 1
        at = None
        if not was_taken and not is_final and tries < CALLBACK_TRIES:
            at = now + pause_s(tries, FIRST_CALLBACK_S, MOST_CALLBACK_S)
        self._put(replace(job, callback_tries=tries, callback_at=at))

    def forget_old(self, now: float) -> None:
        """Forget jobs that have ended ``result_ttl_s`` ago."""
        for job in self._due(FORGET, now):
            del self._jobs[job.id]
            self._agenda.at(CALL_BACK, job.id, NEVER)
            self.bytes -= job.size
            if self._keys.get(job.key) == job.id:
                del self._keys[job.key]
            self._changes[job.id] = None

    def _due(self, what: str, now: float) -> list[Job]:
        names = self._agenda.take(what, now)
        return [self._jobs[each] for each in names if each in self._jobs]

    def _running(self, job_id: str) -> Job | None:
        job = self._jobs.get(job_id)
        return job if job is not None and job.status == "RUNNING" else None

    def _end(
        self, job: Job, status: Status, now: float, *, size: int = 0, error: str | None = None
    ) -> Job:
        job = replace(
            job,
            status=status,
            size=size,
            ended_at=now,
            error="" if status == "SUCCEEDED" else job.error if error is None else error,
            callback_at=now if job.callback else None,
        )
        self._put(job)
        return job

    def _put(self, job: Job) -> None:
        before = self._jobs.get(job.id)
        if before is not None:
            follow(NEXT, before.status, job.status)
        self._jobs[job.id] = job
        self._changes[job.id] = job
        self.bytes += job.size - (before.size if before else 0)
        was_running = before is not None and before.status == "RUNNING"
        self.running += (job.status == "RUNNING") - was_running
        if job.key:
            self._keys[job.key] = job.id
        is_queued, agenda = job.status == "QUEUED", self._agenda
        agenda.at(RUN, job.id, job.due_at if is_queued else NEVER)
        if job.ended_at is not None:
            agenda.at(FORGET, job.id, job.ended_at + self.config.result_ttl_s)
        agenda.at(CALL_BACK, job.id, NEVER if job.callback_at is None else job.callback_at)
