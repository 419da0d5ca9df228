"""The simulator, run as its command is; ``tox -e simulation`` runs more seeds of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
SEEDS = 60
MUTATED_SEEDS = 600  # within which each mutation is found, from its own on
TRIED = (
    "query done",
    "stream read to its end",
    "WaitForGoal done",
    "DeployDeployment done",
    "SetTraffic done",
    "UndoChange done",
    "rollout took a step",
    "rollout promoted by itself",
    "rollout went back by itself",
    "comparison made",
    "link cut",
    "epoch begun",
)
NO_SUCH_TEXT = """
from tests.simulation import mutations
mutations.MUTATIONS["x"] = mutations.Mutation("core.goals", "not there", "", "")
mutations.install("x")
import greenroom.core.goals
"""


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
    told = simulate("--seeds", str(SEEDS))
    assert f"{SEEDS} seeds from 0: 0 failed" in told
    for what in TRIED:
        count = re.search(rf"(\d+) {what}", told)
        assert count, told
        assert int(count[1]) > SEEDS / 20, f"{what} is hardly ever tried"


def test_a_seed_replays_exactly_in_whatever_process() -> None:
    first = simulate("--seeds", "3", "--from", "5", "--digest", "--processes", "1")
    again = simulate("--seeds", "3", "--from", "5", "--digest", PYTHONHASHSEED="77")
    digests = re.findall(r"^\d+ [0-9a-f]{64}$", first, re.MULTILINE)
    assert len(digests) == 3
    assert sorted(digests) == sorted(re.findall(r"^\d+ [0-9a-f]{64}$", again, re.MULTILINE))


def test_a_failure_is_told_with_its_last_steps_and_how_to_replay_it() -> None:
    told = simulate("--mutation", "passes_on_second_answers", "--seeds", "20", fails=True)
    (seed,) = re.findall(r"replay: python -m tests.simulation --seeds 1 --from (\d+)", told)
    replayed = simulate(
        "--mutation", "passes_on_second_answers", "--seeds", "1", "--from", seed, fails=True
    )
    assert replayed.splitlines()[-1] == told.splitlines()[-1]
    assert re.search("is answered (again|after)", replayed.splitlines()[-1])
    assert re.search(r"^ +\d+\.\d{4} caller\(\d+\) +AnswerQueries", replayed, re.MULTILINE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTATIONS)
def test_it_notices_that_the_code_is_broken(name: str) -> None:
    first = str(MUTATIONS[name].seed)
    told = simulate("--mutation", name, "--seeds", str(MUTATED_SEEDS), "--from", first, fails=True)
    assert "InvariantError" in told.splitlines()[-1], told[-3000:]


def test_a_mutation_that_no_longer_fits_the_code_is_refused() -> None:
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            NO_SUCH_TEXT,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "greenroom.core.goals has 0 times, not once: 'not there'" in told.stderr
