from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.actors.transport.addresses import MAX_TEXT, Identity, encode_identity
from greenroom.actors.transport.connection import (
    Authenticated,
    Closed,
    Connection,
    Opened,
    Refused,
    Sessions,
)
from greenroom.actors.transport.handshake import (
    MAGIC,
    MAX_HANDSHAKE,
    VERSION,
    Handshake,
    Role,
    hkdf_expand,
    hkdf_extract,
)
from tests.transport.pairs import KEY, Link, Process, identity, nonce, only_refusal, pieces


def acceptor(*, remote: bool = True, name: str = "b") -> Connection:
    key = KEY if remote else None
    return Connection(
        Role.ACCEPTOR, Sessions(identity(name)), key=key, nonce=nonce() if remote else None
    )


def dialer(*, expect: str | None = None) -> Connection:
    return Connection(Role.DIALER, Sessions(identity("a")), key=KEY, nonce=nonce(), expect=expect)


def refusal(connection: Connection, received: bytes) -> str:
    events = connection.receive_data(received)
    reason = only_refusal(events)
    assert connection.receive_data(b"more") == connection.receive_eof() == []
    assert not connection.is_authenticated
    return reason


def test_hkdf_gives_the_first_vector_of_rfc_5869() -> None:
    prk = hkdf_extract(bytes(range(13)), b"\x0b" * 22)
    assert prk.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    assert hkdf_expand(prk, bytes(range(0xF0, 0xFA)), 42).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_the_handshake_is_what_its_description_says() -> None:
    """The formulas at the top of handshake.py, written out a second time."""

    def mac(key: bytes, *parts: bytes) -> bytes:
        return hmac.new(key, b"".join(parts), hashlib.sha256).digest()

    def expand(label: bytes, context: bytes = b"") -> bytes:
        return mac(prk, b"greenroom transport 2 ", label, context, b"\1")

    link = Link(Process("a"), Process("b"), remote=True)
    link.run()
    hello_size = len(MAGIC) + 5 + 32
    proof_size = 2 + 18 + len("a" + "stage" + "unknown") + 32
    sent = [bytes(carried[: hello_size + proof_size]) for carried in link.carried]
    hellos = [stream[:hello_size] for stream in sent]
    proofs = [stream[hello_size:] for stream in sent]
    prk = mac(hellos[0][-32:] + hellos[1][-32:], KEY)
    heard = b"".join(hellos)
    for proof, label in zip(proofs, (b"dialer", b"acceptor"), strict=True):
        heard += proof[:-32]
        transcript = hashlib.sha256(heard).digest()
        assert proof[-32:] == mac(expand(b"proof of the " + label), transcript)
        heard += proof[-32:]
    transcript = hashlib.sha256(heard).digest()
    for side, label in enumerate((b"dialer", b"acceptor")):
        key = expand(b"frames of the " + label, transcript)
        frame = bytes(link.carried[side][hello_size + proof_size :])[:-16]
        tag = hashlib.blake2b(
            bytes(8) + frame, key=key, digest_size=16, person=b"greenroom frame"
        ).digest()
        assert link.carried[side].endswith(frame + tag)


@pytest.mark.parametrize("remote", [False, True])
def test_both_sides_learn_who_the_other_is(remote: bool) -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=remote)
    link.run()
    assert left.of(Authenticated)[0].peer == right.sessions.own
    assert right.of(Authenticated)[0].peer == left.sessions.own
    assert all(end.is_open for end in link.ends)
    assert len(left.of(Opened)) == len(right.of(Opened)) == 1
    assert link.ends[0].peer == right.sessions.own


@pytest.mark.parametrize("remote", [False, True])
def test_the_longest_identities_fit_the_limit(remote: bool) -> None:
    left, right = Process("a" * MAX_TEXT), Process("b")
    left.sessions.own = Identity("a" * MAX_TEXT, "0" * 16, 2**32 - 1, "h" * MAX_TEXT)
    link = Link(left, right, remote=remote)
    link.run()
    assert right.of(Authenticated)[0].peer == left.sessions.own
    assert max(map(len, link.carried)) <= MAX_HANDSHAKE


