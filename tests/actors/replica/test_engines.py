"""Engines: servers of other makers as replicas, whatever becomes of them or of their replicas."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from greenroom import serve
from greenroom.core.errors import DeployFailedError, InvalidRequestError
from greenroom.serve.engines.engine import Engine
from tests.support.engine import COMMAND
from tests.support.systems import RunningSystem, alive, wait_until

ROUTE = "/engine"
STUBBORN = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def python(code: str) -> str:
    """Return the command that runs this code, which gets its port as an argument."""
    return f"{shlex.join([sys.executable, '-c', code])} {{port}}"


@pytest.fixture(scope="module")
def engine(running: RunningSystem) -> Iterator[RunningSystem]:
    """The shared system, with an engine at ROUTE."""
    running.deploy(
        Engine(COMMAND, max_ongoing_requests=20).bind(), name="engine", route_prefix=ROUTE
    )
    yield running
    with running.as_default():
        serve.delete("engine")


@pytest.fixture
def deployed(running: RunningSystem, name: str) -> Iterator[Any]:
    """Return what deploys an engine under a name of the test's own, and deletes it at the end."""

    def deploy(command: str, **options: Any) -> None:
        app = Engine(command, **options).bind()
        running.deploy(app, name=name, route_prefix=f"/{name}")

    yield deploy
    with running.as_default():
        serve.delete(name)


def engines(running: RunningSystem, application: str) -> list[psutil.Process]:
    """Return the processes of all engines of an application, keepers included."""
    replicas = [psutil.Process(pid) for pid in running.replica_pids(application)]
    return [each for replica in replicas for each in replica.children(recursive=True)]


def ongoing(system: RunningSystem) -> int:
    """Return how many requests the engine of the module has, as its replica counts."""
    url = f"{system.url}/-/metrics"
    with urllib.request.urlopen(url) as answer:
        lines = [
            line for line in answer.read().decode().splitlines() if 'application="engine"' in line
        ]
    return sum(
        int(float(line.split()[-1]))
        for line in lines
        if line.startswith("greenroom_replica_ongoing_requests{")
    )


