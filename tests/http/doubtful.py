"""Requests that two servers might read in two ways, for tests and the fuzzer.

The fuzzer has no more than pytest, and instruments the front as it imports it: nothing here may do
that before.
"""

from functools import partial

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
    *(b"0\n\r\n", b"0\r\n\n", b"1;" + b"a" * 1024),
]

SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ABC = b"3\r\nabc\r\n"
END = b"0\r\n\r\n"


def post(*headers, body=b"", method=b"POST"):
    lines = b"".join(header + b"\r\n" for header in headers)
    return method + b" /first HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" + body


opening = partial(post, method=b"GET")


OPENING = (
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
UPGRADES = {
    "foo": (b"Connection: upgrade", b"Upgrade: foo"),
    "h2c": (
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
    ),
    "several": (b"Connection: keep-alive, Upgrade", b"Upgrade: TLS/1.0, websocket"),
    "a WebSocket by POST": OPENING,
}


def framed(body):
    """Return the headers that frame a body, and the body, in both ways."""
    yield b"Content-Length: %d" % len(body), body
    yield b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n" % (len(body), body) + END


def chunked(body):
    return post(b"Transfer-Encoding: chunked", body=body)


def get(target=b"/first", *, host=b"x", version=b"HTTP/1.1"):
    return b"GET %s %s\r\nHost: %s\r\n\r\n" % (target, version, host)


REFUSED = {
    "a length and chunks": post(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=END),
    "no length and chunks": post(b"Content-Length: 0", b"Transfer-Encoding: chunked", body=END),
    "chunks and no length": post(b"Transfer-Encoding: chunked", b"Content-Length: 0", body=END),
    "chunks and a length": post(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=END),
    "two lengths": post(b"Content-Length: 3", b"Content-Length: 4", body=b"abc"),
    "one length twice": post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"),
    "a list of lengths": post(b"Content-Length: 3, 3", body=b"abc"),
    "a length with a sign": post(b"Content-Length: +3", body=b"abc"),
    "a length with an underscore": post(b"Content-Length: 0_3", body=b"abc"),
    "a hexadecimal length": post(b"Content-Length: 0x3", body=b"abc"),
    "a length in other digits": post("Content-Length: ٣".encode(), body=b"abc"),
    "an empty length": post(b"Content-Length: "),
    "a length after a space": post(b"Content-Length : 3", body=b"abc"),
    "gzip before chunked": post(b"Transfer-Encoding: gzip, chunked", body=ABC + END),
    "gzip after chunked": post(b"Transfer-Encoding: chunked, gzip", body=END),
    "identity": post(b"Transfer-Encoding: identity"),
    "an unknown coding": post(b"Transfer-Encoding: xchunked", body=END),
    "a quoted coding": post(b'Transfer-Encoding: "chunked"', body=END),
    "no coding": post(b"Transfer-Encoding: ", body=END),
    "a coding twice": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=END),
    "a coding and identity": post(
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=END
    ),
    "a coding twice in a line": post(b"Transfer-Encoding: chunked, chunked", body=END),
    "a coding after a space": post(b"Transfer-Encoding : chunked", body=END),
    "a coding after a vertical tab": post(b"Transfer-Encoding:\x0bchunked", body=END),
    "a coding on a second line": post(b"Transfer-Encoding:\r\n chunked", body=END),
    "chunks in HTTP/1.0": chunked(END).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a folded header": post(b"X-A: b\r\n c"),
    "a folded request line": b"GET /first HTTP/1.1\r\n X: y\r\nHost: x\r\n\r\n",
    "line feeds alone": b"GET /first HTTP/1.1\nHost: x\n\n",
    "a line feed alone": post(b"A: b\nContent-Length: 3", body=b"abc"),
    "a carriage return alone": post(b"A: b\rContent-Length: 3", body=b"abc"),
    "an end that is a line feed": b"GET /first HTTP/1.1\r\nHost: x\r\n\n",
    "a NUL in a value": post(b"A: b\0c"),
    "a NUL in a name": post(b"A\0: b"),
    "a control character": post(b"A: b\x01c"),
    "no name": post(b": b"),
    "no colon": post(b"abc"),
    "a space in a name": post(b"A b: c"),
    "two hosts": b"GET /first HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "one host twice": b"GET /first HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "no slash": get(b"first"),
    "a space in the target": get(b"/fi rst"),
    "a NUL in the target": get(b"/fi\0rst"),
    "bytes in the target": get(b"/fi\xffrst"),
    "another version": get(version=b"HTTP/1.10"),
    "no version": b"GET /first\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a list of lengths with a gap": post(b"Content-Length: 3,", body=b"abc"),
    "two lengths with a space": post(b"Content-Length: 3 3", body=b"abc"),
    "a length with a fraction": post(b"Content-Length: 3.0", body=b"abc"),
    "a length with an exponent": post(b"Content-Length: 3e0", body=b"abc"),
    "a length after a vertical tab": post(b"Content-Length:\x0b3", body=b"abc"),
    "a length before a form feed": post(b"Content-Length: 3\x0c", body=b"abc"),
    "a length before a NUL": post(b"Content-Length: 3\0", body=b"abc"),
    "a length that overflows 64 bits": post(b"Content-Length: 18446744073709551619", body=b"abc"),
    "a length of many digits": post(b"Content-Length: " + b"9" * 5000, body=b"abc"),
    "a length in quotes": post(b'Content-Length: "3"', body=b"abc"),
    "a length and one after a tab": post(b"Content-Length: 3", b"Content-Length\t: 4", body=b"abc"),
    "a length in another case": post(b"Content-Length: 3", b"CONTENT-LENGTH: 4", body=b"abc"),
    "a coding with a parameter": post(b"Transfer-Encoding: chunked;q=1", body=END),
    "a coding and a comma": post(b"Transfer-Encoding: chunked,", body=END),
    "a comma and a coding": post(b"Transfer-Encoding: ,chunked", body=END),
    "a coding before a vertical tab": post(b"Transfer-Encoding: chunked\x0b", body=END),
    "a coding before a tab": post(b"Transfer-Encoding: chunked\t", body=END),
    "a coding before a NUL": post(b"Transfer-Encoding: chunked\0", body=END),
    "a coding with a space in it": post(b"Transfer-Encoding: chun ked", body=END),
    "a coding with a Kelvin sign": post("Transfer-Encoding: chun\u212aed".encode(), body=END),
    "identity before chunked": post(b"Transfer-Encoding: identity, chunked", body=END),
    "identity, then chunked": post(
        b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked", body=END
    ),
    "a coding after a tab in the name": post(b"Transfer-Encoding\t: chunked", body=END),
    "a coding after a vertical tab in the name": post(b"Transfer-Encoding\x0b: chunked", body=END),
    "a coding after a NUL": post(b"\0Transfer-Encoding: chunked", body=END),
    "a carriage return in the name": post(b"Transfer-Encoding\r: chunked", body=END),
    "chunks with an upgrade and a length": post(
        b"Connection: upgrade",
        b"Upgrade: foo",
        b"Content-Length: 5",
        b"Transfer-Encoding: chunked",
        body=END,
    ),
    "two lengths with an upgrade": post(
        b"Connection: upgrade", b"Upgrade: foo", b"Content-Length: 0", b"Content-Length: 3"
    ),
    "a tunnel": b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n",
    **{
        f"a WebSocket's opening with {line!r}": opening(*OPENING, line, body=body)
        for line, body in framed(get(b"/hidden"))
    },
    "an opening without a version": opening(*OPENING[:2], OPENING[3]),
    "an opening of an old version": opening(*OPENING[:2], b"Sec-WebSocket-Version: 8", OPENING[3]),
    "an opening without a key": opening(*OPENING[:3]),
    "an opening with a short key": opening(*OPENING[:3], b"Sec-WebSocket-Key: short"),
    "an opening with two keys": opening(*OPENING, OPENING[3]),
    "an opening of two origins": opening(*OPENING, b"Origin: a", b"Origin: b"),
    "an opening with bytes in its key": opening(*OPENING[:3], b"Sec-WebSocket-Key: \xff\xfe"),
    "chunks in HTTP/1.0 that is kept": post(
        b"Connection: keep-alive", b"Transfer-Encoding: chunked", body=END
    ).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "space before the first header": b"GET /first HTTP/1.1\r\n Host: x\r\n\r\n",
    "a tab before a header": b"GET /first HTTP/1.1\r\nHost: x\r\n\tA: b\r\n\r\n",
    "a carriage return more": b"GET /first HTTP/1.1\r\nHost: x\r\n\r\r\n",
    "a carriage return more behind the version": b"GET /first HTTP/1.1\r\r\nHost: x\r\n\r\n",
    "a DEL in a value": post(b"A: b\x7fc"),
    "an escape in a value": post(b"A: \x1b[2J"),
    "bytes in a name": post(b"\xc3\xa9: b"),
    "a bracket in a name": post(b"A(b): c"),
    "two spaces before the target": get(b" /first"),
    "two spaces before the version": get(b"/first "),
    "a space before the method": b" " + get(),
    "a space behind the version": get(version=b"HTTP/1.1 "),
    "a tab behind the method": b"GET\t/first HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tab before the version": b"GET /first\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "a version in small letters": get(version=b"http/1.1"),
    "a version with a space": get(version=b"HTTP/ 1.1"),
    "a version with a zero": get(version=b"HTTP/01.1"),
    "a version without its second number": get(version=b"HTTP/1"),
    "a later version": get(version=b"HTTP/1.2"),
    "an early version": get(version=b"HTTP/0.9"),
    "HTTP/3": get(version=b"HTTP/3.0"),
    "RTSP": get(version=b"RTSP/1.0"),
    "ICE": b"SOURCE /first ICE/1.0\r\nHost: x\r\n\r\n",
    "a line feed before": b"\n" + get(),
    "a carriage return before": b"\r" + get(),
    "a method in small letters": b"get /first HTTP/1.1\r\nHost: x\r\n\r\n",
    "an unknown method": b"STEAL /first HTTP/1.1\r\nHost: x\r\n\r\n",
    "a DEL in the target": get(b"/fi\x7frst"),
    "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n",
    "a bad method": b'G"ET /first HTTP/1.1\r\nHost: x\r\n\r\n',
    # What the HTTP Garden (narfindustries/http-garden) has found in other servers and proxies.
    "a method of marks": b'G=":<>(e),[T];?" /first HTTP/1.1\r\nHost: x\r\n\r\n',
    "a method that is a NUL": b"\0 /first HTTP/1.1\r\nHost: x\r\n\r\n",
    "a line feed behind the target": b"GET /first\nHTTP/1.1\r\nHost: x\r\n\r\n",
    "a version of many digits": get(version=b"HTTP/4294967295.255"),
    "a version of many dots": get(version=b"HTTP/............0596.7407."),
    "a version after carriage returns": get(version=b"HTTP/\r\r1.1"),
    "an empty length, then another": post(b"Content-Length: ", b"Content-Length: 3", body=b"abc"),
    "a length, then an empty one": post(b"Content-Length: 3", b"Content-Length: ", body=b"abc"),
    "a length before a letter": post(b"Content-Length: 3Z", body=b"abc"),
    "a length without a colon": post(b"Content-Length 3", body=b"abc"),
    "a length with a sign and an underscore": post(b"Content-Length: +0_3", body=b"abc"),
    "a length after a next-line byte in the name": post(b"Content-Length\x85: 3", body=b"abc"),
    "a header on two lines": post(
        b"Transfer-\r\nEncoding: chunked", b"Content-Length: 5", body=END
    ),
    "a line feed in a name": post(b"Te\nst: test"),
    "line feeds for a value": post(b"Useless:\n"),
    "a line that begins with a carriage return": post(b"\rZ: y"),
    "control characters for a name": post(bytes(range(1, 9)) + b": b"),
    "separators for a name": post(b'"(),/;<=>?@[]{}: b'),
    "a NUL behind a value": post(b"A: b\0"),
    "a NUL in the host": get(host=b"x\0.y"),
    "a coding in bytes": post(b"Transfer-Encoding: \xffchunked\xff", body=END),
    "a coding in no-break spaces": post(b"Transfer-Encoding: \xa0chunked\xa0", body=END),
    "a comma, a coding, and a length": post(
        b"Transfer-Encoding: ,chunked", b"Content-Length: 5", body=END
    ),
    **{f"chunks such as {data[:20]!r}": chunked(data) for data in BROKEN},
}

