"""What is left of a connection, here and at the proxy, once it is closed."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from greenroom import serve
from greenroom.actors.caller.connection import Connection
from greenroom.serve.exceptions import GreenroomError, NotRunningError, ReplicaUnavailableError
from greenroom.serve.handle import DeploymentHandle
from tests.actors.conftest import deploy
from tests.support.systems import RunningSystem, wait_until

DEADLINE_S = 30.0


@pytest.fixture
def handle_of(running, name):
    """Make handles of a connection; the deployment answers after ``seconds``."""

    @serve.deployment
    class Late:
        async def __call__(self, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return "late"

    deploy(running, Late.bind(), name, route=None)
    return lambda connection: DeploymentHandle("Late", name, client=connection.queries)


def open_fds(running: RunningSystem) -> int:
    return len(os.listdir(f"/proc/{running.pid_of('proxy')}/fd"))


def test_the_proxy_forgets_callers_that_close_while_their_process_lives_on(running, handle_of):
    before = open_fds(running)
    for _ in range(20):
        connection = Connection.open(running.settings)
        assert handle_of(connection).remote(0).result(DEADLINE_S) == "late"
        connection.close()
    wait_until(lambda: open_fds(running) <= before + 5, DEADLINE_S, "descriptors closed")


def test_a_call_that_is_waited_for_fails_when_its_connection_is_closed(running, handle_of):
    connection = Connection.open(running.settings)
    response = handle_of(connection).remote(600)
    threading.Timer(0.2, connection.close).start()
    with pytest.raises(ReplicaUnavailableError, match="closed"):
        response.result(DEADLINE_S)


def test_a_handle_of_a_closed_connection_says_so(running, handle_of):
    connection = Connection.open(running.settings)
    handle = handle_of(connection)
    connection.close()
    connection.close()
    with pytest.raises(GreenroomError, match="closed"):
        handle.remote(0)


def test_a_closed_client_says_so_at_once(running):
    client = serve.Client.connect(f"127.0.0.1:{running.settings.admin_port}")
    client.close()
    client.close()
    for use in (client.list_backends, client.status, lambda: client.get_handle("a")):
        began_at = time.monotonic()
        with pytest.raises(NotRunningError, match=r"connection .* was closed; open another"):
            use()
        assert time.monotonic() - began_at < 1


def test_a_handle_in_a_forked_process_says_so(running, handle_of):
    handle = handle_of(running.connection)
    assert handle.remote(0).result(DEADLINE_S) == "late"
    pid = os.fork()
    if pid == 0:
        try:
            handle.remote(0)
        except GreenroomError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
