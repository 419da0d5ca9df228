"""Real replica actors, told by hand what a controller and routers would tell them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.runtime.logs import replica_log
from greenroom.actors.runtime.loop import STARVED_S
from greenroom.actors.runtime.processes import is_alive
from greenroom.core.config import BackendConfig
from greenroom.core.errors import NotBegunError
from greenroom.core.lifecycle.replicas import MAX_FAILURE, bounded
from greenroom.serve.handle import decode
from tests.actors.by_hand import Hand, ReplicaByHand, packed
from tests.support.systems import wait_until

MakeReplica = Callable[..., ReplicaByHand]


class Gate:
    """Keeps calls inside until ``open_file`` exists, and counts how many are inside at once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def _enter(self, change: int) -> None:
        with self.lock:
            self.inside += change
            self.most = max(self.most, self.inside)
            self.note(f"inside-{self.inside}")

    def note(self, what: str) -> None:
        with open(os.path.join(self.folder, what), "a") as file:
            file.write(f"{threading.current_thread().name}\n")

    def is_open(self) -> bool:
        return os.path.exists(os.path.join(self.folder, "open"))

    def sync(self) -> int:
        self._enter(1)
        try:
            while not self.is_open():
                time.sleep(0.005)
        finally:
            self._enter(-1)
        return self.most

    async def parts(self) -> AsyncIterator[int]:
        yield 1
        await self.coroutine()

    async def coroutine(self) -> int:
        self._enter(1)
        try:
            while not self.is_open():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.note("cancelled")
            raise
        finally:
            self._enter(-1)
        return self.most

    def quick(self) -> int:
        return self.most

    def __del__(self) -> None:
        self.note("finalized")


@pytest.fixture
def new_replica(hand):
    """A replica process that has no order yet; told to stop it exits, whatever became of it."""
    replica = hand.new_replica()
    yield replica
    replica.send(cm.StopReplica(replica=replica.tag, drain_s=5))
    wait_until(lambda: not replica.alive, 5, "the replica exits")


@pytest.fixture
def gate(tmp_path):
    """The folder of a Gate; opened at the test's end, so that no user code stays inside."""
    yield tmp_path
    (tmp_path / "open").touch()


def inside(gate: Path, count: int) -> Callable[[], bool]:
    return (gate / f"inside-{count}").exists


def streamed(replica: ReplicaByHand, method: str) -> m.Assignment:
    """Make an assignment of a call for parts."""
    (call,) = replica.calls(1, method=method)
    asked = pickle.loads(call.query.call)._replace(stream=True)
    return call._replace(query=call.query._replace(call=pickle.dumps(asked)))


def failed_answer(replica: ReplicaByHand) -> m.FailedAnswer:
    """Return the next answer that is an error."""
    heard = replica.hand.wait_for(
        m.AnswerQueries, lambda report: isinstance(report.answers[-1], m.FailedAnswer)
    )
    found: m.FailedAnswer = heard.message.answers[-1]
    return found


@pytest.mark.parametrize("method", ["sync", "coroutine"])
def test_max_ongoing_requests_holds_over_two_routers_that_know_nothing_of_each_other(
    replica_of, hand, gate, method
):
    replica = replica_of(Gate, str(gate), max_ongoing_requests=4)
    routers = [hand.router(), hand.router()]
    calls = [replica.calls(1, method=method) for _ in range(24)]
    for number, call in enumerate(calls):
        replica.run(call, router=routers[number % 2])
    wait_until(inside(gate, 4), 5, "four calls inside")
    flat = [call for (call,) in calls]
    rejected = replica.outcomes(flat[4:])
    assert set(rejected.values()) == {"rejected"}
    assert replica.check(1)[0].ongoing == 4
    (gate / "open").touch()
    assert set(replica.outcomes(flat[:4]).values()) == {200}
    assert replica.value(method="quick") == 4


class Unable:
    """Gives its queries back."""

    async def __call__(self) -> None:
        raise NotBegunError("not here")

    async def too_late(self) -> AsyncIterator[int]:
        yield 1
        raise NotBegunError("not here")


