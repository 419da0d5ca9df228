"""What users run into on their way from the README to their own application, run as they do.

Each test is a mistake that was made, or a wish that was had, with the command line or curl alone.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from tests.support.systems import RunningSystem, wait_until

pytestmark = pytest.mark.slow

SHOP = """
import os, sys, time
from greenroom import serve


@serve.deployment
class Shop:
    def __init__(self, rate: float = 2.0):
        self.rate = rate

    def __call__(self, request):
        return {"price": self.rate * float(request.query_params.get("n", "1"))}


def made(args):
    return Shop.bind(float(args["rate"]))


app = Shop.bind()


@serve.deployment
def unfit(request):
    return lambda: 1


unfit_app = unfit.bind()


@serve.deployment
class Loads:
    def __init__(self, how):
        print("loading weights.bin", flush=True)
        if how == "dies":
            os._exit(3)
        if how == "hangs":
            time.sleep(600)
        raise FileNotFoundError("weights.bin")

    def __call__(self, request):
        return "ready"


dies, hangs, raises = (Loads.bind(how) for how in ("dies", "hangs", "raises"))


@serve.deployment(ray_actor_options={"num_gpus": 1})
class Large:
    def __call__(self, request):
        return "large"


large = Large.bind()
"""

LOCKED = """
import threading
from greenroom import serve

lock = threading.Lock()


@serve.deployment
class Counter:
    def __call__(self, request):
        with lock:
            return "counted"


app = Counter.bind()
if __name__ == "__main__":
    serve.run(app)
"""


class Walk:
    """A user with a folder, a terminal in it, and a system that runs."""

    def __init__(self, system: RunningSystem, folder: Path) -> None:
        self.system = system
        self.folder = folder

    def says(self, *words: str, code: int = 0, folder: Path | None = None) -> str:
        """Run a command that exits with ``code``, and return all that it says."""
        done = self.system.greenroom(*words, cwd=folder or self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def asks(self, path: str) -> tuple[int, str, Message]:
        """Return the status, text and headers of a GET."""
        try:
            with urllib.request.urlopen(self.system.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "shop.py").write_text(SHOP)
    system = RunningSystem(tmp_path_factory.mktemp("walk") / "state")
    system.start()
    yield Walk(system, folder)
    system.stop()


@pytest.fixture(autouse=True)
def deployed(walk: Walk) -> Iterator[None]:
    walk.says("deploy", "shop:app", "--name", "shop", "--route-prefix", "/shop")
    yield
    for name in walk.system.status()["applications"]:
        walk.says("delete", name)


# --- Wrong or destructive -------------------------------------------------------------------------


def test_queries_of_an_application_are_recorded_and_replayed_by_its_name(walk: Walk) -> None:
    recording = subprocess.Popen(
        [sys.executable, "-m", "greenroom.serve.cli.main", "record", "shop", "shop.jsonl"],
        env={**walk.system.environ, "PYTHONUNBUFFERED": "1"},
        cwd=walk.folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with recording:
        assert recording.stderr is not None
        assert recording.stderr.readline().startswith("recording 'shop' in shop.jsonl")
        for number in range(5):
            assert walk.asks(f"/shop?n={number}")[0] == 200
        file = walk.folder / "shop.jsonl"
        wait_until(lambda: len(file.read_text().splitlines()) == 6, 10, "all are in the file")
        recording.terminate()
        assert "5 queries" in recording.communicate(timeout=30)[0]
    assert "5 compared, 0 different" in walk.says("replay", "shop.jsonl", "--to", "shop")
    assert "5 compared, 0 different" in walk.says("replay", "shop.jsonl", "--to", "shop#Shop")
    assert "there are: shop#Shop" in walk.says("replay", "shop.jsonl", "--to", "none", code=1)
    assert "recorder" not in walk.says("history")


def test_a_canary_whose_answers_all_differ_says_so_and_what_differs(walk: Walk) -> None:
    words = ("deploy", "shop:made", "rate=3", "--name", "shop", "--route-prefix", "/shop")
    canary = (
        *words,
        "--canary",
        "0.5,1",
        "--compare",
        "json",
        "--min-samples",
        "20",
        "--hold-s",
        "3",
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", _ASKS.format(url=f"{walk.system.url}/shop?n=1")],
    )
    try:
        said = walk.says(*canary)
    finally:
        asking.kill()
        asking.wait()
    differs = r"MOST ANSWERS DIFFER: (\d+) of \1 compared .*/price: other value"
    assert re.search(differs, said)
    assert re.search(f"the last canary was promoted: {differs}", walk.says("diff", "shop"))


_ASKS = """
import urllib.request
while True:
    urllib.request.urlopen("{url}").read()
