"""A script's connection, and when it takes the system for gone; its port is a fake."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

from greenroom.actors.caller import connection as connection_module
from greenroom.actors.caller.connection import Connection
from greenroom.actors.messages.admin import Request, RequestReply, request_of
from greenroom.actors.runtime import port as port_module
from greenroom.actors.runtime.processes import this_process
from greenroom.core.errors import NotRunningError
from greenroom.core.operations import ListBackends
from tests.support.lone_loop import LoneMachine, LoneTransport

GONE_S = 0.4


class Port(port_module.Port):
    """A port to a system that answers, or not, as the test says."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(1, this_process(), loop, machine=LoneMachine(LoneTransport(loop)))
        self.running = threading.Thread(target=loop.run_forever, daemon=True)
        self.is_there = True
        self.probes = 0
        self.asked: list[Request] = []

    def close(self) -> None:
        """End the loop, as a port that is on a thread of its own."""
        loop = self.loop.asyncio
        loop.call_soon_threadsafe(loop.stop)
        self.running.join(10)
        loop.close()

    async def answers(self, _timeout_s: float = 0.0) -> bool:
        self.probes += 1
        return self.is_there

    def reply(self, reply: RequestReply) -> None:
        arrived = partial(self.loop.machine.arrived, reply, None)  # type: ignore[attr-defined]
        self.loop.asyncio.call_soon_threadsafe(arrived)

    def reply_to_next(self) -> None:
        self.reply(RequestReply(request_id=self.asked.pop(0).request_id, value={}))


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(connection_module, "GONE_S", GONE_S)
    monkeypatch.setattr(port_module, "CHECK_EVERY_S", 0.01)
    loop = asyncio.new_event_loop()
    port = Port(loop)

    def noted(*of: Any) -> Request:
        port.asked.append(request_of(*of))
        return port.asked[-1]

    monkeypatch.setattr(connection_module, "request_of", noted)
    port.running.start()
    yield port
    if not loop.is_closed():
        port.close()


def seconds_until_gone(connection: Connection) -> float:
    began_at = time.monotonic()
    with pytest.raises(NotRunningError, match="is gone"):
        connection.request(ListBackends())
    return time.monotonic() - began_at


def test_a_system_that_does_not_answer_is_gone_after_a_while(port):
    port.is_there = False
    assert seconds_until_gone(Connection(port)) >= GONE_S


def test_what_an_earlier_request_has_seen_does_not_count(port):
    connection = Connection(port)
    port.is_there = False
    request = threading.Thread(target=connection.request, args=(ListBackends(),), daemon=True)
    request.start()
    while not port.probes:
        time.sleep(0.001)
    assert port.asked[0].user == connection_module.user_name()
    port.reply_to_next()  # it was only restarted
    request.join(10)
    time.sleep(GONE_S)  # long ago, by now
    assert seconds_until_gone(connection) >= GONE_S


@pytest.mark.parametrize("leaves", [True, False])
def test_a_repeat_of_a_request_that_is_under_way_gets_its_answer(port, leaves):
    loop = port.loop.asyncio
    requests = port_module.Controller(port, port.answers, 10, "gone")
    request = request_of(ListBackends(), "id", "user")
    asking_twice = [requests.ask(request, 10) for _ in range(2)]
    first, repeat = (asyncio.run_coroutine_threadsafe(each, loop) for each in asking_twice)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(10)  # both have begun
    if leaves:
        first.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(10)
    reply = RequestReply(request_id="id", value={})
    port.reply(reply)
    assert repeat.result(20) == reply
    assert leaves or first.result(20) == reply


def test_a_connection_that_was_made_before_a_fork_says_so(port, monkeypatch):
    connection = Connection(port)
    monkeypatch.setattr(connection_module.os, "getpid", lambda: 0)
    with pytest.raises(NotRunningError, match="made before a fork"):
        connection.request(ListBackends())


def test_a_request_that_begins_while_its_connection_is_closed_says_so(port, monkeypatch):
    connection = Connection(port)

    def late(*of: Any) -> Request:
        connection.close()  # by another thread, while this one is held up
        return request_of(*of)

    monkeypatch.setattr(connection_module, "request_of", late)
    with pytest.raises(NotRunningError, match="was closed"):
        connection.request(ListBackends())


def test_a_connection_is_closed_without_touching_what_its_loop_may_be_at_work_with(
    port, monkeypatch
):
    by: list[threading.Thread] = []
    monkeypatch.setattr(
        port_module.Finder, "stop", lambda _self: by.append(threading.current_thread())
    )
    Connection(port).close()
    assert by == [port.running] * 2
