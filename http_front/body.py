"""Reading a request body: whole, within the limit, or not at all."""

from __future__ import annotations

from understudy.http_front.exchange import Receive


class BodyTooLargeError(Exception):
    """The body is over the limit; ``size`` is what was declared, or None for a chunked body."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(size)
        self.size = size


class BodyIncompleteError(Exception):
    """The client left, or fell silent, before the end of the body it had announced."""


async def read_body(receive: Receive, declared: bytes | None, limit: int) -> bytes:
    """Return the whole body; raises BodyTooLargeError or BodyIncompleteError.

    ``declared`` is the content-length header, which the server has already found to be a number.
    A body that came in one piece, as nearly all do, is returned as it is, without a copy.
    """
    if declared is not None and int(declared) > limit:
        raise BodyTooLargeError(int(declared))
    event = await receive()
    if event["type"] == "http.request" and not event.get("more_body", False):
        body: bytes = event.get("body", b"")
        if len(body) > limit:
            raise BodyTooLargeError
        return body
    pieces = []
    size = 0
    while event["type"] == "http.request":
        piece = event.get("body", b"")
        size += len(piece)
        if size > limit:
            raise BodyTooLargeError
        pieces.append(piece)
        if not event.get("more_body", False):
            return b"".join(pieces)
        event = await receive()
    # Falcon's stream would give what came as if it were everything.
    raise BodyIncompleteError
