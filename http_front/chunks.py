"""Chunked bodies, read strictly (RFC 9112, section 7.1), and where they end.

llhttp reads chunks too, but does not say where the body ends, reports trailers as headers, and
bounds neither trailers nor chunk extensions. Here both are dropped, and have a bound.
"""

from __future__ import annotations

import re

MAX_CHUNK_LINE_BYTES = 1024  # the size and its extensions; 16 digits are more than any body has

_chunk_line = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?").fullmatch
_framing_line = re.compile(rb"(content-length|transfer-encoding):", re.IGNORECASE).match
_trailer_line = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*").fullmatch

_SIZE, _DATA, _DATA_END, _TRAILERS, _DONE = range(5)


class BadChunksError(Exception):
    """What came is no chunked body; the text says why."""


class Trailers(Exception):  # noqa: N818 - what is over is a limit
    """The trailers are over their limit of bytes."""


class ChunkedBody:
    """Takes a chunked body out of the bytes of a connection, however they are cut."""

    __slots__ = ("_line", "_max_trailer_bytes", "_rest", "_state", "_trailer_bytes")

    def __init__(self, max_trailer_bytes: int) -> None:
        self._state = _SIZE
        self._rest = 0  # of the chunk
        self._line = b""  # the beginning of a line whose end has not come
        self._trailer_bytes = 0
        self._max_trailer_bytes = max_trailer_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the end of the body, with its trailers, has been taken."""
        return self._state == _DONE

    def take(self, data: bytes, onto: list[bytes]) -> int:
        """Put what is of the body onto a list; return how many bytes of ``data`` were taken.

        Raises BadChunksError, or Trailers.
        """
        at, size = 0, len(data)
        while at < size and self._state != _DONE:
            if self._state == _DATA:
                piece = data[at : at + self._rest] if at or self._rest < size else data
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
                raise BadChunksError("a line of a chunked body ends without a carriage return")
            self._take_line(line[:-1])
        return at

    def _check_size(self, line: bytes) -> None:
        if self._state == _TRAILERS:
            if self._trailer_bytes + len(line) > self._max_trailer_bytes:
                raise Trailers
        elif len(line) > (MAX_CHUNK_LINE_BYTES if self._state == _SIZE else 1):
            raise BadChunksError(
                "a chunk is longer than its size says"
                if self._state == _DATA_END
                else f"a chunk's size and extensions have over {MAX_CHUNK_LINE_BYTES} bytes"
            )

    def _take_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line:
                raise BadChunksError("a chunk is longer than its size says")
            self._state = _SIZE
        elif self._state == _SIZE:
            matched = _chunk_line(line)
            if matched is None:
                raise BadChunksError("a chunk's size is not a hexadecimal number")
            self._rest = int(matched[1], 16)
            self._state = _DATA if self._rest else _TRAILERS
        elif not line:
            self._state = _DONE
        elif _framing_line(line):
            raise BadChunksError("a trailer says how long the body is, which is too late")
        elif _trailer_line(line):
            self._trailer_bytes += len(line) + 2
        else:
            raise BadChunksError("a trailer is not a header line")
