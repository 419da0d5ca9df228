"""What actors on our base bear: stopped processes, cut connections, floods, large messages."""

import os
import signal
import time

import pytest
from thespian.system.transport import TransmitIntent

from tests.support.systems import wait_until
from tests.transport.workers import ASK_S, new_child

MEGABYTE = 1024 * 1024


@pytest.fixture
def target(system, worker):
    return new_child(system, worker)


def all_arrived(system, actor, number):
    """Wait until that many are noted; tell whether each came once and in order."""
    wait_until(lambda: system.ask(actor, ("noted",), ASK_S)[0] >= number, 30, "all have come")
    return system.ask(actor, ("noted",), ASK_S) == (number, True)


def test_a_stopped_process_delays_nobody_and_gets_all_when_it_goes_on(system, worker, target):
    stopped, pid = target
    prompt, _ = new_child(system, worker)
    number = 20_000
    os.kill(pid, signal.SIGSTOP)
    try:
        system.tell(worker, ("flood", stopped, 0, number, 1000))  # more than its window
        begun = time.monotonic()
        system.tell(worker, ("flood", prompt, 0, 100, 10))
        assert all_arrived(system, prompt, 100)
        assert system.ask(worker, ("echo", 1), ASK_S) == (1,)
        assert time.monotonic() - begun < ASK_S, "and not when the stopped one goes on"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all_arrived(system, stopped, number)


def test_answers_leave_while_other_messages_wait_to_be_handled(system, target):
    slow, _ = target
    number = 50
    for each in range(number):  # all at once: tell would wait for each to be read
        intent = TransmitIntent(slow, ("take_long", each, 0.03, b""))
        system._systemBase.transport.scheduleTransmit(None, intent)
    answers = [(*system.listen(ASK_S), time.monotonic()) for _ in range(number)]
    assert [each for each, _, _ in answers] == list(range(number))
    first_came, last_was_handled = answers[0][2], answers[-1][1]
    assert first_came < last_was_handled


def test_a_slow_handler_holds_its_senders_back_and_keeps_little_in_memory(system, target):
    slow, _ = target
    number, size = 500, 60_000
    before, _ = system.ask(slow, ("memory",), ASK_S)
    for each in range(number):
        intent = TransmitIntent(slow, ("take_long", each, 0.001, bytes(size)))
        system._systemBase.transport.scheduleTransmit(None, intent)
    assert [system.listen(ASK_S)[0] for _ in range(number)] == list(range(number))
    _, most = system.ask(slow, ("memory",), ASK_S)
    assert most - before < number * size / 3


def test_nothing_governs_how_fast_an_actor_may_send(system, worker, target):
    receiver, _ = target
    assert system.ask(worker, ("forbid_governor",), ASK_S)
    system.tell(worker, ("flood", receiver, 0, 100, 10))
    assert all_arrived(system, receiver, 100)


def test_100_megabytes_come_back_and_take_little_more_than_twice_that(system, worker):
    size = 100 * MEGABYTE
    before, _ = system.ask(worker, ("memory",), ASK_S)
    body = os.urandom(MEGABYTE) * 100
    answer = system.ask(worker, ("echo", body), 60)
    assert answer == (body,)
    _, most = system.ask(worker, ("memory",), ASK_S)
    assert most - before < 2.5 * size
