"""Messages as bytes, and what Thespian gets of them."""

from __future__ import annotations

import pickle
from typing import Any

from thespian.system.transport import ReceiveEnvelope

from understudy.actors.transport.frames import MAX_BUFFERS, Buffer


class Envelope(ReceiveEnvelope):  # type: ignore[misc]  # Thespian ships no types
    """A message with its sender's address; its description costs nothing until it is printed."""

    __slots__ = ("message", "sender")

    def __init__(self, sender: Any, message: Any) -> None:
        self.sender = sender
        self.message = message

    def identify(self) -> Any:
        """Return something that prints as the description.

        Thespian asks for it with every message, for a log that is off.
        """
        return Described(ReceiveEnvelope.identify, self)


class Described:
    """A text that is made when it is needed."""

    __slots__ = ("_describe", "_subject")

    def __init__(self, describe: Any, subject: Any) -> None:
        self._describe = describe
        self._subject = subject

    def __str__(self) -> str:
        return str(self._describe(self._subject))


def encode(message: Any) -> list[Buffer]:
    """Pickle a message: the pickle first, then the buffers that are not copied into it.

    Whatever pickling raises passes through; Thespian waits on CannotPickleAddress.
    """
    pickled: list[pickle.PickleBuffer] = []
    first = pickle.dumps(message, protocol=5, buffer_callback=pickled.append)
    if not pickled:
        return [first]
    if len(pickled) >= MAX_BUFFERS:
        return [pickle.dumps(message, protocol=5)]
    return [first, *map(_frozen, pickled)]


def decode(buffers: list[Buffer]) -> Any:
    """Make the message that ``encode`` was given again; raises whatever unpickling does."""
    if len(buffers) == 1:
        return pickle.loads(buffers[0])
    return pickle.loads(buffers[0], buffers=buffers[1:])


def _frozen(buffer: pickle.PickleBuffer) -> Buffer:
    """Return its bytes as they are now: a message is what it was when it was sent."""
    raw = buffer.raw()
    return raw if raw.readonly else bytes(raw)
