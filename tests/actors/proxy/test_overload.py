"""More queries than a backend can do, over a real system."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from greenroom import serve
from tests.support.asking import ask
from tests.support.systems import wait_until

NAP_S = 0.05


class Napping:
    """Takes NAP_S for each query, or as long as a file says so; notes whom it has served."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __call__(self, request: object = None) -> str:
        context = serve.get_request_context()
        (self.folder / f"{context.endpoint} {context.request_id}").touch()
        while (self.folder / "block").exists():
            time.sleep(NAP_S / 10)  # code that must not do this does it
        await asyncio.sleep(NAP_S)
        while (self.folder / "stop").exists():
            await asyncio.sleep(NAP_S / 10)
        return "rested"


@pytest.fixture
def napping(serving, client, name, tmp_path):
    """Have one backend, with two endpoints, this test's name and ``<name>-other``."""
    other = f"{name}-other"

    def make(**config: object) -> None:
        tag = serving(Napping, str(tmp_path), **config)
        client.create_endpoint(other, backend=tag, route=f"/{other}")

    yield make
    client.delete_endpoint(other)


def served(folder: Path, endpoint: str) -> int:
    return sum(path.name.startswith(f"{endpoint} ") for path in folder.iterdir())


def test_a_query_past_its_time_never_reaches_user_code_that_blocks_its_loop(
    running, client, napping, name, tmp_path
):
    napping(max_ongoing_requests=5)
    (tmp_path / "block").touch()
    first = client.get_handle(name).remote()
    wait_until(lambda: served(tmp_path, name) == 1, 10, "the first one runs, and stays")
    other = f"{name}-other"
    assert ask(f"{running.url}/{other}", X_Request_Timeout_Seconds="0.2").status == 408
    last = client.get_handle(other).remote()
    (tmp_path / "block").unlink()
    assert first.result(timeout_s=20) == last.result(timeout_s=20) == "rested"
    assert served(tmp_path, other) == 1, "only the last one"
