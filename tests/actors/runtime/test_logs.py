"""The log files: who reads them, and how long they stay."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.actors.runtime.liveness import OtherPulse
from greenroom.actors.runtime.logs import (
    LineFormatter,
    last_lines,
    one_line,
    one_record,
    open_log,
    prune_replica_logs,
    replica_log,
    rotate_logs,
)
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import read_settings
from tests.support.systems import RunningSystem, wait_until


@pytest.fixture
def logs_dir(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def make_logs(folder: Path, *stems: str) -> None:
    """Make logs, each one second younger than the one before."""
    for number, stem in enumerate(stems):
        path = folder / f"{stem}.log"
        path.touch()
        os.utime(path, (number, number))


def stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.log"))


def test_the_newest_logs_of_each_deployment_stay(logs_dir):
    old_code = [f"replica-app#a#code1#{number}" for number in range(3)]
    new_code = [f"replica-app#a#code2#{number}" for number in range(2)]
    plain = [f"replica-greet:v1#{number}" for number in range(3)]
    make_logs(logs_dir, "controller", "replica", *old_code, *new_code, *plain)
    prune_replica_logs(logs_dir, [], keep=2)
    left = sorted(["controller", "replica", *new_code, *plain[1:]])
    assert stems(logs_dir) == left
    prune_replica_logs(logs_dir, [])  # twenty stay
    assert stems(logs_dir) == left


def test_the_log_of_a_running_replica_stays_however_old_it_is(logs_dir):
    names = [f"replica-app#a#code#{number}" for number in range(4)]
    make_logs(logs_dir, *names)
    with (logs_dir / f"{names[0]}.log").open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=output
        )
    try:
        prune_replica_logs(logs_dir, [identify(child.pid)], keep=1)
        assert stems(logs_dir) == [names[0], names[3]]
    finally:
        child.communicate(b"\n")
    prune_replica_logs(logs_dir, [], keep=1)
    assert stems(logs_dir) == [names[3]]


def test_a_log_is_for_its_owner_only_also_one_that_was_not(tmp_path):
    settings = read_settings({}, state_dir=str(tmp_path / "state"))
    for _ in range(2):
        os.close(open_log(settings, "host"))
        path = settings.logs_dir / "host.log"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)


FORGED = "GET /\n2026-01-01 00:00:00,000 1 ERROR forged\r\n\x1b[2J\x9b31m\u2028\u202e\ud800 \t \x00"


def test_nothing_that_is_logged_forges_a_line_or_steers_a_terminal():
    record = logging.makeLogRecord({"msg": "asked for %s", "args": (FORGED,), "levelname": "INFO"})
    record.exc_info = (ValueError, ValueError(FORGED), None)
    first, *others = LineFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "INFO asked for GET /"
    assert all(line.startswith("  ") for line in others)
    found = "\n".join(others).replace("\t", " ")
    assert found.replace("\n", "").isprintable()
    assert r"\x1b[2J\x9b31m\u2028\u202e\ud800" in found
    assert found.count("ERROR forged") == 2, "of the message and of the exception"


def test_ordinary_text_is_logged_as_it_is():
    text = "größe 日本 👩‍💻 \t 100 % \u00a0 \\n"
    assert one_record(text) == one_line(text) == text
    assert one_line("a\nb") == "a\\nb"


def test_a_replica_log_has_a_name_that_file_systems_take():
    assert replica_log("app#My/Model v2#c0de#1") == "replica-app#My_Model_v2#c0de#1"


def test_a_log_that_a_process_prints_to_is_rotated_and_stays_its(logs_dir):
    path = logs_dir / "replica-a#b#c#d.log"
    program = "for line in iter(input, 'end'): print(line, flush=True)"
    with path.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=output, text=True
        )
    try:
        for letter in "abcd":
            child.stdin.write(letter * 100 + "\n")
            child.stdin.flush()
            wait_until(lambda letter=letter: letter in path.read_text(), 5, "printed")
            rotate_logs(logs_dir, 50, 2)
            assert path.read_text() == ""
    finally:
        child.communicate("end\n")
    parts = {each.name: each.read_text() for each in logs_dir.iterdir()}
    assert parts == {
        path.name: "",
        f"{path.name}.1": "d" * 100 + "\n",
        f"{path.name}.2": "c" * 100 + "\n",
    }
    assert {each.stat().st_mode & 0o777 for each in logs_dir.glob("*.log.*")} == {0o600}
    prune_replica_logs(logs_dir, [], keep=0)
    assert not [*logs_dir.iterdir()]


def test_logs_that_cannot_be_copied_or_are_small_stay_as_they_are(logs_dir, caplog):
    log = logs_dir / "proxy.log"
    log.write_text("x" * 100)
    (logs_dir / "proxy.log.1").mkdir()
    (logs_dir / "proxy.log.2").mkdir()
    (logs_dir / "proxy.log.2" / "kept").touch()
    left_alone = {"access.log": "x" * 50, "small.log": "x" * 50, "status": "x" * 100}
    for name, text in left_alone.items():
        (logs_dir / name).write_text(text)
    rotate_logs(logs_dir, 50, 2)
    assert {name: (logs_dir / name).read_text() for name in left_alone} == left_alone
    assert log.read_text() == "x" * 100
    assert f"{log} cannot be rotated" in caplog.text
    assert not (logs_dir / "proxy.log.new").exists()


def test_a_log_that_another_program_renames_is_opened_again(logs_dir):
    settings = read_settings({}, state_dir=str(logs_dir.parent))
    program = (
        "import sys, os; from pathlib import Path\n"
        "from greenroom.actors.runtime import logs\n"
        "from greenroom.actors.runtime.settings import read_settings\n"
        "settings = read_settings()\n"
        "logs.configure_logging(settings, 'controller')\n"
        "logs.redirect_output(settings, 'replica-x')\n"
        "renamed, log = logs.RenamedLogs(), Path(settings.logs_dir, 'controller.log')\n"
        "def say(text):\n"
        "    renamed.reopen()\n"
        "    logs.OUR_LOGGER.warning('%s', text)\n"
        "    print(text)\n"
        "say('first')\n"
        "for name in ('controller', 'replica-x'):\n"
        "    path = log.with_name(name + '.log')\n"
        "    path.rename(str(path) + '-20260101')\n"
        "say('second')\n"
        "log.unlink()\n"
        "say('third')\n"
        "os.rename(settings.logs_dir, str(settings.logs_dir) + '-gone')\n"
        "say('fourth')\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, **settings.to_environ()}
    )
    logs_dir = logs_dir.with_name(f"{logs_dir.name}-gone")

    def lines(name: str) -> list[str]:
        return [line.split()[-1] for line in (logs_dir / name).read_text().splitlines()]

    assert lines("controller.log-20260101") == ["first"]
    assert lines("controller.log") == ["third", "fourth"], "what cannot be opened again goes on"
    assert lines("replica-x.log-20260101") == ["first"]
    assert lines("replica-x.log") == ["second", "third", "fourth"]
    assert (logs_dir / "replica-x.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_all_processes_of_a_host_go_on_in_new_logs_when_theirs_are_renamed(tmp_path):
    running = RunningSystem(tmp_path / "state", GREENROOM_LOG_MAX_BYTES="0")
    logs_dir = running.settings.logs_dir
    running.start()
    try:
        running.deploy(serve.deployment(Talker).bind())
        assert running.get("/")[0] == 200
        (replica,) = logs_dir.glob("replica-*.log")
        written = ["host.log", "front.log", "controller.log", "access.log", replica.name]
        # From its second beat on, a process knows which logs are its own.
        wait_until(lambda: min(beats(running)) >= 2, 10, "all processes know their logs")
        for name in written:
            (logs_dir / name).rename(logs_dir / f"{name}.1")

        def is_back(name: str) -> bool:
            assert running.get("/")[0] == 200
            return (logs_dir / name).exists()

        for name in written:
            wait_until(partial(is_back, name), 10, f"{name} is opened again")
        wait_until(
            lambda: running.get("/")[0] == 200 and replica.read_text(),
            5,
            "what the replica prints is in the new one",
        )
    finally:
        running.stop()


def beats(running: RunningSystem) -> list[int]:
    found = map(OtherPulse.find, RunRecords(running.settings.run_dir).alive())
    counts = []
    for pulse in found:
        if pulse is not None:
            counts.append(pulse.read().beats)
            pulse.close()
    return counts


class Talker:
    def __call__(self) -> str:
        print("said")
        return "said"


@pytest.mark.slow
def test_a_host_rotates_logs_of_the_size_that_is_set(tmp_path):
    running = RunningSystem(
        tmp_path / "state", GREENROOM_LOG_MAX_BYTES="5000", GREENROOM_LOG_FILES="1"
    )
    logs_dir = running.settings.logs_dir
    logs_dir.mkdir(parents=True)
    for name in ("front.log", "access.log"):
        (logs_dir / name).write_text("x" * 6000)
    running.start()
    try:
        wait_until((logs_dir / "front.log.1").exists, 5, "the front's log is rotated")
        wait_until((logs_dir / "access.log.1").exists, 5, "the access log is rotated")
    finally:
        running.stop()


def test_what_a_log_says_last_is_read_from_its_end_alone(tmp_path):
    log = tmp_path / "front.log"
    assert last_lines(log) == []
    log.write_bytes(b"early\n" * 10_000 + b"  address in use\n\n \xff\n")
    lines = last_lines(log)
    assert lines[-2:] == ["address in use", "\N{REPLACEMENT CHARACTER}"]
    assert len(lines) < 10_000
