"""Keeps what strangers cost a process within bounds: connections accepted, and lines logged."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import NamedTuple

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.sockets import Credentials, credentials_of

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
MAX_LINES = 50  # per window: a line is about 150 bytes, so at most 11 MB a day
MAX_SOURCE_LINES = 10


class TokenBucket:
    """How many connections may be taken: ``most`` at once, ``per_s`` in the long run."""

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left = float(most)
        self._at = 0.0

    def take(self, count: int, now: float) -> float:
        """Count so many that were taken; return how long to rest, 0 where more may be taken."""
        self._left = min(self._left + (now - self._at) * self._per_s, self._most) - count
        self._at = now
        return max(-self._left / self._per_s, 0.0)


MAX_TROUBLES = 1_000  # strangers' addresses are among them


class Trouble(NamedTuple):
    """Why the other end was not reached the last time; false if it is unknown."""

    reason: str = ""
    is_refusal: bool = False  # to try again will not help

    def __bool__(self) -> bool:
        return bool(self.reason)


class Admission:
    """What one process says of connections that it refuses, or that others do; on its loop.

    In each window, which begins with the first, there is a line for each kind and source. Others
    are counted, and summed up at its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._troubles: dict[str, Trouble] = {}  # the last with each gate, by host and port
        self._loop = loop
        self._window: asyncio.TimerHandle | None = None
        self._said: dict[str, set[str]] = {}  # reasons by source, in this window
        self._unsaid = 0

    def refused(self, source: str, reason: str) -> None:
        """Say that the connection with ``source``, an address, was refused; or only count it."""
        self._say("refused the connection with", source, Trouble(reason, is_refusal=True))

    def disconnected(self, source: str, reason: str) -> None:
        """Say that the connection with ``source`` broke off before it proved itself; or count."""
        self._say("lost the connection, not yet authenticated, with", source, Trouble(reason))

    def refused_here(self, peer: Credentials, target: ProcessAddress | None = None) -> None:
        """Say that a process of this host, but not of this user, was refused; or only count it.

        With ``target`` it listens at the name of that one.
        """
        pid, user = peer
        if target is not None:
            reason = f"process {pid} there is of user {user}, and answers only that user"
            self._record(target.text, Trouble(reason))
        if self._is_worth_a_line(f"user {user}", "not this user"):
            logger.warning("refused a connection of user %d, process %d: not this user", user, pid)

    def unreachable(self, target: str, reason: str) -> None:
        """Say that ``target``, an address, cannot be reached; or only count it."""
        self._say("gave up", target, Trouble(reason))

    def trouble_with(self, gate: ProcessAddress) -> Trouble:
        """Return why a gate was abandoned, or refused us, the last time."""
        return self._troubles.get(gate.gate, Trouble())

    def _say(self, what: str, address: str, trouble: Trouble) -> None:
        self._record(address, trouble)
        if self._is_worth_a_line(address.rpartition(":")[0], trouble.reason):
            logger.warning("%s %s: %s", what, address, trouble.reason)

    def _record(self, address: str, trouble: Trouble) -> None:
        if len(self._troubles) >= MAX_TROUBLES:
            self._troubles.clear()
        self._troubles[address] = trouble

    def _is_worth_a_line(self, source: str, reason: str) -> bool:
        if self._window is None:
            self._window = self._loop.call_later(WINDOW_S, self._sum_up)
        said = self._said.get(source, set())
        is_new = reason not in said and len(said) < MAX_SOURCE_LINES
        if not is_new or sum(map(len, self._said.values())) >= MAX_LINES:
            self._unsaid += 1
            return False
        self._said.setdefault(source, said).add(reason)
        return True

    def close(self) -> None:
        """Forget everything."""
        if self._window is not None:
            self._window.cancel()

    def _sum_up(self) -> None:
        if self._unsaid:
            logger.warning(
                "%d more connections were refused or failed in the last %g s, as the ones above",
                self._unsaid,
                WINDOW_S,
            )
        self._window, self._unsaid = None, 0
        self._said.clear()


# --- Accepting connections, a bounded number in each pass of the loop -----------------------------

ACCEPTS_PER_PASS = 64
_PAUSE_S = 1.0
# Closing a connection of another user's process takes some 20 us, so this bounds the cost to a
# tenth of a processor. During a rest such connections may fill the backlog and keep others out. So
# the backlog is emptied at once after a rest, and refused peers soon try again.
STRANGERS_AT_ONCE, STRANGERS_PER_S, STRANGERS_REST_S = 1024, 4_000.0, 0.1


class Listener:
    """Calls ``on_accept(sock, name)`` for each connection, with a socket that never blocks.

    After ``per_pass`` at once it lets the loop do other things, and rests when its ``allowance`` is
    used up, for ``rest_s`` at least: this bounds the share of a processor that those can take who
    connect. ``on_accept`` returns whether the connection counts for that.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_accept: Callable[[socket.socket, object], bool],
        *,
        per_pass: int = ACCEPTS_PER_PASS,
        allowance: TokenBucket,
        rest_s: float = 0.0,
        shortage: Shortage | None = None,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_accept = on_accept
        self._per_pass, self._allowance, self._rest_s = per_pass, allowance, rest_s
        self._shortage = Shortage() if shortage is None else shortage
        self._resume: asyncio.TimerHandle | None = None
        loop.add_reader(sock.fileno(), self._accept)

    def fileno(self) -> int:
        """Return the socket's number; -1 when it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Listen no more."""
        if self.fileno() >= 0:
            self._loop.remove_reader(self.fileno())
            self._socket.close()
        if self._resume is not None:
            self._resume.cancel()

    def _accept(self) -> None:
        counted = 0
        for _ in range(self._per_pass):
            try:
                sock, name = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:  # out of descriptors: let others end first
                logger.warning("cannot accept a connection: %s", error)
                self._shortage.failed(error, self._loop.time())
                self._rest(_PAUSE_S)
                return
            self._shortage.over()
            sock.setblocking(False)
            counted += self._on_accept(sock, name)
        rest_s = self._allowance.take(counted, self._loop.time())
        if rest_s:
            self._rest(max(rest_s, self._rest_s))

    def _rest(self, pause_s: float) -> None:
        self._loop.remove_reader(self.fileno())
        self._resume = self._loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self.fileno(), self._accept)


def listen_here(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    admission: Admission,
    on_accept: Callable[[socket.socket], None],
    shortage: Shortage,
) -> Listener:
    """Listen at a Unix socket; ``on_accept`` gets connections of this user's processes only."""

    def accept(sock: socket.socket, _name: object) -> bool:
        peer = credentials_of(sock)
        if peer.is_ours:
            on_accept(sock)
        else:
            sock.close()
            admission.refused_here(peer)
        return not peer.is_ours

    allowance = TokenBucket(STRANGERS_AT_ONCE, STRANGERS_PER_S)
    return Listener(
        loop, sock, accept, allowance=allowance, rest_s=STRANGERS_REST_S, shortage=shortage
    )
