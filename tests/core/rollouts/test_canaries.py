"""New versions of whole applications: beside the running one, over to it, and back."""

from typing import Any

import pytest

from greenroom.core import operations as ops
from greenroom.core.cluster import status
from greenroom.core.comparing.comparing import Differences, Outcome
from greenroom.core.errors import ConflictError, InvalidRequestError
from greenroom.core.records import APPLICATION, ROLLOUT
from greenroom.core.rollouts.judging import Tally
from tests.core import requests as ask
from tests.core.worlds import BROKEN, Spec, World

INGRESS, NEW = "app#d", "app~new#d"
CANARY = {"steps": (0.5, 1.0), "hold_s": 5.0, "min_samples": 10, "compare": "json"}


def deploy(code: bytes = b"one", inner: bytes = b"inner", canary: Any = None) -> ask.Request:
    """Deploy application "app": the ingress "d", and "inner" that it calls."""
    specs = (Spec("inner", inner, {}), Spec("d", code, {}))
    asked = {
        "name": "app",
        "ingress": "d",
        "route_prefix": "/",
        "deployments": tuple(spec.fields for spec in specs),
    }
    return ask.do(ops.DeployApplications, applications=(asked,), canary=canary)


@pytest.fixture(name="world")
def make_world() -> World:
    world = World()
    world.change(deploy(), "deploy one")
    world.converge()
    return world


def begin(world: World, **changed: Any) -> str:
    """Begin a canary of other code of the ingress; return its goal."""
    given = {"code": b"two", "canary": CANARY, **changed}
    answer = world.change(deploy(**given), "deploy two")
    assert answer["changed"] == ["app"]
    goal: str = answer["goals"]["app"]
    return goal


def tally(queries: int, bad: int = 0) -> Any:
    counted = Tally()
    for number in range(queries):
        counted.count(500 if number < bad else 200, (0.05,))
    return counted.plain()


def count(world: World, bad: int = 0) -> None:
    """Let a proxy report 200 queries of either side in the present step."""
    token = world.table(f"rollout/{INGRESS}")
    counted = {NEW: tally(200, bad), INGRESS: tally(200)}
    world.request(lambda cluster: cluster.rollouts.reported(INGRESS, token, "p", counted))
    world.flush()


def traffic(world: World) -> dict[str, float]:
    return dict(world.cluster.state.endpoints.served(INGRESS).traffic)


def codes(world: World) -> set[tuple[str, bytes]]:
    tags = sorted(world.cluster.state.backends)
    return {(tag, process.code) for tag in tags for process in world.running(tag)}


def error(world: World, goal: str) -> str:
    return world.cluster.state.goal(goal).error


def wait(world: World, seconds: float = 1.0) -> None:
    world.go_on(20, seconds)


OLD = {("app#d", b"one"), ("app#inner", b"inner")}
BESIDE = {("app~new#d", b"two"), ("app~new#inner", b"inner")}


def roll_out(world: World) -> None:
    wait(world)
    assert traffic(world) == {INGRESS: 0.5, NEW: 0.5}
    count(world)
    wait(world)


def test_the_new_version_comes_up_whole_while_the_old_one_runs(world: World) -> None:
    goal = begin(world)
    wait(world)
    assert codes(world) == OLD | BESIDE
    assert traffic(world) == {INGRESS: 0.5, NEW: 0.5}
    endpoint = world.table(f"endpoint/{INGRESS}")
    assert endpoint.shadows == {NEW: 0.5}
    assert world.table("endpoint/app~new#d").route is None
    assert world.goal_state(goal) == "pending"
    shown = status.applications(world.cluster)["app"]
    assert shown["canary"]["state"] == "rolling out"
    assert "step 1 of 2, 50 %" in shown["message"]


def test_it_takes_over_and_leaves_nothing_but_one_entry_to_undo(world: World) -> None:
    goal = begin(world)
    roll_out(world)
    wait(world)
    assert world.goal_state(goal) == "succeeded"
    assert codes(world) == {("app#d", b"two"), ("app#inner", b"inner")}
    assert traffic(world) == {INGRESS: 1.0}
    assert world.table(f"endpoint/{INGRESS}").shadows == {}
    assert set(world.cluster.state.applications) == {"app"}
    shown = status.applications(world.cluster)["app"]["canary"]
    assert shown["why"].startswith("NO ANSWERS WERE COMPARED before it took over: a longer hold_s")
    assert (
        list(world.cluster.state.history)[-1].what
        == "application 'app': its new version takes over"
    )
    world.change(ask.undo())
    wait(world)
    assert codes(world) == OLD


