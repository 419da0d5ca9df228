"""The processes of a host's system are found by their marks, whatever is on record."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import (
    HOST_ROLE,
    MARK,
    RunRecords,
    folder_of_port,
    is_marked,
    mark_of,
    role_of,
)
from greenroom.actors.runtime.settings import read_settings
from tests.support import template
from tests.support.systems import alive, wait_until

MARKS_ITSELF = """
import os, sys, time
from pathlib import Path
from greenroom.actors.runtime.records import can_mark, mark
assert can_mark(Path(sys.argv[1]))
mark(Path(sys.argv[1]))
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "600"])
print("marked", flush=True)
time.sleep(600)
"""

SHOWS_A_TITLE = """
import time
from greenroom.actors.runtime.records import show_title
show_title("http master " + 80 * "x")
show_title("http master")
print("titled", flush=True)
time.sleep(600)
"""


def started(*command: str, **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_process_marks_itself_and_its_children_without_another_program(tmp_path):
    """So `greenroom start` can fork the host process, with what the command has imported."""
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to("state")
    records = RunRecords(tmp_path / "link/run")  # by whatever name
    records.add(this_process(), "replica")  # the calling process is not looked for
    with started(sys.executable, "-c", MARKS_ITSELF, str(tmp_path / "state")) as parent:
        try:
            assert parent.stdout.readline() == b"marked\n"
            # Within the child's exec, /proc shows neither the old environment nor the new one.
            wait_until(lambda: len(records.found()) == 2 and sleeps(records), 5, "the child's exec")
            assert parent.pid in {process.pid for process in records.found()}
            assert RunRecords(tmp_path / "other/run").found() == {}
            ended = records.kill()
            assert len(ended) == 2
            assert not [each for each in ended if alive(each.pid)]
        finally:
            parent.kill()


def test_a_title_does_not_overwrite_the_mark_of_another_program(tmp_path):
    with started(sys.executable, "-c", SHOWS_A_TITLE, **{MARK: mark_of(tmp_path)}) as child:
        try:
            assert child.stdout.readline() == b"titled\n"
            assert role_of(child.pid) == "http master"
            assert is_marked(child.pid, tmp_path)
        finally:
            child.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
def test_a_process_of_another_user_is_not_ours_whatever_its_environment_says(tmp_path):
    environ = {MARK: mark_of(tmp_path)}
    with (
        subprocess.Popen(["sleep", "600"], env=environ, user=65534) as other,
        subprocess.Popen(["sleep", "600"], env=environ) as ours,
    ):
        try:
            wait_until(lambda: is_marked(ours.pid, tmp_path), 5, "its start")
            assert not is_marked(other.pid, tmp_path)
            found = {process.pid for process in RunRecords(tmp_path / "run").found()}
            assert found == {ours.pid}
        finally:
            other.kill()
            ours.kill()


def test_stop_ends_what_is_on_no_record(tmp_path):
    """As after the loss of ``run/``, or of a process that died before it was on record."""
    settings = read_settings({"GREENROOM_STATE_DIR": str(tmp_path / "state")})
    assert not system.stop(settings)
    with started("sleep", "600", **{MARK: mark_of(tmp_path / "state")}) as left:
        wait_until(lambda: is_marked(left.pid, tmp_path / "state"), 5, "its start")
        assert system.stop(settings)
        assert not alive(left.pid)


def test_commands_find_the_state_dir_of_what_runs_at_a_port_unless_one_is_named(
    own_system, tmp_path
):
    shown = own_system.greenroom("logs", "--state-dir", str(tmp_path / "other"))
    assert shown.returncode == 1
    assert f"in {tmp_path / 'other'}" in shown.stderr
    port, folder = own_system.settings.admin_port, own_system.settings.state_dir
    assert folder_of_port(port) == folder.resolve()
    environ = {"GREENROOM_STATE_DIR": ""}

    def greenroom(*args: str) -> str:
        output = template.greenroom(*args, "--admin-port", str(port), environ=environ)
        assert output.returncode == 0, output.stderr
        return output.stdout

    assert "controller | " in greenroom("logs", "controller")
    assert str(folder) in greenroom("stop")
    assert folder_of_port(port) is None


def test_spared_roles_and_what_they_have_started_are_left_alone(tmp_path):
    environ = {**os.environ, MARK: mark_of(tmp_path)}
    shell, sleep = shutil.which("sh"), shutil.which("sleep")
    worker = ["greenroom: http worker", "-c", "sleep 600 & wait"]
    with (
        subprocess.Popen(worker, executable=shell, env=environ) as spared,
        subprocess.Popen(["greenroom: proxy", "600"], executable=sleep, env=environ) as actor,
    ):
        records = RunRecords(tmp_path / "run")
        wait_until(lambda: len(records.found()) == 3 and sleeps(records), 5, "three processes")
        ended = records.kill(spare=("http worker",))
        assert [each.pid for each in ended] == [actor.pid]
        assert len(records.found()) == 2
        records.kill()
        spared.wait(5)
        assert records.found() == {}


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("greenroom: host", "host"),
        ("greenroom: host (starting)", "host"),
        ("greenroom: replica default#Host#1", "replica"),
        ("greenroom: http worker", "http worker"),
        ("sleep", ""),
    ],
)
def test_a_role_is_known_by_the_title(title, role):
    with subprocess.Popen([title, "600"], executable=shutil.which("sleep")) as process:
        try:
            wait_until(lambda: title in _command(process.pid), 5, "its start")
            assert role_of(process.pid) == role
        finally:
            process.kill()


def sleeps(records: RunRecords) -> bool:
    """Return whether one of the processes is ``sleep`` by now, and no copy of who started it."""
    return any(_command(process.pid).startswith("sleep") for process in records.found())


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


def test_a_record_that_the_disk_does_not_take_is_written_when_it_does(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.write_text("in the way")
    later: list[tuple[float, Callable[[], None]]] = []
    records = RunRecords(folder, call_later=lambda *when: later.append(when))
    process = this_process()
    records.add(process, HOST_ROLE, None, tag="one")
    assert records.alive() == {}
    assert str(folder) in caplog.text
    (_, again) = later.pop()
    again()
    assert len(later) == 1, "it tries again and again"
    folder.unlink()
    later.pop()[1]()
    assert not later
    assert records.alive() == {process: HOST_ROLE}
    assert records.details(HOST_ROLE) == [{"tag": "one"}]
    records.remove(process)
    assert records.alive() == {}


def test_a_record_that_was_never_written_is_not_written_after_the_end(tmp_path):
    folder = tmp_path / "run"
    folder.write_text("in the way")
    records, process = RunRecords(folder), this_process()
    records.add(process, HOST_ROLE)
    records.remove(process)
    folder.unlink()
    records.write_owed()
    assert records.alive() == {}
