"""The leader dies or is stopped: another of the leaders takes over, and only one ever acts."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenroom.actors.runtime.processes import command_line
from tests.cluster.conftest import WHO
from tests.support.cluster import Cluster, ClusterHost, cluster_of

pytestmark = pytest.mark.slow

TAKEOVER_S = 5.0  # the promise
SLACK_S = 4.0  # what finding the new one, asking for the status, and a busy machine may add
STOPPED_S = 8.0  # more than twice the lease
ALL = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts, of which a and b may lead and share a folder, with a replica on each."""
    with cluster_of(3, tmp_path, leaders=2) as cluster:
        cluster.start()
        cluster.deploy(WHO)
        yield cluster


def controllers(cluster: Cluster) -> list[str]:
    """Return the host of every process that is a controller."""
    return [
        host.label
        for host in cluster.hosts
        for pid in host.pids()
        if command_line(pid).startswith("greenroom: controller")
    ]


def wait_for_leader(witness: ClusterHost, label: str, timeout_s: float) -> float:
    """Wait until status names another controller's host; return how long that took."""
    begun = time.monotonic()
    witness.cluster.wait_for(
        lambda: witness.status()["controller"]["host"] == label, timeout_s, f"{label} leads"
    )
    return time.monotonic() - begun


def test_another_takes_over_within_seconds_and_no_get_fails(led: Cluster) -> None:
    a, b, c = led.hosts
    assert (c.hosts(), controllers(led)) == (ALL, ["a"])
    with b.load(connections=16) as end_at_b, c.load(connections=16) as end_at_c:
        a.crash()
        assert wait_for_leader(b, "b", 20) < TAKEOVER_S + SLACK_S
        led.wait_for(lambda: c.hosts()["a"] == "LOST", 20, "its host is lost")
        led.wait_for(lambda: len(c.replicas("default#Who")) == 3, 20, "it is replaced")
        tallies = [end_at_b(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert controllers(led) == ["b"]
    a.reboot()
    a.start()
    led.wait_for(lambda: a.hosts() == ALL, 20, "it is back, and follows")
    assert controllers(led) == ["b"]
    assert a.get("/")[0] == 200


def freeze_outside_of_a_change(host: ClusterHost) -> Callable[[], None]:
    """Stop a leader's host, but not with the store's lock, which no other could have then."""
    lock = host.cluster.folder / "shared" / "store" / "controller" / "change"
    while True:
        thaw = host.freeze()
        with lock.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                thaw()
            else:
                return thaw


def test_a_leader_that_was_stopped_is_refused_and_steps_down(led: Cluster) -> None:
    a, b, c = led.hosts
    thaw = freeze_outside_of_a_change(a)
    try:
        stopped_at = time.monotonic()
        wait_for_leader(c, "b", 20)
        led.wait_for(lambda: c.hosts()["a"] == "LOST", 20, "its host is lost")
        led.wait_for(
            lambda: (
                len(c.replicas("default#Who")) == 3 and time.monotonic() - stopped_at > STOPPED_S
            ),
            40,
            "it is replaced, and was stopped for long",
        )
        epoch = led.folder / "shared" / "store" / "controller" / "epoch"
        before = epoch.read_bytes()
    finally:
        thaw()
    led.wait_for(lambda: controllers(led) == ["b"], 10, "only one is left")
    led.wait_for(lambda: c.hosts() == ALL and a.hosts() == ALL, 20, "it follows")
    assert epoch.read_bytes() == before
    said = a.log("controller.log")
    assert "this controller steps down" in said
    assert "now names another writer" in said
    led.wait_for(lambda: len(b.replicas("default#Who")) == 3, 20, "no more than three run")
    assert {host.get("/")[0] for host in led.hosts} == {200}


def test_no_takeover_while_the_leader_lives_whatever_else_dies(led: Cluster) -> None:
    a, b, c = led.hosts
    pid = a.status()["controller"]["pid"]
    a.call(_kill, pid)
    led.wait_for(
        lambda: c.status()["controller"]["pid"] != pid and c.hosts() == ALL, 20, "another began"
    )
    assert c.status()["controller"]["host"] == "a"
    b.cut()  # it still reaches the folder, and sees that the lease is renewed
    led.wait_for(lambda: c.hosts()["b"] == "LOST", 20, "it is lost")
    end = time.monotonic() + 5  # longer than the lease
    while time.monotonic() < end:
        assert set(controllers(led)) == {"a"}
    b.heal()
    led.wait_for(lambda: c.hosts() == ALL, 20, "it is back")
    assert controllers(led) == ["a"]


def test_a_leader_that_is_stopped_hands_over_at_once_and_no_get_fails(led: Cluster) -> None:
    a, b, c = led.hosts
    with b.load(connections=16) as end_at_b, c.load(connections=16) as end_at_c:
        a.check("stop")
        wait_for_leader(c, "b", 10)
        led.wait_for(lambda: len(c.replicas("default#Who")) == 3, 20, "all run")
        tallies = [end_at_b(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert "releases the lease to host b" in a.log("controller.log")
    left = {"b": "RUNNING", "c": "RUNNING"}
    led.wait_for(lambda: c.hosts() == left, 10, "it has left, and is not lost")
    assert controllers(led) == ["b"]
    a.start()
    led.wait_for(lambda: c.hosts() == ALL and a.hosts() == ALL, 20, "it is back, and follows")
    b.check("stop")
    wait_for_leader(c, "a", 10)
    led.wait_for(lambda: c.hosts() == {"a": "RUNNING", "c": "RUNNING"}, 10, "b has left")


def test_a_leader_whom_nobody_hears_gives_way_to_one_that_others_hear(led: Cluster) -> None:
    a, b, c = led.hosts
    c.cut()  # then a and b reach one each, and a leads on
    led.wait_for(lambda: b.hosts()["c"] == "LOST", 20, "it is lost")
    c.heal()
    led.wait_for(lambda: b.hosts() == ALL, 20, "it is back")
    assert controllers(led) == ["a"]
    with b.load(connections=16) as end_at_b, c.load(connections=16) as end_at_c:
        a.cut()  # it reaches the folder all the same
        wait_for_leader(c, "b", 30)
        led.wait_for(lambda: controllers(led) == ["b"], 10, "only one leads")
        led.wait_for(lambda: len(b.replicas("default#Who")) == 3, 30, "its replica is replaced")
        tallies = [end_at_b(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert "releases the lease to host b" in a.log("controller.log")
    assert a.get("/")[0] == 200  # it serves on with what it has
    a.heal()
    led.wait_for(lambda: c.hosts() == ALL and a.hosts() == ALL, 30, "it is back, and follows")
    led.wait_for(lambda: len(b.replicas("default#Who")) == 3, 20, "no more than three run")
    assert controllers(led) == ["b"]


def _kill(pid: int) -> None:
    import os  # noqa: PLC0415  # on the host
    import signal  # noqa: PLC0415

    os.kill(pid, signal.SIGKILL)