def test_what_user_code_gives_back_is_rejected_unless_an_answer_has_begun(replica_of):
    replica = replica_of(Unable, max_ongoing_requests=1)
    calls = replica.calls(1)
    for _ in range(2):  # it has its slot again
        replica.run(calls)
        assert replica.outcomes(calls) == {calls[0].ticket: "rejected"}
    late = streamed(replica, "too_late")
    replica.run([late])
    assert replica.outcomes([late]) == {late.ticket: 503}
    assert failed_answer(replica).kind == "NotBegunError"


def test_arguments_of_a_module_that_the_deployment_lacks_are_refused_by_its_name(replica_of, gate):
    replica = replica_of(Gate, str(gate))
    (call,) = replica.calls(1, method="quick")
    asked = pickle.loads(call.query.call)._replace(arguments=b"cno_such_module\nname\n.")
    call = call._replace(query=call.query._replace(call=pickle.dumps(asked)))
    replica.run([call])
    answer = replica.answer(call)
    assert isinstance(answer, m.FailedAnswer)
    assert answer.kind == "InvalidRequestError"
    assert "the deployment lacks (No module named 'no_such_module')" in answer.text
    assert replica.value(method="quick") == 0


def test_who_takes_parts_hears_that_a_router_has_ended_the_answer(replica_of, gate):
    replica = replica_of(Gate, str(gate))
    call = streamed(replica, "parts")
    replica.run([call])
    wait_until(inside(gate, 1), 5, "the call inside")
    replica.run(cancelled=[call.ticket])
    assert replica.outcomes([call]) == {call.ticket: 499}
    answer = failed_answer(replica)
    assert (answer.query_id, answer.kind) == (call.query.id, "RequestCancelledError")


def test_cancelled_sync_code_keeps_its_slot_until_it_returns(replica_of, gate):
    replica = replica_of(Gate, str(gate), max_ongoing_requests=1)
    calls = replica.calls(1, method="sync")
    replica.run(calls)
    wait_until(inside(gate, 1), 5, "the call inside")
    replica.run(cancelled=[calls[0].ticket])
    replica.run(cancelled=[calls[0].ticket, 10**9])  # a repeat, and a ticket that nobody has
    late = replica.calls(1, method="sync")
    replica.run(late)
    assert replica.outcomes(late) == {late[0].ticket: "rejected"}
    assert replica.check(1)[0].ongoing == 1
    (gate / "open").touch()
    assert replica.outcomes(calls) == {calls[0].ticket: 499}
    assert replica.check(2)[0].ongoing == 0


def test_max_ongoing_requests_of_a_running_replica_can_be_changed(replica_of, gate):
    replica = replica_of(Gate, str(gate), max_ongoing_requests=1)
    replica.reconfigure(2, max_ongoing_requests=6)
    calls = replica.calls(6, method="sync")
    replica.run(calls)
    wait_until(inside(gate, 6), 5, "six calls inside")
    replica.reconfigure(3, max_ongoing_requests=2)
    late = replica.calls(1, method="sync")
    replica.run(late)
    assert replica.outcomes(late) == {late[0].ticket: "rejected"}
    (gate / "open").touch()
    replica.outcomes(calls)
    replica.run(late)
    assert replica.outcomes(late) == {late[0].ticket: 200}


@pytest.mark.parametrize("method", ["sync", "coroutine"])
def test_a_query_ends_past_its_deadline_though_its_router_is_silent(replica_of, gate, method):
    replica = replica_of(Gate, str(gate), max_ongoing_requests=1)
    calls = [call._replace(timeout_s=0.5) for call in replica.calls(1, method=method)]
    replica.run(calls)
    answer = replica.answer(calls[0])
    assert answer.kind == "QueryTimeoutError"
    assert answer.text == "no answer within 0.5 s"
    if method == "sync":
        assert replica.check(1)[0].ongoing == 1
        (gate / "open").touch()
    assert replica.outcomes(calls) == {calls[0].ticket: 408}
    assert (gate / "cancelled").exists() == (method == "coroutine")
    assert replica.check(2)[0].ongoing == 0


