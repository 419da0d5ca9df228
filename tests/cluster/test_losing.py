"""A host dies or is cut off: others go on, what it had is replaced, and nothing is there twice."""

from __future__ import annotations

import time
from collections import Counter

from tests.support.cluster import Cluster, ClusterHost

NOTICED_S, REPLACED_S = 3.0, 10.0  # the promise
SLACK_S = 4.0  # what asking for the status, and a busy machine, may add


def wait_for_loss(cluster: Cluster, lost: ClusterHost, witness: ClusterHost) -> float:
    """Wait until a host counts as lost and is replaced; return how long that took."""
    begun = time.monotonic()
    cluster.wait_for(
        lambda: witness.hosts()[lost.label] == "LOST", NOTICED_S + SLACK_S, "it is noticed"
    )
    cluster.wait_for(
        lambda: (
            lost.label not in witness.replicas("default#Who").values()
            and len(witness.replicas("default#Who")) == 3
        ),
        REPLACED_S,
        "its replicas are replaced",
    )
    took = time.monotonic() - begun
    assert took < REPLACED_S + SLACK_S
    return took


def is_spread(witness: ClusterHost) -> bool:
    status = witness.status()["backends"]["default#Who"]["replicas"]
    return Counter(r["state"] for r in status) == {"RUNNING": 3}


def test_a_host_that_dies_is_replaced_and_the_others_fail_nothing(serving: Cluster) -> None:
    a, b, c = serving.hosts
    with a.load() as end_at_a, c.load() as end_at_c:
        b.crash()
        wait_for_loss(serving, b, c)
        tallies = [end_at_a(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    b.reboot()
    b.start()
    serving.wait_for(lambda: c.hosts()["b"] == "RUNNING", 10, "all know that it is back")
    serving.wait_for(lambda: is_spread(a), 20, "no more than three run")
    assert b.get("/")[0] == 200


def test_a_host_that_is_cut_off_serves_on_and_is_reconciled_when_it_is_back(
    serving: Cluster,
) -> None:
    a, b, c = serving.hosts
    with a.load() as end_at_a, c.load() as end_at_c, b.load() as end_at_b:
        b.cut()
        wait_for_loss(serving, b, c)
        assert b.get("/")[0] == 200
        b.heal()
        serving.wait_for(lambda: a.hosts()["b"] == "RUNNING", 10, "it is back")
        serving.wait_for(lambda: is_spread(a), 30, "three run, and no more")
        tallies = [end_at_a(), end_at_b(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    running = set(a.replicas("default#Who"))
    serving.wait_for(
        lambda: {b.get("/")[1], c.get("/")[1], a.get("/")[1]} <= running, 10, "only those answer"
    )


def test_a_cut_of_one_direction_is_a_cut_and_does_not_flap(serving: Cluster) -> None:
    a, b, c = serving.hosts
    for way in ("sent", "received"):
        b.link(**{way: {"is_cut": True}})
        wait_for_loss(serving, b, c)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert a.hosts()["b"] == "LOST"
            assert len(a.replicas("default#Who")) == 3
        b.heal()
        serving.wait_for(lambda: a.hosts()["b"] == "RUNNING", 10, "it is back")
        serving.wait_for(lambda: is_spread(a), 30, "three run, and no more")


def test_thirty_percent_loss_neither_flaps_hosts_nor_doubles_replicas(serving: Cluster) -> None:
    a, b, _ = serving.hosts
    before = a.replicas("default#Who")
    b.link(sent={"loss": 0.3}, received={"loss": 0.3})
    with a.load(connections=4) as end:
        begun = time.monotonic()
        while time.monotonic() - begun < 15:
            assert a.hosts() == {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}
            assert a.replicas("default#Who") == before
        tally = end()
    assert not tally.failures, tally.summary()
    b.heal()
    assert b.get("/")[0] == 200
