from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.actors.transport.addresses import RefusedError
from greenroom.actors.transport.connection import (
    MESSAGE_COST,
    Acknowledged,
    Closed,
    Limits,
    Opened,
    Superseded,
    Undeliverable,
    WindowFullError,
    WindowOpened,
)
from tests.transport.pairs import Link, Process, identity, joined, session

both_kinds = pytest.mark.parametrize("remote", [False, True])


def text(number: int) -> bytes:
    return b"%d" % number


@both_kinds
@pytest.mark.parametrize("arrive", range(0, 400, 7))
def test_what_was_not_acknowledged_is_sent_again_and_nothing_else(
    remote: bool, arrive: int
) -> None:
    left, right, link = joined(remote=remote)
    for number in range(8):
        session(left, right).send([text(number)])
    link.collect()
    link.carry(0, arrive)
    arrived = len(right.messages())
    link.break_off()
    again = Link(right, left, remote=remote)
    again.run()
    assert left.of(Opened)[-1].resent == 8 - arrived
    assert right.messages() == [[text(number)] for number in range(8)]


@both_kinds
def test_a_large_message_that_was_cut_off_is_sent_again_whole(remote: bool) -> None:
    left, right, link = joined(remote=remote)
    body = bytes(range(256)) * 4000
    session(left, right).send([b"p", body])
    link.collect()
    link.carry(0, 600_000)
    link.break_off()
    assert right.of(Closed) == [Closed("the peer closed the connection inside a message")]
    Link(left, right, remote=remote).run()
    assert right.messages() == [[b"p", body]]


@both_kinds
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("size", [1, 7, 50, None])
def test_two_connections_dialled_at_once_end_up_as_one(
    remote: bool, order: tuple[int, ...], size: int | None
) -> None:
    left, right = Process("a"), Process("b")
    links = [Link(left, right, remote=remote), Link(right, left, remote=remote)]
    session(left, right).send([b"to the right"])
    session(right, left).send([b"to the left"])
    for _ in range(600):
        for index in order:
            links[index].collect()
            for side in order:
                links[index].carry(side, size)
        for process in (left, right):
            for event in process.of(Superseded):
                event.connection.close()
    open_links = [link for link in links if all(end.is_open for end in link.ends)]
    assert len(open_links) == 1
    assert left.messages() == [[b"to the left"]]
    assert right.messages() == [[b"to the right"]]


@both_kinds
def test_a_new_connection_takes_over_from_one_that_died_unnoticed(remote: bool) -> None:
    for dialer_first in (False, True):
        left, right, stale = joined(remote=remote)
        session(left, right).send([b"lost on the stale one"])
        stale.collect()
        ends = (left, right) if dialer_first else (right, left)
        fresh = Link(*ends, remote=remote)
        fresh.run()
        assert right.messages() == [[b"lost on the stale one"]]
        stale.carry(0)
        assert right.messages() == [[b"lost on the stale one"]]
        assert {type(event) for event in left.events} >= {Superseded}


def test_a_welcome_of_an_older_connection_is_refused() -> None:
    left, right = Process("a"), Process("b")
    first, second = Link(right, left, remote=True), Link(right, left, remote=True)
    for link in (first, second):
        for _ in range(2):
            link.collect()
            link.carry(0)
            link.collect()
            if link is second or _ == 0:
                link.carry(1)
    second.run()
    assert all(end.is_open for end in second.ends)
    first.carry(1)
    assert right.refusals() == ["a newer connection of the same session has taken over"]
    session(left, right).send([b"still"])
    second.run()
    assert right.messages() == [[b"still"]]


@both_kinds
def test_a_new_incarnation_never_gets_what_was_for_the_old(remote: bool) -> None:
    left, right, link = joined(remote=remote)
    session(left, right).send([b"handed out"], tag="sent")
    link.collect()
    session(left, right).send([b"waiting"], tag="waiting")
    stranger = Process("b", "f" * 16)
    fresh = Link(left, stranger, remote=remote)
    fresh.run()
    assert stranger.messages() == []
    (event,) = left.of(Undeliverable)
    assert [(each.tag, each.may_have_arrived) for each in event.messages] == [
        ("sent", True),
        ("waiting", False),
    ]
    assert left.of(Superseded)[0].connection is link.ends[0]
    session(left, stranger).send([b"for the new one"])
    fresh.run()
    assert stranger.messages() == [[b"for the new one"]]
    late = Link(right, left, remote=remote)
    late.run()
    assert "replaced by a later incarnation" in left.refusals()[-1]
    assert fresh.ends[0].is_open


