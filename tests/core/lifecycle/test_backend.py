"""Whole lives of a backend's replicas, seen through a cluster with a world around it."""

import re

import pytest

from greenroom.core.cluster import status
from greenroom.core.effects import CheckReplica, Kill, ReconfigureReplica, Start, StopReplica
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.failures import DEATH, OF_STARTS, PATIENCE_S, Failures
from greenroom.core.lifecycle.health import MAX_EJECTIONS, MAX_MISSED_CHECKS
from greenroom.core.lifecycle.orders import (
    KILL_MARGIN_S,
    RELEASE_TIMEOUT_S,
    SILENT_EXIT_S,
    SILENT_START_S,
)
from greenroom.core.lifecycle.replicas import MAX_FAILURE, Replica, RestartReason, bounded
from greenroom.core.lifecycle.shown import trouble
from greenroom.core.long_poll import NOTHING_SEEN
from greenroom.core.records import BACKEND
from tests.core import requests as ask
from tests.core.worlds import BROKEN, Process, World, made


def world_with(tag: str = "b", code: bytes = b"code", **config: object) -> World:
    world = World()
    world.request(ask.create(tag, code, **config))
    return world


def backend(world: World) -> Backend:
    return world.cluster.state.backends["b"]


def states(world: World) -> list[str]:
    return [replica.state.value for replica in backend(world).replicas.values()]


def running_world(**config: object) -> World:
    world = world_with(**config)
    world.converge()
    world.effects.clear()
    return world


def checks(world: World) -> list[tuple[str, int]]:
    return [(each.replica, each.check_id) for each in world.sent(CheckReplica)]


# --- Settings -----------------------------------------------------------------------------------


def test_new_settings_try_a_backend_again_that_had_failed() -> None:
    world = World()
    goal = world.complete(ask.create("b", BROKEN, max_constructor_retry_count=1))
    assert world.goal_state(goal) == "failed"
    again = world.request(ask.update("b", user_config=1))
    world.flush()
    assert world.goal_state(again) == "pending"
    assert states(world) == ["STARTING"]
    world.converge()
    assert world.goal_state(again) == "failed"


# --- Start --------------------------------------------------------------------------------------


def test_a_replica_is_saved_before_its_process_is_asked_for() -> None:
    world = World()
    made(world.cluster, ask.create("b"))
    effects = world.cluster.advance(world.now)
    saved = world.cluster.take_changes().puts["backend", "b"]
    assert [effect.replica for effect in effects if isinstance(effect, Start)] == list(
        saved.replicas
    )


def test_replicas_start_run_and_are_published() -> None:
    world = world_with(num_replicas=2)
    assert states(world) == ["STARTING", "STARTING"]
    assert world.table("backend/b") is None
    world.converge()
    assert states(world) == ["RUNNING", "RUNNING"]
    assert [r.process for r in world.table("backend/b").replicas] == world.running("b")
    assert world.records["backend"]["b"].newest.ran


def test_start_is_repeated_until_the_process_reports() -> None:
    world = world_with()
    assert len(world.sent(Start)) == 1
    world.reports.clear()  # lost
    world.wait(1.0)
    assert len(world.sent(Start)) == 1
    world.wait(5.0)
    assert world.sent(Start) == [], "it has reported that it is starting"


def test_a_replica_that_starts_for_long_is_asked_whether_its_report_was_lost() -> None:
    world = world_with(health_check_period_s=3)
    world.flush()
    tag = next(iter(world.processes))
    world.processes[tag].state = "running"  # and its report is lost
    world.effects.clear()
    world.wait(2.9)
    assert world.effects == []
    world.wait(0.1)
    assert checks(world) == [(tag, 0)]
    assert states(world) == ["RUNNING"]


