"""Requests whose answers are returned with their status and headers, whatever they are."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 30.0


class Got(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def __getitem__(self, name: Any) -> str:  # of a header that is there once
        (value,) = self.all(name)
        return value

    def all(self, name: str) -> list[str]:
        return self.headers.get_all(name, [])

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connect(url: str) -> http.client.HTTPConnection:
    """Return a connection to a URL's server."""
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)


def answer(connection: http.client.HTTPConnection) -> Got:
    """Read the answer to what was sent, and close the connection."""
    with contextlib.closing(connection):
        response = connection.getresponse()
        return Got(response.status, response.headers, response.read())


def ask(
    url: str,
    data: Any = None,
    method: str | None = None,
    headers: Iterable[tuple[str, str]] = (),
    **head: str,
) -> Got:
    """Send a request; a dict goes as JSON, and underscores in names of headers are dashes."""
    if isinstance(data, dict):
        data, head["Content-Type"] = json.dumps(data).encode(), "application/json"
    sent = http.client.HTTPMessage()  # which may have a name twice
    for name, value in (*headers, *((n.replace("_", "-"), v) for n, v in head.items())):
        sent[name] = value
    connection = connect(url)
    target = url.partition(urlsplit(url).netloc)[2] or "/"
    connection.request(method or ("GET" if data is None else "POST"), target, data, sent)
    return answer(connection)


def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes on a connection of its own; return all that comes until it is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


Get = Callable[..., http.client.HTTPResponse]


@contextlib.contextmanager
def asking(url: str) -> Iterator[Get]:
    """Give what sends requests; its connections are closed at the end."""
    with contextlib.ExitStack() as opened:

        def ask(kind: str, count: int = 3, *, method: str = "GET", **headers: str) -> Any:
            connection = opened.enter_context(contextlib.closing(connect(url)))
            target = f"{urlsplit(url).path}?kind={kind}&count={count}"
            connection.request(method, target, headers=headers)
            return connection.getresponse()

        yield ask


def statuses(received: bytes) -> list[int]:
    """Return the statuses of all answers among the bytes that came, in their order."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
