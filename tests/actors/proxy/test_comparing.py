"""Comparison of shadows over real systems: what is found, and what nobody notices."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from greenroom import serve
from tests.support.systems import RunningSystem, wait_until

pytestmark = pytest.mark.slow

BIG = 300 * 1024


class Scorer:
    """Answers with JSON; the new one is a little off, and does this and that with some inputs."""

    def __init__(self, new: bool = False) -> None:
        self.new = new

    async def __call__(self, request: Any) -> Any:
        asked = request.query_params.get("q", "")
        if asked == "big":
            return "x" * BIG
        if asked == "raise" and self.new:
            raise ValueError("only the new one")
        if asked == "text" and self.new:
            return "not JSON"
        if asked == "die" and self.new:
            os._exit(1)
        return {
            "score": 0.5 + (1e-9 if self.new else 0) + (asked == "off" and self.new),
            "at": "new" if self.new else "old",
        }


class Shop:
    """One test's endpoint, on "v1", with "v2" as its shadow."""

    def __init__(self, running: RunningSystem, client: serve.Client, name: str) -> None:
        self.running, self.client, self.name, self.shadow = running, client, name, f"{name}:v2"

    def compare(self, compare: Any) -> None:
        self.client.shadow_traffic(self.name, self.shadow, 1.0, compare)

    def get(self, asked: str = "") -> tuple[int, bytes]:
        return self.running.get(f"/{self.name}?q={asked}", headers={"X-Request-ID": f"id-{asked}"})

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.diff(self.name)[self.shadow]
        return found

    def wait_for(self, expected: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        wait_until(lambda: expected(self.found()), 20, what)
        return self.found()

    def causes(self) -> dict[str, int]:
        return {each["cause"]: each["count"] for each in self.found()["causes"]}


@pytest.fixture
def shop(running, client, name, serving):
    serving(Scorer)
    serving(Scorer, True)
    return Shop(running, client, name)


def test_differences_are_counted_by_cause_with_examples(shop):
    more = shop.client.update_backend_config(shop.shadow, {"num_replicas": 2})
    shop.client.wait_for_goal(more, 20)
    shop.compare({"how": "json", "relative_tolerance": 1e-6, "ignore": ["/at"]})
    for asked in ("", "", "", "off", "off", "raise", "text", "big"):
        assert shop.get(asked)[0] == 200
    output = shop.wait_for(lambda f: f["compared"] + f["not_compared"] == 8, "all eight")
    assert (output["compared"], output["equal"], output["different"]) == (6, 3, 3)
    assert shop.causes() == {
        "/score: other value": 2,
        "status 200 became 500": 1,
        "shadow: no JSON": 1,
        "primary: larger than 256 KiB": 1,
    }
    (example, _) = output["causes"][0]["examples"]
    assert example["request_id"] == "id-off"
    assert example["detail"] == "0.5 became 1.500000001"
    assert json.loads(example["shadow"]["body"])["at"] == "new"
    shown = shop.running.greenroom("diff", shop.name)
    assert shown.returncode == 0, shown.stderr
    assert "6 compared, 3 different, 2 not compared" in shown.stdout
    assert "id-off  0.5 became 1.500000001" in shown.stdout
    output = json.loads(shop.running.greenroom("diff", shop.name, "--json").stdout)
    assert output[shop.shadow]["different"] == 3


def test_a_function_of_the_users_compares(shop):
    def closely(primary: Any, shadow: Any) -> str | None:
        if primary.body.startswith(b"x"):
            raise KeyError("score")
        off = abs(primary.json()["score"] - shadow.json()["score"])
        return "a score is off" if off > 0.1 else None

    shop.compare(closely)
    for asked in ("", "off"):
        shop.get(asked)
    found = shop.wait_for(lambda f: f["compared"] == 2, "both")
    assert found["by"].startswith("function tests.actors")
    assert shop.causes() == {"a score is off": 1}


def test_a_shadow_that_dies_or_is_stopped_costs_nobody_anything(shop):
    shop.compare("status")
    (replica,) = shop.client.list_backends()[shop.shadow]["replicas"]
    os.kill(replica["pid"], signal.SIGSTOP)
    try:
        for _ in range(60):
            assert shop.get()[0] == 200
    finally:
        os.kill(replica["pid"], signal.SIGCONT)
    assert shop.get("die")[0] == 200
    wait_until(
        lambda: (
            [r["pid"] for r in shop.client.list_backends()[shop.shadow]["replicas"]]
            not in ([replica["pid"]], [])
        ),
        20,
        "another replica",
    )
    before = shop.found()["compared"]

    def goes_on() -> bool:
        assert shop.get()[0] == 200
        return bool(shop.found()["compared"] > before)

    wait_until(goes_on, 20, "comparison to go on")


def test_a_new_controller_hears_again_what_was_found(shop):
    shop.compare("json")
    shop.get()
    shop.wait_for(lambda f: f["different"] == 1, "one")
    pid = shop.running.pid_of("controller")
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: dict(shop.running.pids()).get("controller") not in {None, pid}, 20, "a controller"
    )
    shop.wait_for(lambda f: f["different"] == 1, "it to be heard again")
