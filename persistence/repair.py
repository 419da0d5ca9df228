"""Comparing the two copies of a store at its opening, and making each good by the other."""

from __future__ import annotations

from pathlib import Path

from greenroom.persistence.disk import Disk
from greenroom.persistence.encoding import FrameError, frame, key_of, unframe
from greenroom.persistence.folder import Folder
from greenroom.persistence.journal import Journal
from greenroom.persistence.writer import Writer

_NAMED = 10  # of many files, in the log


class Repair:
    """One look at all of a store. ``lost`` are the keys that neither copy has, and why."""

    def __init__(self, folder: Folder, disk: Disk, writer: Writer, journal: Journal) -> None:
        self.keys: set[str] = set()
        self.lost: dict[str, str] = {}
        self.made: list[str] = []  # what was repaired
        self.doubts: list[str] = []  # what may be missing, or older than it was
        self._folder = folder
        self._disk = disk
        self._writer = writer
        self._journal = journal

    def make(self) -> None:
        """Compare, and repair; raises OSError."""
        self.keys = self._find_keys()
        self.begins_anew = bool(self.doubts) or self._journal.is_to_begin_anew
        newest = self._journal.newest()
        for key in sorted(self.keys):
            value = newest.get(key)
            if value is None:
                self._compare(key)
                continue
            self._have(self._folder.copy(key), value)
            if self.begins_anew:
                self._have(self._folder.value(key), value)
        for key in self._superfluous_keys():
            self._writer.remove(self._folder.copy(key))
            if self.begins_anew or key not in newest:
                self._writer.remove(self._folder.value(key))
        if self._journal.has_lost_head and self.made:
            # The last entry may be gone with the head: nothing else would tell.
            self.doubts.append("the last change may be missing")
        if self.begins_anew or self.made:
            for folder in (self._folder.values, self._folder.copies):
                self._writer.sync(folder)

    def told(self) -> str:
        """Return what was repaired, for the log."""
        rest = len(self.made) - _NAMED
        return "; ".join(self.made[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")

    # --- Which keys there are -------------------------------------------------------------------

    def _find_keys(self) -> set[str]:
        journal = self._journal
        self._valued, self._copied = keys_in(self._disk, self._folder)
        newest = journal.newest()
        base = self._copied if journal.trusts_copies else self._copied | self._valued
        keys = {key for key in base | newest.keys() if newest.get(key, b"") is not None}
        if journal.trusts_copies:
            keys |= self._kept_though_not_copied(set(newest), keys)
        if journal.keys is not None and len(keys) < journal.keys:
            self.doubts.append(
                f"{journal.keys - len(keys)} of {journal.keys} records are missing without a trace"
            )
        return keys

    def _kept_though_not_copied(self, named: set[str], keys: set[str]) -> set[str]:
        """Return which of the keys without a copy are not deleted, as far as the number tells."""
        candidates = self._valued - self._copied - named
        if not candidates:
            return candidates
        if self._journal.keys is None:
            self.doubts.append(
                f"of {_named(candidates)} it is not known whether they were deleted lately"
            )
            return candidates
        missing = self._journal.keys - len(keys)
        if 0 < missing < len(candidates):
            self.doubts.append(f"{missing} of {_named(candidates)} were not deleted")
            return set()
        return candidates if missing > 0 else set()

    def _superfluous_keys(self) -> list[str]:
        newest = self._journal.newest()
        deleted = {key for key, value in newest.items() if value is None}
        return sorted(((self._valued | self._copied) & deleted) | (self._valued - self.keys))

    # --- What they hold -------------------------------------------------------------------------

    def _compare(self, key: str) -> None:
        first, second = self._folder.value(key), self._folder.copy(key)
        if self._journal.trusts_copies:
            first, second = second, first
        payload, problem = self._look(first)
        if payload is not None:
            self._have(second, payload)
            return
        payload, other_problem = self._look(second)
        if payload is None:
            self.lost[key] = f"{first} {problem}, {second} {other_problem}"
            return
        if self._journal.trusts_copies and key in self._copied:
            self.doubts.append(f"{key} may be older than it was")
        self._have(first, payload)

    def _look(self, path: Path) -> tuple[bytes | None, str]:
        """Return the payload, or None and what is the matter."""
        try:
            return unframe(self._disk.read(path), path), ""
        except FileNotFoundError:
            return None, "is missing"
        except (FrameError, OSError) as error:
            return None, f"is damaged: {error}"

    def _have(self, path: Path, payload: bytes) -> None:
        """Write a file where it does not hold this."""
        content = frame(payload)
        try:
            if self._disk.read(path) == content:
                return
        except OSError:
            pass  # missing, or not to be read: written anew
        _, problem = self._look(path)
        self.made.append(f"{path.parent.name}/{path.name} {problem or 'was not the newest'}")
        self._writer.write(path, content, durable=path.parent == self._folder.values)


def _named(keys: set[str]) -> str:
    rest = len(keys) - _NAMED
    return ", ".join(sorted(keys)[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def keys_in(disk: Disk, folder: Folder) -> tuple[set[str], set[str]]:
    """Return the keys that values and copies have files of."""
    found = []
    for each in (folder.values, folder.copies):
        try:
            names = disk.names(each)
        except FileNotFoundError:  # of an older version, for a reader
            names = []
        found.append({key for key in map(key_of, names) if key is not None})
    return found[0], found[1]
