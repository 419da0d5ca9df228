"""Which hosts a router uses the replicas of: its own first, and none that does not answer."""

from __future__ import annotations

from greenroom.core.routing.balancing import RoutedReplica
from greenroom.core.routing.dispatching import Dispatch
from greenroom.core.routing.tickets import DROPPED, Cancel, Effects, Ticket


class RoutedHosts:
    """The hosts of a router's replicas."""

    def __init__(self, state: Dispatch, own: str) -> None:
        self._state = state
        self._own = own
        self._silent: set[str] = set()

    def is_near(self, host: str) -> bool:
        """Return whether it is the router's own."""
        return host in {"", self._own}

    def is_silent(self, host: str) -> bool:
        """Return whether it does not answer."""
        return host in self._silent

    def silent(self, host: str, now: float) -> Effects:
        """Give the replicas of a host that does not answer no new queries.

        What they have goes to others where it may be retried. The rest waits for them: they may
        answer yet, or be lost. Where there are no others, all of it waits.
        """
        self._silent.add(host)
        silent = self._at(host)
        for replica in silent:
            replica.is_silent = True
            if not replica.retired:
                replica.backend.place(replica, now)
        for replica in silent:
            self._move(replica, now)
        return self._state.taken()

    def gone(self, host: str, now: float) -> Effects:
        """Treat replicas of a host that has been silent for long as dead, but for those in tables.

        The controller has replaced these, and nothing says more certainly that they are gone: the
        kernel of a host whose processes stand still keeps their connections.
        """
        for replica in self._at(host):
            if replica.is_silent and replica.retired:
                self._state.forget_replica(replica.table.tag, set(), now)
        return self._state.taken()

    def answers(self, host: str, now: float) -> Effects:
        """Use the replicas of a host again."""
        self._silent.discard(host)
        again = self._at(host)
        for replica in again:
            replica.is_silent = False
        for replica in again:
            self._state.release(replica, now)
        return self._state.taken()

    def _at(self, host: str) -> list[RoutedReplica]:
        return [each for each in self._state.replicas.values() if each.table.host == host]

    def _move(self, replica: RoutedReplica, now: float) -> None:
        """Send to others what a replica has, where there are others and it may be retried."""
        state = self._state
        backend = state.backends.get(replica.backend.table.tag)
        if backend is None or all(each.is_silent for each in backend.replicas.values()):
            return
        moved: list[Ticket] = []
        for ticket in [*replica.ongoing.values(), *replica.unconfirmed.values()]:
            if ticket.is_mirrored or ticket.state is DROPPED:
                continue
            if state.charge_retry(ticket, "silent"):
                continue
            if replica.ongoing.pop(ticket.number, None) is not None:
                replica.withdrawn.add(ticket.number)
                state.effects.append(Cancel(replica.table.tag, ticket.number))
            else:
                del replica.unconfirmed[ticket.number]
            state.tickets.renumber(ticket)
            moved.append(ticket)
        state.put_back(moved, now)
