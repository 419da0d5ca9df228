"""What the commands say of an application that is slow to come, fails, or answers otherwise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.systems import RunningSystem, wait_until

pytestmark = pytest.mark.slow

SHOP = """
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
class Loads:
    def __init__(self):
        raise FileNotFoundError("weights.bin")

    def __call__(self, request):
        return "ready"


raises = Loads.bind()


@serve.deployment(ray_actor_options={"num_gpus": 1})
class Large:
    def __call__(self, request):
        return "large"


large = Large.bind()
"""
ASKS = """
import urllib.request
while True:
    urllib.request.urlopen("{url}").read()
"""


class Walk:
    """A user with a folder, a terminal in it, and a system that runs."""

    def __init__(self, system: RunningSystem, folder: Path) -> None:
        self.system = system
        self._folder = folder

    def says(self, *words: str, code: int = 0) -> str:
        """Run a command that exits with ``code``, and return all that it says."""
        done = self.system.greenroom(*words, cwd=self._folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def deploys(self, name: str, *words: str, code: int = 0) -> str:
        """Deploy an application of the shop below a route of its name."""
        target, *words = words
        where = ("--name", name, "--route-prefix", f"/{name}")
        return self.says("deploy", f"shop:{target}", *where, *words, code=code)


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "shop.py").write_text(SHOP)
    system = RunningSystem(tmp_path_factory.mktemp("walk") / "state")
    system.start()
    yield Walk(system, folder)
    system.stop()


def test_a_canary_whose_answers_all_differ_says_so_and_what_differs(walk):
    walk.deploys("shop", "app")
    canary = ("--canary", "0.5,1", "--compare", "json", "--min-samples", "20", "--hold-s", "3")
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKS.format(url=f"{walk.system.url}/shop?n=1")]
    )
    try:
        said = walk.deploys("shop", "made", "rate=3", *canary)
    finally:
        asking.kill()
        asking.wait()
    differs = r"MOST ANSWERS DIFFER: (\d+) of \1 compared .*/price: other value"
    assert re.search(differs, said)
    assert re.search(f"the last canary was promoted: {differs}", walk.says("diff", "shop"))


def test_a_time_out_says_whose_it_is_and_what_is_missing(walk):
    said = walk.deploys("large", "large", "--timeout", "3", code=1)
    assert re.search(r"application large: .*\) was not reached within 3 s", said)
    assert "needs 1 num_gpus, and the host has 0" in said
    assert "it goes on" in said


def test_status_ends_with_the_last_line_of_what_failed(walk):
    walk.deploys("raises", "raises", "--timeout", "1", code=1)

    def failed():
        said = walk.says("status", "raises", code=1)
        return "FileNotFoundError: weights.bin" in said and said

    assert "Traceback" not in wait_until(failed, 10, "it has failed to start")
