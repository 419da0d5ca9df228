"""Control groups of replicas, in folders that look like the kernel's."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from greenroom.actors.runtime import cgroups
from greenroom.actors.runtime.logs import replica_log

TAG = "shop#Tax#1a2b3c"


@pytest.fixture
def unit(tmp_path):
    """The folder of a unit that may make groups below its own."""
    folder = tmp_path / "system.slice" / "greenroom.service"
    (folder / cgroups.SUBGROUP).mkdir(parents=True)
    (folder / "cgroup.subtree_control").touch()
    return folder


def handed_on(root: Path, own: str) -> Path | None:
    (root / "own").write_text(own)
    return cgroups.handed_on(root, root / "own")


@pytest.mark.parametrize("own", [cgroups.SUBGROUP, replica_log(TAG)])
def test_groups_may_be_made_next_to_that_of_the_host_process(unit, tmp_path, own):
    old = "4:memory:/system.slice\n"
    assert handed_on(tmp_path, f"{old}0::/system.slice/greenroom.service/{own}\n") == unit


@pytest.mark.parametrize(
    "own",
    [
        "0::/system.slice/greenroom.service\n",
        "0::/\n",
        "0::/user.slice/session-1.scope\n",
        "4:memory:/system.slice/greenroom.service/greenroom-host\n",
        "",
    ],
)
def test_elsewhere_there_are_none(unit, tmp_path, own):
    assert unit.is_dir()
    assert handed_on(tmp_path, own) is None


def test_there_are_none_without_the_kernels_file(tmp_path):
    assert cgroups.handed_on(tmp_path, tmp_path / "own") is None


def test_a_group_that_is_removed_as_empty_before_its_replica_is_in_it_is_made_again(
    unit, monkeypatch
):
    made, mkdir = [], Path.mkdir

    def late(path, **options):  # until the host process has removed it
        mkdir(path, **options)
        made.append(path)
        if len(made) == 1:
            cgroups.remove_empty(unit)

    monkeypatch.setattr(Path, "mkdir", late)
    assert cgroups.enter(unit, TAG, 1.0) is not None
    assert len(made) == 2


@pytest.mark.parametrize(
    ("num_cpus", "weight"), [(0.0, 100), (1.0, 100), (0.5, 50), (0.001, 1), (1000.0, 10_000)]
)
def test_a_replica_enters_a_group_of_its_own(unit, num_cpus, weight):
    group = cgroups.enter(unit, TAG, num_cpus)
    assert group is not None
    folder = unit / replica_log(TAG)
    written = {each.name: each.read_text() for each in folder.iterdir()}
    assert written == {
        "cpu.weight": str(weight),
        "memory.oom.group": "1",
        "cgroup.procs": str(os.getpid()),
    }
    assert (unit / "cgroup.subtree_control").read_text() == "+memory +cpu"
    group.limit(2**30)
    assert (folder / "memory.max").read_text() == str(2**30)
    group.limit(None)
    assert (folder / "memory.max").read_text() == "max"


def test_one_that_cannot_goes_on_without_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert cgroups.enter(tmp_path / "gone", TAG, 1.0) is None
        cgroups.Group(tmp_path / "gone").limit(5)
    assert f"{TAG} has no control group of its own" in caplog.text
    assert "memory.max cannot be 5" in caplog.text


def test_what_the_kernel_has_killed_for_memory_is_known(unit):
    assert not cgroups.has_run_out_of_memory(unit, TAG)
    cgroups.enter(unit, TAG, 1.0)
    events = unit / replica_log(TAG) / "memory.events"
    for count, expected in ((0, False), (1, True)):
        events.write_text(f"low 0\nhigh 0\nmax 4\noom {count}\noom_kill {count}\n")
        assert cgroups.has_run_out_of_memory(unit, TAG) is expected


def test_groups_that_are_empty_are_removed(unit):
    cgroups.enter(unit, TAG, 1.0)  # the kernel refuses to remove one with processes
    (unit / replica_log("shop#Tax#gone")).mkdir()
    cgroups.remove_empty(unit)
    left = {each.name for each in unit.iterdir() if each.is_dir()}
    assert left == {cgroups.SUBGROUP, replica_log(TAG)}
