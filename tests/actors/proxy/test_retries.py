"""Which queries run again when a replica or the proxy died, over a real system."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenroom import serve
from tests.support.metrics import scraped, total
from tests.support.systems import RunningSystem, wait_until


class Fragile:
    """Dies of the first query that it runs, or waits while there is a file; notes each run."""

    def __init__(self, folder: str, deaths: int = 1) -> None:
        self.folder, self.deaths = Path(folder), deaths

    def __call__(self, request: object = None) -> str:
        runs = len(list(self.folder.glob("run*")))
        (self.folder / f"run {runs}").touch()
        if runs < self.deaths:
            os._exit(1)
        while (self.folder / "wait").exists():
            time.sleep(0.01)
        return "survived"


def runs(folder: Path) -> int:
    return len(list(folder.glob("run*")))


def ask(running: RunningSystem, method: str, name: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", running.settings.http.port, timeout=30)
    connection.request(method, f"/{name}")
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def wait_for_one(metric: str, running: RunningSystem, **labels: str) -> None:
    wait_until(lambda: total(scraped(running), metric, **labels) == 1, 5, f"one of {metric}")


Make = Callable[..., None]


@pytest.fixture
def fragile(client: serve.Client, name: str, tmp_path: Path) -> Iterator[Make]:
    """Have a backend of two replicas behind an endpoint; of each, say whether it is retryable."""
    tag = f"{name}:v1"

    def make(endpoint: bool | None, deployment: bool | None, deaths: int = 1) -> None:
        config = {"num_replicas": 2, "retryable": deployment}
        made = client.create_backend(tag, Fragile, str(tmp_path), deaths, config=config)
        client.wait_for_goal(made, 20)
        client.create_endpoint(
            name, backend=tag, route=f"/{name}", methods=["GET", "POST"], retryable=endpoint
        )

    yield make
    client.delete_endpoint(name)
    client.wait_for_goal(client.delete_backend(tag, force=True), 20)


@pytest.mark.parametrize(
    ("endpoint", "deployment", "method", "again"),
    [
        (None, None, "POST", False),
        (True, False, "POST", True),
    ],
)
def test_endpoint_then_deployment_then_method_say_what_runs_again_over_http(
    running: RunningSystem,
    fragile: Make,
    name: str,
    tmp_path: Path,
    endpoint: bool | None,
    deployment: bool | None,
    method: str,
    again: bool,
) -> None:
    fragile(endpoint, deployment)
    status, text = ask(running, method, name)
    if again:
        assert (status, text, runs(tmp_path)) == (200, "survived", 2)
        wait_for_one("greenroom_retries_total", running, endpoint=name)
    else:
        assert (status, runs(tmp_path)) == (503, 1)
        assert "the replica died with this query under way; it may have run" in text


def test_what_is_repeated_too_often_is_503_and_counted(
    running: RunningSystem, fragile: Make, name: str, tmp_path: Path
) -> None:
    fragile(None, None, deaths=100)
    status, text = ask(running, "GET", name)
    assert (status, runs(tmp_path)) == (503, 2), "one query pays for one repeat"
    assert "retries are limited to as many as there are queries" in text
    labels = {"endpoint": name, "backend": f"{name}:v1"}
    wait_for_one("greenroom_retries_refused_total", running, **labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "endpoint", "again"),
    [("GET", None, True), ("POST", None, False)],
)
def test_when_the_proxy_dies_the_next_one_decides_by_the_same_rules(
    own_system: RunningSystem, tmp_path: Path, method: str, endpoint: bool | None, again: bool
) -> None:
    client = serve.Client(own_system.connection, own_system.settings)
    config = {"num_replicas": 2}
    made = client.create_backend("b", Fragile, str(tmp_path), 0, config=config)
    client.wait_for_goal(made, 20)
    client.create_endpoint(
        "e", backend="b", route="/e", methods=["GET", "POST"], retryable=endpoint
    )
    (tmp_path / "wait").touch()
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(own_system, method, "e")))
    asking.start()
    wait_until(lambda: runs(tmp_path) == 1, 10, "it runs")
    os.kill(own_system.pid_of("proxy"), signal.SIGKILL)
    if again:
        wait_until(lambda: runs(tmp_path) == 2, 20, "it runs again")
    else:
        wait_until(lambda: bool(answers), 20, "it is refused")
    (tmp_path / "wait").unlink()
    asking.join(60)
    ((status, text),) = answers
    assert (status, runs(tmp_path)) == ((200, 2) if again else (503, 1))
    assert text.startswith("survived" if again else "e: the proxy died with this query under way")
