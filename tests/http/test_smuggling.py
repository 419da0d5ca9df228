"""Requests that two servers might read in two ways: each is refused, or read in the only right one.

Every one is followed, on the same connection, by a second request, as an attacker would hide it.
Where the end of the first is in doubt, the connection is closed, and the second is never seen.
"""

import re

import pytest

SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ABC = b"3\r\nabc\r\n"
END = b"0\r\n\r\n"


def post(*headers, body=b""):
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST /first HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" + body


def chunked(body):
    return post(b"Transfer-Encoding: chunked", body=body)


def get(target=b"/first", *, host=b"x", version=b"HTTP/1.1"):
    return b"GET %s %s\r\nHost: %s\r\n\r\n" % (target, version, host)


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


REFUSED = {
    "a length and chunks": post(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=END),
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
    "a chunk's size before a line feed": chunked(b"3\nabc\r\n" + END),
    "a chunk's extension before a line feed": chunked(b"3;a\nabc\r\n" + END),
    "a chunk's extension with a carriage return": chunked(b"3;a\rabc\r\n" + END),
    "a chunk's size with 0x": chunked(b"0x3\r\nabc\r\n" + END),
    "a chunk's size with a sign": chunked(b"+3\r\nabc\r\n" + END),
    "a negative chunk": chunked(b"-3\r\nabc\r\n" + END),
    "a chunk's size with an underscore": chunked(b"0_3\r\nabc\r\n" + END),
    "a space before a chunk's size": chunked(b" 3\r\nabc\r\n" + END),
    "a space after a chunk's size": chunked(b"3 \r\nabc\r\n" + END),
    "a chunk without a size": chunked(b"\r\nabc\r\n" + END),
    "a chunk longer than its size": chunked(b"3\r\nabcd\r\n" + END),
    "a chunk that ends in a line feed": chunked(b"3\r\nabc\n" + END),
    "a length after the last chunk": chunked(ABC + b"0\r\nContent-Length: 5\r\n\r\n"),
    "two hosts": b"GET /first HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "one host twice": b"GET /first HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "an authority": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no slash": get(b"first"),
    "tabs": b"GET\t/first\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "a space in the target": get(b"/fi rst"),
    "a NUL in the target": get(b"/fi\0rst"),
    "bytes in the target": get(b"/fi\xffrst"),
    "another version": get(version=b"HTTP/1.10"),
    "HTTP/2 with a request line": get(version=b"HTTP/2.0"),
    "no version": b"GET /first\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a bad method": b'G"ET /first HTTP/1.1\r\nHost: x\r\n\r\n',
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
    "a URL with its port": (get(b"http://X:80/first"), b""),
    "a URL with a query": (get(b"http://x/fir%73t?http://other/a#b"), b""),
}


@pytest.mark.parametrize("request_bytes", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_and_what_follows_is_not_read(front, request_bytes):
    before = front.ask("/seen").json["asked"]
    (status,) = statuses(front.exchange(request_bytes + SECOND))
    assert status in {400, 501, 505}
    assert front.ask("/seen").json["asked"] == before + 1


@pytest.mark.parametrize("request_bytes", REFUSED_ALONE.values(), ids=REFUSED_ALONE)
def test_it_is_refused_and_what_follows_is_read(front, request_bytes):
    assert statuses(front.exchange(request_bytes + SECOND)) == [400, 200]


@pytest.mark.parametrize(("request_bytes", "body"), READ_IN_ONE_WAY.values(), ids=READ_IN_ONE_WAY)
def test_it_is_read_in_the_right_way_and_so_is_what_follows(front, request_bytes, body):
    received = front.exchange(request_bytes + SECOND)
    assert statuses(received) == [200, 200]
    first, second = re.findall(rb'"path": "(.*?)".*?"body_size": (\d+)', received)
    assert (first, second) == ((b"/first", b"%d" % len(body)), (b"/second", b"0"))


@pytest.mark.parametrize("length", [b"9" * 30, b"9" * 5000])
def test_a_length_without_bounds_is_refused(front, length):
    received = front.exchange(post(b"Content-Length: " + length, body=b"abc") + SECOND)
    assert statuses(received) == [400]


def test_options_of_the_whole_server_is_answered_here(front):
    received = front.exchange(b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(received) == [204]
    assert b"\r\nx-request-id: " in received.lower()


def test_none_of_this_put_a_traceback_on_stderr(front):
    assert front.ask("/echo").status == 200
    assert "Traceback" not in front.stderr_path.read_text()


# --- slow headers ---------------------------------------------------------------------------------

HALF = b"GET /slow HTTP/1.1\r\nHost: x\r\nX-Half"


@pytest.mark.parametrize("sent", [b"", b"G", HALF])
def test_a_connection_that_sends_no_request_in_time_is_closed(start_front, sent):
    front = start_front(GREENROOM_HTTP_HEADER_TIMEOUT_S="0.4")
    with front.connect() as connection:
        connection.sendall(sent)
        assert b" 200 " not in connection.recv(1000)  # ends: closed, or after a 408
    assert front.ask("/seen").json["asked_paths"] == ["/seen"]


def test_who_is_told_that_it_was_too_slow_and_stays_keeps_no_other_from_being_closed(start_front):
    front = start_front(GREENROOM_HTTP_HEADER_TIMEOUT_S="0.4")
    with front.connect() as slow:
        slow.sendall(HALF)
        assert b" 408 " in slow.recv(1000)
        with front.connect() as silent:
            assert silent.recv(1000) == b""
    assert "Traceback" not in front.stderr_path.read_text()


def test_bytes_that_trickle_in_do_not_buy_time(start_front, until):
    front = start_front(GREENROOM_HTTP_HEADER_TIMEOUT_S="0.4")
    with front.connect() as connection:
        connection.sendall(HALF)
        connection.settimeout(0.05)

        def is_closed():
            try:
                connection.sendall(b"x")
                return connection.recv(1000) == b""
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True

        until("the connection is closed", is_closed)
    assert front.ask("/seen").json["asked_paths"] == ["/seen"]


def test_headers_that_trickle_in_on_a_kept_connection_do_not_buy_time(start_front, until):
    front = start_front(GREENROOM_HTTP_HEADER_TIMEOUT_S="0.4")
    with front.connect() as connection:
        connection.sendall(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in connection.recv(1000)
        connection.sendall(HALF)
        while connection.recv(1000):
            pass  # the rest of the first answer, then the end
    assert front.ask("/seen").json["asked_paths"] == ["/first", "/seen"]


def test_a_request_in_time_is_not_bound_by_the_limit_on_headers(start_front):
    front = start_front(GREENROOM_HTTP_HEADER_TIMEOUT_S="0.5")
    assert front.ask("/sleep/1.6").status == 200  # the worker looks once a second
