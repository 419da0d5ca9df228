"""Several applications in one change: all or nothing, others away, and at a known version only."""

import pytest

from greenroom.core.errors import ConflictError, InvalidRequestError
from tests.core import requests as ask
from tests.core.worlds import Spec, World


def spec(code: bytes = b"one", **config: object) -> Spec:
    return Spec("d", code, dict(config))


@pytest.fixture(name="world")
def make_world() -> World:
    """A world with applications a on /a and b on /b, deployed in one change."""
    world = World()
    both = ask.deploy_all(("a", "/a", spec()), ("b", "/b", spec()))
    answer = world.change(both, "deploy both")
    assert answer["goals"].keys() == {"a", "b"}
    assert (answer["version"], sorted(answer["changed"])) == (1, ["a", "b"])
    world.converge()
    return world


def names(world: World) -> list[str]:
    return sorted(world.cluster.state.applications)


def routes(world: World) -> dict[str, str]:
    return {endpoint.route: name for name, endpoint in world.cluster.state.endpoints.items()}


def test_the_same_again_changes_nothing(world: World) -> None:
    again = ask.deploy_all(("a", "/a", spec()), ("b", "/b", spec()), if_version=1)
    assert world.change(again) == {"goals": {}, "version": 1, "changed": []}
    assert world.cluster.state.history.last_id == 1


def test_what_is_not_named_is_deleted_unless_it_is_kept(world: World) -> None:
    kept = world.change(ask.deploy_all(("c", "/c", spec()), keep_others=True))
    assert list(kept["goals"]) == ["c"]
    world.converge()
    assert names(world) == ["a", "b", "c"]
    answer = world.change(ask.deploy_all(("b", "/b", spec(b"two"))))
    assert sorted(answer["changed"]) == ["a", "b", "c"]
    world.converge()
    assert names(world) == ["b"]
    assert all(world.goal_state(goal) == "succeeded" for goal in answer["goals"].values())
    world.change(ask.undo())
    world.converge()
    assert names(world) == ["a", "b", "c"]


def test_a_file_deletes_what_files_deployed_and_nothing_else_unless_it_prunes(
    world: World,
) -> None:
    world.complete(ask.deploy("script", spec(), route="/script"))
    world.change(ask.deploy_all(("b", "/b", spec(b"two"))))
    world.converge()
    assert names(world) == ["b", "script"]
    world.complete(ask.deploy("b", spec(b"three"), route="/b"))  # which is a script's from now on
    world.change(ask.deploy_all(("a", "/a", spec())))
    world.converge()
    assert names(world) == ["a", "b", "script"]
    world.change(ask.deploy_all(("a", "/a", spec()), prune=True))
    world.converge()
    assert names(world) == ["a"]


def test_applications_may_swap_their_routes(world: World) -> None:
    world.change(ask.deploy_all(("a", "/b", spec()), ("b", "/a", spec())))
    world.converge()
    assert routes(world) == {"/b": "a#d", "/a": "b#d"}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            ask.deploy_all(("c", "/x", spec()), ("d", "/x", spec())),
            ConflictError,
            "route '/x' is taken by endpoint",
        ),
        (
            ask.deploy_all(("c", "/a", spec()), keep_others=True),
            ConflictError,
            "route '/a' is taken by endpoint 'a#d'",
        ),
        (
            ask.deploy_all(("c", "/x", spec()), ("c", "/y", spec())),
            InvalidRequestError,
            "two applications have the name 'c'",
        ),
        (
            ask.deploy_all(("c", "/x", spec()), if_version=0),
            ConflictError,
            "if_version is 0, but the version is 1; the last change was: deploy both",
        ),
    ],
)
def test_a_refused_change_changes_none_of_them(
    world: World, change: ask.Request, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        world.change(change)
    assert (names(world), routes(world)) == (["a", "b"], {"/a": "a#d", "/b": "b#d"})
    assert world.cluster.state.history.last_id == 1


@pytest.mark.parametrize("point", ["before save", "after save", "amid effects"])
def test_a_controller_that_dies_has_made_all_of_it_or_nothing(world: World, point: str) -> None:
    world.crash_at = point
    both = ask.deploy_all(("a", "/a", spec(b"two")), ("c", "/c", spec()))
    world.change(both, request="r")
    world.converge()
    assert names(world) == ["a", "c"]
    assert world.cluster.state.history.last_id == 2
