"""deploy/kubernetes-postgres: its pods' commands and variables, on hosts with a real database."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import WHO
from tests.support.cluster import HTTP_PORT, Cluster, ClusterHost
from tests.support.database import shared_database
from tests.support.kubernetes import command_of, environment_of, rendered
from tests.support.postgres import PASSWORD
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

DOCUMENTS = rendered("kubernetes-postgres")
PODS = ["greenroom-0", "greenroom-1", "greenroom-2"]
ALL = dict.fromkeys(PODS, "RUNNING")

JOBS = """
import time
from greenroom import serve

@serve.deployment(num_replicas=2)
@serve.task_consumer(task_processor_config=serve.TaskProcessorConfig(retry_pause_s=0.1))
class Jobs:
    @serve.task_handler
    def add(self, n: int) -> int:
        time.sleep(0.1)
        return n + 1

app = Jobs.bind()
"""

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


def submit(n: int) -> str:
    """Ask for a job until it is accepted; return its id. Called on a host."""
    url = f"http://127.0.0.1:{HTTP_PORT}/jobs/add"
    asked = urllib.request.Request(url, b'{"n": %d}' % n, {"idempotency-key": f"job {n}"})

    def accepted() -> str | None:
        with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=30) as response:
            return str(json.load(response)["id"])
        return None

    return str(wait_until(accepted, 30, f"job {n} is accepted"))


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
            found = [self.at[name].hosts() for name in names]
            return found[0] if all(each == found[0] for each in found) else {}
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
def pods(tmp_path_factory):
    with shared_database(tmp_path_factory.mktemp("pods")) as shared:
        made = Pods(shared.cluster, shared.server.url)
        for name, host in zip(PODS, shared.cluster.hosts, strict=True):
            made.begin(name, host)
        made.wait_for_all("all pods run")
        shared.cluster.deploy(WHO)
        yield made


def test_pods_find_each_other_and_any_can_lead(pods):
    for name, host in pods.at.items():
        wait_until(lambda host=host: host.get("/")[0] == 200, 10, f"an answer of {name}")
    # The pod that leads is lost with its volume, and made anew.
    lost = pods.leader(PODS[0])
    (other, *_) = (name for name in PODS if name != lost)
    with pods.at[other].load(connections=8) as end_load:
        pods.at[lost].crash()
        pods.at[lost].reboot()
        pods.begin(lost, pods.at[lost])
        pods.wait_for_all(f"{lost} runs again")
        tally = end_load()
    assert not tally.failures, tally
    wait_until(lambda: pods.at[lost].get("/")[0] == 200, 10, f"an answer of {lost}")


def test_a_pod_that_is_ended_leaves_and_lets_another_lead(pods):
    leader = pods.leader(PODS[0])
    other = next(name for name in PODS if name != leader)
    assert pods.at[leader].call(terminate) == 0
    rest = {name: state for name, state in ALL.items() if name != leader}
    pods.cluster.wait_for(lambda: pods.shown(other) == rest, 20, "the others go on")
    assert pods.at[other].get("/")[0] == 200
    pods.at[leader].reboot()
    pods.begin(leader, pods.at[leader])
    pods.wait_for_all("it is back, as an empty pod")


def test_jobs_survive_the_death_of_their_queue_its_pod_and_all_pods(pods):
    folder = pods.cluster.folder
    (folder / "jobs.py").write_text(JOBS, encoding="utf-8")
    placed = ["--name", "jobs", "--route-prefix", "/jobs", "--app-dir", str(folder)]
    pods.at[PODS[0]].check("deploy", "jobs:app", *placed)

    def queue() -> dict[str, Any]:
        found = pods.at[PODS[0]].status()["backends"]["jobs#Jobs-queue"]["replicas"]
        return next(each for each in found if each["state"] == "RUNNING")

    lost = queue()["host"]
    one = next(host for name, host in pods.at.items() if name != lost)
    ids = [one.call(submit, n) for n in range(10)]
    os.kill(queue()["pid"], signal.SIGKILL)
    ids += [one.call(submit, n) for n in range(10, 20)]
    pods.at[lost].crash()
    ids += [one.call(submit, n) for n in range(20, 30)]
    assert [one.call(submit, n) for n in (0, 15, 29)] == [ids[0], ids[15], ids[29]]
    for n, job in enumerate(ids):
        path = f"/jobs/{job}/result"
        pods.cluster.wait_for(lambda path=path: one.get(path)[0] == 200, 30, f"result of job {n}")
        assert one.get(path)[1] == str(n + 1)
    # The others are lost too, and all begin with empty volumes, each at another's address.
    for name in PODS:
        if name != lost:
            pods.at[name].crash()
    places = list(pods.at.values())
    for name, host in zip(list(pods.at), [*places[1:], places[0]], strict=True):
        host.reboot()
        pods.begin(name, host)
    pods.wait_for_all("all pods run again")
    for path in ("/", f"/jobs/{ids[0]}/result"):
        wait_until(lambda path=path: one.get(path)[0] == 200, 20, f"an answer at {path}")
    outputs = "".join(each.read_text() for each in pods.cluster.folder.glob("*/output*"))
    assert "started" in outputs
    assert PASSWORD not in outputs
