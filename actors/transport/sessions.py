"""All sessions of one process, by the address of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenroom.actors.transport.events import Unsent
from greenroom.actors.transport.identity import Identity, RefusedError
from greenroom.actors.transport.session import Limits, Session

if TYPE_CHECKING:
    from greenroom.actors.transport.protocol import Connection

MAX_ENDED = 4096


class Sessions:
    """Finds the session that a message or an authenticated connection belongs to.

    Not thread-safe: one loop owns it, its sessions and their connections.
    """

    def __init__(self, own: Identity, limits: Limits | None = None) -> None:
        self.own = own
        self.limits = limits or Limits()
        self._by_address: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # incarnations that were replaced, oldest first
        self._lives = 0

    def __len__(self) -> int:
        return len(self._by_address)

    def to(self, address: str) -> Session:
        """Return the session with the process at ``address``, made on first use."""
        session = self._by_address.get(address)
        if session is None:
            self._lives += 1
            session = self._by_address[address] = Session(self.own, self._lives, self.limits)
        return session

    def connection_to(self, address: str) -> Connection | None:
        """Return the connection that counts for the session with ``address``, if there is one."""
        session = self._by_address.get(address)
        return None if session is None else session.connection

    def meet(self, peer: Identity) -> tuple[Session, list[Unsent]]:
        """Return the session with ``peer``, who is authenticated, and what its predecessor leaves.

        A new incarnation at the same address ends the old one's session. RefusedError when ``peer``
        is itself an incarnation that was replaced.
        """
        if peer.incarnation in self._ended:
            raise RefusedError(f"{peer} was replaced by a later incarnation")
        session = self.to(peer.address)
        lost: list[Unsent] = []
        if session.peer is not None and session.peer.incarnation != peer.incarnation:
            self._ended[session.peer.incarnation] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            lost = self.forget(peer.address)
            session = self.to(peer.address)
        session.peer = peer
        return session, lost

    def forget(self, address: str) -> list[Unsent]:
        """End the session with ``address`` and its connection; return what was not acknowledged."""
        session = self._by_address.pop(address, None)
        if session is None:
            return []
        connection = session.connection
        lost = session.end()
        if connection is not None:
            connection.close()
        return lost
