"""The cluster's key is replaced while hosts serve; who lacks the new one is out."""

from __future__ import annotations

import stat

import pytest

from greenroom.actors.transport.cluster_key import read_key
from tests.support.cluster import Cluster, ClusterHost

pytestmark = pytest.mark.slow

ALL = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}


def key_files(host: ClusterHost) -> list[str]:
    return sorted(path.name for path in host.state_dir.glob("cluster.key*"))


@pytest.mark.timeout(240)  # it starts many processes, which a machine with other work has to do
def test_the_key_is_replaced_under_load_and_an_evicted_host_stays_out(serving: Cluster) -> None:
    a, b, c = serving.hosts
    before = read_key(a.state_dir / "cluster.key")
    replicas = a.replicas("default#Who")
    with a.load(connections=4) as end_at_a, c.load(connections=4) as end_at_c:
        assert "the key is replaced on a, b, c\n" in c.check("rotate-key")
        for host in serving.hosts:
            path = host.state_dir / "cluster.key"
            assert before != read_key(path) == read_key(a.state_dir / "cluster.key")
            assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.glob("cluster.key*")
                    } == {0o600}  # fmt: skip
            assert key_files(host) == ["cluster.key"]
            assert host.hosts() == ALL
        assert a.replicas("default#Who") == replicas
        b.cut()
        serving.wait_for(lambda: c.hosts()["b"] == "LOST", 20, "b is lost")
        code, out, err = a.run("rotate-key")
        assert (code, out) == (0, "the key is replaced on a, c\n")
        assert "host 'b' is lost and lacks the new key: copy cluster.key" in err
        a.check("evict", "b")
        b.heal()
        told = "or a newer one since `greenroom rotate-key`: then copy"
        serving.wait_for(lambda: told in b.log("host.log"), 20, "b is told what it lacks")
        serving.wait_for(
            lambda: "it refuses this host's certificate" in a.log("host.log"), 20, "and a says so"
        )
        assert a.hosts() == c.hosts() == {"a": "RUNNING", "c": "RUNNING"}
        tallies = [end_at_a(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    new = (a.state_dir / "cluster.key").read_bytes()
    (b.state_dir / "cluster.key").write_bytes(new)  # by hand, as it was told
    serving.wait_for(lambda: c.hosts() == ALL, 20, "it is back, without a restart")