@both_kinds
@pytest.mark.parametrize("forgetful", ["a", "b"])
@pytest.mark.parametrize("redials", ["a", "b"])
def test_a_session_given_up_on_one_side_starts_again_on_both(
    remote: bool, forgetful: str, redials: str
) -> None:
    left, right, link = joined(remote=remote)
    for number in range(3):
        session(left, right).send([text(number)])
        session(right, left).send([text(number)])
    link.run()
    link.ends[0].acknowledge()
    link.run()
    link.break_off()
    gone, stays = (left, right) if forgetful == "a" else (right, left)
    session(gone, stays).send([b"given up"], tag="gone")
    assert gone.sessions.forget(stays.name)[-1].tag == "gone"
    session(stays, gone).send([b"never handed out before"])
    before = len(gone.messages()), len(stays.messages())
    ends = (left, right) if redials == "a" else (right, left)
    again = Link(*ends, remote=remote)
    again.run()
    session(gone, stays).send([b"afresh"])
    session(stays, gone).send([b"too"])
    again.run()
    assert gone.messages()[before[0] :] == [[b"never handed out before"], [b"too"]]
    assert stays.messages()[before[1] :] == [[b"afresh"]]
    assert again.ends[0].ack_due >= 0
    assert not gone.refusals() + stays.refusals()
    for event in stays.of(Undeliverable):
        assert all(each.may_have_arrived for each in event.messages)


def test_nothing_is_due_after_a_welcome() -> None:
    left, right, link = joined(remote=True)  # the left one decides
    session(right, left).send([b"one"])
    link.run()
    link.break_off()
    between = Link(left, right, remote=True)
    between.run()
    assert [end.ack_due for end in between.ends] == [0, 0]  # the welcomes said it all
    between.break_off()
    right.sessions.forget("a")
    again = Link(left, right, remote=True)
    again.run()
    assert [end.ack_due for end in again.ends] == [0, 0]


def test_a_session_ended_while_its_connection_waits_is_refused_not_revived() -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=False)
    link.collect()
    link.carry(0)
    right.sessions.forget("a")
    link.run()
    assert right.refusals() == ["this end gave the session up meanwhile"]


def test_a_peer_that_acknowledges_what_was_never_sent_is_refused() -> None:
    """Cross-wired: the same two names, but a session that this process never had."""
    left, right, link = joined(remote=True)
    session(left, right).send([b"one"])
    link.run()
    link.break_off()
    session(right, left).received = 57
    Link(left, right, remote=True).run()
    assert "acknowledges message 57; 0 to 1 can be" in left.refusals()[0]
    assert not left.of(Undeliverable)


def test_back_pressure_is_signalled_and_lifted_once() -> None:
    limits = Limits(window=4 * (1000 + MESSAGE_COST))
    left, right, link = joined(remote=False, limits=limits)
    to_right = session(left, right)
    sent = 0
    while to_right.can_send:
        to_right.send([bytes(1000)])
        sent += 1
    assert sent == 4
    with pytest.raises(WindowFullError):
        to_right.send([b"one too many"])
    link.run()
    assert not left.of(WindowOpened)
    link.ends[1].acknowledge()
    link.run()
    assert left.of(WindowOpened) == [WindowOpened(to_right)]
    to_right.send([bytes(10**6)])  # however large, when there is room at all
    link.run()
    assert len(right.messages()) == 5


