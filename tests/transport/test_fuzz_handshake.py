from __future__ import annotations

import tracemalloc
from itertools import islice

from tests.transport.fuzz_handshake import HELLOS, fuzz_one, inputs


def test_random_strangers_are_refused_and_leave_nothing() -> None:
    stream = inputs(seed=3)
    for data in islice(stream, 2000):
        fuzz_one(data)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for data in islice(stream, 500):
        fuzz_one(data)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 50_000
    for data in islice(stream, 17_500):
        fuzz_one(data)


def test_a_right_hello_keeps_no_more_than_a_handshake() -> None:
    assert fuzz_one(b"\0" + HELLOS[1] + b"\1\xb0" + bytes(5000)) <= 1024
