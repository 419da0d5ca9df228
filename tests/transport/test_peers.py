"""Processes over real sockets, several of them on one loop."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import time
from contextlib import closing

import pytest

from greenroom.actors.transport import peers as peers_module
from greenroom.actors.transport import sockets
from greenroom.actors.transport.addresses import ProcessAddress, RefusedError, drawn_address
from greenroom.actors.transport.connection import PATIENT_MESSAGES, Limits
from greenroom.actors.transport.endpoints import Shortage
from tests.support.timing import check_within
from tests.transport.worlds import DEADLINE_S, HOST, World


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_messages_arrive_in_order_once_and_are_acknowledged(world):
    one, other = world.process(), world.process()
    tags = [one.send(other, str(number).encode()) for number in range(1000)]
    world.until(lambda: len(one.done) == 1000)
    assert other.bodies == [str(number).encode() for number in range(1000)]
    assert one.done == tags
    assert {address for address, _ in other.inbox} == {one.address}


def test_answers_use_the_connection_that_the_question_came_over(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: other.inbox)
    other.send(one, b"answer")
    world.until(lambda: one.inbox)
    assert len(one.peers._channels) == len(other.peers._channels) == 1


def test_both_dialing_at_once_lose_and_repeat_nothing(world):
    for _ in range(50):
        one, other = world.process(), world.process()
        for number in range(10):
            one.send(other, b"%d" % number)
            other.send(one, b"%d" % number)
        world.until(lambda a=one, b=other: len(a.done) == len(b.done) == 10)
        assert one.bodies == other.bodies == [b"%d" % number for number in range(10)]


def test_what_a_handler_sends_leaves_in_one_write(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    other.send(one)
    world.until(lambda: other.done)
    other.on_deliver = lambda: [other.send(one, b"answer") for _ in range(50)]
    written = []
    channel = other.channel_to(one)
    write_some = channel._write_some
    channel._write_some = lambda: written.append(write_some()) or written[-1]
    one.send(other)
    world.until(lambda: len(one.inbox) == 51)
    assert len(written) == 2, "the acknowledgement, then the answers"


def test_patient_messages_are_acknowledged_together(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    channel = other.channel_to(one)
    written, write_some = [], channel._write_some
    channel._write_some = lambda: written.append(write_some()) or written[-1]
    for number in range(9):
        one.send(other, is_patient=True)
        world.until(lambda n=number: len(other.inbox) == n + 2)
    world.until(lambda: len(one.done) == 10)
    assert len(written) < 9
    one.send(other, is_patient=True)
    one.send(other)
    world.until(lambda: len(one.done) == 12)


def test_many_patient_messages_do_not_wait_for_the_time_to_acknowledge_them(world, monkeypatch):
    monkeypatch.setattr("greenroom.actors.transport.peers.PATIENCE_S", 3600)
    one, other = world.process(), world.process()
    for _ in range(PATIENT_MESSAGES):
        one.send(other, is_patient=True)
    world.until(lambda: len(one.done) == PATIENT_MESSAGES)


def test_what_a_dead_process_had_not_acknowledged_is_handed_back_patient_or_not(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    tags = [one.send(other, is_patient=True) for _ in range(3)]
    other.peers.close()
    world.until(lambda: one.dead)
    assert one.dead == tags


def test_a_peer_that_cannot_take_a_message_is_dialed_ever_more_slowly(world, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise RefusedError("cannot take it")

    monkeypatch.setattr("greenroom.actors.transport.connection.MessageReceived", refuse)
    one, other = world.process(), world.process()
    one.send(other, is_patient=True)
    (peer,) = one.peers._peers.values()
    world.until(lambda: len(caplog.records) >= 3 and peer.failures >= 2)
    assert "cannot take it" in caplog.text
    monkeypatch.undo()
    world.until(lambda: one.done and peer.failures == 0)


def test_a_dead_target_is_reported_within_100_ms(world):
    one = world.process()

    def attempt():
        nobody = drawn_address(HOST)
        begun = time.monotonic()
        tag = one.send(nobody)
        world.until(lambda: one.dead)
        took_s = time.monotonic() - begun
        assert (one.dead, one.gone) == ([tag], [nobody])
        one.dead.clear()
        one.gone.clear()
        return took_s

    check_within(0.1, attempt)


def test_a_target_that_dies_behind_an_open_connection_is_dead(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    other.peers.close()
    tag = one.send(other)
    world.until(lambda: one.dead)
    assert one.dead == [tag]
    assert not one.peers._peers


def test_the_death_of_an_idle_peer_is_noticed_and_nothing_is_kept(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    other.peers.close()
    world.until(lambda: one.gone)
    assert not one.peers._peers
    assert len(one.peers._sessions) == 0


def test_messages_pass_to_a_new_process_at_the_same_address(world):
    address = ProcessAddress(HOST, 23)
    one, other = world.process(), world.process(address=address)
    one.send(other)
    world.until(lambda: one.done)
    other.peers.close()
    later = world.process(address=address)
    lost = one.send(later, b"handed to the dead")
    world.until(lambda: one.dead)
    assert one.dead == [lost]
    one.send(later, b"again")
    world.until(lambda: later.inbox)
    assert later.bodies == [b"again"]


def test_an_address_in_use_cannot_be_had(world):
    process = world.process()
    with pytest.raises(OSError, match="in use"):
        world.process(address=process.address)


def test_a_cut_connection_loses_and_repeats_nothing(world):
    one, other = world.process(), world.process()
    total = 3000
    for number in range(total):
        one.send(other, b"%d" % number)
        if number % 300 == 0:
            world.passes(3)
            channel = (one if number % 600 else other).peers._channels
            for each in list(channel.values()):
                each._socket.shutdown(socket.SHUT_RDWR)
    world.until(lambda: len(one.done) == total)
    assert other.bodies == [b"%d" % number for number in range(total)]
    assert not one.dead


def test_a_peer_that_does_not_read_delays_no_other(world):
    sender, stuck, prompt = world.process(), world.process(), world.process()
    sender.send(stuck)
    sender.send(prompt)
    world.until(lambda: len(sender.done) == 2)
    world.loop.remove_reader(stuck.channel_to(sender).fileno())
    for _ in range(100):
        sender.send(stuck, bytes(100_000))

    def attempt():
        begun, before = time.monotonic(), len(prompt.inbox)
        sender.send(prompt, b"quick")
        world.until(lambda: len(prompt.inbox) > before)
        return time.monotonic() - begun

    check_within(0.5, attempt)
    assert len(stuck.inbox) == 1


def test_a_peer_whose_backlog_is_full_delays_no_other_and_gets_all_later(world, monkeypatch):
    monkeypatch.setattr(sockets, "BACKLOG", 1)
    stuck, prompt = world.process(), world.process()
    listener = stuck.peers._listener.fileno()
    world.loop.remove_reader(listener)
    senders = [world.process() for _ in range(10)]
    for sender in senders:
        sender.send(stuck)
        sender.send(prompt)
    world.until(lambda: all(len(sender.done) == 1 for sender in senders), "prompt has its own")
    assert not stuck.inbox
    world.loop.add_reader(listener, stuck.peers._listener._accept)
    world.until(lambda: len(stuck.inbox) == 10)


def test_a_process_without_descriptors_dials_when_it_has_some(world, monkeypatch):
    monkeypatch.setattr(peers_module, "LAST_RETRY_S", 0.01)
    one, other = world.process(), world.process()
    failures = [OSError(errno.EMFILE, "too many open files")] * 2
    local_socket = sockets.local_socket

    def scarce():
        if failures:
            raise failures.pop()
        return local_socket()

    monkeypatch.setattr(sockets, "local_socket", scarce)
    one.send(other)
    world.until(lambda: one.done)
    assert other.bodies == [b"hello"]
    assert one.peers.shortage.lasted_s(world.loop.time()) == 0.0


def test_how_long_a_process_lacks_descriptors_counts_while_it_needs_them():
    shortage = Shortage()
    full = OSError(errno.EMFILE, "too many open files")
    shortage.failed(OSError(errno.ECONNREFUSED, "nobody"), 100.0)
    assert shortage.lasted_s(100.0) == 0.0
    for second in range(12):
        shortage.failed(full, 100.0 + second)
    assert shortage.lasted_s(111.5) == 11.0
    assert shortage.lasted_s(120.0) == 0.0, "nothing is needed any more"
    shortage.failed(full, 121.0)
    assert shortage.lasted_s(121.0) == 0.0
    for second in range(5):
        shortage.failed(full, 122.0 + second)
    shortage.over()
    assert shortage.lasted_s(126.0) == 0.0


def test_a_peer_that_hangs_up_at_once_is_dialed_later_and_later(world):
    one = world.process()
    address = drawn_address(HOST)
    calls = []
    with closing(sockets.local_socket()) as rude:
        rude.bind(address.socket_name)
        rude.listen()

        def hang_up():
            calls.append(world.loop.time())
            rude.accept()[0].close()

        world.loop.add_reader(rude.fileno(), hang_up)
        one.send(address)
        world.until(lambda: len(calls) == 6)
        world.loop.remove_reader(rude.fileno())
    pauses = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert pauses[-1] > 0.1 > min(pauses)  # a busy machine makes some of them longer
    world.until(lambda: one.dead, "nobody listens there any more")


def test_a_peer_that_has_hung_up_for_hours_is_still_dialed_and_reached(world, monkeypatch):
    monkeypatch.setattr(peers_module, "FIRST_RETRY_S", 1e-6)
    monkeypatch.setattr(peers_module, "LAST_RETRY_S", 1e-6)  # hours in a second
    one = world.process()
    address = drawn_address(HOST)
    calls = 0
    with closing(sockets.local_socket()) as rude:
        rude.bind(address.socket_name)
        rude.listen()

        def hang_up():
            nonlocal calls
            calls += 1
            rude.accept()[0].close()

        world.loop.add_reader(rude.fileno(), hang_up)
        one.send(address)
        world.until(lambda: calls > 1_100)
        assert not one.dead
        world.loop.remove_reader(rude.fileno())
    world.until(lambda: one.dead, "nobody listens there any more")


def test_what_a_handler_raises_keeps_nothing_from_being_sent(world):
    one, other = world.process(), world.process()

    def fail():
        other.on_deliver = lambda: None
        other.send(one, b"before it failed")
        raise ValueError("a handler's own")

    errors = []
    world.loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    other.on_deliver = fail
    one.send(other)
    world.until(lambda: one.inbox and errors)
    assert isinstance(errors[0], ValueError)


def test_what_does_not_fit_the_window_waits_and_arrives(world):
    limits = Limits(window=100_000)
    one, other = world.process(limits=limits), world.process()
    for number in range(100):
        one.send(other, b"%05d" % number * 1000)
    world.until(lambda: len(one.done) == 100)
    assert [body[:5] for body in other.bodies] == [b"%05d" % number for number in range(100)]


def test_what_waits_behind_the_window_has_a_limit(world, monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_OVERFLOW", 50_000)
    one, other = world.process(limits=Limits(window=10_000)), world.process()
    for _ in range(100):
        one.send(other, bytes(5000))
    assert len(one.failed) > 50
    world.until(lambda: len(one.done) + len(one.failed) == 100)


def test_a_large_message_arrives_whole_and_small_ones_pass_it_by(world):
    one, other, third = world.process(), world.process(), world.process()
    body = secrets.token_bytes(1024) * 20 * 1024
    one.send(other, body)
    one.send(third, b"small")
    world.until(lambda: third.inbox)
    assert not other.inbox
    world.until(lambda: one.done and other.inbox)
    assert other.bodies == [body]


def turned_away(stranger):
    stranger.setblocking(False)
    try:
        return stranger.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x89USTDY\r\n"]
)
def test_a_stranger_is_turned_away_and_others_go_on(world, greeting):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    with closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.connect(other.address.socket_name)
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        world.until(lambda: turned_away(stranger))
    assert len(other.peers._channels) == 1
    one.send(other)
    world.until(lambda: len(one.done) == 2)


def test_a_peer_of_another_user_is_not_heard(world, monkeypatch, caplog):
    one, other = world.process(), world.process()
    name = other.address.socket_name
    monkeypatch.setattr(ProcessAddress, "socket_name", name)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.connect(name)
        world.passes()
        stranger.settimeout(DEADLINE_S)
        assert stranger.recv(100) == b""
    assert not other.peers._channels
    one.send(other)
    world.until(lambda: one.dead)
    assert "not this user" in caplog.text


def test_a_callback_at_the_turns_end_still_sends_within_it(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: one.done)
    other.on_deliver = lambda: other.peers.at_turn_end(lambda: other.send(one, b"late"))
    one.send(other)
    world.until(lambda: one.inbox)
    assert one.bodies == [b"late"]


def test_a_callback_at_the_turns_end_runs_without_a_turn_too(world):
    ran = []
    world.process().peers.at_turn_end(lambda: ran.append(True))
    world.until(lambda: ran)