def test_a_process_that_never_reports_is_killed_and_replaced() -> None:
    world = world_with()
    first = next(iter(world.processes))
    world.processes[first].stuck = True
    world.reports.clear()
    world.wait(SILENT_START_S + 1)
    assert first in {effect.replica for effect in world.sent(Kill)}
    assert "its process did not report" in trouble(backend(world))
    assert len(backend(world).replicas) == 2
    world.wait(20 + KILL_MARGIN_S + SILENT_EXIT_S)
    assert first not in world.recorded()
    world.thaw()
    world.converge()
    assert set(world.processes) == world.recorded(), "the late one was told to go"


# --- Crashes and constructors -------------------------------------------------------------------


def test_a_replica_that_dies_is_replaced_at_once() -> None:
    world = running_world()
    first = world.running("b")[0].tag
    world.die(first)
    world.flush()
    assert states(world) == ["STARTING"]
    assert first not in world.recorded()
    message = f"a replica's process died; see: greenroom logs {first}"
    assert trouble(backend(world)) == message
    world.converge()
    assert trouble(backend(world)) == ""
    assert world.running("b")[0].tag != first


def test_how_a_process_died_is_reported_where_it_is_known() -> None:
    world = running_world()
    first = world.running("b")[0].tag
    world.cluster.replica_exited(first, world.now, "SIGSEGV")
    world.flush()
    message = f"a replica's process died: SIGSEGV; see: greenroom logs {first}"
    assert trouble(backend(world)) == message


def test_replicas_that_keep_dying_are_replaced_more_and_more_slowly() -> None:
    world = running_world()
    pauses = []
    for _ in range(5):
        world.die(world.running("b")[0].tag)
        died_at = world.now
        world.flush()
        while not backend(world).replicas:
            world.now = world.cluster.next_due_at()
            world.flush()
        pauses.append(round(world.now - died_at, 2))
        world.converge()
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8]


def test_code_that_served_is_back_within_a_second_however_often_it_is_killed() -> None:
    world = running_world(num_replicas=2)
    for _ in range(15):
        world.wait(1.5)
        for process in world.running("b"):
            world.die(process.tag)
        died_at = world.now
        world.flush()
        while not any(state == "STARTING" for state in states(world)):
            world.now = world.cluster.next_due_at()
            world.flush()
        assert world.now - died_at <= 1.0
        world.converge()


@pytest.mark.parametrize(
    ("replicas", "retries", "expected"),
    [(1, 20, 9), (2, 20, 9), (50, 20, 9), (1, 5, 5), (1, 2, 2), (3, 1, 1)],
)
def test_code_that_cannot_start_fails_after_some_tries_and_seconds(
    replicas: int, retries: int, expected: int
) -> None:
    world = World()
    goal = world.request(
        ask.create("b", BROKEN, num_replicas=replicas, max_constructor_retry_count=retries)
    )
    began_at, tries = world.now, 0
    while world.goal_state(goal) == "pending":
        world.flush()
        tries += any(process.state == "starting" for process in world.processes.values())
        world.work()
        world.now += 0.05
    assert tries == expected
    if retries == 20:
        assert PATIENCE_S < world.now - began_at < PATIENCE_S + 1.0
    assert world.cluster.state.goal(goal).error == "boom"
    assert world.cluster.state.goal(goal).exception == b"pickled boom"
    world.converge()
    assert world.processes == {}
    assert world.table("backend/b").unavailable == "it could not be started"
    assert not backend(world).record.newest.ran


@pytest.mark.parametrize("more", [0, 1])
def test_what_code_raises_is_reported_up_to_a_size(more: int) -> None:
    raised = b"x" * (MAX_FAILURE + more)
    message = "frames" + "-" * MAX_FAILURE * 3 * more + "cause"
    error, exception = bounded(message, raised)
    assert exception == (None if more else raised)
    assert (error[:6], error[-5:]) == ("frames", "cause")
    assert (error == message) is (more == 0)
    assert len(error) <= MAX_FAILURE


def test_the_first_failure_of_a_start_is_shown_at_once() -> None:
    world = World()
    world.request(ask.create("b", BROKEN))
    world.go_on(2, 0.05)
    shown = status.backends(world.cluster)["b"]["message"]
    assert shown.endswith("1 of at most 20 try to start it has failed, the last one: boom")


