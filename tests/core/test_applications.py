"""Deployments through their versions: up, over, back and away."""

import pytest

from understudy.core import status
from understudy.core.records import DeploymentRecord

from . import requests as ask  # noqa: TID251 - the tests' own folder
from .worlds import BROKEN, Spec, World  # noqa: TID251

ONE, TWO, THREE = "app#d#hash-of-one", "app#d#hash-of-two", "app#d#hash-of-thre"
BAD = "app#d#hash-of-rais"


def version(code: bytes, **config: object) -> ask.Request:
    return ask.deploy("app", Spec("d", code, dict(config)))


@pytest.fixture(name="world")
def make_world() -> World:
    """A world where the first version serves."""
    world = World()
    world.request(version(b"one", num_replicas=2))
    world.settle()
    return world


def deployment(world: World, name: str = "d") -> DeploymentRecord:
    return world.cluster.applications["app"].deployments[name]


def traffic(world: World, name: str = "d") -> list[str]:
    return list(world.table(f"endpoint/app#{name}").traffic)


def application(world: World) -> dict:
    return status.applications(world.cluster, "here")["app"]


def test_a_new_application_comes_up() -> None:
    world = World()
    goal = world.request(version(b"one"))
    assert application(world)["status"] == "DEPLOYING"
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert deployment(world) == DeploymentRecord(name="d", target=ONE, serving=ONE)
    assert world.table("endpoint/app#d").route == "/"
    assert application(world)["status"] == "RUNNING"


def test_new_code_comes_up_beside_the_old_which_goes_when_all_replicas_run(world: World) -> None:
    old = world.running(ONE)
    goal = world.request(version(b"two", num_replicas=2))
    world.flush()
    first, second = (p for p in world.processes.values() if p.state == "starting")
    first.state = "running"
    world.report(first)
    world.flush()
    assert traffic(world) == [ONE]
    assert world.running(ONE) == old
    assert world.goal_state(goal) == "pending"
    second.state = "running"
    world.report(second)
    world.flush()
    assert traffic(world) == [TWO]
    assert [process.state for process in old] == ["draining", "draining"]
    world.settle()
    assert set(world.cluster.backends) == {TWO}
    assert world.goal_state(goal) == "succeeded"


def test_the_old_replicas_stop_only_when_proxies_know_where_traffic_goes_now(world: World) -> None:
    old = world.running(ONE)
    world.request(version(b"two"))
    world.flush()
    world.work()
    while traffic(world) == [ONE]:
        assert [process.state for process in old] == ["running", "running"]
        assert world.deliver()
    assert world.table(f"backend/{ONE}").replicas == ()
    assert len(world.table(f"backend/{TWO}").replicas) == 1


def test_settings_alone_are_changed_in_place(world: World) -> None:
    before = world.running(ONE)
    goal = world.request(version(b"one", num_replicas=3))
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert world.running(ONE)[:2] == before
    assert len(world.running(ONE)) == 3


def test_a_new_version_that_cannot_start_is_rolled_back(world: World) -> None:
    before = world.running(ONE)
    goal = world.request(version(BROKEN))
    world.settle()
    ended = world.cluster.goal(goal)
    assert (ended.state, ended.exception) == ("failed", b"pickled boom")
    assert ended.error == "deployment 'd' of application 'app': boom"
    assert world.running(ONE) == before
    assert set(world.cluster.backends) == {ONE}
    assert deployment(world).target == ONE
    assert application(world)["status"] == "DEPLOY_FAILED"
    assert application(world)["message"] == "d: boom"


def test_after_a_failed_version_the_old_one_can_be_deployed_again(world: World) -> None:
    world.request(version(BROKEN))
    world.settle()
    goal = world.request(version(b"one", num_replicas=2))
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert application(world)["status"] == "RUNNING"


def test_a_first_version_that_cannot_start_stays_to_be_seen() -> None:
    world = World()
    world.request(version(BROKEN))
    world.settle()
    assert deployment(world).serving is None
    assert world.table(f"backend/{BAD}").unavailable == "it could not be started"
    goal = world.request(version(b"one"))
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert set(world.cluster.backends) == {ONE}
    assert traffic(world) == [ONE]


def test_the_same_broken_version_is_tried_again_when_asked() -> None:
    world = World()
    first = world.request(version(BROKEN))
    world.settle()
    second = world.request(version(BROKEN))
    assert second not in {None, first}
    world.settle()
    assert world.goal_state(second) == "failed"


def test_a_version_that_is_overtaken_goes_without_having_served(world: World) -> None:
    first = world.request(version(b"two"))
    world.flush()
    second = world.request(version(b"three"))
    world.settle()
    assert set(world.cluster.backends) == {THREE}
    assert [world.goal_state(goal) for goal in (first, second)] == ["succeeded", "succeeded"]


