"""Which of several leaders leads: a lease in the store that they share, and who may take it over.

Theory of operation. Clocks of two hosts cannot be compared, so nobody writes a time. The leader
*renews*: it writes a new number every :data:`RENEW_S`, and counts itself as leading for
:data:`TERM_S` from before each such write, by its own clock. Another host *looks*, and takes the
lease to be over when what it saw has not changed for :data:`OVER_S` by its own clock. As that is
longer than the term, and begins later, the old leader knows that its term is over before anybody
else thinks so. This alone keeps two from acting at once while clocks go forward at about one rate;
that a leader which was stopped in the midst of a write changes nothing any more is the store's to
see to, by its epoch.

Who looks may have been stopped itself: what it has not looked at for a while counts from now on.

A leader can also *give up* the lease, as the last thing that it does, and name an *heir*, which
then leads at once: when its host is stopped, and when another host *reaches* more hosts than it
does. For that, a host that may lead and does not hear who does leaves *bids* in the folder that
they share, with the number of other hosts that answer it. Where no bid is higher the leader leads
on: a link that is cut between two hosts says nothing about which of them is better off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

RENEW_S = 0.4
TERM_S = 2.6
OVER_S = 2.8  # must be longer than the term
LOOK_S = 0.2  # how often who follows looks
PAUSE_S = 1.0  # between two looks: who looks was away itself
RANK_S = 0.4  # by which each later one of the leaders waits longer, so that the first goes first
BEATS_S = 1.5  # a leader that was heard of within this may just be late in renewing
BID_FRESH_S = 1.5  # a bid that has not changed for longer is of somebody who bids no more
SETTLED_S = 10.0  # for which a leader gives way to nobody, so that leading does not go to and fro


class Lease(NamedTuple):
    """What the store says of who leads."""

    epoch: int = 0  # of the store's last writer; 0 when there never was one
    holder: str = ""  # the name of its host
    number: int = 0  # grows with each renewal
    place: int = 0  # of that host in the list of those that may lead
    heir: str = ""  # the host that it was given up for; "" while it is held
    leaves: bool = False  # whether its host was stopped, and so is no more to be waited for


class Bid(NamedTuple):
    """What a host that may lead, and does not hear who does, says of itself."""

    number: int  # grows with each
    reach: int  # how many other hosts answer it
    place: int  # in the list of those that may lead


class Tenure:
    """The leader's own view of its lease."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def renewed(self, begun_at: float) -> None:
        """Take note that a renewal, begun at ``begun_at``, was accepted."""
        self._until = max(self._until, begun_at + TERM_S)

    def end(self) -> None:
        """Take note that the lease is given up."""
        self._until = float("-inf")

    def is_over(self, now: float) -> bool:
        """Tell whether another host may think that nobody leads; then nothing may be done."""
        return now >= self._until


class Succession:
    """What one of the leaders makes of what it sees in the store; ``rank`` is its place."""

    def __init__(self, own: str, rank: int) -> None:
        self._own = own
        self._rank = rank
        self.seen = Lease()
        self._changed_at: float | None = None
        self._looked_at = 0.0

    def look(self, lease: Lease, now: float, silent_s: float) -> bool:
        """Take note of what the store says; tell whether this host is to lead.

        ``silent_s`` is for how long the leader's host has not been heard of otherwise. A host whose
        own lease it is leads on, until it gives it up. Where nobody has ever led only the first
        does.
        """
        if lease != self.seen or self._changed_at is None or now - self._looked_at > PAUSE_S:
            self.seen, self._changed_at = lease, now
        self._looked_at = now
        if lease.epoch == 0:
            return self._rank == 0
        if self._own == (lease.heir or lease.holder):
            return True
        return now - self._changed_at > self._patience_s(lease, silent_s)

    def _patience_s(self, lease: Lease, silent_s: float) -> float:
        before = self._rank - (lease.place < self._rank)  # who leads does not wait, and has a place
        patience_s = OVER_S + before * RANK_S
        return patience_s if lease.heir or silent_s > BEATS_S else 2 * patience_s


class Contest:
    """Whether the leader is to give way to a host that bids."""

    def __init__(self, begun_at: float) -> None:
        self._begun_at = begun_at
        self._seen: dict[str, tuple[Bid, float]] = {}  # by host: its bid, and when it last changed

    def heir(self, bids: Mapping[str, Bid], reach: int, now: float) -> str:
        """Take note of all bids; return the host to give the lease up for, "" to lead on.

        ``reach`` is how many other hosts the leader hears. A bid counts once it has been seen to
        change, for one that is found may have been left long ago.
        """
        for host, bid in bids.items():
            known, _ = self._seen.get(host, (bid, 0.0))
            if known != bid or host not in self._seen:
                changed_at = now if known != bid else float("-inf")
                self._seen[host] = (bid, changed_at)
        if now - self._begun_at < SETTLED_S:
            return ""
        higher = [
            (-bid.reach, bid.place, host)
            for host, (bid, changed_at) in self._seen.items()
            if bid.reach > reach and now - changed_at <= BID_FRESH_S
        ]
        return min(higher)[2] if higher else ""


class Allegiance:
    """Which controller a process obeys: never one of an earlier epoch than before.

    Epoch 0 is that of a controller that nobody can succeed elsewhere; it is always obeyed.
    """

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def accepts(self, epoch: int) -> bool:
        """Tell whether an order of this epoch is to be obeyed, and obey none before it again."""
        if 0 < epoch < self.epoch:
            return False
        self.epoch = max(self.epoch, epoch)
        return True
