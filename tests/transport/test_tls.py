"""Who is let in at a host's port: hosts with the cluster file, and no one else."""

import asyncio
import contextlib
import datetime as dt
import errno
import os
import re
import secrets
import socket
import ssl
import subprocess
import threading
import time
from contextlib import closing

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from greenroom.actors.transport import links, other_hosts
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.cluster_key import KeyFiles, key_id, make_key
from greenroom.actors.transport.frames import DATA, HEADER, Hello
from greenroom.actors.transport.other_hosts import MESSAGES
from greenroom.actors.transport.tls import TlsStream
from greenroom.core.cluster.key_rotation import KeyIds
from tests.support.programs import needed
from tests.transport.worlds import DEADLINE_S, HERE, THERE, key_of


def openssl(*arguments):
    return subprocess.run(
        [needed("openssl"), *map(str, arguments)],
        input=b"\1" * 9,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )


def dial_by_openssl(world, place, *arguments):
    """Run s_client against a port while the world runs; return what it printed."""
    printed = []

    def dial():
        result = openssl("s_client", "-connect", place, "-quiet", *arguments)
        printed.append((result.stdout + result.stderr).decode(errors="replace"))

    thread = threading.Thread(target=dial)
    thread.start()
    world.until(lambda: not thread.is_alive())
    thread.join()
    return printed[0] if printed else ""


def expired_file(folder):
    """Make a cluster file that was valid once."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "expired")])
    began = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, began, began.replace(year=2002))
    path = folder / "expired.key"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + made.sign(key, SHA256()).public_bytes(Encoding.PEM)
    )
    path.chmod(0o600)
    return path


def wanted(number, purpose=MESSAGES):
    """Return what a dialer says to the gate."""
    return number.to_bytes(8, "big") + bytes([purpose])


def refusals(caplog):
    return [each for each in caplog.messages if each.startswith("refused the connection")]


def test_nothing_is_said_in_the_clear(world, hosts, port):
    """A spy between two hosts passes all bytes on, and reads nothing of a message."""
    _, one, _, other = hosts
    secret = secrets.token_bytes(1000)
    heard = bytearray()
    spy = socket.create_server(("127.0.0.4", port))
    spy.settimeout(DEADLINE_S)

    def relay():
        with spy, spy.accept()[0] as near, socket.create_connection((THERE, port)) as far:
            ends = {near: far, far: near}
            near.settimeout(0.01)
            far.settimeout(0.01)
            while True:
                for end, opposite in ends.items():
                    with contextlib.suppress(TimeoutError):
                        piece = end.recv(65536)
                        if not piece:
                            return
                        heard.extend(piece)
                        opposite.sendall(piece)

    thread = threading.Thread(target=relay)
    thread.start()
    # The process behind the spy says who it is, and that is not who was dialed.
    one.send(ProcessAddress("127.0.0.4", other.address.number), secret)
    world.until(lambda: one.dead)
    thread.join(DEADLINE_S)
    assert len(heard) > 1000
    assert secret not in heard
    assert THERE.encode() not in heard
    assert not other.inbox


def test_large_messages_pass_while_the_other_end_is_slow_to_read(world, hosts):
    _, one, _, other = hosts
    world.meet(one, other)
    (connection,) = other.links.connections(one.address)
    world.loop.remove_reader(connection.fileno())
    bodies = [secrets.token_bytes(1024) * 1024 * 5 for _ in range(3)]
    for body in bodies:
        one.send(other, body)
    world.run_for(0.2)
    world.loop.add_reader(connection.fileno(), connection.read)
    world.until(lambda: len(one.done) == 4)
    assert other.bodies == [b"hello", *bodies]


def test_another_clusters_host_is_refused_with_one_line_on_each_side(world, port, caplog):
    _, one = world.host(HERE, port)
    there, _ = world.host(THERE, port, cluster=1)
    begun = time.monotonic()
    tag = one.send(there)
    world.until(lambda: one.dead == [tag])
    assert time.monotonic() - begun < 4
    world.until(lambda: len(refusals(caplog)) == 2)
    ours, theirs = sorted(refusals(caplog), key=lambda line: f" {HERE}:" in line)
    assert f" {THERE}:{port}: its certificate is not this cluster's" in ours
    assert f" {HERE}:" in theirs
    assert "it refuses this host's certificate" in theirs
    for line in (ours, theirs):
        assert "another cluster's file, or a newer one since `greenroom rotate-key`" in line
    assert one.links.admission.trouble_with(there.address).is_refusal
    assert not there.inbox


def test_an_expired_certificate_is_refused(world, port, caplog, tmp_path):
    _, one = world.host(HERE, port, keys=KeyFiles(expired_file(tmp_path)))
    there, _ = world.host(THERE, port, keys=KeyFiles(tmp_path / "expired.key"))
    one.send(there)
    world.until(lambda: one.dead)
    assert "its certificate is refused: certificate has expired" in caplog.text
    assert not there.inbox


def test_a_certificate_that_the_clusters_key_has_signed_is_refused(world, hosts, port, tmp_path):
    """The cluster's own certificate is taken, and no other one."""
    cluster = world.key_file()
    request, key, made = (tmp_path / f"signed.{end}" for end in ("csr", "key", "pem"))
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", "/CN=signed", "-keyout", key, "-out", request),
    )
    openssl("x509", "-req", "-in", request, "-CA", cluster, "-CAkey", cluster, "-out", made)
    assert made.exists()
    dial_by_openssl(world, f"{THERE}:{port}", "-cert", made, "-key", key)
    assert not hosts[2].inbox
    assert not hosts[2].links.connections()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-tls1_2"], "unsupported protocol"),
        ([], "peer did not return a certificate"),
        (["-cert", "stranger", "-key", "stranger"], "its certificate is not this cluster's"),
        (["-cert", "cluster", "-key", "cluster"], None),
    ],
)
def test_openssl_gets_in_with_the_cluster_file_alone(
    world, hosts, port, arguments, said, caplog, tmp_path
):
    files = {"stranger": world.key_file(1), "cluster": world.key_file()}
    named = [str(files.get(each, each)) for each in arguments]
    dial_by_openssl(world, f"{THERE}:{port}", *named)
    if said is None:  # it named no process: there is none with the number 0x0101...
        assert not refusals(caplog)
    else:
        world.until(lambda: said in caplog.text)
    assert not len(hosts[2].strangers)


