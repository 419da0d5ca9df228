"""Processes of several hosts over TCP; addresses of 127.0.0.0/8 are the hosts."""

import contextlib
import os
import socket
import struct
import time
from contextlib import closing

import pytest

from greenroom.actors.transport import admission, links
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.frames import HEADER, LOOSE
from greenroom.actors.transport.other_hosts import UnreachableError
from greenroom.actors.transport.sockets import tcp_listener
from tests.support.timing import check_within
from tests.transport.worlds import HERE, THERE

# Of struct tcp_info in linux/tcp.h: u32 tcpi_unacked, and u64 tcpi_bytes_sent.
UNACKED, BYTES_SENT = ("=I", 24), ("=Q", 200)


def counter(process, field):
    """Return what the kernel tells of a process's only connection with another host."""
    (connection,) = (each for each in process.links.connections() if each.source)
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    form, at = field
    return struct.unpack_from(form, info, at)[0]


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


def test_nothing_is_sent_loosely_to_another_host(world, hosts):
    _, one, _, other = hosts
    world.meet(one, other)
    assert not one.links.send_loosely(other.address, [b"lost with its connection"])
    [connection] = one.links.connections()
    connection.put(HEADER.pack(LOOSE, 1, 3, 0, 0) + b"bad")
    one.send(other, b"over the next connection")
    world.until(lambda: len(one.done) == 2)
    assert other.bodies == [b"hello", b"over the next connection"]


def test_nothing_but_the_hello_passes_through_the_gate(world, hosts):
    _, one, there, other = hosts
    world.meet(one, other)
    there.links.close()
    one.send(other, b"still")
    world.until(lambda: other.bodies == [b"hello", b"still"])


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
    world.meet(one, other)
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