def test_a_message_over_the_limit_cannot_be_sent() -> None:
    left, right = Process("a"), Process("b", limits=Limits(max_message=1000))
    to_right = session(left, right)
    to_right.send([bytes(2000)], tag="before the limit was known")
    to_right.send([b"fine"])
    link = Link(left, right, remote=False)
    link.run()
    (event,) = left.of(Undeliverable)
    assert [each.tag for each in event.messages] == ["before the limit was known"]
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        to_right.send([bytes(2000)])
    with pytest.raises(ValueError, match="1 to 4096 buffers"):
        to_right.send([])
    assert right.messages() == [[b"fine"]]


@pytest.mark.parametrize("wrong", [{"max_frame": 1000}, {"window": 0}, {"max_message": 0}])
def test_limits_that_cannot_work_are_refused_when_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="m"):
        Limits(**wrong)


def test_replaced_incarnations_are_remembered_within_bounds() -> None:
    process = Process("a")
    for number in range(5000):
        process.sessions.meet(identity("b", f"{number:016x}"))
    with pytest.raises(RefusedError):
        process.sessions.meet(identity("b", f"{4000:016x}"))
    assert len(process.sessions) == 1
    assert len(process.sessions._ended) <= 4096


class Pair(RuleBasedStateMachine):
    """Two processes whose connections break, stall and are dialled again at any point."""

    def __init__(self) -> None:
        super().__init__()
        self.processes = (Process("a"), Process("b"))
        self.links: list[Link] = []
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])

    @rule(side=st.sampled_from([0, 1]), large=st.booleans())
    def send(self, side: int, large: bool) -> None:
        body = text(len(self.sent[side])) + b"." * (40_000 if large else 0)
        self.sent[side].append(body)
        session(self.processes[side], self.processes[1 - side]).send([body])

    @rule(side=st.sampled_from([0, 1]), remote=st.booleans())
    def dial(self, side: int, remote: bool) -> None:
        if len(self.links) < 4:
            ends = self.processes if side == 0 else self.processes[::-1]
            self.links.append(Link(*ends, remote=remote))

    @rule(index=st.integers(0, 3), side=st.sampled_from([0, 1]), size=st.integers(1, 50_000))
    def carry(self, index: int, side: int, size: int) -> None:
        if index < len(self.links):
            self.links[index].collect()
            self.links[index].carry(side, size)

    @rule(index=st.integers(0, 3))
    def run(self, index: int) -> None:
        if index < len(self.links):
            self.links[index].run()

    @rule(index=st.integers(0, 3), side=st.sampled_from([0, 1]))
    def acknowledge(self, index: int, side: int) -> None:
        if index < len(self.links) and self.links[index].ends[side].ack_due:
            self.links[index].ends[side].acknowledge()

    @rule(index=st.integers(0, 3))
    def break_off(self, index: int) -> None:
        if index < len(self.links):
            self.links.pop(index).break_off()

    @invariant()
    def nothing_is_repeated_reordered_or_lost(self) -> None:
        for side in (0, 1):
            arrived = [message[0] for message in self.processes[side].messages()]
            assert arrived == self.sent[1 - side][: len(arrived)]
            assert not self.processes[side].of(Undeliverable)
        for process in self.processes:
            for reason in process.refusals():
                assert "taken over" in reason or "during the handshake" in reason

    def teardown(self) -> None:
        for link in self.links:
            link.break_off()
        last = Link(*self.processes, remote=True)
        last.run()
        for end in last.ends:
            end.acknowledge()
        last.run()
        for side in (0, 1):
            arrived = [message[0] for message in self.processes[side].messages()]
            assert arrived == self.sent[1 - side]
            kept = session(self.processes[1 - side], self.processes[side])
            assert len(kept) == kept.kept_bytes == 0


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2000), max_size=6))
def test_tags_come_back_once_each_and_in_order(breaks: list[int]) -> None:
    left, right = Process("a"), Process("b")
    for number in range(30):
        session(left, right).send([text(number)], tag=number)
    for point in [*breaks, None]:
        link = Link(left, right, remote=True)
        for _ in range(5):
            link.collect()
            link.carry(0, point)
            link.collect()
            link.carry(1)
        if link.ends[1].is_open:
            link.ends[1].acknowledge()
            link.run()
        link.break_off()
    tags = [tag for event in left.of(Acknowledged) for tag in event.tags]
    assert tags == list(range(30))
