"""What user code answers wrongly, as its client sees it on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from greenroom import serve
from greenroom.serve.admin import applications
from tests.actors.conftest import deploy
from tests.support.asking import exchange, statuses

EVIL = "1\r\nx-evil: 1"


class Wrong:
    """Answers wrongly, in the way that the path names."""

    async def __call__(self, request: Any) -> Any:
        kind = request.url.path.rpartition("/")[2].replace("-", "_")
        return getattr(self, kind, self.well)(request)

    def well(self, request: Any) -> str:
        return "well"

    def an_object(self, _: Any) -> Any:
        return object()

    def a_nan(self, _: Any) -> Any:
        return {"x": float("nan")}

    def a_loop(self, _: Any) -> Any:
        loop: list[Any] = []
        loop.append(loop)
        return loop

    def a_surrogate(self, _: Any) -> Any:
        return "\ud800"

    def an_exception(self, _: Any) -> Any:
        raise ValueError("a secret in the exception's text")

    def an_unknown_handle(self, _: Any) -> Any:
        return serve.get_app_handle("secret")

    def a_streams_header(self, _: Any) -> Any:
        return StreamingResponse(iter(["split"]), headers={"x-a": EVIL})

    def a_status_of_0(self, _: Any) -> Any:
        return Response("secret", status_code=0)

    def a_status_of_100(self, _: Any) -> Any:
        return Response("secret", status_code=100)

    def an_exceptions_status(self, _: Any) -> Any:
        raise HTTPException(status_code=1000, detail="secret")

    async def late_exception(self, _: Any) -> AsyncIterator[str]:
        yield "begun"
        raise ValueError("a secret in the exception's text")

    def an_early_exception(self, _: Any) -> Iterator[str]:
        yield from ()
        raise ValueError("a secret in the exception's text")

    def a_part(self, _: Any) -> Iterator[Any]:
        yield 42

    def late_object(self, _: Any) -> Iterator[Any]:
        yield "begun"
        yield object()

    def late_response(self, _: Any) -> Any:
        def parts() -> Iterator[str]:
            yield "begun"
            raise ValueError("midway")

        return StreamingResponse(parts(), headers={"content-length": "100"})


START = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]}
BODY = {"type": "http.response.body", "body": b"begun"}
MORE = {**BODY, "more_body": True}

BROKEN: dict[str, tuple[list[dict[str, Any]], bytes]] = {
    "nothing": ([], b"returned without a response"),
    "a-start-alone": ([START], b"ended without its last part"),
    "a-body-first": ([BODY], b"a body before http.response.start"),
    "two-starts": ([START, START, BODY], b"http.response.start twice"),
    "an-unknown-event": ([{"type": "http.response.song"}], b"'http.response.song'"),
    "a-status-in-words": ([{**START, "status": "200"}], b"the status '200'"),
    "a-status-of-99": ([{**START, "status": 99}, BODY], b"the status 99"),
    "headers-of-str": ([{**START, "headers": [("x-a", "b")]}, BODY], b"'x-a' is not bytes"),
    "headers-of-triples": ([{**START, "headers": [(b"a", b"b", b"c")]}, BODY], b"no pairs of"),
    "headers-of-none": ([{**START, "headers": None}, BODY], b"no pairs of bytes"),
    "a-body-of-str": ([START, {**BODY, "body": "text"}], b"a body of type str"),
}
EVENTS: dict[str, list[dict[str, Any]]] = {
    **{kind: events for kind, (events, _) in BROKEN.items()},
    "two-bodies": [START, BODY, BODY],
    "no-end": [START, MORE],
    "a-second-start-midway": [START, MORE, START],
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Send the events that the path names; or none, for ever."""
    assert scope["type"] == "http"
    kind = scope["path"].rpartition("/")[2]
    if kind == "silence":
        await asyncio.Event().wait()
    for event in EVENTS.get(kind, [START, BODY]):
        await send(event)


