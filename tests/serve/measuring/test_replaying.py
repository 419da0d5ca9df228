"""Real queries are recorded, and run again at a backend that has no traffic."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.measuring import recording
from greenroom.serve.measuring.recording import recorder_of
from tests.support.systems import running_system, wait_until

pytestmark = pytest.mark.slow
BEFORE = "n=-1"  # asked until the proxies know of the recorder


def old(request: Any) -> dict[str, int]:
    return {"answer": 2 * int(request.query_params["n"])}


def new(request: Any) -> dict[str, int]:
    number = int(request.query_params["n"])
    return {"answer": 2 * number + (number == 3)}


def same(request: Any) -> dict[str, int]:
    assert "authorization" not in request.headers
    return old(request)


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("replay")) as system, system.as_default():
        with serve.Client.connect() as client:
            for name, function in (("v1", old), ("v2", new), ("v3", same)):
                client.wait_for_goal(client.create_backend(name, function))
            client.create_endpoint("answer", backend="v1", route="/answer")
        yield system


@pytest.fixture(scope="module")
def recorded(system, tmp_path_factory):
    """A recording of 40 queries, made by the command and ended by a signal, as by Ctrl-C."""
    file = tmp_path_factory.mktemp("recorded") / "traffic.jsonl"
    command = [str(Path(sys.executable).parent / "greenroom"), "record", "answer", str(file)]
    process = subprocess.Popen(
        [*command, "--sample", "1"],
        env={**os.environ, **system.environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with serve.Client.connect() as client:
            wait_until(
                lambda: client.list_endpoints()["answer"]["shadows"], 20, "the recorder is there"
            )

        def is_begun() -> bool:
            system.get(f"/answer?{BEFORE}")
            return file.read_text().count("\n") > 1

        wait_until(is_begun, 20, "queries are recorded")
        for number in range(40):
            answer = system.get(f"/answer?n={number}", headers={"Authorization": "secret"})
            assert json.loads(answer[1]) == {"answer": 2 * number}

        def kept() -> list[str]:
            return [each for each in file.read_text().splitlines() if BEFORE not in each]

        wait_until(lambda: len(kept()) == 41, 20, "all are in the file")
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert f"{len(file.read_text().splitlines()) - 1} queries" in output
    assert "interrupted" in output
    file.write_text("".join(f"{line}\n" for line in kept()))
    return file


def test_a_recording_has_no_secrets_is_its_owners_and_leaves_nothing(system, recorded):
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    assert "secret" not in recorded.read_text()
    with serve.Client.connect() as client:
        assert client.list_endpoints().keys() == {"answer"}
        assert client.list_endpoints()["answer"]["shadows"] == {}
        assert client.list_backends().keys() == {"v1", "v2", "v3"}


def test_a_replay_finds_the_difference_and_compares_latencies(system, recorded):
    done = system.greenroom("replay", str(recorded), "--to", "v2", "--speed", "4", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 3
    assert (found["queries"], found["compared"], found["different"]) == (40, 40, 1)
    assert found["causes"][0]["cause"] == "/answer: other value"
    assert found["latency_ratio"]["low"] <= found["latency_ratio"]["value"]
    assert found["latency_s"].keys() == {"old", "new"}
    output = system.greenroom(
        *("replay", str(recorded), "--to", "v2", "--speed", "9", "--max-different", "0.1")
    )
    assert output.returncode == 0
    assert "6 became 7" in output.stdout
    assert "times as long" in output.stdout
    with serve.Client.connect() as client:
        assert client.list_endpoints().keys() == {"answer"}


def test_an_application_is_recorded_and_replayed_by_its_name(system, recorded, tmp_path):
    serve.run(serve.deployment(same).bind(), name="shop", route_prefix="/shop")
    try:
        for to in ("shop", "shop#same"):
            done = system.greenroom("replay", str(recorded), "--to", to, "--speed", "9", "--json")
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert (found["queries"], found["failed"], found["different"]) == (40, 0, 0)
        file = str(tmp_path / "shop.jsonl")
        done = system.greenroom("record", "shop", file, "--seconds", "0.1")
        assert (done.returncode, "0 queries" in done.stdout) == (0, True), done.stderr
        assert "shop#same" in Path(file).read_text()
        assert "no shadow of 'shop' is compared" in system.greenroom("diff", "shop").stdout
        with serve.Client.connect() as client:
            assert client.list_endpoints().keys() == {"answer", "shop#same"}
    finally:
        serve.delete("shop")


def test_a_rollout_with_a_replay_begins_only_where_answers_agree(system, recorded):
    refused = system.greenroom("rollout", "answer", "--to", "v2", "--replay", str(recorded))
    assert refused.returncode == 1
    assert "'v2' gets no traffic" in refused.stderr
    with serve.Client.connect() as client:
        assert client.list_rollouts() == {}
        begun = system.greenroom("rollout", "answer", "--to", "v3", "--replay", str(recorded))
        assert "began" in begun.stdout
        assert client.list_rollouts()["answer"]["to"] == "v3"
        client.abort_rollout("answer")


def test_a_backend_that_is_not_there_is_reported(system, recorded):
    done = system.greenroom("replay", str(recorded), "--to", "v9")
    assert (done.returncode, "no backend is named 'v9'" in done.stderr) == (1, True)


def test_a_recording_ends_at_its_limits_and_is_not_written_over(system, recorded, tmp_path):
    file = tmp_path / "small.jsonl"
    with serve.Client.connect() as client:
        with pytest.raises(ValueError, match="exists"):
            recording.record(client, "answer", recorded, sample=1, max_bytes=10_000)
        with pytest.raises(KeyError, match="answer"):
            recording.record(client, "none", file, sample=1, max_bytes=10_000)
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                system.get("/answer?n=1")

        thread = threading.Thread(target=load)
        thread.start()
        try:
            done = recording.record(client, "answer", file, sample=1, max_bytes=3_000, seconds=60)
            in_time = recording.record(
                client, "answer", tmp_path / "timed", sample=1, max_bytes=10**8, seconds=0.5
            )
        finally:
            over.set()
            thread.join()
        assert in_time.reason == "the time is over", "though queries still come"
        assert done.reason == "the file is full"
        assert file.stat().st_size == done.size <= 3_000
        client.wait_for_goal(client.create_backend(recorder_of("answer"), old))  # of a killed one
    assert system.greenroom("record", "answer", "--stop").returncode == 0
    with serve.Client.connect() as client:
        assert recorder_of("answer") not in client.list_backends()
