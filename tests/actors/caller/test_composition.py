"""Deployments that call each other: what calls inherit, and what becomes of them."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.exceptions import (
    DeploymentUnavailableError,
    InvalidRequestError,
    RequestCancelledError,
    UnknownNameError,
)
from greenroom.serve.handle import DeploymentHandle
from tests.support.asking import answer, connect
from tests.support.metrics import ongoing
from tests.support.systems import RunningSystem, wait_until


class Leaf:
    """The last in the chain; says in ``folder`` what becomes of its calls."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def wait(self, mark: str) -> None:
        (self.folder / f"{mark} began").touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            (self.folder / f"{mark} cancelled").touch()
            raise

    def block(self, mark: str) -> None:
        (self.folder / f"{mark} began").touch()
        context = serve.get_request_context()
        while not context.is_cancelled:
            time.sleep(0.01)
        (self.folder / f"{mark} cancelled").touch()
        while not (self.folder / "gate").exists():
            time.sleep(0.01)

    async def timing(self) -> tuple[str, float | None]:
        context = serve.get_request_context()
        return context.request_id, context.remaining_s

    async def note(self, mark: str) -> None:
        (self.folder / mark).touch()

    async def double(self, number: int) -> int:
        await asyncio.sleep(0.01)
        return 2 * number


