"""Which queries run again when a replica died, over a real system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.metrics import scraped, total
from tests.support.systems import RunningSystem, wait_until


class Fragile:
    """Dies of the first query that it runs; notes each run."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self, request: object = None) -> str:
        try:
            (self.folder / "run").touch(exist_ok=False)
        except FileExistsError:
            (self.folder / "run again").touch()
            return "survived"
        os._exit(1)


@pytest.mark.parametrize("again", [True, False])
def test_what_an_endpoint_says_goes_before_deployment_and_method_over_http(
    running: RunningSystem, serving: Callable[..., str], name: str, again: bool, tmp_path: Path
) -> None:
    endpoint = {"methods": ["POST"], "retryable": again or None}
    serving(Fragile, str(tmp_path), num_replicas=2, retryable=False, endpoint=endpoint)
    status, text = running.get(f"/{name}", data=b"")
    assert (tmp_path / "run again").exists() is again
    if again:
        assert (status, text) == (200, b"survived")
        retried = lambda: total(scraped(running), "greenroom_retries_total", endpoint=name)  # noqa: E731
        wait_until(lambda: retried() == 1, 5, "it is counted")
    else:
        assert status == 503
        assert b"the replica died with this query under way; it may have run" in text
