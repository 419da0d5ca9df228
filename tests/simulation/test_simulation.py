"""The simulator, run as its command is; ``tox -e simulation`` runs more seeds of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS, OF_HOSTS = 24, 6  # of the first, few have more than one host
TRIED = (
    "query done",
    "stream read to its end",
    "wait_for_goal done",
    "deploy done",
    "set_traffic done",
    "undo_change done",
    "rollout took a step",
    "rollout promoted by itself",
    "rollout went back by itself",
    "link cut",
    "epoch begun",
    "canary promoted",
    "composed answer",
)


def simulate(*options: str, fails: bool = False, **environ: str) -> str:
    """Run the command with these options; return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *options],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == (1 if fails else 0), ended.stdout[-6000:] + ended.stderr
    return ended.stdout


@pytest.mark.timeout(300)
def test_whatever_dies_and_whenever_all_invariants_hold() -> None:
    output = simulate("--seeds", str(SEEDS))
    output += simulate("--seeds", str(OF_HOSTS), "--hosts", "2", "--from", str(SEEDS))
    assert f"{SEEDS} seeds from 0: 0 failed" in output
    assert f"{OF_HOSTS} seeds from {SEEDS}: 0 failed" in output
    for what in TRIED:
        count = sum(map(int, re.findall(rf"(\d+) {what}", output)))
        assert count >= (SEEDS + OF_HOSTS) / 20, f"{what} is hardly ever tried: {output}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_broken_for_hours_or_days_heals_and_nothing_has_grown_meanwhile() -> None:
    output = simulate("--outages")
    assert "outages: 0 failed" in output
    for what in ("start", "life", "health", "disk", "turns"):
        count = re.search(rf"{what} broken for 300 h: healed, after (\d+) tries", output)
        assert count, output
        assert int(count[1]) > 1_050, "more often than the exponent of a float can count"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--store", "database")])
def test_a_seed_replays_exactly_in_whatever_process(options: tuple[str, ...]) -> None:
    options = ("--seeds", "3", "--from", "5", "--digest", *options)
    first = simulate(*options, "--processes", "1")
    again = simulate(*options, PYTHONHASHSEED="77")
    digests = re.findall(r"^\d+ [0-9a-f]{64}$", first, re.MULTILINE)
    assert len(digests) == 3
    assert sorted(digests) == sorted(re.findall(r"^\d+ [0-9a-f]{64}$", again, re.MULTILINE))


@pytest.mark.slow
def test_a_save_that_is_lost_is_noticed_and_reported_with_how_to_replay_it() -> None:
    output = simulate("--lying-disk", "--seeds", "20", fails=True)
    (options,) = re.findall(r"replay: python -m tests.simulation (.+)", output)
    replayed = simulate(*options.split(), fails=True)
    assert replayed.splitlines()[-1] == output.splitlines()[-1]
    assert "InvariantError" in replayed.splitlines()[-1]
    honest = simulate(*(option for option in options.split() if option != "--lying-disk"))
    assert "0 failed" in honest, "the lost save is why"
