"""What is wrong is told clearly, and the system serves on."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.cluster.members import REPLICA
from greenroom.actors.host import launcher as system
from greenroom.actors.runtime import processes as open_files
from greenroom.actors.runtime.port import CONTROLLER, PROXY
from greenroom.actors.runtime.records import RunRecords
from greenroom.serve.exceptions import StartError
from tests.support import template
from tests.support.another_user import NOBODY, another_user
from tests.support.metrics import ongoing
from tests.support.systems import RunningSystem, wait_until


@serve.deployment(max_ongoing_requests=2)
class Victim:
    async def __call__(self, request: Any) -> Any:
        if request.query_params.get("nap"):
            await asyncio.sleep(60)
        return "serves"


@pytest.fixture
def victim(running, deployed, name):
    """A system with a deployment that serves on after the test, in the same processes."""
    deployed(Victim.bind())
    (replica,) = running.replica_pids(name)
    before = {(role, pid) for role, pid in running.pids() if role != "replica" or pid == replica}
    yield running
    assert running.get(f"/{name}") == (200, b"serves")
    assert running.status()["applications"][name]["status"] == "RUNNING"
    assert before <= {*running.pids()}


NONSENSE = ["a string", 42, None, 1.5, [1], {"a": 1}, ValueError("no"), b"bytes", ("a", 1), object]


def test_messages_of_no_known_kind_are_ignored(victim, hand, name):
    ((replica,),) = [
        each["replicas"] for tag, each in victim.status()["backends"].items() if name in tag
    ]
    for actor in (CONTROLLER, PROXY, (REPLICA, f"replica {replica['tag']}")):
        address = hand.locate(*actor)
        process, _ = hand.identify(address)
        for message in NONSENSE:
            hand.send(address, message)
        assert hand.identify(address)[0] == process


def test_clients_that_leave_at_once_leave_nothing_behind(victim, name):
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", victim.settings.http.port)) as client:
            client.sendall(f"GET /{name}?nap=1 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    wait_until(lambda: ongoing(victim, name, anew=True) == 0, 5, "no request is left")


# --- Starts that cannot succeed -----------------------------------------------------------------


def failed_start(running: RunningSystem) -> str:
    """Try to start; return the reason, and check that nothing was left running."""
    with pytest.raises(StartError) as caught:
        running.start()
    records = RunRecords(running.settings.run_dir)
    assert records.alive() == {}
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_http_port_in_use_names_the_process_that_has_it(running, tmp_path):
    port = running.settings.http.port
    text = failed_start(RunningSystem(tmp_path / "state", GREENROOM_HTTP_PORT=str(port)))
    assert f"HTTP port {port}" in text
    assert any(f"in use by pid {pid} (" in text for _, pid in running.pids())
    assert "--http-port" in text


def test_an_admin_port_in_use_names_the_process_that_has_it(running, tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = failed_start(RunningSystem(tmp_path / "state", GREENROOM_ADMIN_PORT=str(port)))
    assert f"admin port {port} is in use by pid {os.getpid()} " in text
    assert "--admin-port" in text
    port = running.settings.admin_port
    text = failed_start(RunningSystem(tmp_path / "other", GREENROOM_ADMIN_PORT=str(port)))
    assert re.search(rf"admin port {port} is in use by pid \d+ .*Admin", text)


def test_a_state_dir_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "state", Path("/proc/greenroom")):  # not even root may
        text = failed_start(RunningSystem(folder))
        assert str(folder) in text
        assert "--state-dir" in text


def test_a_state_dir_without_permission_to_write_is_refused(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(stat.S_IRUSR | stat.S_IXUSR)
    running = RunningSystem(state)
    try:
        text = as_nobody(lambda: system.start(running.settings))
    finally:
        state.chmod(stat.S_IRWXU)
    assert text.startswith("StartError: ")
    assert str(state) in text
    assert "--state-dir" in text


SQUAT = """
squatters = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]
for squatter, name in zip(squatters, sys.argv[1:]):
    squatter.bind(chr(0) + name)
    squatter.listen()
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_a_system_is_found_beside_names_of_another_user_which_are_no_system(tmp_path):
    running = RunningSystem(tmp_path / "state")
    port = running.settings.admin_port
    own, others = (f"greenroom-{os.geteuid()}/{host}:{port}" for host in ("127.0.0.1", "10.0.0.1"))
    with another_user(SQUAT, others):
        running.start()
        try:
            assert running.greenroom("status").returncode == 0
        finally:
            running.stop()
    with another_user(SQUAT, own, others):
        output = running.greenroom("status")
        assert output.returncode == 1
        assert f"is of user {NOBODY}, and answers only that user" in output.stderr


def start_with_open_files(
    running: RunningSystem, soft: int, hard: int, inherited: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``greenroom start`` where so many files may be open, with some open already."""
    return template.afresh(
        "start",
        environ=running.environ,
        pass_fds=inherited,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


def test_too_few_open_files_are_an_error_that_says_how_many_and_what_is_needed(tmp_path):
    running = RunningSystem(tmp_path / "state")
    done = start_with_open_files(running, 100, 128)
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "may have 128 files open at once" in said
    assert f"needs {open_files.LEAST}" in said


def test_the_limit_of_open_files_is_raised_where_it_may_be(tmp_path):
    running = RunningSystem(tmp_path / "state")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    inherited = os.dup2(2, 200)  # of who calls, beyond the limit that the command begins with
    try:
        done = start_with_open_files(running, 128, hard, (inherited,))
        assert done.returncode == 0, done.stderr
        limits = {
            role: resource.prlimit(pid, resource.RLIMIT_NOFILE) for role, pid in running.pids()
        }
    finally:
        os.close(inherited)
        running.stop()
    expected = min(hard, open_files.MOST)
    assert set(limits) >= {"host", "http worker", "controller", "proxy"}
    assert set(limits.values()) == {(expected, hard)}


def as_nobody(action: Callable[[], Any]) -> str:
    """Run in a child without root's rights; return its exception."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresuid(65534, 65534, 65534)
            action()
            text = "no exception"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_fd, text.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        text = reader.read()
    os.waitpid(pid, 0)
    return text
