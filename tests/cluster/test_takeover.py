"""The leader dies or is stopped: another of the leaders takes over, and only one ever acts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from greenroom.actors.transport.cluster_key import read_key
from greenroom.core.operations import RotateKey
from tests.cluster.conftest import ALL, keep
from tests.support.cluster import ClusterHost, connection, controllers, read_status
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

TAKEOVER_S = 5.0  # the promise
SLACK_S = 4.0  # what finding the new one, asking for the status, and a busy machine may add


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Hosts of which a and b may lead, and share a folder."""
    with keep(tmp_path_factory, leaders=2) as kept:
        yield kept


@pytest.fixture
def roles(serving):
    """The host that leads, the one that may, and the one that never does."""
    a, b, c = serving.hosts
    return (a, b, c) if c.status()["controller"]["host"] == "a" else (b, a, c)


def wait_for_leader(witness: ClusterHost, label: str, timeout_s: float) -> float:
    """Wait until status names another controller's host; return how long that took."""
    begun = time.monotonic()
    witness.cluster.wait_for(
        lambda: witness.status()["controller"]["host"] == label, timeout_s, f"{label} leads"
    )
    return time.monotonic() - begun


def test_another_takes_over_within_seconds_and_no_get_fails(serving, roles):
    leader, heir, c = roles
    assert controllers(serving) == [leader.label]
    with heir.load(connections=16) as end_at_heir, c.load(connections=16) as end_at_c:
        leader.crash()
        assert wait_for_leader(heir, heir.label, 20) < TAKEOVER_S + SLACK_S
        serving.wait_for(lambda: c.hosts()[leader.label] == "LOST", 20, "its host is lost")
        serving.wait_for(lambda: len(c.replicas("default#Who")) == 3, 20, "it is replaced")
        tallies = [end_at_heir(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert controllers(serving) == [heir.label]
    leader.reboot()
    leader.start()
    serving.wait_for(lambda: leader.hosts() == ALL, 20, "it is back, and follows")
    assert controllers(serving) == [heir.label]
    assert leader.get("/")[0] == 200


def test_a_leader_that_is_stopped_hands_over_at_once_and_no_get_fails(serving, roles):
    leader, heir, c = roles
    with heir.load(connections=16) as end_at_heir, c.load(connections=16) as end_at_c:
        leader.check("stop")
        wait_for_leader(c, heir.label, 10)
        serving.wait_for(lambda: len(c.replicas("default#Who")) == 3, 20, "all run")
        tallies = [end_at_heir(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert f"releases the lease to host {heir.label}" in leader.log("controller.log")
    left = {heir.label: "RUNNING", "c": "RUNNING"}
    serving.wait_for(lambda: c.hosts() == left, 10, "it has left, and is not lost")
    assert controllers(serving) == [heir.label]
    leader.start()


def test_a_leader_whom_nobody_hears_gives_way_to_one_that_others_hear(serving, roles):
    leader, heir, c = roles
    c.cut()  # then the other two reach one each, and the leader leads on
    serving.wait_for(lambda: heir.hosts()["c"] == "LOST", 20, "it is lost")
    c.heal()
    serving.wait_for(lambda: heir.hosts() == ALL, 20, "it is back")
    assert controllers(serving) == [leader.label]
    with heir.load(connections=16) as end_at_heir, c.load(connections=16) as end_at_c:
        leader.cut()  # it reaches the folder all the same
        wait_for_leader(c, heir.label, 30)
        serving.wait_for(lambda: controllers(serving) == [heir.label], 10, "only one leads")
        serving.wait_for(lambda: len(heir.replicas("default#Who")) == 3, 30, "it is replaced")
        tallies = [end_at_heir(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert f"releases the lease to host {heir.label}" in leader.log("controller.log")
    assert leader.get("/")[0] == 200  # it serves on with what it has
    leader.heal()
    serving.wait_for(lambda: c.hosts() == ALL and leader.hosts() == ALL, 30, "it follows")
    serving.wait_for(lambda: len(heir.replicas("default#Who")) == 3, 20, "no more than three run")
    assert controllers(serving) == [heir.label]


def replace_key(environ: dict[str, str]) -> Any:
    """Have the key replaced, by the connection of ``read_status``. Called on a host."""
    return connection(environ).request(RotateKey(), timeout_s=100)


@pytest.mark.timeout(240)  # it starts many processes, which a machine with other work has to do
def test_another_takes_over_amid_the_replacing_of_the_key(serving, roles):
    leader, heir, c = roles
    key = heir.state_dir / "cluster.key"
    before = read_key(key)
    asking = heir.another()
    asking.call(read_status, heir.environ)
    answers: list[Any] = []
    c.cut()  # so that the replacing waits
    thread = threading.Thread(target=lambda: answers.append(asking.call(replace_key, heir.environ)))
    thread.start()
    wait_until(lambda: read_key(key) != before or answers, 20, "it has begun")
    leader.crash()
    c.heal()
    thread.join(100)
    ((hosts, away),) = [(answer["hosts"], answer["away"]) for answer in answers]
    assert hosts[0] == heir.label  # which has taken over
    new = read_key(key)
    assert new != before
    if "c" in away:  # where the machine was so slow that it was lost before
        (c.state_dir / "cluster.key").write_bytes(key.read_bytes())
    assert "c" in away or read_key(c.state_dir / "cluster.key") == new
    leader.reboot()
    (leader.state_dir / "cluster.key").write_bytes(key.read_bytes())  # as for a lost host
    leader.start(key_file=key)
    serving.wait_for(lambda: c.hosts() == ALL and leader.hosts() == ALL, 20, "all are back")
    assert c.status()["controller"]["host"] == heir.label
    assert {host.get("/")[0] for host in serving.hosts} == {200}
