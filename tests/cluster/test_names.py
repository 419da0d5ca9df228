"""Hosts that join by name follow their leader to another address, as pods' leaders get one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, ClusterHost, cluster_of
from tests.support.namespaces import run_ip
from tests.support.systems import wait_until
from tests.support.template import COMMAND_TIMEOUT_S

pytestmark = pytest.mark.slow

NAME = "leader.greenroom.test"
WHERE = """
from greenroom import serve

@serve.deployment(num_replicas=2, max_replicas_per_host=1)
class Where:
    def __call__(self, request):
        return "here"

app = Where.bind()
"""


def hosts_file(host: ClusterHost) -> Path:
    """Return what `ip netns exec` shows as /etc/hosts there."""
    return Path("/etc/netns") / host.name / "hosts"


@pytest.fixture
def pair(tmp_path):
    """Two hosts, each with a hosts file of its own; nothing runs."""
    with cluster_of(2, tmp_path) as cluster:
        files = [hosts_file(host) for host in cluster.hosts]
        for file in files:
            file.parent.mkdir(parents=True)
        try:
            yield cluster
        finally:
            for file in files:
                file.unlink(missing_ok=True)
                file.parent.rmdir()


def name_leader(pair: Cluster) -> None:
    for host in pair.hosts:
        hosts_file(host).write_text(f"127.0.0.1 localhost\n{pair.hosts[0].address} {NAME}\n")


def start(host: ClusterHost, *flags: str) -> None:
    """Start its system, as a program that reads its hosts file."""
    python = ("ip", "netns", "exec", host.name, sys.executable)
    words = ("-m", "greenroom.serve.cli.main", "start", "--bind", host.address)
    environ = {**os.environ, **host.environ}
    subprocess.run([*python, *words, *flags], env=environ, timeout=COMMAND_TIMEOUT_S, check=True)


def move(host: ClusterHost, address: str) -> None:
    """Give its machine another address."""
    run_ip("-n", host.name, "addr", "flush", "dev", "cable")
    run_ip("-n", host.name, "addr", "add", f"{address}/24", "dev", "cable")
    host.address = address


def test_hosts_follow_a_leader_whose_name_has_another_address(pair):
    leader, other = pair.hosts

    def run_at(*addresses: str) -> bool:
        shown = {each["address"]: each["state"] for each in leader.status()["hosts"]}
        return shown == {f"{each}:1900": "RUNNING" for each in addresses}

    def has_a_replica_each() -> bool:
        return sorted(leader.replicas("default#Where").values()) == ["a", "b"]

    name_leader(pair)
    start(leader)
    key = pair.folder / "given.key"
    key.write_bytes((leader.state_dir / "cluster.key").read_bytes())
    key.chmod(0o600)
    start(other, "--join", f"{NAME}:1900", "--key-file", str(key))

    leader.check("stop")
    hosts_file(other).write_text("127.0.0.1 localhost\n")  # the name is unknown for a while
    move(leader, "10.77.0.11")
    name_leader(pair)
    start(leader)
    wait_until(lambda: run_at("10.77.0.11", "10.77.0.2"), 10, "both hosts run")
    pair.deploy(WHERE, "where")
    assert has_a_replica_each()

    other.crash()
    move(other, "10.77.0.12")
    other.reboot()
    start(other, "--join", f"{NAME}:1900")
    wait_until(lambda: run_at("10.77.0.11", "10.77.0.12"), 10, "both hosts run")
    wait_until(has_a_replica_each, 10, "a replica on each host")
