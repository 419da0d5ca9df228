"""Engines: servers of other makers as replicas, whatever becomes of them or of their replicas."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from greenroom import serve
from greenroom.core.errors import DeployFailedError, InvalidRequestError
from greenroom.serve.engines.engine import Engine, metrics_in
from tests.support.asking import Got, ask as ask_url
from tests.support.engine import COMMAND
from tests.support.metrics import ongoing
from tests.support.systems import RunningSystem, alive, wait_until

ROUTE = "/engine"
PLAIN = f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}"
STUBBORN = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
# Notes a SIGTERM in a file, hangs at /hang, and at /deaf answers and takes no more connections.
NOTING = """
import http.server, os, pathlib, signal, sys, threading, time
notes = pathlib.Path(os.environ["NOTES"])
def end(*_):
    notes.write_text("SIGTERM")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/hang":
            notes.write_text("hangs")
            time.sleep(600)
        self.do_POST()
    def do_POST(self):
        left = int(self.headers.get("content-length", 0))
        while left:
            left -= len(self.rfile.read(min(left, 65536)))
        if self.path == "/deaf":
            server.shutdown()
            server.server_close()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.serve_forever()
threading.Event().wait()
"""
# A variable that an engine, and all that it starts, have of these tests and of no others.
MARK = f"TEST_ENGINE_OF_{os.getpid()}"


def python(code: str) -> str:
    """Return the command that runs this code, which gets its port as an argument."""
    return f"{shlex.join([sys.executable, '-c', code])} {{port}}"


@pytest.fixture(scope="module")
def engine(running):
    """The shared system, with an engine at ROUTE."""
    running.deploy(
        Engine(COMMAND, max_ongoing_requests=20).bind(), name="engine", route_prefix=ROUTE
    )
    yield running
    with running.as_default():
        serve.delete("engine")


@pytest.fixture
def deployed(running, name):
    """Return what deploys an engine under a name of the test's own, and deletes it at the end."""

    def deploy(command: str, env: dict[str, str] | None = None, **options: Any) -> None:
        app = Engine(command, env={MARK: name, **(env or {})}, **options).bind()
        running.deploy(app, name=name, route_prefix=f"/{name}")

    yield deploy
    with running.as_default():
        serve.delete(name)
    wait_until(lambda: not engines(name), 20, "nothing of it is left")


