"""Long poll with snapshot ids per key: who holds what, and who waits for something newer.

A listener sends the snapshot ids that it holds and is answered when a key has a newer one, when
there is a key that it lacks, or when one of its keys is gone. Ids only grow, also over restarts of
the controller, because the first one comes from the store's epoch. So any restart on either side
heals itself: what a listener claims to hold is compared, never assumed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

IDS_PER_EPOCH = 2**32

Snapshots = dict[str, tuple[int, Any]]


@dataclass(slots=True)
class _Listener:
    known: dict[str, int] = field(default_factory=dict)
    parked: bool = False
    heard_at: float = 0.0


class LongPoll:
    """The newest snapshot of every key; values are plain, and None means deleted."""

    def __init__(self, epoch: int) -> None:
        self._last_id = epoch * IDS_PER_EPOCH
        self._snapshots: Snapshots = {}
        self._deleted: dict[str, int] = {}
        self._listeners: dict[Hashable, _Listener] = {}
        self._changed: set[str] = set()

    def publish(self, key: str, value: Any) -> None:
        """Make ``value`` the key's newest snapshot, unless it equals the present one."""
        present = self._snapshots.get(key)
        if (present is None and value is None) or (present is not None and present[1] == value):
            return
        self._last_id += 1
        self._changed.add(key)
        if value is None:
            del self._snapshots[key]
            self._deleted[key] = self._last_id
        else:
            self._snapshots[key] = (self._last_id, value)
            self._deleted.pop(key, None)

    def listen(self, listener: Hashable, known: Mapping[str, int], now: float) -> Snapshots:
        """Note what a listener holds; return what it lacks, or park it when that is nothing.

        A listener that asks for the first time is answered even with nothing.
        """
        first = listener not in self._listeners
        entry = self._listeners.setdefault(listener, _Listener())
        entry.known, entry.heard_at = dict(known), now
        news = {
            key: snapshot
            for key, snapshot in self._snapshots.items()
            if known.get(key) != snapshot[0]
        }
        news.update({key: (0, None) for key in known if key not in self._snapshots})
        entry.parked = not news and not first
        return news

    def is_parked(self, listener: Hashable) -> bool:
        """Tell whether the listener's call is still unanswered."""
        return self._listeners[listener].parked

    def take_news(self) -> dict[Hashable, Snapshots]:
        """Return what has changed since the last call, for each parked listener; unpark those."""
        changed, self._changed = self._changed, set()
        if not changed:
            return {}
        news = {key: self._snapshots.get(key, (self._deleted.get(key, 0), None)) for key in changed}
        parked = [listener for listener, entry in self._listeners.items() if entry.parked]
        for listener in parked:
            self._listeners[listener].parked = False
        return dict.fromkeys(parked, news)

    def forget(self, listener: Hashable) -> None:
        """Count a listener no more; it is gone."""
        self._listeners.pop(listener, None)

    def silent_since(self, now: float, silence_s: float) -> list[Hashable]:
        """Return the listeners not heard of for ``silence_s`` seconds."""
        return [name for name, e in self._listeners.items() if now - e.heard_at > silence_s]

    def held_by_all(self, key: str) -> bool:
        """Tell whether every listener has said that it holds the key's newest snapshot.

        False while there is no listener: after a restart the proxies have yet to be heard of, and
        nothing may be said in their name.
        """
        if not self._listeners:
            return False
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            return all(key not in entry.known for entry in self._listeners.values())
        return all(entry.known.get(key) == snapshot[0] for entry in self._listeners.values())

    def value(self, key: str) -> Any:
        """Return the key's newest value, or None."""
        snapshot = self._snapshots.get(key)
        return None if snapshot is None else snapshot[1]
