"""Processes of one host over Unix sockets, several of them on one loop."""

import errno
import os
import secrets
import socket
import sys
import time
from contextlib import closing

import pytest

from greenroom.actors.transport import links, session, sockets
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.frames import (
    DATA,
    DELAYED,
    HEADER,
    HELLO,
    SMALL_MESSAGE,
    FrameReader,
    FrameWriter,
    Hello,
)
from greenroom.actors.transport.session import DELAYED_MESSAGES
from tests.support.timing import check_within
from tests.transport.worlds import DEADLINE_S, HOST


def test_messages_arrive_in_order_once_and_are_acknowledged(world):
    one, other = world.process(), world.process()
    tags = [one.send(other, str(number).encode()) for number in range(1000)]
    world.until(lambda: len(one.done) == 1000)
    assert other.bodies == [str(number).encode() for number in range(1000)]
    assert one.done == tags
    assert {address for address, _ in other.inbox} == {one.address}


@pytest.mark.parametrize("is_taken_at_once", [False, True])
def test_what_is_sent_loosely_keeps_its_place_among_all_other_messages(world, is_taken_at_once):
    one, other = world.process(), world.process()
    other.takes = lambda: is_taken_at_once
    assert not one.links.send_loosely(other.address, [b"no connection yet"])
    one.send(other, b"0")
    world.until(lambda: one.done)
    loose = 0
    for number in range(1, 200):
        body = b"%d" % number
        if number % 3 and one.links.send_loosely(other.address, [body]):
            loose += 1
        else:
            one.send(other, body)
        if number % 7 == 0:
            world.passes(2)
    assert loose
    world.until(lambda: len(other.inbox) == 200)
    assert other.bodies == [b"%d" % number for number in range(200)]
    assert len(one.done) == 200 - loose, "the others alone are acknowledged"
    assert bool(other.taken) == is_taken_at_once


def test_no_more_than_some_loose_messages_are_handled_before_the_loop_goes_on(world):
    one, other = world.pair()
    other.takes = lambda: True
    delivered = []
    other.on_deliver = lambda: delivered.append(len(other.taken))
    count = links.MOST_AT_ONCE + 2
    for number in range(count):
        assert one.links.send_loosely(other.address, [b"%d" % number])
    world.until(lambda: len(other.bodies) == count + 1)
    assert delivered == [links.MOST_AT_ONCE], "the others wait for the delivery"
    assert other.bodies[1:] == [b"%d" % number for number in range(count)]


def test_what_is_large_or_finds_the_socket_full_is_not_sent_loosely(world):
    one, other = world.pair()
    assert not one.links.send_loosely(other.address, [b"x" * (SMALL_MESSAGE + 1)])
    while one.links.send_loosely(other.address, [b"x" * SMALL_MESSAGE]):
        pass
    tag = one.send(other, b"behind it")
    world.until(lambda: tag in one.done)
    assert other.bodies[-1] == b"behind it"


def test_answers_use_the_connection_that_the_question_came_over(world):
    one, other = world.process(), world.process()
    one.send(other)
    world.until(lambda: other.inbox)
    other.send(one, b"answer")
    world.until(lambda: one.inbox)
    assert len(one.links.connections()) == len(other.links.connections()) == 1


def test_two_that_dial_each_other_at_once_keep_both_connections_and_no_more(world):
    one, other = world.process(), world.process()
    for _ in range(10):
        tags = one.send(other), other.send(one)
        world.until(lambda tags=tags: tags[0] in one.done and tags[1] in other.done)
    assert len(one.inbox) == len(other.inbox) == 10
    assert len(one.links.connections(other.address)) == 2
    assert len(other.links.connections(one.address)) == 2


def test_many_patient_messages_do_not_wait_for_the_time_to_acknowledge_them(world, monkeypatch):
    monkeypatch.setattr("greenroom.actors.transport.links.ACK_DELAY_S", 3600)
    one, other = world.process(), world.process()
    for _ in range(DELAYED_MESSAGES):
        one.send(other, delays_ack=True)
    world.until(lambda: len(one.done) == DELAYED_MESSAGES)


def test_what_a_dead_process_had_not_acknowledged_is_handed_back_patient_or_not(world):
    one, other = world.pair()
    tags = [one.send(other, delays_ack=True) for _ in range(3)]
    other.links.close()
    world.until(lambda: one.dead)
    assert one.dead == tags


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


def test_the_death_of_an_idle_peer_is_noticed_and_nothing_is_kept(world):
    one, other = world.pair()
    other.links.close()
    world.until(lambda: one.gone)
    assert not one.links.connections()
    assert one.links.peers == 0


