"""The changes of one step of the controller, which must be saved all at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Changes:
    """(kind, name) -> record, what to delete, and code by its digest."""

    puts: dict[tuple[str, str], Any] = field(default_factory=dict)
    deletes: set[tuple[str, str]] = field(default_factory=set)
    code: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes or self.code)

    @property
    def size(self) -> tuple[int, int, int]:
        """How many records, deletions and pieces of code there are."""
        return len(self.puts), len(self.deletes), len(self.code)

    def put(self, kind: str, name: str, record: Any) -> None:
        """Save a record; of several the last one. None deletes it."""
        if record is None:
            self.delete(kind, name)
            return
        self.deletes.discard((kind, name))
        self.puts[kind, name] = record

    def delete(self, kind: str, name: str) -> None:
        """Delete a record."""
        self.puts.pop((kind, name), None)
        self.deletes.add((kind, name))

    def put_code(self, digest: str, code: bytes) -> None:
        """Save code under its digest."""
        self.deletes.discard(("code", digest))
        self.code[digest] = code

    def delete_code(self, digest: str) -> None:
        """Delete code that no backend runs."""
        self.code.pop(digest, None)
        self.deletes.add(("code", digest))

    def take(self) -> Changes:
        """Return all of this as an object of its own; nothing is left here."""
        taken = Changes(self.puts, self.deletes, self.code)
        self.puts, self.deletes, self.code = {}, set(), {}
        return taken
