"""Deployments through their versions: up, over, back and away."""

import pytest

from greenroom.core.cluster import status
from greenroom.core.records import APPLICATION, BackendRecord
from tests.core import requests as ask
from tests.core.worlds import BROKEN, Process, Spec, World

D = "app#d"


@pytest.fixture(name="world")
def make_world() -> World:
    """A world where the first version serves."""
    world = World()
    world.complete(ask.version(b"one", num_replicas=2))
    return world


def record(world: World) -> BackendRecord:
    return world.cluster.state.backends[D].record


def running(world: World, code: bytes) -> list[Process]:
    return [process for process in world.running(D) if process.code == code]


def application(world: World) -> dict:
    return status.applications(world.cluster)["app"]


def test_after_a_failed_version_the_old_one_can_be_deployed_again(world: World) -> None:
    world.complete(ask.version(BROKEN))
    goal = world.complete(ask.version(b"one", num_replicas=2))
    assert world.goal_state(goal) == "succeeded"
    assert application(world)["status"] == "RUNNING"


def test_going_back_takes_up_the_old_version_with_other_settings(world: World) -> None:
    before = world.running(D)
    world.request(ask.version(b"two"))
    world.flush()
    world.complete(ask.version(b"one", num_replicas=3, user_config="other"))
    assert world.running(D)[:2] == before
    assert [process.code for process in world.running(D)] == [b"one"] * 3
    assert len(before[0].reconfigured) == 1


def test_a_deployment_that_is_left_out_goes(world: World) -> None:
    world.complete(ask.deploy("app", Spec("d", b"one", {}), Spec("helper", b"two", {})))
    assert world.table("endpoint/app#helper").traffic == {"app#helper": 1.0}
    goal = world.complete(ask.version(b"one"))
    assert world.goal_state(goal) == "succeeded"
    assert world.table("endpoint/app#helper") is None
    assert set(world.cluster.state.backends) == {D}
    assert list(application(world)["deployments"]) == ["d"]


def test_the_route_follows_the_ingress(world: World) -> None:
    both = (Spec("d", b"one", {"num_replicas": 2}), Spec("front", b"two", {}))
    world.complete(ask.deploy("app", *both, ingress="front", route="/new"))
    assert world.table("endpoint/app#d").route is None
    assert world.table("endpoint/app#front").route == "/new"


def test_deleting_drops_the_endpoints_at_once_and_then_everything(world: World) -> None:
    goal = world.request(ask.undeploy("app"))
    world.flush()
    assert world.table("endpoint/app#d") is None
    assert application(world)["status"] == "DELETING"
    assert world.goal_state(goal) == "pending"
    world.converge()
    assert world.goal_state(goal) == "succeeded"
    assert (world.cluster.state.applications, world.cluster.state.backends) == ({}, {})


def test_status_shows_replicas_and_what_they_wait_for(world: World) -> None:
    world.request(ask.version(b"one", num_replicas=3))
    shown = application(world)["deployments"]["d"]
    assert (shown["status"], shown["message"]) == ("UPSCALING", "2 of 3 replicas run")
    assert [each["state"] for each in shown["replicas"]] == ["RUNNING", "RUNNING", "STARTING"]
    assert shown["replicas"][0]["host"] == ""
    assert status.backends(world.cluster)[D]["target_replicas"] == 3
    assert status.endpoints(world.cluster)["app#d"]["traffic"] == {D: 1.0}
    assert {goal["state"] for goal in status.goals(world.cluster)} == {"succeeded", "pending"}


def expected(world: World, tag: str = D) -> bool:
    return bool(world.table(f"backend/{tag}").is_expected)


def test_an_application_is_expected_to_serve_from_its_first_running_on() -> None:
    world = World()
    good, bad = Spec("good", b"one", {}), Spec("bad", BROKEN, {})
    world.complete(ask.deploy("app", good, bad, ingress="good"))
    assert not expected(world, "app#good"), "it has never been RUNNING"
    world.complete(ask.deploy("app", good, Spec("bad", b"two", {}), ingress="good"))
    assert expected(world, "app#good")
    assert expected(world, "app#bad")


def test_what_is_deleted_or_has_no_replicas_by_its_settings_is_not_expected(world: World) -> None:
    scaled = {"min_replicas": 0, "max_replicas": 2, "downscale_delay_s": 1.0}
    world.complete(ask.version(b"one", num_replicas=None, autoscaling_config=scaled))
    world.wait(60.0)
    world.converge()
    assert world.table(f"backend/{D}").replicas == ()
    assert not expected(world)


def test_goals_that_have_ended_wait_for_nothing(world: World) -> None:
    world.complete(ask.undeploy("app"))
    agenda = world.cluster.state.agenda
    agenda.happened((APPLICATION, "app"))
    assert agenda.next_at() > world.now, "they would be kept for ever, as their name may never come"
