"""The history: each acknowledged change once, as it was; and an undo restores what was before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenroom.actors.messages import admin as am
from greenroom.core import operations as ops
from greenroom.core.lifecycle import releases
from greenroom.core.records import BACKEND, backend_definition

if TYPE_CHECKING:
    from tests.simulation.checks import Checks

KINDS = ("backend", "endpoint")


class HistoryChecks:
    """Follows the history from save to save."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._last_id = 0
        self._by_request: dict[str, Any] = {}

    def saved(self, entries: list[Any], before: dict[tuple[str, str], Any]) -> None:
        """Look at the entries of a save, in their order, and at what it found on disk."""
        expect = self._checks.expect
        now = {key: _definition(key, record) for key, record in before.items()}
        for entry in entries:
            expect(entry.id == self._last_id + 1, f"{entry} comes after {self._last_id}")
            self._last_id = entry.id
            if entry.request_id:
                again = self._by_request.setdefault(entry.request_id, entry)
                expect(again is entry, f"{entry.request_id} is in the history again: {entry}")
            for key, definition in entry.before.items():
                if key in now:
                    message = f"{entry} found {key} as {definition}, and it was {now[key]}"
                    expect(definition in (now[key], _gone_back(key, before[key])), message)
                now[key] = entry.after[key]
        for key in {key for entry in entries for key in entry.after if key in before}:
            found = self._now(key)
            expect(found == now[key], f"{key} is {found}, and the history says {now[key]}")

    def undone(self, request: ops.UndoChange, entry: Any) -> None:
        """A change was undone: each thing that differs is as it was before."""
        asked = self._checks.on_disk.get(("history", f"{request.change_id:010d}"))
        self._checks.expect(asked is not None, f"{request} undid what is not in the history")
        for key, wanted in asked.before.items():
            found = entry.after[key] if key in entry.after else self._now(key)
            message = f"{request} made {key} {found}, and it was {wanted}"
            self._checks.expect(found == wanted, message)

    def _now(self, key: tuple[str, str]) -> Any:
        return _definition(key, self._checks.on_disk.get(key))

    def is_not_made(self, request: ops.Operation, request_id: str) -> None:
        """A client was answered that its change was not made."""
        entry = self._by_request.get(request_id)
        self._checks.expect(entry is None, f"{request} was not made, it is said, and is: {entry}")

    def answered(self, request: ops.Operation, reply: am.RequestReply, *, changed: bool) -> None:
        """A client has its answer: what it changed is an entry, and what was refused is none."""
        entry = self._by_request.get(reply.request_id)
        if reply.error_kind and reply.error_kind != "GreenroomError":
            self._checks.expect(entry is None, f"{request} was refused, and {entry} is there")
        elif changed:
            self._checks.expect(entry is not None, f"{request} changed what is not in the history")


def _definition(key: tuple[str, str], record: Any) -> Any:
    return backend_definition(record) if key[0] == BACKEND and record is not None else record


def _gone_back(key: tuple[str, str], record: Any) -> Any:
    """Return what a thing is once it has gone back by itself, which is saved with what follows."""
    earlier = releases.fallback(record) if key[0] == BACKEND and record is not None else None
    if earlier is None:
        return _definition(key, record)
    return backend_definition(releases.rolled_back(record, earlier, ""))
