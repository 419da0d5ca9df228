"""Hosts that join by name follow their leader to another address, as pods' leaders get one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import logs, template
from tests.support.cluster import cluster_of
from tests.support.namespaces import Host, run_ip
from tests.support.systems import wait_until

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


class Pod:
    """A host in a network namespace, with a hosts file and a state dir of its own."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.address = host.address
        self.state_dir = folder / host.address
        self._environ = {
            "GREENROOM_STATE_DIR": str(self.state_dir),
            "GREENROOM_HOST_NAME": f"pod-{host.address}",
            "GREENROOM_HTTP_PORT": "8000",
            "PYTHONPATH": str(folder),
        }
        # What `ip netns exec` shows as /etc/hosts there.
        self.hosts_file = Path("/etc/netns") / host.name / "hosts"
        self.hosts_file.parent.mkdir(parents=True)
        logs.begin(self.state_dir / "logs")

    def greenroom(self, *args: str) -> str:
        """Run a command there; returns what it printed."""
        done = template.greenroom(*args, environ=self._environ, namespace=self.host.name)
        assert done.returncode == 0 or args[0] == "status", done.stderr + done.stdout
        return done.stdout

    def start(self, *flags: str) -> None:
        """Start its system, as a program that reads its hosts file."""
        python = ("ip", "netns", "exec", self.host.name, sys.executable)
        words = ("-m", "greenroom.serve.cli.main", "start", "--bind", self.address)
        subprocess.run(
            [*python, *words, *flags],
            env={**os.environ, **self._environ},
            timeout=template.COMMAND_TIMEOUT_S,
            check=True,
        )

    def status(self) -> dict[str, Any]:
        return json.loads(self.greenroom("status", "--json"))  # type: ignore[no-any-return]

    def hosts(self) -> dict[str, str]:
        return {each["address"]: each["state"] for each in self.status()["hosts"]}

    def replicas(self) -> set[str]:
        """Return on which hosts replicas run."""
        found = self.status()["backends"]["default#Where"]["replicas"]
        return {each["host"] for each in found if each["state"] == "RUNNING"}

    def move(self, address: str) -> None:
        """Give its machine another address."""
        run_ip("-n", self.host.name, "addr", "flush", "dev", "cable")
        run_ip("-n", self.host.name, "addr", "add", f"{address}/24", "dev", "cable")
        self.address = address


@pytest.fixture
def pods(tmp_path):
    (tmp_path / "where.py").write_text(WHERE)
    with cluster_of(2, tmp_path) as cluster:
        made = Pod(cluster.hosts[0], tmp_path), Pod(cluster.hosts[1], tmp_path)
        try:
            yield made
        finally:
            for pod in made:
                pod.hosts_file.unlink(missing_ok=True)
                pod.hosts_file.parent.rmdir()
                logs.end(pod.state_dir / "logs")


def _name(pods: tuple[Pod, Pod]) -> None:
    for pod in pods:
        pod.hosts_file.write_text(f"127.0.0.1 localhost\n{pods[0].address} {NAME}\n")


def test_hosts_follow_a_leader_whose_name_has_another_address(pods):
    leader, other = pods
    _name(pods)
    leader.start()
    key = leader.state_dir.with_name("given.key")
    key.write_bytes((leader.state_dir / "cluster.key").read_bytes())
    key.chmod(0o600)
    other.start("--join", f"{NAME}:1900", "--key-file", str(key))

    leader.greenroom("stop")
    other.hosts_file.write_text("127.0.0.1 localhost\n")  # the name is unknown for a while
    leader.move("10.77.0.11")
    _name(pods)
    leader.start()

    both = {"10.77.0.11:1900": "RUNNING", "10.77.0.2:1900": "RUNNING"}
    wait_until(lambda: leader.hosts() == both, 10, "both hosts run")
    leader.greenroom("deploy", "where:app", "--app-dir", str(leader.state_dir.parent))
    assert len(leader.replicas()) == 2

    other.host.kill()
    other.move("10.77.0.12")
    other.start("--join", f"{NAME}:1900")
    both = {"10.77.0.11:1900": "RUNNING", "10.77.0.12:1900": "RUNNING"}
    wait_until(lambda: leader.hosts() == both, 10, "both hosts run")
    wait_until(lambda: len(leader.replicas()) == 2, 10, "a replica on each host")