@contextlib.contextmanager
def losing_all(port):
    """Listen there with a full backlog, so that the kernel drops who dials."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(closing(socket.socket()))
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind((THERE, port))
        silent.listen(0)
        for _ in range(4):
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex((THERE, port))
        yield


def test_a_host_that_does_not_answer_is_dead_after_some_seconds(world, port):
    _, one = world.host(HERE, port)

    def attempt():
        took_s = world.seconds_until_dead(one, ProcessAddress(THERE, port))
        assert took_s > 1
        return took_s

    with losing_all(port):
        check_within(2.5, attempt)


def test_a_lost_syn_is_sent_again_before_the_kernel_does_that(world, port):
    _, one = world.host(HERE, port)

    def attempt():
        begun = time.monotonic()
        with losing_all(port):
            tag = one.send(ProcessAddress(THERE, port))
            world.run_for(0.1)
        there, other = world.host(THERE, port)
        world.until(lambda: tag in one.done)
        for each in (there, other):
            each.links.close()
        world.until(lambda: not one.links.peers)
        return time.monotonic() - begun

    check_within(0.9, attempt)  # the kernel takes a second


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


def test_an_idle_connection_is_written_to_when_its_host_is_tried(world, hosts):
    admin, one, _, other = hosts
    one.send(other)
    world.until(lambda: one.done and counter(one, UNACKED) == 0, "it is idle")
    one.links.try_host(admin.address)  # of this host, which nothing here is connected with
    assert counter(one, UNACKED) == 0
    before = counter(one, BYTES_SENT)
    one.links.try_host(other.address)
    world.until(lambda: counter(one, BYTES_SENT) > before, "the kernel has to see it acknowledged")
    world.until(lambda: counter(one, UNACKED) == 0, "it is")
    one.send(other, b"and on")
    world.until(lambda: len(one.done) == 2)
    assert other.bodies == [b"hello", b"and on"]


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


def test_idle_connections_that_are_cut_again_and_again_are_dialed_again(world, hosts, monkeypatch):
    monkeypatch.setattr(links, "UNREACHABLE_AFTER_S", 0.2)
    monkeypatch.setattr(links, "HELD_S", 0.3)
    _, one, _, other = hosts
    one.send(other)
    other.send(one)
    world.until(lambda: one.done and other.done)
    for _ in range(4):  # both dial at once, so that there are two connections as a rule
        one.cut(other)
        world.until(lambda: not one.links.connections(other.address))
        world.until(lambda: one.links.connections(other.address))
        world.run_for(0.4)
    assert (one.gone, other.gone) == ([], [])
    world.meet(one, other)
    assert not one.dead


def test_the_oldest_stranger_makes_room_and_peers_still_get_in(world, hosts, port, caplog):
    _, one, there, other = hosts
    there.strangers.limit = 5
    idle = [socket.create_connection((THERE, port)) for _ in range(20)]
    world.until(lambda: len(there.strangers) == 5)
    world.meet(one, other)
    assert len([each for each in caplog.records if "this is the oldest" in each.getMessage()]) == 1
    for each in idle:
        each.close()
    world.until(lambda: not len(there.strangers))
    assert len(there.links.descriptors()) == 2  # the two that it listens with


def test_a_host_with_many_strangers_makes_room_for_others(world, hosts, port, caplog):
    _, _, there, _ = hosts
    there.strangers.limit = 4
    idle = []
    with contextlib.ExitStack() as ends:
        for source in ("127.0.0.7", *["127.0.0.8"] * 3, "127.0.0.9"):
            idle.append(socket.create_connection((THERE, port), source_address=(source, 0)))
            ends.enter_context(idle[-1])
            world.until(lambda: len(there.strangers) == min(len(idle), 4))
        world.until(lambda: caplog.messages)
        (line,) = caplog.messages
        host, number = idle[1].getsockname()
        assert line.startswith(f"refused the connection with {host}:{number}: ")
        assert "more than 4 connections are not authenticated, and this is the oldest" in line
    world.until(lambda: not len(there.strangers))


def test_refusals_that_are_not_said_are_counted(world, port, caplog, monkeypatch):
    monkeypatch.setattr(admission, "WINDOW_S", 1.0)
    world.host(THERE, port)
    for _ in range(7):
        with closing(socket.create_connection((THERE, port))) as stranger:
            stranger.sendall(b"GET /")
            world.run_for(0.01)
    world.until(lambda: "6 more connections were refused" in caplog.text)
    assert len(caplog.records) == 2


def test_what_is_handed_over_is_not_left_to_programs_that_are_started(world, hosts):
    _, one, _, other = hosts
    world.meet(one, other)
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
    assert one.links.admission.trouble_with(away) == ("nothing listens at its port", False)
    assert not one.links.admission.trouble_with(other.address)


def test_a_host_that_does_not_answer_is_out_of_reach_and_perhaps_alive(world, hosts, port):
    _, one, _, _ = hosts
    with closing(socket.socket()) as deaf:  # it listens, and says nothing
        deaf.bind(("127.0.0.98", port))
        deaf.listen()
        target = drawn_address("127.0.0.98", port)
        one.links.reach(target)
        world.until(lambda: one.gone == [target])
    assert one.certain == [False]
    assert "no answer within" in one.links.admission.trouble_with(target).reason


@pytest.mark.parametrize("kind", [UnreachableError, TimeoutError])
def test_a_dial_that_fails_ends_no_peer_that_has_dialed_meanwhile(world, hosts, monkeypatch, kind):
    here, _, there, _ = hosts
    others, failing = here.links.other_hosts, world.loop.create_future()

    async def reach(sock, _to, _purpose):
        with sock:
            await failing

    monkeypatch.setattr(others, "reach", reach)
    monkeypatch.setattr(links, "UNREACHABLE_AFTER_S", 0.0)  # so that the first failure tells
    here.send(there)
    world.meet(there, here)
    world.until(lambda: here.done, "the message left over the connection that came")
    options = {"is_certain": False} if kind is UnreachableError else {}
    failing.set_exception(kind("no answer", **options))
    world.passes()
    assert world.meet(there, here) == (there, here)
    assert here.gone == there.gone == []
    assert len(here.links.connections(there.address)) == 1


def test_a_process_outside_has_a_gate_of_its_own_for_those_who_answer_it(world, hosts):
    _, _, there, other = hosts
    listener = tcp_listener(HERE, 0)
    address = drawn_address(HERE, listener.getsockname()[1])
    outside = world.process(address=address, keys=KeyFiles(world.key_file()), gate=listener)
    outside.send(there)
    world.until(lambda: there.inbox)
    other.send(address, b"answer")  # it has never been dialed by that one
    world.until(lambda: outside.bodies == [b"answer"])
