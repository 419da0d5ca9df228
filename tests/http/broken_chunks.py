"""Bodies in chunks that are none, for tests and the fuzzer, which has no more than pytest."""

from greenroom.http_front.bodies import MAX_CHUNK_LINE_BYTES

SIZES = [
    *(b"\r\n", b"g\r\n", b"-1\r\n", b"+1\r\n", b"0x1\r\n", b" 1\r\n", b"1 \r\n", b"1 ;a\r\n"),
    *(b"1\t\r\n", b"0_1\r\n", b"_1\r\n", b"\xd9\xa1\r\n", b"1these-bytes\r\n", b"1\0\r\n"),
    *(b"1\n", b"1;a\n", b"1;a\rb\r\n", b"1;\0\r\n", b"1\r\r\n", b"1\r0\n"),
    *(b"0" * 16 + b"1\r\n", b"1" * 17 + b"\r\n"),
]
TRAILERS = [
    *(b"no colon\r\n", b": no name\r\n", b"A : b\r\n", b"A: b\n", b"A: \0\r\n", b"A: b\rc\r\n"),
    *(b"A: b\r\n folded\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"),
]
BROKEN = [  # each is a whole body to a reader that lets the one thing pass
    *(size + b"x\r\n0\r\n\r\n" for size in SIZES),
    *(b"1\r\n" + end + b"0\r\n\r\n" for end in (b"ab", b"a\n", b"a\rb", b"a\r\r\n", b"aXX")),
    *(b"0\r\n" + trailer + b"\r\n" for trailer in TRAILERS),
    *(b"0\n\r\n", b"0\r\n\n", b"1;" + b"a" * MAX_CHUNK_LINE_BYTES),
]
