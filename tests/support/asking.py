"""Requests whose answers are told with their status and headers, whatever they are."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple


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
