"""Real systems: one that most tests share, and as many of their own as the others need."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.messages.control import StopReplica
from greenroom.serve.admin import applications
from greenroom.serve.build import build
from greenroom.serve.deployments import Application
from greenroom.serve.handle import DeploymentHandle
from tests.actors.by_hand import Hand
from tests.actors.noting import wait_for_notes
from tests.actors.one_process import OneProcess
from tests.support.systems import RunningSystem, running_system

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """One system for the whole tier; at its end nothing of it may be left."""
    with running_system(tmp_path_factory.mktemp("shared")) as system:
        yield system


@pytest.fixture(scope="session")
def client(running):
    return serve.Client(running.connection, running.settings)


@pytest.fixture(scope="session")
def hand(running):
    hand = Hand(running.settings.admin_port)
    yield hand
    hand.close()


@pytest.fixture
def name():
    """A name that no other test uses; "/" + name is a free route."""
    return f"app{next(_numbers)}"


@pytest.fixture
def noted(tmp_path):
    """Wait for notes of :class:`~tests.actors.noting.Noting` in this test's folder."""
    return partial(wait_for_notes, tmp_path)


@pytest.fixture
def own_system(tmp_path):
    with running_system(tmp_path / "state") as system:
        yield system


def deploy(
    running: RunningSystem, application: Application, name: str = "default", route: str | None = "/"
) -> DeploymentHandle:
    """Do what ``serve.run`` does, on this system."""
    return applications.deploy(running.connection, build(application, name, route))


@pytest.fixture
def deployed(running, name):
    """Deploy on the shared system under this test's name and route; deleted afterwards."""

    def bring_up(application: Application) -> DeploymentHandle:
        return deploy(running, application, name, f"/{name}")

    yield bring_up
    applications.delete(running.connection, name)


@pytest.fixture
def serving(client, name):
    """Bring up a backend, NAME:v1 and so on; the first is served at /NAME. Returns its tag."""
    tags: list[str] = []

    def bring_up(
        target: Any, *args: Any, endpoint: dict[str, Any] | None = None, **config: Any
    ) -> str:
        tags.append(tag := f"{name}:v{len(tags) + 1}")
        client.wait_for_goal(client.create_backend(tag, target, *args, config=config), 20)
        if len(tags) == 1:
            client.create_endpoint(name, backend=tag, route=f"/{name}", **(endpoint or {}))
        return tag

    yield bring_up
    client.delete_endpoint(name)
    for goal in [client.delete_backend(tag, force=True) for tag in tags]:
        client.wait_for_goal(goal, 20)


@pytest.fixture(scope="module")
def deployed_once(running):
    """Deploy on the shared system for all of a module's tests; returns the route."""
    name = f"app{next(_numbers)}"

    def bring_up(application: Application) -> str:
        deploy(running, application, name, f"/{name}")
        return f"/{name}"

    yield bring_up
    applications.delete(running.connection, name)


@pytest.fixture
def one_process():
    """Have processes of each kind in this one, closed at the test's end."""
    with contextlib.ExitStack() as made:

        def make(target: Any, **options: Any) -> OneProcess:
            return made.enter_context(contextlib.closing(OneProcess(target, **options)))

        yield make


@pytest.fixture
def replica_of(hand):
    """Have replicas by hand, stopped at the test's end."""
    replicas = []

    def make(target: Any, *args: Any, **config: Any) -> Any:
        replica = hand.replica(target, *args, **config)
        replicas.append(replica)
        return replica

    yield make
    for replica in replicas:
        replica.send(StopReplica(replica=replica.tag, drain_s=0.0))
