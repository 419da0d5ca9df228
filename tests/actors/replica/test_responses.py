"""What a handler may return, as its client gets it over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)

from greenroom import serve
from tests.support.asking import Got, ask as ask_url
from tests.support.systems import wait_until


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

    def status_of_numpy(self) -> Any:
        return Response("made", status_code=np.int64(201))  # type: ignore[arg-type]

    def teapot(self) -> Any:
        raise HTTPException(418, "I am a teapot")

    def refusal(self) -> Any:
        raise HTTPException(403, "<p>No</p>", {"Content-Type": "text/html"})

    def page(self) -> Any:
        return HTMLResponse("<p>ä</p>")

    def elsewhere(self) -> Any:
        return RedirectResponse("/there?a=b c")

    def no_content(self) -> Any:
        return Response(status_code=204)

    def not_modified(self) -> Any:
        return Response(status_code=304, headers={"etag": '"1"'})

    def events(self) -> Any:
        async def parts() -> AsyncIterator[str]:
            for number in range(3):
                yield f"id: {number}\ndata: {{}}\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    def parts(self) -> Iterator[str]:
        yield from ("ä", "", "b")

    def sized_parts(self) -> Any:
        return StreamingResponse(iter(["ab", "c"]), headers={"content-length": "3"})

    def parts_of_bytes(self) -> Iterator[Any]:
        yield from (b"a", bytearray(b"b"), memoryview(b"c"))


Ask = Callable[..., Got]


@pytest.fixture(scope="module")
def ask(running, deployed_once):
    route = deployed_once(serve.deployment(Answers).bind())
    return lambda kind, method="GET": ask_url(f"{running.url}{route}/{kind}", None, method)


TEXT, BYTES, JSON = "text/plain; charset=utf-8", "application/octet-stream", "application/json"
PLAIN = "text/plain"
EVENTS = b"".join(b"id: %d\ndata: {}\n\n" % number for number in range(3))
WITHOUT_BODY = {"content-type": None, "transfer-encoding": None}


@pytest.mark.parametrize(
    ("kind", "status", "headers", "content"),
    [
        ("text", 200, {"content-type": TEXT}, "grüß dich".encode()),
        ("raw", 200, {"content-type": PLAIN}, b"\0\xff"),
        ("array_of_bytes", 200, {"content-type": PLAIN}, b"ab"),
        ("view", 200, {"content-type": PLAIN}, b"ab"),
        ("nothing", 200, {"content-type": PLAIN}, b""),
        ("number", 200, {"content-type": JSON}, b"1.5"),
        ("structure", 200, {"content-type": JSON}, '{"a":[1,null,true,"ä"],"b":{}}'.encode()),
        ("page", 200, {"content-type": "text/html; charset=utf-8"}, "<p>ä</p>".encode()),
        ("events", 200, {"content-type": "text/event-stream; charset=utf-8"}, EVENTS),
        ("parts", 200, {"content-type": TEXT}, "äb".encode()),
        ("parts_of_bytes", 200, {"content-type": BYTES}, b"abc"),
        ("sized_parts", 200, {"content-length": "3", "transfer-encoding": None}, b"abc"),
        ("response", 201, {"x-a": "b", "location": "/x"}, b'{"made":true}'),
        ("status_of_numpy", 201, {}, b"made"),
        ("teapot", 418, {"content-type": TEXT}, b"I am a teapot"),
        ("elsewhere", 307, {"location": "/there?a=b%20c"}, b""),
        ("no_content", 204, WITHOUT_BODY, b""),
        ("not_modified", 304, {"etag": '"1"', **WITHOUT_BODY}, b""),
    ],
)
def test_each_kind_of_result_has_its_status_headers_and_bytes(ask, kind, status, headers, content):
    got = ask(kind)
    assert (got.status, got.body) == (status, content)
    assert {name: got.headers[name] for name in headers} == headers


def test_an_http_exception_may_say_what_its_detail_is(ask):
    got = ask("refusal")
    assert (got.status, got.body) == (403, b"<p>No</p>")
    assert got.headers.get_all("content-type") == ["text/html"]


def test_a_response_keeps_each_cookie(ask):
    first, second, third = ask("response").headers.get_all("set-cookie") or ()
    assert first.startswith("a=1; HttpOnly; Max-Age=60; Path=/")
    assert second == "b=2; Path=/b; SameSite=strict; Secure"
    assert third.startswith('c=""; expires=')


@pytest.mark.parametrize("kind", ["text", "response", "parts", "events"])
def test_head_has_the_headers_of_get_and_no_body(ask, kind):
    whole, head = ask(kind), ask(kind, "HEAD")
    assert (head.status, head.body) == (whole.status, b"")
    names = ["content-type", "set-cookie"]
    if kind not in {"parts", "events"}:  # they have none
        names.append("content-length")
    for name in names:
        assert head.headers.get_all(name) == whole.headers.get_all(name)


def test_served_by_header_names_the_replica_of_each_answer(running, deployed, name):
    def served_by(kind: str) -> str | None:
        found: str | None = ask_url(f"{running.url}/{name}/{kind}").headers["X-Served-By"]
        return found

    plain = serve.deployment(Answers)
    deployed(plain.bind())
    assert served_by("text") is None
    deployed(plain.options(served_by_header=True).bind())
    (replica,) = running.status()["backends"][f"{name}#Answers"]["replicas"]
    wait_until(lambda: served_by("text") == replica["tag"], 5, "the replica has the setting")
    for kind in ("parts", "response", "no_such_answer"):  # the last is an exception
        assert served_by(kind) == replica["tag"]