def test_a_deployment_whose_dependency_is_down_for_seconds_comes_up() -> None:
    world = World()
    goal = world.request(ask.create("b", BROKEN, num_replicas=30))
    world.go_on(130, 0.1)
    shown = status.backends(world.cluster)["b"]
    assert shown["status"] == "UPDATING"
    message = "of at most 20 tries to start it have failed, the last one: boom"
    assert shown["message"].endswith(message)
    world.code[next(iter(world.code))] = b"its dependency is up"
    world.converge()
    assert world.goal_state(goal) == "succeeded"
    assert len(world.running("b")) == 30


def test_what_has_served_does_not_fail_though_it_never_came_up_in_full() -> None:
    world = world_with(num_replicas=2, max_constructor_retry_count=2)
    world.flush()
    one, other = world.processes.values()
    one.state, other.code = "running", BROKEN
    world.report(one)
    world.flush()
    world.code[next(iter(world.code))] = BROKEN
    world.boot()  # that is on disk
    world.go_on(20, 10.0)
    assert not backend(world).record.failure
    assert one in world.running("b")
    assert "tries to start it have failed, the last one: boom" in trouble(backend(world))


def test_scaling_up_keeps_what_runs() -> None:
    world = running_world()
    before = world.running("b")
    goal = world.request(ask.update("b", num_replicas=3))
    assert world.goal_state(goal) == "pending"
    world.converge()
    assert world.running("b")[:1] == before
    assert len(world.running("b")) == 3
    assert world.goal_state(goal) == "succeeded"


# --- Scale and stop -----------------------------------------------------------------------------


def test_scaling_down_takes_those_first_that_do_not_run_then_the_newest() -> None:
    world = running_world(num_replicas=2)
    oldest = world.running("b")
    world.now += 1
    world.complete(ask.update("b", num_replicas=3))
    newest = world.running("b")[2]
    world.request(ask.update("b", num_replicas=4))
    world.flush()
    world.request(ask.update("b", num_replicas=2))
    world.flush()
    assert newest.state == "draining"
    assert oldest == world.running("b")


def test_a_replica_is_asked_to_stop_only_when_proxies_have_let_go_of_it() -> None:
    world = running_world(num_replicas=2)
    world.request(ask.update("b", num_replicas=1))
    assert sorted(states(world)) == ["RUNNING", "SHOULD_STOP"]
    assert world.sent(StopReplica) == []
    world.flush()  # the proxy takes the table, and says so
    assert len(world.table("backend/b").replicas) == 1
    assert len(world.sent(StopReplica)) == 1
    assert sorted(states(world)) == ["RUNNING", "STOPPING"]


def test_a_silent_proxy_holds_a_stop_up_for_a_while_only() -> None:
    world = running_world(num_replicas=2)
    world.cluster.state.long_poll.listen("silent", (1, 1, "silent"), NOTHING_SEEN, "silent")
    world.request(ask.update("b", num_replicas=1))
    world.wait(RELEASE_TIMEOUT_S - 0.1)
    assert world.sent(StopReplica) == []
    world.wait(0.1)
    assert len(world.sent(StopReplica)) == 1


def test_a_replica_that_does_not_stop_is_asked_again_and_killed_in_the_end() -> None:
    world = running_world(graceful_shutdown_timeout_s=3.5)
    process = world.running("b")[0]
    world.request(ask.delete("b"))
    process.stuck = True
    world.flush()
    stopped_at = world.now
    kills: list[float] = []
    while not kills:
        world.now = world.cluster.next_due_at()
        world.turn()
        kills = [world.now for effect in world.effects if isinstance(effect, Kill)]
    stops = world.sent(StopReplica)
    assert [stop.drain_s for stop in stops] == [3.5] * 5
    assert kills == [stopped_at + 3.5 + KILL_MARGIN_S]
    world.converge()
    assert world.recorded() == set()


