"""Hosts whose connections are inside TLS."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
from contextlib import closing

import pytest

from greenroom.actors.transport.addresses import drawn_address
from greenroom.actors.transport.gate import ROUTED_SIZE, write_route
from greenroom.actors.transport.network import Tls, TlsError, tls_of
from tests.support.certificates import certificate
from tests.support.timing import check_within
from tests.transport.worlds import HERE, KEY, THERE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


def load(made):
    return Tls.load(made.certificate, made.key, made.ca)


@pytest.fixture(scope="module")
def here_tls(folder):
    return load(certificate(folder, "here"))


@pytest.fixture(scope="module")
def there_tls(folder):
    return load(certificate(folder, "there"))


@pytest.fixture
def hosts(world, port, here_tls, there_tls):
    return *world.host(HERE, port, tls=here_tls), *world.host(THERE, port, tls=there_tls)


def test_processes_talk_both_ways_inside_tls(world, hosts):
    here, one, there, other = hosts
    for number in range(1000):
        one.send(other, b"%d" % number)
        other.send(one, b"%d" % number)
    world.until(lambda: len(one.done) == len(other.done) == 1000)
    assert one.bodies == other.bodies == [b"%d" % number for number in range(1000)]
    here.send(there)
    there.send(one)
    world.until(lambda: here.done and there.done)


def test_large_messages_pass_while_the_other_end_is_slow_to_read(world, hosts):
    _, one, _, other = hosts
    one.send(other)
    world.until(lambda: one.done)
    (channel,) = other.links.connections(one.address)
    world.loop.remove_reader(channel.fileno())
    bodies = [secrets.token_bytes(1024) * 1024 * 5 for _ in range(3)]
    for body in bodies:
        one.send(other, body)
    world.run_for(0.2)
    world.loop.add_reader(channel.fileno(), channel.read)
    world.until(lambda: len(one.done) == 4)
    assert other.bodies == [b"hello", *bodies]


def test_a_cut_connection_loses_and_repeats_nothing(world, hosts):
    _, one, _, other = hosts
    for number in range(300):
        one.send(other, b"%d" % number)
        if number % 100 == 0:
            # One that is cut while it is being made counts as refused, which is another test's.
            world.until(lambda number=number: len(other.bodies) > number)
            one.cut()
    world.until(lambda: len(one.done) == 300)
    assert other.bodies == [b"%d" % number for number in range(300)]


def test_a_dead_process_is_dead_at_once(world, hosts, port):
    _, one, _, _ = hosts

    def attempt():
        return world.seconds_until_dead(one, drawn_address(THERE, port))

    check_within(0.5, attempt)


def refusals(caplog):
    return [
        record.getMessage().partition(": ")[::2]
        for record in caplog.records
        if record.levelname == "WARNING"
    ]


def refused_on_both_sides(world, one, other, caplog, said):
    """Send; return what each side said, by the address that it named."""
    one.send(other)
    world.until(lambda: one.dead)
    world.passes()
    assert not other.inbox
    lines = refusals(caplog)
    theirs = [reason for who, reason in lines if f" {HERE}:" in who]
    ours = [reason for who, reason in lines if f" {THERE}:" in who]
    assert (len(ours), len(theirs)) == (1, 1), lines
    for reason, word in zip((ours[0], theirs[0]), said, strict=True):
        assert word in reason
    return lines


def test_a_plain_host_is_refused_by_one_with_tls(world, port, there_tls, caplog):
    _, one = world.host(HERE, port)
    _, other = world.host(THERE, port, tls=there_tls)
    refused_on_both_sides(
        world, one, other, caplog, ("do both hosts use TLS", "do both hosts use TLS")
    )


def test_a_host_with_tls_is_refused_by_a_plain_one(world, port, here_tls, caplog):
    _, one = world.host(HERE, port, tls=here_tls)
    _, other = world.host(THERE, port)
    refused_on_both_sides(world, one, other, caplog, ("do both hosts use", "byte 0 is 0x16 (TLS?)"))


def test_a_certificate_of_another_ca_is_refused(world, port, folder, there_tls, caplog):
    other_ca = certificate(folder, "elsewhere", "another-ca")
    _, other = world.host(THERE, port, tls=there_tls)
    _, one = world.host(HERE, port, tls=load(other_ca))
    said = ("not one of --tls-ca", "does not believe this host's --tls-cert: unknown ca")
    refused_on_both_sides(world, one, other, caplog, said)


def test_a_certificate_that_the_other_end_does_not_believe_is_named(
    world, port, folder, here_tls, caplog
):
    strange = certificate(folder, "strange", "strange-ca")
    believes_ours = Tls.load(strange.certificate, strange.key, certificate(folder, "here").ca)
    _, other = world.host(THERE, port, tls=here_tls)
    _, one = world.host(HERE, port, tls=believes_ours)
    one.send(other)
    world.until(lambda: one.dead)
    trouble = one.links.trouble_with(other.address)
    assert trouble.is_refusal
    assert "do both hosts use TLS" not in trouble.reason


def test_who_shows_no_certificate_is_refused(world, hosts, port, caplog):
    """Although it holds the cluster key, or a recorded ROUTE."""
    _, _, _, other = hosts
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(socket.create_connection((THERE, port))) as stranger:
        stranger.sendall(write_route(other.address.number, KEY, os.urandom(32)))
        world.until(lambda: len(other.strangers) == 1)
        assert len(stranger.recv(ROUTED_SIZE)) == ROUTED_SIZE
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = context.wrap_bio(incoming, outgoing)
        with pytest.raises(ssl.SSLWantReadError):
            session.do_handshake()
        stranger.sendall(outgoing.read())
        stranger.setblocking(False)

        def answered():
            try:
                incoming.write(stranger.recv(10_000))
                session.do_handshake()
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            return True

        world.until(answered)
        stranger.sendall(outgoing.read())
        world.until(lambda: not len(other.strangers))
    assert "peer did not return a certificate" in caplog.text


def test_someone_between_with_a_certificate_of_the_ca_is_found_out(
    world, port, folder, here_tls, there_tls, monkeypatch, caplog
):
    """He ends TLS on both sides and passes everything on; what is proven names other certificates.

    Instead of a relay: the host there shows another certificate than the one it believes to show,
    which is what a relay makes it look like.
    """
    relay = load(certificate(folder, "relay"))
    victim = Tls(relay.dialing, relay.accepting, there_tls.own_certificate)
    _, one = world.host(HERE, port, tls=here_tls)
    _, other = world.host(THERE, port, tls=victim)
    one.send(other)
    world.until(lambda: "proof is wrong" in caplog.text)
    assert not other.inbox


def test_a_stranger_that_stops_within_tls_is_closed_in_time(world, hosts, port, caplog):
    _, _, _, other = hosts
    other.strangers.patience_s = 0.2
    with closing(socket.create_connection((THERE, port))) as idle:
        idle.sendall(write_route(other.address.number, KEY, os.urandom(32)))
        world.until(lambda: len(other.strangers) == 1)
        assert len(other.links.descriptors()) == 3
        world.until(lambda: len(other.strangers) == 0)
        assert len(other.links.descriptors()) == 2
    assert "was not authenticated within 0.2 s" in caplog.text


def test_files_that_cannot_be_used_are_named(folder, tmp_path):
    made = certificate(folder, "files")
    missing = tmp_path / "missing.pem"
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM")
    for certificate_file, key, ca, said in (
        (missing, made.key, made.ca, f"--tls-cert {missing}"),
        (garbage, made.key, made.ca, f"--tls-cert {garbage}"),
        (made.certificate, made.ca, made.ca, f"--tls-key {made.ca}"),
        (made.certificate, made.key, missing, f"--tls-ca {missing}"),
        (made.certificate, made.key, garbage, f"--tls-ca {garbage}"),
    ):
        with pytest.raises(TlsError) as error:
            Tls.load(certificate_file, key, ca)
        assert said in str(error.value)


def test_tls_needs_all_three_files(folder):
    environ = certificate(folder, "all").environ()
    assert tls_of({}) is None
    assert tls_of(environ) is not None
    for name in environ:
        with pytest.raises(TlsError, match="go together"):
            tls_of({**environ, name: ""})
