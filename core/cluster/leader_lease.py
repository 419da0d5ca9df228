"""Which of several leaders leads: a lease in the store that they share.

Theory of operation. Clocks of two hosts cannot be compared, so the lease holds no time. The leader
*renews* it by writing a new number every :data:`RENEW_S`. Every other host that may lead *checks*
it every :data:`CHECK_S`. Both count time by their own clock:

    the lease                           the host that holds it     another host that may lead
    renewed within TERM_S               acts                       follows
    not renewed for TERM_S              does nothing until it has  follows
                                        renewed
    unchanged for OVER_S                is refused by the store,   takes the lease over, with a
                                        and ends                   higher epoch
    released to an heir                 acts no more               the heir takes it over at once,
                                                                   another one after OVER_S

A database has a clock of its own, which alone decides there: the lease is over OVER_S after its
last renewal arrived, and the first host that takes it over leads. That clock says nothing of a
lease that was released: without a pause its former holder could be quicker than the heir.

OVER_S is longer than TERM_S and begins later, so the old leader has stopped acting before another
host takes over. This alone keeps two leaders from acting at once, as long as their clocks run at
about the same rate. If a leader was stopped in the middle of a write, the store refuses that write
because of its epoch. A host that was itself stopped starts counting again. While the leader still
answers heartbeats, the others wait twice as long, because it may just be late.

A leader releases the lease when its host is stopped, and when it hears none of several other hosts,
which may hear each other. Then its own host takes the lease back only if no other host has: all of
them are down, and it leads on until it has heard one (``hosts.away``).
"""

from __future__ import annotations

from typing import NamedTuple

RENEW_S = 0.4
TERM_S = 2.6
OVER_S = 2.8  # must be longer than the term
CHECK_S = 0.2
PAUSE_S = 1.0  # between two checks: the checking host was away itself
BEATS_S = 1.5  # a leader that was heard of within this may just be late in renewing
MIN_TENURE_S = 10.0  # for which a leader keeps the lease, so that leading does not go to and fro


class Lease(NamedTuple):
    """The lease as it is in the store."""

    epoch: int = 0  # of the store's last writer; 0 when there never was one
    holder: str = ""  # the name of its host
    number: int = 0  # grows with each renewal
    heir: str = ""  # the host that it was released to; "" while it is held
    leaves: bool = False  # whether its host was stopped, so that it need not be waited for
    address: str = ""  # of that host


class Tenure:
    """The leader's own view of its lease."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def renewed(self, begun_at: float) -> None:
        """Count on from a renewal that was begun at ``begun_at``, and was accepted."""
        self._until = max(self._until, begun_at + TERM_S)

    def is_over(self, now: float) -> bool:
        """Return whether another host may lead by now; then the controller must not act."""
        return now >= self._until


class Succession:
    """Decides whether this host should lead."""

    def __init__(self, own: str) -> None:
        self._own = own
        self.seen = Lease()
        self._changed_at: float | None = None
        self._checked_at = 0.0

    def check(
        self, lease: Lease, now: float, silent_s: float, *, is_over: bool | None = None
    ) -> bool:
        """Take what the store says; return whether this host is to lead.

        ``silent_s`` is for how long the leader has not answered heartbeats. The holder leads on
        until it releases the lease. Where there never was a leader any host begins: of those that
        try at the same time the store takes one. ``is_over`` is what the store's own clock says;
        None where it has none.
        """
        if lease != self.seen or self._changed_at is None or now - self._checked_at > PAUSE_S:
            self.seen, self._changed_at = lease, now
        self._checked_at = now
        if lease.epoch == 0:
            return True
        if self._own == (lease.heir or lease.holder):
            return True
        if is_over is not None and not lease.heir:
            return is_over
        comes_last = lease.holder == self._own if lease.heir else silent_s <= BEATS_S
        return now - self._changed_at > (2 * OVER_S if comes_last else OVER_S)