def test_a_kill_is_not_repeated_all_the_time() -> None:
    world = running_world(graceful_shutdown_timeout_s=0)
    world.request(ask.delete("b"))
    world.running("b")[0].stuck = True
    world.watched.clear()  # so that the kill does not work
    world.wait(5.0)
    assert 1 <= len(world.sent(Kill)) <= 5


def test_a_forced_delete_does_not_wait_for_queries() -> None:
    world = running_world()
    world.request(ask.delete("b", force=True))
    world.flush()
    assert [stop.drain_s for stop in world.sent(StopReplica)] == [0.0]


# --- Health checks ------------------------------------------------------------------------------


def test_a_lowered_period_holds_for_the_check_that_was_planned_before() -> None:
    world = running_world(health_check_period_s=3600)
    world.wait(1)
    assert world.sent(CheckReplica) == []
    world.request(ask.update("b", health_check_period_s=2))
    world.wait(2.5)
    assert checks(world) == [(world.running("b")[0].tag, 1)]


def test_a_check_that_says_nothing_new_checks_none_of_the_other_replicas() -> None:
    world = running_world(num_replicas=3, health_check_period_s=10)
    well, sick, _ = world.running("b")
    agenda = world.cluster.state.agenda
    for process in (well, sick):
        agenda.take(BACKEND, world.now)
        check_id = backend(world).replicas[process.tag].check_id + 1
        while backend(world).replicas[process.tag].check_id < check_id:
            world.now += 1.0
            world.cluster.advance(world.now)
        process.sick = process is sick
        world.cluster.replica_reported(process.report(check_id), world.now)
        assert agenda.take(BACKEND, world.now) == (["b"] if process is sick else [])


def test_checks_that_are_due_soon_are_sent_together() -> None:
    world = running_world(num_replicas=20, health_check_period_s=10)
    for number, replica in enumerate(backend(world).replicas.values()):
        replica.ask_at = world.now + 9 + number / 20  # as after starts one after the other
    for _ in range(3):
        world.effects.clear()
        ends_at = world.now + 30
        sent: dict[float, int] = {}
        while world.now < ends_at:
            world.wait(0.05)
            if count := len(world.sent(CheckReplica)):
                sent[world.now] = count
                world.effects.clear()
        assert set(sent.values()) == {20}, sent
        assert len(sent) in {2, 3}, sent


def test_three_failed_checks_replace_a_replica() -> None:
    world = running_world(health_check_period_s=2)
    sick = world.running("b")[0]
    sick.sick = True
    world.wait(5.0)
    assert sick in world.running("b")
    world.wait(1.0)
    assert sick.state == "draining"
    assert "failed 3 health checks" in trouble(backend(world))
    world.converge()
    assert world.running("b") != [sick]


def be_sick(world: World, seconds: float) -> int:
    """Let every replica fail its checks; return how many were replaced."""
    end, before = world.now + seconds, set(backend(world).replicas)
    seen = set(before)
    while world.now < end:
        for process in world.processes.values():
            process.sick = True
        world.flush()
        world.work()
        world.flush()
        seen |= backend(world).replicas.keys()
        world.now = min(world.cluster.next_due_at() or end, world.now + 1.0)
    return len(seen - before)


def test_where_fresh_replicas_fail_their_checks_too_they_are_replaced_less_and_less_often() -> None:
    world = running_world(health_check_period_s=10)
    first_hour = be_sick(world, 3_600)
    assert 8 < first_hour < 20
    world.sent(CheckReplica)
    next_hour = be_sick(world, 3_600)
    assert next_hour <= 12, "one in five minutes"
    serving = sum(isinstance(effect, CheckReplica) for effect in world.effects)
    assert serving > 330, "and they serve, and are checked, nearly all of the time"
    for process in world.processes.values():
        process.sick = False
    world.wait(20)
    assert status.backends(world.cluster)["b"]["message"] == ""
    be_sick(world, 40)
    assert len(world.sent(StopReplica)) >= 1, "the first one is replaced at once again"


