"""Updates one replica after another, and back again when the new version cannot run."""

from __future__ import annotations

import itertools

import pytest

from greenroom.core.cluster import status
from greenroom.core.lifecycle.replicas import RestartReason
from tests.core import requests as ask
from tests.core.worlds import BROKEN, REFUSED, Spec, World

D = "app#d"


def world_with(replicas: int, **config: object) -> World:
    world = World()
    world.complete(ask.version(b"one", num_replicas=replicas, **config))
    return world


def serving(world: World) -> int:
    """Return how many replicas routers may send to, and that run."""
    return sum(r.process.state == "running" for r in world.table(f"backend/{D}").replicas)


def watch(world: World, steps: int = 400) -> tuple[int, int]:
    """Let it settle, one thing after another; return the fewest serving and the most processes."""
    fewest, most = serving(world), len(world.processes)
    for _ in range(steps):
        starting = [p for p in world.processes.values() if p.state in {"starting", "draining"}]
        if world.deliver():
            pass  # time stands still while anything is under way
        elif starting:
            one = starting[0]
            if one.state == "draining":
                world.die(one.tag)
            else:
                one.state = "failed" if one.code.startswith(BROKEN) else "running"
                world.report(one)
        elif world.has_converged():
            return fewest, most
        elif (due_at := world.cluster.next_due_at()) is not None:
            world.now = max(world.now, due_at)
            world.turn()
        fewest, most = min(fewest, serving(world)), max(most, len(world.processes))
    raise AssertionError(world.describe())


