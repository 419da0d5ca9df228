"""Between HTTP as messages carry it and what user code sees: requests in, responses out."""

from __future__ import annotations

import asyncio
import json
import operator
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope

from greenroom.actors.messages.queries import END, HttpAnswer, HttpCall, StreamEnded
from greenroom.actors.replica.context import Headers, Reply
from greenroom.actors.replica.jsonable import to_json
from greenroom.core.errors import PASSED_ON, UnsupportedResultError

HELD_S = 0.01
HELD_PASSES = 60  # five layers of BaseHTTPMiddleware take 52
ERROR = 500

_JSON = ((b"content-type", b"application/json"),)
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_PLAIN = ((b"content-type", b"text/plain"),)  # bytes, of whichever charset, or nothing
_BYTES = ((b"content-type", b"application/octet-stream"),)


def make_scope(call: HttpCall, route: str) -> dict[str, Any]:
    """Make what an ASGI app sees of a request; an endpoint's route is part of the root path."""
    prefix = "" if route == "/" else route
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": call.http_version,
        "method": call.method,
        "scheme": call.scheme,
        "path": call.path,
        "raw_path": call.raw_path,
        "query_string": call.query_string,
        "root_path": call.root_path + prefix,
        "headers": list(call.headers),
        "client": call.client,
        "server": call.server,
        "state": {},
    }


class WholeRequest(Request):
    """A request whose body is here. Starlette's way to it and its JSON takes 8 % of a request."""

    whole: bytes

    async def body(self) -> bytes:
        """Return the body."""
        return self.whole

    async def json(self) -> Any:
        """Return what the body says; a ValueError where it is no JSON."""
        if not hasattr(self, "content"):
            try:
                self.content: Any = from_json(self.whole)
            except ValueError:  # Python's own takes UTF-16, too, or says what is wrong
                self.content = json.loads(self.whole)
        return self.content


def make_request(call: HttpCall, reply: Reply) -> Request:
    """Make the request that a handler gets; its body is here, or comes in parts."""
    scope = make_scope(call, reply.assignment.route)
    receive = Body(call.body, reply).receive
    if reply.upload is not None:
        return Request(scope, receive)
    request = WholeRequest(scope, receive)
    request.whole = call.body
    return request


class Body:
    """A request's body: what came with the query, then what follows it.

    ``reply`` is None for one that was pickled.
    """

    def __init__(self, beginning: bytes | None, reply: Reply | None) -> None:
        self._beginning = beginning
        self._reply = reply
        self._upload = None if reply is None else reply.upload

    def __reduce__(self) -> Any:
        """Pickle what has come whole: a request may be an argument of a call."""
        if self._upload is not None:
            raise TypeError(
                "the body of this request comes in parts; await its body() before it is passed on"
            )
        return Body, (self._beginning, None)

    async def receive(self) -> Message:
        """Return the next part; after the last, http.disconnect once the response is complete.

        As with uvicorn, that comes also in place of what has not come by then.
        """
        beginning, self._beginning = self._beginning, None
        if beginning or (beginning is not None and self._upload is None):
            more = self._upload is not None
            return {"type": "http.request", "body": beginning, "more_body": more}
        part = None if self._upload is None else await self._upload.next()
        if part is None:
            await (asyncio.Event().wait() if self._reply is None else self._reply.completed())
            return {"type": "http.disconnect"}
        if part.ends == END:
            self._upload = None
        return {"type": "http.request", "body": part.data, "more_body": self._upload is not None}


async def give_answer(reply: Reply, result: Any, request: Request) -> HttpAnswer | None:
    """Turn what a handler returned into an answer; None when it has been given in parts.

    As Ray Serve has it: str and bytes are text/plain, None is that without a body, a Starlette
    response is itself with its background tasks, the parts of an iterator leave as they are made,
    and anything else is JSON. Raises UnsupportedResultError naming the type that is none of these.
    """
    query_id = reply.assignment.query.id
    if isinstance(result, Response):
        return await _give_response(reply, result, request)
    if isinstance(result, str):
        return HttpAnswer(query_id, 200, _TEXT, _encoded(result))
    if isinstance(result, bytes | bytearray | memoryview):
        return HttpAnswer(query_id, 200, _PLAIN, bytes(result))
    if result is None:
        return HttpAnswer(query_id, 200, _PLAIN, b"")
    if hasattr(result, "__aiter__"):
        await reply.give(result, _part, headers=_TEXT)
        return None
    return HttpAnswer(query_id, 200, _JSON, _json(result))