Raw = Callable[..., bytes]
NAMES = ("wrong-code", "wrong-app", "silent-app")


@pytest.fixture(scope="module")
def raw(running):
    """Return what asks a deployment on a connection of its own, and gives all that comes back."""
    wrong_app = serve.ingress(app)()
    deploy(running, serve.deployment(Wrong).bind(), NAMES[0], f"/{NAMES[0]}")
    deploy(running, serve.deployment(wrong_app).bind(), NAMES[1], f"/{NAMES[1]}")
    silent_app = serve.deployment(request_timeout_s=1.0)(wrong_app)
    deploy(running, silent_app.bind(), NAMES[2], f"/{NAMES[2]}")

    def ask(name: str, kind: str, method: str = "GET") -> bytes:
        head = f"{method} /{name}/{kind} HTTP/1.1\r\nHost: x\r\n"
        wanted = f"{head}X-Request-ID: the-id\r\n\r\n"
        following = f"{head}Connection: close\r\n\r\n".replace(kind, "well")
        # At once: what came after the connection was cut would have it reset, and nothing read.
        return exchange(running.settings.http.port, f"{wanted}{following}".encode())

    yield ask
    for name in NAMES:
        applications.delete(running.connection, name)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("an-object", b"cannot turn a object into an HTTP response"),
        ("a-nan", b"cannot turn a dict into an HTTP response"),
        ("a-loop", b"cannot turn a list into an HTTP response"),
        ("a-surrogate", b"no Unicode text"),
        ("an-exception", b"the deployment raised an exception"),
        ("an-unknown-handle", b"the deployment raised an exception"),
        ("a-streams-header", b"invalid response header b'x-a'"),
        ("a-status-of-0", b"has the status 0, expected 200 to 999"),
        ("a-status-of-100", b"has the status 100, expected 200 to 999"),
        ("an-exceptions-status", b"has the status 1000, expected 200 to 999"),
        ("a-part", b"a generator yielded a int; yield str or bytes"),
        ("an-early-exception", b"the deployment raised an exception"),
    ],
)
def test_what_cannot_be_an_answer_is_500_and_says_why(raw, kind, message):
    received = raw(NAMES[0], kind)
    assert statuses(received) == [500, 200], "and the connection goes on"
    assert message in received
    assert b"Request ID: the-id" in received
    assert b"secret" not in received.lower()
    assert b"Traceback" not in received
    assert b"\r\nx-evil" not in received


@pytest.mark.parametrize("kind", ["late-exception", "late-object", "late-response"])
def test_what_fails_midway_cuts_the_connection(raw, kind):
    received = raw(NAMES[0], kind)
    assert statuses(received) == [200]
    assert b"begun" in received
    assert not received.endswith(b"0\r\n\r\n"), "an end that a client would take for a good one"
    assert b"secret" not in received


@pytest.mark.parametrize("kind", BROKEN)
def test_an_app_that_breaks_the_protocol_is_500_and_says_how(raw, kind):
    received = raw(NAMES[1], kind)
    assert statuses(received) == [500, 200]
    assert BROKEN[kind][1] in received


def test_what_an_app_sends_after_its_end_is_dropped(raw):
    received = raw(NAMES[1], "two-bodies")
    assert statuses(received) == [200, 200]
    assert received.count(b"begun") == 2


@pytest.mark.parametrize("kind", ["no-end", "a-second-start-midway"])
def test_an_app_that_breaks_the_protocol_midway_cuts_the_connection(raw, kind):
    received = raw(NAMES[1], kind)
    assert statuses(received) == [200]
    assert received.count(b"begun") == 1
    assert not received.endswith(b"0\r\n\r\n")


def test_an_app_that_never_answers_is_408(raw):
    assert statuses(raw(NAMES[2], "silence")) == [408, 200]


def test_a_head_that_fails_has_no_body(raw):
    received = raw(NAMES[0], "an-exception", "HEAD")
    assert statuses(received) == [500, 200]
    assert b"the deployment" not in received