REFUSED_ALONE = {  # where they end is clear, so the connection goes on
    "no host": b"GET /first HTTP/1.1\r\n\r\n",
    "a host with a space": get(host=b"a b"),
    "a host with a path": get(host=b"a/b"),
    "a host with a user": get(host=b"a@b"),
    "a host with a bad port": get(host=b"a:b"),
    "a star for GET": get(b"*"),
    "a URL for another host": get(b"http://other/first"),
    "a URL with a user": get(b"http://u@x/first"),
    "a URL of another scheme": get(b"ftp://x/first"),
}

# A refused one whose client waits with its body: what follows is read only if the body is here.
EXPECTED_IN_VAIN = b"GET // HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na"

READ_IN_ONE_WAY = {
    "a length with zeros in front": (post(b"Content-Length: 003", body=b"abc"), b"abc"),
    "a coding in capitals": (post(b"Transfer-Encoding: CHUNKED", body=ABC + END), b"abc"),
    "a coding after a tab": (post(b"Transfer-Encoding:\tchunked", body=ABC + END), b"abc"),
    "an extension": (chunked(b"3;a=b\r\nabc\r\n" + END), b"abc"),
    "a trailer": (chunked(ABC + b"0\r\nX: y\r\n\r\n"), b"abc"),
    "zeros for the last chunk": (chunked(ABC + b"000\r\n\r\n"), b"abc"),
    "a body of a GET": (b"GET /first HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "a coding with an underscore": (
        post(b"Transfer_Encoding: chunked", b"Content-Length: 3", body=b"abc"),
        b"abc",
    ),
    "an empty host": (get(host=b""), b""),
    "an IPv6 host": (get(host=b"[::1]:80"), b""),
    "a URL": (get(b"http://x/first"), b""),
    "an empty line before": (b"\r\n" + get(), b""),
    "empty lines before": (b"\r\n\r\n\r\n" + get(), b""),
    "space behind a length": (post(b"Content-Length: 3 \t", body=b"abc"), b"abc"),
    "space behind a coding": (post(b"Transfer-Encoding: chunked ", body=ABC + END), b"abc"),
    "chunks of a GET": (
        b"GET /first HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + ABC + END,
        b"abc",
    ),
    "a quoted extension": (chunked(b'3;a="b;c"\r\nabc\r\n' + END), b"abc"),
    "a length that is expected": (
        post(b"Expect: 100-continue", b"Content-Length: 3", body=b"abc"),
        b"abc",
    ),
    "another expectation": (post(b"Expect: much", b"Content-Length: 3", body=b"abc"), b"abc"),
    "a coding that Connection names": (
        post(b"Connection: transfer-encoding", b"Transfer-Encoding: chunked", body=ABC + END),
        b"abc",
    ),
    "a length with an underscore in its name": (
        post(b"Content_Length: 7", b"Content-Length: 3", body=b"abc"),
        b"abc",
    ),
    "a length of nothing": (post(b"Content-Length: 0"), b""),
    "a trailer like a request": (chunked(ABC + b"0\r\nX:POST / HTTP/1.1\r\n\r\n"), b"abc"),
    "an expectation among others": (
        post(b"Expect: y 100-continue", b"Content-Length: 3", body=b"abc"),
        b"abc",
    ),
    "bytes around a value": (
        post(b"User: \x85admin\xa0", b"Content-Length: 3", body=b"abc"),
        b"abc",
    ),
    **{
        f"an upgrade to {name} with {line!r}": (post(*lines, line, body=body), get(b"/hidden"))
        for name, lines in UPGRADES.items()
        for line, body in framed(get(b"/hidden"))
    },
    "an upgrade to foo": (opening(*UPGRADES["foo"]), b""),
    "an upgrade to h2c": (opening(*UPGRADES["h2c"]), b""),
    "a URL with its port": (get(b"http://X:80/first"), b""),
    "a URL with a query": (get(b"http://x/fir%73t?http://other/a#b"), b""),
}
