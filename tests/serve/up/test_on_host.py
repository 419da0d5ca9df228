"""What is sent to a host keeps to the paths of its folder, and to systemd where there is one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from greenroom.serve.up import on_host
from tests.support.programs import needed

RELEASE = "0.2.0-abc"


@pytest.fixture(name="home")
def make_home(tmp_path):
    """A host's folder with a release, whose greenroom prints its arguments and a variable."""
    program = tmp_path / "home" / "releases" / RELEASE / "bin" / "greenroom"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$GREENROOM_STATE_DIR $GREENROOM_LOG_FILES $@"\n')
    program.chmod(0o755)
    (program.parents[1] / on_host.DONE).touch()
    return tmp_path / "home"


@pytest.fixture(name="systemd")
def make_systemd(tmp_path, monkeypatch):
    """A stand-in for systemctl that writes down what it is asked; returns where."""
    monkeypatch.setattr(on_host, "SYSTEMD", tmp_path)
    monkeypatch.setattr(on_host, "SYSTEM_UNITS", tmp_path / "units")
    monkeypatch.setattr(on_host, "USER_UNITS", tmp_path / "units")
    for name in ("systemctl", "loginctl", "journalctl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\n'
            f'[ "$1 $2" = "start {on_host.UNIT}" ] && [ -e {tmp_path}/fails ] && exit 1\n'
            "[ $(basename $0) = journalctl ] && echo what went wrong\nexit 0\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "asked"


def start(home: Path, generation: str = f"{RELEASE}-def") -> str:
    return on_host.start(home, generation, RELEASE, {"GREENROOM_LOG_FILES": "it's 9"})


def test_a_generation_is_a_private_script_with_the_hosts_settings(home):
    assert start(home) == f"{home}/state it's 9 start"
    script = home / "generations" / f"{RELEASE}-def"
    assert (home / "greenroom").readlink() == script
    assert script.stat().st_mode & 0o777 == 0o700
    found = on_host.inspect(home)
    assert (found["generation"], found["healthy"]) == (f"{RELEASE}-def", "")
    on_host.confirm(home)
    assert on_host.inspect(home)["healthy"] == f"{RELEASE}-def"


def test_nothing_is_found_on_a_bare_host_and_nothing_is_made(tmp_path):
    found = on_host.inspect(tmp_path / "none")
    assert not any(value for name, value in found.items() if name != "python")
    assert not (tmp_path / "none").exists()


def test_a_stop_deletes_what_was_made_and_nothing_else(home):
    start(home)
    (home / "of another").touch()
    on_host.stop(home, delete=True)
    assert [path.name for path in home.iterdir()] == ["of another"]
    (home / "of another").unlink()
    on_host.stop(home, delete=True)
    assert not home.exists()


def test_a_release_that_cannot_stop_is_stopped_by_the_one_before(home):
    start(home)
    on_host.confirm(home)
    other = home / "releases" / "0.3.0-abc" / "bin" / "greenroom"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    other.chmod(0o755)
    with pytest.raises(on_host.FailedError, match="broken"):
        on_host.start(home, "0.3.0-abc-def", "0.3.0-abc", {})
    assert on_host.start(home, f"{RELEASE}-def", "", {}).endswith("start")


def test_systemd_starts_the_unit_and_accepts_it(home, systemd):
    start(home)
    unit = systemd.parent / "units" / on_host.UNIT
    user = [] if os.geteuid() == 0 else ["--user"]
    asked = systemd.read_text().splitlines()
    assert asked[-3:] == [
        " ".join(["systemctl", *user, *words])
        for words in (
            ["daemon-reload"],
            ["enable", "--quiet", on_host.UNIT],
            ["start", on_host.UNIT],
        )
    ]
    done = subprocess.run(
        [needed("systemd-analyze", "systemd"), "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    on_host.stop(home, delete=True)
    assert not unit.exists()


def test_a_unit_that_does_not_start_is_reported_with_its_log(home, systemd):
    (systemd.parent / "fails").touch()
    with pytest.raises(on_host.FailedError, match="exit code 1\nwhat went wrong"):
        start(home)
