"""One other process, and who is told what becomes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.channel import Channel
from greenroom.actors.transport.events import Unsent
from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.session import Session


class Cancelable(Protocol):
    """Something under way that can be given up."""

    def cancel(self) -> None:
        """Give it up."""


class Shell(Protocol):
    """Who the peers work for; everything is called on the loop, in a turn."""

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """Take a message, to be handled in :meth:`deliver`."""

    def deliver(self) -> None:
        """Handle what was received."""

    def sent(self, tags: Sequence[object]) -> None:
        """Note that these messages have arrived."""

    def undeliverable(self, messages: Sequence[Unsent]) -> None:
        """Take back messages whose target is dead."""

    def refused(self, tag: object, reason: str) -> None:
        """Take back a message that cannot be sent."""

    def lost(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """Note that the process at ``address`` is dead, or cannot be reached, and may be dead."""

    def forgotten(self, address: ProcessAddress) -> None:
        """Note that the process at ``address`` had given this one up, and can be reached again."""


class Peer:
    """What this process has with one address."""

    __slots__ = (
        "address",
        "channel",
        "channels",
        "failing_since",
        "failures",
        "has_progressed",
        "overflow",
        "overflow_bytes",
        "retry",
        "sender",
        "session",
        "unflushed",
    )

    def __init__(self, address: ProcessAddress, session: Session) -> None:
        self.address = address
        self.session = session
        self.channel: Channel | None = None  # the one that messages flow over
        self.channels: set[Channel] = set()  # it, and those that are not that far
        self.failures = 0  # connections that ended before a message arrived, one after the other
        self.has_progressed = False  # a message arrived over the present connection
        self.failing_since = 0.0  # the loop's time at the first of them, of another host's
        self.retry: Cancelable | None = None  # what will lead to the next connection
        self.overflow: deque[tuple[list[Buffer], object]] = deque()  # behind the window
        self.overflow_bytes = 0
        self.unflushed = 0
        self.sender: object = None  # the shell's own