def test_going_back_before_the_new_version_is_up_keeps_the_old_replicas(world: World) -> None:
    before = world.running(ONE)
    world.request(version(b"two"))
    world.flush()
    world.request(version(b"one", num_replicas=2))
    world.settle()
    assert world.running(ONE) == before
    assert set(world.cluster.backends) == {ONE}


def test_going_back_to_a_version_that_is_being_deleted_revives_it(world: World) -> None:
    old = world.running(ONE)
    for process in old:
        process.stuck = True  # so that it drains for long
    world.request(version(b"two"))
    world.flush()
    world.work()
    world.flush()
    assert world.cluster.backends[ONE].record.deleting
    goal = world.request(version(b"one", num_replicas=2))
    world.thaw()
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert traffic(world) == [ONE]
    assert not set(world.running(ONE)) & set(old)


def test_a_revived_version_that_cannot_start_any_more_is_given_up(world: World) -> None:
    for process in world.running(ONE):
        process.stuck = True
    world.request(version(b"two"))
    world.flush()
    world.work()
    world.flush()
    world.code[world.cluster.backends[ONE].record.code_digest] = BROKEN
    goal = world.request(version(b"one", num_replicas=2))
    world.thaw()
    world.settle()
    assert world.goal_state(goal) == "failed"
    assert traffic(world) == [TWO]


def test_a_deployment_that_is_left_out_goes(world: World) -> None:
    world.request(ask.deploy("app", Spec("d", b"one", {}), Spec("helper", b"two", {})))
    world.settle()
    assert traffic(world, "helper") == ["app#helper#hash-of-two"]
    goal = world.request(version(b"one"))
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert world.table("endpoint/app#helper") is None
    assert set(world.cluster.backends) == {ONE}
    assert list(application(world)["deployments"]) == ["d"]


def test_the_route_follows_the_ingress(world: World) -> None:
    both = (Spec("d", b"one", {"num_replicas": 2}), Spec("front", b"two", {}))
    world.request(ask.deploy("app", *both, ingress="front", route="/new"))
    world.settle()
    assert world.table("endpoint/app#d").route is None
    assert world.table("endpoint/app#front").route == "/new"


def test_a_changed_route_is_a_change(world: World) -> None:
    goal = world.request(ask.deploy("app", Spec("d", b"one", {"num_replicas": 2}), route="/x"))
    assert goal is not None
    world.settle()
    assert world.table("endpoint/app#d").route == "/x"


def test_deleting_drops_the_endpoints_at_once_and_then_everything(world: World) -> None:
    goal = world.request(ask.undeploy("app"))
    world.flush()
    assert world.table("endpoint/app#d") is None
    assert application(world)["status"] == "DELETING"
    assert world.goal_state(goal) == "pending"
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert (world.cluster.applications, world.cluster.backends, world.code) == ({}, {}, {})


def test_deleting_what_could_not_start_succeeds() -> None:
    world = World()
    world.request(version(BROKEN))
    world.settle()
    goal = world.request(ask.undeploy("app"))
    world.settle()
    assert world.goal_state(goal) == "succeeded"


@pytest.mark.parametrize("code", [b"one", b"two"])
def test_deploying_while_it_is_being_deleted_brings_it_up_anew(world: World, code: bytes) -> None:
    world.request(ask.undeploy("app"))
    goal = world.request(version(code))
    world.settle()
    assert world.goal_state(goal) == "succeeded"
    assert traffic(world) == [f"app#d#hash-of-{code.decode()}"]
    assert application(world)["status"] == "RUNNING"


def test_a_broken_version_deployed_while_it_is_being_deleted_fails(world: World) -> None:
    world.code = dict.fromkeys(world.code, BROKEN)
    world.request(ask.undeploy("app"))
    world.flush()
    goal = world.request(version(b"one"))
    world.settle()
    assert world.goal_state(goal) == "failed"


def test_two_applications_may_run_the_same_code(world: World) -> None:
    world.request(ask.deploy("other", Spec("d", b"one", {}), route="/other"))
    world.settle()
    world.request(ask.undeploy("other"))
    world.settle()
    assert len(world.running(ONE)) == 2
    assert len(world.code) == 1


def test_status_shows_replicas_and_what_they_wait_for(world: World) -> None:
    world.request(version(b"one", num_replicas=3))
    shown = application(world)["deployments"]["d"]
    assert (shown["status"], shown["message"]) == ("UNHEALTHY", "2 of 3 replicas run")
    assert [each["state"] for each in shown["replicas"]] == ["RUNNING", "RUNNING", "STARTING"]
    assert shown["replicas"][0]["host"] == "here"
    assert status.backends(world.cluster)[ONE]["target_replicas"] == 3
    assert status.endpoints(world.cluster)["app#d"]["traffic"] == {ONE: 1.0}
    assert {goal["state"] for goal in status.goals(world.cluster)} == {"succeeded", "pending"}