@pytest.mark.parametrize("method", ["sync", "coroutine"])
def test_a_query_cancelled_in_the_message_that_brings_it_frees_its_slot(replica_of, gate, method):
    (gate / "open").touch()
    replica = replica_of(Gate, str(gate), max_ongoing_requests=1)
    for _ in range(20):
        calls = replica.calls(1, method=method)
        replica.run(calls, cancelled=[calls[0].ticket])
        assert set(replica.outcomes(calls).values()) <= {499, 200}
    assert replica.check(1)[0].ongoing == 0


def test_draining_finishes_what_runs_then_finalizes_and_exits(replica_of, gate):
    replica = replica_of(Gate, str(gate))
    calls = [*replica.calls(2, method="sync"), *replica.calls(2, method="coroutine")]
    replica.run(calls)
    wait_until(inside(gate, 4), 5, "four calls inside")
    replica.stop(drain_s=20)
    late = replica.calls(1, method="quick")
    replica.run(late)
    assert replica.outcomes(late) == {late[0].ticket: "rejected"}
    assert replica.alive
    assert not (gate / "finalized").exists()
    (gate / "open").touch()
    answers = [replica.answer(call) for call in calls]
    assert all(isinstance(answer, m.ValueAnswer) for answer in answers), answers
    wait_until(lambda: not replica.alive, 5, "the replica exits")
    assert (gate / "finalized").read_text().count("\n") == 1


class Finalizes:
    def __init__(self, path: str, how: str) -> None:
        self.path, self.how = path, how

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write("finalized\n")
        if self.how == "raises":
            raise RuntimeError("no")
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "exits":
            sys.exit(3)


@pytest.mark.parametrize(
    ("how", "drain_s"), [("returns", 20), ("raises", 20), ("exits", 20), ("hangs", 0.5)]
)
def test_a_finalizer_is_called_once_and_may_fail(replica_of, tmp_path, how, drain_s):
    replica = replica_of(Finalizes, str(tmp_path / "log"), how)
    replica.stop(drain_s=drain_s)
    wait_until(lambda: not replica.alive, 5, "the replica exits")
    assert (tmp_path / "log").read_text() == "finalized\n"


class Misbehaves:
    """Code that ends more than its own call."""

    def exits(self) -> None:
        sys.exit(3)

    async def exits_async(self) -> None:
        sys.exit(3)

    def interrupts(self) -> None:
        raise KeyboardInterrupt

    async def cancels_itself(self) -> None:
        raise asyncio.CancelledError

    def raises_cancelled(self) -> None:
        raise asyncio.CancelledError

    async def awaits_a_cancelled_task(self) -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await task

    def generator_exit(self) -> None:
        raise GeneratorExit

    def stop_iteration(self) -> None:
        raise StopIteration

    def works(self) -> str:
        return "works"

    async def works_async(self) -> str:
        return "works"


def test_whatever_user_code_raises_is_answered_and_the_replica_goes_on(replica_of):
    replica = replica_of(Misbehaves, max_ongoing_requests=1)
    methods = [name for name in vars(Misbehaves) if not name.startswith(("_", "works"))]
    for number, method in enumerate(methods):
        answer = replica.call(method=method)
        assert isinstance(answer, m.FailedAnswer), (method, answer)
        assert answer.kind == "UserCodeError"
        error = decode(answer, "it").error
        assert isinstance(error, Exception), "what is none would end who only asked"
        assert replica.value(method="works") == "works", method
        assert replica.value(method="works_async") == "works", method
        assert replica.check(number)[0].ongoing == 0, method


class Configured:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.healthy = True

    def reconfigure(self, config: Any) -> None:
        if config == "bad":
            raise ValueError("bad config")
        self.seen.append(config)

    def check_health(self) -> None:
        if not self.healthy:
            raise RuntimeError("I feel unwell")

    def fall_ill(self) -> None:
        self.healthy = False

    def configs(self) -> list[Any]:
        return self.seen


