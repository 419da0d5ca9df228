"""Chunked bodies, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.http_front.bodies import (
    MAX_CHUNK_LINE_BYTES,
    BadChunksError,
    ChunkedBody,
    TrailersTooLargeError,
)

BEHIND = b"GET /next HTTP/1.1\r\n"


def read(data, cuts=(), most=100):
    """Return the body and what lies behind it, or None where the end has not come."""
    body, pieces, start = ChunkedBody(most), [], 0
    for end in [*sorted(cuts), len(data)]:
        segment = data[start:end]
        taken = body.take(segment, pieces)
        if body.is_complete:
            return b"".join(pieces), data[start + taken :]
        assert taken == len(segment)
        start = end
    return None


sizes = st.builds(
    lambda size, zeros, upper: (b"0" * zeros + (b"%X" if upper else b"%x") % size, size),
    st.integers(1, 300),
    st.integers(0, 5),
    st.booleans(),
)
extensions = st.sampled_from([b"", b";", b";a", b";a=b", b';a="b;c"', b"; a = \xff"])
trailers = st.lists(st.sampled_from([b"A: b\r\n", b"X-Long: " + b"y" * 50 + b"\r\n"]), max_size=1)


@given(
    chunks=st.lists(st.tuples(sizes, extensions), max_size=4),
    last=st.tuples(st.sampled_from([b"0", b"000"]), extensions, trailers),
    cuts=st.sets(st.integers(0, 1500), max_size=20),
)
def test_a_body_is_the_same_however_it_is_cut(chunks, last, cuts):
    data, expected = b"", b""
    for (line, size), extension in chunks:
        content = bytes(range(256))[:size] * 2
        content = content[:size] if len(content) >= size else content.ljust(size, b"\r")
        data += line + extension + b"\r\n" + content + b"\r\n"
        expected += content
    end, extension, ends = last
    data += end + extension + b"\r\n" + b"".join(ends) + b"\r\n" + BEHIND
    cuts = {cut for cut in cuts if cut < len(data) - len(BEHIND)}
    assert read(data, cuts) == (expected, BEHIND)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1 ;a\r\n",
        b"1\t\r\n",
        b"1_0\r\n",
        b"\xd9\xa3\r\n",
        b"1\n",
        b"1;a\n",
        b"1;a\rb\r\n",
        b"1;\0\r\n",
        b"1\r\r\n",
        b"1" * 17 + b"\r\n",
        b"1;" + b"a" * MAX_CHUNK_LINE_BYTES,
        b"1\r\nab",
        b"1\r\na\n",
        b"1\r\na\rb",
        b"1\r\na\r\r\n",
        b"0\r\nno colon\r\n",
        b"0\r\n: no name\r\n",
        b"0\r\nA : b\r\n",
        b"0\r\nA: b\n",
        b"0\r\nA: \0\r\n",
        b"0\r\nA: b\r\n folded\r\n",
        b"0\r\nContent-Length: 5\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n",
        b"0\r\n\n",
    ],
)
def test_what_is_none_is_refused_at_once_and_byte_by_byte(data):
    with pytest.raises(BadChunksError):
        read(data + b"x" * 3)
    with pytest.raises(BadChunksError):
        read(data + b"x" * 3, range(len(data)))


@pytest.mark.parametrize("data", [b"A: " + b"b" * 98, b"A: b\r\n" * 17])
def test_trailers_have_a_limit(data):
    with pytest.raises(TrailersTooLargeError):
        read(b"0\r\n" + data)
    with pytest.raises(TrailersTooLargeError):
        read(b"0\r\n" + data, range(3 + len(data)))


def test_what_has_not_come_to_its_end_is_waited_for():
    whole = b"1;a\r\na\r\n0\r\nA: b\r\n\r\n"
    for end in range(len(whole)):
        assert read(whole[:end]) is None
