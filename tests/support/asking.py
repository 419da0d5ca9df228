"""Requests whose answers are returned with their status and headers, whatever they are."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.systems import RunningSystem


class Got(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def ask(url: str, data: Any = None, method: str | None = None, **head: str) -> Got:
    """Send a request; a dict goes as JSON, and underscores in names of headers are dashes."""
    if isinstance(data, dict):
        data, head["Content-Type"] = json.dumps(data).encode(), "application/json"
    headers = {name.replace("_", "-"): value for name, value in head.items()}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    try:
        with _opener.open(request, timeout=60) as response:
            return Got(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Got(error.code, error.headers, error.read())


Get = Callable[..., http.client.HTTPResponse]


@contextlib.contextmanager
def asking(running: RunningSystem, path: str) -> Iterator[Get]:
    """Give what sends requests; its connections are closed at the end."""
    with contextlib.ExitStack() as opened:

        def ask(kind: str, count: int = 3, *, method: str = "GET", **headers: str) -> Any:
            port = running.settings.http.port
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            opened.callback(connection.close)
            connection.request(method, f"{path}?kind={kind}&count={count}", headers=headers)
            return connection.getresponse()

        yield ask
