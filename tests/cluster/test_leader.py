"""With one leader: its controller dies, and all are shut down."""

from __future__ import annotations

import os
import signal

from tests.support.cluster import Cluster


def test_the_death_of_the_controller_alone_is_noticed_by_nobody(serving: Cluster) -> None:
    a, b, c = serving.hosts
    before = a.replicas("default#Who")
    with b.load() as end:
        pid = a.status()["controller"]["pid"]
        os.kill(pid, signal.SIGKILL)
        serving.wait_for(lambda: c.status()["controller"]["pid"] != pid, 20, "there is another")
        serving.wait_for(
            lambda: b.hosts() == {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}, 20, "all are"
        )
        serving.wait_for(lambda: b.replicas("default#Who") == before, 20, "nothing has moved")
        tally = end()
    assert not tally.failures, tally.summary()


def test_a_shutdown_on_any_host_stops_all_and_deletes_their_state(serving: Cluster) -> None:
    for host in serving.hosts:
        assert (host.state_dir / "run").exists()
    serving.hosts[1].check("shutdown")
    for host in serving.hosts:
        serving.wait_for(
            lambda h=host: not (h.state_dir / "run").exists(), 40, f"{host.label} has stopped"
        )
        assert not (host.state_dir / "store").exists()
        code, _, err = host.run("status")
        assert (code, "no actor system answers" in err) == (1, True)
