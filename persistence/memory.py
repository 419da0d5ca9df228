"""A store in memory with the contract of the one on disk: for what was read, and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from greenroom.persistence.kv import StoreClosedError, check_found, check_key, checked


class MemoryStore:
    """A KVStore that lasts as long as this object; "durable" means until then."""

    def __init__(
        self, values: Mapping[str, bytes] | None = None, lost: Mapping[str, str] | None = None
    ) -> None:
        self._values = dict(values or {})
        self._closed = False
        self.lost = lost or {}  # where it was read

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore."""
        check_key(key)
        self._check_open()
        check_found(self, key)
        return self._values.get(key)

    def load(self, prefix: str = "") -> dict[str, bytes]:
        """Return the values whose keys start with ``prefix``, sorted; see KVStore."""
        self._check_open()
        return {key: self._values[key] for key in sorted(self._values) if key.startswith(prefix)}

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing; see KVStore."""
        puts, deletes = checked(puts, deletes)
        self._check_open()
        self._values.update(puts)
        for key in deletes:
            self._values.pop(key, None)

    def discard(self, key: str) -> None:
        """Delete a key; see KVStore."""
        self.apply({}, [key])

    def close(self) -> None:
        """Refuse every later call."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this in-memory store was closed; make a new one")
