"""Responses whose parts are sent on as they come from the replica."""

from __future__ import annotations

import falcon.asgi

from understudy.actors.streams import Stream, StreamFailedError
from understudy.http_front.answers import (
    WITHOUT_BODY,
    BadHeaderError,
    check_status,
    declared_length,
    error_reply,
    passed_on,
)
from understudy.http_front.exchange import Exchange, Reply


class StreamedBody:
    """What Falcon iterates over and closes; it holds the parts to a declared length."""

    def __init__(self, stream: Stream, length: int | None) -> None:
        self._stream = stream
        self._left = length

    def __aiter__(self) -> StreamedBody:
        return self

    async def __anext__(self) -> bytes:
        """Return the next part; StreamFailedError when there will be none, or one too many."""
        data = await self._stream.next()
        left = self._left
        if left is not None:
            left -= len(data or b"")
            if left < 0 or (data is None and left):
                raise StreamFailedError("the parts are not as long as their Content-Length")
            self._left = left
        if data is None:
            raise StopAsyncIteration
        return data

    async def close(self) -> None:
        """Want no more parts; Falcon calls it however the response ends."""
        self._stream.close()


def stream_with(stream: Stream, resp: falcon.asgi.Response, exchange: Exchange) -> Reply | None:
    """Make ``stream`` the response; return the whole reply to give instead, where there is one."""
    length: bytes | None = None
    try:
        check_status(stream.status)
        headers = passed_on(stream.headers)
        length = declared_length(stream.headers)
    except BadHeaderError as error:
        stream.close()
        return error_reply(500, "UnsupportedResultError", str(error), exchange)
    if length is not None:
        headers.append((b"content-length", length))
    if exchange.method == "HEAD" or stream.status in WITHOUT_BODY:
        stream.close()
        return Reply(stream.status, headers, b"")
    resp.status = stream.status
    resp.stream = StreamedBody(stream, None if length is None else int(length))
    exchange.reply_headers = headers
    return None
