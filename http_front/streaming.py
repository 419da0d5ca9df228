"""Responses whose parts are sent on as they come from the replica."""

from __future__ import annotations

from greenroom.actors.streams import Stream, StreamFailedError
from greenroom.http_front.answers import (
    WITHOUT_BODY,
    BadHeaderError,
    check_status,
    declared_length,
    error_reply,
    passed_on,
)
from greenroom.http_front.exchange import Event, Exchange, Headers, Reply

_END: Event = {"type": "http.response.body", "body": b"", "more_body": False}


async def send_stream(stream: Stream, exchange: Exchange) -> None:
    """Send ``stream`` as the response; StreamFailedError when it broke off.

    It is held to the length that it declares. However this ends, no more parts are wanted then. A
    client that has all of a declared length may leave before the end is here: that is no reason to
    cancel what user code does after it.
    """
    left: int | None = None
    try:
        begun = _begin(stream, exchange)
        if isinstance(begun, Reply):
            await exchange.reply(begun)
            return
        headers, left = begun
        start = {"type": "http.response.start", "status": stream.status, "headers": headers}
        await exchange.send(start)
        while (data := await stream.next()) is not None:
            if left is not None:
                left -= len(data)
                if left < 0:
                    break
            await exchange.send({"type": "http.response.body", "body": data, "more_body": True})
        if left:
            raise StreamFailedError("the parts are not as long as their Content-Length")
        await exchange.send(_END)
    finally:
        if left == 0:
            stream.leave()
        else:
            stream.close()


def _begin(stream: Stream, exchange: Exchange) -> tuple[Headers, int | None] | Reply:
    """Return headers and declared length, or the whole reply that is to be given instead."""
    try:
        check_status(stream.status)
        headers = passed_on(stream.headers)
    except BadHeaderError as error:
        return error_reply(500, "UnsupportedResultError", str(error), exchange)
    length = declared_length(stream.headers)
    if length is not None:
        headers.append((b"content-length", length))
    if exchange.method == "HEAD" or stream.status in WITHOUT_BODY:
        return Reply(stream.status, headers, b"")
    return headers, None if length is None else int(length)
