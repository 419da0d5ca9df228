"""Actor systems on two hosts, which are network namespaces, in one convention."""

from __future__ import annotations

import time

import pytest
from thespian.actors import ActorAddress

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.cluster_key import ensure_key
from tests.support.namespaces import two_hosts
from tests.support.systems import wait_until
from tests.transport import on_host
from tests.transport.on_host import PORT


def admin_of(host):
    return ActorAddress(ProcessAddress(host.address, PORT))


class Convention:
    def __init__(self, hosts, folder):
        self.here, self.there = hosts
        self.folder = folder
        ensure_key(folder / "cluster.key")
        self.start("here")
        self.start("there")
        self.worker = self.here.call(on_host.create)
        self.here.call(on_host.ask, self.worker, "watch_convention")
        self.wait_for([True])
        self.remote = self.here.call(on_host.create_somehow, {"side": "there"})

    def start(self, side):
        host = getattr(self, side)
        key_file, log = self.folder / "cluster.key", self.folder / f"{side}.log"
        host.call(on_host.start, host.address, self.here.address, side, key_file, log)

    def notices(self):
        """Return what the worker here was told of the other host: True for joined."""
        (notices,) = self.here.call(on_host.ask, self.worker, "notices")
        return [added for address, added in notices if address == admin_of(self.there)]

    def wait_for(self, notices, timeout_s=10):
        wait_until(lambda: self.notices() == notices, timeout_s, f"told {notices}")


@pytest.fixture
def convention(tmp_path):
    with two_hosts() as hosts:
        yield Convention(hosts, tmp_path)


def pid_of(host, actor):
    return host.call(on_host.ask, actor, "pid")


def test_an_actor_is_created_on_the_host_that_can_run_it_and_is_asked(convention):
    here, there, remote = convention.here, convention.there, convention.remote
    assert here.call(on_host.ask, remote, "echo", 1) == (1,)
    assert remote.addressDetails.host == there.address
    assert pid_of(here, remote) in there.pids()
    assert there.call(on_host.ask, convention.worker, "echo", 2) == (2,)
    assert there.call(on_host.ask, remote, "echo", bytes(10**7)) == (bytes(10**7),)


def test_a_host_that_is_killed_leaves_at_once_and_joins_again_when_it_is_back(convention):
    here, there, worker = convention.here, convention.there, convention.worker
    here.call(on_host.ask, worker, "collect_dead")
    child, _ = here.call(on_host.ask, worker, "create", {"side": "there"})
    there.kill()
    begun = time.monotonic()
    convention.wait_for([True, False])
    assert time.monotonic() - begun < 2
    wait_until(lambda: here.call(on_host.ask, worker, "exits") == (1, True), 5, "its child is too")
    here.call(on_host.tell, worker, ("tell", child, ("echo", "lost")))
    lost = ([("echo", "lost")],)
    wait_until(lambda: here.call(on_host.ask, worker, "dead") == lost, 5, "it came back")
    there.boot()
    convention.start("there")
    convention.wait_for([True, False, True])
    again = here.call(on_host.create_somehow, {"side": "there"})
    assert here.call(on_host.ask, again, "echo", 1) == (1,)
