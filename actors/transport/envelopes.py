"""Messages as bytes, and as the envelopes that Thespian gets."""

from __future__ import annotations

import logging
import pickle
import traceback
from logging import LogRecord
from typing import Any

from thespian.actors import ActorSystemMessage, PoisonMessage
from thespian.system.transport import ReceiveEnvelope

from greenroom.actors.messages.queries import FITTED, PLAIN, RESTORED
from greenroom.actors.transport.frames import MAX_BUFFERS, Buffer
from greenroom.core import formats

logger = logging.getLogger(__name__)


class Envelope(ReceiveEnvelope):  # type: ignore[misc]  # Thespian ships no types
    """A message with its sender's address.

    ``size`` is what came for it, in bytes; nothing came for what this process sends itself.
    """

    __slots__ = ("message", "sender", "size")

    def __init__(self, sender: Any, message: Any, size: int = 0) -> None:
        self.sender = sender
        self.message = message
        self.size = size

    def identify(self) -> Any:
        """Return what prints as a description; Thespian asks for one for a log that is off."""
        return self

    def __str__(self) -> str:
        return str(ReceiveEnvelope.identify(self))


def encode(message: Any) -> list[Buffer]:
    """Pickle a message: the pickle first, then the buffers that are not copied into it.

    Whatever pickling raises passes through; Thespian waits on CannotPickleAddress.
    """
    if make_plain := PLAIN.get(type(message)):
        message = make_plain(message)
    pickled: list[pickle.PickleBuffer] = []
    first = pickle.dumps(message, protocol=5, buffer_callback=pickled.append)
    if not pickled:
        return [first]
    if len(pickled) >= MAX_BUFFERS:
        return [pickle.dumps(message, protocol=5)]
    return [first, *map(_frozen, pickled)]


def decode(buffers: list[Buffer], *, is_exact: bool = True) -> Any:
    """Make the message that ``encode`` was given again; raises whatever unpickling does.

    It is not ``is_exact`` if a process of another format sent it.
    """
    if not is_exact:
        loaded = formats.read(buffers[0], buffers[1:])
    elif len(buffers) == 1:
        loaded = pickle.loads(buffers[0])
    else:
        loaded = pickle.loads(buffers[0], buffers=buffers[1:])
    if type(loaded) is not tuple:
        return loaded
    makers = RESTORED if is_exact else FITTED
    return makers[loaded[0]](*loaded[1:])


class Unreadable:
    """Goes back to the sender of a message that could not be unpickled; the pickle returns with it.

    The receiver had acknowledged the message, so the sender keeps nothing to find it by.
    """

    __slots__ = ("buffers", "details")

    def __init__(self, buffers: list[Buffer], details: str) -> None:
        # Travel without a copy, and arrive as what they were made of.
        self.buffers: list[Any] = [pickle.PickleBuffer(each) for each in buffers]
        self.details = details


class UnreadableMessage:
    """Stands in a PoisonMessage for a message that its own sender cannot unpickle either."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __str__(self) -> str:
        return f"a message that cannot be unpickled: {self.reason}"


def sent_back(buffers: list[Buffer]) -> list[Buffer]:
    """Return what a sender gets back, while the exception of ``decode`` is handled."""
    return encode(Unreadable(buffers, traceback.format_exc()))


def poison_from(returned: Unreadable) -> PoisonMessage | None:
    """Return what its sender gets of a message that came back, as of one that a handler failed on.

    None for what no actor's own code had sent: Thespian's messages, a PoisonMessage among them that
    would go back and forth, and log records.
    """
    try:
        message = decode(returned.buffers)
    except Exception as error:  # whatever its unpickling raises
        message = UnreadableMessage(repr(error))
    if isinstance(message, ActorSystemMessage | LogRecord):
        kind = type(message).__name__
        logger.error("a %s was not readable to its receiver: %s", kind, returned.details)
        return None
    return PoisonMessage(message, returned.details)


def _frozen(buffer: pickle.PickleBuffer) -> Buffer:
    """Return its bytes as they are now: a message is what it was when it was sent."""
    raw = buffer.raw()
    return raw if raw.readonly else bytes(raw)
