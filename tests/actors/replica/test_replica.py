"""Real replica processes, told by hand what a controller would tell them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.replica.data_plane import Queries
from greenroom.actors.runtime.logs import replica_log
from greenroom.actors.runtime.loop import STARVED_S
from greenroom.core.config import BackendConfig
from greenroom.core.lifecycle.replicas import MAX_FAILURE, bounded
from greenroom.serve.handle import DeploymentHandle
from tests.actors.by_hand import Hand, packed
from tests.actors.noting import Noting
from tests.support.systems import wait_until


@pytest.fixture
def new_replica(hand):
    """A replica process that has no order yet; told to stop it exits, whatever became of it."""
    replica = hand.new_replica()
    yield replica
    replica.send(cm.StopReplica(replica=replica.tag, drain_s=5))
    wait_until(lambda: not replica.alive, 5, "the replica exits")


class Gate(Noting):
    """Keeps calls inside until the folder has a gate."""

    def sync(self) -> None:
        self.note("inside")
        while not (self.folder / "gate").exists():
            time.sleep(0.005)

    async def coroutine(self) -> None:
        self.note("inside")
        while not (self.folder / "gate").exists():
            await asyncio.sleep(0.005)

    def __del__(self) -> None:
        self.note("finalized")


def test_draining_finishes_what_runs_then_finalizes_and_exits(replica_of, hand, noted, tmp_path):
    replica = replica_of(Gate, str(tmp_path))
    replica.run(*replica.calls(2, "sync"), *replica.calls(2, "coroutine"))
    noted("inside", count=4)
    replica.stop(drain_s=20)
    replica.run(*replica.calls(1, "sync"))
    hand.wait_for(m.QueriesFinished, lambda message: len(message.rejected) == 1)
    assert replica.alive
    assert "finalized" not in (tmp_path / "notes").read_text()
    (tmp_path / "gate").touch()
    answers: list[Any] = []
    while len(answers) < 4:
        answers += hand.wait_for(m.AnswerQueries).message.answers
    assert all(isinstance(answer, m.ValueAnswer) for answer in answers), answers
    wait_until(lambda: not replica.alive, 5, "the replica exits")
    assert (tmp_path / "notes").read_text().split() == [*["inside"] * 4, "finalized"]


class Late(Gate):
    """Lets a query in, and is held up before it counts it, until the folder has ``counts``."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)

        def look(queries: Any) -> bool:
            found = bool(vars(queries)["accepting"])
            self.note("looked")
            while (self.folder / "late").exists() and not (self.folder / "counts").exists():
                time.sleep(0.005)
            return found

        put = lambda queries, value: vars(queries).update(accepting=value)  # noqa: E731
        Queries.accepting = property(look, put)  # type: ignore[assignment]


def test_a_query_that_is_let_in_just_before_the_replica_drains_is_answered(
    replica_of, hand, noted, tmp_path
):
    replica = replica_of(Late, str(tmp_path))
    (tmp_path / "late").touch()
    replica.run(*replica.calls(1, "coroutine"))
    noted("looked")
    replica.stop(drain_s=20)
    time.sleep(0.1)  # in which it would leave, as nothing seems to run
    (tmp_path / "counts").touch()
    noted("inside")
    time.sleep(0.3)  # as above
    assert replica.alive
    assert "finalized" not in (tmp_path / "notes").read_text()
    (tmp_path / "gate").touch()
    (answer,) = hand.wait_for(m.AnswerQueries).message.answers
    assert isinstance(answer, m.ValueAnswer), answer
    wait_until(lambda: not replica.alive, 5, "the replica exits")


class Finalizes(Noting):
    how = "returns"

    def __call__(self) -> None: ...

    def __del__(self) -> None:
        self.note("finalized")
        if self.how == "raises":
            raise RuntimeError("no")
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "exits":
            sys.exit(3)


@pytest.mark.parametrize(
    ("how", "drain_s"), [("returns", 20), ("raises", 20), ("exits", 20), ("hangs", 0.5)]
)
def test_a_finalizer_is_called_once_and_may_fail(running, replica_of, tmp_path, how, drain_s):
    replica = replica_of(type("Its", (Finalizes,), {"how": how}), str(tmp_path))
    replica.stop(drain_s=drain_s)
    wait_until(lambda: not replica.alive, 5, "the replica exits")
    assert (tmp_path / "notes").read_text() == "finalized\n"
    said = (running.settings.logs_dir / "replica.log").read_text()
    assert (f"{replica.tag} did not end well" in said) is (how in {"raises", "exits"})


