"""History: every acknowledged change, who made it, and what it takes to undo it.

An entry is saved together with the change itself. It holds the definitions before and after, so its
size is that of the change. The last :data:`KEPT` entries are kept, and so is the code that the last
:data:`CODE_KEPT` of them need.

An undo restores the definitions from before a change, as a new change with an entry of its own. It
is refused if a later change touched the same definitions, or if their code is no longer stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from greenroom.core.errors import UnknownNameError
from greenroom.core.records import Changes, Definitions, HistoryRecord, Key, Records, differences

HISTORY = "history"
KEPT = 200  # entries
CODE_KEPT = 20  # entries whose code is kept


class Author(NamedTuple):
    """The user who asks for a change, and the request."""

    user: str = ""
    address: str = ""
    request_id: str = ""


class History:
    """The entries that are kept, oldest first."""

    def __init__(
        self, saved: Mapping[str, HistoryRecord], changes: Changes, lost: Iterable[Key] = ()
    ) -> None:
        # The names have leading zeros: sorted by name, the entries are sorted by id.
        self._entries = Records(HISTORY, dict(sorted(saved.items())), changes)
        entries = list(self)
        self._by_request = {entry.request_id: entry for entry in entries if entry.request_id}
        # Of an entry that is lost, too: a client may know its id, so no other change gets it.
        names = [*self._entries, *(name for kind, name in lost if kind == HISTORY)]
        self._last_id = max(map(int, names), default=0)

    def __iter__(self) -> Iterator[HistoryRecord]:
        return iter(self._entries.values())

    @property
    def last_id(self) -> int:
        """The id of the last change; 0 before the first."""
        return self._last_id

    def answered(self, request_id: str) -> HistoryRecord | None:
        """Return the entry of a request that was carried out, so that a repeat changes nothing."""
        return self._by_request.get(request_id)

    def get(self, entry_id: int | None) -> HistoryRecord:
        """Return an entry, by default the newest; UnknownNameError saying which there are."""
        if not self._last_id:
            raise UnknownNameError("nothing has been changed yet, so nothing can be undone")
        if entry_id is None:
            entry_id = self._last_id
        entry = self._entries.get(_name(entry_id))
        if entry is None:
            ids = [each.id for each in self]
            kept = f"kept are {ids[0]} to {ids[-1]}" if ids else "none is kept"
            raise UnknownNameError(
                f"no change has the id {entry_id} (any more), or it is lost from the store; {kept}"
            )
        return entry

    def after(self, entry: HistoryRecord, key: Key) -> HistoryRecord | None:
        """Return the last entry after this one that changed ``key`` too."""
        later = [each for each in self if each.id > entry.id and key in each.after]
        return later[-1] if later else None

    def add(
        self,
        author: Author,
        what: str,
        answer: Any,
        before: Definitions,
        after: Definitions,
        wall_now: float,
    ) -> HistoryRecord:
        """Add an entry, and drop the oldest above :data:`KEPT`; return it."""
        self._last_id += 1
        entry = HistoryRecord(
            id=self._last_id,
            at=wall_now,
            user=author.user,
            address=author.address,
            what=what,
            request_id=author.request_id,
            answer=answer,
            before=before,
            after=after,
        )
        self._entries[_name(entry.id)] = entry
        if entry.request_id:
            self._by_request[entry.request_id] = entry
        while len(self._entries) > KEPT:
            oldest = self._entries.pop(next(iter(self._entries)))
            self._by_request.pop(oldest.request_id, None)
        return entry


def _name(entry_id: int) -> str:
    return f"{entry_id:010d}"


def described(entry: HistoryRecord) -> dict[str, Any]:
    """Return an entry as plain values, with what differs."""
    return {
        "id": entry.id,
        "at": entry.at,
        "user": entry.user,
        "address": entry.address,
        "what": entry.what,
        "changes": described_changes(entry.before, entry.after),
    }


def described_changes(before: Definitions, after: Definitions) -> list[dict[str, Any]]:
    """Return what becomes of each thing: added, removed or changed, and which fields."""
    changes = []
    for key in after:
        old, new = before[key], after[key]
        if old == new:
            continue
        does = "changed" if old and new else "added" if new else "removed"
        fields = differences(old, new)
        changes.append({"kind": key[0], "name": key[1], "change": does, "fields": fields})
    return changes
