"""What replicas take of a real host, what waits for room, and where the amounts come from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.host.capacity import capacity_of
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.errors import InvalidRequestError
from tests.support.systems import RunningSystem, running_system, wait_until


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningSystem]:
    """A system with room for two CPUs and three disks."""
    environ = {"GREENROOM_NUM_CPUS": "2", "GREENROOM_RESOURCES": '{"disk": 3}'}
    with running_system(tmp_path / "state", **environ) as started:
        yield started


def settings(**environ: str) -> HostSettings:
    return read_settings({"GREENROOM_STATE_DIR": "/nowhere", **environ})


def hello(_request: Any) -> str:
    return "hello"


def test_a_deployment_without_room_waits_and_status_says_for_what(small: RunningSystem) -> None:
    client = serve.Client(small.connection, small.settings)
    first = client.deploy("first", hello, actor_options={"num_cpus": 2})
    client.wait_for_goal(first, 20)
    second = client.deploy("second", hello, actor_options={"num_cpus": 1, "resources": {"disk": 3}})
    with pytest.raises(TimeoutError):
        client.wait_for_goal(second, 0.5)
    told = (
        "a replica needs 1 num_cpus, and 0 num_cpus of 2 num_cpus is free: it fits when 1 num_cpus "
        "more is given back by first (2 num_cpus)"
    )
    wait_until(
        lambda: told in client.get_deployment_info("second")["message"], 5, "what it waits for"
    )
    shown = small.greenroom("status", "--json")
    assert shown.returncode == 1
    assert told in shown.stdout
    assert small.status()["resources"]["num_cpus"] == {"total": 2.0, "taken": 2.0}
    shown = small.greenroom("status")
    assert "backend 'second' is UPDATING: 0 of 1 replicas run; a replica" in " ".join(
        shown.stdout.split()
    )
    client.wait_for_goal(client.delete_deployment("first"), 20)
    client.wait_for_goal(second, 20)
    assert small.get("/second") == (200, b"hello")
    assert small.status()["resources"]["disk"] == {"total": 3.0, "taken": 3.0}
    assert small.greenroom("status").returncode == 0


def test_a_deploy_command_tells_what_it_waits_for(small: RunningSystem, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from greenroom import serve\n"
        "@serve.deployment(actor_options={'num_cpus': 5})\n"
        "def app(request):\n"
        "    return 'hello'\n"
        "app = app.bind()\n"
    )
    log = tmp_path / "deploy.log"
    with log.open("w") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "greenroom.serve.cli.main", "deploy", "mine"],
            env={**os.environ, **small.environ},
            cwd=tmp_path,
            stderr=output,
        )
    try:
        wait_until(
            lambda: "needs 5 num_cpus, and the host has 2 num_cpus in all" in log.read_text(),
            20,
            "the command tells what it waits for",
        )
    finally:
        command.terminate()
        command.wait(10)


def test_what_the_host_has_is_found_unless_it_is_said() -> None:
    found = capacity_of(settings())
    assert found["num_cpus"] == len(os.sched_getaffinity(0))
    assert found["memory"] > 1024**2
    assert found["num_gpus"] >= 0
    said = settings(
        GREENROOM_NUM_CPUS="0.5",
        GREENROOM_NUM_GPUS="2",
        GREENROOM_MEMORY="1e9",
        GREENROOM_RESOURCES='{"disk": 2, "net": 0.5}',
    )
    expected = {"num_cpus": 0.5, "num_gpus": 2.0, "memory": 1e9, "disk": 2.0, "net": 0.5}
    assert capacity_of(said) == expected
    assert capacity_of(read_settings(said.to_environ())) == expected, "as the actors get it"


def test_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Path, "glob", lambda *_: [Path(f"/dev/nvidia{each}") for each in (0, 1, 2, "ctl")]
    )
    assert capacity_of(settings())["num_gpus"] == 3
    for visible, count in (("", 0), ("1", 1), ("0,2", 2), ("0,1,2,3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert capacity_of(settings())["num_gpus"] == count


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("NUM_CPUS", "many", "num_cpus='many': expected a number, 0 or more"),
        ("NUM_CPUS", "-1", "num_cpus='-1': expected a number, 0 or more"),
        ("NUM_GPUS", "nan", "num_gpus='nan': expected a number, 0 or more"),
        ("MEMORY", "4GB", "memory='4GB': expected a number of bytes, 0 or more"),
        ("RESOURCES", "disk", "resources='disk': expected names, each once, with amounts"),
        ("RESOURCES", "disk=", "resources='disk=': expected names, each once, with amounts"),
        ("RESOURCES", "[1]", "resources='[1]': expected names, each once, with amounts"),
        ("RESOURCES", "disk=2,disk=3", "resources='disk=2,disk=3': expected names, each once"),
        ("RESOURCES", '{"disk": true}', "resources['disk']=True: expected a number"),
        ("RESOURCES", "disk=-2", "resources['disk']='-2': expected a number, 0 or more"),
        ("RESOURCES", '{"disk": [2]}', "resources['disk']=[2]: expected a number"),
        ("RESOURCES", '{"num_cpus": 2}', "num_cpus, num_gpus, memory have settings of their own"),
    ],
)
def test_amounts_that_are_none_are_refused(variable: str, value: str, told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        settings(**{f"GREENROOM_{variable}": value})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "given", ["gpu=2,zone=a, disk=0.5", '{"gpu": 2, "zone": "a", "disk": 0.5}']
)
def test_what_is_no_number_is_a_label(given: str) -> None:
    read = read_settings({"GREENROOM_RESOURCES": given})
    assert (read.resources, read.labels) == ({"gpu": 2, "disk": 0.5}, {"zone": "a"})
    again = read_settings(read.to_environ())
    assert (again.resources, again.labels) == (read.resources, read.labels)