"""


def test_a_result_that_is_no_json_is_an_error_that_names_its_type(walk: Walk) -> None:
    walk.says("deploy", "shop:unfit_app", "--name", "unfit", "--route-prefix", "/unfit")
    assert walk.asks("/unfit")[0] == 500
    assert "of type function" in walk.says("logs", "unfit")


def test_an_application_that_never_came_up_answers_at_once_and_readyz_says_why(walk: Walk) -> None:
    words = ("deploy", "shop:raises", "--name", "raises", "--route-prefix", "/raises")
    walk.says(*words, "--timeout", "1", code=1)
    begun = time.monotonic()
    status, text, headers = walk.asks("/raises")
    assert (status, "none of its replicas has run yet" in text) == (503, True)
    assert int(headers["Retry-After"]) > 0
    assert time.monotonic() - begun < 2
    assert "FileNotFoundError: weights.bin" in walk.asks("/-/readyz?application=raises")[1]


def test_what_hangs_in_its_constructor_is_deleted_at_once(walk: Walk) -> None:
    words = ("deploy", "shop:hangs", "--name", "hangs", "--route-prefix", "/hangs")
    walk.says(*words, "--timeout", "1", code=1)
    begun = time.monotonic()
    assert walk.says("delete", "hangs") == "deleted 'hangs'\n"
    assert time.monotonic() - begun < 5


def test_of_a_folder_of_all_users_the_advice_is_a_folder_in_it(walk: Walk) -> None:
    said = walk.says("start", "--state-dir", "/tmp", code=1)
    assert "it is for all users" in said
    assert "give a folder in it" in said
    assert "chmod" not in said


# --- Words that help ------------------------------------------------------------------------------


def test_a_time_out_says_whose_it_is_and_what_is_missing(walk: Walk) -> None:
    words = ("deploy", "shop:large", "--name", "large", "--route-prefix", "/large")
    said = walk.says(*words, "--timeout", "1", code=1)
    assert "application 'large' does not run as asked for after 1 s" in said
    assert "needs 1 num_gpus, and the host has 0" in said
    assert "it goes on" in said


def test_a_death_says_how_it_was_and_what_was_logged(walk: Walk) -> None:
    words = ("deploy", "shop:dies", "--name", "dies", "--route-prefix", "/dies")
    said = walk.says(*words, "--timeout", "1", code=1)
    assert "exit code 3; its log ends with: loading weights.bin" in said
    more = re.search(r"greenroom (logs dies#Loads#\w+)", said)
    assert more is not None
    assert "loading weights.bin" in walk.says(*more[1].split())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("deploy", "shpo:app"), 1, "did you mean shop?"),
        (("deploy", "shop:ap"), 1, "its applications: app, "),
        (("deploy", "none.yaml"), 2, "Error: none.yaml: cannot be read: No such file"),
        (("deploy", "shop:app", "--tiemout", "3"), 2, "Did you mean '--timeout'?"),
        (("status", "shpo"), 1, "did you mean shop?"),
        (("dpeloy", "shop:app"), 2, "No such command 'dpeloy'"),
    ],
)
def test_a_misspelled_name_is_told_what_may_be_meant(
    walk: Walk, words: tuple[str, ...], code: int, told: str
) -> None:
    assert told in walk.says(*words, code=code)


def test_addresses_that_one_tries_first_answer_with_what_there_is(walk: Walk) -> None:
    assert "/-/api/v1/get_status" in json.loads(walk.asks("/-/api/")[1])
    assert "/shop" in walk.asks("/-/routes")[1]
    assert "/-/api/v1" in walk.asks("/-/api/v2")[1]


def test_a_package_elsewhere_is_told_with_the_flag_that_finds_it(walk: Walk) -> None:
    package = walk.folder / "src" / "parts"
    package.mkdir(parents=True)
    (package / "inner.py").write_text("from shop import app\n")
    said = walk.says("deploy", "parts.inner:app", "--name", "parts", code=1)
    assert "it is found with --app-dir src" in said
    said = walk.says("deploy", "src.parts.inner:app", code=1, folder=walk.folder / "src")
    assert "it is found with --app-dir .." in said


def test_a_lock_in_a_script_is_told_what_to_do_with_it(walk: Walk) -> None:
    (walk.folder / "locked.py").write_text(LOCKED)
    done = subprocess.run(
        [sys.executable, "locked.py"],
        env=walk.system.environ,
        cwd=walk.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    told = "make it in the constructor, or deploy the script with greenroom deploy"
    assert told in done.stderr.splitlines()[-1]
    walk.says("deploy", "locked:app", "--name", "locked", "--route-prefix", "/locked")
    assert walk.asks("/locked")[:2] == (200, "counted")


def test_run_finds_a_wrong_name_and_a_taken_port_before_it_starts_anything(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        other = Walk(RunningSystem(tmp_path / "state", GREENROOM_HTTP_PORT=port), tmp_path)
        (tmp_path / "shop.py").write_text(SHOP)
        begun = time.monotonic()
        assert "no module named 'shpo'" in other.says("run", "shpo:app", code=1)
        said = other.says("run", "shop:app", code=1)
        assert f"HTTP port {port} on 127.0.0.1 is in use by pid" in said
        assert time.monotonic() - begun < 5
    assert not (tmp_path / "state" / "logs" / "front.log").exists()


def test_status_ends_with_the_last_line_of_what_failed(walk: Walk) -> None:
    words = ("deploy", "shop:raises", "--name", "raises", "--route-prefix", "/raises")
    walk.says(*words, "--timeout", "1", code=1)
    said = walk.says("status", "raises", code=1)
    assert "FileNotFoundError: weights.bin" in said
    assert "Traceback" not in said


# --- Seeing ---------------------------------------------------------------------------------------


def test_counters_of_what_has_not_happened_are_there_and_0(walk: Walk) -> None:
    counters = [
        rf'^greenroom_{name}_total{{.*"shop#Shop".*}} (.*)$'
        for name in ("replica_restarts", "retries", "retries_refused")
    ]
    counters.append(r'^greenroom_requests_total{.*"shop#Shop".*status="500".*} (.*)$')

    def found() -> list[str] | None:
        metrics = walk.asks("/-/metrics")[1]  # it is shown every second
        matched = [re.search(counter, metrics, re.M) for counter in counters]
        return [each[1] for each in matched if each] if all(matched) else None

    values = wait_until(found, 10, "all are there")
    assert [float(each) for each in values] == [0, 0, 0, 0]