def test_the_status_shows_what_a_health_check_raised_until_one_passes() -> None:
    world = running_world(health_check_period_s=10)

    def shown() -> tuple[str, str]:
        state = status.backends(world.cluster)["b"]
        return state["status"], state["message"]

    be_sick(world, 12)
    assert shown()[0] == "HEALTHY"
    message = r"the health check of b#\w{6} failed 1 of 3 times, the last time: boom"
    assert re.fullmatch(message, shown()[1])
    be_sick(world, 25)
    assert shown()[1].endswith("failed 3 health checks, the last one: boom")
    be_sick(world, 65)
    assert shown()[0] == "UNHEALTHY", "it serves on, for the next one would fail as well"
    assert shown()[1].endswith("the last time: boom")


def test_a_constructor_without_end_is_reported_and_ended() -> None:
    world = world_with(constructor_timeout_s=100)
    world.flush()
    first = next(iter(world.processes))
    world.wait(65)
    world.turn()
    message = status.backends(world.cluster)["b"]["message"]
    assert message == f"0 of 1 replicas run; the constructor of {first} has been running for 65 s"
    world.wait(36)
    assert first not in world.processes
    assert "did not return within constructor_timeout_s=100" in trouble(backend(world))
    world.converge()


def test_checks_without_an_answer_count_when_their_time_is_up() -> None:
    world = running_world(
        health_check_period_s=2, health_check_timeout_s=5, graceful_shutdown_timeout_s=1
    )
    stuck = world.running("b")[0]
    stuck.stuck = True
    world.wait(2 + 3 * 5 - 0.1)
    assert len(world.sent(CheckReplica)) == MAX_MISSED_CHECKS
    assert backend(world).converged
    world.wait(0.1)
    assert not backend(world).converged
    world.converge()
    assert not stuck.alive
    assert backend(world).converged


def test_one_that_fails_where_others_do_not_is_shown_and_replaced_if_that_lasts() -> None:
    world = running_world(num_replicas=2, graceful_shutdown_timeout_s=1)
    bad = world.running("b")[0]

    def health() -> tuple[str, str]:
        shown = status.backend_status(world.cluster, backend(world))
        return shown["status"], shown["message"]

    world.cluster.replica_ejected(bad.tag, "p1", 1)
    message = f"{bad.tag} fails where other replicas do not: for a while it gets no queries"
    assert health() == ("UNHEALTHY", f"{message}; its log says why")
    world.cluster.replica_ejected(bad.tag, "p2", MAX_EJECTIONS - 1)
    world.converge()
    assert bad.alive
    world.cluster.replica_ejected(bad.tag, "p1", 0)
    assert f"{MAX_EJECTIONS - 1} times in a row" in health()[1]
    world.cluster.state.gone.proxy("p2")
    assert health() == ("HEALTHY", "")
    world.cluster.replica_ejected(bad.tag, "p1", MAX_EJECTIONS)
    world.converge()
    assert not bad.alive
    assert states(world) == ["RUNNING", "RUNNING"]
    assert f"{MAX_EJECTIONS} times in a row" in health()[1], "why it was replaced"
    world.wait(15)
    assert health() == ("HEALTHY", ""), "after the next health checks"


def wear_out(world: World, *processes: Process) -> None:
    for process in processes:
        process.worn = f"{RestartReason.MAX_AGE}: it has run for 3 s"
        world.report(process)


def test_worn_replicas_are_replaced_one_at_a_time_by_fresh_ones_that_run_before() -> None:
    world = running_world(num_replicas=3, graceful_shutdown_timeout_s=1)
    world.wait(60)
    old = world.running("b")
    wear_out(world, *old)
    most, fewest = 0, 3
    for _ in range(100):
        world.go_on(1, 0.5)
        most = max(most, sum(process.alive for process in world.processes.values()))
        fewest = min(fewest, len(world.table("backend/b").replicas))
    assert (fewest, most) == (3, 4)
    assert not any(process.alive for process in old)
    assert states(world) == ["RUNNING"] * 3
    shown = status.backend_status(world.cluster, backend(world))
    assert (shown["status"], shown["message"]) == ("HEALTHY", "")