def test_messages_pass_to_a_new_process_at_the_same_address(world):
    address = ProcessAddress(HOST, 23)
    one, other = world.process(), world.process(address=address)
    world.meet(one, other)
    other.links.close()
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


def test_a_process_without_descriptors_dials_when_it_has_some(world, monkeypatch):
    monkeypatch.setattr(links, "SHORTAGE_RETRY_S", 0.01)
    one, other = world.process(), world.process()
    failures = [OSError(errno.EMFILE, "too many open files")] * 2
    local_socket = sockets.local_socket

    def scarce():
        if failures:
            raise failures.pop()
        return local_socket()

    monkeypatch.setattr(sockets, "local_socket", scarce)
    world.meet(one, other)
    assert other.bodies == [b"hello"]
    assert one.links.shortage.lasted_s(world.loop.time()) == 0.0


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


def test_a_large_message_arrives_whole_and_small_ones_to_others_alone_pass_it_by(world):
    one, other, third = world.process(), world.process(), world.process()
    body = secrets.token_bytes(1024) * 20 * 1024
    one.send(other, body)
    one.send(other, b"after it")
    one.send(third, b"small")
    world.until(lambda: third.inbox)
    assert not other.inbox
    world.until(lambda: one.done and len(other.inbox) == 2)
    assert other.bodies == [body, b"after it"]


def turned_away(stranger):
    stranger.setblocking(False)
    try:
        return stranger.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


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
    assert not other.links.connections()
    one.send(other)
    world.until(lambda: one.dead)
    assert "not this user" in caplog.text


def test_a_callback_at_the_turns_end_still_sends_within_it(world):
    one, other = world.pair()
    other.on_deliver = lambda: other.links.turn_end.add(lambda: other.send(one, b"late"))
    one.send(other)
    world.until(lambda: one.inbox)
    assert one.bodies == [b"late"]


def test_a_callback_at_the_turns_end_runs_without_a_turn_too(world):
    ran = []
    process = world.process()
    process.links.turn_end.add(lambda: 1 / 0)
    process.links.turn_end.add(lambda: ran.append(True))
    world.until(lambda: ran)
    assert [type(error) for error in process.raised] == [ZeroDivisionError]


def test_what_ends_the_loops_run_at_the_turns_end_keeps_nothing_from_being_sent(world):
    one, other = world.pair()
    one.links.turn_end.add(lambda: sys.exit(3))
    one.links.turn_end.add(lambda: one.send(other, b"put off with it"))
    with pytest.raises(SystemExit):
        world.passes()
    one.links.turn_end.add(lambda: one.send(other, b"put off later"))
    world.until(lambda: len(other.inbox) == 3)
    assert other.bodies[1:] == [b"put off with it", b"put off later"]


class Raw:
    """The other end of a process's connection, byte by byte."""

    def __init__(self, process):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(process.address.socket_name)
        self.address = drawn_address(HOST)
        self.number = 0

    def hello(self, process=5, session=7, about=0, received=0):
        hello = Hello(self.address.text, "unknown", process, session, about, received)
        self.sock.sendall(hello.frame())

    def message(self, body=b"question", acknowledged=0):
        self.number += 1
        self.sock.sendall(HEADER.pack(DATA, 1, len(body), self.number, acknowledged) + body)

    def close(self):
        self.sock.close()


def test_what_a_handler_sends_leaves_in_one_write(world):
    process = world.process()
    with closing(Raw(process)) as raw:
        raw.hello()
        world.until(lambda: process.links.connections(raw.address))
        process.on_deliver = lambda: [process.send(raw, b"answer") for _ in range(50)]
        raw.message()
        world.until(lambda: process.inbox)
        frames = list(FrameReader().frames(raw.sock.recv(65536)))
        assert [each[4] for each in frames if each[0] == DATA] == [b"answer"] * 50


