"""The loop that ties our actors to Thespian's, without Thespian."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.support.systems import wait_until
from understudy.actors import loop as loops
from understudy.actors.loop import Loop, Outbox
from understudy.actors.processes import identify

DEADLINE_S = 10.0


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


def turn(loop: Loop, timeout_s: float = 0.0) -> bool:
    """Wait for work and do it, as Thespian's loop has it done; False when there was none."""
    ready = bool(select.select([loop.fileno()], [], [], timeout_s)[0])
    if ready:
        loop.run_ready()
    loop.finish_turn()
    return ready


def test_posts_from_many_threads_all_run_and_none_waits_for_the_next(loop):
    posts, threads = 20_000, 4
    ran = []
    everything = threads * posts

    def post_all():
        for number in range(posts):
            loop.post(lambda: ran.append(None))
            if number % 100 == 0:
                time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    posting = [threading.Thread(target=post_all) for _ in range(threads)]
    try:
        for thread in posting:
            thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while len(ran) < everything and time.monotonic() < deadline:
            if not turn(loop, 0.5) and not any(thread.is_alive() for thread in posting):
                break
    finally:
        sys.setswitchinterval(interval)
    assert len(ran) == everything


def test_a_post_just_before_the_wake_up_is_read_does_not_swallow_later_ones(loop, monkeypatch):
    ran = []
    read = os.eventfd_read

    def read_late(fd):
        # What another thread can do at this point.
        loop.post(lambda: ran.append("between"))
        return read(fd)

    monkeypatch.setattr(loops.os, "eventfd_read", read_late)
    loop.post(lambda: ran.append("first"))
    assert turn(loop)
    monkeypatch.setattr(loops.os, "eventfd_read", read)
    turn(loop)
    loop.post(lambda: ran.append("later"))
    assert turn(loop, 1.0), "the later post woke nobody"
    assert ran == ["first", "between", "later"]


def test_a_callback_that_raises_does_not_stop_the_others(loop, caplog):
    ran = []
    loop.post(lambda: 1 / 0)
    loop.post(lambda: ran.append("posted"))
    loop.call_later(0, lambda: 1 / 0)
    loop.call_later(0, lambda: ran.append("due"))
    loop.at_turn_end(lambda: 1 / 0)
    loop.at_turn_end(lambda: ran.append("turn end"))
    turn(loop)
    assert sorted(ran) == ["due", "posted", "turn end"]


def test_timers_run_in_the_order_of_their_times_and_cancelled_ones_never(loop):
    ran = []
    loop.call_later(0.02, lambda: ran.append("second"))
    loop.call_later(0.01, lambda: ran.append("first"))
    loop.call_later(0.015, lambda: ran.append("cancelled")).cancel()

    def both():
        turn(loop)
        return len(ran) == 2

    wait_until(both, 5, "both timers")
    assert ran == ["first", "second"]
    assert loop.next_timer_at() is None


def test_the_end_of_a_watched_process_is_noticed_once(loop):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identify(child.pid)
    ended = []
    loop.watch_process(process, lambda: ended.append("watched"))
    cancel = loop.watch_process(process, lambda: ended.append("cancelled"))
    cancel()
    assert not turn(loop)
    child.communicate(b"\n")
    assert turn(loop, DEADLINE_S)
    turn(loop)
    assert ended == ["watched"]


def test_a_process_that_has_ended_before_it_is_watched_is_noticed_too(loop):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identify(child.pid)
    child.communicate(b"\n")
    ended = []
    loop.watch_process(process, lambda: ended.append(process))
    turn(loop)
    assert ended == [process]


class RecordingLoop(Loop):
    """Keeps what is sent, with the callbacks of each delivery."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, target, message, on_sent=None, on_failed=None):
        self.sent.append((message, on_sent, on_failed))


@pytest.fixture
def outbox_and_loop():
    loop = RecordingLoop()
    yield Outbox(loop, "target", list), loop
    loop.close()


def test_an_outbox_sends_what_gathers_during_a_delivery_as_one_message(outbox_and_loop):
    outbox, loop = outbox_and_loop
    outbox.put(1)
    outbox.put(2)
    assert loop.sent == []
    loop.finish_turn()
    outbox.put(3)
    outbox.put(4)
    loop.finish_turn()
    assert [message for message, *_ in loop.sent] == [[1, 2]]
    loop.sent[0][1]()
    assert [message for message, *_ in loop.sent] == [[1, 2], [3, 4]]


def test_an_outbox_goes_on_after_a_failed_delivery(outbox_and_loop):
    outbox, loop = outbox_and_loop
    outbox.put(1)
    loop.finish_turn()
    outbox.put(2)
    loop.sent[0][2]()
    assert [message for message, *_ in loop.sent] == [[1], [2]]


def test_an_outbox_keeps_large_items_apart_and_small_ones_together() -> None:
    sent: list[list[bytes]] = []
    loop = Recorder(sent)
    outbox = Outbox(loop, "there", list, weigh=len)
    items = [b"a" * 600_000, b"b" * 600_000, b"c", b"d", b"e" * 3_000_000, b"f"]
    for item in items:
        outbox.put(item)
    loop.finish_turn()
    loop.close()
    assert [len(batch) for batch in sent] == [1, 3, 1, 1]
    assert [item for batch in sent for item in batch] == items


class Recorder(Loop):
    """A loop whose deliveries succeed at once."""

    def __init__(self, sent: list[list[bytes]]) -> None:
        super().__init__()
        self.sent = sent

    def send(self, _target: Any, message: Any, on_sent: Any = None, on_failed: Any = None) -> None:
        del on_failed
        self.sent.append(message)
        on_sent()