def test_those_that_are_worn_as_soon_as_they_run_are_replaced_with_growing_pauses() -> None:
    world = running_world(graceful_shutdown_timeout_s=1)
    pauses: list[float] = []
    for _ in range(5):
        (old,) = world.running("b")
        began_at = world.now
        wear_out(world, old)
        while old.alive:
            assert world.now < began_at + 1_000
            world.wait(5)
            world.work()
        pauses.append(world.now - began_at)
        world.converge()
    assert max(pauses[:2]) <= 10, "one may be a chance"
    assert 50 < pauses[2] < 75
    assert 110 < pauses[3] < 135


def test_one_that_dies_worn_has_died_of_that() -> None:
    world = running_world(num_replicas=1)
    (old,) = world.running("b")
    old.worn = "out of memory: it has 30 MiB"
    world.report(old)
    world.flush()
    world.die(old.tag)
    world.flush()
    assert backend(world).failures.last_error == "out of memory: it has 30 MiB"
    assert restarts(world) == {"out of memory": 1}, "once"


def restarts(world: World) -> dict[str, int]:
    """Return what status shows, after comparing it with the metrics."""
    shown = status.backend_status(world.cluster, backend(world)).get("restarts", {})
    ((_, families),) = status.metrics(world.cluster, "h")
    (counted,) = [each for each in families if each.name == "greenroom_replica_restarts_total"]
    assert counted.samples == {("b", each.value): shown.get(each, 0) for each in RestartReason}
    return dict(shown)


def test_replicas_that_are_replaced_are_counted_by_reason() -> None:
    world = running_world(num_replicas=2, graceful_shutdown_timeout_s=1)
    assert restarts(world) == {}
    world.die(world.running("b")[0].tag)
    world.converge()
    world.die(world.running("b")[0].tag, "out of memory: SIGKILL by the kernel")
    world.converge()
    wear_out(world, world.running("b")[0])
    world.converge()
    world.running("b")[0].sick = True
    world.wait(60)
    world.cluster.replica_ejected(world.running("b")[0].tag, "p1", MAX_EJECTIONS)
    world.converge()
    world.wait(60)
    expected = dict.fromkeys(("crashed", "out of memory", "unhealthy", "ejected", "max_age_s"), 1)
    assert restarts(world) == expected


def test_starts_that_fail_are_counted() -> None:
    world = world_with(code=BROKEN, max_constructor_retry_count=2)
    world.converge()
    world.wait(PATIENCE_S)
    assert restarts(world) == {"failed start": 2}


def test_a_replica_that_says_it_drains_is_replaced_before_it_is_gone() -> None:
    """A controller that died may have told it to stop."""
    world = running_world(health_check_period_s=2)
    world.wait(2)
    old = world.running("b")[0]
    old.state = "draining"
    world.report(old)
    world.flush()
    assert sorted(states(world)) == ["STARTING", "STOPPING"]
    assert world.table("backend/b").replicas == ()
    old.sick = True
    (check,) = checks(world)
    world.report(old, check[1])
    world.flush()
    assert backend(world).failures.last_error == "", "its health is nobody's concern any more"


# --- Config -------------------------------------------------------------------------------------


def test_a_config_that_got_lost_is_sent_again_after_the_next_check() -> None:
    world = running_world(health_check_period_s=2)
    process = world.running("b")[0]
    process.stuck = True
    world.request(ask.update("b", user_config=1))
    process.mailbox.clear()
    process.stuck = False
    world.wait(2.5)
    assert process.reconfigured == [2]
    assert len(world.sent(ReconfigureReplica)) == 2
    assert backend(world).converged


def test_a_config_whose_report_got_lost_counts_after_the_next_check() -> None:
    world = running_world(health_check_period_s=2)
    goal = world.request(ask.update("b", user_config=1))
    world.reports.clear()
    world.wait(2.5)
    assert world.goal_state(goal) == "succeeded"
    assert world.running("b")[0].reconfigured == [2]


