"""Long poll with snapshot ids per key: what each proxy holds, and which of them wait.

Theory of operation. Every change of a key, including its deletion, has an id. Ids only grow, even
across restarts of the controller, because the first one is derived from the store's epoch. A proxy
says up to which id it holds everything. It is answered when there is something newer, and the
answer says up to which id it reaches. So the cost of a call depends on what has changed, not on
the size of the tables, and a proxy that waits costs its entry.

The controller checks each proxy's claim and assumes nothing about it. A proxy that has restarted
holds nothing, and one with tables of an earlier epoch cannot know what was deleted since. Both get
everything, marked as complete. So a restart on either side heals itself.

A long poll may begin *closed*: it answers no proxy until it is opened. A new controller does not
know yet which replicas run, and its tables would make proxies forget replicas that serve.

A change is acknowledged when every proxy routes by it, also those that a new controller has not
heard of and that route by the tables of the last one. So a proxy is recorded, as hard state, before
it is sent anything, and a new controller waits for the proxies on record. It stops waiting for one
that reports, has ended, or has not reported within :data:`PROXY_EXPECTED_S` of the controller's
start: by then, every live proxy that can be reached has found the controller. One that has called
goes with its host at the latest. Where that is lost or not on record, because the call was late or
the host has left, it is waited for as long after its last call, which a live proxy repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from greenroom.core.agenda import NEVER, Agenda
from greenroom.core.records import Changes, ListenerRecord, Records

LISTENER = "listener"
PROXY_EXPECTED_S = 30.0  # some times what a host takes to start its proxy anew
IDS_PER_EPOCH = 2**32
NOTHING_SEEN = 0  # less than the first id of the first epoch, which is 1
KEPT_DELETED = 1_000  # deletions that are remembered at least, for proxies that have yet to hear


def epoch_of(snapshot_id: int) -> int:
    """Return the epoch of the controller that gave a snapshot its id."""
    return snapshot_id // IDS_PER_EPOCH


Snapshots = dict[str, tuple[int, Any]]


class Update(NamedTuple):
    """The snapshots that a proxy lacks, by key; None means deleted."""

    snapshots: Snapshots
    upto: int  # the proxy's ``seen`` once it holds them
    complete: bool  # whether what is not among them does not exist


@dataclass(slots=True, eq=False)
class Proxy:
    """A proxy that listens, or is expected to."""

    host: str
    address: Any = None  # of its actor; None while this controller has not heard of it
    seen: int = NOTHING_SEEN  # up to which id it holds everything
    waits: bool = False  # for an answer
    until: float = NEVER  # when it is given up


class LongPoll:
    """The newest snapshot of every key, and the proxies.

    Values are plain, and None means deleted. ``on_gone`` is called with the name of a proxy that is
    gone.
    """

    def __init__(
        self,
        epoch: int,
        records: Mapping[str, ListenerRecord],
        changes: Changes,
        agenda: Agenda,
        *,
        closed: bool = False,
        on_gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.closed = closed
        self._first = self._last = epoch * IDS_PER_EPOCH
        self._values: dict[str, Any] = {}
        self._changes: dict[str, int] = {}  # key -> id of its last change, the oldest change first
        self._forgotten = self._first  # deletions up to here may be missing from the changes
        self._forget_at = KEPT_DELETED
        self._has_updates = False  # perhaps
        self._everything = Update({}, NOTHING_SEEN, True)  # for those who have seen nothing
        self._records = Records(LISTENER, records, changes)
        self._proxies = {name: Proxy(each.host) for name, each in records.items()}
        # How many hold everything up to an id.
        self._having = Counter(each.seen for each in self._proxies.values())
        self._on_gone = on_gone
        self._agenda = agenda
        agenda.touch(LISTENER, *records)

    def open(self) -> None:
        """Answer proxies from now on; those that wait are in :meth:`take_updates`."""
        self.closed, self._has_updates = False, True

    def publish(self, key: str, value: Any) -> None:
        """Make ``value`` the key's newest snapshot, unless it equals the present one."""
        if self._values.get(key) == value:
            return
        self._last += 1
        self._has_updates = True
        self._changes.pop(key, None)
        self._changes[key] = self._last
        if value is None:
            del self._values[key]
            self._forget_deleted()
        else:
            self._values[key] = value

    def held_by_all(self, key: str) -> bool:
        """Return whether every proxy has said that it holds the key's newest snapshot.

        False while there is no proxy: nothing may be said in their name.
        """
        upto = self.held_upto
        return upto is not None and upto >= self._changes.get(key, self._first)

    @property
    def held_upto(self) -> int | None:
        """Up to which id every proxy holds everything; None without a proxy.

        What they do not hold yet, they can only come to hold when this changes.
        """
        return min(self._having, default=None)

    # --- Proxies --------------------------------------------------------------------------------

    def listen(
        self, name: str, process: tuple[int, int, str], seen: int, address: Any, host: str = ""
    ) -> None:
        """Take a proxy's call, and up to which id it holds everything.

        What it lacks, now or later, is in :meth:`take_updates`. A repeat takes the place of its
        earlier call.
        """
        if name not in self._proxies:
            self._proxies[name] = Proxy(host)
            self._count(NOTHING_SEEN, 1)
            self._records[name] = ListenerRecord(name=name, process=process, host=host)
            self._agenda.touch(LISTENER, name)
        proxy = self._proxies[name]
        proxy.address, proxy.waits = address, True
        if proxy.until < NEVER:
            proxy.until = NEVER
            self._agenda.touch(LISTENER, name)
        if not self._forgotten <= seen <= self._last:
            seen = NOTHING_SEEN
        if proxy.seen != seen:
            self._count(proxy.seen, -1)
            self._count(seen, 1)
            proxy.seen = seen
        self._has_updates |= seen != self._last

    def take_updates(self) -> list[tuple[Any, Update]]:
        """Return what to send to which addresses; everything that it contains must be saved."""
        if self.closed or not self._has_updates:
            return []
        self._has_updates = False
        updates: dict[int, Update] = {}
        answers = []
        for proxy in self._proxies.values():
            if proxy.waits and proxy.seen != self._last:
                proxy.waits = False
                if proxy.seen not in updates:
                    updates[proxy.seen] = self._update_since(proxy.seen)
                answers.append((proxy.address, updates[proxy.seen]))
        return answers

    def gone(self, name: str) -> None:
        """Wait for a proxy no more, and forget it; harmless when it is forgotten."""
        proxy = self._proxies.pop(name, None)
        if proxy is not None:
            self._count(proxy.seen, -1)
            del self._records[name]
            self._on_gone(name)

    def host_gone(self, host: str) -> None:
        """Wait no more for the proxies of a host that is lost; they begin anew when it is back."""
        for name, proxy in list(self._proxies.items()):
            if proxy.host == host:
                self.gone(name)

    def reconcile(self, name: str, is_there: Callable[[str], bool], now: float) -> None:
        """Give a proxy up that has not called for long enough, and does not go with its host.

        It does where it has called and its host ``is_there``.
        """
        proxy = self._proxies.get(name)
        if proxy is None:
            return
        if self.is_heard(name) and is_there(proxy.host):
            proxy.until = NEVER
        elif proxy.until == NEVER:
            proxy.until = now + PROXY_EXPECTED_S
        elif now >= proxy.until:
            self.gone(name)
            return
        self._agenda.at(LISTENER, name, proxy.until)

    def expected(self) -> list[ListenerRecord]:
        """Return those of an earlier controller that have not been heard of yet."""
        return [record for name, record in self._records.items() if not self.is_heard(name)]

    def is_heard(self, name: str) -> bool:
        """Return whether a proxy has called, and is not gone."""
        return name in self._proxies and self._proxies[name].address is not None

    def heard_hosts(self) -> set[str]:
        """Return the hosts of which a proxy has called, and is not gone."""
        return {each.host for each in self._proxies.values() if each.address is not None}

    # --- Inside ---------------------------------------------------------------------------------

    def _count(self, seen: int, more: int) -> None:
        self._having[seen] += more
        if not self._having[seen]:
            del self._having[seen]

    def _update_since(self, seen: int) -> Update:
        complete = seen == NOTHING_SEEN
        if complete and self._everything.upto == self._last:
            return self._everything  # all proxies ask for it when a controller is new
        snapshots: Snapshots = {}
        for key, changed in reversed(self._changes.items()):
            if changed <= seen:
                break
            value = self._values.get(key)
            if value is not None or not complete:
                snapshots[key] = (changed, value)
        update = Update(snapshots, self._last, complete)
        if complete:
            self._everything = update
        return update

    def _forget_deleted(self) -> None:
        """Forget deletions that all proxies have heard of, when there are many."""
        if len(self._changes) < self._forget_at:
            return
        heard = self._last if self.held_upto is None else self.held_upto
        known = [k for k, changed in self._changes.items() if changed > heard or k in self._values]
        self._changes = {key: self._changes[key] for key in known}
        self._forgotten = max(self._forgotten, heard)
        self._forget_at = 2 * len(known) + KEPT_DELETED