def test_what_its_sender_has_joined_leaves_before_the_handler_is_done(world):
    process, heard = world.process(), []
    with closing(Raw(process)) as raw:
        raw.hello()
        world.until(lambda: process.links.connections(raw.address))
        raw.sock.recv(65536)  # the hello

        def handle():
            process.send(raw, b"answer", delays_ack=True)
            heard.extend(FrameReader().frames(raw.sock.recv(65536)))

        process.on_deliver = handle
        raw.message()
        world.until(lambda: process.inbox)
    assert [each[4] for each in heard if each[0] == DELAYED] == [b"answer"]


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), HEADER.pack(DATA, 1, 5, 1, 0) + b"early"],
)
def test_a_stranger_is_turned_away_and_others_go_on(world, greeting):
    one, other = world.pair()
    with closing(Raw(other)) as stranger:
        stranger.sock.sendall(greeting)
        stranger.sock.shutdown(socket.SHUT_WR)
        stranger.sock.setblocking(False)
        world.until(lambda: turned_away(stranger.sock))
    assert len(other.links.connections()) == 1
    one.send(other)
    world.until(lambda: len(one.done) == 2)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (HEADER.pack(DATA, 1, 4, 3, 0) + b"late", "message 3 where 1 is due"),
        (HEADER.pack(DATA, 1, 0, 1, 9), "acknowledges message 9 of 0"),
        (HEADER.pack(71, 0, 0, 0, 0), "a frame of kind 71"),
        (FrameWriter().ack(0)[:-1] + b"\1", "acknowledges message 1 of 0"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_refused_with_the_reason(world, caplog, sent, said):
    process = world.process()
    with closing(Raw(process)) as raw:
        raw.hello()
        raw.sock.sendall(sent)
        world.until(lambda: said in caplog.text)
        raw.sock.setblocking(False)
        world.until(lambda: turned_away(raw.sock))
    assert not process.inbox


def test_a_new_process_at_an_address_starts_again_and_gets_nothing_for_the_old(world):
    process = world.process()
    with closing(Raw(process)) as old, closing(Raw(process)) as new:
        new.address = old.address
        old.hello(process=1, session=1)
        old.message(b"of the old")
        world.until(lambda: process.inbox)
        tag = process.send(old, b"for the old")
        world.passes()
        new.hello(process=2, session=2)
        new.message(b"of the new")
        world.until(lambda: len(process.inbox) == 2)
        assert process.bodies == [b"of the old", b"of the new"]
        assert process.dead == [tag]
        assert (process.gone, process.certain) == ([old.address], [False])


def test_what_arrives_twice_is_delivered_once(world):
    process = world.process()
    with closing(Raw(process)) as raw, closing(Raw(process)) as again:
        again.address = raw.address
        for each in (raw, again):
            each.hello()
            each.message(b"first")
            each.message(b"second")
        again.message(b"third")
        world.until(lambda: len(process.inbox) == 3)
    assert process.bodies == [b"first", b"second", b"third"]


def test_a_peer_that_does_not_read_delays_no_other_and_gets_all_later(world):
    sender, prompt = world.process(), world.process()
    with closing(Raw(sender)) as stuck:
        stuck.hello()
        world.until(lambda: sender.links.connections(stuck.address))
        for _ in range(100):
            sender.send(stuck, bytes(100_000))

        def attempt():
            begun, before = time.monotonic(), len(prompt.inbox)
            sender.send(prompt, b"quick")
            world.until(lambda: len(prompt.inbox) > before)
            return time.monotonic() - begun

        check_within(0.5, attempt)
        reader, bodies = FrameReader(), 0
        stuck.sock.setblocking(False)
        while bodies < 100:
            world.passes(1)
            try:
                received = stuck.sock.recv(1_000_000)
            except BlockingIOError:
                continue
            for kind, buffers, number, _, body in reader.frames(received):
                if kind != HELLO and reader.message(kind, buffers, number, body):
                    bodies += 1
                    stuck.sock.send(FrameWriter().ack(number))


def test_what_waits_for_a_peer_has_a_limit(world, monkeypatch):
    monkeypatch.setattr(session, "MAX_KEPT", 50_000)
    one, other = world.process(), world.process()
    for _ in range(100):
        one.send(other, bytes(5000))
    assert len(one.failed) > 50
    world.until(lambda: len(one.done) + len(one.failed) == 100)


def test_a_process_whose_backlog_is_full_delays_no_other_and_is_reached_later(world, monkeypatch):
    sender, prompt = world.process(), world.process()
    address = drawn_address(HOST)
    with closing(sockets.local_socket()) as busy:
        busy.bind(address.socket_name)
        busy.listen(0)
        filler = socket.socket(socket.AF_UNIX)
        filler.connect(address.socket_name)
        sender.send(address)
        sender.send(prompt)
        world.until(lambda: sender.done)
        assert not sender.dead
        with filler, busy.accept()[0]:
            world.until(lambda: sender.links.connections(address))
    world.until(lambda: sender.dead, "nothing listens there any more")


def test_a_process_that_was_abandoned_hears_of_it_and_what_was_never_written_still_arrives(world):
    process = world.process()
    with closing(Raw(process)) as first, closing(Raw(process)) as later:
        later.address = first.address
        first.hello(session=1)
        first.message(b"before")
        world.until(lambda: process.inbox)
        written = process.send(first, b"written")
        world.passes()
        later.hello(session=2)
        later.message(b"after")
        world.until(lambda: len(process.inbox) == 2)
        assert (process.gone, process.certain) == ([first.address], [False])
        assert process.dead == [written]
