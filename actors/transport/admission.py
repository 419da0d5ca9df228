"""Keeps the strangers of one process within their bounds, and says who was refused."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple, Protocol

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.strangers import WINDOW_S, Refusals, Strangers

logger = logging.getLogger(__name__)

MAX_TROUBLES = 1_000  # strangers' addresses are among them


class Trouble(NamedTuple):
    """Why the other end was not reached the last time; false if it is unknown."""

    reason: str = ""
    is_refusal: bool = False  # to try again will not help

    def __bool__(self) -> bool:
        return bool(self.reason)


class Stranger(Protocol):
    """A connection that is not authenticated yet; equal only to itself."""

    def turn_away(self, reason: str) -> None:
        """Close it, after saying why by :meth:`Admission.refused`."""


class Admission:
    """The strangers of one process, on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.strangers: Strangers[Stranger] = Strangers()
        self._refusals = Refusals()
        self._troubles: dict[str, Trouble] = {}  # the last with each gate, by host and port
        self._loop = loop
        self._sweep: asyncio.TimerHandle | None = None
        self._summary: asyncio.TimerHandle | None = None

    def came(self, stranger: Stranger, source: str) -> None:
        """Give a connection from ``source``, an address, its time; another may have to go."""
        now = self._loop.time()
        oldest = self.strangers.came(stranger, source.rpartition(":")[0], now)
        if oldest is not None:
            oldest.turn_away(
                f"more than {self.strangers.limit} connections are not authenticated, and this is "
                "the oldest"
            )
        if self._sweep is None:
            self._sweep = self._loop.call_later(self.strangers.patience_s, self._look_round)

    def left(self, stranger: Stranger) -> None:
        """Note that a connection is authenticated, or has ended."""
        self.strangers.left(stranger)

    def refused(self, source: str, reason: str) -> None:
        """Say that the connection with ``source``, an address, was refused; or only count it."""
        self._say("refused the connection with", source, Trouble(reason, is_refusal=True))

    def refused_here(self, user: int, process: int, target: ProcessAddress | None = None) -> None:
        """Say that a process of this host, but not of this user, was refused; or only count it.

        With ``target`` it listens at the name of that one.
        """
        if target is not None:
            reason = f"process {process} there is of user {user}, and answers only that user"
            self._note(target.text, Trouble(reason))
        if self._is_worth_a_line(f"user {user}", "not this user"):
            logger.warning(
                "refused a connection of user %d, process %d: not this user", user, process
            )

    def gave_up(self, target: str, reason: str) -> None:
        """Say that ``target``, an address, cannot be reached; or only count it."""
        self._say("gave up", target, Trouble(reason))

    def trouble_with(self, gate: ProcessAddress) -> Trouble:
        """Return why a gate was given up, or refused us, the last time."""
        return self._troubles.get(f"{gate.host}:{gate.port}", Trouble())

    def _say(self, what: str, address: str, trouble: Trouble) -> None:
        self._note(address, trouble)
        if self._is_worth_a_line(address.rpartition(":")[0], trouble.reason):
            logger.warning("%s %s: %s", what, address, trouble.reason)

    def _note(self, address: str, trouble: Trouble) -> None:
        if len(self._troubles) >= MAX_TROUBLES:
            self._troubles.clear()
        self._troubles[address] = trouble

    def _is_worth_a_line(self, source: str, reason: str) -> bool:
        if self._summary is None:
            self._summary = self._loop.call_later(WINDOW_S, self._sum_up)
        return self._refusals.say(source, reason, self._loop.time())

    def close(self) -> None:
        """Forget everything."""
        for timer in (self._sweep, self._summary):
            if timer is not None:
                timer.cancel()

    def _look_round(self) -> None:
        self._sweep = None
        for stranger in self.strangers.overdue(self._loop.time()):
            stranger.turn_away(f"it was not authenticated within {self.strangers.patience_s:g} s")
        if len(self.strangers):
            self._sweep = self._loop.call_later(self.strangers.patience_s / 5, self._look_round)

    def _sum_up(self) -> None:
        self._summary = None
        unsaid = self._refusals.unsaid(self._loop.time())
        if unsaid:
            logger.warning(
                "%d more connections were refused or failed in the last %g s, as the ones above",
                unsaid,
                WINDOW_S,
            )
