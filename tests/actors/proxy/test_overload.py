"""More queries than a backend can do, over a real system."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.serve.exceptions import BackPressureError
from tests.support.asking import ask
from tests.support.systems import RunningSystem, wait_until

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
def napping(
    serving: Callable[..., str], client: serve.Client, name: str, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Have one backend, with two endpoints, this test's name and ``<name>-other``."""
    other = f"{name}-other"

    def make(**config: object) -> None:
        tag = serving(Napping, str(tmp_path), **config)
        client.create_endpoint(other, backend=tag, route=f"/{other}")

    yield make
    client.delete_endpoint(other)


def served(folder: Path, endpoint: str) -> int:
    return sum(path.name.startswith(f"{endpoint} ") for path in folder.iterdir())


@pytest.mark.slow
def test_who_is_turned_away_hears_when_what_waits_will_be_gone(
    running: RunningSystem,
    client: serve.Client,
    napping: Callable[..., None],
    name: str,
    tmp_path: Path,
) -> None:
    napping(max_ongoing_requests=1, max_queued_requests=40)
    handle = client.get_handle(name)
    responses = [handle.remote() for _ in range(60)]
    outcomes = []
    for response in responses:
        try:
            outcomes.append(response.result(timeout_s=30))
        except BackPressureError as error:
            outcomes.append(error)
    assert sum(outcome == "rested" for outcome in outcomes) >= 41, "the slot, and those that wait"
    (tmp_path / "stop").touch()
    before = served(tmp_path, name)
    responses = [handle.remote()]
    # Its router, too, knows by now that nobody else has the slot.
    wait_until(lambda: served(tmp_path, name) > before, 10, "the next one runs")
    responses += [handle.remote() for _ in range(40)]
    with pytest.raises(BackPressureError, match="40 queries queued, its limit") as raised:
        handle.remote().result(timeout_s=10)
    retry_after_s = raised.value.retry_after_s
    assert retry_after_s is not None
    assert 40 * NAP_S < retry_after_s < 60
    status, headers, _ = ask(f"{running.url}/{name}")
    assert status == 503
    assert int(headers["Retry-After"]) >= math.ceil(retry_after_s), "it stands still meanwhile"
    (tmp_path / "stop").unlink()
    assert [response.result(timeout_s=30) for response in responses] == ["rested"] * 41


def test_a_query_past_its_time_never_reaches_user_code_that_blocks_its_loop(
    running: RunningSystem,
    client: serve.Client,
    napping: Callable[..., None],
    name: str,
    tmp_path: Path,
) -> None:
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