def ask(
    system: RunningSystem, method: str, path: str, body: Any = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", system.settings.http.port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"{ROUTE}{path}", body, named)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


# --- Requests -------------------------------------------------------------------------------------


def test_a_request_and_its_answer_pass_as_they_are(engine: RunningSystem) -> None:
    answer, body = ask(
        engine, "POST", "/echo?a=%2F&b", b"\0body", x_said="this", host="shop.example"
    )
    assert (answer.status, body) == (200, b"\0body")
    assert answer.headers["x-target"] == "/echo?a=%2F&b"  # below the application's route
    assert answer.headers["x-said"] == "this"
    assert answer.headers["x-host"] == "shop.example"
    assert answer.headers["x-length"] == "5"
    assert answer.headers["content-length"] == "5"


def test_a_route_that_is_written_in_another_way_is_the_same(engine: RunningSystem) -> None:
    status, _ = engine.get(f"{ROUTE.replace('e', '%65')}/echo?x=%20")
    assert status == 200


@pytest.mark.parametrize("status", [201, 404, 422, 500, 503])
def test_an_engines_status_is_the_clients(engine: RunningSystem, status: int) -> None:
    answer, body = ask(engine, "POST", f"/echo?status={status}", b"why")
    assert (answer.status, body) == (status, b"why")


def test_a_head_has_no_body_and_the_length_of_the_get(engine: RunningSystem) -> None:
    answer, body = ask(engine, "HEAD", "/echo")
    assert (answer.status, body, answer.headers["x-target"]) == (200, b"", "/echo?")


def test_bodies_pass_in_parts_with_and_without_a_length(engine: RunningSystem) -> None:
    sent = os.urandom(3_000_000)
    answer, body = ask(engine, "POST", "/echo", sent)
    assert (answer.status, answer.headers["x-length"], body == sent) == (200, "3000000", True)
    parts = [sent[at : at + 100_000] for at in range(0, len(sent), 100_000)]
    answer, body = ask(engine, "POST", "/echo", iter(parts))
    assert (answer.status, body == sent) == (200, True)


def test_an_upload_that_breaks_off_leaves_nothing_under_way(engine: RunningSystem) -> None:
    with socket.create_connection(("127.0.0.1", engine.settings.http.port)) as client:
        head = f"POST {ROUTE}/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
        client.sendall(head.encode() + b"x" * 2_000_000)
        wait_until(lambda: ongoing(engine) == 1, 10, "it is under way")
    wait_until(lambda: ongoing(engine) == 0, 10, "it has ended")
    (replica,) = engine.replica_pids("engine")
    connected = psutil.Process(replica).net_connections("tcp4")
    assert not [each for each in connected if each.status == psutil.CONN_ESTABLISHED]


def test_parts_arrive_as_they_are_made_and_who_leaves_is_missed(engine: RunningSystem) -> None:
    with urllib.request.urlopen(f"{engine.url}{ROUTE}/parts?count=3") as whole:
        assert whole.headers["content-type"].startswith("text/event-stream")
        assert whole.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    leaving = urllib.request.urlopen(f"{engine.url}{ROUTE}/parts?count=9&pause_s=60&name=left")
    assert leaving.readline() == b"data: 0\n"  # and no other comes for a minute
    leaving.close()
    wait_until(lambda: engine.get(f"{ROUTE}/cut") == (200, b"left"), 10, "the engine hears of it")


def test_websockets_pass_with_their_subprotocols_and_closes(engine: RunningSystem) -> None:
    url = f"ws://127.0.0.1:{engine.settings.http.port}{ROUTE}/talk"
    with connect(url, subprotocols=["chat.v2"], proxy=None) as socket:  # type: ignore[list-item]
        assert socket.subprotocol == "chat.v2"
        for text in ("ab", "x" * 100_000 + "y"):
            socket.send(text)
            assert socket.recv(10) == text[::-1]
        socket.send("close")
        with pytest.raises(Exception, match="4001"):
            socket.recv(10)
        assert (socket.close_code, socket.close_reason) == (4001, "as asked")
    with pytest.raises(InvalidStatus) as refused, connect(f"{url}?refuse=1", proxy=None):
        pass
    assert refused.value.response.status_code == 403


# --- What becomes of it ---------------------------------------------------------------------------


def test_an_engine_that_is_killed_loses_no_get_and_is_replaced(
    running: RunningSystem, deployed: Any, name: str
) -> None:
    deployed(COMMAND, num_replicas=2, max_ongoing_requests=20)
    before = running.replica_pids(name)
    (master, *_), *_ = [
        [
            each
            for each in psutil.Process(pid).children(recursive=True)
            if "gunicorn" in " ".join(each.cmdline()[:4])
        ]
        for pid in before
    ]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(running.get, f"/{name}/wait") for _ in range(40)]
        wait_until(lambda: sum(each.done() for each in asked) > 8, 20, "they are under way")
        os.kill(master.pid, signal.SIGKILL)
        assert {each.result() for each in asked} == {(200, b"waited")}
    wait_until(
        lambda: len(set(running.replica_pids(name)) - set(before)) == 1, 20, "another replica runs"
    )
    (died,) = set(before) - set(running.replica_pids(name))
    assert not alive(died)


def test_no_engine_outlives_its_replica(running: RunningSystem, deployed: Any, name: str) -> None:
    deployed(python(STUBBORN), health="/")
    there = engines(running, name)
    assert len(there) == 2
    (replica,) = running.replica_pids(name)
    os.kill(replica, signal.SIGKILL)
    wait_until(lambda: not any(alive(each.pid) for each in there), 20, "it is killed")


