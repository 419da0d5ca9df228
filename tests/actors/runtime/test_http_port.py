"""The HTTP port's listening socket outlives whoever bound it: workers lend it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime import http_port
from greenroom.actors.runtime.http_port import (
    LEAVE_S,
    UNAVAILABLE,
    bind_http,
    borrow,
    lend,
    turn_away,
)
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.settings import HostSettings, read_settings
from tests.support.systems import free_port, wait_until

LENDER = b"\0greenroom-http-%d"
WORKER = """
import asyncio, socket, sys
from greenroom.actors.runtime.http_port import lend
loop = asyncio.new_event_loop()
lend(socket.socket(fileno=int(sys.argv[1])), loop)
print("lends", flush=True)
loop.run_until_complete(loop.run_in_executor(None, sys.stdin.read))
"""


def settings_for(port: int) -> HostSettings:
    return read_settings({"GREENROOM_HTTP_PORT": str(port), "GREENROOM_STATE_DIR": "/nowhere"})


@pytest.fixture
def lent():
    """A listening socket at a port of its own."""
    listener = bind_http(settings_for(free_port()))
    yield listener
    listener.close()


def lending(program: str, lent: socket.socket) -> subprocess.Popen[bytes]:
    """Run a program that has the listening socket."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", program, str(lent.fileno())]
    return subprocess.Popen(command, pass_fds=[lent.fileno()], **pipes)


def test_connections_that_wait_survive_the_one_who_bound_the_port(lent):
    port = lent.getsockname()[1]
    with lending(WORKER, lent) as child:
        assert child.stdout.readline() == b"lends\n"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"hello")
            lent.close()
            worker, gone = Process(child.pid, 0, ""), Process(2**22 + 1, 0, "")
            assert borrow([worker], settings_for(free_port())) is None, "it listens elsewhere"
            again = borrow([gone, worker], settings_for(port))
            assert again is not None
            child.stdin.close()
            child.wait(10)
            with again:
                taken, _ = again.accept()
                with taken:
                    assert taken.recv(100) == b"hello"


def test_a_name_that_another_process_has_is_not_trusted():
    """Whoever listens at a worker's name is that worker, by the kernel's word, or is skipped."""
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(LENDER % (2**22 + 2))
        squatter.listen()
        squatter.settimeout(0)
        assert borrow([Process(2**22 + 2, 0, "")], settings_for(free_port())) is None


def test_a_worker_whose_name_is_taken_serves_all_the_same(lent, caplog):
    with socket.socket(socket.AF_UNIX) as squatter, closing(asyncio.new_event_loop()) as loop:
        squatter.bind(LENDER % os.getpid())
        lend(lent, loop)
    assert "could not be lent" in caplog.text
    assert borrow([this_process()], settings_for(lent.getsockname()[1])) is None


WITHOUT_DESCRIPTORS = """
import asyncio, concurrent.futures.thread, logging, resource, socket, sys
from greenroom.actors.runtime.http_port import lend
logging.basicConfig(format="%(message)s")
loop = asyncio.new_event_loop()
lend(socket.socket(fileno=int(sys.argv[1])), loop)
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
print("lacks", flush=True)
loop.run_until_complete(loop.run_in_executor(None, sys.stdin.readline))
resource.setrlimit(resource.RLIMIT_NOFILE, before)
loop.run_until_complete(loop.run_in_executor(None, sys.stdin.read))
"""


@pytest.mark.slow
def test_a_worker_out_of_descriptors_says_so_and_lends_once_it_has_some(lent):
    port = lent.getsockname()[1]
    with lending(WITHOUT_DESCRIPTORS, lent) as child:
        assert child.stdout.readline() == b"lacks\n"
        worker = Process(child.pid, 0, "")
        first = borrow([worker], settings_for(port))  # it waited already, with a descriptor
        if first is not None:
            first.close()
        for _ in range(2):
            assert borrow([worker], settings_for(port)) is None
        child.stdin.write(b"\n")
        child.stdin.flush()
        again = wait_until(lambda: borrow([worker], settings_for(port)), 5, "it lends again")
        again.close()
        child.stdin.close()
        assert b"cannot accept a connection: [Errno 24]" in child.stderr.read()


@pytest.fixture
def listener():
    listening = socket.create_server(("127.0.0.1", 0))
    yield listening
    listening.close()


def waiting_at(listener: socket.socket, sent: bytes) -> socket.socket:
    """Return a client in the socket's queue, which has sent this."""
    client = socket.create_connection(listener.getsockname(), timeout=20)
    client.sendall(sent)
    return client


def all_of(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def test_who_waits_when_the_port_is_closed_hears_so_and_is_not_reset(listener, monkeypatch):
    monkeypatch.setattr(http_port, "LEAVE_S", 60.0)
    address = listener.getsockname()
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000)
    clients = [waiting_at(listener, sent) for sent in (post, b"", post)]
    clients[1].close()
    began = time.monotonic()
    turning = threading.Thread(target=turn_away, args=(listener,), kwargs={"is_tls": False})
    turning.start()
    assert [all_of(client) for client in (clients[0], clients[2])] == [UNAVAILABLE] * 2
    for client in clients:
        client.close()
    turning.join()
    assert time.monotonic() - began < http_port.LEAVE_S / 2, "nobody is waited for in vain"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=20)


def test_who_stays_is_not_waited_for_for_long_and_over_tls_nothing_is_said(listener):
    client = waiting_at(listener, b"\x16\x03\x01")
    began = time.monotonic()
    turn_away(listener, is_tls=True)
    assert LEAVE_S <= time.monotonic() - began < LEAVE_S + 5
    with client:
        assert all_of(client) == b""


def test_a_port_that_another_process_has_too_is_closed_for_all(listener):
    with socket.socket(fileno=os.dup(listener.fileno())) as kept:
        address = kept.getsockname()
        turn_away(listener, is_tls=False)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=20)