def test_user_config_and_health_are_the_users_methods(replica_of):
    replica = replica_of(Configured, user_config=1)
    replica.reconfigure(2, user_config=2)
    replica.reconfigure(3, user_config=2, max_ongoing_requests=7)
    report = replica.reconfigure(4, user_config="bad")
    assert "ValueError: bad config" in report.error
    assert report.state == "running"
    late = cm.ReconfigureReplica(replica=replica.tag, config={"user_config": 3}, config_id=3)
    replica.send(late)
    report = replica.check(1)[0]
    assert (report.config_id, report.error) == (4, "")
    assert replica.value(method="configs") == [1, 2]
    replica.value(method="fall_ill")
    assert "RuntimeError: I feel unwell" in replica.check(2)[0].error


class Reluctant:
    """Takes a user_config once a file is there, and not the one that says that."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    async def reconfigure(self, config: str) -> None:
        while not os.path.exists(self.gate):
            await asyncio.sleep(0.02)
        raise ValueError(f"{config} is refused")


def test_settings_are_taken_when_those_before_are(replica_of, gate):
    """What came last would else be acknowledged, and the refusal of what came first be late."""
    replica = replica_of(Reluctant, str(gate / "open"))
    for config_id, limit in [(2, 6), (3, 7)]:
        config = BackendConfig(user_config="it", max_ongoing_requests=limit).model_dump()
        replica.send(cm.ReconfigureReplica(replica=replica.tag, config=config, config_id=config_id))
    assert replica.check(1)[0].config_id == 1
    (gate / "open").touch()
    report = replica.report(lambda report: report.config_id == 3)
    assert "it is refused" in report.error


def test_a_user_config_beside_a_refused_setting_comes_with_the_next(replica_of):
    replica = replica_of(Configured, user_config=1)
    refused = replica.reconfigure(2, user_config=2, logging_config={"logs_dir": "/dev/null/logs"})
    assert "cannot be used" in refused.error
    assert replica.reconfigure(3, user_config=2).error == ""
    assert replica.value(method="configs") == [1, 2]


def test_a_user_config_that_was_refused_is_tried_again(replica_of):
    replica = replica_of(Configured, user_config=1)
    replica.reconfigure(2, user_config="bad")
    again = replica.reconfigure(3, user_config="bad", max_ongoing_requests=7)
    assert "bad config" in again.error


def test_threads_that_are_all_busy_while_calls_wait_are_reported(replica_of, gate):
    replica = replica_of(Gate, str(gate), health_check_timeout_s=0.6)
    assert replica.check(1)[0].trouble == ""
    calls = replica.calls(40, method="sync")
    replica.run(calls)
    wait_until(inside(gate, 32), 10, "all threads are busy")
    numbers = itertools.count(2)
    found = wait_until(lambda: replica.check(next(numbers))[0].trouble, 5, "it is told")
    assert "all 32 threads have been busy" in found
    assert "8 calls wait" in found
    assert replica.check(next(numbers))[0].error == "", "somebody waits for these"
    (gate / "open").touch()
    assert set(replica.outcomes(calls).values()) == {200}
    assert replica.check(next(numbers))[0].trouble == ""


def test_calls_that_hang_and_that_nobody_waits_for_make_a_replica_unhealthy(replica_of, gate):
    replica = replica_of(Gate, str(gate), max_ongoing_requests=3, health_check_timeout_s=0.6)
    calls = replica.calls(3, method="sync")
    replica.run(calls)
    wait_until(inside(gate, 3), 10, "all hang")
    replica.run(cancelled=[call.ticket for call in calls[:2]])
    time.sleep(1.0)  # longer than the limit: one of them is still wanted
    assert replica.check(1)[0].error == ""
    replica.run(cancelled=[calls[2].ticket])
    numbers = itertools.count(2)
    error = wait_until(lambda: replica.check(next(numbers))[0].error, 5, "it is unhealthy")
    assert "no caller waits for any more" in error
    (gate / "open").touch()
    wait_until(lambda: not replica.check(next(numbers))[0].error, 5, "it is well again")
    assert set(replica.outcomes(calls).values()) == {499}, "all slots are free"
    assert replica.value(method="quick") == 3


class Full:
    def fill(self) -> None:
        """Have no descriptor left, as code that opens files and does not close them."""
        taken = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, taken))
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)

    def __call__(self) -> str:
        return "here"


@pytest.mark.slow
def test_a_replica_that_can_make_no_link_for_lack_of_descriptors_ends(replica_of, running):
    """Whoever needs one would wait for ever, and its controller see it well."""
    replica = replica_of(Full)
    replica.value(method="fill")
    assert replica.value() == "here", "over the links that there are"
    assert is_alive(replica.process)
    with contextlib.closing(Hand(running.settings.admin_port)) as newcomer:
        newcomer.send(replica.address, cm.Identify(request_id="from a newcomer"))
        wait_until(lambda: not is_alive(replica.process), STARVED_S + 5, "it has ended")
    said = (running.settings.logs_dir / "replica.log").read_text()
    assert "for lack of descriptors" in said


class SlowAsyncInit:
    async def __init__(self, go: str) -> None:  # type: ignore[misc]
        while not os.path.exists(go):
            await asyncio.sleep(0.005)
        self.config: Any = None

    def reconfigure(self, config: Any) -> None:
        self.config = config

    def __call__(self) -> Any:
        return self.config


def test_a_config_that_comes_while_the_constructor_runs_is_applied_after_it(new_replica, tmp_path):
    replica = new_replica
    go = tmp_path / "go"
    code = packed(SlowAsyncInit, str(go))
    replica.send(replica.order(code, user_config="old"))
    replica.report(lambda report: report.state == "starting")
    config = dict(replica.order(code, user_config="new").config)
    replica.send(cm.ReconfigureReplica(replica=replica.tag, config=config, config_id=2))
    go.touch()
    replica.report(lambda report: report.state == "running" and report.config_id == 2)
    wait_until(lambda: replica.value() == "new", 5, "the newer config is applied")


def test_what_user_code_prints_goes_to_the_replicas_own_log(replica_of, running):
    def talk() -> None:
        print("said on stdout")
        print("said on stderr", file=sys.stderr)
        os.write(1, b"said by C code\n")
        os.system("echo said by a child")

    replica = replica_of(talk)
    replica.value()
    (log,) = running.settings.logs_dir.glob(f"replica-{replica.tag}*.log")
    text = log.read_text()
    for source in ("on stdout", "on stderr", "by C code", "by a child"):
        assert f"said {source}\n" in text


def test_a_start_order_that_is_repeated_starts_nothing_twice(hand, gate):
    replica = hand.new_replica()
    code = packed(Gate, str(gate))
    for _ in range(5):
        replica.send(replica.order(code))
    replica.report(lambda report: report.state == "running")
    calls = replica.calls(1, method="sync")
    replica.run(calls)
    wait_until(inside(gate, 1), 5, "the call inside")
    replica.start(code)
    assert replica.check(1)[0].ongoing == 1
    (gate / "open").touch()
    replica.outcomes(calls)
    replica.stop(drain_s=5)
    wait_until(lambda: not replica.alive, 5, "the replica exits")
    assert (gate / "finalized").read_text().count("\n") == 1


def test_messages_for_an_earlier_process_of_the_same_port_are_ignored(replica_of, hand, gate):
    replica = replica_of(Gate, str(gate))
    calls = replica.calls(2, method="sync")
    replica.run(calls, incarnation="of somebody dead")
    replica.send(cm.StopReplica(replica="somebody else", drain_s=0.0))
    order = replica.order(packed(Misbehaves), max_ongoing_requests=1)
    replica.send(cm.StartReplica(**{**fields(order), "replica": "somebody else", "config_id": 9}))
    replica.send(m.AnswerQueries(incarnation="of somebody dead", answers=()))
    report, _ = replica.check(1)
    assert (report.state, report.ongoing, report.config_id) == ("running", 0, 1)
    assert not (gate / "inside-1").exists()
    with pytest.raises(AssertionError, match="no QueriesFinished"):
        replica.outcomes(calls, timeout_s=0.2)


def test_a_replica_without_an_order_answers_and_takes_no_queries(new_replica):
    report, _ = new_replica.check(1)
    assert (report.state, report.queries_at) == ("idle", None)


@pytest.mark.parametrize("blob", [b"", b"no pickle", b"\x80\x05cno_such_module\nname\n."])
def test_code_that_cannot_be_unpickled_here_is_reported_with_the_reason(new_replica, blob):
    report = new_replica.start(blob)
    assert report.state == "failed"
    assert "cannot be unpickled on host" in report.error
    assert new_replica.check(1)[0].state == "failed"


class TooLargeToFail:
    """Its constructor raises what holds a megabyte."""

    def __init__(self) -> None:
        raise LookupError("x" * 2**20, b"x" * 2**20)

    def __call__(self) -> str:
        return "never"


def test_what_a_report_repeats_of_a_failure_is_bounded_before_it_travels(new_replica):
    for report in (new_replica.start(packed(TooLargeToFail)), new_replica.check(1)[0]):
        assert (report.state, report.exception) == ("failed", None)
        assert "LookupError" in report.error
        assert len(report.error) <= MAX_FAILURE
        assert bounded(report.error, None) == (report.error, None), "it is not cut twice"


class Unwell:
    """Its first check raises, or takes ``sleep_s``."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        self.sleep_s = sleep_s

    def check_health(self) -> None:
        if not self.sleep_s:
            raise LookupError("the index is empty")
        time.sleep(self.sleep_s)

    def __call__(self) -> str:
        return "never"


