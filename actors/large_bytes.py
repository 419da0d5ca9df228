"""Bytes that travel beside the pickle of their message, and so without being copied into it.

A body of megabytes was copied into the pickle of its message and out of it again in each process
on its way. ``beside`` and ``travelling`` put those of ``LARGE`` bytes and more in a wrapper, which
the router passes on unseen; ``content_of`` and ``arrived`` take them out where they are needed.

The body or value of an answer of ``PARTED`` bytes and more travels in parts, so that answers to
other queries can go in between: ``in_parts`` cuts it, ``put_together`` does what it says. It is
one answer all the same: until the last part is here nobody is told of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from greenroom.actors.messages import (
    Answer,
    AnswerPart,
    FailedAnswer,
    HttpAnswer,
    Piece,
    StreamPart,
    ValueAnswer,
)

Item = Answer | Piece
LARGE = 64 * 1024  # under that a copy costs less than what saves it
PART = 450_000  # two to a message
PARTED = 500_000


class LargeBytes:
    """Read-only bytes, pickled out of band where the transport can."""

    __slots__ = ("view",)

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        self.view = memoryview(content).toreadonly()

    def __len__(self) -> int:
        return len(self.view)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol < 5:
            return LargeBytes, (bytes(self.view),)
        return LargeBytes, (pickle.PickleBuffer(self.view),)


class Pieces:
    """Bytes that came in pieces, for who needs them in no one piece; to be taken once."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = list(reversed(pieces))
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        """Return how many bytes they had at first."""
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self)

    def __iter__(self) -> Iterator[memoryview]:
        """Yield and let go of one after the other."""
        while self._pieces:
            yield self._pieces.pop()


class LargeAnswer(NamedTuple):
    """An answer on its way without its body or value, and that."""

    answer: HttpAnswer | ValueAnswer
    content: LargeBytes


class PartedAnswer(NamedTuple):
    """An answer without its body or value, which has so many bytes and has gone ahead in parts."""

    answer: HttpAnswer | ValueAnswer
    number: int
    size: int


def beside(content: bytes) -> bytes | LargeBytes:
    """Return what to put in a message for ``content``."""
    return content if len(content) < LARGE else LargeBytes(content)


def content_of(sent: bytes | LargeBytes) -> bytes | memoryview:
    """Return what ``beside`` was given; not copied."""
    return sent.view if isinstance(sent, LargeBytes) else sent


def travelling(answer: Item) -> Item | LargeAnswer:
    """Return what to put in a message for ``answer``."""
    if isinstance(answer, HttpAnswer) and len(answer.body) >= LARGE:
        return LargeAnswer(answer._replace(body=b""), LargeBytes(bytes(answer.body)))
    if isinstance(answer, ValueAnswer) and len(answer.value) >= LARGE:
        return LargeAnswer(answer._replace(value=b""), LargeBytes(answer.value))
    return part_travelling(answer) if isinstance(answer, StreamPart) else answer


def part_travelling(part: StreamPart) -> StreamPart:
    """Return what to put in a message for a part of what comes in parts."""
    if len(part.data) < LARGE:
        return part
    large: Any = LargeBytes(part.data)
    return part._replace(data=large)


def part_arrived(part: StreamPart) -> StreamPart:
    """Return what ``part_travelling`` was given."""
    sent: Any = part.data
    return part._replace(data=bytes(sent.view)) if isinstance(sent, LargeBytes) else part


def size_of(answer: Any) -> int:
    """Return the bytes of an answer's body or value, 0 for all that has none."""
    if isinstance(answer, HttpAnswer):
        return len(answer.body)
    return len(answer.value) if isinstance(answer, ValueAnswer) else 0


def in_parts(answer: HttpAnswer | ValueAnswer, number: int) -> list[AnswerPart | PartedAnswer]:
    """Cut an answer; all of it goes the same way, and the answer last."""
    rest: HttpAnswer | ValueAnswer
    if isinstance(answer, HttpAnswer):
        whole, rest = memoryview(bytes(answer.body)), answer._replace(body=b"")
    else:
        whole, rest = memoryview(answer.value), answer._replace(value=b"")
    pieces = (whole[start : start + PART] for start in range(0, len(whole), PART))
    parts = [AnswerPart(answer.query_id, number, LargeBytes(piece)) for piece in pieces]
    return [*parts, PartedAnswer(rest, number, len(whole))]


def put_together(sent: PartedAnswer, parts: Sequence[LargeBytes]) -> Answer:
    """Return the answer whose parts these are; an HTTP answer's body stays in pieces."""
    answer, pieces = sent.answer, [part.view for part in parts]
    if sum(map(len, pieces)) != sent.size:
        text = "its answer did not arrive in full"
        return FailedAnswer(answer.query_id, "ReplicaUnavailableError", text, 1.0)
    if isinstance(answer, HttpAnswer):
        return answer._replace(body=Pieces(pieces))
    return answer._replace(value=b"".join(pieces))


def arrived(sent: Answer | LargeAnswer) -> Answer:
    """Return what ``travelling`` was given."""
    if not isinstance(sent, LargeAnswer):
        return sent
    content = bytes(sent.content.view)
    if isinstance(sent.answer, HttpAnswer):
        return sent.answer._replace(body=content)
    return sent.answer._replace(value=content)
