"""The head of a request, read strictly.

llhttp (httptools) reads heads, and nothing else: it gets all up to the empty line that ends a head,
so it never decides where a message ends. What it lets pass and other servers may read differently
is refused here: a request line that is not exactly ``METHOD target HTTP/1.x``, several Host
headers, two ways to say how long the body is, chunks in HTTP/1.0, lines without limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from greenroom.actors.messages.queries import Query
from greenroom.core.config import HTTPOptions
from greenroom.http_front.asgi import Headers
from greenroom.http_front.bodies import RefusedRequestError

MAX_HEADERS = 100
MAX_HEAD_BYTES = 65536  # of all trailers, and of a head where the settings need no more
MAX_LENGTH_DIGITS = 18

_ONCE = {
    b"host": "there are several Host headers",
    b"content-length": "the Content-Length is not one number",
    b"transfer-encoding": "there are several Transfer-Encoding headers",
}
# Before a request they are no part of it (RFC 9112, section 2.2).
_empty_lines = re.compile(rb"(?:\r\n)+").match
_other_http = re.compile(rb"[^ \r\n]+ [^ \r\n]+ HTTP/((?!1\.[01])[0-9]\.[0-9])\r\n").match
MAX_KNOWN = 2048  # bytes of a head that a connection keeps to know it again


def split(target: bytes) -> tuple[bytes, bytes]:
    """Return a target's path and its query."""
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return path, query


@dataclass(slots=True, eq=False)
class Head:
    """What the head of a request says, and what its connection adds.

    ``path`` is the one to route by, below the root path. ``full_path`` and ``raw_path`` include
    that, whether or not the proxy in front of us took it off. The target's absolute form is reduced
    to its path. ``sent_path`` is what the client has sent.

    A client that sends the same head again on its connection gets the same object, so nothing
    changes it once a query was made from it.
    """

    method: str = field(init=False)
    target: bytes = b""
    http_version: str = "1.1"
    headers: Headers = field(default_factory=list)
    named: dict[bytes, bytes] = field(init=False)  # the same by their names, of several the last
    length: int | None = None  # of the body, where it declares one
    is_chunked: bool = False
    keep_alive: bool = False
    expects_continue: bool = False
    is_socket: bool = False  # it opens a WebSocket
    client: tuple[str, int] | None = field(init=False)
    server: tuple[str, int] | None = field(init=False)
    scheme: str = field(init=False)
    for_pages: bool = False  # it came in where only our own pages are
    path: str = field(init=False)
    full_path: str = field(init=False)
    raw_path: bytes = field(init=False)
    sent_path: str = field(init=False)
    query_string: bytes = field(init=False)
    root_path: str = field(init=False)
    query: Query | None = None  # that was made from it; without its call, if a body follows

    @property
    def has_body(self) -> bool:
        """Whether a body follows."""
        return self.is_chunked or bool(self.length)

    @property
    def page(self) -> str:
        """The page of ours that is asked for, as it was sent; "" for what is users'.

        A page has one spelling: a proxy in front of us that was told to keep it to itself knows it
        by these bytes. Where pages are alone, the admin API is at ``/api/`` as well, Ray Serve's.
        """
        path = self.raw_path.removeprefix(self.root_path.encode())
        if self.for_pages and path.startswith(b"/api/"):
            path = b"/-" + path
        return path.decode("latin-1") if path.startswith(b"/-/") else ""

    def locate(self, root_path: str) -> None:
        """Find the path to route by, in the target."""
        raw_path, self.query_string = split(self.target)
        path = raw_path.decode("latin-1")
        self.place(unquote(path) if "%" in path else path, raw_path, root_path)

    def place(self, path: str, raw_path: bytes, root_path: str) -> None:
        """Find the path to route by, in the one that was sent."""
        self.sent_path = path
        self.root_path = root_path
        if path[:1] != "/" and "://" in path:
            raw_path = b"/" + raw_path.partition(b"://")[2].partition(b"/")[2]
            path = unquote(raw_path.decode("latin-1"))
        self.path = self.full_path = path
        self.raw_path = raw_path
        if not root_path:
            return
        if path == root_path or path.startswith(root_path + "/"):
            self.path = path[len(root_path) :] or "/"
        else:
            self.full_path = root_path + path
            self.raw_path = root_path.encode() + raw_path