def test_it_ends_with_all_that_it_has_started_when_it_is_deleted(
    running: RunningSystem, deployed: Any, name: str
) -> None:
    deployed(COMMAND)
    there = engines(running, name)
    assert len(there) == 3  # the keeper, gunicorn, and its worker
    with running.as_default():
        serve.delete(name)
    wait_until(lambda: not any(alive(each.pid) for each in there), 20, "all have ended")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (python("import sys; print('loading weights.bin'); sys.exit(3)"), "exit code 3"),
        (python("import sys; print('loading weights.bin'); sys.exit(3)"), "loading weights.bin"),
        ("no-such-engine --port {port}", "No such file or directory: 'no-such-engine'"),
    ],
)
def test_one_that_cannot_start_says_why(
    running: RunningSystem, deployed: Any, command: str, told: str
) -> None:
    with pytest.raises(DeployFailedError) as failed:
        deployed(command, max_constructor_retry_count=1)
    assert told in str(failed.value)


def test_one_that_is_never_healthy_is_given_up_in_time(deployed: Any) -> None:
    with pytest.raises(DeployFailedError, match=r"did not return within constructor_timeout_s=2"):
        deployed(python(STUBBORN), ready_timeout_s=2, max_constructor_retry_count=1)


def test_one_that_is_sick_is_replaced(
    running: RunningSystem, deployed: Any, name: str, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    deployed(
        COMMAND,
        health_check_period_s=0.2,
        actor_options={"runtime_env": {"env_vars": {"SICK": str(sick)}}},
    )
    before = running.replica_pids(name)
    sick.touch()
    wait_until(lambda: not set(before) & set(running.replica_pids(name)), 20, "it is retired")
    sick.unlink()
    wait_until(lambda: running.replica_pids(name), 20, "another one runs")


def test_programs_beside_the_replicas_python_are_found_first(
    running: RunningSystem, deployed: Any, name: str
) -> None:
    deployed(COMMAND.replace(f"{sys.executable} -m gunicorn", "gunicorn"))
    (keeper, *_) = engines(running, name)
    assert keeper.environ()["PATH"].startswith(f"{Path(sys.executable).parent}:")
    assert running.get(f"/{name}/echo")[0] == 200


# --- How it is deployed ---------------------------------------------------------------------------


def test_a_command_or_a_file_deploys_one(running: RunningSystem, name: str, tmp_path: Path) -> None:
    made = running.greenroom(
        *("deploy", "--command", COMMAND, "--name", name, "--route-prefix", f"/{name}"),
        *("name=Fast", "max_ongoing_requests=7", "ready_timeout_s=30"),
    )
    assert made.returncode == 0, made.stderr
    assert running.get(f"/{name}/echo")[0] == 200
    (deployment,) = running.status()["applications"][name]["deployments"]
    assert deployment == "Fast"
    file = tmp_path / "file.json"
    entry = {"import_path": "greenroom.serve.engines.engine:build", "args": {"command": COMMAND}}
    named = {"name": name, "route_prefix": f"/{name}", **entry}
    file.write_text(json.dumps({"applications": [named]}))
    made = running.greenroom("deploy", str(file))
    assert made.returncode == 0, made.stderr
    (deployment,) = running.status()["applications"][name]["deployments"]
    assert deployment == "Engine"
    assert running.get(f"/{name}/echo")[0] == 200
    with running.as_default():
        serve.delete(name)


def test_a_command_has_to_name_something(running: RunningSystem) -> None:
    made = running.greenroom("deploy")
    assert (made.returncode, "or give --command" in made.stderr) == (2, True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"command": "vllm serve M"}, "must have {port}"),
        ({"command": ""}, "must have {port}"),
        ({"command": "vllm 'serve {port}"}, "No closing quotation"),
        ({"command": 5}, "command"),
        ({"command": ["vllm", "{port}", 5]}, "command"),
        ({"command": "e {port}", "health": "health"}, "expected a path, as /health"),
        ({"command": "e {port}", "health": "/a b"}, "expected a path, as /health"),
        ({"command": "e {port}", "ready_timeout_s": 0}, "ready_timeout_s"),
        ({"command": "e {port}", "ready_timeout_s": "soon"}, "ready_timeout_s"),
        ({"command": "e {port}", "num_replica": 2}, "num_replica"),
    ],
)
def test_what_is_wrong_with_one_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Engine(**given)
    assert told in str(refused.value)
