"""A queue's decisions: what runs when, what is kept, and that only what is durable counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.core.errors import (
    ConflictError,
    JobsTooLargeError,
    OtherJobError,
    TooManyJobsError,
    UnknownNameError,
)
from greenroom.core.jobs import CALLBACK_TRIES, ENDED, MAX_CUT, Job, Jobs, TaskProcessorConfig
from tests.support.leftovers import where_named


def job(name: str = "a", **fields: Any) -> Job:
    return Job(**{"id": name, "number": 0, "task": "t", "created_at": 0.0, "size": 10, **fields})


def queue(*names: str, **config: Any) -> Jobs:
    jobs = Jobs(TaskProcessorConfig(**config))
    for name in names:
        jobs.submit(job(name))
    return jobs


def begun(jobs: Jobs, now: float = 0.0) -> list[str]:
    ids = []
    while (each := jobs.begin(now)) is not None:
        ids.append(each.id)
    return ids


def test_jobs_begin_in_the_order_in_which_they_came_and_so_many_at_a_time() -> None:
    jobs = queue("z", "m", "a", max_running=2)
    assert begun(jobs) == ["z", "m"]
    jobs.succeeded("z", 1, 1)
    assert begun(jobs) == ["a"]


def test_a_failed_run_is_repeated_after_growing_pauses_before_later_jobs() -> None:
    jobs = queue("a", "b", max_running=1, max_retries=2, retry_pause_s=1, max_retry_pause_s=1.5)
    jobs.begin(0)
    jobs.failed("a", "no", 10)
    assert jobs.get("a").due_at == 11
    jobs.begin(10)
    assert jobs.get("b").status == "RUNNING"
    jobs.submit(job("c"))
    jobs.succeeded("b", 1, 11)
    assert begun(jobs, 11) == ["a"]
    jobs.failed("a", "no", 20)
    assert jobs.get("a").due_at == 21.5
    assert begun(jobs, 21) == ["c"]
    jobs.succeeded("c", 1, 22)
    assert begun(jobs, 22) == ["a"]
    jobs.failed("a", "x" * 10_000, 30)
    ended = jobs.get("a")
    assert (ended.status, ended.runs, ended.failures) == ("FAILED", 3, 3)
    assert len(ended.error) == 2_000


def test_a_job_that_no_replica_could_take_has_not_failed() -> None:
    jobs = queue("a", max_retries=0)
    for tries in range(1, 50):
        jobs.begin(1000.0 * tries)
        jobs.defer("a", 1000.0 * tries)
    waiting = jobs.get("a")
    assert (waiting.status, waiting.runs, waiting.due_at) == ("QUEUED", 0, 49_005)


def test_the_pauses_of_a_job_that_no_replica_takes_begin_anew_once_it_has_run() -> None:
    def pause_s(now: float) -> float:
        jobs.begin(now)
        jobs.defer("a", now)
        return jobs.get("a").due_at - now

    jobs = queue("a", max_retries=5)
    pauses = [pause_s(now) for now in (0, 1000, 2000)]
    assert pauses[0] < pauses[1] < pauses[2]
    jobs.begin(3000)
    jobs.failed("a", "boom", 3000)
    assert pause_s(4000) == pytest.approx(pauses[0])


def test_what_was_cut_short_by_the_end_of_the_queue_runs_again_but_not_for_ever() -> None:
    saved = job(number=1, status="RUNNING", runs=1)
    for cut in range(1, MAX_CUT + 1):
        jobs = Jobs(TaskProcessorConfig(max_retries=0), [saved], 5)
        assert jobs.get("a").cut == cut
        assert jobs.take_changes() == {"a": jobs.get("a")}
        saved = jobs.begin(5)  # type: ignore[assignment]
        assert saved.id == "a"
    jobs = Jobs(TaskProcessorConfig(), [saved], 5)
    assert jobs.get("a").status == "FAILED"
    assert f"{MAX_CUT + 1} times" in jobs.get("a").error


def test_one_key_is_one_job_and_another_call_with_it_is_refused() -> None:
    jobs = queue()
    first = jobs.submit(job("a", key="k", digest="d"))
    assert jobs.submit(job("b", key="k", digest="d")) == first
    with pytest.raises(OtherJobError, match="job a"):
        jobs.submit(job("b", key="k", digest="other"))
    jobs.cancel("a", 1)
    jobs.forget_old(1e9)
    jobs.take_changes()
    assert where_named(jobs, {"a", "k"}) == []
    assert jobs.submit(job("b", key="k", digest="other")).id == "b"


def test_a_full_queue_refuses_and_says_by_which_limit() -> None:
    jobs = queue("a", max_jobs=1)
    with pytest.raises(TooManyJobsError, match="max_jobs=1") as full:
        jobs.submit(job("b"))
    assert (full.value.http_status, full.value.retry_after_s) == (429, 5)
    jobs = queue("a", max_kept_bytes=15)
    with pytest.raises(JobsTooLargeError, match="max_kept_bytes=15"):
        jobs.submit(job("b"))


def test_nothing_begins_while_results_fill_what_may_be_kept() -> None:
    jobs = queue("a", "b", max_kept_bytes=25, max_running=1, result_ttl_s=60)
    jobs.begin(0)
    jobs.succeeded("a", 26, 1)
    assert begun(jobs, 2) == []
    jobs.forget_old(61)
    assert begun(jobs, 61) == ["b"]


def test_a_job_that_has_ended_does_not_change() -> None:
    jobs = queue("a")
    jobs.begin(0)
    jobs.cancel("a", 1)
    cancelled = jobs.get("a")
    assert jobs.succeeded("a", 5, 2) is False
    jobs.failed("a", "late", 2)
    jobs.defer("a", 2)
    assert jobs.get("a") == jobs.cancel("a", 3) == cancelled
    jobs = queue("a")
    jobs.begin(0)
    jobs.succeeded("a", 5, 2)
    with pytest.raises(ConflictError, match="SUCCEEDED"):
        jobs.cancel("a", 3)


def test_an_unknown_or_forgotten_job_is_an_error_that_says_what_it_may_be() -> None:
    with pytest.raises(UnknownNameError, match="result_ttl_s"):
        queue().get("a")


def test_callbacks_are_tried_with_growing_pauses_and_abandoned() -> None:
    jobs = queue()
    jobs.submit(job("a", callback="https://x"))
    jobs.cancel("a", 100)
    now, pauses = 100.0, []
    while due := jobs.due_callbacks(now):
        assert [each.id for each in due] == ["a"]
        jobs.called_back("a", was_taken=False, now=now)
        at = jobs.get("a").callback_at
        if at is not None:
            pauses.append(at - now)
            assert jobs.due_callbacks(at - 0.01) == []
            now = at
    assert len(pauses) == CALLBACK_TRIES - 1
    assert (pauses[:3], pauses[-1]) == ([2, 4, 8], 1800)
    jobs = queue()
    jobs.submit(job("a", callback="https://x"))
    jobs.cancel("a", 100)
    jobs.due_callbacks(100)
    again = Jobs(TaskProcessorConfig(), [jobs.get("a")], 200)  # it died with the callback under way
    assert [each.id for each in again.due_callbacks(200)] == ["a"]
    again.called_back("a", was_taken=True, now=200)
    assert again.due_callbacks(1e9) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "begin", "succeed", "fail", "defer", "cancel", "save", "crash"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


class World:
    """A queue, its disk, and what clients may have seen of jobs that have ended."""

    def __init__(self) -> None:
        self.config = TaskProcessorConfig(max_running=2, max_retries=1, retry_pause_s=5)
        self.jobs = Jobs(self.config)
        self.disk: dict[str, Job] = {}
        self.ended: dict[str, Job] = {}
        self.now = 0.0

    def known(self, name: str, *but: str) -> bool:
        return any(each.id == name for each in self.jobs.latest(None, 99) if each.status not in but)

    def take(self, step: str, name: str) -> None:
        self.now += 1
        if step == "submit" and not self.known(name):
            self.jobs.submit(job(name))
        elif step == "begin":
            self.jobs.begin(self.now)
        elif step == "succeed":
            self.jobs.succeeded(name, 1, self.now)
        elif step == "fail":
            self.jobs.failed(name, "no", self.now)
        elif step == "defer":
            self.jobs.defer(name, self.now)
        elif step == "cancel" and self.known(name, *ENDED):
            self.jobs.cancel(name, self.now)
        elif step == "save":
            self.save()
        elif step == "crash":
            self.jobs = Jobs(self.config, self.disk.values(), self.now)

    def save(self) -> None:
        for name, each in self.jobs.take_changes().items():
            assert each is not None
            assert self.ended.get(name, each) == each, "what was visible has changed"
            self.disk[name] = each
            if each.has_ended:
                self.ended[name] = each


@settings(max_examples=300)
@given(STEPS)
def test_a_queue_that_dies_at_any_moment_keeps_what_was_saved(
    steps: list[tuple[str, int]],
) -> None:
    """Saved jobs survive, those that have ended stay as they are, and all end in the end."""
    world = World()
    for step, number in steps:
        world.take(step, f"j{number}")
        assert world.jobs.running == world.jobs.counts().get("RUNNING", 0) <= 2
        assert world.jobs.bytes == sum(each.size for each in world.jobs.latest(None, 99))
    for _ in range(20):
        world.now += 10
        begun(world.jobs, world.now)
        for each in world.jobs.latest("RUNNING", 99):
            world.jobs.succeeded(each.id, 1, world.now)
    world.save()
    assert world.disk.keys() == world.ended.keys()


def test_it_says_when_time_alone_gives_it_something_to_do() -> None:
    jobs = queue("a", retry_pause_s=5, result_ttl_s=60)
    assert jobs.wake_at() == 0
    begun(jobs)
    assert jobs.wake_at() is None
    jobs.failed("a", "no", 10)
    assert jobs.wake_at() == 15
    jobs.cancel("a", 12)
    jobs.begin(15)
    assert jobs.wake_at() == 72
    jobs.forget_old(72)
    assert jobs.wake_at() is None
    assert jobs.take_changes()["a"] is None
