"""How long a port waits for an actor system that is there and does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from greenroom.actors.runtime import port as module
from greenroom.actors.runtime.port import ThreadPort
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.transport.addresses import admin_of_port
from greenroom.actors.transport.sockets import local_listener
from greenroom.core.errors import NotRunningError
from tests.support.systems import free_port

SOON_S = 0.2


@contextlib.contextmanager
def opened(admin_port: int) -> Iterator[ThreadPort]:
    port = ThreadPort(admin_port, this_process())
    port.open(SOON_S)
    yield port
    port.close()


def test_where_nobody_is_there_that_is_known_soon():
    admin_port = free_port()
    begun_at = time.monotonic()
    with (
        pytest.raises(NotRunningError, match=f"no actor system answers on port {admin_port}"),
        opened(admin_port),
    ):
        pass
    assert time.monotonic() - begun_at < module.BUSY_S / 2


def test_one_that_is_there_and_says_nothing_is_waited_for_and_said_to_be_there(monkeypatch):
    monkeypatch.setattr(module, "BUSY_S", 1.0)
    admin_port = free_port()
    message = rf"port {admin_port} of this host has not answered for 1(\.\d+)? s: it is busy"
    with (
        local_listener(admin_of_port(admin_port).socket_name),
        pytest.raises(NotRunningError, match=message),
        opened(admin_port),
    ):
        pass


def test_one_that_is_busy_is_taken_as_soon_as_it_answers(running, monkeypatch):
    admin = running.pid_of("thespian admin")
    is_answered = ThreadPort.is_answered
    answers: list[bool | None] = []

    def asked(port: ThreadPort, timeout_s: float) -> bool | None:
        answers.append(is_answered(port, timeout_s))
        os.kill(admin, signal.SIGCONT)
        return answers[-1]

    monkeypatch.setattr(ThreadPort, "is_answered", asked)
    os.kill(admin, signal.SIGSTOP)
    try:
        with opened(running.settings.admin_port):
            assert answers[0] is None
            assert answers[-1] is True
    finally:
        os.kill(admin, signal.SIGCONT)
