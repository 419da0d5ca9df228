"""Two processes in memory: their sessions, and connections whose bytes the test carries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TypeVar

from greenroom.actors.transport.addresses import Identity
from greenroom.actors.transport.connection import (
    Connection,
    Event,
    Limits,
    MessageReceived,
    Refused,
    Session,
    Sessions,
)
from greenroom.actors.transport.handshake import Role

KEY = bytes(range(32))
_nonces = count(1)
AnyEvent = TypeVar("AnyEvent", bound=Event)


def nonce() -> bytes:
    return next(_nonces).to_bytes(32, "big")


def identity(name: str, incarnation: str = "") -> Identity:
    return Identity(name, incarnation or name.encode().hex().zfill(16)[-16:], 7, "stage")


class Process:
    """One side: its sessions, and what its connections told it."""

    def __init__(self, name: str, incarnation: str = "", limits: Limits | None = None) -> None:
        self.sessions = Sessions(identity(name, incarnation), limits)
        self.name = name
        self.events: list[Event] = []

    def messages(self) -> list[list[bytes]]:
        return [
            [bytes(each) for each in event.buffers]
            for event in self.events
            if isinstance(event, MessageReceived)
        ]

    def of(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def refusals(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Refused)]


class Link:
    """A connection from ``dialer`` to ``acceptor``; bytes move when the test says so."""

    def __init__(
        self,
        dialer: Process,
        acceptor: Process,
        *,
        remote: bool,
        keys: tuple[bytes, bytes] = (KEY, KEY),
    ) -> None:
        self.processes = (dialer, acceptor)
        self.ends = tuple(
            Connection(
                role,
                process.sessions,
                key=key if remote else None,
                nonce=nonce() if remote else None,
            )
            for role, process, key in zip(
                (Role.DIALER, Role.ACCEPTOR), self.processes, keys, strict=True
            )
        )
        self.transit = (bytearray(), bytearray())  # from the dialer, from the acceptor
        self.carried = (bytearray(), bytearray())

    def collect(self) -> None:
        for end, transit in zip(self.ends, self.transit, strict=True):
            while buffers := end.data_to_send():
                transit.extend(b"".join(buffers))

    def carry(self, side: int, size: int | None = None) -> None:
        """Let ``size`` bytes of what ``side`` has sent arrive."""
        piece = bytes(self.transit[side][:size])
        del self.transit[side][: len(piece)]
        self.carried[side].extend(piece)
        if piece:
            self.processes[1 - side].events += self.ends[1 - side].receive_data(piece)

    def run(self, size: int | None = None) -> None:
        """Carry everything until nothing moves."""
        self.collect()
        while any(self.transit):
            for side in (0, 1):
                self.carry(side, size)
            self.collect()

    def break_off(self) -> None:
        """Lose what is under way; both sides see the end."""
        for process, end in zip(self.processes, self.ends, strict=True):
            process.events += end.receive_eof()


def joined(*, remote: bool, limits: Limits | None = None) -> tuple[Process, Process, Link]:
    """Return two processes with an open connection."""
    left, right = Process("a", limits=limits), Process("b", limits=limits)
    link = Link(left, right, remote=remote)
    link.run()
    return left, right, link


def session(of: Process, to: Process) -> Session:
    return of.sessions.to(to.name)


def only_refusal(events: list[Event]) -> str:
    """Return the reason of the one Refused that ``events`` is."""
    (event,) = events
    assert isinstance(event, Refused), event
    return event.reason


def pieces(stream: bytes, cuts: list[int]) -> Iterator[bytes]:
    at = 0
    for cut in [*sorted(cuts), len(stream)]:
        yield stream[at:cut]
        at = cut