@pytest.mark.parametrize("keys", [(KEY, bytes(32)), (bytes(32), KEY)])
def test_a_wrong_key_is_refused_by_the_acceptor_and_guessed_by_the_dialer(
    keys: tuple[bytes, bytes],
) -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=True, keys=keys)
    link.run()
    assert right.refusals() == ["the peer's proof is wrong: it does not hold this cluster's key"]
    left.events += link.ends[0].receive_eof()
    assert left.refusals() == [
        "the peer closed the connection during the handshake; it may hold another cluster's key"
    ]
    assert len(right.sessions) == len(left.sessions) == 0


def test_another_release_is_refused_naming_both_on_both_sides() -> None:
    left, right = Process("a"), Process("b")
    left.sessions.own = replace(left.sessions.own, release="greenroom 1, Python 3.10")
    right.sessions.own = replace(right.sessions.own, release="greenroom 2, Python 3.11")
    link = Link(left, right, remote=True)
    link.run()
    advice = "; all hosts must run the same"
    one, other = "greenroom 1, Python 3.10", "greenroom 2, Python 3.11"
    assert right.refusals() == [f"the peer runs {one}, this end {other}{advice}"]
    assert left.refusals() == [f"the peer runs {other}, this end {one}{advice}"]


def test_an_impostor_that_answers_without_the_key_is_refused() -> None:
    connection = dialer()
    connection.data_to_send()
    impostor = identity("b")
    assert connection.receive_data(MAGIC + b"\0\2\1\0\x20" + nonce()) == []
    body = encode_identity(impostor) + bytes(32)
    forged = len(body).to_bytes(2, "big") + body
    assert "proof is wrong" in refusal(connection, forged)


@pytest.mark.parametrize("remote", [False, True])
def test_another_version_is_refused_naming_both_on_both_sides(remote: bool) -> None:
    right = acceptor(remote=remote)
    newer = MAGIC + (VERSION + 6).to_bytes(2, "big")
    assert "version 8, this end version 2" in refusal(right, newer)
    farewell = b"".join(right.data_to_send())
    assert farewell == MAGIC + VERSION.to_bytes(2, "big")
    assert right.data_to_send() == []
    left = dialer()
    assert "version 8, this end version 2" in refusal(left, newer)
    assert left.data_to_send() == []


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "byte 0 is 0x47 (HTTP or other text?)"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "byte 0 is 0x16 (TLS?)"),
        (b"\0" * 5000, "byte 0 is 0x00"),
        (MAGIC[:6] + b"\n", "byte 6 is 0x0a"),
        (MAGIC + b"\0\2\x01\xff\xff", "of 65535 bytes, over the limit of 32"),
        (MAGIC + b"\0\2\x01\0\x05" + bytes(5), "a nonce of 5 bytes"),
        (MAGIC + b"\0\2\0\0\x05" + bytes(5), "kind is local, this end's is remote"),
        (MAGIC + b"\0\2\x09\0\x05" + bytes(5), "kind is unknown (9)"),
    ],
)
def test_a_stray_client_is_refused_at_its_first_wrong_byte(garbage: bytes, said: str) -> None:
    connection = acceptor()
    assert said in refusal(connection, garbage)
    assert connection.data_to_send() == []
    trickled = acceptor()
    events = [event for byte in garbage for event in trickled.receive_data(bytes([byte]))]
    assert said in only_refusal(events)


def test_oversize_proofs_are_refused_when_their_length_is_read() -> None:
    connection = acceptor()
    hello = Handshake(Role.DIALER, identity("a"), key=KEY, nonce=nonce()).start()
    assert "over the limit of" in refusal(connection, hello + b"\xff\xff")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes(17),
        bytes(18),
        bytes(12) + b"\0\1\0\1\0\1" + b"\n\nr",
        bytes(12) + b"\0\2\0\1\0\1abc",
    ],
)
def test_a_malformed_identity_is_refused(body: bytes) -> None:
    hello = MAGIC + b"\0\2\0" + len(body).to_bytes(2, "big") + body
    assert "identity" in refusal(acceptor(remote=False), hello)


def test_a_port_scan_leaves_nothing() -> None:
    connection = acceptor()
    assert connection.receive_eof() == [
        Refused("the peer closed the connection during the handshake")
    ]
    assert connection.data_to_send() == []


