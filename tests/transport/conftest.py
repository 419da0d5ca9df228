"""Actor systems on our base, each on a port of its own."""

import pytest
from thespian.actors import ActorSystem

from greenroom.actors.transport.thespian_base import install
from tests.support.systems import free_port
from tests.transport.workers import Worker
from tests.transport.worlds import HERE, THERE, World


@pytest.fixture
def start():
    systems = []

    def start(port=None, capabilities=(), log_defs=None):
        port = port or free_port()
        described = {**dict(capabilities), "Admin Port": port}
        log_defs = log_defs or {"version": 1}
        systems.append(ActorSystem(install(), described, log_defs, transientUnique=True))
        systems[-1].port = port
        return systems[-1]

    yield start
    for each in systems:
        each.shutdown()


@pytest.fixture
def system(start):
    return start()


@pytest.fixture
def worker(system):
    return system.createActor(Worker)


@pytest.fixture
def world(tmp_path):
    """Processes of several hosts, which addresses of 127.0.0.0/8 are."""
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def hosts(world, port):
    """Two hosts: of each its admin, and one more process."""
    return *world.host(HERE, port), *world.host(THERE, port)
