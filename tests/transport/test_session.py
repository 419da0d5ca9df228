"""What two processes owe each other, whatever becomes of their connections."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.actors.transport import session as session_module
from greenroom.actors.transport.frames import MAX_BUFFERS, SMALL_MESSAGE, RefusedError
from greenroom.actors.transport.session import Session


def session_with(*bodies: bytes) -> Session:
    session = Session()
    for body in bodies:
        session.send([body], tag=body, delays_ack=False)
    return session


def taken(session: Session) -> list[bytes]:
    bodies = []
    while session.waiting:
        bodies.append(bytes(session.take().buffers[0]))
    return bodies


def test_messages_are_taken_in_order_and_kept_until_they_are_acknowledged():
    session = session_with(b"a", b"b", b"c")
    assert taken(session) == [b"a", b"b", b"c"]
    assert session.acknowledge(2) == [b"a", b"b"]
    assert session.unsent() == [b"c"]
    assert session.acknowledge(3) == [b"c"]
    assert session.kept_bytes == 0


def test_what_was_never_sent_cannot_be_acknowledged():
    session = session_with(b"a", b"b")
    session.take()
    with pytest.raises(RefusedError, match="acknowledges message 2 of 1"):
        session.acknowledge(2)


@pytest.mark.parametrize(("keep", "lost"), [(True, [b"a"]), (False, [b"a", b"b"])])
def test_a_restart_reports_what_may_be_lost(keep, lost):
    session = session_with(b"a", b"b")
    session.take()
    session.receive(1, 10, delays_ack=False)
    assert session.restart(keep_unwritten=keep) == lost
    assert taken(session) == ([b"b"] if keep else [])
    assert session.sent_up_to == int(keep)
    assert session.receive(1, 10, delays_ack=False), "the other end starts again, too"


def test_a_message_that_came_before_is_dropped_and_one_too_far_is_refused():
    session = Session()
    assert session.receive(1, 1, delays_ack=True)
    assert session.receive(2, 1, delays_ack=True)
    assert not session.receive(1, 1, delays_ack=True)
    for number in (0, 4):
        with pytest.raises(RefusedError, match=f"message {number} where 3 is due"):
            session.receive(number, 1, delays_ack=True)


def test_an_acknowledgement_is_urgent_when_the_sender_waits_or_much_has_come():
    session = Session()
    session.receive(1, 10, delays_ack=True)
    assert not session.ack_is_urgent
    session.receive(2, 10, delays_ack=False)
    assert session.ack_is_urgent
    session.ack_written()
    session.receive(3, session_module.DELAYED_BYTES, delays_ack=True)
    assert session.ack_is_urgent


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(session_module, "MAX_KEPT", 5000)
    monkeypatch.setattr(session_module, "MAX_MESSAGE", 10_000)
    session = session_with(bytes(4000))
    with pytest.raises(ValueError, match="4256 bytes wait for its target already"):
        session.send([bytes(4000)], tag=None, delays_ack=False)
    with pytest.raises(ValueError, match="a message of 10001 bytes in 1 buffers"):
        session.send([bytes(10_001)], tag=None, delays_ack=False)
    with pytest.raises(ValueError, match="in 4097 buffers"):
        session.send([b""] * (MAX_BUFFERS + 1), tag=None, delays_ack=False)


class TwoSessions(RuleBasedStateMachine):
    """Two ends and connections between them that lose what is under way, whenever."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = (Session(), Session())
        self.sent: tuple[list[int], list[int]] = ([], [])
        self.arrived: tuple[list[int], list[int]] = ([], [])
        self.under_way: tuple[list[tuple[int, int, int]], ...] = ([], [])

    @rule(side=st.sampled_from((0, 1)), size=st.sampled_from((4, 2 * SMALL_MESSAGE)))
    def send(self, side: int, size: int) -> None:
        number = len(self.sent[side])
        self.sent[side].append(number)
        self.ends[side].send([b"%d" % number + bytes(size)], tag=number, delays_ack=True)

    @rule(side=st.sampled_from((0, 1)))
    def write(self, side: int) -> None:
        end = self.ends[side]
        if end.waiting:
            body = int(bytes(end.take().buffers[0]).rstrip(b"\0"))
            self.under_way[side].append((end.sent_up_to, body, end.received))

    @rule(side=st.sampled_from((0, 1)))
    def arrive(self, side: int) -> None:
        if self.under_way[side]:
            number, body, acknowledged = self.under_way[side].pop(0)
            end = self.ends[1 - side]
            if acknowledged > end.acknowledged:
                end.acknowledge(acknowledged)
            if end.receive(number, 1, delays_ack=True):
                self.arrived[side].append(body)

    @rule(side=st.sampled_from((0, 1)), loses=st.booleans())
    def another_connection(self, side: int, loses: bool) -> None:
        self.ends[side].rewind()
        if loses:
            self.under_way[side].clear()

    @invariant()
    def nothing_is_lost_repeated_or_moved(self) -> None:
        for side in (0, 1):
            assert self.arrived[side] == self.sent[side][: len(self.arrived[side])]

    def teardown(self) -> None:
        for side in (0, 1):
            self.another_connection(side, loses=False)
            for _ in range(len(self.sent[side])):
                self.write(side)
            while self.under_way[side]:
                self.arrive(side)
            assert self.arrived[side] == self.sent[side]


TwoSessions.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
test_nothing_is_lost_repeated_or_moved_over_any_connections = TwoSessions.TestCase
