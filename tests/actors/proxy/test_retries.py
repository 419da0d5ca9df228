"""Which queries run again when a replica or the proxy died, over a real system."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
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


@pytest.mark.parametrize("again", [True, False])
def test_what_an_endpoint_says_goes_before_deployment_and_method_over_http(
    running: RunningSystem, client: serve.Client, name: str, again: bool, tmp_path: Path
) -> None:
    tag = f"{name}:v1"
    config = {"num_replicas": 2, "retryable": False}
    client.wait_for_goal(client.create_backend(tag, Fragile, str(tmp_path), config=config), 20)
    client.create_endpoint(
        name, backend=tag, route=f"/{name}", methods=["POST"], retryable=again or None
    )
    status, text = ask(running, "POST", name)
    if again:
        assert (status, text, runs(tmp_path)) == (200, "survived", 2)
        retried = lambda: total(scraped(running), "greenroom_retries_total", endpoint=name)  # noqa: E731
        wait_until(lambda: retried() == 1, 5, "it is counted")
    else:
        assert (status, runs(tmp_path)) == (503, 1)
        assert "the replica died with this query under way; it may have run" in text
    client.delete_endpoint(name)
    client.wait_for_goal(client.delete_backend(tag, force=True), 20)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "again"), [("GET", True), ("POST", False)])
def test_when_the_proxy_dies_the_next_one_decides_by_the_same_rules(
    own_system: RunningSystem, tmp_path: Path, method: str, again: bool
) -> None:
    client = serve.Client(own_system.connection, own_system.settings)
    config = {"num_replicas": 2}
    made = client.create_backend("b", Fragile, str(tmp_path), 0, config=config)
    client.wait_for_goal(made, 20)
    client.create_endpoint("e", backend="b", route="/e", methods=["GET", "POST"])
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
