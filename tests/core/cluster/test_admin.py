"""What an administrator can ask for, what is refused and how, and what repeated requests do."""

import copy
from typing import Any

import pytest

from greenroom.core import operations as ops
from greenroom.core.agenda import Agenda
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle.goals import GOAL, Goals, Progress
from greenroom.core.long_poll import NOTHING_SEEN
from greenroom.core.records import Changes, GoalRecord
from tests.core import requests as ask
from tests.core.worlds import Spec, World, made


@pytest.fixture(name="world")
def make_world() -> World:
    """A world with backend b, endpoint e on /e, and application app on /."""
    world = World()
    world.request(ask.create("b", num_replicas=2))
    world.request(ask.endpoint("e", "b", route="/e"))
    world.complete(ask.version())
    return world


APP_BACKEND = "app#d"

NOT_EQUAL = "exists with other code or settings; use update_backend_config, or delete it first"
REFUSED: list[tuple[ask.Request, type[Exception], str]] = [
    (
        ask.create(""),
        InvalidRequestError,
        "backend '': tag='': expected a name of one character or more",
    ),
    (ask.create("a#b"), InvalidRequestError, "tag='a#b': expected a name without '#'"),
    (ask.create("b" * 151), InvalidRequestError, "at most 150 bytes in UTF-8; it has 151"),
    (ask.create("b\udc80"), InvalidRequestError, "tag='b\\udc80': expected printable characters"),
    (ask.endpoint("e\0", "b"), InvalidRequestError, "name='e\\x00': expected printable characters"),
    (
        ask.create("new", num_replicas=-1, max_ongoing_requests="many", colour=1),
        InvalidRequestError,
        (
            "config.num_replicas=-1: must be greater than or equal to 1; "
            "config.max_ongoing_requests='many': must be a valid integer, unable to parse "
            "string as an integer; config.colour=1: no such setting"
        ),
    ),
    (ask.create("b", b"other", num_replicas=2), ConflictError, f"backend 'b' {NOT_EQUAL}"),
    (ask.create("b", num_replicas=3), ConflictError, f"backend 'b' {NOT_EQUAL}"),
    (
        ask.do(
            ops.CreateBackend,
            tag="b",
            code=b"code",
            code_hash="hash-of-code",
            config={"num_replicas": 2},
            actor_options={"num_cpus": 1},
        ),
        ConflictError,
        f"backend 'b' {NOT_EQUAL}",
    ),
    (
        ask.update("nope", num_replicas=1),
        UnknownNameError,
        f"no backend is named 'nope'; there are: {APP_BACKEND}, b",
    ),
    (
        ask.update("b", health_check_period_s=-1),
        InvalidRequestError,
        "invalid BackendConfig: health_check_period_s=-1: must be greater than 0",
    ),
    (
        ask.endpoint("", "b"),
        InvalidRequestError,
        "name='': expected a name of one character or more",
    ),
    (
        ask.endpoint("new", "nope"),
        UnknownNameError,
        f"no backend is named 'nope'; there are: {APP_BACKEND}, b",
    ),
    (
        ask.endpoint("new", APP_BACKEND),
        InvalidRequestError,
        f"endpoint 'new': backend: no backend is named '{APP_BACKEND}'; it could be: b",
    ),
    (
        ask.endpoint("new", "b", route="/e"),
        ConflictError,
        "route '/e' is taken by endpoint 'e'; choose another route or delete that one first",
    ),
    (
        ask.endpoint("new", "b", route="/"),
        ConflictError,
        "route '/' is taken by endpoint 'app#d'; choose another route or delete that one first",
    ),
    *(
        (ask.endpoint("new", "b", route=route), InvalidRequestError, f"route={route!r}: {wrong}")
        for route, wrong in {
            "x": "must start with '/', or be None for no route; for example '/predict'",
            "/x/": "must not end with '/'; for example '/predict'",
            "/{x}": "must not contain braces, '?', '#', '%' or white space",
            "/%C3%BC": "must not contain braces, '?', '#', '%' or white space",
            "/-/routes": "is reserved for Greenroom's own pages",
            **dict.fromkeys(
                ("/.", "/..", "/a//b", "/a/../b", "/./a"), "must not contain '//', nor"
            ),
        }.items()
    ),
    (
        ask.endpoint("new", "b", methods=("get", "FETCH")),
        InvalidRequestError,
        "methods=('get', 'FETCH'): expected some of GET, HEAD, POST, PUT, PATCH, DELETE, ",
    ),
    (ask.endpoint("new", "b", methods=()), InvalidRequestError, "methods=(): expected some of"),
    (
        ask.endpoint("new", "b", methods="GET"),
        InvalidRequestError,
        "must be a list, such as ['GET']",
    ),
    (
        ask.unname("app#d"),
        ConflictError,
        "endpoint 'app#d' belongs to application 'app'; delete that",
    ),
    (
        ask.deploy("new", Spec("d", b"x", {}), route="/e"),
        ConflictError,
        "route '/e' is taken by endpoint 'e'; choose another route or delete that one first",
    ),
    (
        ask.deploy("new", Spec("d", b"x", {}), route="bad"),
        InvalidRequestError,
        "deploy applications: applications[0].route_prefix='bad': must start with '/', or be None",
    ),
    (
        ask.deploy("n#w", Spec("", b"x", {})),
        InvalidRequestError,
        "applications[0].name='n#w': expected a name without '#'; applications[0].deployments[0]",
    ),
    (
        ask.deploy("new", Spec("d", b"x", {}), ingress="other"),
        InvalidRequestError,
        "application 'new': deployments ['d'] must be different and contain the ingress 'other'",
    ),
    (
        ask.deploy("new", Spec("d", b"x", {}), Spec("d", b"y", {})),
        InvalidRequestError,
        "application 'new': deployments ['d', 'd'] must be different and contain the ingress 'd'",
    ),
    (
        ask.deploy("app", Spec("d", b"two", {}), Spec("f", b"y", {"num_replicas": 0})),
        InvalidRequestError,
        "deploy applications: applications[0].deployments[1].config.num_replicas=0: must be",
    ),
    (
        ask.deploy("app", Spec("d", b"one", {}, None, {"num_cpus": -1})),
        InvalidRequestError,
        "deploy applications: applications[0].deployments[0].actor_options.num_cpus=-1: must be",
    ),
]


