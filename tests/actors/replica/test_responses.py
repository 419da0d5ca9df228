"""What a handler may return, as its client gets it over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)

from greenroom import serve
from greenroom.serve.admin import applications
from tests.actors.conftest import deploy
from tests.support.systems import RunningSystem, wait_until

NAME = "answers"


class Answers:
    """Answers as the path names."""

    async def __call__(self, request: Any) -> Any:
        self.request = request
        return getattr(self, request.url.path.rpartition("/")[2])()

    def text(self) -> Any:
        return "grüß dich"

    def raw(self) -> Any:
        return b"\0\xff"

    def array_of_bytes(self) -> Any:
        return bytearray(b"ab")

    def view(self) -> Any:
        return memoryview(b"ab")

    def nothing(self) -> Any:
        return None

    def number(self) -> Any:
        return 1.5

    def structure(self) -> Any:
        return {"a": [1, None, True, "ä"], "b": {}}

    def response(self) -> Any:
        response = JSONResponse({"made": True}, 201, headers={"X-A": "b", "Location": "/x"})
        response.set_cookie("a", "1", max_age=60, httponly=True)
        response.set_cookie("b", "2", path="/b", secure=True, samesite="strict")
        response.delete_cookie("c")
        return response

    def teapot(self) -> Any:
        raise HTTPException(418, "I am a teapot")

    def page(self) -> Any:
        return HTMLResponse("<p>ä</p>")

    def elsewhere(self) -> Any:
        return RedirectResponse("/there?a=b c")

    def no_content(self) -> Any:
        return Response(status_code=204)

    def no_content_with_one(self) -> Any:
        return PlainTextResponse("a body that may not be", 204)

    def not_modified(self) -> Any:
        return Response(status_code=304, headers={"etag": '"1"'})

    def events(self) -> Any:
        async def parts() -> AsyncIterator[str]:
            for number in range(3):
                yield f"id: {number}\ndata: {{}}\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    def parts(self) -> Iterator[str]:
        yield from ("ä", "", "b")

    def parts_of_bytes(self) -> Iterator[Any]:
        yield from (b"a", bytearray(b"b"), memoryview(b"c"))


Ask = Callable[..., http.client.HTTPResponse]


@pytest.fixture(scope="module")
def ask(running: RunningSystem) -> Iterator[Ask]:
    """Return what asks on one kept connection; the body is in ``.content``."""
    deploy(running, serve.deployment(Answers).bind(), NAME, f"/{NAME}")
    connection = http.client.HTTPConnection("127.0.0.1", running.settings.http.port, timeout=20)

    def get(kind: str, method: str = "GET", query: str = "") -> Any:
        connection.request(method, f"/{NAME}/{kind}{query}")
        response: Any = connection.getresponse()
        response.content = response.read()
        return response

    yield get
    connection.close()
    applications.delete(running.connection, NAME)


TEXT, BYTES, JSON = "text/plain; charset=utf-8", "application/octet-stream", "application/json"
PLAIN = "text/plain"


@pytest.mark.parametrize(
    ("kind", "content_type", "content"),
    [
        ("text", TEXT, "grüß dich".encode()),
        ("raw", PLAIN, b"\0\xff"),
        ("array_of_bytes", PLAIN, b"ab"),
        ("view", PLAIN, b"ab"),
        ("nothing", PLAIN, b""),
        ("number", JSON, b"1.5"),
        ("structure", JSON, '{"a":[1,null,true,"ä"],"b":{}}'.encode()),
        ("page", "text/html; charset=utf-8", "<p>ä</p>".encode()),
        ("events", "text/event-stream; charset=utf-8", None),
        ("parts", TEXT, "äb".encode()),
        ("parts_of_bytes", BYTES, b"abc"),
    ],
)
def test_each_kind_of_result_has_its_type_and_bytes(
    ask: Ask, kind: str, content_type: str, content: bytes | None
) -> None:
    got: Any = ask(kind)
    assert (got.status, got.headers["content-type"]) == (200, content_type)
    if content is not None:
        assert got.content == content


def test_a_response_keeps_its_status_headers_and_each_cookie(ask: Ask) -> None:
    got: Any = ask("response")
    assert (got.status, json.loads(got.content)) == (201, {"made": True})
    assert (got.headers["x-a"], got.headers["location"]) == ("b", "/x")
    first, second, third = got.headers.get_all("set-cookie")
    assert first.startswith("a=1; HttpOnly; Max-Age=60; Path=/")
    assert second == "b=2; Path=/b; SameSite=strict; Secure"
    assert third.startswith('c=""; expires=')


def test_an_http_exception_keeps_its_status(ask: Ask) -> None:
    got: Any = ask("teapot")
    assert (got.status, got.content) == (418, b"I am a teapot")


def test_a_redirect_is_passed_on(ask: Ask) -> None:
    got: Any = ask("elsewhere")
    assert (got.status, got.headers["location"], got.content) == (307, "/there?a=b%20c", b"")


@pytest.mark.parametrize(
    ("kind", "status"), [("no_content", 204), ("no_content_with_one", 204), ("not_modified", 304)]
)
def test_a_status_without_body_has_none_and_the_connection_goes_on(
    ask: Ask, kind: str, status: int
) -> None:
    got: Any = ask(kind)
    assert (got.status, got.content) == (status, b"")
    assert got.headers["transfer-encoding"] is None
    if status == 304:
        assert got.headers["etag"] == '"1"'
    assert ask("text").status == 200


def test_server_sent_events_come_as_they_are(ask: Ask) -> None:
    got: Any = ask("events")
    assert got.content == b"".join(b"id: %d\ndata: {}\n\n" % number for number in range(3))


@pytest.mark.parametrize("kind", ["text", "numpy", "response", "parts", "events", "no_content"])
def test_head_has_the_headers_of_get_and_no_body(ask: Ask, kind: str) -> None:
    whole: Any = ask(kind)
    head: Any = ask(kind, "HEAD")
    assert (head.status, head.content) == (whole.status, b"")
    for name in ("content-type", "content-length", "set-cookie"):
        if name == "content-length" and kind in {"parts", "events"}:
            continue  # it has none
        assert head.headers.get_all(name) == whole.headers.get_all(name)
    assert ask("text").status == 200, "the connection goes on"


# --- Who has answered -----------------------------------------------------------------------------


def test_served_by_header_names_the_replica_of_each_answer(
    running: RunningSystem, deployed: Callable[..., Any], name: str
) -> None:
    def served_by(kind: str) -> str | None:
        connection = http.client.HTTPConnection("127.0.0.1", running.settings.http.port, timeout=20)
        connection.request("GET", f"/{name}/{kind}")
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.headers["X-Served-By"]

    plain = serve.deployment(Answers)
    deployed(plain.bind())
    assert served_by("text") is None
    deployed(plain.options(served_by_header=True).bind())
    (replica,) = running.status()["backends"][f"{name}#Answers"]["replicas"]
    wait_until(lambda: served_by("text") == replica["tag"], 5, "the replica has the setting")
    for kind in ("parts", "response", "no_such_answer"):  # the last is an exception
        assert served_by(kind) == replica["tag"]
