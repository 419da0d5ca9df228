"""Long poll with snapshot ids per key: who holds what, and who waits for something newer.

A listener sends the snapshot ids that it holds and is answered when a key has a newer one, when
there is a key that it lacks, or when one of its keys is gone. Ids only grow, also over restarts of
the controller, because the first one comes from the store's epoch. So any restart on either side
heals itself: what a listener claims to hold is compared, never assumed.

A long poll may begin *closed*: it answers nobody until it is opened. A new controller does not know
yet which replicas run, and would have proxies forget those that serve.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

IDS_PER_EPOCH = 2**32
DELETED = (0, None)

Snapshots = dict[str, tuple[int, Any]]


@dataclass(slots=True)
class _Listener:
    known: dict[str, int] = field(default_factory=dict)
    parked: bool = False
    behind: bool = True  # it may lack more than what has changed of late


class LongPoll:
    """The newest snapshot of every key; values are plain, and None means deleted."""

    def __init__(self, epoch: int, *, closed: bool = False) -> None:
        self.closed = closed
        self._last_id = epoch * IDS_PER_EPOCH
        self._snapshots: Snapshots = {}
        self._listeners: dict[Hashable, _Listener] = {}
        self._changed: set[str] = set()

    def open(self) -> None:
        """Answer listeners from now on; those that wait are in :meth:`take_news`."""
        self.closed = False

    def publish(self, key: str, value: Any) -> None:
        """Make ``value`` the key's newest snapshot, unless it equals the present one."""
        present = self._snapshots.get(key)
        if (present is None and value is None) or (present is not None and present[1] == value):
            return
        self._changed.add(key)
        if value is None:
            del self._snapshots[key]
        else:
            self._last_id += 1
            self._snapshots[key] = (self._last_id, value)

    def listen(self, listener: Hashable, known: Mapping[str, int]) -> Snapshots:
        """Note what a listener holds; return what it lacks, or park it when that is nothing.

        A listener that asks for the first time is answered even with nothing.
        """
        entry = self._listeners.setdefault(listener, _Listener())
        entry.known = dict(known)
        if self.closed:
            entry.parked = entry.behind = True
            return {}
        news = self._lacking(known, {*self._snapshots, *known})
        entry.parked = not news and not entry.behind
        entry.behind = False
        return news

    def is_parked(self, listener: Hashable) -> bool:
        """Tell whether the listener's call is still unanswered."""
        return self._listeners[listener].parked

    def take_news(self) -> dict[Hashable, Snapshots]:
        """Return what has changed since the last call, for each parked listener; unpark those."""
        if self.closed:
            return {}
        changed, self._changed = self._changed, set()
        answers: dict[Hashable, Snapshots] = {}
        for listener, entry in self._listeners.items():
            if not entry.parked or not (changed or entry.behind):
                continue
            keys = {*self._snapshots, *entry.known} if entry.behind else changed
            news = self._lacking(entry.known, keys)
            if news or entry.behind:
                answers[listener] = news
                entry.parked = entry.behind = False
        return answers

    def forget(self, listener: Hashable) -> None:
        """Count a listener no more; it is gone."""
        self._listeners.pop(listener, None)

    def held_by_all(self, key: str) -> bool:
        """Tell whether every listener has said that it holds the key's newest snapshot.

        False while there is no listener: after a restart the proxies have yet to be heard of, and
        nothing may be said in their name.
        """
        if not self._listeners:
            return False
        snapshot_id = self._snapshots.get(key, DELETED)[0]
        return all(e.known.get(key, 0) == snapshot_id for e in self._listeners.values())

    def _lacking(self, known: Mapping[str, int], keys: Iterable[str]) -> Snapshots:
        newest = {key: self._snapshots.get(key, DELETED) for key in keys}
        return {key: new for key, new in newest.items() if known.get(key, 0) != new[0]}