class Configured(Noting):
    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        while (self.folder / "hold").exists():
            time.sleep(0.005)
        self.note("made")

    def reconfigure(self, config: Any) -> None:
        if config == "bad":
            raise ValueError("bad config")
        self.note(f"config {config}")

    def check_health(self) -> None:
        if (self.folder / "ill").exists():
            raise RuntimeError("I feel unwell")

    def __call__(self) -> None: ...


def test_user_config_and_health_are_the_users_methods(replica_of, noted, tmp_path):
    replica = replica_of(Configured, str(tmp_path), user_config=1)
    replica.reconfigure(2, user_config=2)
    replica.reconfigure(3, user_config=2, max_ongoing_requests=7)
    report = replica.reconfigure(4, user_config="bad")
    assert "ValueError: bad config" in report.error
    assert report.state == "running"
    late = cm.ReconfigureReplica(replica=replica.tag, config={"user_config": 3}, config_id=3)
    replica.send(late)
    report = replica.check(1)[0]
    assert (report.config_id, report.error) == (4, "")
    assert noted("config ") == ["1", "2"]
    (tmp_path / "ill").touch()
    assert "RuntimeError: I feel unwell" in replica.check(2)[0].error


class Reluctant(Noting):
    """Takes a user_config once the folder has a gate, and then refuses it."""

    async def reconfigure(self, config: str) -> None:
        while not (self.folder / "gate").exists():
            await asyncio.sleep(0.02)
        raise ValueError(f"{config} is refused")

    def __call__(self) -> None: ...


def test_settings_are_taken_when_those_before_are(replica_of, tmp_path):
    """What came last would else be acknowledged, and the refusal of what came first be late."""
    replica = replica_of(Reluctant, str(tmp_path))
    for config_id, limit in [(2, 6), (3, 7)]:
        config = BackendConfig(user_config="it", max_ongoing_requests=limit).model_dump()
        replica.send(cm.ReconfigureReplica(replica=replica.tag, config=config, config_id=config_id))
    assert replica.check(1)[0].config_id == 1
    (tmp_path / "gate").touch()
    report = replica.report(lambda report: report.config_id == 3)
    assert "it is refused" in report.error


def test_a_user_config_beside_a_refused_setting_comes_with_the_next(replica_of, noted, tmp_path):
    replica = replica_of(Configured, str(tmp_path), user_config=1)
    refused = replica.reconfigure(2, user_config=2, logging_config={"logs_dir": "/dev/null/logs"})
    assert "cannot be used" in refused.error
    assert replica.reconfigure(3, user_config=2).error == ""
    assert noted("config ") == ["1", "2"]


def test_a_user_config_that_was_refused_is_tried_again(replica_of, tmp_path):
    replica = replica_of(Configured, str(tmp_path), user_config=1)
    replica.reconfigure(2, user_config="bad")
    again = replica.reconfigure(3, user_config="bad", max_ongoing_requests=7)
    assert "bad config" in again.error


def test_a_config_that_comes_while_the_constructor_runs_is_applied_after_it(
    new_replica, noted, tmp_path
):
    (tmp_path / "hold").touch()
    replica, code = new_replica, packed(Configured, str(tmp_path))
    replica.send(replica.order(code, user_config="old"))
    replica.report(lambda report: report.state == "starting")
    config = dict(replica.order(code, user_config="new").config)
    replica.send(cm.ReconfigureReplica(replica=replica.tag, config=config, config_id=2))
    (tmp_path / "hold").unlink()
    replica.report(lambda report: report.state == "running" and report.config_id == 2)
    wait_until(lambda: noted("config ")[-1] == "new", 5, "the newer config is applied")


