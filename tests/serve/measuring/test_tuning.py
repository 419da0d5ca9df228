"""Tuning: what is found with how many trials, how traffic is made, and the files written."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from greenroom.core.errors import InvalidRequestError
from greenroom.serve.measuring.tuning import (
    MOST_ROUNDS,
    Load,
    Objective,
    Setting,
    Trial,
    drawn,
    finals,
    judged,
    load,
    read_objective,
    recorded,
    request_bytes,
    search,
    steady,
)

OBJECTIVE = Objective(99, 0.2)
LATER = time.monotonic() + 1e6


@pytest.mark.parametrize(
    ("text", "percent", "limit_s"),
    [("p99=200ms", 99, 0.2), ("p50=1s", 50, 1), ("p99.9=1.5s", 99.9, 1.5)],
)
def test_an_objective_is_a_percentile_and_a_time(text: str, percent: float, limit_s: float) -> None:
    assert read_objective(text) == (percent, limit_s)
    assert read_objective(str(read_objective(text))) == (percent, limit_s)


@pytest.mark.parametrize(
    "text", ["", "p99", "99=200ms", "p0=1s", "p100=1s", "p99=0ms", "p99=-1s", "p99=1", "p99=1h"]
)
def test_other_objectives_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"slo='{text}'"):
        read_objective(text)


class Model:
    """A deployment of which larger batches do more, and take less CPU."""

    def __init__(self, needed: int) -> None:
        self.needed = needed  # replicas with a batch of one
        self.measured: list[Setting] = []

    def measure(self, setting: Setting) -> Trial:
        self.measured.append(setting)
        gain = min(setting.batch_size or 1, setting.max_ongoing) ** 0.5
        speed = setting.replicas * gain
        latency_s = 0.1 if speed >= self.needed else 5 / speed
        load = Load([latency_s] * 100, 0, 0.2 * setting.replicas + 1 / gain)
        return judged(setting, load, OBJECTIVE)


def test_it_takes_as_many_replicas_as_it_needs_and_no_more() -> None:
    model = Model(needed=3)
    best = search(model.measure, Setting(1, 100), most_replicas=8, ends_at=LATER)[0]
    assert best.is_met
    assert best.setting.replicas == 4
    assert max(each.replicas for each in model.measured) == 4
    assert len(model.measured) == len(set(model.measured)), "nothing is measured twice"


def test_larger_batches_let_it_go_back_to_fewer_replicas() -> None:
    model = Model(needed=4)
    begin = Setting(1, 100, batch_size=1, batch_wait_s=0.0)
    trials = search(model.measure, begin, most_replicas=2, ends_at=LATER)
    assert trials[0].setting.replicas == 1
    assert trials[0].setting.batch_size is not None
    assert trials[0].setting.batch_size >= 16
    assert {trial.setting for trial in trials} == set(model.measured)


def test_a_goal_that_cannot_be_reached_gives_the_best_that_was_found() -> None:
    model = Model(needed=1_000)
    trials = search(model.measure, Setting(1, 100), most_replicas=4, ends_at=LATER)
    assert not trials[0].is_met
    assert trials[0].latency_s == min(trial.latency_s for trial in trials)


def test_no_trial_begins_when_the_time_is_over_but_the_first() -> None:
    model = Model(needed=4)
    assert len(search(model.measure, Setting(1, 1), most_replicas=4, ends_at=0)) == 1


class Noisy:
    """Settings with a latency and CPUs of their own, which each trial meets to some percent."""

    def __init__(self, truths: dict[int, tuple[float, float]]) -> None:
        self.truths = truths
        self.measured: list[int] = []
        self._random = random.Random(5)

    def measure(self, setting: Setting, noise: float = 0.1) -> Trial:
        latency_s, cpus = (
            value * self._random.uniform(1 - noise, 1 + noise)
            for value in self.truths[setting.replicas]
        )
        self.measured.append(setting.replicas)
        return judged(setting, Load([latency_s], 0, cpus), OBJECTIVE)

    def found(self, *replicas: int) -> list[Trial]:
        """Return a search that has found the first of them best."""
        trials = [self.measure(Setting(each, 1), noise=0.0) for each in replicas]
        self.measured.clear()
        return trials


def test_the_finals_measure_in_turns_until_one_is_clearly_the_best() -> None:
    noisy = Noisy({1: (0.5, 0.5), 2: (0.1, 1.0), 4: (0.05, 1.5), 8: (0.04, 3.0)})
    trials = finals(noisy.measure, noisy.found(2, 1, 4, 8), OBJECTIVE, ends_at=LATER)
    assert noisy.measured == [2, 4, 8] * 3
    assert [trial.setting.replicas for trial in trials] == [2, 4, 8, 1]
    assert [len(trial.runs) for trial in trials] == [3, 3, 3, 0]
    assert trials[0].clearly_beats(trials[1])
    assert not trials[0].clearly_beats(trials[3]), "which was measured once"
    assert trials[0].cpus == sorted(run.cpus for run in trials[0].runs)[1]


def test_the_finals_correct_what_one_trial_had_found_by_luck() -> None:
    noisy = Noisy({1: (0.15, 0.5), 2: (0.1, 1.0)})
    found = noisy.found(1, 2)
    noisy.truths[1] = (0.24, 0.5)
    assert finals(noisy.measure, found, OBJECTIVE, ends_at=LATER)[0].setting.replicas == 2
    noisy.truths[1], noisy.truths[2] = (0.15, 0.5), (0.1, 0.4)
    assert finals(noisy.measure, found, OBJECTIVE, ends_at=LATER)[0].setting.replicas == 2


def test_the_next_settings_follow_when_the_first_fail_in_the_finals() -> None:
    noisy = Noisy({n: (0.15, float(n)) for n in range(1, 6)})
    found = noisy.found(1, 2, 3, 4, 5)
    noisy.truths.update({n: (0.3, float(n)) for n in (1, 2, 3)})
    best = finals(noisy.measure, found, OBJECTIVE, ends_at=LATER)[0]
    assert (best.setting.replicas, best.is_met) == (4, True)


def test_settings_alike_end_the_finals_after_some_rounds() -> None:
    noisy = Noisy({1: (0.1, 1.0), 2: (0.1, 1.0)})
    best, other = finals(noisy.measure, noisy.found(1, 2), OBJECTIVE, ends_at=LATER)
    assert noisy.measured == [1, 2] * MOST_ROUNDS
    assert not best.clearly_beats(other)


def test_finals_without_time_leave_what_was_found() -> None:
    noisy = Noisy({1: (0.1, 1.0), 2: (0.1, 2.0)})
    found = noisy.found(1, 2)
    assert finals(noisy.measure, found, OBJECTIVE, ends_at=0) == found


def test_requests_without_an_answer_are_beyond_any_limit() -> None:
    trial = judged(Setting(1, 1), Load([0.01] * 98, 2, 1.0), OBJECTIVE)
    assert (trial.is_met, trial.latency_s, trial.errors) == (False, math.inf, 0.02)
    assert not judged(Setting(1, 1), Load([], 0, 1.0), OBJECTIVE).is_met


def test_the_drawing_is_svg_with_a_point_for_each_trial() -> None:
    trials = [judged(Setting(n, 8), Load([0.05 * n], 0, 0.5 * n), OBJECTIVE) for n in range(1, 6)]
    trials.append(judged(Setting(9, 8), Load([], 1, 0.0), OBJECTIVE))
    for shown, points in ((trials, 5), (trials[5:], 0)):
        root = ET.fromstring(drawn(shown, OBJECTIVE))
        assert len(root.findall("{*}circle")) == points
    assert "p99=200ms" in drawn(trials, OBJECTIVE)
    written = [each.text for each in ET.fromstring(drawn(trials, OBJECTIVE)).findall("{*}text")]
    assert {"50", "100", "200"} <= set(written), "milliseconds at the left"


def test_the_drawing_has_a_cross_for_what_was_measured_again() -> None:
    runs = [judged(Setting(1, 8), Load([s], 0, 0.5), OBJECTIVE) for s in (0.1, 0.2)]
    runs.append(judged(Setting(1, 8), Load([], 1, 0.5), OBJECTIVE))
    left = iter(runs)
    trials = finals(lambda _: next(left), runs[:1], OBJECTIVE, ends_at=LATER)
    root = ET.fromstring(drawn(trials, OBJECTIVE))
    [_, cross] = root.findall("{*}path")
    assert "inf" not in cross.attrib["d"]


# --- Traffic --------------------------------------------------------------------------------------


def test_a_rate_is_even_and_a_recording_comes_again(tmp_path: Path) -> None:
    assert [at for at, _ in itertools.islice(steady(4, b""), 3)] == [0, 0.25, 0.5]
    row = {
        "method": "GET",
        "raw_path": "/app/x",
        "root_path": "/app",
        "query": "a=1",
        "body": "",
        "headers": [["host", "h"], ["accept", "a"], ["cookie", "REDACTED"]],
    }
    rows = [{**row, "at": at} for at in (10.0, 11.0, 13.0)] + [{**row, "method": "HEAD", "at": 1}]
    file = tmp_path / "rows"
    head = {"greenroom": "recording", "format": 1, "endpoint": "a"}
    file.write_text("".join(json.dumps(each) + "\n" for each in [head, *rows]))
    timed = list(itertools.islice(recorded(file), 5))
    assert [at for at, _ in timed] == [0, 1, 3, 4, 5]
    assert timed[0][1] == (
        b"GET /x?a=1 HTTP/1.1\r\nhost: tuning\r\ncontent-length: 0\r\naccept: a\r\n\r\n"
    )
    file.write_text(json.dumps(head) + "\n")
    with pytest.raises(InvalidRequestError, match="no queries"):
        next(recorded(file))


@pytest.mark.parametrize(
    ("answer", "is_well"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", True),
        (b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", True),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", False),
        (b"", False),
    ],
)
def test_answers_are_read_to_their_end_and_failures_counted(answer: bytes, is_well: bool) -> None:
    async def main() -> tuple[list[float], int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(answer)
                    if b"close" in answer or not answer:
                        break
            except asyncio.IncompleteReadError:
                pass
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await load(port, steady(100, request_bytes("GET", "/")), 0.2)

    latencies, failed = asyncio.run(main())
    assert len(latencies) + failed == 15  # without the warm-up
    assert bool(latencies) == is_well
    assert bool(failed) != is_well
    assert all(0 <= each < 5 for each in latencies)


# --- The command ----------------------------------------------------------------------------------

APP = """
from greenroom import serve

