from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.actors.transport.addresses import RefusedError
from greenroom.actors.transport.gate import (
    ROUTE_SIZE,
    ROUTED_SIZE,
    read_route,
    read_routed,
    write_route,
    write_routed,
)
from greenroom.actors.transport.handshake import MAGIC

KEY, NONCE = bytes(range(32)), bytes(31) + b"\7"
ROUTE = write_route(7, KEY, NONCE)


def test_a_route_is_what_its_description_says() -> None:
    """The formulas at the top of routes.py, written out a second time."""

    def mac(key: bytes, message: bytes) -> bytes:
        return hmac.new(key, message, hashlib.sha256).digest()

    prk = mac(b"", KEY)
    derived = mac(prk, b"greenroom transport 2 route\1")
    route = MAGIC + b"\0\2\2" + (7).to_bytes(8, "big") + NONCE
    assert route + mac(derived, route) == ROUTE
    answer = MAGIC + b"\0\2\3\1"
    derived = mac(prk, b"greenroom transport 2 routed\1")
    assert answer + mac(derived, ROUTE + answer) == write_routed(ROUTE, KEY, found=True)
    assert (len(ROUTE), len(answer) + 32) == (ROUTE_SIZE, ROUTED_SIZE)


@given(st.integers(0, 2**64 - 1))
def test_any_number_is_read_back(number: int) -> None:
    assert read_route(write_route(number, KEY, NONCE), [bytes(32), KEY]) == (number, KEY)


@pytest.mark.parametrize("found", [False, True])
def test_the_answer_is_read_back(found: bool) -> None:
    assert read_routed(write_routed(ROUTE, KEY, found=found), ROUTE, KEY) is found


def test_bytes_that_are_missing_are_waited_for() -> None:
    routed = write_routed(ROUTE, KEY, found=True)
    for size in range(ROUTE_SIZE):
        assert read_route(ROUTE[:size], [KEY]) is None
    for size in range(ROUTED_SIZE):
        assert read_routed(routed[:size], ROUTE, KEY) is None


@given(st.integers(0, ROUTE_SIZE * 8 - 1))
def test_any_bit_flip_in_a_route_is_refused(bit: int) -> None:
    changed = bytearray(ROUTE)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RefusedError):
        read_route(changed, [KEY])


@given(st.integers(0, ROUTED_SIZE * 8 - 1))
def test_any_bit_flip_in_an_answer_is_refused(bit: int) -> None:
    changed = bytearray(write_routed(ROUTE, KEY, found=False))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RefusedError):
        read_routed(changed, ROUTE, KEY)


def test_another_clusters_key_is_refused_on_both_sides() -> None:
    other = bytes(32)
    with pytest.raises(RefusedError, match="does not hold this cluster's key"):
        read_route(ROUTE, [other])
    with pytest.raises(RefusedError, match="does not hold this cluster's key"):
        read_routed(write_routed(ROUTE, other, found=False), ROUTE, KEY)


def test_the_answer_to_another_route_is_refused() -> None:
    earlier = write_routed(write_route(7, KEY, bytes(32)), KEY, found=False)
    with pytest.raises(RefusedError, match="does not hold"):
        read_routed(earlier, ROUTE, KEY)


def test_another_version_gets_a_farewell_from_the_gate_alone() -> None:
    newer = MAGIC + b"\0\3"
    with pytest.raises(RefusedError, match="version 3, this end version 2") as refused:
        read_route(newer, [KEY])
    assert refused.value.farewell == MAGIC + b"\0\2"
    with pytest.raises(RefusedError, match="version 3, this end version 2") as refused:
        read_routed(newer, ROUTE, KEY)
    assert refused.value.farewell == b""
