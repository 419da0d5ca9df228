"""A takeover while the cluster file is being replaced."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from greenroom.actors.transport.cluster_key import read_key
from greenroom.core.operations import RotateKey
from tests.cluster.conftest import WHO
from tests.support.cluster import Cluster, cluster_of, connection, read_status
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

ALL = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}
HEARD = b"default#Who"  # in all that is said of the application


def replace_key(environ: dict[str, str]) -> Any:
    """Have the key replaced, by the connection of ``read_status``. Called on a host."""
    return connection(environ).request(RotateKey(), timeout_s=100)


@pytest.fixture
def led(tmp_path: Path) -> Any:
    """Three hosts, of which a and b may lead."""
    with cluster_of(3, tmp_path / "cluster", leaders=2) as cluster:
        cluster.folder.mkdir(exist_ok=True)
        cluster.start()
        cluster.switch("listen_in")
        cluster.deploy(WHO)
        yield cluster


@pytest.mark.timeout(240)  # it starts many processes, which a machine with other work has to do
def test_another_takes_over_amid_the_replacing_of_the_key(led: Cluster) -> None:
    cluster = led
    a, b, c = cluster.hosts
    key = b.state_dir / "cluster.key"
    before = read_key(key)
    asking = b.another()
    asking.call(read_status, b.environ)
    answers: list[Any] = []
    c.cut()  # so that the replacing waits
    thread = threading.Thread(target=lambda: answers.append(asking.call(replace_key, b.environ)))
    thread.start()
    wait_until(lambda: read_key(key) != before or answers, 20, "it has begun")
    a.crash()
    c.heal()
    thread.join(100)
    ((hosts, away),) = [(answer["hosts"], answer["away"]) for answer in answers]
    assert hosts[0] == "b"  # which has taken over
    new = read_key(key)
    assert new != before
    if "c" in away:  # where the machine was so slow that it was lost before
        (c.state_dir / "cluster.key").write_bytes(key.read_bytes())
    assert "c" in away or read_key(c.state_dir / "cluster.key") == new
    a.reboot()
    (a.state_dir / "cluster.key").write_bytes(key.read_bytes())  # as an operator of a lost host
    a.start(key_file=key)
    cluster.wait_for(lambda: c.hosts() == ALL and a.hosts() == ALL, 20, "all are back")
    assert c.status()["controller"]["host"] == "b"
    assert {host.get("/")[0] for host in cluster.hosts} == {200}
    assert len(heard := cluster.switch("heard")) > 100_000
    assert HEARD not in heard
