"""Processes of several hosts over TCP; addresses of 127.0.0.0/8 are the hosts."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import closing

import pytest

from greenroom.actors.transport import admission
from greenroom.actors.transport import admission as strangers
from greenroom.actors.transport import links as remote
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.gate import write_route
from greenroom.actors.transport.handshake import MAGIC
from greenroom.actors.transport.network import Network
from greenroom.actors.transport.sockets import tcp_listener
from tests.support.timing import check_within
from tests.transport.worlds import DEADLINE_S, HERE, KEY, THERE


@pytest.fixture
def hosts(world, port):
    return *world.host(HERE, port), *world.host(THERE, port)


def test_processes_of_two_hosts_talk_both_ways_over_one_connection(world, hosts):
    _, one, _, other = hosts
    tags = [one.send(other, b"%d" % number) for number in range(1000)]
    world.until(lambda: len(one.done) == 1000)
    assert (one.done, other.bodies) == (tags, [b"%d" % number for number in range(1000)])
    other.send(one, b"answer")
    world.until(lambda: one.bodies == [b"answer"])
    assert len(one.links.connections()) == len(other.links.connections()) == 1


def test_admins_and_their_actors_reach_each_other(world, hosts):
    here, one, there, other = hosts
    for sender, target in (
        (here, there),
        (there, here),
        (one, there),
        (other, here),
        (here, other),
    ):
        sender.send(target)
        world.until(lambda p=target, a=sender.address: a in [each for each, _ in p.inbox])


def test_nothing_but_the_hello_passes_through_the_gate(world, hosts):
    _, one, there, other = hosts
    one.send(other)
    world.until(lambda: one.done)
    there.links.close()
    one.send(other, b"still")
    world.until(lambda: other.bodies == [b"hello", b"still"])


def test_a_large_message_arrives_whole(world, hosts):
    _, one, _, other = hosts
    body = secrets.token_bytes(1024) * 20 * 1024
    one.send(other, body)
    world.until(lambda: one.done)
    assert other.bodies == [body]


def test_a_process_that_is_not_there_is_dead_at_once(world, hosts, port):
    _, one, _, other = hosts

    def attempt():
        nobody = drawn_address(THERE, port)
        took_s = world.seconds_until_dead(one, nobody)
        assert one.gone[-1] == nobody
        return took_s

    check_within(0.5, attempt)
    assert one.links.peers == 0
    other.links.close()
    tag = one.send(other)
    world.until(lambda: tag in one.dead)


def test_a_process_that_dies_behind_an_open_connection_is_dead(world, hosts):
    _, one, _, other = hosts
    one.send(other)
    world.until(lambda: one.done)
    other.links.close()
    tag = one.send(other)
    world.until(lambda: one.dead)
    assert one.dead == [tag]
    assert one.gone == [other.address]


def test_a_host_without_a_system_is_dead_at_once_and_there_is_a_line(world, port, caplog):
    _, one = world.host(HERE, port)

    def attempt():
        return world.seconds_until_dead(one, ProcessAddress(THERE, port))

    check_within(0.5, attempt)
    attempt()
    (record,) = caplog.records
    assert record.getMessage() == f"gave up {THERE}:{port}: nothing listens at its port"


def test_a_host_that_does_not_answer_is_dead_after_some_seconds(world, port, monkeypatch):
    _, one = world.host(HERE, port)
    with closing(socket.socket()) as silent:  # listens, and its backlog is full
        silent.bind((THERE, port))
        silent.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex((THERE, port))

        def attempt():
            took_s = world.seconds_until_dead(one, ProcessAddress(THERE, port))
            assert took_s > 1
            return took_s

        check_within(2.5, attempt)
        for filler in fillers:
            filler.close()


def test_a_cut_connection_loses_and_repeats_nothing(world, hosts):
    _, one, _, other = hosts
    for number in range(600):
        one.send(other, b"%d" % number)
        if number % 100 == 0:
            world.until(lambda number=number: len(other.bodies) > number, "it is connected")
            one.cut()
    world.until(lambda: len(one.done) == 600)
    assert other.bodies == [b"%d" % number for number in range(600)]
    assert not one.dead


def test_both_dialing_at_once_lose_and_repeat_nothing(world, port):
    for _ in range(10):
        _, one, _, other = *world.host(HERE, port), *world.host(THERE, port)
        for number in range(10):
            one.send(other, b"%d" % number)
            other.send(one, b"%d" % number)
        world.until(lambda a=one, b=other: len(a.done) == len(b.done) == 10)
        assert one.bodies == other.bodies == [b"%d" % number for number in range(10)]
        for process in world.processes:
            process.links.close()
        world.processes.clear()


def test_one_line_on_each_side_says_that_the_keys_differ(world, port, caplog):
    _, one = world.host(HERE, port)
    there, _ = world.host(THERE, port, key=bytes(32))
    begun = time.monotonic()
    tag = one.send(there)
    world.until(lambda: one.dead)
    assert time.monotonic() - begun < 4
    assert one.dead == [tag]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    theirs = [line for line in lines if line.endswith("it does not hold this cluster's key")]
    ours = [line for line in lines if "it may hold another cluster's key" in line]
    assert len(theirs) == len(ours) == 1, lines
    assert theirs[0].startswith(f"refused the connection with {HERE}:")
    assert ours[0].startswith(f"refused the connection with {THERE}:{port}:")
    assert len(lines) == 2
    assert not there.inbox


def said_by(stranger, world, sent, *, port, caplog):
    """Send bytes to the gate; return the one line that it says."""
    caplog.clear()
    stranger.connect((THERE, port))
    stranger.sendall(sent)
    if not sent:
        stranger.shutdown(socket.SHUT_WR)
    world.until(lambda: caplog.records)
    (record,) = caplog.records
    host, port = stranger.getsockname()
    assert f"with {host}:{port}:" in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "it ended after 0 bytes, without a ROUTE"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "byte 0 is 0x47 (HTTP or other text?)"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "byte 0 is 0x16 (TLS?)"),
        (os.urandom(5000).replace(b"\x89", b"\x88"), "not our protocol: byte 0"),
        (MAGIC + b"\0\0" + bytes(100), "version 0, this end version 2"),
        (MAGIC + b"\0\2\2" + bytes(72), "does not hold this cluster's key"),
        (MAGIC + b"\0\2\1\0\x20" + bytes(32), "kind is remote, this end's is route"),
    ],
)
def test_a_stranger_is_turned_away_with_one_line(world, hosts, port, caplog, sent, said):
    _, one, there, other = hosts
    one.send(other)
    world.until(lambda: one.done)
    with closing(socket.socket()) as stranger:
        assert said in said_by(stranger, world, sent, port=port, caplog=caplog)
        if b"\0\0" in sent[8:10]:
            assert stranger.recv(100) == MAGIC + b"\0\2"
        assert not there.strangers
    one.send(other)
    world.until(lambda: len(one.done) == 2)


def test_a_recorded_route_leads_to_a_handshake_that_fails(world, hosts, port, caplog):
    _, one, _, other = hosts
    recorded = []

    with closing(socket.socket()) as spy:  # takes the place of the host's port, and passes bytes on
        spy.bind(("127.0.0.4", port))
        spy.listen()
        one.links.reach(ProcessAddress("127.0.0.4", other.address.number))
        spy.setblocking(False)
        victim = []

        def caught():
            if not victim:
                try:
                    victim.append(spy.accept()[0])
                except BlockingIOError:
                    return False
                victim[0].setblocking(False)
            try:
                recorded.append(victim[0].recv(1000))
            except BlockingIOError:
                return False
            return True

        world.until(caught)
        victim[0].close()
    (route,) = recorded
    caplog.clear()
    with closing(socket.socket()) as thief:
        thief.connect((THERE, port))
        thief.sendall(route + MAGIC + b"\0\2\1\0\x20" + bytes(32) + b"\0\x50" + bytes(80))
        world.until(lambda: any("proof is wrong" in each.getMessage() for each in caplog.records))
        assert not other.strangers
    assert not other.inbox


def test_a_stranger_that_says_nothing_is_closed_in_time(world, hosts, port, caplog):
    _, _, there, _ = hosts
    there.strangers.patience_s = 0.2
    with closing(socket.socket()) as idle:
        idle.connect((THERE, port))
        world.until(lambda: len(there.strangers) == 1)
        world.until(lambda: len(there.strangers) == 0)
        idle.settimeout(DEADLINE_S)
        assert idle.recv(10) == b""
    assert "was not authenticated within 0.2 s" in caplog.text


def test_a_stranger_that_stops_in_the_handshake_is_closed_in_time(world, hosts, port, caplog):
    """Behind the gate, which only a holder of the key, or of a recorded ROUTE, gets through."""
    _, _, _, other = hosts
    other.strangers.patience_s = 0.2
    with closing(socket.socket()) as idle:
        idle.connect((THERE, port))
        idle.sendall(write_route(other.address.number, KEY, os.urandom(32)))
        world.until(lambda: len(other.strangers) == 1)
        world.until(lambda: len(other.strangers) == 0)
        assert not other.links.connections()
    assert "was not authenticated within 0.2 s" in caplog.text


def test_the_oldest_stranger_makes_room_and_peers_still_get_in(world, hosts, port, caplog):
    _, one, there, other = hosts
    there.strangers.limit = 5
    idle = [socket.create_connection((THERE, port)) for _ in range(20)]
    world.until(lambda: len(there.strangers) == 5)
    one.send(other)
    world.until(lambda: one.done)
    assert len([each for each in caplog.records if "this is the oldest" in each.getMessage()]) == 1
    for each in idle:
        each.close()
    world.until(lambda: not len(there.strangers))
    assert len(there.links.descriptors()) == 2  # the two that it listens with


def test_what_was_begun_under_a_key_that_is_replaced_goes_on_under_the_new_one(
    world, port, monkeypatch
):
    monkeypatch.setattr(remote, "LOOK_AT_KEYS_S", 0.1)
    new = bytes(32)
    one_keys, other_keys = [KEY], [KEY, new]
    pairs = []
    for address, keys in ((HERE, one_keys), (THERE, other_keys)):
        network = Network(keys=lambda keys=keys: keys)
        world.process(address=ProcessAddress(address, port), network=network)
        pairs.append(world.process(address=drawn_address(address, port), network=network))
    one, other = pairs
    one.send(other, b"first")
    world.until(lambda: one.done)
    before = one.links.connections(other.address)[0]
    one_keys[:] = [new, KEY]
    other_keys[:] = [new]
    tags = [one.send(other, b"%d" % number) for number in range(100)]
    world.until(lambda: before.is_closed, "the connection is ended")
    world.until(lambda: one.done[1:] == tags)
    assert (one.gone, other.gone) == ([], [])
    one_keys[:] = [KEY]  # that of a host which has not got the new one
    world.until(lambda: one.gone and other.gone, "both are told")
    never = one.send(other, b"never")
    world.until(lambda: one.dead == [never])
    assert b"never" not in other.bodies


def test_refusals_that_are_not_said_are_counted(world, port, caplog, monkeypatch):
    for module in (admission, strangers):
        monkeypatch.setattr(module, "WINDOW_S", 1.0)
    world.host(THERE, port)
    for _ in range(7):
        with closing(socket.create_connection((THERE, port))) as stranger:
            stranger.sendall(b"GET /")
            world.run_for(0.01)
    world.until(lambda: "6 more connections were refused" in caplog.text)
    assert len(caplog.records) == 2


def test_what_is_handed_over_is_not_left_to_programs_that_are_started(world, hosts):
    _, one, _, other = hosts
    one.send(other)
    world.until(lambda: one.done)
    assert not os.get_inheritable(other.links.connections(one.address)[0].fileno())


def test_a_peer_of_an_unbound_host_is_dead_with_a_line(world, port, caplog):
    unbound = world.process()
    unbound.send(ProcessAddress(THERE, port))
    world.until(lambda: unbound.dead)
    assert "this one is not bound" in caplog.text


def test_only_the_admin_listens_on_tcp_and_on_its_address_alone(world, hosts, port):
    def listening():
        found = set()
        with open("/proc/net/tcp") as table:
            for line in list(table)[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, number = local.partition(":")
                if state == "0A" and int(number, 16) == port:
                    found.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
        return found

    assert listening() == {HERE, THERE}


def test_a_process_that_is_reached_for_is_known_to_be_dead_or_only_out_of_reach(world, hosts, port):
    _, one, _, other = hosts
    one.links.reach(other.address)
    world.until(lambda: one.links.connections(other.address))
    nobody = drawn_address(THERE, port)
    one.links.reach(nobody)  # its host says that nobody has the number
    world.until(lambda: one.gone == [nobody])
    away = drawn_address("127.0.0.99", port)
    one.links.reach(away)  # its kernel says that nothing listens there
    world.until(lambda: one.gone == [nobody, away])
    assert one.certain == [True, True]
    assert one.links.trouble_with(away) == ("nothing listens at its port", False)
    assert not one.links.trouble_with(other.address)


def test_a_host_that_does_not_answer_is_out_of_reach_and_perhaps_alive(world, hosts, port):
    _, one, _, _ = hosts
    with closing(socket.socket()) as deaf:  # it listens, and says nothing
        deaf.bind(("127.0.0.98", port))
        deaf.listen()
        target = drawn_address("127.0.0.98", port)
        one.links.reach(target)
        world.until(lambda: one.gone == [target])
    assert one.certain == [False]
    assert "no answer within" in one.links.trouble_with(target).reason


def test_a_process_outside_has_a_gate_of_its_own_for_those_who_answer_it(world, hosts):
    _, _, there, other = hosts
    listener = tcp_listener(HERE, 0)
    address = drawn_address(HERE, listener.getsockname()[1])
    outside = world.process(address=address, network=Network(keys=lambda: (KEY,)), gate=listener)
    outside.send(there)
    world.until(lambda: there.inbox)
    other.send(address, b"answer")  # it has never been dialed by that one
    world.until(lambda: outside.bodies == [b"answer"])
