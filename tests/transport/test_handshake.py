"""The handshake of two hosts' processes: who is let in, and what everyone else gets."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.actors.transport.addresses import MAX_TEXT, Identity, encode_identity
from greenroom.actors.transport.frames import RefusedError, Sealer
from greenroom.actors.transport.handshake import (
    MAGIC,
    MAX_HANDSHAKE,
    VERSION,
    Handshake,
    Role,
    hkdf_expand,
    hkdf_extract,
)

KEY = bytes(range(32))


def identity(name):
    return Identity(name, name.encode().hex().zfill(16), 7, "stage")


class End:
    """One end, and what it has sent."""

    def __init__(self, role, name, key=KEY, own=None, context=b""):
        nonce = os.urandom(32)
        self.handshake = Handshake(
            role, own or identity(name), key=key, nonce=nonce, context=context
        )
        self.sent = self.handshake.start()
        self.taken = bytearray()

    def receive(self, received):
        """Take bytes; return what is answered."""
        self.taken += received
        answers = b""
        while self.handshake.frame_keys is None and (step := self.handshake.step(self.taken)):
            answers += step[0]
            del self.taken[: step[1]]
        self.sent += answers
        return answers


def trickle(end, stream):
    """Have bytes arrive one by one."""
    for byte in stream:
        end.receive(bytes([byte]))


def dialer(name="a", **how):
    return End(Role.DIALER, name, **how)


def acceptor(name="b", **how):
    return End(Role.ACCEPTOR, name, **how)


def joined(left, right, change=bytes):
    """Run the handshake; ``change`` is applied to all that passes."""
    to_right = left.sent
    while to_right:
        to_right = left.receive(change(right.receive(change(to_right))))
    return left, right


def test_hkdf_gives_the_first_vector_of_rfc_5869():
    prk = hkdf_extract(bytes(range(13)), b"\x0b" * 22)
    assert prk.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    assert hkdf_expand(prk, bytes(range(0xF0, 0xFA)), 42).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_the_handshake_is_what_its_description_says():
    """The formulas at the top of handshake.py, written out a second time."""

    def mac(key, *parts):
        return hmac.new(key, b"".join(parts), hashlib.sha256).digest()

    def expand(label, context=b""):
        return mac(prk, b"greenroom transport 2 ", label, context, b"\1")

    left, right = joined(dialer(), acceptor())
    hello_size = len(MAGIC) + 5 + 32
    hellos = [end.sent[:hello_size] for end in (left, right)]
    proofs = [end.sent[hello_size:] for end in (left, right)]
    prk = mac(hellos[0][-32:] + hellos[1][-32:], KEY)
    heard = b"".join(hellos)
    for proof, label in zip(proofs, (b"dialer", b"acceptor"), strict=True):
        heard += proof[:-32]
        assert proof[-32:] == mac(expand(b"proof of the " + label), hashlib.sha256(heard).digest())
        heard += proof[-32:]
    transcript = hashlib.sha256(heard).digest()
    keys = tuple(
        expand(b"frames of the " + label, transcript) for label in (b"dialer", b"acceptor")
    )
    assert left.handshake.frame_keys == keys
    assert right.handshake.frame_keys == keys[::-1]
    tag = hashlib.blake2b(bytes(8) + b"x", key=keys[0], digest_size=16, person=b"greenroom frame")
    assert Sealer(keys[0]).tag(b"x") == tag.digest()


def test_both_sides_learn_who_the_other_is_whatever_its_length():
    own = Identity("a" * MAX_TEXT, "0" * 16, 2**32 - 1, "h" * MAX_TEXT)
    left, right = joined(dialer(own=own), acceptor())
    assert right.handshake.known_peer == own
    assert left.handshake.known_peer == identity("b")
    assert max(len(left.sent), len(right.sent)) <= MAX_HANDSHAKE


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [({"key": bytes(32)}, {}), ({}, {"key": bytes(32)}), ({"context": b"another ROUTE"}, {})],
)
def test_another_key_or_way_is_refused_by_the_acceptor(theirs, ours):
    left, right = dialer(**theirs), acceptor(**ours)
    with pytest.raises(RefusedError, match="proof is wrong: it does not hold this cluster's key"):
        joined(left, right)
    assert b"stage" not in right.sent, "a stranger learns a version and a nonce"


def test_another_release_is_refused_naming_both_on_both_sides():
    one, other = "greenroom 1, Python 3.10", "greenroom 2, Python 3.11"
    left = dialer(own=replace(identity("a"), release=one))
    right = acceptor(own=replace(identity("b"), release=other))
    proof = left.receive(right.receive(left.sent))
    with pytest.raises(RefusedError, match=f"the peer runs {one}, this end {other}") as refused:
        right.receive(proof)
    with pytest.raises(RefusedError, match=f"the peer runs {other}, this end {one}"):
        left.receive(refused.value.farewell)


def test_another_version_is_refused_and_the_dialer_hears_which_is_right():
    newer = MAGIC + (VERSION + 6).to_bytes(2, "big")
    for end, farewell in ((acceptor(), MAGIC + VERSION.to_bytes(2, "big")), (dialer(), b"")):
        with pytest.raises(RefusedError, match="version 8, this end version 2") as refused:
            end.receive(newer)
        assert refused.value.farewell == farewell


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", r"byte 0 is 0x47 \(HTTP or other text\?\)"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", r"byte 0 is 0x16 \(TLS\?\)"),
        (b"\0" * 5000, "byte 0 is 0x00"),
        (MAGIC[:6] + b"\n", "byte 6 is 0x0a"),
        (MAGIC + b"\0\2\x01\xff\xff", "of 65535 bytes, over the limit of 32"),
        (MAGIC + b"\0\2\x01\0\x05" + bytes(5), "a nonce of 5 bytes"),
        (MAGIC + b"\0\2\x09\0\x05" + bytes(5), r"kind is unknown \(9\)"),
        (MAGIC + b"\0\2\x01\0\x20" + KEY + b"\xff\xff", "over the limit of"),
        (MAGIC + b"\0\2\x01\0\x20" + KEY + b"\0\x05", "a proof of 5 bytes"),
    ],
)
def test_a_stray_client_is_refused_at_its_first_wrong_byte(garbage, said):
    with pytest.raises(RefusedError, match=said):
        acceptor().receive(garbage)
    with pytest.raises(RefusedError, match=said):
        trickle(acceptor(), garbage)


def test_an_impostor_that_answers_without_the_key_is_refused():
    left = dialer()
    left.receive(MAGIC + b"\0\2\1\0\x20" + os.urandom(32))
    body = encode_identity(identity("b")) + bytes(32)
    with pytest.raises(RefusedError, match="proof is wrong"):
        left.receive(len(body).to_bytes(2, "big") + body)


def test_an_echo_a_reflection_and_a_proof_of_the_other_role_are_refused():
    echoed = dialer()
    with pytest.raises(RefusedError, match="own nonce"):
        echoed.receive(echoed.sent)
    with pytest.raises(RefusedError, match="own identity"):  # its own process answers for it
        joined(dialer("a"), acceptor("a"))
    first, second = dialer("a"), dialer("b")
    hello, other_hello = first.sent, second.sent
    first.receive(other_hello)
    with pytest.raises(RefusedError, match="proof is wrong"):
        first.receive(second.receive(hello))


@pytest.mark.parametrize("role", [Role.DIALER, Role.ACCEPTOR])
def test_a_replayed_handshake_is_refused(role):
    left, right = joined(dialer(), acceptor())
    victim = End(role, "v")
    with pytest.raises(RefusedError, match="proof is wrong"):
        victim.receive((right if role is Role.DIALER else left).sent)


@settings(deadline=None)
@given(st.integers(0, 88), st.integers(0, 7), st.booleans())
def test_any_bit_flip_lets_nobody_in(position, bit, of_dialer):
    left, right = dialer(), acceptor()
    seen = 0

    def flipped(stream):
        nonlocal seen
        changed = bytearray(stream)
        if seen <= position < seen + len(stream):
            changed[position - seen] ^= 1 << bit
        seen += len(stream)
        return bytes(changed)

    with contextlib.suppress(RefusedError):
        to_right = left.sent
        for _ in range(2):
            received = right.receive(flipped(to_right) if of_dialer else to_right)
            to_right = left.receive(received if of_dialer else flipped(received))
    victim = right if of_dialer else left
    assert victim.handshake.frame_keys is None


@settings(deadline=None)
@given(st.data())
def test_whatever_strangers_say_nobody_is_let_in(data):
    recorded = joined(dialer(), acceptor())[0].sent
    said = bytearray(data.draw(st.sampled_from([recorded, recorded[:45], MAGIC, b""])))
    said += data.draw(st.binary(max_size=100))
    for _ in range(data.draw(st.integers(0, 3))):
        if said:
            said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
    victim, at = acceptor(), 0
    with contextlib.suppress(RefusedError):
        cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=4))
        for cut in [*sorted(cuts), len(said)]:
            victim.receive(said[at:cut])
            at = cut
    assert victim.handshake.frame_keys is None
    assert len(victim.taken) <= len(said)


@pytest.mark.parametrize("wrong", [{"key": b"short", "nonce": KEY}, {"key": KEY, "nonce": b""}])
def test_a_key_or_nonce_of_the_wrong_size_cannot_be_used(wrong):
    with pytest.raises(ValueError, match="key and nonce are"):
        Handshake(Role.DIALER, identity("a"), **wrong)


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
def test_an_identity_that_could_not_be_sent_cannot_be_made(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Identity(**{"address": "a", "incarnation": "0" * 16, "pid": 1, "host": "h", **wrong})