def engines(name: str) -> list[psutil.Process]:
    """Return the processes of a test's engines, each after its keeper and before its children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_keeper = any(word.endswith("/keeper.py") for word in process.cmdline())
            if is_keeper and process.environ().get(MARK) == name:
                found += [process, *process.children(recursive=True)]
    return found


def socket_to(system: RunningSystem) -> socket.socket:
    return socket.create_connection(("127.0.0.1", system.settings.http.port), timeout=30)


def ask(system: RunningSystem, method: str, path: str, body: Any = None, **headers: str) -> Got:
    return ask_url(f"{system.url}{ROUTE}{path}", body, method, **headers)


# --- Requests -------------------------------------------------------------------------------------


def test_a_request_and_its_answer_pass_as_they_are(engine):
    answer = ask(engine, "POST", "/echo?a=%2F&b", b"\0body", x_said="this", host="shop.example")
    assert (answer.status, answer.body) == (200, b"\0body")
    assert answer.headers["x-target"] == "/echo?a=%2F&b"  # below the application's route
    assert answer.headers["x-said"] == "this"
    assert answer.headers["x-host"] == "shop.example"
    assert answer.headers["x-length"] == "5"
    assert answer.headers["content-length"] == "5"
    answer = ask(engine, "HEAD", "/echo")
    assert (answer.status, answer.body, answer.headers["x-target"]) == (200, b"", "/echo?")
    assert engine.get(f"{ROUTE.replace('e', '%65')}/echo?x=%20")[0] == 200, "the same route"


@pytest.mark.parametrize("status", [201, 404, 422, 500, 503])
def test_an_engines_status_is_the_clients(engine, status):
    answer = ask(engine, "POST", f"/echo?status={status}", b"why")
    assert (answer.status, answer.body) == (status, b"why")


def test_bodies_pass_in_parts_with_and_without_a_length(engine):
    sent = os.urandom(3_000_000)
    status, headers, body = ask(engine, "POST", "/echo", sent)
    assert (status, headers["x-length"], body == sent) == (200, "3000000", True)
    parts = [sent[at : at + 100_000] for at in range(0, len(sent), 100_000)]
    answer = ask(engine, "POST", "/echo", iter(parts))
    assert (answer.status, answer.body == sent) == (200, True)


def test_an_upload_that_breaks_off_leaves_nothing_under_way(engine):
    with socket_to(engine) as client:
        head = f"POST {ROUTE}/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
        client.sendall(head.encode() + b"x" * 2_000_000)
        wait_until(lambda: ongoing(engine, "engine") == 1, 10, "it is under way")
    wait_until(lambda: ongoing(engine, "engine") == 0, 10, "it has ended")
    (replica,) = engine.replica_pids("engine")

    def is_connected() -> bool:  # as for a moment, too, where it asks for the engine's health
        connected = psutil.Process(replica).net_connections("tcp4")
        return any(each.status == psutil.CONN_ESTABLISHED for each in connected)

    wait_until(lambda: not is_connected(), 5, "no connection with the engine")


def test_parts_arrive_as_they_are_made_and_who_leaves_is_missed(engine):
    with urllib.request.urlopen(f"{engine.url}{ROUTE}/parts?count=3") as whole:
        assert whole.headers["content-type"].startswith("text/event-stream")
        assert whole.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    leaving = urllib.request.urlopen(f"{engine.url}{ROUTE}/parts?count=9&pause_s=60&name=left")
    assert leaving.readline() == b"data: 0\n"  # and no other comes for a minute
    leaving.close()
    wait_until(lambda: engine.get(f"{ROUTE}/cut") == (200, b"left"), 10, "the engine hears of it")


def test_websockets_pass_with_their_subprotocols_and_closes(engine):
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


def test_a_websockets_handshake_passes_with_its_headers(engine):
    url = f"ws://shop.example{ROUTE}/talk"
    sent = {"Origin": "http://shop.example", "Cookie": "a=b", "User-Agent": "mine"}
    at = socket_to(engine)
    with connect(url, sock=at, additional_headers=sent, proxy=None) as socket:
        assert socket.response is not None
        assert socket.response.headers["set-cookie"] == "c=d"
        said = json.loads(socket.response.headers["x-said"])
    assert said == ["shop.example", "http://shop.example", "a=b", "mine"]
    with socket_to(engine) as client:
        head = (
            f"GET {ROUTE}/talk HTTP/1.1\r\nHost: x:99999\r\n"
            "Connection: upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")


def test_many_requests_at_once_reach_an_engine_that_queues_five_connections(
    running, deployed, name, tmp_path
):
    deployed(python(NOTING), health="/", env={"NOTES": str(tmp_path / "notes")})
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket_to(running)) for _ in range(64)]
        for client in clients:
            head = f"POST /{name}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
            client.sendall(head.encode())
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}


# --- What becomes of it ---------------------------------------------------------------------------


def test_an_engine_that_is_killed_loses_no_get_and_is_replaced(running, deployed, name):
    deployed(COMMAND, num_replicas=2, max_ongoing_requests=20)
    before = running.replica_pids(name)
    _, master, *_ = engines(name)
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


def test_what_an_engine_takes_no_connection_for_runs_at_another(running, deployed, name, tmp_path):
    notes = {"NOTES": str(tmp_path / "notes")}
    deployed(python(NOTING), health="/", num_replicas=2, env=notes)
    for _ in range(50):
        assert running.get(f"/{name}/", data=b"small")[0] == 200
    _, deaf = running.get(f"/{name}/deaf", data=b"")
    # Under leases, which single queries one after the other get, and by the router.
    bodies = [b"small"] * 50 + [os.urandom(3_000_000)] * 10
    answered = [running.get(f"/{name}/", data=body) for body in bodies]
    assert {status for status, _ in answered} == {200}
    assert deaf not in {pid for _, pid in answered}
    assert alive(int(deaf))  # it was nobody's death that had them run elsewhere


def test_an_engine_whose_keeper_has_died_before_it_could_be_tied_to_it_does_not_begin():
    code = "from greenroom.serve.engines.keeper import end_with; end_with(0); print('it begins')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize(
    ("whom", "command"),
    [pytest.param("replica", python(STUBBORN), marks=pytest.mark.slow), ("keeper", PLAIN)],
)
def test_no_engine_outlives_its_replica_or_keeper(running, deployed, name, whom, command):
    deployed(command, health="/")
    there = engines(name)
    keeper, _ = there
    before = running.replica_pids(name)
    os.kill(keeper.pid if whom == "keeper" else before[0], signal.SIGKILL)
    wait_until(lambda: not any(alive(each.pid) for each in there), 20, "it is killed")
    wait_until(lambda: set(running.replica_pids(name)) - set(before), 20, "another one runs")


def test_a_signal_to_all_processes_of_a_service_leaves_the_end_to_the_replica(
    running, deployed, name
):
    deployed(PLAIN, health="/")
    keeper, engine = engines(name)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(keeper.pid, number)
    assert running.get(f"/{name}/")[0] == 200
    assert {each.pid for each in engines(name)} == {keeper.pid, engine.pid}


def test_it_ends_with_all_that_it_has_started_when_it_is_deleted(running, deployed, name):
    deployed(COMMAND)
    there = engines(name)
    assert len(there) == 3  # the keeper, gunicorn, and its worker
    with running.as_default():
        serve.delete(name)
    wait_until(lambda: not any(alive(each.pid) for each in there), 20, "all have ended")


def test_one_whose_requests_do_not_end_in_time_is_asked_to_end_all_the_same(
    running, deployed, name, tmp_path
):
    notes = tmp_path / "notes"
    deployed(python(NOTING), health="/", graceful_shutdown_timeout_s=0.5, env={"NOTES": str(notes)})
    with socket_to(running) as client:
        client.sendall(f"GET /{name}/hang HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_until(notes.exists, 10, "the request hangs")
        with running.as_default():
            serve.delete(name)
        wait_until(lambda: notes.read_text() == "SIGTERM", 20, "the engine is told")


@pytest.mark.slow
def test_one_that_answers_nothing_any_more_is_killed_and_replaced(running, deployed, name):
    deployed(PLAIN, health="/", health_check_period_s=0.2, health_check_timeout_s=1.0)
    before = running.replica_pids(name)
    _, engine = engines(name)
    os.kill(engine.pid, signal.SIGSTOP)
    wait_until(lambda: not alive(engine.pid), 30, "it is killed")
    wait_until(lambda: set(running.replica_pids(name)) - set(before), 20, "another one runs")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            python("import sys; print('loading weights.bin'); sys.exit(3)"),
            r"(?s)exit code 3.*loading weights\.bin|loading weights\.bin.*exit code 3",
        ),
        ("no-such-engine --port {port}", "No such file or directory: 'no-such-engine'"),
    ],
)
def test_one_that_cannot_start_says_why(deployed, command, message):
    with pytest.raises(DeployFailedError, match=message):
        deployed(command, max_constructor_retry_count=1)


def test_one_that_is_never_healthy_fails_in_time(deployed):
    reason = r"not healthy within ready_timeout_s=1: .* answers /health with status 404"
    with pytest.raises(RuntimeError, match=reason):
        deployed(PLAIN, ready_timeout_s=1, max_constructor_retry_count=1)


def test_one_that_is_sick_is_replaced(running, deployed, name, tmp_path):
    sick = tmp_path / "sick"
    deployed(COMMAND, health_check_period_s=0.2, env={"SICK": str(sick)})
    before = running.replica_pids(name)
    sick.touch()
    wait_until(lambda: not set(before) & set(running.replica_pids(name)), 20, "it is retired")
    sick.unlink()
    wait_until(lambda: running.replica_pids(name), 20, "another one runs")


def test_one_without_the_metrics_that_are_asked_for_serves_all_the_same(running, deployed, name):
    deployed(PLAIN, health="/", load_metrics=["jobs"], health_check_period_s=0.1)
    (log,) = running.settings.logs_dir.glob(f"replica-{name}*.log")
    message = "the engine's /metrics has status 404"
    wait_until(lambda: message in log.read_text(), 20, "it is told")
    assert running.get(f"/{name}/")[0] == 200
    assert log.read_text().count(message) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", {}),
        (b"jobs 3", {"jobs": 3.0}),
        (b"# TYPE jobs gauge\njobs 3 1700000000000\r\nother 5\n", {"jobs": 3.0}),
        (b'jobs{a="1"} 3\njobs{a="2"} 0.5\n', {"jobs": 3.5}),
        (b'jobs{a="} 9 {"} 3 1700000000000\n', {"jobs": 3.0}),
        (b"jobs NaN\nwaits +Inf\n", {}),
        (b'jobs\njobs{\njobs{a="1"}\njobs x\nwaits 1e2\n', {"waits": 100.0}),
        (b'\xffjobs 3\njobs_total 4\nwaits{a="\xff"} 1\n', {"waits": 1.0}),
    ],
)
def test_metrics_are_read_as_prometheus_writes_them(text, found):
    assert metrics_in(text, ("jobs", "waits")) == found


# --- How it is deployed ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_command_or_a_file_deploys_one(running, name, tmp_path):
    # Programs beside the replica's Python are found first.
    command = COMMAND.replace(f"{sys.executable} -m gunicorn", "gunicorn")
    made = running.greenroom(
        *("deploy", "--command", command, "--name", name, "--route-prefix", f"/{name}"),
        *("name=Fast", "max_ongoing_requests=7", "ready_timeout_s=30", "retryable=true"),
        f"env={{{MARK}: {name}}}",
    )
    assert made.returncode == 0, made.stderr
    (keeper, *_) = engines(name)
    assert keeper.environ()["PATH"].startswith(f"{Path(sys.executable).parent}:")
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


def test_an_argument_that_cannot_be_read_is_reported(running):
    made = running.greenroom("deploy", "--command", PLAIN, "actor_options={num_gpus: 1")
    message = "Error: actor_options='{num_gpus: 1': is no YAML: expected ',' or '}', but got"
    assert (made.returncode, made.stderr.count("\n")) == (1, 1)
    assert made.stderr.startswith(message)


def test_a_command_has_to_name_something(running):
    made = running.greenroom("deploy")
    assert (made.returncode, "or give --command" in made.stderr) == (2, True)


def test_variables_are_added_to_those_of_its_environment():
    surrounds = {"env_vars": {"A": "1", "B": "2"}, "pip": ["vllm"]}
    options = {"num_gpus": 1, "runtime_env": surrounds}
    made = Engine("e {port}", env={"B": "3"}, actor_options=options).actor_options
    assert made.num_gpus == 1
    assert made.runtime_env.env_vars == {"A": "1", "B": "3"}
    assert made.runtime_env.pip == ("vllm",)


@pytest.mark.parametrize(
    ("given", "message"),
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
        ({"command": "e {port}", "ready_timeout_s": float("nan")}, "ready_timeout_s"),
        ({"command": "e {port}", "num_replica": 2}, "num_replica"),
        ({"command": "e {port}", "metrics_path": "metrics"}, "expected a path, as /health"),
        ({"command": "e {port}", "load_metrics": ["a b"]}, "'a b' must be letters"),
        ({"command": "e {port}", "load_metrics": ["greenroom_x"]}, "must not begin with"),
        ({"command": "e {port}", "load_metrics": ["m"] * 11}, "load_metrics"),
        ({"command": "e {port}", "env": "A=b"}, "env_vars='A=b'"),
        ({"command": "e {port}", "env": {"A": 1}}, "env_vars.A=1"),
        (
            {
                "command": "e {port}",
                "actor_options": {"num_gpus": 1},
                "env": {"CUDA_VISIBLE_DEVICES": "0"},
            },
            "CUDA_VISIBLE_DEVICES: is set by num_gpus",
        ),
    ],
)
def test_what_is_wrong_with_one_is_reported(given, message):
    with pytest.raises(InvalidRequestError) as refused:
        Engine(**given)
    assert message in str(refused.value)