def _json(result: Any) -> bytes:
    try:
        return to_json(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedResultError(
            f"cannot turn a {type(result).__name__} into an HTTP response ({error}); return str, "
            "bytes, something JSON-able, a generator or a Starlette response"
        ) from error


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedResultError(f"a result that is no Unicode text: {error}") from error


def _part(value: Any) -> tuple[Headers, bytes]:
    """Return str as text or bytes as they are; the first part says which it is."""
    if isinstance(value, str):
        return _TEXT, _encoded(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _BYTES, bytes(value)
    raise UnsupportedResultError(
        f"a generator yielded a {type(value).__name__}; yield str or bytes"
    )


def response_for(error: HTTPException) -> Response:
    """Return the response that Starlette gives to an HTTPException."""
    if error.status_code in {204, 304}:
        return Response(status_code=error.status_code, headers=error.headers)
    return PlainTextResponse(error.detail, error.status_code, error.headers)


async def _give_response(reply: Reply, response: Response, request: Request) -> HttpAnswer | None:
    status = _checked_status(response.status_code, "the response has")
    is_whole = not isinstance(response, StreamingResponse) and response.background is None
    if is_whole and hasattr(response, "body"):  # a FileResponse reads its file when it is called
        query_id, headers = reply.assignment.query.id, tuple(response.raw_headers)
        return HttpAnswer(query_id, status, headers, bytes(response.body))
    await AsgiReply(reply).run(response, request.scope, request.receive)
    return None


class AsgiReply:
    """What an ASGI app sends: what comes whole at once is an answer, anything else parts.

    Events that the protocol does not allow where they come raise UnsupportedResultError in the app.

    Two ends are held until the app returns, for at most HELD_S and HELD_PASSES of the loop. That of
    parts without a declared length: Starlette's BaseHTTPMiddleware ends an answer that broke off
    inside of it as a good one, and raises then. And a 500: Starlette sends it for an exception and
    raises that, which has a status of its own where it is one of PASSED_ON. Not for longer:
    background tasks run before it returns, too.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._query_id = reply.assignment.query.id
        self._status = 0  # 0 before the start
        self._headers: Headers = ()
        self._has_begun = False
        self._is_complete = False
        self._end: HttpAnswer | StreamEnded | None = None  # that is held
        self._held: asyncio.Handle | None = None

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Let the app answer; UnsupportedResultError when it returns before the end."""
        try:
            await app(scope, receive, self.send)
        except PASSED_ON:
            raise
        except Exception:
            if isinstance(self._end, HttpAnswer):
                self._release()
            raise
        finally:
            if self._held is not None:
                self._held.cancel()
        if not self._status:
            raise UnsupportedResultError("the ASGI app returned without a response")
        if not self._is_complete:
            raise UnsupportedResultError("the response ended without its last part")
        self._release()

    async def send(self, event: Message) -> None:
        """Take an event of the response."""
        kind = event.get("type")
        if self._is_complete:
            raise UnsupportedResultError(f"the ASGI app sent {kind!r} after its response's end")
        if kind == "http.response.start":
            self._start(event)
        elif kind != "http.response.body":
            raise UnsupportedResultError(f"the ASGI app sent {kind!r}, which is no part of HTTP")
        elif not self._status:
            raise UnsupportedResultError("the ASGI app sent a body before http.response.start")
        else:
            body = event.get("body", b"")
            if not isinstance(body, bytes | bytearray | memoryview):
                name = type(body).__name__
                raise UnsupportedResultError(f"the ASGI app sent a body of type {name}, not bytes")
            await self._body(bytes(body), more=bool(event.get("more_body", False)))

    def _start(self, event: Message) -> None:
        if self._status:
            raise UnsupportedResultError("the ASGI app sent http.response.start twice")
        status = _checked_status(event.get("status"), "the ASGI app sent")
        try:
            self._headers = tuple((_bytes(name), _bytes(value)) for name, value in event["headers"])
        except KeyError:
            self._headers = ()
        except (TypeError, ValueError) as error:
            raise UnsupportedResultError(
                f"the ASGI app sent headers that are no pairs of bytes: {error}"
            ) from error
        self._status = status

    async def _body(self, body: bytes, *, more: bool) -> None:
        reply, query_id = self._reply, self._query_id
        if not (more or self._has_begun):
            self._is_complete = True
            whole = HttpAnswer(query_id, self._status, self._headers, body)
            if self._status == ERROR:
                self._hold(whole)
            else:
                reply.answer(whole)
            return
        if not self._has_begun:
            self._has_begun = True
            reply.begin(self._status, self._headers)
        if body:
            await reply.send(body)
        if not more:
            self._is_complete = True
            end = StreamEnded(query_id, self._status)
            if any(name.lower() == b"content-length" for name, _ in self._headers):
                reply.answer(end)
            else:
                self._hold(end)

    def _hold(self, end: HttpAnswer | StreamEnded) -> None:
        """End it after some time and passes of the loop, in which the app would have raised."""
        self._end = end
        loop = asyncio.get_running_loop()
        self._held = loop.call_later(HELD_S, self._pass, HELD_PASSES)

    def _pass(self, passes: int) -> None:
        if passes:
            self._held = asyncio.get_running_loop().call_soon(self._pass, passes - 1)
        else:
            self._release()

    def _release(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            self._reply.answer(end)


def _checked_status(status: Any, whose: str) -> int:
    try:
        number = operator.index(status)  # an integer of numpy's is one, too
    except TypeError:
        number = 0
    if not 200 <= number <= 999:
        raise UnsupportedResultError(f"{whose} the status {status!r}, expected 200 to 999")
    return number


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{value!r} is not bytes")
    return bytes(value)