class UnwellAwaited(Unwell):
    async def check_health(self) -> None:  # type: ignore[override]
        super().check_health()


class UnwellOnItsThread(Unwell):
    """With one call at a time."""


@pytest.mark.parametrize("target", [Unwell, UnwellAwaited, UnwellOnItsThread])
def test_a_replica_that_fails_its_first_health_check_has_not_started(new_replica, target):
    config = {"max_ongoing_requests": 1} if target is UnwellOnItsThread else {}
    report = new_replica.start(packed(target), **config)
    assert report.state == "failed"
    assert "LookupError: the index is empty" in report.error


def test_a_first_health_check_that_takes_too_long_is_a_failed_start(new_replica):
    report = new_replica.start(packed(Unwell, 3.0), health_check_timeout_s=0.3)
    assert report.state == "failed"
    assert "check_health has not returned within 0.3 s, health_check_timeout_s" in report.error


def test_a_replica_serves_without_a_log_where_the_state_dir_takes_none(running, new_replica):
    """As on a host whose disk is full: what it prints goes to the host process's log."""
    in_the_way = running.settings.logs_dir / f"{replica_log(new_replica.tag)}.log"
    in_the_way.mkdir()
    try:
        report = new_replica.start(packed(Misbehaves))
        assert report.state == "running", report.error
        log = (running.settings.logs_dir / "replica.log").read_text()
        assert f"host.log has what {in_the_way.stem}.log would" in log
    finally:
        in_the_way.rmdir()


def fields(message: cm.StartReplica) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}


class Measured:
    """Its numbers, or what its file says instead."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def record_autoscaling_stats(self) -> Any:
        with open(self.path) as file:
            return eval(file.read())


def test_what_it_records_for_autoscaling_is_reported_and_failures_change_nothing(
    replica_of, tmp_path
):
    path, ids = tmp_path / "stats", itertools.count(1)
    path.write_text("{'gpu': 0.5, 'n': 3}")
    replica = replica_of(Measured, str(path), autoscaling_config={"max_replicas": 2})

    def reports(stats: dict[str, float]) -> bool:
        checked, _ = replica.check(next(ids))  # asks for the numbers, unless they are on their way
        assert not checked.error, "health is another matter"
        return bool(checked.stats == stats)

    wait_until(lambda: reports({"gpu": 0.5, "n": 3.0}), 10, "numbers in a report")
    for bad in ("[1]", "{'gpu': float('nan')}", "{i: i for i in range(99)}", "1 / 0"):
        path.write_text(bad)
        wait_until(lambda: reports({}), 10, f"none for {bad}")
        path.write_text("{'gpu': 1}")
        wait_until(lambda: reports({"gpu": 1.0}), 10, "numbers again")