def picture(world: World) -> Any:
    cluster = world.cluster
    return copy.deepcopy(
        (
            {tag: backend.record for tag, backend in cluster.state.backends.items()},
            cluster.state.endpoints,
            cluster.state.applications,
            cluster.state.goals.all(),
        )
    )


@pytest.mark.parametrize(("change", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_a_bad_request_is_refused_and_changes_nothing(
    world: World, change: ask.Request, error: type[Exception], text: str
) -> None:
    before = picture(world)
    with pytest.raises(error) as caught:
        made(world.cluster, change)
    assert text in str(caught.value)
    world.cluster.advance(world.now)
    assert not world.cluster.take_changes()
    assert picture(world) == before


def test_a_backend_of_an_application_is_not_deleted_by_itself(world: World) -> None:
    world.request(ask.version(b"two"))
    with pytest.raises(ConflictError, match="belongs to application 'app'; delete or redeploy"):
        made(world.cluster, ask.delete("app#d"))


def test_a_backend_that_is_being_deleted_cannot_be_created_or_used(world: World) -> None:
    world.complete(ask.create("old"))
    world.request(ask.delete("old"))
    with pytest.raises(ConflictError, match="'old' is being deleted; wait for that goal first"):
        made(world.cluster, ask.create("old"))
    with pytest.raises(UnknownNameError, match="no backend is named 'old'"):
        made(world.cluster, ask.endpoint("new", "old"))
    with pytest.raises(InvalidRequestError, match="no backend is named 'old'; it could be: b"):
        made(world.cluster, ask.traffic("e", {"old": 1.0}))


# --- Repeats ------------------------------------------------------------------------------------

REPEATED: list[tuple[str, ask.Request]] = [
    ("create a backend", ask.create("b", num_replicas=2)),
    ("the settings that it has", ask.update("b", num_replicas=2)),
    ("delete a backend that is not there", ask.delete("nope")),
    ("create an endpoint", ask.endpoint("e", "b", route="/e", methods=("get", "GET"))),
    ("delete an endpoint that is not there", ask.unname("nope")),
    ("the traffic that there is", ask.traffic("e", {"b": 1})),
    ("deploy the same", ask.version()),
    ("delete an application that is not there", ask.undeploy("nope")),
]


@pytest.mark.parametrize(
    "change", [case[1] for case in REPEATED], ids=[case[0] for case in REPEATED]
)
def test_a_repeated_request_changes_nothing(world: World, change: ask.Request) -> None:
    before = picture(world)
    assert made(world.cluster, change) is None
    world.cluster.advance(world.now)
    assert not world.cluster.take_changes()
    assert picture(world) == before


@pytest.mark.parametrize(
    "change",
    [
        ask.create("new"),
        ask.update("b", user_config=2),
        ask.version(b"two"),
        ask.undeploy("app"),
    ],
)
def test_a_request_repeated_while_it_is_under_way_has_the_same_goal(
    world: World, change: ask.Request
) -> None:
    goal = world.request(change)
    assert world.cluster.state.goal(goal).state == "pending"
    assert world.request(change) == goal
    world.boot()
    assert world.request(change) == goal
    world.converge()
    assert world.cluster.state.goal(goal).state == "succeeded"


@pytest.mark.parametrize("force", [False, True])
def test_a_delete_repeated_while_it_is_under_way_has_the_same_goal(force: bool) -> None:
    world = World()
    world.complete(ask.create("b"))
    goal = world.request(ask.delete("b", force=force))
    assert world.request(ask.delete("b", force=force)) == goal
    assert world.request(ask.delete("b")) == goal
    world.converge()
    assert world.goal_state(goal) == "succeeded"


# --- Goals --------------------------------------------------------------------------------------


def test_a_goal_is_reached_when_every_proxy_knows() -> None:
    world = World(proxies=2)
    goal = world.request(ask.create("b"))
    world.cluster.state.long_poll.listen("third", (1, 1, "third"), NOTHING_SEEN, "third")
    world.flush()
    world.work()
    world.flush()
    assert world.cluster.state.backends["b"].converged
    assert world.goal_state(goal) == "pending"
    world.cluster.state.long_poll.listen("third", (1, 1, "third"), world.proxies[0].seen, "third")
    world.turn()
    assert world.goal_state(goal) == "succeeded"


def test_a_goal_that_another_change_supersedes_has_failed_and_says_so(world: World) -> None:
    first = world.request(ask.version(b"two"))
    other = world.request(ask.update("b", num_replicas=3))
    second = world.request(ask.undeploy("app"))
    assert [world.goal_state(goal) for goal in (first, other, second)] == [
        "failed",
        "pending",
        "pending",
    ]
    error = world.cluster.state.goal(first).error
    assert error == "superseded by a later change of application app: delete application"


def test_settings_that_change_while_a_backend_comes_up_are_part_of_its_goal(world: World) -> None:
    goal = world.request(ask.create("new"))
    assert world.request(ask.update("new", num_replicas=3)) == goal
    world.converge()
    assert world.goal_state(goal) == "succeeded"
    assert len(world.running("new")) == 3


def test_ended_goals_are_kept_for_late_clients_but_not_all() -> None:
    changes, agenda = Changes(), Agenda()
    goals = Goals({}, changes, agenda)
    slow = goals.create(("backend", "slow"), "create", 0.0)
    ids = [goals.create(("backend", str(i)), "create", 1.0 + i) for i in range(105)]
    for goal in goals.pending():
        goals.advance(goal, Progress(done=goal.subject[1] != "slow"))
    assert [goals.get(each) is None for each in ids[:6]] == [True] * 5 + [False]
    assert goals.get(ids[-1]).state == "succeeded"
    assert len(goals.all()) == 101
    assert goals.get(slow).state == "pending", "nothing has happened to it"
    agenda.upon((GOAL, slow), "request", "waits for it")
    goals.advance(goals.get(slow), Progress(error="boom", exception=b"x"))
    assert agenda.take("request", 0.0) == ["waits for it"]
    ended = goals.get(slow)
    assert (ended.state, ended.error, ended.exception) == ("failed", "boom", b"x")
    assert changes.puts[GOAL, slow] == ended
    assert (GOAL, ids[5]) in changes.deletes, "those that ended first go first"
    assert [goal.created_at for goal in goals.all()] == sorted(g.created_at for g in goals.all())


def test_the_goals_that_are_forgotten_are_the_oldest_though_the_clock_was_set_back() -> None:
    def over(goals: Goals, name: str, at: float) -> str:
        goal_id = goals.create(("backend", name), "create", at)
        for goal in goals.pending():
            goals.advance(goal, Progress(done=True))
        return goal_id

    goals = Goals({}, Changes(), Agenda())
    ids = [over(goals, str(number), 1e9 - number) for number in range(100)]
    saved = {goal.id: goal for goal in goals.all()}
    assert list(saved) == ids
    again = Goals(saved, Changes(), Agenda())
    last = over(again, "last", 1.0)
    assert [goal.id for goal in again.all()] == [*ids[1:], last]


@pytest.mark.parametrize("before", ["f" * 16, "f" * 24], ids=["random", "the last of its length"])
def test_a_goal_is_newer_than_those_with_any_id_from_before(before: str) -> None:
    goal = GoalRecord(id=before, subject=("backend", "a"), what="create", created_at=0.0)
    goals = Goals({before: goal}, Changes(), Agenda())
    ids = [goals.create(("backend", str(number)), "create", 0.0) for number in range(3)]
    assert [goal.id for goal in goals.all()] == [before, *ids]
    again = Goals({goal.id: goal for goal in goals.all()}, Changes(), Agenda())
    assert [goal.id for goal in again.all()] == [before, *ids]
