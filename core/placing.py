"""The replicas of one backend and where they are: started on hosts, retired, lost with a host.

Theory of operation. Each replica is decided for a host, and stays there. One whose host is lost is
*lost*: it is not counted, another is started elsewhere, and its record stays, for its process may
live on behind a broken link. When the host is back it is asked as a new controller asks: if it
still runs it counts again, and if there are too many then, those go that are furthest from being
spread. So nothing healthy is killed, and nothing runs twice.

A replica that is to be *moved* goes when another runs in its place, and stays while there is no
room for one.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection

from greenroom.core import releases
from greenroom.core.capacity import needs_of
from greenroom.core.placement import Placement, Request, anywhere
from greenroom.core.records import BackendRecord, Release
from greenroom.core.replica_states import LIVE, ReplicaEvent, ReplicaState
from greenroom.core.replicas import Replica
from greenroom.core.retries import Retries
from greenroom.core.sizes import Sized


class Placing(Sized):
    """A backend's replicas, by tag, and its part of the placement."""

    def __init__(self, record: BackendRecord, now: float, placement: Placement | None) -> None:
        super().__init__(record)
        self.placement = placement or anywhere()
        self.waiting = ""  # why a replica that is wanted has no room, and what would make it fit
        self.retries = Retries()
        self._start_due_at = float("inf")  # when one is to start that has to wait
        # Recorded replicas may have a process already: they are asked, as if just told to start.
        self.replicas = {
            tag: Replica(
                tag,
                number,
                record.hosts.get(tag, ""),
                ReplicaState.STARTING,
                since=now,
                ask_at=now,
                recovering=True,
            )
            for tag, number in releases.release_numbers(record).items()
            if self.placement.knows(record.hosts.get(tag, ""))
        }
        for replica in self.replicas.values():
            self._take_room(replica)

    def release_of(self, replica: str) -> Release:
        """Return the release that a replica runs."""
        return releases.release_of(self.record, replica)

    def host_of(self, replica: str) -> str:
        """Return the host that a replica was decided for."""
        return self.replicas[replica].host

    def _take_room(self, replica: Replica) -> None:
        options = releases.numbered(self.record, replica.release).actor_options
        self.placement.take(replica.tag, replica.host, needs_of(options))

    def _live(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state in LIVE]

    # --- More and fewer -------------------------------------------------------------------------

    def _add(self, count: int, release: int, start_at: float, now: float) -> None:
        if count and now < start_at:
            self._start_due_at = min(self._start_due_at, start_at)
            return
        options = releases.numbered(self.record, release).actor_options
        request = Request(
            needs=needs_of(options),
            labels=options.get("label_selector", {}),
            max_per_host=self.config.max_replicas_per_host,
        )
        for _ in range(count):
            siblings = self._by_host(release)
            host = self.placement.choose(request, siblings)
            if host is None:
                self.waiting = self.placement.why_not(request, siblings)
                return
            tag = f"{self.record.tag}#{secrets.token_hex(3)}"
            self.replicas[tag] = Replica(tag, release, host, since=now)
            self._take_room(self.replicas[tag])

    def _by_host(self, release: int) -> Counter[str]:
        # Not those that leave: code that cannot start on a host would be moved about, and found out
        # or not by chance. Nor those of another release, which go as these come: where every host
        # has as many as it may, nothing could ever be updated.
        return Counter(r.host for r in self._live() if r.release == release)

    def _retire_surplus(self, live: list[Replica], surplus: int, now: float) -> None:
        if any(replica.recovering for replica in live):
            # Which of them runs, and which has been told to stop already, their reports will tell.
            # And a process that this controller has never told to start cannot be told to stop.
            live = [] if self.wanted else [r for r in live if not r.recovering]
        crowded = Counter(replica.host for replica in live)
        for _ in range(min(surplus, len(live))):
            goes = min(
                live,
                key=lambda r: (
                    r.state is ReplicaState.RUNNING,
                    not r.moving,
                    -crowded[r.host],
                    -r.since,
                ),
            )
            live.remove(goes)
            crowded[goes.host] -= 1
            goes.move(ReplicaEvent.RETIRE, now)

    # --- Moves ----------------------------------------------------------------------------------

    def move_from(self, host: str) -> None:
        """Have all replicas on a host replaced elsewhere."""
        for replica in self._live():
            replica.moving = replica.moving or replica.host == host

    def retire_from(self, host: str, now: float) -> None:
        """Have all replicas on a host go now, in their own time."""
        for replica in self._live():
            if replica.host == host:
                replica.move(ReplicaEvent.RETIRE, now)

    def rebalance(self) -> int:
        """Have replicas on hosts that have too many replaced elsewhere; return how many.

        An update places anew anyway, so there is nothing to move while one is under way.
        """
        live = [r for r in self._live() if r.state is ReplicaState.RUNNING and not r.moving]
        counts = Counter(dict.fromkeys(self.placement.open_hosts(), 0))
        counts.update(replica.host for replica in live)
        moved = 0
        while counts and not self.updating:
            most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
            if counts[most] - counts[least] <= 1:
                break
            next(r for r in live if r.host == most and not r.moving).moving = True
            counts[most] -= 1
            counts[least] += 1
            moved += 1
        return moved

    @property
    def updating(self) -> bool:
        """Whether replicas of another release are to be replaced, or are there to go back to."""
        old = any(r.release != self.record.release for r in self._live())
        return old or releases.fallback(self.record) is not None

    def is_at(self, host: str) -> bool:
        """Tell whether any replica is on a host, leaving ones too."""
        return any(replica.host == host for replica in self.replicas.values())

    def _choose_moves(self, live: list[Replica], now: float) -> None:
        """Start what is missing beside those that are to be moved, and let go whom it replaces."""
        moving = [replica for replica in live if replica.moving]
        staying = len(live) - len(moving)
        if staying < self.wanted:
            missing = self.wanted - staying
            self._add(missing, self.record.release, self.retries.start_at, now)
        running = sum(r.state is ReplicaState.RUNNING and not r.moving for r in live)
        self._retire_surplus(moving, max(running + len(moving) - self.wanted, 0), now)

    # --- Hosts that are lost, and back ----------------------------------------------------------

    def host_lost(self, host: str, now: float) -> None:
        """Count no more on what is on a host."""
        for replica in self.replicas.values():
            if replica.host != host or replica.state is ReplicaState.LOST:
                continue
            is_asked = replica.recovering and replica.state is ReplicaState.STARTING
            if replica.state is ReplicaState.RUNNING or is_asked:
                replica.move(ReplicaEvent.LOSE, now)
            elif replica.state is ReplicaState.SHOULD_START:
                replica.move(ReplicaEvent.RETIRE, now)
            elif replica.state is not ReplicaState.STOPPED:
                replica.move(ReplicaEvent.EXITED, now)  # if it lives, it is told to go when back
            replica.recovering = False
            replica.check_sent_at, replica.missed_checks = None, 0

    def host_back(self, host: str, running: Collection[str], now: float) -> None:
        """Ask those of a host that was lost which still have a process there."""
        for replica in self.replicas.values():
            if replica.host == host and replica.state is ReplicaState.LOST:
                if replica.tag in running:
                    replica.move(ReplicaEvent.FIND, now)
                    replica.recovering, replica.reported, replica.ask_at = True, False, now
                else:
                    replica.move(ReplicaEvent.EXITED, now)

    def host_gone(self, host: str, now: float) -> None:
        """Forget what was on a host that does not come back."""
        self.host_lost(host, now)
        self.host_back(host, (), now)