@pytest.mark.parametrize("before", [1, 2, 5, 7, 20])
@pytest.mark.parametrize("after", [1, 2, 5, 7, 20])
def test_there_are_never_fewer_than_before_nor_more_than_a_fifth_above(
    before: int, after: int
) -> None:
    world = world_with(before)
    world.request(ask.version(b"two", num_replicas=after))
    fewest, most = watch(world)
    assert fewest >= min(before, after)
    assert most <= max(before, after) + -(-after // 5)  # a fifth, rounded up
    assert [process.code for process in world.running(D)] == [b"two"] * after


def test_an_update_starts_as_many_more_as_its_surge_allows() -> None:
    world = world_with(4)
    world.request(ask.version(b"two", num_replicas=4, max_surge_percent=50))
    assert watch(world) == (4, 6)


def test_a_version_that_cannot_start_goes_back_with_every_old_replica_in_place() -> None:
    world = world_with(5)
    old = world.running(D)
    goal = world.request(ask.version(BROKEN, num_replicas=5))
    fewest, most = watch(world)
    assert (fewest, most) == (5, 6)
    assert world.running(D) == old
    assert world.goal_state(goal) == "failed"
    shown = status.applications(world.cluster)["app"]
    assert (shown["status"], shown["message"]) == ("DEPLOY_FAILED", "d: boom")


def test_a_version_that_starts_and_then_dies_goes_back_too() -> None:
    world = world_with(3)
    goal = world.request(ask.version(b"two", num_replicas=3))
    for _ in range(100):
        world.flush()
        world.work()
        world.flush()
        for process in list(world.processes.values()):
            if process.code == b"two" and process.state == "running":
                world.die(process.tag)
        if world.goal_state(goal) == "failed":
            break
        world.now += 1.0
    world.converge()
    assert "died" in world.cluster.state.goal(goal).error
    assert [process.code for process in world.running(D)] == [b"one"] * 3


def test_a_version_that_fails_its_health_checks_goes_back() -> None:
    world = world_with(1)
    began_at = world.now
    goal = world.request(ask.version(b"two", num_replicas=2, health_check_period_s=1))
    while world.goal_state(goal) == "pending":
        for process in world.processes.values():
            process.sick = process.code == b"two"
        world.flush()
        starting = [p for p in world.processes.values() if p.state == "starting"]
        if len([p for p in world.running(D) if p.code == b"two"]) == 0 and starting:
            starting[0].state = "running"
            world.report(starting[0])
        for process in [p for p in world.processes.values() if p.state == "draining"]:
            world.die(process.tag)
        world.wait(0.5)
    assert world.now - began_at < 10, "nor does it wait between one bad replica and the next"
    world.converge()
    assert "failed 3 health checks" in world.cluster.state.goal(goal).error
    assert [process.code for process in world.running(D)] == [b"one"]


def test_replicas_that_wear_out_amid_an_update_are_replaced_by_that_alone() -> None:
    world = world_with(3)
    world.request(ask.version(b"two", num_replicas=3))
    for process in world.running(D):
        process.worn = f"{RestartReason.MAX_AGE}: it has run for 3 s"
        world.report(process)
    world.converge()
    assert [process.code for process in world.running(D)] == [b"two"] * 3
    assert "restarts" not in status.backend_status(world.cluster, world.cluster.state.backends[D])


@pytest.mark.parametrize("drains", [False, True])
def test_an_old_replica_that_ends_during_an_update_is_replaced_by_an_old_one(drains: bool) -> None:
    world = world_with(3)
    world.request(ask.version(b"two", num_replicas=3))
    world.flush()  # a new one is starting, and takes its time
    old = world.running(D)[0]
    if drains:
        old.state = "draining"
        world.report(old)
        world.flush()
        assert len(world.processes) == 4, "there is room when it is gone"
    world.die(old.tag)
    world.flush()
    starting = sorted(p.code for p in world.processes.values() if p.state == "starting")
    assert starting == [b"one", b"two"]
    world.converge()
    assert [process.code for process in world.running(D)] == [b"two"] * 3


def test_old_code_that_cannot_start_any_more_does_not_hold_up_the_new() -> None:
    world = world_with(2)
    world.code[next(iter(world.code))] = BROKEN
    world.request(ask.version(b"two", num_replicas=2))
    for process in world.running(D):
        world.die(process.tag)
    world.converge()
    assert [process.code for process in world.running(D)] == [b"two"] * 2


def test_a_second_version_overtakes_the_first_and_capacity_stays() -> None:
    world = world_with(4)
    first = world.request(ask.version(b"two", num_replicas=4))
    world.go_on(3)
    assert {process.code for process in world.processes.values()} == {b"one", b"two"}
    second = world.request(ask.version(b"three", num_replicas=4))
    fewest, most = watch(world)
    assert fewest >= 4
    assert most <= 5
    assert [process.code for process in world.running(D)] == [b"three"] * 4
    assert [world.goal_state(goal) for goal in (first, second)] == ["failed", "succeeded"]


def test_the_update_goes_on_after_every_crash_of_the_controller() -> None:
    for point, after in itertools.product(("before save", "after save", "amid effects"), range(8)):
        world = world_with(3)
        goal = world.request(ask.version(b"two", num_replicas=3))
        for step in range(30):
            if step == after:
                world.crash_at = point
            world.flush()
            assert serving(world) >= 3, (point, after, step)
            world.work()
        world.converge()
        assert world.goal_state(goal) == "succeeded"
        assert [process.code for process in world.running(D)] == [b"two"] * 3
        assert set(world.processes) == world.recorded()


def test_what_has_never_come_up_in_full_is_not_waited_for() -> None:
    world = World()
    world.request(ask.version(b"one", num_replicas=3))
    world.flush()
    first = next(iter(world.processes.values()))
    first.state = "running"
    world.report(first)
    world.flush()
    goal = world.request(ask.version(b"two", num_replicas=3))
    world.flush()
    assert [p.state for p in world.processes.values() if p.code == b"one"] == [
        "running",
        "draining",
        "draining",
    ]
    world.converge()
    assert world.goal_state(goal) == "succeeded"


def test_other_actor_options_are_a_rolling_update() -> None:
    world = world_with(2)
    old = world.running(D)
    spec = Spec("d", b"one", {"num_replicas": 2}, actor_options={"num_cpus": 0.5})
    world.complete(ask.deploy("app", spec))
    assert len(world.running(D)) == 2
    assert not set(world.running(D)) & set(old)


# --- Settings in place ----------------------------------------------------------------------------


def test_settings_that_reconfigure_refuses_go_back_to_those_that_all_took() -> None:
    world = world_with(2, user_config="good", max_ongoing_requests=7)
    before = world.running(D)
    goal = world.complete(ask.version(b"one", num_replicas=2, user_config=REFUSED))
    ended = world.cluster.state.goal(goal)
    assert (ended.state, ended.exception) == ("failed", b"pickled no such")
    assert ended.error == "deployment 'd' of application 'app': no such"
    assert world.running(D) == before
    record = world.cluster.state.backends[D].record
    assert (record.newest.config["user_config"], record.newest.config["max_ongoing_requests"]) == (
        "good",
        7,
    )
    assert {process.config_id for process in before} == {record.newest.config_id}
    assert status.applications(world.cluster)["app"]["status"] == "DEPLOY_FAILED"
    world.boot()
    world.converge()
    assert world.cluster.state.backends[D].record == record
    goal = world.complete(ask.version(b"one", num_replicas=2, user_config="better"))
    assert world.goal_state(goal) == "succeeded"
    assert status.applications(world.cluster)["app"]["status"] == "RUNNING"


@pytest.mark.parametrize("point", ["before save", "after save", "amid effects"])
@pytest.mark.parametrize("deliveries", [0, 1, 2])
def test_a_new_controller_takes_refused_settings_back_too(point: str, deliveries: int) -> None:
    world = world_with(2, user_config="first")
    world.complete(ask.version(b"one", num_replicas=2, user_config="good"))
    world.boot()  # and this one has not seen how the settings came to be
    goal = world.request(ask.version(b"one", num_replicas=2, user_config=REFUSED))
    for _ in range(deliveries):
        world.deliver()
    world.crash_at = point
    world.converge()
    assert world.goal_state(goal) == "failed"
    assert world.cluster.state.backends[D].record.newest.config["user_config"] == "good"


def test_of_two_refused_settings_the_last_good_ones_come_back() -> None:
    world = world_with(1, user_config="good")
    world.request(ask.version(b"one", user_config=REFUSED, max_ongoing_requests=1))
    world.complete(ask.version(b"one", user_config=REFUSED, max_ongoing_requests=2))
    assert world.cluster.state.backends[D].record.newest.config["user_config"] == "good"


def test_a_late_refusal_of_settings_that_were_changed_since_means_nothing() -> None:
    world = world_with(1, user_config="good")
    world.request(ask.version(b"one", user_config=REFUSED))
    goal = world.complete(ask.version(b"one", user_config="better"))
    assert world.goal_state(goal) == "succeeded"
    assert world.cluster.state.backends[D].record.newest.config["user_config"] == "better"


def test_an_update_does_not_bring_back_old_replicas_that_autoscaling_has_ended() -> None:
    scaling = {"min_replicas": 0, "initial_replicas": 3, "max_replicas": 3}
    world = World()
    world.complete(ask.version(b"one", num_replicas=None, autoscaling_config=scaling))
    world.request(ask.version(b"two", num_replicas=None, autoscaling_config=scaling))
    world.flush()
    world.cluster.state.backends[D].rescale(0)
    world.cluster.state.agenda.touch("backend", D)
    world.converge()
    assert world.processes == {}
    world.cluster.state.backends[D].rescale(1)
    world.cluster.state.agenda.touch("backend", D)
    world.flush()
    assert {process.code for process in world.processes.values()} == {b"two"}
    world.converge()


def test_what_was_deleted_amid_its_update_is_not_what_a_later_deploy_goes_back_to() -> None:
    world = world_with(2)
    world.request(ask.version(b"two", num_replicas=2))
    world.request(ask.undeploy("app"))
    goal = world.request(ask.version(BROKEN, num_replicas=2))
    world.converge(300.0)
    assert world.goal_state(goal) == "failed"
    assert world.running(D) == []
    assert status.backends(world.cluster)[D]["status"] == "DEPLOY_FAILED"


def test_old_replicas_that_die_amid_an_update_do_not_take_it_back() -> None:
    world = world_with(3)
    world.request(ask.version(b"two", num_replicas=3))
    world.flush()
    for _ in range(4):
        world.wait(2)
        old = [process for process in world.running(D) if process.code == b"one"]
        world.die(max(old, key=lambda process: process.pid).tag)
        world.wait(1)
        for process in world.processes.values():
            if process.state == "starting" and process.code == b"one":
                process.state = "running"
                world.report(process)
        world.flush()
    assert world.cluster.state.backends[D].record.update_failure == ""
    world.converge()
    assert [process.code for process in world.running(D)] == [b"two"] * 3


def test_a_new_controller_amid_an_update_starts_nothing_before_it_knows_what_runs() -> None:
    world = world_with(3)
    world.request(ask.version(b"two", num_replicas=3, max_surge_percent=100))
    world.flush()
    first = next(each for each in world.processes.values() if each.state == "starting")
    first.state = "running"
    world.report(first)
    world.flush()
    for process in [each for each in world.processes.values() if each.state == "draining"]:
        world.die(process.tag)
    world.flush()
    before = world.recorded()
    assert len(before) == 5
    world.boot()
    world.turn()
    assert world.recorded() == before
    world.converge()
    assert [process.code for process in world.running(D)] == [b"two"] * 3