class Middle:
    """Passes on."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    async def timing(self) -> Any:
        return await self.leaf.timing.remote()

    async def wait(self, mark: str) -> None:
        await self.leaf.wait.remote(mark)

    async def block(self, mark: str) -> None:
        await self.leaf.block.remote(mark)

    def wait_in_a_thread(self, mark: str) -> None:
        try:
            self.leaf.wait.remote(mark).result()
        except RequestCancelledError:
            with pytest.raises(RequestCancelledError, match="the query that calls"):
                self.leaf.note.remote("never")
            raise

    async def wait_for_none(self, mark: str) -> None:
        waits = [self.leaf.wait.remote(f"{mark}{number}") for number in range(3)]
        await asyncio.sleep(60)
        assert waits

    async def clean_up(self, mark: str) -> None:
        try:
            await self.leaf.wait.remote(mark)
        finally:
            await self.leaf.note.remote("cleaned up")

    async def afterwards(self, mark: str) -> None:
        left_s = serve.get_request_context().remaining_s
        assert left_s is not None

        async def later() -> None:
            await asyncio.sleep(left_s + 0.1)
            _, remaining_s = await self.leaf.timing.remote()
            await self.leaf.note.remote(f"{mark} {remaining_s}")

        self.task = asyncio.create_task(later())

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=10)
    async def batched(self, marks: list[str]) -> list[float | None]:
        _, remaining_s = await self.leaf.timing.remote()
        await self.leaf.note.remote("batch began")
        await self.leaf.wait.remote("batch")
        return [remaining_s] * len(marks)


class Front:
    """The ingress: has the middle do what the query string says."""

    def __init__(self, middle: Any, leaf: Any) -> None:
        self.middle, self.leaf = middle, leaf

    async def __call__(self, request: Any) -> Any:
        do = request.query_params["do"]
        if do == "timing":
            return await self.middle.timing.remote()
        return await getattr(self.middle, do).remote(request.query_params["mark"])


def graph(folder: Path) -> serve.Application:
    leaf = serve.deployment(Leaf).bind(str(folder))
    middle = serve.deployment(Middle).bind(leaf)
    return serve.deployment(Front).bind(middle, leaf)


@pytest.fixture
def chain(deployed: Callable[..., Any], tmp_path: Path) -> Any:
    return deployed(graph(tmp_path))


Ask = Callable[..., http.client.HTTPConnection]


@pytest.fixture
def ask(running: RunningSystem, name: str) -> Ask:
    """Send a request; the answer is not waited for."""

    def send(do: str, mark: str = "", **headers: str) -> http.client.HTTPConnection:
        connection = connect(running.url)
        connection.request("GET", f"/{name}?do={do}&mark={mark}", headers=headers)
        return connection

    return send


@pytest.mark.usefixtures("chain")
def test_the_request_id_and_the_deadline_travel_along(ask: Ask) -> None:
    headers = {"X-Request-ID": "abc", "X-Request-Timeout-Seconds": "7"}
    got = answer(ask("timing", **headers))
    assert got.status == 200
    request_id, remaining_s = got.json
    assert request_id == "abc"
    assert 1 < remaining_s < 7
    assert answer(ask("timing")).json[1] is None


@pytest.mark.slow
@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("do", ["wait", "block", "wait_in_a_thread", "wait_for_none", "clean_up"])
def test_a_client_that_leaves_cancels_every_call_made_for_it(
    ask: Ask, running: RunningSystem, name: str, do: str, tmp_path: Path
) -> None:
    connection = ask(do, "a")
    marks = ["a0", "a1", "a2"] if do == "wait_for_none" else ["a"]
    for mark in marks:
        wait_until((tmp_path / f"{mark} began").exists, 5, "the leaf has begun")
    wait_until(lambda: ongoing(running, name) == 2 + len(marks), 5, "each call has a slot")
    connection.close()
    for mark in marks:
        wait_until((tmp_path / f"{mark} cancelled").exists, 5, "the leaf is cancelled")
    if do == "block":
        wait_until(lambda: ongoing(running, name) == 1, 5, "the others' slots are free")
        assert ongoing(running, name, anew=True) == 1, "sync code has its slot until it returns"
        (tmp_path / "gate").touch()
    if do == "clean_up":
        wait_until((tmp_path / "cleaned up").exists, 5, "async code may still call")
    wait_until(lambda: ongoing(running, name) == 0, 5, "all slots are free")
    assert not (tmp_path / "never").exists()


@pytest.mark.usefixtures("chain")
def test_what_goes_on_in_the_background_has_no_deadline(ask: Ask, tmp_path: Path) -> None:
    assert answer(ask("afterwards", "a", **{"X-Request-Timeout-Seconds": "2"})).status == 200
    wait_until((tmp_path / "a None").exists, 5, "it calls after the deadline of its query")


@pytest.mark.slow
@pytest.mark.usefixtures("chain")
def test_a_batch_lasts_as_long_as_one_of_its_items_is_wanted(
    ask: Ask, running: RunningSystem, name: str, tmp_path: Path
) -> None:
    first = ask("batched", "a", **{"X-Request-Timeout-Seconds": "30"})
    wait_until(lambda: ongoing(running, name) == 2, 5, "the first waits in the middle")
    second = ask("batched", "b", **{"X-Request-Timeout-Seconds": "2"})
    wait_until((tmp_path / "batch began").exists, 5, "both make a batch")
    assert answer(second).status == 408
    assert not (tmp_path / "batch cancelled").exists()
    first.close()
    wait_until((tmp_path / "batch cancelled").exists, 5, "nobody wants it any more")


@serve.deployment(max_constructor_retry_count=1)
class Finds:
    """Asks for another deployment by name, in its constructor."""

    def __init__(self, others: Any, name: str) -> None:
        self.others = others
        self.handle = serve.get_deployment_handle(name)

    async def __call__(self) -> int:
        return int(await self.handle.double.remote(4))


def test_a_deployment_that_is_not_there_fails_the_deploy_with_its_name(
    deployed: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    leaf = serve.deployment(Leaf).bind(str(tmp_path))
    with pytest.raises(UnknownNameError, match="is named 'Leef'; there are: Finds, Leaf"):
        deployed(Finds.bind(leaf, "Leef"))
    with pytest.raises(InvalidRequestError, match="has no deployment 'Leef'; it has: Finds"):
        deployed(Finds.bind(DeploymentHandle("Leef", name), "Finds"))
    with pytest.raises(UnknownNameError, match="no application is named 'elsewhere'"):
        deployed(Finds.bind(DeploymentHandle("Leaf", "elsewhere"), "Finds"))
    with pytest.raises(UnknownNameError, match="no endpoint is named 'nowhere'"):
        deployed(Finds.bind(DeploymentHandle("nowhere", None), "Finds"))


class Broken:
    def __init__(self) -> None:
        raise OSError("broken on purpose")

    def __call__(self) -> str:
        return "never"


def test_a_call_of_what_is_gone_or_cannot_start_says_so_at_once(
    running: RunningSystem, deployed: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    never = DeploymentHandle("Leaf", name, client=running.connection.queries)
    for handle in (never, never.options(stream=True)):
        response = handle.timing.remote()
        with pytest.raises(DeploymentUnavailableError, match=f"no endpoint is named '{name}#Leaf'"):
            next(response) if handle is not never else response.result(timeout_s=10)
    with pytest.raises(OSError, match="broken on purpose"):
        deployed(serve.deployment(max_constructor_retry_count=1)(Broken).bind())
    broken = DeploymentHandle("Broken", name, client=running.connection.queries)
    with pytest.raises(DeploymentUnavailableError, match="is unavailable: it could not be started"):
        broken.remote().result(timeout_s=10)
    deployed(graph(tmp_path))
    assert never.double.remote(2).result(timeout_s=10) == 4