class HeadReader:
    """Reads the heads of one connection, one after the other, however they are cut."""

    def __init__(self, options: HTTPOptions) -> None:
        self._max_target_bytes = options.max_target_bytes
        self._max_header_bytes = options.max_header_bytes
        self._parser: HttpRequestParser | None = None
        self._begun = bytearray()  # of a head whose end has not come
        self._head = Head()
        self._known = b""  # its bytes
        self._is_read = False  # llhttp has seen the end of the headers
        self._is_upgrade = False
        self._refusal: RefusedRequestError | None = None

    def close(self) -> None:
        """Let go of the parser, which refers to this object as well."""
        self._parser = None
        self._begun = bytearray()

    @property
    def is_amid(self) -> bool:
        """Whether a head has begun whose end has not come.

        A lone CR has not: it may be half of an empty line, and one after the other would be a new
        beginning for as long as the client likes.
        """
        return bool(self._begun) and self._begun != b"\r"

    def take(self, data: bytes) -> tuple[Head | None, bytes]:
        """Return the head, or None while it is not here in full, and what lies behind it.

        Raises RefusedRequestError. A head that is like the last one is not read again.
        """
        if self._known and self._head.query is not None and data.startswith(self._known):
            return self._head, data[len(self._known) :]
        data = self._behind_empty_lines(data)
        if self._begun:
            before = len(self._begun)
            self._begun += data
        else:
            before = 0
            self._head, self._refusal, self._is_read = Head(), None, False
        text = self._begun if before else data
        end = text.find(b"\r\n\r\n", max(0, before - 3)) + 4
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
            self._finish(text)
            self._known = piece if not before and len(piece) <= MAX_KNOWN else b""
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

    def _behind_empty_lines(self, data: bytes) -> bytes:
        if self._begun == b"\r":  # perhaps of one
            data, self._begun = b"\r" + data, bytearray()
        empty = None if self._begun else _empty_lines(data)
        return data if empty is None else data[empty.end() :]

    # --- Called by the parser -------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        self._head.target += url
        most = self._max_target_bytes
        if len(self._head.target) > most:
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

    def on_headers_complete(self) -> None:
        """Note what the parser knows only now, and check what others may read differently."""
        parser, head = self._parser, self._head
        assert parser is not None
        self._is_read = True
        self._is_upgrade = parser.should_upgrade()
        head.method = parser.get_method().decode("ascii")
        head.keep_alive = parser.should_keep_alive()
        head.named = named = dict(head.headers)
        if len(named) < len(head.headers):
            self._check_repeated()
        head.expects_continue = named.get(b"expect", b"").lower() == b"100-continue"
        if (length := named.get(b"content-length")) is not None:
            if not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
                raise self._refused(400, _ONCE[b"content-length"])
            head.length = int(length)
        if (coding := named.get(b"transfer-encoding")) is not None:
            if coding.lower() != b"chunked":
                # A coding before "chunked" would reach user code undone, as if it were the body.
                shown = coding[:100].decode("latin-1")
                text = f"the Transfer-Encoding {shown!r} is not supported; use chunked alone"
                raise self._refused(501, text)
            head.is_chunked = True

    def _check_repeated(self) -> None:
        names = [name for name, _ in self._head.headers]
        for name, text in _ONCE.items():
            if names.count(name) > 1:
                raise self._refused(400, text)

    def _refused(self, status: int, text: str) -> RefusedRequestError:
        self._refusal = RefusedRequestError(status, text)
        return self._refusal  # httptools raises another error for it

    def _finish(self, text: bytes | bytearray) -> None:
        """Check the head as a whole."""
        head = self._head
        if not self._is_read:
            raise RefusedRequestError(400, "the headers are not complete where they end")
        line = b"%b %b HTTP/" % (head.method.encode("ascii"), head.target)
        if not text.startswith(line + b"1.1\r\n"):
            self._check_other_version(text, line)
        target = head.target
        if target[:1] == b"/" and not (target.isascii() or split(target)[0].isascii()):
            raise RefusedRequestError(400, "the path has bytes that are no ASCII")
        if head.method == "CONNECT":
            raise RefusedRequestError(501, "CONNECT is for proxies, which this server is not")
        if head.is_chunked and head.length is not None:
            raise RefusedRequestError(400, "there are a length and a Transfer-Encoding")
        if head.has_body:
            self._parser = None  # it expects the body, which goes past it
        # Any other upgrade is ignored, as HTTP allows: the request is served as it is.
        if self._is_upgrade and head.method == "GET" and head.http_version == "1.1":
            upgrades = [value for name, value in head.headers if name == b"upgrade"]
            head.is_socket = b",".join(upgrades).strip().lower() == b"websocket"
        if head.is_socket and head.has_body:
            raise RefusedRequestError(400, "a WebSocket's opening has no body")

    def _check_other_version(self, text: bytes | bytearray, line: bytes) -> None:
        head = self._head
        if text.startswith(line + b"1.0\r\n"):
            head.http_version = "1.0"
            if head.is_chunked:
                raise RefusedRequestError(400, "HTTP/1.0 has no Transfer-Encoding")
            head.keep_alive = head.expects_continue = False
            return
        other = _other_http(text)
        if other is not None:
            version = other[1].decode("ascii")
            raise RefusedRequestError(505, f"HTTP/{version} is not spoken here")
        text_ = "the request line is not of the form METHOD target HTTP/1.1, with single spaces"
        raise RefusedRequestError(400, text_)