@serve.deployment(user_config={"max_batch_size": 1})
class Model:
    def reconfigure(self, config):
        self.size = config["max_batch_size"]
    def __call__(self, request):
        return self.size

app = Model.bind()
"""


def tune(folder: Path, *flags: str, app: str = APP) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(app)
    command = [str(Path(sys.executable).parent / "greenroom"), "tune", "mine:app", *flags]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_measures_and_writes_a_configuration_file(tmp_path: Path) -> None:
    done = tune(
        tmp_path,
        *("--slo", "p50=9s", "--traffic", "20/s", "--seconds", "1", "--max-minutes", "0.06"),
    )
    assert done.returncode == 0, done.stderr
    assert "p50=9000ms is met by: replicas 1" in done.stdout
    assert "; median of " in done.stdout
    document = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    [deployment] = document["applications"][0]["deployments"]
    assert deployment["num_replicas"] == 1
    assert deployment["user_config"].keys() == {"max_batch_size"}
    ET.fromstring((tmp_path / "tuned.svg").read_text())
    again = tune(tmp_path, "--slo", "p50=9s", "--traffic", "20")
    assert again.returncode == 2
    assert "tuned.yaml: it exists" in again.stderr


def test_an_application_that_answers_nothing_is_not_tuned(tmp_path: Path) -> None:
    broken = APP.replace("return self.size", 'raise LookupError("no weights")')
    done = tune(tmp_path, "--slo", "p50=9s", "--traffic", "20/s", app=broken)
    assert done.returncode == 1
    assert "the first 5 requests failed, the last one with 500" in done.stderr
    assert "LookupError: no weights" in done.stderr
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--slo", "fast", "--traffic", "20"), "p99=200ms"),
        (("--slo", "p99=1s", "--traffic", "nothing"), "--traffic 'nothing'"),
        (("--slo", "p99=1s", "--traffic", "0"), "--traffic '0'"),
        (("--slo", "p99=1s", "--traffic", "9", "--deployment", "None"), "has Model"),
        (("--slo", "p99=1s", "--traffic", "9", "--seconds", "0"), "--seconds"),
        (("--slo", "p99=1s", "--traffic", "9", "--path", "x"), "--path 'x'"),
    ],
)
def test_bad_flags_are_told(tmp_path: Path, flags: tuple[str, ...], told: str) -> None:
    done = tune(tmp_path, *flags)
    assert done.returncode in (1, 2)
    assert told in done.stderr
