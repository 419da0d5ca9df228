"""The admin client over a real system."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.admin import applications
from greenroom.serve.config import BackendConfig
from greenroom.serve.exceptions import GreenroomError, NotRunningError
from tests.support.systems import RunningSystem, alive, wait_until


def echo(request: Any) -> str:
    return request.method


class Tagged:
    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __call__(self) -> str:
        return self.tag


class Broken:
    def __init__(self) -> None:
        raise LookupError("no weights")


@pytest.fixture
def backend(client: serve.Client, name: str) -> Iterator[Callable[..., str]]:
    """Create backends, up and running; they and their endpoints are deleted at the end."""
    tags = []

    def create(target: Any, *args: Any, suffix: str = "", **options: Any) -> str:
        tag = f"{name}{suffix}:v1"
        tags.append(tag)
        client.wait_for_goal(client.create_backend(tag, target, *args, **options), 20)
        return tag

    yield create
    for endpoint, settings in client.list_endpoints().items():
        if set(settings["traffic"]) & set(tags):
            client.delete_endpoint(endpoint)
    for tag in tags:
        client.wait_for_goal(client.delete_backend(tag, force=True), 20)


def test_a_closed_client_says_that_it_is_closed(running: RunningSystem) -> None:
    address = f"127.0.0.1:{running.settings.admin_port}"
    client = serve.Client.connect(address)
    client.close()
    client.close()
    for use in (client.list_backends, client.status, lambda: client.get_handle("a")):
        began_at = time.monotonic()
        with pytest.raises(NotRunningError, match=r"connection .* was closed; open another"):
            use()
        assert time.monotonic() - began_at < 1
    with serve.Client.connect(address) as other:
        other.list_backends()


def test_a_backend_and_an_endpoint_serve_until_they_are_deleted(
    running: RunningSystem, client: serve.Client, name: str
) -> None:
    tag = f"{name}:v1"
    goal = client.create_backend(tag, Tagged, "one", config={"num_replicas": 2}, version="1")
    assert goal is not None
    client.wait_for_goal(goal, 20)
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    assert running.get(f"/{name}") == (200, b"one")
    assert running.get(f"/{name}/below?a=1") == (200, b"one")
    listed = client.list_backends()[tag]
    assert (listed["status"], listed["version"]) == ("HEALTHY", "1")
    assert listed["config"]["num_replicas"] == len(listed["replicas"]) == 2
    assert client.list_endpoints()[name] == {
        "route": f"/{name}",
        "methods": ["GET"],
        "traffic": {tag: 1.0},
        "shadows": {},
    }
    assert client.get_handle(name).remote().result(10) == "one"
    pids = [replica["pid"] for replica in listed["replicas"]]
    client.delete_endpoint(name)
    assert running.get(f"/{name}")[0] == 404
    client.wait_for_goal(client.delete_backend(tag), 20)
    assert tag not in client.list_backends()
    assert not any(map(alive, pids))


def test_conflicts_name_what_holds_the_thing(
    client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    tag = backend(Tagged, "one")
    other = backend(Tagged, "two", suffix="-other")
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    with pytest.raises(ValueError, match=f"'{tag}' exists with other code or settings"):
        client.create_backend(tag, Tagged, "another")
    with pytest.raises(ValueError, match=f"route '/{name}' is taken by endpoint '{name}'"):
        client.create_endpoint(f"{name}-second", backend=other, route=f"/{name}")
    with pytest.raises(ValueError, match=f"endpoint '{name}' exists with other settings"):
        client.create_endpoint(name, backend=other, route=f"/{name}")
    with pytest.raises(ValueError, match=f"'{tag}' has traffic of endpoint '{name}'"):
        client.delete_backend(tag)
    assert client.list_endpoints()[name]["traffic"] == {tag: 1.0}
    assert client.list_backends()[tag]["status"] == "HEALTHY"


def test_unknown_names_are_key_errors_that_say_what_there_is(
    client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    tag = backend(Tagged, "one")
    with pytest.raises(KeyError, match=tag):
        client.update_backend_config("nobody", {"num_replicas": 2})
    with pytest.raises(KeyError, match=tag):
        client.get_backend_config("nobody")
    with pytest.raises(KeyError, match="nobody"):
        client.create_endpoint(name, backend="nobody")
    with pytest.raises((KeyError, ValueError), match="nobody"):
        client.set_traffic("nobody", {tag: 1})
    with pytest.raises(KeyError, match="nobody"):
        client.get_handle("nobody")
    with pytest.raises(KeyError, match="nobody"):
        client.wait_for_goal("nobody")
    client.create_endpoint(name, backend=tag)
    with pytest.raises(ValueError, match="nobody"):
        client.set_traffic(name, {"nobody": 1})
    client.delete_endpoint("nobody")
    assert client.delete_backend("nobody") is None


def test_a_route_answers_when_create_returns_and_is_unknown_when_delete_returns(
    running: RunningSystem, client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    tag = backend(Tagged, "one")
    for round_ in range(40):
        client.create_endpoint(name, backend=tag, route=f"/{name}")
        assert running.get(f"/{name}") == (200, b"one"), round_
        client.delete_endpoint(name)
        assert running.get(f"/{name}")[0] == 404, round_


def test_traffic_moves_when_set_traffic_returns(
    running: RunningSystem, client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    tags = {"one": backend(Tagged, "one"), "two": backend(Tagged, "two", suffix="-two")}
    client.create_endpoint(name, backend=tags["one"], route=f"/{name}")
    for round_ in range(20):
        for text, tag in tags.items():
            client.set_traffic(name, {tag: 1.0})
            assert running.get(f"/{name}") == (200, text.encode()), round_


def test_the_longest_route_that_covers_a_path_gets_it(
    running: RunningSystem, client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    short, long = backend(Tagged, "short"), backend(Tagged, "long", suffix="-long")
    client.create_endpoint(name, backend=short, route=f"/{name}")
    client.create_endpoint(f"{name}-long", backend=long, route=f"/{name}/a/b")
    answers = {
        path: running.get(f"/{name}{path}")[1] for path in ("", "/a", "/a/b", "/a/b/c", "/a/bc")
    }
    assert answers == {
        "": b"short",
        "/a": b"short",
        "/a/b": b"long",
        "/a/b/c": b"long",
        "/a/bc": b"short",
    }
    assert running.get(f"/{name}x")[0] == 404


def test_settings_are_updated_one_by_one_while_it_serves(
    client: serve.Client, backend: Callable[..., str], running: RunningSystem, name: str
) -> None:
    tag = backend(Tagged, "one", config={"max_ongoing_requests": 7})
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    client.wait_for_goal(client.update_backend_config(tag, {"num_replicas": 3}), 20)
    config = client.get_backend_config(tag)
    assert (config.num_replicas, config.max_ongoing_requests) == (3, 7)
    assert len(client.list_backends()[tag]["replicas"]) == 3
    client.wait_for_goal(client.update_backend_config(tag, BackendConfig(num_replicas=1)), 20)
    assert client.get_backend_config(tag).max_ongoing_requests == 7
    wait_until(lambda: len(client.list_backends()[tag]["replicas"]) == 1, 10, "one replica is left")
    assert running.get(f"/{name}") == (200, b"one")


def test_a_goal_that_fails_raises_what_the_constructor_raised(
    client: serve.Client, name: str
) -> None:
    config = {"max_constructor_retry_count": 1}
    goal = client.create_backend(f"{name}:v1", Broken, config=config)
    with pytest.raises(LookupError, match="no weights"):
        client.wait_for_goal(goal, 20)
    assert client.list_backends()[f"{name}:v1"]["status"] == "DEPLOY_FAILED"
    client.wait_for_goal(client.delete_backend(f"{name}:v1"), 20)


def test_waiting_for_a_goal_can_time_out_and_go_on(
    client: serve.Client, name: str, tmp_path: Path
) -> None:
    class Slow:
        def __init__(self, go: str) -> None:
            while not Path(go).exists():
                time.sleep(0.01)

        def __call__(self) -> str:
            return "up"

    goal = client.create_backend(f"{name}:v1", Slow, str(tmp_path / "go"))
    assert client.create_backend(f"{name}:v1", Slow, str(tmp_path / "go")) == goal
    with pytest.raises(TimeoutError, match=f"goal {goal} was not reached within 0.2 s; it goes on"):
        client.wait_for_goal(goal, 0.2)
    (tmp_path / "go").touch()
    client.wait_for_goal(goal, 20)
    client.wait_for_goal(goal, 20)
    client.wait_for_goal(client.delete_backend(f"{name}:v1"), 20)


def test_a_goal_is_still_answered_when_very_many_newer_ones_have_ended(
    client: serve.Client, backend: Callable[..., str], name: str, tmp_path: Path
) -> None:
    class Slow:
        def __init__(self, go: str) -> None:
            while not Path(go).exists():
                time.sleep(0.01)

        def __call__(self) -> str:
            return "up"

    tag = backend(Tagged, "one")
    slow = client.create_backend(f"{name}:slow", Slow, str(tmp_path / "go"))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait_for_goal(slow, 100)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    for number in range(110):
        client.update_backend_config(tag, {"max_queued_requests": number})
    wait_until(
        lambda: all(g["state"] != "pending" for g in raw_goals(client) if g["id"] != slow),
        20,
        "the newer goals have ended",
    )
    (tmp_path / "go").touch()
    waiting.join(100)
    assert not waiting.is_alive()
    assert errors == []
    client.wait_for_goal(client.delete_backend(f"{name}:slow"), 20)


def raw_goals(client: serve.Client) -> list[dict[str, Any]]:
    return applications.read_report(client._connection)["goals"]


def exchange(
    running: RunningSystem, method: str, path: str, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", running.settings.http.port, timeout=20)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    response.body = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def test_a_method_that_is_not_the_endpoints_is_405_with_allow(
    running: RunningSystem, client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    client.create_endpoint(name, backend=backend(echo), route=f"/{name}", methods=["GET", "PUT"])
    assert exchange(running, "PUT", f"/{name}").body == b"PUT"
    refused = exchange(running, "POST", f"/{name}")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET, PUT")


async def naps(request: Any) -> str:
    await asyncio.sleep(float(request.query_params.get("s", 0)))
    return "rested"


def test_a_request_past_its_time_is_408_by_config_and_by_header(
    running: RunningSystem, client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    tag = backend(naps, config={"request_timeout_s": 1.0, "max_ongoing_requests": 1})
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    begun = time.monotonic()
    assert exchange(running, "GET", f"/{name}?s=10").status == 408
    took_s = time.monotonic() - begun
    assert 0.9 < took_s < 9
    assert exchange(running, "GET", f"/{name}").body == b"rested", "its slot is free again"
    begun = time.monotonic()
    hurried = exchange(running, "GET", f"/{name}?s=10", {"X-Request-Timeout-Seconds": "0.1"})
    assert hurried.status == 408
    assert 0.05 < time.monotonic() - begun < 9
    patient = exchange(running, "GET", f"/{name}?s=10", {"X-Request-Timeout-Seconds": "60"})
    assert patient.status == 408, "a client may ask for less time, not for more"


def test_requests_over_the_queue_limit_are_503_at_once(
    running: RunningSystem,
    client: serve.Client,
    backend: Callable[..., str],
    name: str,
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"

    async def waits(_request: Any) -> str:
        while not gate.exists():
            await asyncio.sleep(0.01)
        return "rested"

    tag = backend(waits, config={"max_ongoing_requests": 1, "max_queued_requests": 2})
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(exchange(running, "GET", f"/{name}").status))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: load_of(running, tag) == (2, 1), 5, "one request runs, two wait")
    refused = exchange(running, "GET", f"/{name}")
    assert refused.status == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert b"queue" in refused.body
    gate.touch()
    for thread in threads:
        thread.join(20)
    assert answers == [200, 200, 200]


def load_of(running: RunningSystem, tag: str) -> tuple[int, int]:
    found = {"queued": 0, "ongoing": 0}
    for line in running.get("/-/metrics")[1].decode().splitlines():
        for what in found:
            if f'"{tag}"' in line and line.startswith(f"greenroom_{what}"):
                found[what] = int(float(line.rpartition(" ")[2]))
    return found["queued"], found["ongoing"]


def test_a_headless_endpoint_is_reached_through_handles_only(
    running: RunningSystem, client: serve.Client, backend: Callable[..., str], name: str
) -> None:
    client.create_endpoint(name, backend=backend(Tagged, "one"))
    assert client.get_handle(name).remote().result(10) == "one"
    assert running.get(f"/{name}")[0] == 404
    client.delete_endpoint(name)
    with pytest.raises(GreenroomError, match=name):
        client.get_handle(name, missing_ok=True).remote().result(10)


def test_two_clients_and_many_threads_share_a_system(
    running: RunningSystem, client: serve.Client, name: str
) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        tag = f"{name}-{number}:v1"
        try:
            client.wait_for_goal(client.create_backend(tag, Tagged, str(number)), 30)
            client.create_endpoint(f"{name}-{number}", backend=tag, route=f"/{name}-{number}")
            assert running.get(f"/{name}-{number}") == (200, str(number).encode())
            client.delete_endpoint(f"{name}-{number}")
            client.wait_for_goal(client.delete_backend(tag), 30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
