"""The stock base, kept to compare ours with it: that it still carries a system."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from thespian.actors import WatchMessage

from greenroom import serve
from greenroom.actors import bases
from greenroom.actors.settings import STOCK
from greenroom.actors.stock.guest import Guest
from tests.support.systems import RunningSystem, alive, running_system, wait_until

DEADLINE_S = 30.0


@pytest.fixture
def running(tmp_path: Path):
    with running_system(tmp_path / "state", GREENROOM_TRANSPORT=STOCK) as system:
        yield system


def test_a_system_on_the_stock_base_serves_heals_and_stops(running: RunningSystem) -> None:
    @serve.deployment(num_replicas=2)
    class Late:
        async def __call__(self, request) -> str:
            await asyncio.sleep(float(request.query_params.get("s", 0)))
            return "late"

        def double(self, number: int) -> int:
            return 2 * number

    running.deploy(Late.bind())
    assert running.get("/") == (200, b"late")
    assert running.get("/?s=0.05") == (200, b"late")
    assert running.get("/-/routes") == (200, b'{"/": "default#Late"}')
    with running.as_default():
        handle = serve.get_app_handle("default")
        assert handle.double.remote(21).result(DEADLINE_S) == 42
    for role in ("replica", "proxy", "controller"):
        pid = next(pid for each, pid in running.pids() if each == role)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda gone=pid: not alive(gone), DEADLINE_S, f"the end of the {role}")
        wait_until(lambda: running.get("/") == (200, b"late"), DEADLINE_S, f"after the {role}")
    wait_until(lambda: len(running.replica_pids()) == 2, DEADLINE_S, "both replicas")


class Manager:
    """In the place of Thespian's."""

    def __init__(self) -> None:
        self.wakeups: list[float] = []

    def wakeupAfter(self, period):
        self.wakeups.append(period.total_seconds())


@pytest.fixture
def guest():
    handled = []

    def receive(message, _sender):
        handled.append(message)
        if callable(message):
            message()

    guest = Guest(Manager(), receive)
    guest.handled = handled
    yield guest
    guest.loop.close()


def test_a_guest_runs_until_it_would_wait_and_asks_to_be_woken_for_its_next_timer(guest):
    ran = []

    def message():
        guest.loop.call_soon(ran.append, "soon")
        guest.loop.call_later(5, ran.append, "later")

    watch = guest.receive(message, "sender")
    assert ran == ["soon"]
    assert len(watch.filenos) == 1
    (wakeup,) = guest._manager.wakeups
    assert 4 < wakeup <= 5


def test_a_guest_waits_out_what_is_due_at_once(guest):
    ran = []
    guest.receive(lambda: guest.loop.call_later(0.0005, ran.append, "due"), "sender")
    assert ran == ["due"]


def test_a_guest_enters_its_loop_for_what_is_called_between_two_messages(guest):
    ran = []
    guest.receive("first", "sender")
    guest.enter(lambda: guest.loop.call_soon(ran.append, "entered"))
    assert guest.handled == ["first"]
    assert ran == ["entered"]


def test_a_post_from_another_thread_makes_the_watched_descriptor_readable(guest):
    ran = []
    watch = guest.receive("first", "sender")
    post = threading.Thread(target=guest.loop.call_soon_threadsafe, args=(ran.append, "posted"))
    post.start()
    post.join()
    guest.receive(WatchMessage(watch.filenos), "sender")
    assert ran == ["posted"]
    assert guest.handled == ["first"]


def test_a_stock_transport_outside_leaves_no_thread_and_no_descriptor(running):
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    loop = asyncio.new_event_loop()
    for _ in range(3):
        transport = bases.get(STOCK).attach(running.settings.admin_port, loop, lambda _: None)
        transport.close()
        transport.close()
    loop.close()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= before
