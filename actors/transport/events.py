"""What a connection tells the shell that feeds it bytes, in the order it happened.

Plain slotted dataclasses, not frozen ones: those cost three times as much to make, per message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.identity import Identity

if TYPE_CHECKING:
    from greenroom.actors.transport.protocol import Connection
    from greenroom.actors.transport.session import Session


@dataclass(slots=True)
class Authenticated:
    """The peer is who it says; ``session`` will carry its messages."""

    peer: Identity
    session: Session


@dataclass(slots=True)
class Opened:
    """Messages flow from now on; ``resent`` of them were sent before on an earlier connection.

    ``is_forgotten`` when the peer had given this end up meanwhile, and with it what it had sent.
    """

    session: Session
    resent: int
    is_forgotten: bool = False


@dataclass(slots=True)
class MessageReceived:
    """A message, delivered this once; all but the first of its buffers are writable."""

    buffers: list[Buffer]


@dataclass(slots=True)
class Acknowledged:
    """The peer has received these messages, by the ``tag`` each was sent with (None left out)."""

    tags: list[object]


@dataclass(slots=True)
class WindowOpened:
    """A session that had refused a message, or said that it would, takes messages again."""

    session: Session


@dataclass(slots=True)
class Unsent:
    """A message that was not acknowledged before its session ended.

    ``may_have_arrived`` is false when no byte of it was handed out, so that sending it elsewhere
    cannot repeat it.
    """

    buffers: list[Buffer]
    tag: object
    may_have_arrived: bool


@dataclass(slots=True)
class Undeliverable:
    """These messages will never be delivered: the process they were for is gone, or forgot us."""

    messages: list[Unsent]


@dataclass(slots=True)
class Superseded:
    """This older connection of the same session is dead; close its socket."""

    connection: Connection


@dataclass(slots=True)
class Refused:
    """The peer broke the rules; the connection is dead. Send what is left, log, close."""

    reason: str


@dataclass(slots=True)
class Closed:
    """The stream ended after authentication; inside a frame that says so. The session lives on."""

    reason: str


Event: TypeAlias = (
    Authenticated
    | Opened
    | MessageReceived
    | Acknowledged
    | WindowOpened
    | Undeliverable
    | Superseded
    | Refused
    | Closed
)
