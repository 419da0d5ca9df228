"""The head of a request, read strictly.

llhttp (httptools) reads heads, and nothing else: it is fed up to the empty line that ends a head,
so it never decides where a message ends. What it lets pass and other servers may read differently
is refused here: a request line that is not exactly ``METHOD target HTTP/1.x``, several Host
headers, two ways to say how long the body is, chunks in HTTP/1.0, lines without limits.
"""

from __future__ import annotations

import re

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from greenroom.core.config import HTTPOptions
from greenroom.http_front.connections import FORWARDED
from greenroom.http_front.exchange import Headers

MAX_HEADERS = 100
MAX_HEAD_BYTES = 65536  # of all trailers, and of a head where the settings need no more
MAX_LENGTH_DIGITS = 18

_CHECKED = FORWARDED | {b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
_other_http = re.compile(rb"[^ \r\n]+ [^ \r\n]+ HTTP/((?!1\.[01])[0-9]\.[0-9])\r\n").match


class RefusedRequestError(Exception):
    """A request that cannot be read, or not in one way only, with its HTTP status."""

    def __init__(self, status: int, text: str, headers: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class Head:
    """The head of one request; ``length`` is None where it declares none."""

    __slots__ = (
        "expects_continue",
        "has_host",
        "headers",
        "is_chunked",
        "is_forwarded",
        "is_opening",
        "keep_alive",
        "length",
        "method",
        "upgrade",
        "url",
        "version",
    )

    def __init__(self) -> None:
        self.method = b""
        self.url = b""
        self.version = "1.1"
        self.headers: Headers = []
        self.length: int | None = None
        self.is_chunked = False
        self.keep_alive = False
        self.expects_continue = False
        self.has_host = False
        self.is_forwarded = False  # a proxy says something of the client
        self.upgrade = b""
        self.is_opening = False  # of a WebSocket

    @property
    def has_body(self) -> bool:
        """Whether a body follows."""
        return self.is_chunked or bool(self.length)


class HeadReader:
    """Reads the heads of one connection, one after the other, however they are cut."""

    def __init__(self, options: HTTPOptions) -> None:
        self._max_target_bytes = options.max_target_bytes
        self._max_header_bytes = options.max_header_bytes
        self._parser: HttpRequestParser | None = None
        self._begun = bytearray()  # of a head whose end has not come
        self._head = Head()
        self._is_read = False  # llhttp has seen the end of the headers
        self._is_upgrade = False
        self._refusal: RefusedRequestError | None = None

    def close(self) -> None:
        """Let go of the parser, which refers to this object as well."""
        self._parser = None
        self._begun = bytearray()

    def take(self, data: bytes) -> tuple[Head | None, bytes]:
        """Return the head, or None while it is not here in full, and the bytes behind it.

        Raises RefusedRequestError.
        """
        if self._begun:
            before = len(self._begun)
            self._begun += data
        else:
            before = 0
            self._head, self._refusal, self._is_read = Head(), None, False
        text = self._begun if before else data
        # One empty line before a request is allowed (RFC 9112, section 2.2).
        start = 2 if text[:2] == b"\r\n" else 0
        end = text.find(b"\r\n\r\n", max(start, before - 3)) + 4
        is_here = end >= 4
        piece = data[: end - before] if is_here else data
        if self._parser is None:
            self._parser = HttpRequestParser(self)
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade:
            self._parser = None
        except HttpParserError as error:
            raise self._refusal or RefusedRequestError(400, str(error)) from None
        if is_here:
            self._finish(text, start)
            self._begun = bytearray()
            return self._head, data[len(piece) :]
        if self._is_read:
            raise RefusedRequestError(400, "the headers do not end with an empty line")
        if not before:
            self._begun += data
        most = max(MAX_HEAD_BYTES, 2 * (self._max_target_bytes + self._max_header_bytes))
        if len(self._begun) > most:
            raise RefusedRequestError(431, f"the headers have over {most} bytes")
        return None, b""

    # --- Called by the parser -------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        self._head.url += url
        most = self._max_target_bytes
        if len(self._head.url) > most:
            raise self._refused(414, f"the target has over {most} bytes (max_target_bytes)")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, within the limits."""
        name, value = name.lower(), value.rstrip(b" \t")  # llhttp strips only what is in front
        headers = self._head.headers
        headers.append((name, value))
        if len(name) + len(value) > self._max_header_bytes:
            text = f"a header has over {self._max_header_bytes} bytes (max_header_bytes)"
            raise self._refused(431, text)
        if len(headers) > MAX_HEADERS:
            raise self._refused(431, f"there are over {MAX_HEADERS} headers")
        if name in _CHECKED:
            self._check(name, value)

    def on_headers_complete(self) -> None:
        """Note what the parser knows only now."""
        parser, head = self._parser, self._head
        assert parser is not None
        self._is_read = True
        self._is_upgrade = parser.should_upgrade()
        head.method = parser.get_method()
        head.keep_alive = parser.should_keep_alive()

    # --- What others may read differently -------------------------------------------------------

    def _check(self, name: bytes, value: bytes) -> None:
        head = self._head
        if name in FORWARDED:
            head.is_forwarded = True
        elif name == b"upgrade":
            head.upgrade = head.upgrade + b"," + value if head.upgrade else value
        elif name == b"expect":
            head.expects_continue = value.lower() == b"100-continue"
        elif name == b"host":
            if head.has_host:
                raise self._refused(400, "there are several Host headers")
            head.has_host = True
        elif name == b"content-length":
            is_number = value.isdigit() and len(value) <= MAX_LENGTH_DIGITS
            if head.length is not None or not is_number:
                raise self._refused(400, "the Content-Length is not one number")
            head.length = int(value)
        elif head.is_chunked:
            raise self._refused(400, "there are several Transfer-Encoding headers")
        elif value.lower() != b"chunked":
            # A coding before "chunked" would reach user code undone, as if it were the body.
            shown = value[:100].decode("latin-1")
            text = f"the Transfer-Encoding {shown!r} is not supported; use chunked alone"
            raise self._refused(501, text)
        else:
            head.is_chunked = True

    def _refused(self, status: int, text: str) -> RefusedRequestError:
        self._refusal = RefusedRequestError(status, text)
        return self._refusal  # httptools raises another error for it

    def _finish(self, text: bytes | bytearray, start: int) -> None:
        """Check the head as a whole; it begins at ``start``."""
        head = self._head
        if not self._is_read:
            raise RefusedRequestError(400, "the headers are not complete where they end")
        if not text.startswith(b"%b %b HTTP/1.1\r\n" % (head.method, head.url), start):
            self._check_other_version(text, start)
        if head.method == b"CONNECT":
            raise RefusedRequestError(501, "CONNECT is for proxies, which this server is not")
        if head.is_chunked and head.length is not None:
            raise RefusedRequestError(400, "there are a length and a Transfer-Encoding")
        if head.has_body:
            self._parser = None  # it expects the body, which goes past it
        # Any other upgrade is ignored, as HTTP allows: the request is served as it is.
        if self._is_upgrade and head.method == b"GET" and head.version == "1.1":
            head.is_opening = head.upgrade.strip().lower() == b"websocket"
        if head.is_opening and head.has_body:
            raise RefusedRequestError(400, "a WebSocket's opening has no body")

    def _check_other_version(self, text: bytes | bytearray, start: int) -> None:
        head = self._head
        if text.startswith(b"%b %b HTTP/1.0\r\n" % (head.method, head.url), start):
            head.version = "1.0"
            if head.is_chunked:
                raise RefusedRequestError(400, "HTTP/1.0 has no Transfer-Encoding")
            head.keep_alive = head.expects_continue = False
            return
        other = _other_http(text, start)
        if other is not None:
            version = other[1].decode("ascii")
            raise RefusedRequestError(505, f"HTTP/{version} is not spoken here")
        text_ = "the request line is not of the form METHOD target HTTP/1.1, with single spaces"
        raise RefusedRequestError(400, text_)
