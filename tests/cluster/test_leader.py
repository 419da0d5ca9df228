"""With one leader: it goes and comes back, its controller dies, and all are shut down."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import WHO
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow


def test_without_its_leader_a_cluster_serves_on_and_all_is_as_before_when_it_is_back(
    serving: Cluster,
) -> None:
    a, b, c = serving.hosts
    with b.load() as end_at_b, c.load() as end_at_c:
        a.crash()
        code, _, err = b.run("status")
        assert (code, "the host that leads may be stopped, or cut off" in err) == (1, True), err
        a.reboot()
        a.start()
        serving.wait_for(
            lambda: b.hosts() == {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}, 20, "all are"
        )
        serving.wait_for(
            lambda: sorted(c.replicas("default#Who").values()) == ["a", "b", "c"], 20, "three run"
        )
        tallies = [end_at_b(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert a.get("/")[0] == 200


def test_a_shutdown_on_any_host_stops_all_and_deletes_their_state(three: Cluster) -> None:
    three.start()
    three.deploy(WHO)
    for host in three.hosts:
        assert (host.state_dir / "run").exists()
    three.hosts[1].check("destroy", "--yes")
    for host in three.hosts:
        three.wait_for(
            lambda h=host: not (h.state_dir / "run").exists(), 40, f"{host.label} has stopped"
        )
        assert not (host.state_dir / "store").exists()
        code, _, err = host.run("status")
        assert (code, "no actor system answers" in err) == (1, True)