# --- A controller that starts again ---------------------------------------------------------------


def test_proxies_hear_nothing_until_a_new_controller_knows_what_runs() -> None:
    world = running_world(num_replicas=2)
    table = world.table("backend/b")
    world.boot()
    stuck = world.running("b")[0]
    stuck.stuck = True
    world.flush()
    assert world.table("backend/b") is table
    world.wait(1.9)
    assert world.table("backend/b") is table
    world.wait(0.2)
    assert [r.tag for r in world.table("backend/b").replicas] == [world.running("b")[1].tag]


def test_a_new_controller_stops_the_surplus_and_keeps_what_runs() -> None:
    """The one told to stop before the crash is the one to go, whichever is recorded first."""
    for index in (0, 1):
        world = running_world(num_replicas=2)
        leaving, staying = world.running("b")[index], world.running("b")[1 - index]
        world.request(ask.update("b", num_replicas=1))
        leaving.state = "draining"
        world.boot()
        world.converge()
        assert world.running("b") == [staying]
        assert world.recorded() == {staying.tag}


def test_code_that_is_stored_is_not_saved_again() -> None:
    world = running_world()
    made(world.cluster, ask.create("other"))
    assert b"code" not in world.cluster.take_changes().puts.values()
    made(world.cluster, ask.create("another", b"other code"))
    assert b"other code" in world.cluster.take_changes().puts.values()


def test_the_longest_time_to_drain_follows_the_backends() -> None:
    world = running_world(graceful_shutdown_timeout_s=5.0)
    state = world.cluster.state
    assert state.longest_drain_s() == 5.0
    world.complete(ask.create("other", graceful_shutdown_timeout_s=90.0))
    assert state.longest_drain_s() == 90.0
    world.complete(ask.update("other", graceful_shutdown_timeout_s=1.0))
    assert state.longest_drain_s() == 5.0
    made(world.cluster, ask.create("new", graceful_shutdown_timeout_s=60.0))
    assert state.longest_drain_s() == 60.0, "it has no replica yet"
    world.complete(ask.delete("new"))
    world.complete(ask.delete("b"))
    world.complete(ask.delete("other"))
    assert state.longest_drain_s() == 20.0


# --- The parts ------------------------------------------------------------------------------------


def test_only_deaths_in_quick_succession_are_a_crash_loop() -> None:
    failures, replica = Failures(), Replica("b#1", release=1)

    def starts_at(release: int) -> float:
        return failures.pause_ends_at(release, *OF_STARTS)

    for number in range(10):
        replica.since = 32.0 * number
        failures.add(DEATH, replica, replica.since + 31.0, ran_s=31.0)
    assert starts_at(1) == 0.0, "each one had run for long, and is replaced at once"
    for number in range(3):
        replica.since = 400.0 + 30.0 * number
        failures.add(DEATH, replica, replica.since + 29.0, ran_s=29.0)
    assert starts_at(1) == replica.since + 29.0 + 0.2
    assert starts_at(2) == 0.0, "another release's failures say nothing of it"


def test_routers_hear_why_nothing_has_run_yet_until_something_has() -> None:
    world = world_with(code=BROKEN)
    world.go_on(3, 5.0)
    table = world.table("backend/b")
    assert not table.has_run
    assert table.trouble.endswith("boom")
    world.code[next(iter(world.code))] = b"its dependency is up"
    world.converge()
    assert world.table("backend/b").has_run
    assert world.table("backend/b").trouble == ""
    for tag in list(world.processes):
        world.die(tag)
    world.flush()
    assert world.table("backend/b").replicas == ()
    assert world.table("backend/b").has_run, "the next one is on its way"


def test_what_the_first_query_is_to_wake_is_waited_for() -> None:
    world = world_with(autoscaling_config={"min_replicas": 0, "max_replicas": 2})
    world.flush()
    assert world.table("backend/b").has_run