def test_a_connection_that_ends_before_it_proved_itself_is_lost_and_not_refused(
    world, hosts, port, caplog
):
    with closing(socket.create_connection((THERE, port))) as stranger:
        host, number = stranger.getsockname()
    world.until(lambda: caplog.messages)
    message = f"lost the connection, not yet authenticated, with {host}:{number}: "
    assert [each.startswith(message) for each in caplog.messages] == [True]


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(5000).replace(b"\x16", b"\0")]
)
def test_a_stranger_is_turned_away_with_one_line_and_others_go_on(world, hosts, port, caplog, sent):
    _, one, there, other = hosts
    world.meet(one, other)
    with closing(socket.create_connection((THERE, port))) as stranger:
        stranger.sendall(sent)
        world.until(lambda: refusals(caplog))
        assert len(refusals(caplog)) == 1
        assert not len(there.strangers)
    one.send(other)
    world.until(lambda: len(one.done) == 2)


class Member:
    """Someone with the cluster file, who speaks to a port by the ssl module alone."""

    def __init__(self, world, port):
        tls = KeyFiles(world.key_file()).tls()
        self._world = world
        self.sock = socket.create_connection((THERE, port))
        self.sock.setblocking(False)
        self._context = tls.dialing
        self.secure()

    def secure(self):
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.session = self._context.wrap_bio(self.incoming, self.outgoing)
        self._do(self.session.do_handshake)

    def say(self, said):
        self.session.write(said)
        self.sock.sendall(self.outgoing.read())

    def hear(self, size):
        return self._do(lambda: self.session.read(size))

    def _do(self, action):
        results = []

        def done():
            try:
                results.append(action())
            except ssl.SSLWantReadError:
                with contextlib.suppress(BlockingIOError):
                    self.incoming.write(self.sock.recv(100_000))
            self.sock.sendall(self.outgoing.read())
            return bool(results)

        self._world.until(done)
        return results[0]


def test_the_gate_says_whether_there_is_such_a_process(world, hosts, port):
    for number, answer in ((hosts[3].address.number, b"\1"), (port, b"\1"), (70_000, b"\0")):
        member = Member(world, port)
        member.say(wanted(number))
        assert member.hear(10) == answer
        member.sock.close()


@pytest.mark.parametrize("wants", ["nothing yet", "a process", "the gate's own"])
def test_a_member_that_leaves_at_the_gate_is_lost_and_not_refused(
    world, hosts, port, caplog, wants
):
    _, _, there, other = hosts
    member = Member(world, port)
    if wants != "nothing yet":
        member.say(wanted(other.address.number if wants == "a process" else port))
    member.sock.close()  # before the gate has read any of that
    world.until(lambda: caplog.messages)
    assert [each.partition(", with ")[0] for each in caplog.messages] == [
        "lost the connection, not yet authenticated"
    ]
    assert not len(there.strangers)


def test_a_process_that_cannot_take_a_connection_is_named(world, hosts, port, caplog, monkeypatch):
    def fails(*_):
        raise OSError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(socket, "send_fds", fails)
    number = hosts[3].address.number
    member = Member(world, port)
    member.say(wanted(number))
    world.until(lambda: refusals(caplog))
    assert f"it could not be handed over to process {number}: Broken pipe" in caplog.text
    member.sock.close()


def test_a_member_that_asks_for_nothing_sensible_is_turned_away(world, hosts, port, caplog):
    member = Member(world, port)
    member.say(b"\1" * 8)
    world.until(lambda: "it said 8 bytes instead of which process it wants" in caplog.text)
    member.sock.close()


def test_a_member_that_breaks_the_rules_behind_the_gate_is_refused(world, hosts, port, caplog):
    member = Member(world, port)
    member.say(wanted(hosts[3].address.number))
    member.hear(1)
    member.secure()
    member.say(b"GET / HTTP/1.1\r\nHost: somewhere.example.com\r\n\r\n")
    world.until(lambda: refusals(caplog))
    assert "a frame of" in refusals(caplog)[0]
    assert not hosts[3].inbox
    member.sock.close()


