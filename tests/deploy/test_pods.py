"""deploy/kubernetes-postgres: its pods' commands and variables, on hosts with a real database."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import WHO
from tests.support.cluster import Cluster, ClusterHost, cluster_of
from tests.support.kubernetes import command_of, environment_of, rendered
from tests.support.postgres import PASSWORD, postgres_server
from tests.support.systems import wait_until

DOCUMENTS = rendered("kubernetes-postgres")
PODS = ["greenroom-0", "greenroom-1", "greenroom-2"]
ALL = dict.fromkeys(PODS, "RUNNING")

_command: subprocess.Popen[bytes] | None = None


def begin(command: list[str], environ: dict[str, str], output: str) -> None:
    """Run a pod's command, again and again until it succeeds, as Kubernetes. Called on its host."""

    def run() -> None:
        global _command  # noqa: PLW0603  # one per process
        while True:
            with open(output, "ab") as file:
                _command = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
            if _command.wait() == 0:
                return
            time.sleep(1.0)

    threading.Thread(target=run, daemon=True).start()


def terminate() -> int:
    """End it as Kubernetes does; return its exit code. Called on its host."""
    assert _command is not None
    _command.terminate()
    return _command.wait(60)


class Pods:
    """Hosts that run what the pods run; each has an empty state dir."""

    def __init__(self, cluster: Cluster, uri: str) -> None:
        self.cluster = cluster
        self.secrets = {"greenroom-store": {"uri": uri}}
        self.at: dict[str, ClusterHost] = {}

    def begin(self, name: str, host: ClusterHost) -> None:
        """Let a pod's command run on a host, which has its address."""
        key = self.cluster.make_key()
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.cluster.folder))
        shutil.rmtree(host.state_dir, ignore_errors=True)  # the pod before had another volume
        self.at[name] = host
        environ = {
            **environment_of(DOCUMENTS, name=name, ip=host.address, secrets=self.secrets),
            **host.environ,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "GREENROOM_HOST_NAME": name,
            "GREENROOM_KEY_FILE": f"{folder}/cluster.key",
        }
        command = command_of(DOCUMENTS, key=str(key), tmp=f"{folder}/cluster.key")
        host.call(begin, command, environ, str(folder / "output"))

    def shown(self, *names: str) -> dict[str, str]:
        """Return the states of all pods, as some say who agree; else {}."""
        with contextlib.suppress(AssertionError):
            told = [self.at[name].hosts() for name in names]
            return told[0] if all(each == told[0] for each in told) else {}
        return {}

    def wait_for_all(self, what: str) -> None:
        """Wait until each pod says that all run."""
        begun = time.monotonic()
        self.cluster.wait_for(lambda: self.shown(*PODS) == ALL, 60, what)
        print(f"{what}: after {time.monotonic() - begun:.1f} s")

    def leader(self, name: str) -> str:
        """Return which pod leads, as one of them says."""
        return str(self.at[name].status()["controller"]["host"])


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with (
        cluster_of(5, tmp_path_factory.mktemp("pods")) as cluster,
        postgres_server() as server,
    ):
        machine = cluster.hosts.pop()
        server.address = machine.address
        server.start(prefix=("ip", "netns", "exec", machine.name))
        made = Pods(cluster, server.url)
        try:
            for name, host in zip(PODS, cluster.hosts[:3], strict=True):
                made.begin(name, host)
            made.wait_for_all("all pods run")
            cluster.deploy(WHO)
            yield made
        finally:
            server.stop(now=True)
            machine.kill()


def test_pods_find_each_other_and_any_can_lead(pods: Pods) -> None:
    for name, host in pods.at.items():
        wait_until(lambda host=host: host.get("/")[0] == 200, 10, f"an answer of {name}")
    # The pod that leads is lost with its volume, and made anew at another address.
    lost = pods.leader(PODS[0])
    (other, *_) = (name for name in PODS if name != lost)
    with pods.at[other].load(connections=8) as end_load:
        pods.at[lost].crash()
        pods.begin(lost, pods.cluster.hosts[3])
        pods.wait_for_all(f"{lost} runs again")
        tally = end_load()
    assert not tally.failures, tally
    wait_until(lambda: pods.at[lost].get("/")[0] == 200, 10, f"an answer of {lost}")


def test_a_pod_that_is_ended_leaves_and_lets_another_lead(pods: Pods) -> None:
    leader = pods.leader(PODS[0])
    other = next(name for name in PODS if name != leader)
    assert pods.at[leader].call(terminate) == 0
    rest = {name: state for name, state in ALL.items() if name != leader}
    pods.cluster.wait_for(lambda: pods.shown(other) == rest, 20, "the others go on")
    assert pods.at[other].get("/")[0] == 200
    pods.at[leader].reboot()
    pods.begin(leader, pods.at[leader])
    pods.wait_for_all("it is back, as an empty pod")


def test_pods_that_were_all_lost_come_back_with_what_was_deployed(pods: Pods) -> None:
    for host in pods.at.values():
        host.crash()
    places = list(pods.at.values())
    for name, host in zip(pods.at, [*places[1:], places[0]], strict=True):  # each at another's
        host.reboot()
        pods.begin(name, host)
    pods.wait_for_all("all pods run again")
    wait_until(lambda: pods.at[PODS[0]].get("/")[0] == 200, 20, "an answer")
    outputs = "".join(each.read_text() for each in pods.cluster.folder.glob("*/output*"))
    assert "started" in outputs
    assert PASSWORD not in outputs
