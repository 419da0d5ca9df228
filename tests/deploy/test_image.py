"""What the image promises, without docker: its command as its user, on a read-only root."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from greenroom.actors.runtime.processes import child_pids, identify
from tests.support.container import ROOT, container, dockerfile, instruction
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

IN_FLIGHT = 20
SLOW = """
import asyncio, os
from greenroom import serve

@serve.deployment
class Slow:
    async def __call__(self, request):
        while not os.path.exists("/var/lib/greenroom/app/go"):
            await asyncio.sleep(0.02)
        return "done"

app = Slow.bind()
"""
GRACE_S = 30  # of Kubernetes, unless told otherwise; deploy/kubernetes allows more


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with container(tmp_path_factory.mktemp("image")) as made:
        made.start()
        made.wait_for("started: HTTP at")
        made.check("greenroom", "deploy", "examples.hello:app")
        yield made


def _below(pid: int) -> set[int]:
    found = {pid}
    for child in child_pids(pid):
        found |= _below(child)
    return found


def _is_in_it(pid: str, namespace: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == namespace
    except OSError:
        return False


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/healthz", timeout=30) as response:
            return int(response.status) == 200
    except OSError:  # of which an answer of 503 is one
        return False


def test_all_processes_are_one_tree_without_rights(running):
    namespace = os.readlink(f"/proc/{running.pid}/ns/pid")

    def seen() -> set[int]:  # while none begins or ends
        tree = _below(running.pid)
        all_of_it = {int(each) for each in os.listdir("/proc") if _is_in_it(each, namespace)}
        return tree if tree == all_of_it else set()

    tree = wait_until(seen, 10, "all processes are one tree")
    assert len(tree) > 6
    for pid in tree:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        assert set(status["Uid"].split()) == {str(running.uid)}
        assert int(status["CapBnd"], 16) == 0


def test_the_root_is_read_only_and_the_state_private(running):
    mounts = [line.split() for line in running.check("cat", "/proc/1/mountinfo").splitlines()]
    writable = {where for _, _, _, _, where, options, *_ in mounts if "rw" in options.split(",")}
    outside = {each for each in writable if each.split("/")[1] not in ("dev", "proc")}
    assert outside == {"/tmp", "/var/lib/greenroom"}
    state = running.volume / "state"
    assert state.stat().st_mode & 0o777 == 0o700
    assert state.stat().st_uid == running.uid


def test_the_health_check_is_one_of_the_front(running):
    options, _, command = instruction("HEALTHCHECK").partition(" CMD ")
    assert "--interval" in options
    running.check(*json.loads(command))


def test_what_happens_is_printed_as_json(running):
    running.wait_for("deploy application 'default'")
    assert {"time", "level", "part", "pid", "message"} == set(running.events()[-1])


def test_what_dies_is_replaced_and_leaves_no_zombie(running):
    before = _below(running.pid)
    found = json.loads(running.check("greenroom", "status", "--json"))
    (replica,) = found["applications"]["default"]["deployments"]["Hello"]["replicas"]
    running.check("kill", "-9", str(replica["pid"]))

    def is_whole() -> bool:
        tree = _below(running.pid)
        return all(map(identify, tree)) and len(tree) == len(before) and tree != before

    wait_until(is_whole, 10, "as many processes as before, none a zombie")


def test_a_stop_under_load_loses_no_request_and_ends_in_time(running):
    app_dir = running.volume / "app"
    app_dir.mkdir()
    (app_dir / "slow.py").write_text(SLOW)
    running.check(
        *("greenroom", "deploy", "slow:app", "--name", "slow", "--route-prefix", "/slow"),
        *("--app-dir", "/var/lib/greenroom/app"),
    )

    def ask(number: int) -> bytes:
        with urllib.request.urlopen(f"{running.url}/slow?{number}", timeout=30) as response:
            return bytes(response.read())

    def ongoing() -> str:
        with urllib.request.urlopen(f"{running.url}/-/metrics", timeout=30) as response:
            return str(response.read().decode())

    with ThreadPoolExecutor(IN_FLIGHT + 1) as executor:
        asking = [executor.submit(ask, number) for number in range(IN_FLIGHT)]
        counted = re.compile(
            rf'greenroom_ongoing_requests{{[^}}]*"slow#Slow"[^}}]*}} {IN_FLIGHT}\.0'
        )
        wait_until(lambda: counted.search(ongoing()), 10, "all requests run")
        began = time.monotonic()
        stopping = executor.submit(running.terminate)
        running.wait_for("stopping")
        wait_until(lambda: not is_healthy(running.url), 10, "no new requests are taken")
        (app_dir / "go").touch()
        assert {each.result() for each in asking} == {b"done"}
        code, took_s = stopping.result(), time.monotonic() - began
    assert (code, took_s < GRACE_S) == (0, True), took_s
    assert running.events()[-1]["message"].startswith("stopped; its state stays in")


def test_its_state_is_there_in_the_next_container(running):
    for _ in range(2):
        running.kill()  # as by a node that is lost: nothing is told
        running.printed.unlink()
        running.start()
        running.wait_for("started: HTTP at")

    def status() -> str:
        found = json.loads(running.check("greenroom", "status", "--json"))
        return str(found["applications"]["default"]["status"])

    wait_until(lambda: status() == "RUNNING", 10, "its application runs")


def test_what_the_image_needs_is_sent_to_the_build():
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in rules if line.startswith("!")}
    folders = {found.parent.name for found in ROOT.glob("*/py.typed")}
    assert sent == folders | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert ("VOLUME", "/var/lib/greenroom") in dockerfile()
