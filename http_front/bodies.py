"""Request bodies: where a chunked one ends, and how a body reaches user code.

A query takes a slot of a replica, so it leaves once WHOLE bytes of its body are here, or all of it.
The rest follows it. Two kinds of requests need an answer before that: one whose body is of unknown
length, so user code sees its parts as they come, and one that asks by ``Expect: 100-continue``, so
that a refused one costs the client nothing but its headers. Their queries leave early, those of
EARLY requests of one client at a time: slow clients must not take every slot.

How long the client may keep us waiting is the protocol's business (:mod:`.protocol`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import KW_ONLY, dataclass

from greenroom.actors.caller.streams import NobodyListensError
from greenroom.actors.caller.uploads import Upload
from greenroom.core.errors import BodyIncompleteError, BodyTooLargeError, GreenroomError
from greenroom.http_front.asgi import Event, Header, Receive
from greenroom.http_front.clients import ClientCounts
from greenroom.http_front.connections import NO_ROOM, Connections, Pace

_logger = logging.getLogger(__name__)

WHOLE = 1024 * 1024
LARGE = 64 * 1024  # bytes of a part that is not copied
# How long a body of unknown length may take to go with its query. One that comes in three segments
# is answered in 0.4 ms then, and in 0.8 where it follows.
AT_ONCE_S = 0.02
EARLY = 16  # of each client


class RefusedRequestError(Exception):
    """A request that cannot be read, or not in one way only, with its HTTP status."""

    def __init__(self, status: int, text: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(slots=True, eq=False)
class Body:
    """One request's body as it comes, through an ASGI ``receive``.

    ``length`` is what its head declares, and ``waits`` that the client does, for a 100 or an
    answer. ``max_bytes`` is how much the client may send. ``early`` counts the bodies whose queries
    leave before they are here, by ``host``.
    """

    _receive: Receive
    length: int | None
    _: KW_ONLY
    waits: bool
    host: str | None
    max_bytes: int | None
    early: ClientCounts
    is_begun: bool = False
    is_complete: bool = False
    _is_early: bool = False  # among these
    _size: int = 0  # of what has come
    _event: asyncio.Future[Event] | None = None  # asked for, and perhaps not here yet
    _sending: asyncio.Task[None] | None = None

    async def begin(self) -> bytes:
        """Return the body, or what goes with the query when the rest follows.

        Raises BodyTooLargeError or BodyIncompleteError.
        """
        self.is_begun = True
        declared, limit = self.length, self.max_bytes
        if declared is not None and limit is not None and declared > limit:
            raise BodyTooLargeError(_too_large(f" of {declared} bytes", limit))
        if (self.waits or declared is None) and self.early.has_room_for(self.host):
            self._is_early = True
            self.early.add(self.host)
        if self.waits and self._is_early and (declared or 0) > WHOLE:
            return b""
        pieces = [await self._next()]
        while not self.is_complete and self._size < WHOLE:
            if declared is None and self._is_early and not await self._comes_at_once():
                break
            pieces.append(await self._next())
        if self.is_complete or self._size >= WHOLE:
            self._leave_early()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def whole(self, max_bytes: int) -> bytes:
        """Return all of the body, for a reader of ours that takes ``max_bytes``."""
        if self.max_bytes is None or self.max_bytes > max_bytes:
            self.max_bytes = max_bytes
        pieces = [await self.begin()]
        while not self.is_complete:
            pieces.append(await self._next())
        return b"".join(pieces)

    def send_to(self, upload: Upload) -> None:
        """Send the rest to the replica from now on."""
        self._sending = asyncio.create_task(self._send(upload))

    async def end(self) -> None:
        """Take no more; bytes that were asked for and have not come stay with the protocol."""
        self._leave_early()
        pending = [each for each in (self._sending, self._event) if each is not None]
        for each in pending:
            each.cancel()
        if pending:
            await asyncio.wait(pending)

    def _leave_early(self) -> None:
        if self._is_early:
            self._is_early = False
            self.early.remove(self.host)

    async def _send(self, upload: Upload) -> None:
        try:
            while not self.is_complete:
                await upload.send(await self._next())
            upload.end()
        except NobodyListensError:
            return
        except GreenroomError as error:
            upload.fail(type(error).__name__, str(error))
        except Exception:
            _logger.exception("a request body could not be sent on")
            upload.fail("GreenroomError", "the request body could not be sent on")

    async def _next(self) -> bytes:
        """Return the next bytes, perhaps none; the last ones make the body complete."""
        if self._event is None:
            event = await self._receive()
        else:
            await asyncio.wait((self._event,))  # not the event itself, which must not be cancelled
            event, self._event = self._event.result(), None
        if event["type"] != "http.request":
            raise BodyIncompleteError("the request body did not arrive in full")
        piece: bytes = event.get("body", b"")
        self._size += len(piece)
        limit = self.max_bytes
        if limit is not None and self._size > limit:
            raise BodyTooLargeError(_too_large("", limit))
        self.is_complete = not event.get("more_body", False)
        return piece

    async def _comes_at_once(self) -> bool:
        """Return whether the next event is here, or nearly; it is kept."""
        if self._event is None:
            self._event = asyncio.ensure_future(self._receive())
        done, _ = await asyncio.wait((self._event,), timeout=AT_ONCE_S)
        return bool(done)


class IncomingBody:
    """A request's body as its connection brings it, until :class:`Body` takes it.

    WHOLE bytes of it are in the budget for bodies that wait: the rest follows its query. Raises
    RefusedRequestError where there is no room for as much as it declares.
    """

    __slots__ = (
        *("_chunks", "_counted", "_is_wanted", "_shared"),
        *("held", "is_complete", "is_late", "pace", "rest"),
    )

    def __init__(self, shared: Connections, length: int | None, max_trailer_bytes: int) -> None:
        self._shared = shared
        self.rest = length or 0  # bytes that are to come, of a body with a length
        self._chunks = ChunkedBody(max_trailer_bytes) if length is None else None
        if shared.lacks_room(min(self.rest, WHOLE)):
            raise _no_room()
        self.held: bytes | bytearray = b""  # what has come and waits to be taken
        self.is_complete = False
        self.is_late = False
        self.pace = Pace()
        self._counted = 0  # bytes, in Connections.waiting_bytes
        self._is_wanted = True

    def take(self, data: bytes, *, may_refuse: bool) -> bytes:
        """Take what is of the body; return what lies behind it. Raises RefusedRequestError."""
        if self._chunks is None:
            piece = data[: self.rest]
            taken = len(piece)
            self.rest -= taken
            self.is_complete = not self.rest
        else:
            pieces: list[bytes] = []
            taken = self._chunks.take(data, pieces)
            self.is_complete = self._chunks.is_complete
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._is_wanted:
            self._keep(piece, may_refuse)
        return data[taken:]

    def _keep(self, piece: bytes, may_refuse: bool) -> None:
        if not self.is_complete:
            self.pace.took(len(piece), self._shared.loop.time())
        uncounted = min(len(piece), WHOLE - self._counted)
        if uncounted > 0:
            self._counted += uncounted
            self._shared.waiting_bytes += uncounted
            if self._shared.lacks_room() and may_refuse:
                raise _no_room()
        if not self.held:
            self.held = piece
        elif len(piece) >= LARGE:
            self.held = b"".join((self.held, piece))
        else:
            if type(self.held) is bytes:
                self.held = bytearray(self.held)
            self.held += piece

    def release(self) -> None:
        """Keep and count nothing of it any more: it is not wanted."""
        self._shared.waiting_bytes -= self._counted
        self._counted, self.held, self._is_wanted = 0, b"", False


def _no_room() -> RefusedRequestError:
    return RefusedRequestError(503, NO_ROOM, ((b"retry-after", b"1"),))


def _too_large(size: str, limit: int) -> str:
    return f"the body{size} is over the limit of {limit} bytes"


# --- Chunks ---------------------------------------------------------------------------------------
#
# Chunked bodies are read strictly (RFC 9112, section 7.1). llhttp reads chunks too, but it does not
# say where the body ends, reports trailers as headers, and bounds neither trailers nor chunk
# extensions. Here both are dropped, and have a bound.

MOST_CHUNKS = 1000  # that are read at once: of a byte each, that takes some milliseconds
MAX_CHUNK_LINE_BYTES = 1024  # the size, of 16 digits at most, and its extensions

_chunk_line = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?").fullmatch
_framing_line = re.compile(rb"(content-length|transfer-encoding):", re.IGNORECASE).match
_trailer_line = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*").fullmatch

_SIZE, _DATA, _DATA_END, _TRAILERS, _DONE = range(5)


class ChunkedBody:
    """Takes a chunked body out of the bytes of a connection, however they are cut."""

    __slots__ = ("_line", "_max_trailer_bytes", "_rest", "_state", "_trailer_bytes")

    def __init__(self, max_trailer_bytes: int) -> None:
        self._state = _SIZE
        self._rest = 0  # bytes of the chunk that are to come
        self._line = b""  # the beginning of a line whose end has not come
        self._trailer_bytes = 0
        self._max_trailer_bytes = max_trailer_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the end of the body, with its trailers, has been taken."""
        return self._state == _DONE

    def take(self, data: bytes, onto: list[bytes]) -> int:
        """Append the body's bytes to a list; return how many bytes of ``data`` were taken.

        That is all, but for what follows MOST_CHUNKS. Raises RefusedRequestError.
        """
        at, size = 0, len(data)
        while at < size and self._state != _DONE and len(onto) < MOST_CHUNKS:
            if self._state == _DATA:
                piece = data[at : at + self._rest]
                onto.append(piece)
                at += len(piece)
                self._rest -= len(piece)
                if not self._rest:
                    self._state = _DATA_END
                continue
            end = data.find(b"\n", at)
            line = self._line + (data[at:] if end < 0 else data[at:end])
            self._check_size(line)
            if end < 0:
                self._line = line
                return size
            self._line, at = b"", end + 1
            if line[-1:] != b"\r":
                raise _bad("a line of a chunked body ends without a carriage return")
            self._take_line(line[:-1])
        return at

    def _check_size(self, line: bytes) -> None:
        if self._state == _TRAILERS:
            if self._trailer_bytes + len(line) > self._max_trailer_bytes:
                text = f"the trailers have over {self._max_trailer_bytes} bytes"
                raise RefusedRequestError(431, text)
        elif self._state == _DATA_END:
            if len(line) > 1:
                raise _bad("a chunk is longer than its size says")
        elif len(line) > MAX_CHUNK_LINE_BYTES:
            raise _bad(f"a chunk's size and extensions have over {MAX_CHUNK_LINE_BYTES} bytes")

    def _take_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            self._state = _SIZE  # the line is empty: _check_size allows one byte
        elif self._state == _SIZE:
            matched = _chunk_line(line)
            if matched is None:
                raise _bad("a chunk's size is not a hexadecimal number")
            self._rest = int(matched[1], 16)
            self._state = _DATA if self._rest else _TRAILERS
        elif not line:
            self._state = _DONE
        elif _framing_line(line):
            raise _bad("a trailer says how long the body is, which is too late")
        elif _trailer_line(line):
            self._trailer_bytes += len(line) + 2
        else:
            raise _bad("a trailer is not a header line")


def _bad(text: str) -> RefusedRequestError:
    return RefusedRequestError(400, text)