def test_orders_that_are_repeated_or_for_another_start_nothing(replica_of, noted, tmp_path):
    replica = replica_of(Configured, str(tmp_path))
    code = packed(Configured, str(tmp_path))
    for _ in range(5):
        replica.send(replica.order(code))
    another = replica.order(code, max_ongoing_requests=1, replica="somebody else", config_id=9)
    for order in (another, cm.StopReplica(replica="somebody else", drain_s=0.0)):
        replica.send(order)
    replica.send(m.AnswerQueries(incarnation="of somebody dead", answers=()))
    report, _ = replica.check(1)
    assert (report.state, report.config_id) == ("running", 1)
    assert noted("made") == [""]


class Calling(Noting):
    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        for application in ("shop", "another"):
            self.note(f"calls {DeploymentHandle('Inner', application).endpoint}")


def test_handles_in_a_new_version_of_an_application_call_its_own_deployments(
    new_replica, noted, tmp_path
):
    """Else answers of a canary would be half of the old version."""
    order = new_replica.order(packed(Calling, str(tmp_path)))
    new_replica.send(replace(order, application="shop~new", backend="shop~new#Calling"))
    assert noted("calls ", count=2) == ["shop~new#Inner", "another#Inner"]


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

    def __call__(self) -> None: ...


def test_what_a_report_repeats_of_a_failure_is_bounded_before_it_travels(new_replica):
    for report in (new_replica.start(packed(TooLargeToFail)), new_replica.check(1)[0]):
        assert (report.state, report.exception) == ("failed", None)
        assert "LookupError" in report.error
        assert len(report.error) <= MAX_FAILURE
        assert bounded(report.error, None) == (report.error, None), "it is not cut twice"


def test_a_replica_that_fails_its_first_health_check_has_not_started(new_replica, tmp_path):
    (tmp_path / "ill").touch()
    report = new_replica.start(packed(Configured, str(tmp_path)))
    assert report.state == "failed"
    assert "RuntimeError: I feel unwell" in report.error


class Measured:
    def __call__(self) -> None: ...

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"gpu": 0.5}


def test_what_it_records_for_autoscaling_is_reported(replica_of):
    replica = replica_of(Measured, autoscaling_config={"max_replicas": 2})
    replica.check(1)
    replica.report(lambda report: report.stats == {"gpu": 0.5})


class Full:
    """Its second check has no descriptor left, as code that opens files and does not close them."""

    checks = 0

    def check_health(self) -> None:
        self.checks += 1
        if self.checks == 2:
            taken = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken, taken))
            with contextlib.suppress(OSError):
                while True:
                    os.dup(0)

    def __call__(self) -> None: ...


@pytest.mark.slow
def test_a_replica_that_can_make_no_link_for_lack_of_descriptors_ends(replica_of, running):
    """Whoever needs one would wait for ever, and its controller see it well."""
    replica = replica_of(Full)
    for number in (1, 2):
        assert replica.check(number)[0].error == "", "over the links that there are"
    with contextlib.closing(Hand(running.settings.admin_port)) as newcomer:
        newcomer.send(replica.address, cm.Identify(request_id="from a newcomer"))
        wait_until(lambda: not replica.alive, STARVED_S + 5, "it has ended")
    said = (running.settings.logs_dir / "replica.log").read_text()
    assert "for lack of descriptors" in said


class Talks:
    def __init__(self) -> None:
        print("said on stdout")
        print("said on stderr", file=sys.stderr)
        os.write(1, b"said by C code\n")
        os.system("echo said by a child")

    def __call__(self) -> None: ...


def test_what_user_code_prints_goes_to_the_replicas_own_log(replica_of, running):
    replica = replica_of(Talks)
    (log,) = running.settings.logs_dir.glob(f"replica-{replica.tag}*.log")
    text = log.read_text()
    for source in ("on stdout", "on stderr", "by C code", "by a child"):
        assert f"said {source}\n" in text


def test_a_replica_serves_without_a_log_where_the_state_dir_takes_none(running, new_replica):
    """As on a host whose disk is full: what it prints goes to the host process's log."""
    in_the_way = running.settings.logs_dir / f"{replica_log(new_replica.tag)}.log"
    in_the_way.mkdir()
    try:
        report = new_replica.start(packed(Measured))
        assert report.state == "running", report.error
        log = (running.settings.logs_dir / "replica.log").read_text()
        assert f"host.log has what {in_the_way.stem}.log would" in log
    finally:
        in_the_way.rmdir()