@pytest.mark.parametrize("stage", ["connected", "at the gate", "at the process"])
def test_whoever_stops_on_the_way_is_closed_in_time(world, hosts, port, caplog, stage):
    _, _, there, other = hosts
    there.strangers.patience_s = other.strangers.patience_s = 1.0
    if stage == "connected":
        sock = socket.create_connection((THERE, port))
    else:
        member = Member(world, port)
        sock = member.sock
        if stage != "at the gate":
            member.say(wanted(other.address.number))
            member.hear(1)
    sock.setblocking(False)

    def closed():
        try:
            return sock.recv(10_000) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    world.until(closed)
    assert re.search(r"was not authenticated within 1 s", caplog.text)
    assert not len(there.strangers)
    assert not len(other.strangers)
    sock.close()


def test_a_member_that_has_proven_itself_makes_no_room_for_strangers(world, hosts, port, caplog):
    there = hosts[2]
    there.strangers.limit = 2
    member = Member(world, port)
    member.say(wanted(port))
    member.hear(1)
    member.secure()
    there.strangers.patience_s = 0.3
    with contextlib.ExitStack() as ends:
        for _ in range(4):
            ends.enter_context(socket.create_connection((THERE, port)))
        world.until(lambda: refusals(caplog), "strangers make room")
        world.until(lambda: not len(there.strangers), "their time is over")
    process = drawn_address(HERE)
    member.say(Hello(process.text, links.own_release(), 5, 7, 0, 0).frame())
    member.say(HEADER.pack(DATA, 1, 5, 1, 0) + b"hello")
    world.until(lambda: there.bodies == [b"hello"])
    member.sock.close()


def test_another_release_is_refused_naming_both_on_both_sides(world, port, monkeypatch, caplog):
    monkeypatch.setattr(links, "own_release", lambda: "greenroom 1, Python 3.10")
    _, one = world.host(HERE, port)
    monkeypatch.setattr(links, "own_release", lambda: "greenroom 2, Python 3.11")
    _, other = world.host(THERE, port)
    one.send(other)
    world.until(lambda: one.dead)
    for theirs, ours in (
        ("1, Python 3.10", "2, Python 3.11"),
        ("2, Python 3.11", "1, Python 3.10"),
    ):
        assert f"it runs greenroom {theirs}, this end greenroom {ours}" in caplog.text
    assert not other.inbox


def test_connections_go_on_over_a_new_cluster_file_and_nothing_is_lost(world, port, monkeypatch):
    monkeypatch.setattr(other_hosts, "KEY_CHECK_S", 0.1)
    new = make_key()
    old_id, new_id = key_id(key_of(0)), key_id(new)
    one_keys, other_keys = (KeyFiles(world.key_file()) for _ in range(2))
    _, one = world.host(HERE, port, keys=one_keys)
    _, other = world.host(THERE, port, keys=other_keys)
    one.send(other, b"first")
    world.until(lambda: one.done)
    (before,) = one.links.connections(other.address)
    for wanted in (KeyIds(old_id, next=new_id), KeyIds(new_id, last=old_id), KeyIds(new_id)):
        for keys in (one_keys, other_keys):
            keys.hold(wanted, [new])
            one.send(other, wanted.current.encode())
            world.run_for(0.2)
    world.until(lambda: before.is_closed, "what was begun with the old file is ended")
    world.until(lambda: len(one.done) == 7)
    assert len(other.inbox) == 7
    assert (one.gone, other.gone) == ([], [])
    late, _ = world.host("127.0.0.5", port)  # was away, and has the old file
    late.send(other)
    world.until(lambda: late.dead)


def test_a_process_that_does_not_shake_hands_is_abandoned(world, port, monkeypatch):
    """The gate says that it is there, and then nothing comes."""
    monkeypatch.setattr(other_hosts, "SECURE_TIMEOUT_S", 0.2)
    loop, keys = world.loop, KeyFiles(world.key_file())
    here, _ = world.host(HERE, port, keys=keys)
    others = here.links.other_hosts

    async def let_in(accepted, target):
        accepted.setblocking(False)
        stream = TlsStream(loop, accepted, keys.tls(), accepts=True)
        await stream.secure()
        assert await stream.receive(100) == wanted(target.number)
        stream.send(b"\1")

    async def dial():
        with socket.create_server((THERE, 0)) as listener:
            listener.setblocking(False)
            target = ProcessAddress(THERE, listener.getsockname()[1])
            dialing = asyncio.create_task(others.reach(others.new_socket(), target, MESSAGES))
            accepted, _ = await loop.sock_accept(listener)
            with accepted:
                await let_in(accepted, target)
                with pytest.raises(
                    other_hosts.UnreachableError, match=r"no answer within 0\.2 s"
                ) as caught:
                    await dialing
            assert not caught.value.is_certain

    loop.run_until_complete(asyncio.wait_for(dial(), DEADLINE_S))
