"""The loop that our actors and ports are on, without a transport."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.loop import (
    GATHERED,
    MAX_BATCH_BYTES,
    MAX_BYTES_UNDER_WAY,
    MAX_OUTBOXES,
    Lane,
    Loop,
    Outbox,
    Outboxes,
    new_event_loop,
)
from greenroom.actors.runtime.processes import identify, send_signal
from tests.support.lone_loop import LoneTransport
from tests.support.systems import wait_until

DEADLINE_S = 30.0


@pytest.fixture
def recorder():
    transport = LoneTransport(new_event_loop())  # uvloop's, where that is installed
    transport.deliveries_at_once = 1
    yield transport
    transport.loop.close()


def messages(recorder: LoneTransport) -> list[Any]:
    return [each.message for each in recorder.sent]


@pytest.fixture
def loop(recorder):
    loop = Loop(recorder)
    yield loop
    loop.close()


def turn(loop: Loop, seconds: float = 0.0) -> None:
    """Run the loop for a while."""
    loop.asyncio.run_until_complete(asyncio.sleep(seconds))


def run_until(loop: Loop, condition) -> bool:
    """Run the loop in passes of its own, woken by nobody else, until the condition holds."""

    def met():
        turn(loop, 0.001)
        return condition()

    return wait_until(met, DEADLINE_S, "what was waited for")


def test_posts_from_many_threads_all_run(loop):
    posts, threads = 20_000, 4
    ran = []

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
        run_until(loop, lambda: len(ran) == threads * posts)
    finally:
        sys.setswitchinterval(interval)
    for thread in posting:
        thread.join()


def test_a_post_wakes_a_loop_that_sleeps_also_when_it_comes_with_another(loop):
    ran = []

    def first():
        loop.post(second)
        loop.post(loop.asyncio.stop)

    def second():
        ran.append("second")

    threading.Timer(0.05, loop.post, [first]).start()
    loop.asyncio.run_forever()
    threading.Timer(0.05, loop.post, [loop.asyncio.stop]).start()
    loop.asyncio.run_forever()
    assert ran == ["second"]


def test_a_callback_that_raises_does_not_stop_the_others(loop, caplog):
    ran = []
    loop.post(lambda: 1 / 0)
    loop.post(lambda: ran.append("posted"))
    loop.call_later(0, lambda: ran.append("cancelled")).cancel()
    loop.call_later(0, lambda: 1 / 0)
    loop.call_later(0, lambda: ran.append("due"))
    loop.at_turn_end(lambda: 1 / 0)
    loop.at_turn_end(lambda: ran.append("turn end"))
    turn(loop, 0.01)
    assert sorted(ran) == ["due", "posted", "turn end"]
    assert len(caplog.records) == 3
    loop.asyncio.close()
    loop.post(lambda: 1 / 0)  # dropped


def test_no_timer_is_early(loop):
    early = []

    def begin(delay_s, left):
        since = time.monotonic()

        def due():
            early.append(delay_s - (time.monotonic() - since))
            if left:
                begin(delay_s + 0.0001, left - 1)
            else:
                loop.asyncio.stop()

        loop.call_later(delay_s, due)
        while time.monotonic() < since + 0.0005:  # the turn goes on
            pass

    loop.post(lambda: begin(0.0003, 60))
    loop.asyncio.run_forever()
    assert len(early) == 61
    assert max(early) < 1e-6  # asyncio's own allow for the clock's grain


def test_the_end_of_a_watched_process_is_noticed_once(loop):
    before = len(os.listdir("/proc/self/fd"))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identify(child.pid)
    ended = []
    loop.watch_process(process, lambda: ended.append("watched"))
    cancel = loop.watch_process(process, lambda: ended.append("cancelled"))
    cancel()
    turn(loop, 0.01)
    assert not ended
    child.communicate(b"\n")
    run_until(loop, lambda: ended)
    turn(loop, 0.01)
    assert ended == ["watched"]
    loop.watch_process(process, lambda: ended.append("late"))
    run_until(loop, lambda: ended[1:] == ["late"])
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_watch_that_is_cancelled_late_leaves_the_next_one_of_its_descriptor_alone(loop):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = identify(child.pid)
        ended = []
        cancel = loop.watch_process(process, lambda: ended.append("first"))
        cancel()
        loop.watch_process(process, lambda: ended.append("second"))  # the kernel's lowest number
        cancel()
        child.stdin.close()
        run_until(loop, lambda: ended)
    assert ended == ["second"]


def test_a_process_whose_number_is_a_threads_by_now_has_ended(loop):
    over, ended = threading.Event(), []
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        loop.watch_process(Process(thread.native_id, 1, "gone"), lambda: ended.append("gone"))
        run_until(loop, lambda: ended)
        assert not send_signal(Process(thread.native_id, 1, "gone"), signal.SIGKILL)
    finally:
        over.set()
        thread.join()


@pytest.fixture
def outbox(loop):
    return Outbox(loop, "target", list)


def test_an_outbox_sends_what_gathers_during_a_delivery_as_one_message(outbox, loop, recorder):
    outbox.put(1)
    outbox.put(2)
    assert messages(recorder) == []
    turn(loop)
    outbox.put(3)
    outbox.put(4)
    turn(loop)
    assert messages(recorder) == [[1, 2]]
    recorder.sent[0].failed()
    assert messages(recorder) == [[1, 2], [3, 4]]


def test_a_lane_waits_for_no_delivery(loop, recorder):
    lane = Lane(loop, "target", list)
    for number in range(3):
        lane.put(number)
        turn(loop)
    assert messages(recorder) == [[0], [1], [2]]
    assert lane.is_idle


def test_a_lane_sends_what_gathers_in_a_turn_together_and_much_of_it_before_its_end(loop, recorder):
    lane = Lane(loop, "target", list, weigh=lambda size: size)
    lane.put_all([1, 2])
    lane.put(3)
    assert messages(recorder) == []
    turn(loop)
    assert messages(recorder) == [[1, 2, 3]]
    for number in range(GATHERED):
        lane.put(number)
    assert messages(recorder)[1:] == [[*range(GATHERED)]]
    lane.put_all([MAX_BATCH_BYTES, MAX_BATCH_BYTES])
    turn(loop)
    assert messages(recorder)[2:] == [[MAX_BATCH_BYTES], [MAX_BATCH_BYTES]]
    lane.put(4)
    assert lane.drop() == [4]
    turn(loop)
    assert len(messages(recorder)) == 4


@pytest.mark.parametrize("kind", [Lane, Outbox])
def test_what_nothing_is_to_join_leaves_at_once_with_what_has_gathered(recorder, kind):
    recorder.deliveries_at_once = 100
    loop = Loop(recorder)
    lane = kind(loop, "target", list)
    lane.put(1, 1)
    assert messages(recorder) == [[1]]
    lane.put(2)
    lane.put(3, 1)
    assert messages(recorder) == [[1], [2, 3]]
    lane.put(4)
    assert messages(recorder) == [[1], [2, 3]]
    turn(loop)
    assert messages(recorder) == [[1], [2, 3], [4]]
    lane.put(5)
    turn(loop)
    assert messages(recorder)[3:] == [[5]]


def test_idle_outboxes_are_dropped_when_there_are_too_many(loop, recorder):
    outboxes = Outboxes()
    busy, held = Outbox(loop, "busy", list), Outbox(loop, "held", list)
    outboxes["busy"] = busy
    outboxes["held"] = held
    busy.put(1)
    turn(loop)
    held.put(1)
    for number in range(MAX_OUTBOXES - 1):
        outboxes[str(number)] = Outbox(loop, "idle", list)
    assert outboxes.keys() == {"busy", "held", str(MAX_OUTBOXES - 2)}
    recorder.sent[0].arrived()
    assert busy.is_idle


def test_an_outbox_sends_on_without_waiting_where_that_is_cheap(recorder):
    recorder.deliveries_at_once = 2
    loop = Loop(recorder)
    outbox = Outbox(loop, "target", list)
    for number in range(4):
        outbox.put(number)
        turn(loop)
    assert messages(recorder) == [[0], [1]]
    recorder.sent[0].arrived()
    assert messages(recorder) == [[0], [1], [2, 3]]


def test_what_gathers_in_one_turn_leaves_before_its_end(recorder):
    recorder.deliveries_at_once = 100
    loop = Loop(recorder)
    outbox = Outbox(loop, "target", list)
    for number in range(2 * GATHERED + 1):
        outbox.put(number)
    assert [len(batch) for batch in messages(recorder)] == [GATHERED, GATHERED]
    turn(loop)
    assert [len(batch) for batch in messages(recorder)] == [GATHERED, GATHERED, 1]
    outbox.put("next")
    turn(loop)
    assert messages(recorder)[-1] == ["next"]


def test_what_may_wait_leaves_with_what_may_not_or_when_its_time_is_up():
    recorder = LoneTransport()  # whose time stands still meanwhile
    recorder.deliveries_at_once = 1
    loop = Loop(recorder)
    outbox = Outbox(loop, "target", list)
    outbox.put_patiently(1, 1.0)
    outbox.put_patiently(2, 60)
    turn(loop, 0.9)
    assert messages(recorder) == []
    assert not outbox.is_idle
    turn(loop, 0.2)
    assert messages(recorder) == [[1, 2]]
    recorder.sent[0].arrived()
    outbox.put_patiently(3, 60)
    outbox.put(4)
    turn(loop)
    assert messages(recorder) == [[1, 2], [3, 4]]
    outbox.put_patiently(5, 1.0)
    recorder.sent[1].arrived()
    turn(loop, 0.9)
    assert len(messages(recorder)) == 2
    turn(loop, 0.2)
    assert messages(recorder)[2:] == [[5]]
    loop.close()


def test_an_outbox_keeps_its_bytes_to_a_bound_and_waits_to_be_idle(recorder):
    recorder.deliveries_at_once = 100
    loop = Loop(recorder)
    outbox = Outbox(loop, "target", list, weigh=len)
    for _ in range(20):
        outbox.put(b"x" * 1_000_000)
    turn(loop)
    assert len(messages(recorder)) == MAX_BYTES_UNDER_WAY // 1_000_000
    for number in range(20):
        assert not outbox.is_idle
        recorder.sent[number].arrived()
    assert outbox.is_idle


def test_an_outbox_keeps_large_items_apart_and_small_ones_together(loop, recorder):
    outbox = Outbox(loop, "there", list, weigh=len)
    items = [b"a" * 600_000, b"b" * 600_000, b"c", b"d", b"e" * 3_000_000, b"f"]
    for item in items:
        outbox.put(item)
    turn(loop)
    for number in range(4):
        recorder.sent[number].arrived()
    assert [len(batch) for batch in messages(recorder)] == [1, 3, 1, 1]
    assert [item for batch in messages(recorder) for item in batch] == items
