"""History: every acknowledged change, who made it, and what it takes to undo it.

An entry is saved together with the change itself. It holds the definitions before and after, so its
size is that of the change. The last :data:`KEPT` are kept, and the code that the last
:data:`CODE_KEPT` need.

An undo asks for the definitions before a change, as a new change with an entry of its own. It is
refused where that would not be the state before: where a later change touched the same things, or
where code is no longer stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from greenroom.core.cluster.changes import Changes
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle.endpoints import check_free, users_of
from greenroom.core.lifecycle.releases import digests_of
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    BackendDefinition,
    Definition,
    Definitions,
    EndpointRecord,
    HistoryRecord,
    Key,
    differences,
)

if TYPE_CHECKING:
    from greenroom.core.cluster.state import Cluster

KEPT = 200  # entries
CODE_KEPT = 20  # entries whose code is kept


class Author(NamedTuple):
    """Who asks for a change, and with which request."""

    user: str = ""
    address: str = ""
    request_id: str = ""


class History:
    """The entries that are kept, oldest first."""

    def __init__(self, records: Mapping[str, HistoryRecord]) -> None:
        entries = sorted(records.values(), key=lambda entry: entry.id)
        self._entries = {entry.id: entry for entry in entries}
        self._by_request = {entry.request_id: entry for entry in entries if entry.request_id}
        self._last_id = entries[-1].id if entries else 0

    def __iter__(self) -> Iterator[HistoryRecord]:
        return iter(self._entries.values())

    def answered(self, request_id: str) -> HistoryRecord | None:
        """Return the entry of a request that was carried out, so that a repeat changes nothing."""
        return self._by_request.get(request_id)

    def get(self, entry_id: int | None) -> HistoryRecord:
        """Return an entry, by default the newest; UnknownNameError saying which there are."""
        if not self._entries:
            raise UnknownNameError("nothing has been changed yet, so nothing can be undone")
        if entry_id is None:
            return self._entries[self._last_id]
        if entry_id not in self._entries:
            raise UnknownNameError(
                f"no change has the id {entry_id} (any more); kept are {next(iter(self._entries))} "
                f"to {self._last_id}"
            )
        return self._entries[entry_id]

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
        changes: Changes,
    ) -> None:
        """Add an entry, and drop the oldest above :data:`KEPT`."""
        self._last_id += 1
        entry = HistoryRecord(
            id=self._last_id,
            at=wall_now,
            user=author.user,
            address=author.address,
            what=what,
            request_id=author.request_id,
            answer=answer,
            before=dict(before),
            after=dict(after),
        )
        self._entries[entry.id] = entry
        if entry.request_id:
            self._by_request[entry.request_id] = entry
        changes.put("history", _name(entry), entry)
        while len(self._entries) > KEPT:
            oldest = self._entries.pop(next(iter(self._entries)))
            self._by_request.pop(oldest.request_id, None)
            changes.delete("history", _name(oldest))

    def digests(self) -> set[str]:
        """Return the names of the code that the newest entries need."""
        return {
            digest
            for entry in list(self._entries.values())[-CODE_KEPT:]
            for side in (entry.before, entry.after)
            for definition in side.values()
            if isinstance(definition, BackendDefinition)
            for digest in digests_of(definition)
        }


def _name(entry: HistoryRecord) -> str:
    return f"{entry.id:010d}"


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
    told = []
    for key in after:
        old, new = before[key], after[key]
        if old == new:
            continue
        does = "changed" if old and new else "added" if new else "removed"
        fields = differences(old, new)
        told.append({"kind": key[0], "name": key[1], "change": does, "fields": fields})
    return told


# --- Undo -----------------------------------------------------------------------------------------


def undone(cluster: Cluster, entry: HistoryRecord) -> dict[Key, Definition | None]:
    """Return what there should be without a change; ConflictError saying why that cannot be."""
    wanted = {}
    for key, before in entry.before.items():
        now = cluster.definition(key)
        if now == before:
            continue
        if now != entry.after[key]:
            raise ConflictError(_told_later(cluster, entry, key))
        wanted[key] = before
    if not wanted:
        raise ConflictError(
            f"change {entry.id} ({entry.what}) is undone already, or its update was rolled back: "
            "all is as it was before"
        )
    for (kind, name), definition in wanted.items():
        if kind == BACKEND:
            _check_backend(cluster, entry, name, definition, wanted)
        elif kind == ENDPOINT and isinstance(definition, EndpointRecord):
            _check_endpoint(cluster, entry, definition, wanted)
        elif kind not in {ENDPOINT, APPLICATION}:
            raise InvalidRequestError(f"change {entry.id} ({entry.what}): {kind} cannot be undone")
    return wanted


def _told_later(cluster: Cluster, entry: HistoryRecord, key: Key) -> str:
    told = f"change {entry.id} ({entry.what}) cannot be undone: "
    later = cluster.history.after(entry, key)
    if later is None:
        return told + f"{key[0]} {key[1]!r} is no longer as that change left it"
    return told + (
        f"change {later.id} ({later.what}) changed {key[0]} {key[1]!r} later; undo that first"
    )


def _check_backend(
    cluster: Cluster,
    entry: HistoryRecord,
    tag: str,
    definition: Definition | None,
    wanted: Definitions,
) -> None:
    told = f"change {entry.id} ({entry.what}) cannot be undone: "
    if isinstance(definition, BackendDefinition):
        if not all(cluster.code_use.is_stored(digest) for digest in digests_of(definition)):
            raise ConflictError(
                told + f"the code that backend {tag!r} ran is no longer stored, for only that of "
                f"the last {CODE_KEPT} changes is; deploy it from its source"
            )
        return
    users = users_of(_endpoints_then(cluster, wanted), tag)
    if users:
        uses = ", ".join(f"{use} of endpoint {name!r}" for name, use in users.items())
        raise ConflictError(told + f"backend {tag!r} has {uses}")


def _check_endpoint(
    cluster: Cluster, entry: HistoryRecord, endpoint: EndpointRecord, wanted: Definitions
) -> None:
    told = f"change {entry.id} ({entry.what}) cannot be undone: "
    try:
        check_free(_endpoints_then(cluster, wanted), endpoint.name, endpoint.route)
    except ConflictError as error:
        raise ConflictError(told + str(error)) from None
    for tag in (*endpoint.traffic, *endpoint.shadows):
        key = (BACKEND, tag)
        if (wanted[key] if key in wanted else cluster.definition(key)) is None:
            raise ConflictError(
                told + f"endpoint {endpoint.name!r} used backend {tag!r}, which is gone"
            )


def _endpoints_then(cluster: Cluster, wanted: Definitions) -> Iterator[EndpointRecord]:
    for name, endpoint in cluster.endpoints.items():
        if (ENDPOINT, name) not in wanted:
            yield endpoint
    for definition in wanted.values():
        if isinstance(definition, EndpointRecord):
            yield definition
