"""Queries that fail at one replica are tried once at another, by option, under leases or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from greenroom import serve

EITHER_WAY = pytest.mark.parametrize(
    "way", [{}, {"max_queued_requests": 100}], ids=["under a lease", "by the router"]
)


class Fragile:
    """Its first replica fails each query, with a text of its own; ``all`` do where wanted."""

    def __init__(self, folder: str, *, all_fail: bool = False) -> None:
        self.is_bad = all_fail
        self.ran = Path(folder) / "ran"
        try:
            (Path(folder) / "first").mkdir()
            self.is_bad = True
        except FileExistsError:
            pass

    async def __call__(self, request: Any) -> Any:
        with self.ran.open("a") as log:
            log.write(f"{request.query_params.get('q', '')}\n")
        text = "bad" * int(request.query_params.get("times", 1))
        return PlainTextResponse(text, 500) if self.is_bad else "good"

    async def call(self, _number: int) -> str:
        if self.is_bad:
            raise ValueError("as ever")
        return "good"


@pytest.fixture
def fragile(running, name, tmp_path):
    def deploy(*, all_fail: bool = False, **options: Any) -> Any:
        given = {"num_replicas": 2, "retry_failures": True, "outlier_ejection": False}
        made = serve.deployment(**given, slow_start_s=0, **options)(Fragile)
        app = made.bind(str(tmp_path), all_fail=all_fail)
        return running.deploy(app, name=name, route_prefix=f"/{name}")

    yield deploy
    with running.as_default():
        serve.delete(name)


@EITHER_WAY
def test_a_get_that_fails_at_one_replica_is_answered_by_another(
    running, fragile, name, way, tmp_path
):
    fragile(**way)
    answers = [running.get(f"/{name}?q={number}") for number in range(60)]
    assert Counter(answers) == {(200, b"good"): 60}
    ran = Counter((tmp_path / "ran").read_text().split())
    assert max(ran.values()) == 2  # tried once more
    assert len(ran) == 60


@EITHER_WAY
def test_what_fails_everywhere_is_run_twice_and_its_first_answer_is_the_clients(
    running, fragile, name, way, tmp_path
):
    fragile(all_fail=True, **way)
    answers = [running.get(f"/{name}?q={number}") for number in range(20)]
    assert Counter(answers) == {(500, b"bad"): 20}
    assert set(Counter((tmp_path / "ran").read_text().split()).values()) == {2}
    large = running.get(f"/{name}?times=200000")
    assert (large[0], len(large[1])) == (500, 600_000)


def test_calls_of_handles_are_tried_again_where_they_may_be(running, fragile, name):
    fragile()
    failed = 0
    with running.as_default():
        handle = serve.get_app_handle(name)
        sure = handle.options(method_name="call", retryable=True)
        assert {sure.remote(number).result() for number in range(40)} == {"good"}
        for number in range(40):
            try:
                handle.call.remote(number).result()
            except ValueError:
                failed += 1
    assert 0 < failed < 40