def test_a_stranger_learns_only_version_and_nonce() -> None:
    connection = acceptor()
    hello = Handshake(Role.DIALER, identity("x"), key=bytes(32), nonce=nonce()).start()
    connection.receive_data(hello)
    answer = b"".join(connection.data_to_send())
    assert answer[: len(MAGIC)] == MAGIC
    assert len(answer) == len(hello)
    assert b"stage" not in answer


def test_an_echo_is_refused() -> None:
    connection = dialer()
    hello = b"".join(connection.data_to_send())
    assert "own nonce" in refusal(connection, hello)
    local = Connection(Role.DIALER, Sessions(identity("a")))
    assert "own identity" in refusal(local, b"".join(local.data_to_send()))


def test_a_proof_reflected_through_a_second_connection_is_refused() -> None:
    """Someone without the key has an acceptor's own process answer for him."""
    left, right = (
        dialer(),
        Connection(Role.ACCEPTOR, Sessions(identity("a")), key=KEY, nonce=nonce()),
    )
    right.receive_data(b"".join(left.data_to_send()))
    left.receive_data(b"".join(right.data_to_send()))
    assert "own identity" in refusal(right, b"".join(left.data_to_send()))


def test_the_dialers_proof_is_no_acceptors_proof() -> None:
    first, second = dialer(), dialer()
    hellos = [b"".join(each.data_to_send()) for each in (first, second)]
    first.receive_data(hellos[1])
    second.receive_data(hellos[0])
    assert "proof is wrong" in refusal(first, b"".join(second.data_to_send()))


@pytest.mark.parametrize("side", [0, 1])
def test_a_replayed_handshake_is_refused(side: int) -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=True)
    link.run()
    again = Link(Process("a"), Process("b"), remote=True)
    again.collect()
    victim = again.ends[1 - side]
    assert [type(each) for each in victim.receive_data(bytes(link.carried[side]))] == [Refused]


def test_the_wrong_process_at_the_address_is_refused() -> None:
    connection = dialer(expect="c")
    right = acceptor()
    right.receive_data(b"".join(connection.data_to_send()))
    connection.receive_data(b"".join(right.data_to_send()))
    right.receive_data(b"".join(connection.data_to_send()))
    assert "answers where c should" in refusal(connection, b"".join(right.data_to_send()))


@given(st.integers(0, 10**6), st.integers(0, 7), st.sampled_from([0, 1]))
def test_any_bit_flip_in_a_remote_handshake_is_refused(position: int, bit: int, side: int) -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=True)
    link.collect()
    flipped = position % 89  # beyond both hellos and into the proofs
    seen = 0
    while any(link.transit):
        transit = link.transit[side]
        if seen <= flipped < seen + len(transit):
            transit[flipped - seen] ^= 1 << bit
        seen += len(transit)
        link.carry(0)
        link.carry(1)
        link.collect()
    assert seen > flipped
    link.break_off()
    victim = (left, right)[1 - side]
    assert len(victim.refusals()) == 1
    assert not victim.of(Authenticated)
    for process in (left, right):
        assert len(process.of(Refused)) + len(process.of(Closed)) == 1
        assert not process.of(Opened)


@given(st.lists(st.integers(0, 200)), st.booleans())
def test_any_split_of_a_handshake_gives_the_same_events(cuts: list[int], remote: bool) -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=remote)
    for _ in range(6):
        link.collect()
        for side in (0, 1):
            stream = bytes(link.transit[side])
            link.transit[side].clear()
            for piece in pieces(stream, [cut for cut in cuts if cut < len(stream)]):
                link.processes[1 - side].events += link.ends[1 - side].receive_data(piece)
    for process in (left, right):
        assert [type(event) for event in process.events] == [Authenticated, Opened]


@pytest.mark.parametrize(
    "wrong",
    [{"key": KEY}, {"nonce": KEY}, {"key": b"short", "nonce": KEY}, {"key": KEY, "nonce": b""}],
)
def test_a_key_or_nonce_of_the_wrong_size_cannot_be_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="key and"):
        Connection(Role.DIALER, Sessions(identity("a")), **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"incarnation": "xyz"},
        {"incarnation": "G" * 16},
        {"pid": -1},
        {"address": ""},
        {"host": "a\nb"},
        {"host": "x" * 201},
        {"address": "ü"},
    ],
)
def test_an_identity_that_could_not_be_sent_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Identity(**{"address": "a", "incarnation": "0" * 16, "pid": 1, "host": "h", **wrong})
