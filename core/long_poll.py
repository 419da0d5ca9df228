"""Long poll with snapshot ids per key: what each listener holds, and which of them wait.

Theory of operation. Every change of a key, including its deletion, has an id. Ids only grow, even
across restarts of the controller, because the first one is derived from the store's epoch. A
listener says up to which id it holds everything. It is answered when there is something newer, and
the answer says up to which id it reaches. So the cost of a call depends on what has changed, not on
the size of the tables, and a waiting listener costs one entry in a dict.

The controller checks each listener's claim and assumes nothing about it. A listener that has
restarted holds nothing, and one with tables of an earlier epoch cannot know what was deleted since.
Both get everything, marked as complete. So a restart on either side heals itself.

A long poll may begin *closed*: it answers no listener until it is opened. A new controller does not
know yet which replicas run, and its tables would make proxies forget replicas that serve.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from greenroom.core.agenda import Agenda
from greenroom.core.records import Changes, ListenerRecord

IDS_PER_EPOCH = 2**32
NOTHING_SEEN = 0  # less than the first id of the first epoch, which is 1
KEPT_DELETED = 1_000  # deletions that are remembered at least, for listeners that have yet to hear


def epoch_of(snapshot_id: int) -> int:
    """Return the epoch of the controller that gave a snapshot its id."""
    return snapshot_id // IDS_PER_EPOCH


Snapshots = dict[str, tuple[int, Any]]


class Update(NamedTuple):
    """The snapshots that a listener lacks, by key; None means deleted."""

    snapshots: Snapshots
    upto: int  # the listener's ``seen`` once it holds them
    complete: bool  # whether what is not among them does not exist


class LongPoll:
    """The newest snapshot of every key; values are plain, and None means deleted."""

    def __init__(self, epoch: int, *, closed: bool = False) -> None:
        self.closed = closed
        self._first = self._last = epoch * IDS_PER_EPOCH
        self._values: dict[str, Any] = {}
        self._changes: dict[str, int] = {}  # key -> id of its last change, the oldest change first
        self._forgotten = self._first  # deletions up to here may be missing from the changes
        self._seen: dict[Hashable, int] = {}  # by listener; NOTHING_SEEN for earlier epochs' ids
        self._parked: dict[Hashable, None] = {}  # in the order in which they came
        self._having: dict[int, int] = {}  # how many listeners have seen so much
        self._has_updates = False  # perhaps; a listener that parks lacks nothing, while it is open
        self._forget_at = KEPT_DELETED
        self._everything = Update({}, NOTHING_SEEN, True)  # for those who have seen nothing

    def open(self) -> None:
        """Answer listeners from now on; those that wait are in :meth:`take_updates`."""
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

    def expect(self, listener: Hashable) -> None:
        """Count a listener as one that holds nothing yet, until it says what it holds."""
        self._count(listener, NOTHING_SEEN)

    def listen(self, listener: Hashable, seen: int) -> Update | None:
        """Note up to which id a listener holds everything; return what it lacks.

        None parks it: its call is answered by :meth:`take_updates`. A repeat takes the place of its
        earlier call.
        """
        if not self._forgotten <= seen <= self._last:
            seen = NOTHING_SEEN
        if self._seen.get(listener) != seen:
            self._count(listener, seen)
        if self.closed or seen == self._last:
            self._parked[listener] = None
            return None
        self._parked.pop(listener, None)
        return self._update_since(seen)

    def take_updates(self) -> dict[Hashable, Update]:
        """Return, and unpark, the parked listeners for which there is something newer."""
        if self.closed or not self._has_updates:
            return {}
        self._has_updates = False
        updates: dict[int, Update] = {}
        answers: dict[Hashable, Update] = {}
        for listener in self._parked:
            seen = self._seen[listener]
            if seen == self._last:
                continue
            if seen not in updates:
                updates[seen] = self._update_since(seen)
            answers[listener] = updates[seen]
        for listener in answers:
            del self._parked[listener]
        return answers

    def forget(self, listener: Hashable) -> None:
        """Count a listener no more; it is gone."""
        self._count(listener, None)
        self._parked.pop(listener, None)

    def held_by_all(self, key: str) -> bool:
        """Return whether every listener has said that it holds the key's newest snapshot.

        False while there is no listener: after a restart the proxies have yet to be heard of, and
        nothing may be said in their name.
        """
        upto = self.held_upto
        return upto is not None and upto >= self._changes.get(key, self._first)

    @property
    def held_upto(self) -> int | None:
        """Up to which id every listener holds everything; None without a listener.

        What they do not hold yet, they can only come to hold when this changes.
        """
        return min(self._having, default=None)

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

    def _count(self, listener: Hashable, seen: int | None) -> None:
        before = self._seen.pop(listener, None)
        if before is not None:
            left = self._having[before] - 1
            if left:
                self._having[before] = left
            else:
                del self._having[before]
        if seen is not None:
            self._seen[listener] = seen
            self._having[seen] = self._having.get(seen, 0) + 1

    def _forget_deleted(self) -> None:
        """Forget deletions that all listeners have heard of, when there are many."""
        if len(self._changes) < self._forget_at:
            return
        heard = self._last if self.held_upto is None else self.held_upto
        known = [k for k, changed in self._changes.items() if changed > heard or k in self._values]
        self._changes = {key: self._changes[key] for key in known}
        self._forgotten = max(self._forgotten, heard)
        self._forget_at = 2 * len(known) + KEPT_DELETED


# --- Listeners on record --------------------------------------------------------------------------
#
# Theory of operation. A change is acknowledged when every proxy routes by it. The long poll knows
# what each listener holds, but a new controller has not heard from any yet, while proxies still
# route by the tables of the last controller. So a proxy is recorded, as hard state, before it is
# told anything, and a new controller waits for the proxies on record. It stops waiting for one that
# reports, has ended, or has not reported within :data:`EXPECTED_S` of the controller's start: by
# then, every live proxy that can be reached has found the controller.

LISTENER = "listener"
EXPECTED_S = 30.0  # some times what a host takes to start its proxy anew


@dataclass(slots=True, eq=False)
class Proxy:
    """A proxy that listens, or is expected to."""

    record: ListenerRecord
    address: Any = None  # of its actor; None while this controller has not heard of it


class Listeners:
    """The proxies that listen, and those expected to. ``now`` is always monotonic seconds."""

    def __init__(
        self,
        long_poll: LongPoll,
        changes: Changes,
        records: Mapping[str, ListenerRecord],
        now: float,
        *,
        agenda: Agenda,
        on_gone: Callable[[str], None],
    ) -> None:
        """Call ``on_gone`` with the name of a listener that is gone."""
        self._long_poll = long_poll
        self._changes = changes
        self._on_gone = on_gone
        self._proxies: dict[Any, Proxy] = {n: Proxy(each) for n, each in records.items()}
        self._owed: dict[Hashable, Update] = {}  # what proxies lacked when they called
        for name in records:
            long_poll.expect(name)
            agenda.at(LISTENER, name, now + EXPECTED_S)

    def expected(self) -> list[ListenerRecord]:
        """Return those of an earlier controller that have not been heard of yet."""
        return [each.record for each in self._proxies.values() if each.address is None]

    def is_heard(self, name: str) -> bool:
        """Return whether a proxy has called, and is not gone."""
        return name in self._proxies and self._proxies[name].address is not None

    def heard_hosts(self) -> set[str]:
        """Return the hosts of which a proxy has called, and is not gone."""
        return {each.record.host for each in self._proxies.values() if each.address is not None}

    def listen(
        self, name: str, process: tuple[int, int, str], seen: int, address: Any, host: str = ""
    ) -> None:
        """Take a proxy's call; what it lacks, now or later, is in :meth:`take_updates`."""
        if name not in self._proxies:
            record = ListenerRecord(name=name, process=process, host=host)
            self._proxies[name] = Proxy(record)
            self._changes.put(LISTENER, name, record)
        self._proxies[name].address = address
        if (update := self._long_poll.listen(name, seen)) is not None:
            self._owed[name] = update

    def take_updates(self) -> list[tuple[Any, Update]]:
        """Return what to send to which addresses; everything that it contains must be saved."""
        owed, self._owed = self._owed | self._long_poll.take_updates(), {}
        proxies = self._proxies
        return [(proxies[name].address, update) for name, update in owed.items() if name in proxies]

    def gone(self, name: str) -> None:
        """Wait for a proxy no more, and forget it; harmless when it is forgotten."""
        if self._proxies.pop(name, None) is not None:
            self._owed.pop(name, None)
            self._changes.put(LISTENER, name, None)
            self._long_poll.forget(name)
            self._on_gone(name)

    def host_gone(self, host: str) -> None:
        """Wait no more for the proxies of a host that is lost; they begin anew when it is back."""
        for name, proxy in list(self._proxies.items()):
            if proxy.record.host == host:
                self.gone(name)

    def reconcile(self, name: str) -> None:
        """Give a proxy up that was expected for long enough."""
        if not self.is_heard(name):
            self.gone(name)
