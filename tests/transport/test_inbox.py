"""How much of what has arrived is handled before the loop gets its turn."""

import pytest

from greenroom.actors.transport import mailbox as inbox_module
from greenroom.actors.transport.mailbox import MAX_WAITING_BYTES, SLICE_S, Envelope, Inbox


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only item is the time."""
    now = [100.0]
    monkeypatch.setattr(inbox_module, "monotonic", lambda: now[0])
    return now


def filled(number, size=10):
    inbox = Inbox(None)
    for each in range(number):
        inbox.append(Envelope(None, each, size))
    return inbox


def handled(inbox, clock, seconds_each):
    numbers = []
    for envelope in inbox.take_slice():
        clock[0] += seconds_each
        numbers.append(envelope.message)
    return numbers


def test_all_that_is_quick_is_handled_at_once(clock):
    inbox = filled(1000)
    assert handled(inbox, clock, SLICE_S / 2000) == list(range(1000))
    assert not inbox


def test_what_takes_long_is_handled_in_slices_and_in_order(clock):
    inbox = filled(5)
    assert handled(inbox, clock, SLICE_S * 0.6) == [0, 1]
    assert handled(inbox, clock, SLICE_S * 2) == [2]
    assert handled(inbox, clock, 0) == [3, 4]


def test_what_is_too_much_is_handled_before_more_is_read(clock):
    inbox = filled(7, size=MAX_WAITING_BYTES // 4)
    assert handled(inbox, clock, SLICE_S * 2) == [0, 1, 2, 3]
    assert handled(inbox, clock, SLICE_S * 2) == [4], "three quarters of it waited"


def test_what_a_handler_sends_itself_is_handled_after_the_loops_turn(clock):
    inbox = filled(2)
    for envelope in inbox.take_slice():
        inbox.append(envelope)
    assert [each.message for each in inbox] == [0, 1]
    assert len(inbox) == 2
    assert inbox.popleft().message == 0


def test_what_others_wait_for_goes_first(clock):
    inbox = filled(2)
    inbox.appendleft(Envelope(None, "a child is there"))
    assert handled(inbox, clock, 0) == ["a child is there", 0, 1]
