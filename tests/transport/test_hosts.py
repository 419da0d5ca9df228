"""Actor systems on two hosts, which are network namespaces, in one convention."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from thespian.actors import ActorAddress

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.cluster_key import ensure_key
from tests.support.namespaces import two_hosts
from tests.support.systems import alive, wait_until
from tests.support.timing import check_within
from tests.transport import on_host
from tests.transport.on_host import PORT

VANISHED_S = 6.0  # about 3.5 s is documented; the machine may be busy


@pytest.fixture
def key_file(tmp_path):
    ensure_key(tmp_path / "cluster.key")
    return tmp_path / "cluster.key"


@pytest.fixture
def hosts():
    with two_hosts() as hosts:
        yield hosts


def admin_of(host):
    return ActorAddress(ProcessAddress(host.address, PORT))


class Convention:
    def __init__(self, hosts, key_file, folder, environ=None):
        self.here, self.there = hosts
        self.key_file = key_file
        self.environ = environ or {}
        self.logs = {"here": folder / "here.log", "there": folder / "there.log"}
        self.start("here")
        self.start("there")
        self.worker = self.here.call(on_host.create)
        self.here.call(on_host.ask, self.worker, "watch_convention")
        self.wait_for([True])
        self.remote = self.here.call(on_host.create_somehow, {"side": "there"})

    def start(self, side, key_file=None):
        host = getattr(self, side)
        log, leader = self.logs[side], self.here.address
        key_file = key_file or self.key_file
        host.call(on_host.start, host.address, leader, side, key_file, log, self.environ)

    def notices(self):
        """Return what the worker here was told of the other host: True for joined."""
        (notices,) = self.here.call(on_host.ask, self.worker, "notices")
        return [added for address, added in notices if address == admin_of(self.there)]

    def wait_for(self, notices, timeout_s=10):
        wait_until(lambda: self.notices() == notices, timeout_s, f"told {notices}")

    def warnings(self, side):
        return self.logs[side].read_text().splitlines()


@pytest.fixture
def convention(hosts, key_file, tmp_path):
    return Convention(hosts, key_file, tmp_path)


def pid_of(host, actor):
    return host.call(on_host.ask, actor, "pid")


def test_an_actor_is_created_on_the_host_that_can_run_it_and_is_asked(convention):
    here, there, remote = convention.here, convention.there, convention.remote
    assert here.call(on_host.ask, remote, "echo", 1) == (1,)
    assert remote.addressDetails.host == there.address
    assert pid_of(here, remote) in there.pids()
    assert there.call(on_host.ask, convention.worker, "echo", 2) == (2,)
    assert there.call(on_host.ask, remote, "echo", bytes(10**7)) == (bytes(10**7),)


def test_actors_of_two_hosts_talk_to_each_other(convention):
    here, worker, remote = convention.here, convention.worker, convention.remote
    for sender, target in ((worker, remote), (remote, worker)):
        here.call(on_host.tell, sender, ("flood", target, 0, 1000, 100))
        wait_until(
            lambda t=target: here.call(on_host.ask, t, "noted") == (1000, True), 10, "all are in"
        )


def test_an_actor_is_told_that_its_child_on_another_host_has_died(convention):
    here, worker = convention.here, convention.worker
    child, pid = here.call(on_host.ask, worker, "create", {"side": "there"})
    assert child.addressDetails.host == convention.there.address
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: here.call(on_host.ask, worker, "exits") == (1, True), 5, "it is told")


def test_a_global_name_is_one_actor_for_both_hosts(convention):
    here, there = convention.here, convention.there
    for _ in range(3):
        one = here.call(on_host.create, {"side": "there"}, "one")
        same = there.call(on_host.create, None, "one")
        assert one == same
    pid = pid_of(here, one)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), 5, "it is dead")
    other = wait_until(
        lambda: here.call(on_host.ask, here.call(on_host.create, {"side": "there"}, "one"), "pid"),
        10,
        "another",
    )
    assert other != pid


def test_a_message_for_a_dead_actor_of_another_host_is_a_dead_letter(convention):
    here, worker, remote = convention.here, convention.worker, convention.remote
    here.call(on_host.ask, worker, "collect_dead")
    pid = pid_of(here, remote)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), 5, "it is dead")
    lost = []

    def attempt():
        begun = time.monotonic()
        here.call(on_host.tell, worker, ("tell", remote, ("echo", "lost")))
        lost.append(("echo", "lost"))
        wait_until(lambda: here.call(on_host.ask, worker, "dead") == (lost,), 5, "it came back")
        return time.monotonic() - begun

    check_within(2, attempt)


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


def test_members_join_again_when_a_leader_that_was_killed_is_back(convention):
    here, there = convention.here, convention.there
    member = there.call(on_host.create)
    there.call(on_host.ask, member, "watch_convention")
    here.kill()

    def notices():
        return [added for _, added in there.call(on_host.ask, member, "notices")[0]]

    wait_until(lambda: notices() == [True, False], 5, "the leader is gone")
    here.boot()
    convention.start("here")
    wait_until(lambda: notices() == [True, False, True], 10, "the leader is back")
    actor = here.call(on_host.create_somehow, {"side": "there"})
    assert here.call(on_host.ask, actor, "echo", 1) == (1,)


def test_a_host_that_vanishes_without_a_word_is_dead_after_seconds(convention):
    here, there, worker, remote = (
        convention.here,
        convention.there,
        convention.worker,
        convention.remote,
    )
    here.call(on_host.ask, worker, "collect_dead")
    here.call(on_host.tell, worker, ("flood", remote, 0, 10, 100))
    assert pid_of(here, remote)
    there.cable(up=False)
    begun = time.monotonic()
    here.call(on_host.tell, worker, ("tell", remote, ("echo", "lost")))
    lost = ("echo", "lost")  # and perhaps notes, which had arrived and were not acknowledged
    wait_until(lambda: lost in here.call(on_host.ask, worker, "dead")[0], 20, "it came back")
    assert 1 < time.monotonic() - begun < VANISHED_S
    convention.wait_for([True, False])
    assert time.monotonic() - begun < 2 * VANISHED_S
    there.cable(up=True)
    convention.wait_for([True, False, True], 20)
    again = here.call(on_host.create_somehow, {"side": "there"})
    assert here.call(on_host.ask, again, "echo", 1) == (1,)


def test_a_short_outage_loses_and_repeats_nothing(convention):
    here, there, worker, remote = (
        convention.here,
        convention.there,
        convention.worker,
        convention.remote,
    )
    for begin in range(0, 3000, 1000):
        there.cable(up=False)
        here.call(on_host.tell, worker, ("flood", remote, begin, begin + 1000, 100))
        time.sleep(0.5)  # the outage itself
        there.cable(up=True)
        wait_until(
            lambda total=begin + 1000: here.call(on_host.ask, remote, "noted") == (total, True),
            20,
            "they arrived",
        )
    assert convention.notices() == [True]


def test_a_host_listens_on_one_port_of_the_address_it_is_bound_to(convention):
    for host in (convention.here, convention.there):
        assert host.call(on_host.listeners) == [f"{host.address}:{PORT}"]


def test_nothing_on_the_wire_can_be_read(hosts, key_file):
    spy = hosts[0].another()
    spy.call(on_host.listen_in)
    convention = Convention(hosts, key_file, Path(key_file).parent)
    here, remote = convention.here, convention.remote
    # The host's own name goes with the rest, but may be too short to tell from chance.
    words = (
        b"a word in confidence",
        b"tests.transport.workers",
        b"ActorAddress",
        b"ConventionReg",
        remote.addressDetails.text.encode(),
    )
    assert here.call(on_host.ask, remote, "echo", words[0]) == (words[0],)
    recorded = spy.call(on_host.heard)
    assert len(recorded) > 1000
    assert not [word for word in words if word in recorded]


def test_a_host_of_another_cluster_is_refused_and_nothing_of_it_is_unpickled(
    hosts, key_file, tmp_path
):
    here, there = hosts
    other_key = tmp_path / "other.key"
    ensure_key(other_key)
    logs = [tmp_path / "here.log", tmp_path / "there.log"]
    here.call(on_host.start, here.address, here.address, "here", key_file, logs[0])
    there.call(on_host.start, there.address, here.address, "there", other_key, logs[1])
    wait_until(
        lambda: all("another cluster's file" in log.read_text() for log in logs), 10, "both say so"
    )
    time.sleep(2)  # the member goes on trying
    refusals = [
        [line for line in log.read_text().splitlines() if "another cluster's file" in line]
        for log in logs
    ]
    assert [len(lines) for lines in refusals] == [1, 1], refusals
    assert f"the connection with {there.address}:" in refusals[0][0]
    assert f"the connection with {here.address}:{PORT}:" in refusals[1][0]
    path = tmp_path / "unpickled"
    heard = there.call(on_host.send_bombs, admin_of(here), path)
    assert len(heard) < 20, "an alert of TLS"
    wait_until(lambda: "TLS failed" in logs[0].read_text(), 5, "it is refused")
    assert not Path(f"{path}-{here.address}").exists()
    pickle.loads(pickle.dumps(on_host.Bomb(path)))
    assert Path(f"{path}-here").exists(), "the bombs work"
