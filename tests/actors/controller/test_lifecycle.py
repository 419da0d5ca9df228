"""Start, stop, start again, shut down: whole systems with real processes."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import StartError
from greenroom.core.formats import FORMAT, OLDEST
from greenroom.persistence.filesystem import FileLocation
from greenroom.serve.exceptions import UnknownNameError
from tests.actors.conftest import deploy
from tests.support import footprint
from tests.support.systems import RunningSystem, alive, patched_environ, running_system, wait_until

MINE = """
from greenroom import serve

@serve.deployment
class Mine:
    def __call__(self, request):
        return "mine"

app = Mine.bind()
"""


@serve.deployment(num_replicas=2)
class Counting:
    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self) -> int:
        return self.start


def test_a_second_start_changes_nothing_and_says_which_settings_it_would_have(own_system):
    deploy(own_system, Counting.bind(7))
    before = sorted(own_system.pids())
    with patched_environ(own_system.environ):
        assert not system.start(own_system.settings)
    assert own_system.greenroom("start").returncode == 0
    assert sorted(own_system.pids()) == before
    assert own_system.get() == (200, b"7")
    http = own_system.settings.http
    other = own_system.greenroom("start", "--http-port", "9", "--http-workers", "7")
    assert other.returncode == 1
    assert f"http_port is {http.port}, not 9; http_workers is {http.workers}, not 7" in other.stderr


@pytest.mark.slow
def test_of_concurrent_starts_one_starts_and_all_return_when_it_answers(tmp_path):
    running = RunningSystem(tmp_path / "state")
    started, statuses, errors = [], [], []

    def start() -> None:
        try:
            started.append(system.start(running.settings))
            statuses.append(running.get("/-/healthz")[0])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    try:
        with patched_environ(running.environ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert not errors
        assert sorted(started) == [False, False, False, True]
        assert statuses == [200] * 4
        assert len([role for role, _ in running.pids() if role == "host"]) == 1
    finally:
        running.stop()


def test_stop_then_start_brings_back_everything_from_disk_also_on_other_ports(tmp_path):
    with running_system(tmp_path / "state") as first:
        deploy(first, Counting.bind(1), "one", "/one")
        deploy(first, Counting.options(num_replicas=1).bind(2), "two", "/two")
        client = serve.Client(first.connection, first.settings)
        client.wait_for_goal(client.create_backend("three", lambda _: "3"))
        client.create_endpoint("three", backend="three", route="/three", methods=["POST"])
        before = first.status()
    with running_system(tmp_path / "state") as second:
        assert second.url != first.url
        paths = [("/one", {}), ("/two", {}), ("/three", {"data": b"", "method": "POST"})]
        answers = [second.get(path, **request)[1] for path, request in paths]
        assert answers == [b"1", b"2", b"3"]

        def whole() -> dict[str, Any] | None:
            status = second.status()
            states = [status["applications"][name]["status"] for name in ("one", "two")]
            return status if states == ["RUNNING"] * 2 else None

        after = wait_until(whole, 10, "both applications run again")
        pids = [pid for _, pid in second.pids()]
    assert after["endpoints"] == before["endpoints"]
    assert after["backends"].keys() == before["backends"].keys()
    for tag, backend in before["backends"].items():
        assert after["backends"][tag]["config"] == backend["config"]
        assert len(after["backends"][tag]["replicas"]) == len(backend["replicas"])
    assert len(pids) == len(set(pids))


def test_nothing_is_left_after_stop(tmp_path):
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    temporary.mkdir()
    with running_system(state, TMPDIR=str(temporary)) as running:
        deploy(running, Counting.bind(1))
        assert running.get()[0] == 200
        marked = set(footprint.pids_of(running))
        assert {pid for _, pid in running.pids()} <= marked
    left = [pid for pid in marked if alive(pid)]
    assert not left
    assert list(temporary.iterdir()) == []
    assert [path.name for path in (state / "run").iterdir()] in ([], ["host.lock"])
    assert not list(state.rglob("*.tmp"))


def test_shutdown_forgets_the_state(tmp_path):
    running = RunningSystem(tmp_path / "state")
    running.start()
    try:
        deploy(running, Counting.bind(1))
        running.stop(forget=True)
        assert not running.settings.store_dir.exists()
        running.start()
        status = running.status()
        assert (status["applications"], status["backends"], status["endpoints"]) == ({}, {}, {})
        assert running.get()[0] == 404
    finally:
        running.stop()


def test_status_shows_host_application_deployment_and_replicas_with_pids(own_system):
    deploy(own_system, Counting.bind(7), "counting", "/counting")
    wait_until(
        lambda: [h for h in own_system.status()["hosts"] if h["front"]["workers"]],
        5,
        "the host reports itself, with its front",
    )
    status = own_system.status_json()
    (host,) = status["hosts"]
    name = socket.gethostname()
    assert host["name"] == status["controller"]["host"] == name
    assert host["state"] == "RUNNING"
    assert host["address"] == f"127.0.0.1:{own_system.settings.admin_port}"
    assert host["front"]["url"] == own_system.url
    shown = {
        "thespian admin": host["admin_pid"],
        "host": host["host_pid"],
        "proxy": host["proxy"]["pid"],
        "http master": host["front"]["pid"],
        "controller": status["controller"]["pid"],
    }
    assert shown == {role: own_system.pid_of(role) for role in shown}
    assert host["front"]["workers"] == [own_system.pid_of("http worker")]
    application = status["applications"]["counting"]
    assert application["status"] == "RUNNING"
    assert application["route_prefix"] == "/counting"
    deployment = application["deployments"]["Counting"]
    assert (deployment["status"], deployment["target_replicas"]) == ("HEALTHY", 2)
    replicas = deployment["replicas"]
    recorded = sorted(pid for role, pid in own_system.pids() if role == "replica")
    assert sorted(replica["pid"] for replica in replicas) == recorded
    assert {replica["state"] for replica in replicas} == {"RUNNING"}
    assert {replica["host"] for replica in replicas} == {name}


def test_a_folder_with_only_the_users_file_is_served_within_seconds(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    running = RunningSystem(tmp_path / "state")
    begun = time.monotonic()
    with (tmp_path / "output").open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "greenroom.serve.cli.main", "run", "mine:app"],
            cwd=folder,
            env={**os.environ, **running.environ},
            stdout=output,
            stderr=output,
        )

    def answers() -> bool:
        try:
            return running.get() == (200, b"mine")
        except OSError:
            return False

    try:
        wait_until(answers, 10, "the first 200")
        took_s = time.monotonic() - begun
        print(f"greenroom run to the first 200: {took_s:.2f} s")
        assert took_s < 10  # 1.5 s is asked of an idle machine; tests share theirs
        recorded = RunRecords(running.settings.run_dir).alive()
        wait_until(lambda: b"Ctrl-C ends it" in (tmp_path / "output").read_bytes(), 10, "its word")
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 0
    finally:
        command.kill()
        command.wait()
        system.stop(running.settings)
    assert not [process for process in recorded if alive(process.pid)]
    assert sorted(path.name for path in folder.iterdir()) in (
        ["mine.py"],
        ["__pycache__", "mine.py"],
    )


@pytest.mark.parametrize("schema", [OLDEST - 1, FORMAT + 2])
def test_the_state_of_another_version_is_refused_at_once_naming_both(tmp_path, schema):
    settings = HostSettings(state_dir=tmp_path / "state")
    store = FileLocation(settings.store_dir, "controller").open()
    store.apply({"goal/1": schema.to_bytes(4, "big") + b"a record", "code/x": b"code"})
    store.close()
    reads = f"this release reads formats {OLDEST} to {FORMAT + 1}"
    message = rf"{settings.state_dir}\S* .* format {schema}; {reads}"
    with pytest.raises(StartError, match=message):
        system.start(settings)
    wait_until(lambda: not system.is_running(settings), 10, "the end of what has refused")


@pytest.mark.slow
def test_a_drained_host_takes_no_replicas_over_a_restart_until_it_is_undrained(own_system):
    host = own_system.settings.host_name
    refused = own_system.greenroom("drain", host)
    assert refused.returncode == 1
    assert f"host {host!r} is the last that takes replicas" in refused.stderr
    assert own_system.greenroom("drain", host, "--force").returncode == 0
    assert own_system.greenroom("stop").returncode == 0
    assert own_system.greenroom("start").returncode == 0
    with serve.Client.connect(f"127.0.0.1:{own_system.settings.admin_port}") as client:
        with pytest.raises(UnknownNameError, match="no host is named 'nowhere'"):
            client.drain_host("nowhere")
        goal = client.create_backend("late", lambda _: "late")
        with pytest.raises(TimeoutError, match=f"it is drained, until `greenroom undrain {host}`"):
            client.wait_for_goal(goal, 0.5)
        client.undrain_host(host)
        client.wait_for_goal(goal, 20)


@pytest.mark.slow
def test_a_stop_resets_no_connection_that_was_made(tmp_path):
    """Whose POST was reset cannot know whether it ran; who is refused, or answered, can."""
    outcomes: list[list[str]] = [[] for _ in range(8)]

    def post(address: tuple[str, int], ends: list[str]) -> None:
        while "refused" not in ends:
            with contextlib.closing(http.client.HTTPConnection(*address, timeout=30)) as client:
                try:
                    client.connect()
                except ConnectionRefusedError:
                    ends.append("refused")
                    return
                try:
                    client.request("POST", "/", body=b"x" * 1000)
                    ends.append(str(client.getresponse().status))
                except OSError as error:
                    ends.append(type(error).__name__)

    with running_system(tmp_path / "state") as running:
        deploy(running, Counting.bind(1))
        address = ("127.0.0.1", running.settings.http.port)
        clients = [threading.Thread(target=post, args=(address, ends)) for ends in outcomes]
        for client in clients:
            client.start()
        wait_until(lambda: all(len(ends) > 10 for ends in outcomes), 10, "all are posting")
    for client in clients:
        client.join(30)
    assert {end for ends in outcomes for end in ends} <= {"200", "503", "refused"}
    assert all(ends[-1] == "refused" for ends in outcomes)
