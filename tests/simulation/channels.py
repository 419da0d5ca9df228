"""Addresses, and messages under way between them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tests.simulation.links import PORT, host_of, ip_of

if TYPE_CHECKING:
    from tests.simulation.world import SimProcess, Step


class Address:
    """Where messages go; opaque to the shells. One of an actor that is being made comes to be its.

    It cannot be hashed, as Thespian's cannot.
    """

    __slots__ = ("later", "number")
    __hash__ = None  # type: ignore[assignment]
    port = PORT  # of the host

    def __init__(self, number: int | None, later: Address | None = None) -> None:
        self.number = number
        self.later = later

    @property
    def addressDetails(self) -> Address:  # Thespian's name
        return self

    @property
    def host(self) -> str:
        return ip_of(host_of(self.resolved() or 0))

    @property
    def text(self) -> str:
        number = self.resolved() or 0
        return f"{self.host}:{number if number > 0 else PORT}"

    def resolved(self) -> int | None:
        return self.number if self.later is None else self.later.number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self.resolved()
        return isinstance(other, Address) and mine is not None and mine == other.resolved()

    def __repr__(self) -> str:
        return f"<{self.resolved()}>"


class Message:
    """A message under way."""

    __slots__ = (
        "arrives",
        "body",
        "channel",
        "departs",
        "dropped",
        "on_failed",
        "on_sent",
        "sender",
        "to",
    )

    def __init__(
        self, channel: Channel, sender: Address, to: int, body: Any, departs: float
    ) -> None:
        self.channel = channel
        self.sender = sender
        self.to = to
        self.body = body
        self.on_sent: Step | None = None
        self.on_failed: Step | None = None
        self.departs = departs
        self.arrives = departs
        self.dropped = False


class Channel:
    """The way from one process to one address."""

    __slots__ = ("arrives", "outcome", "owner", "stalled", "under_way", "untold")

    def __init__(self, owner: SimProcess) -> None:
        self.owner = owner
        self.arrives = 0.0  # the last message
        self.outcome = 0.0  # the last one reported
        self.under_way: deque[Message] = deque()
        self.stalled: deque[Message] = deque()  # by a cut of the link
        self.untold: deque[tuple[Message, Step]] = deque()  # outcomes, by a cut of the way back
