"""What is told of how a host's processes ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from greenroom.actors.host.ends import KEPT_S, RECORDED_WITHIN_S, Ends, record_end
from greenroom.actors.runtime.logs import replica_log
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.transport.addresses import ProcessAddress

ADDRESS = ProcessAddress("127.0.0.1", 4_000_001)
TAG = "shop#Model#1a2b3c"
CRASH = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f0 (most recent call first):
  File "model.py", line 7 in load
  File "actor.py", line 90 in run
Extension modules: numpy._core (total: 1)
"""


@pytest.fixture
def settings(tmp_path):
    settings = read_settings({"GREENROOM_STATE_DIR": str(tmp_path)})
    settings.run_dir.mkdir()
    settings.logs_dir.mkdir()
    return settings


def cause(settings: HostSettings, ends: Ends | None = None) -> str:
    return asyncio.run((ends or Ends(settings)).cause(TAG, ADDRESS))


CRASH_LINES = [line for line in CRASH.splitlines() if line][:3]
LAST = "one\ntwo\n\n  three\nbad magic number\n"


@pytest.mark.parametrize(
    ("status", "logged", "message"),
    [
        (0, LAST, "exit code 0; its log ends with: two | three | bad magic number"),
        (-signal.SIGSEGV, LAST, "SIGSEGV; its log ends with: two | three | bad magic number"),
        (
            -signal.SIGSEGV,
            f"loading\n{CRASH}",
            f"SIGSEGV; its log ends with: {' | '.join(line.strip() for line in CRASH_LINES)}",
        ),
        (3, "x" * 1_000_000, f"exit code 3; its log ends with: {'x' * 200}"),
        (3, None, "exit code 3"),
    ],
    ids=["a code", "a signal", "a crash of Python", "a long line", "no log"],
)
def test_an_end_is_reported_by_code_or_signal_and_the_last_lines(settings, status, logged, message):
    if logged is not None:
        (settings.logs_dir / f"replica-{TAG}.log").write_text(logged)
    record_end(settings.run_dir, ADDRESS, status)
    assert cause(settings) == message


def cause_of_kill(settings: HostSettings, ends: Ends) -> str:
    """Return what is told of a process that SIGKILL has ended."""
    record_end(settings.run_dir, ADDRESS, -signal.SIGKILL)
    return cause(settings, ends)


def test_a_kill_by_the_kernel_for_memory_is_told_apart_from_others(settings, tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 17\noom_kill 4\n")
    ends = Ends(settings, vmstat)
    assert cause_of_kill(settings, ends) == "SIGKILL"
    vmstat.write_text("pgfault 18\noom_kill 5\n")
    assert cause_of_kill(settings, ends) == "out of memory: SIGKILL by the kernel"
    assert cause_of_kill(settings, ends) == "SIGKILL", "not counted by the kernel"


def test_a_kill_is_not_laid_to_the_kernel_that_has_killed_another_long_ago(settings, tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 4\n")
    ends = Ends(settings, vmstat)
    for counted, expected in ((1, "out of memory: SIGKILL by the kernel"), (2, "SIGKILL")):
        vmstat.write_text(f"oom_kill {5 + counted}\n")
        for _ in range(counted):
            asyncio.run(ends.count())
        assert cause_of_kill(settings, ends) == expected


def test_a_kill_for_the_limit_of_its_own_control_group_is_reported(settings, tmp_path):
    group = tmp_path / "groups" / replica_log(TAG)
    group.mkdir(parents=True)
    ends = Ends(settings, tmp_path / "no vmstat", group.parent)
    (group / "memory.events").write_text("max 12\noom 0\noom_kill 0\n")
    assert cause_of_kill(settings, ends) == "SIGKILL"
    (group / "memory.events").write_text("max 13\noom 1\noom_kill 1\noom_group_kill 1\n")
    assert cause_of_kill(settings, ends) == "out of memory: SIGKILL by the kernel"


@pytest.mark.parametrize("noted", [None, "", "three"])
def test_an_end_that_nobody_recorded_is_not_explained_and_soon_abandoned(settings, noted):
    if noted is not None:
        (settings.run_dir / f"{ADDRESS.number}.end").write_text(noted)
    begun = time.monotonic()
    assert cause(settings) == ""
    assert time.monotonic() - begun < RECORDED_WITHIN_S + 1


@pytest.mark.parametrize("so_far", [None, ""])
def test_a_note_that_comes_a_little_later_is_waited_for(settings, so_far):
    if so_far is not None:  # it is being written
        (settings.run_dir / f"{ADDRESS.number}.end").write_text(so_far)

    async def asked() -> str:
        asking = asyncio.ensure_future(Ends(settings).cause(TAG, ADDRESS))
        await asyncio.sleep(0)
        assert not asking.done()
        record_end(settings.run_dir, ADDRESS, 3)
        return await asking

    assert asyncio.run(asked()) == "exit code 3"


def test_notes_that_nobody_asks_for_are_removed_after_a_while(settings):
    old, new = settings.run_dir / "1.end", settings.run_dir / "2.end"
    for number in (1, 2):
        record_end(settings.run_dir, ProcessAddress("127.0.0.1", number), 0)
    long_ago = time.time() - KEPT_S - 1
    os.utime(old, (long_ago, long_ago))
    Ends(settings).tidy()
    assert (old.exists(), new.exists()) == (False, True)
    Ends(settings).tidy(kept_s=0)  # as a stop does
    assert not new.exists()


def test_what_cannot_be_recorded_is_no_error(tmp_path):
    record_end(tmp_path / "gone", ADDRESS, 3)
    assert not (tmp_path / "gone").exists()