def test_what_was_different_stays_with_it_and_is_reported_loudly_where_most_was(
    world: World,
) -> None:
    begin(world)
    wait(world)
    compare = world.cluster.state.endpoints.served(INGRESS).compares[NEW]
    differences = Differences()
    for cause in ("/price: other value", "/id: other value", "/id: other value", ""):
        differences.count(Outcome(cause), {"at": 1.0})
    found = {(INGRESS, NEW, compare.id): differences.plain()}
    world.cluster.differences.reported("r", found)
    roll_out(world)
    wait(world)
    assert status.applications(world.cluster)["app"]["canary"]["why"] == (
        "MOST ANSWERS DIFFER: 3 of 4 compared answers were different (2 x /id: other value, "
        "1 x /price: other value)"
    )


def test_differences_are_judged_only_where_answers_are_compared(world: World) -> None:
    canary = {**CANARY, "compare": None, "abort_if": {"difference_rate": 0.02}}
    with pytest.raises(InvalidRequestError, match=r"'difference_rate'\]: must come with compare"):
        begin(world, canary=canary)
    assert codes(world) == OLD


def test_one_whose_inner_deployment_cannot_start_gets_no_query(world: World) -> None:
    goal = begin(world, inner=BROKEN)
    for _ in range(40):
        world.go_on(5, seconds=5)
        assert traffic(world).get(NEW, 0) == 0
    assert codes(world) == OLD
    assert "backend 'app~new#inner' could not be started" in error(world, goal)


@pytest.mark.parametrize("point", ["before save", "after save", "amid effects"])
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_controller_that_dies_at_any_step_goes_on(world: World, point: str, is_bad: bool) -> None:
    world.crash_at = point
    goal = begin(world)
    for _ in range(4):
        world.crash_at = point
        wait(world)
    if traffic(world).get(NEW) == 0.5:
        count(world, bad=100 * is_bad)
    for _ in range(4):
        world.now += 6
        world.crash_at = point
        wait(world)
    assert codes(world) == (OLD if is_bad else {("app#d", b"two"), ("app#inner", b"inner")})
    assert world.goal_state(goal) == ("failed" if is_bad else "succeeded")
    assert set(world.cluster.state.applications) == {"app"}


def test_the_same_deploy_again_waits_for_it_and_another_is_refused(world: World) -> None:
    goal = begin(world)
    assert world.change(deploy(b"two", canary=CANARY))["goals"] == {"app": goal}
    assert world.change(deploy(b"two"))["changed"] == []
    with pytest.raises(ConflictError, match=r"takes over step by step; wait for it, or end it"):
        world.change(deploy(b"three"))
    wait(world)
    assert codes(world) == OLD | BESIDE


def test_the_next_one_begins_once_the_last_new_version_has_ended(world: World) -> None:
    goal = begin(world)
    wait(world)
    (ingress,) = world.running(NEW)
    ingress.stuck = True  # it drains, and may still call its inner deployment
    world.change(ask.do(ops.AbortRollout, endpoint=INGRESS))
    wait(world, 0.1)
    assert traffic(world) == {INGRESS: 1.0}
    for _ in range(2):
        with pytest.raises(ConflictError, match="again when greenroom status no longer shows"):
            begin(world, code=b"three", inner=b"other")
        wait(world, 0.1)
        assert ("app~new#inner", b"inner") in codes(world)
        assert world.goal_state(goal) == "pending"
        world.boot()
    world.thaw()
    wait(world)
    assert (codes(world), world.goal_state(goal)) == (OLD, "failed")
    begin(world, code=b"three", inner=b"other")
    wait(world)
    assert codes(world) == OLD | {("app~new#d", b"three"), ("app~new#inner", b"other")}


