"""What a step of the controller changed and has to save, at once, before anybody sees it."""

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
        """Have a record saved; the last one counts. None has it deleted."""
        if record is None:
            self.delete(kind, name)
            return
        self.deletes.discard((kind, name))
        self.puts[kind, name] = record

    def delete(self, kind: str, name: str) -> None:
        """Have a record deleted."""
        self.puts.pop((kind, name), None)
        self.deletes.add((kind, name))

    def concern_only(self, kind: str) -> bool:
        """Tell whether all records are of one kind."""
        return not self.code and {each for each, _ in (*self.puts, *self.deletes)} == {kind}

    def precede(self, later: Changes) -> Changes:
        """Return these changes with later ones made after them."""
        both = Changes(dict(self.puts), set(self.deletes), {**self.code, **later.code})
        for kind, name in later.deletes:
            both.delete(kind, name)
        for (kind, name), record in later.puts.items():
            both.put(kind, name, record)
        return both

    def put_code(self, digest: str, code: bytes) -> None:
        """Have code saved under its digest."""
        self.deletes.discard(("code", digest))
        self.code[digest] = code

    def delete_code(self, digest: str) -> None:
        """Have code deleted that no backend runs."""
        self.code.pop(digest, None)
        self.deletes.add(("code", digest))
