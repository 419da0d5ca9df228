"""Bytes that travel beside the pickle of their message, and so without being copied into it.

A body of megabytes was copied into the pickle of its message and out of it again in each process
on its way. ``beside`` and ``travelling`` put those of ``LARGE`` bytes and more in a wrapper, which
the router passes on unseen; ``content_of`` and ``arrived`` take them out where they are needed.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from understudy.actors.messages import Answer, HttpAnswer, Piece, ValueAnswer

Item = Answer | Piece
LARGE = 64 * 1024  # under that a copy costs less than what saves it


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


class LargeAnswer(NamedTuple):
    """An answer on its way without its body or value, and that."""

    answer: HttpAnswer | ValueAnswer
    content: LargeBytes


def beside(content: bytes) -> bytes | LargeBytes:
    """Return what to put in a message for ``content``."""
    return content if len(content) < LARGE else LargeBytes(content)


def content_of(sent: bytes | LargeBytes) -> bytes | memoryview:
    """Return what ``beside`` was given; not copied."""
    return sent.view if isinstance(sent, LargeBytes) else sent


def travelling(answer: Item) -> Item | LargeAnswer:
    """Return what to put in a message for ``answer``."""
    if isinstance(answer, HttpAnswer) and len(answer.body) >= LARGE:
        return LargeAnswer(answer._replace(body=b""), LargeBytes(answer.body))
    if isinstance(answer, ValueAnswer) and len(answer.value) >= LARGE:
        return LargeAnswer(answer._replace(value=b""), LargeBytes(answer.value))
    return answer


def arrived(sent: Answer | LargeAnswer) -> Answer:
    """Return what ``travelling`` was given."""
    if not isinstance(sent, LargeAnswer):
        return sent
    content = bytes(sent.content.view)
    if isinstance(sent.answer, HttpAnswer):
        return sent.answer._replace(body=content)
    return sent.answer._replace(value=content)