def test_an_undo_of_the_promotion_ends_the_canary_that_takes_over(world: World) -> None:
    goal = begin(world)
    wait(world)
    world.change(ask.do(ops.PromoteRollout, endpoint=INGRESS))
    assert traffic(world) == {NEW: 1.0}
    world.boot()
    assert traffic(world) == {NEW: 1.0}, "the next controller knows who serves meanwhile"
    with pytest.raises(ConflictError, match="the new version of endpoint 'app#d' takes over"):
        world.change(ask.traffic(INGRESS, {"app#inner": 1.0}))
    world.change(ask.undo())
    wait(world)
    assert (codes(world), traffic(world)) == (OLD, {INGRESS: 1.0})
    assert "the application was changed otherwise" in error(world, goal)


def test_one_that_cannot_take_over_goes_back(world: World) -> None:
    goal = begin(world)
    wait(world)
    digest = next(digest for digest, code in world.code.items() if code == b"two")
    world.code[digest] = BROKEN  # beside, it runs already
    world.change(ask.do(ops.PromoteRollout, endpoint=INGRESS))
    assert traffic(world) == {NEW: 1.0}
    wait(world, 5.0)
    assert (codes(world), traffic(world)) == (OLD, {INGRESS: 1.0})
    assert "went back: " in error(world, goal)
    assert set(world.cluster.state.applications) == {"app"}


def test_an_application_that_is_deleted_takes_its_new_version_along(world: World) -> None:
    begin(world)
    wait(world)
    with pytest.raises(ConflictError, match="is the new version of 'app'; end that with"):
        world.change(ask.undeploy("app~new"))
    world.change(ask.undeploy("app"))
    wait(world)
    assert codes(world) == set()
    assert world.cluster.state.is_empty
    agenda = world.cluster.state.agenda
    for kind, name in ((ROLLOUT, "app#d"), (APPLICATION, "app"), (APPLICATION, "app~new")):
        agenda.happened((kind, name))
    assert agenda.next_at() > world.now, "nothing waits for what is gone"


def test_first_deploys_and_settings_alone_are_no_canary(world: World) -> None:
    world.change(deploy(canary=CANARY))
    assert set(world.cluster.state.applications) == {"app"}
    fresh = World()
    fresh.change(deploy(canary=CANARY))
    wait(fresh)
    assert codes(fresh) == OLD


def test_the_route_that_a_canary_leaves_later_is_not_free_yet(world: World) -> None:
    moved = {
        "name": "app",
        "ingress": "d",
        "route_prefix": "/shop",
        "deployments": tuple(Spec(n, n.encode(), {}).fields for n in ("inner", "d")),
    }
    other = {
        "name": "blog",
        "ingress": "d",
        "route_prefix": "/",
        "deployments": (Spec("d", b"blog", {}).fields,),
    }
    asked = {"applications": (moved, other), "canary": CANARY}
    for _ in range(2):
        with pytest.raises(ConflictError, match="route '/' is taken by endpoint 'app#d'"):
            world.change(ask.do(ops.DeployApplications, **asked))
        assert set(world.cluster.state.applications) == {"app"}
        world.boot()
    world.change(ask.do(ops.DeployApplications, applications=(moved, other)))
    world.converge()
    routes = {endpoint.route: name for name, endpoint in world.cluster.state.endpoints.items()}
    assert (routes["/shop"], routes["/"]) == ("app#d", "blog#d")


def test_while_another_rollout_decides_on_the_traffic_it_is_refused(world: World) -> None:
    both = (Spec("d", b"one", {}), Spec("e", b"e", {}))
    world.change(ask.deploy("app", *both))
    world.converge()
    rollout = {"endpoint": INGRESS, "to": "app#e", "hold_s": 100.0}
    world.change(ask.do(ops.StartRollout, **rollout))
    with pytest.raises(ConflictError, match="rollout of endpoint 'app#d' to 'app#e' decides on it"):
        world.change(deploy(b"two", canary=CANARY))
    assert not world.cluster.state.is_torn
    assert set(world.cluster.state.applications) == {"app"}


def test_a_new_version_whose_record_is_lost_is_taken_back(world: World) -> None:
    begin(world)
    wait(world)
    assert traffic(world) == {INGRESS: 0.5, NEW: 0.5}
    world.records["canary"].clear()
    world.boot()
    wait(world)
    assert (codes(world), traffic(world)) == (OLD, {INGRESS: 1.0})
    assert set(world.cluster.state.applications) == {"app"}
