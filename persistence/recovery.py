"""Which of a store's two copies to trust, and how each is repaired from the other.

Theory of operation. Every value is on disk twice: in ``values/``, durable, and in ``copies/``,
written at once and never synced. The latest changes are in the journal, one durable file each, for
``values/`` follow later. So the state can be read in two ways that have no file in common: the
values with the journal over them, and the copies alone. A file that is damaged or missing belongs
to one way only, and is made again from the other.

Whether the journal is whole can be told: its newest entry names the first that must be there, and
the head, a file of its own, names the last change whose copies are written. Where an entry up to
the head is missing or damaged, the copies have its values. An entry after the head was never
acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from greenroom.persistence.layout import (
    Disk,
    Entry,
    Folder,
    FrameError,
    decode_entry,
    decode_head,
    frame,
    key_of,
    unframe,
)
from greenroom.persistence.writer import Writer

_LOOKS = 20  # of a reader beside a writer that is busy


class Head(NamedTuple):
    """The last change whose copies are written, and how many keys there are since."""

    number: int
    keys: int


@dataclass
class Journal:
    """What the journal says. ``entries`` are to be put over the base, in their order."""

    entries: list[Entry] = field(default_factory=list)
    trusts_copies: bool = False  # the base: else values
    last: int = 0  # the highest number that was ever given
    keys: int | None = None  # how many there must be; None where that is not known
    damaged: dict[int, str] = field(default_factory=dict)  # entries, and what is wrong
    needed: list[int] = field(default_factory=list)  # entries that are damaged or missing
    is_headless: bool = False  # the head is damaged, missing, or behind
    has_lost_head: bool = False  # it is not even there, as no power cut leaves it
    superfluous: list[int] = field(default_factory=list)  # carried out everywhere

    @property
    def is_to_begin_anew(self) -> bool:
        """Whether a part of it is missing, or there is none yet."""
        return self.trusts_copies or not self.entries

    def newest(self) -> Mapping[str, bytes | None]:
        """Return the newest value of each key that it names, None where that is deleted."""
        found: dict[str, bytes | None] = {}
        for entry in self.entries:
            found.update(entry.batch.puts)
            found.update(dict.fromkeys(entry.batch.deletes))
        return found


def read_journal(folder: Folder, disk: Disk) -> Journal:
    """Return the journal; raises OSError and OtherFormatError.

    A writer may be at work meanwhile: what it has just removed is not missing, so a journal that is
    not whole is read again until it stays as it is.
    """
    before: tuple[Head | None, list[int]] | None = None
    for _ in range(_LOOKS):
        head, is_there = _read_head(folder, disk)
        numbers = _numbers(folder, disk)
        journal = _judged(head, *_read_entries(folder, disk, numbers))
        journal.has_lost_head = not is_there and bool(journal.entries)
        if not journal.needed or before == (head, numbers):
            break
        before = head, numbers
    return journal


def _numbers(folder: Folder, disk: Disk) -> list[int]:
    try:
        names = disk.names(folder.journal)
    except FileNotFoundError:
        return []  # removed
    return sorted(int(name) for name in names if name.isdecimal())


def _read_head(folder: Folder, disk: Disk) -> tuple[Head | None, bool]:
    """Return the head, None where it is damaged, and whether there is a file."""
    try:
        return Head(*decode_head(unframe(disk.read(folder.head), folder.head))), True
    except FileNotFoundError:
        return None, False
    except FrameError:
        return None, True


def _read_entries(
    folder: Folder, disk: Disk, numbers: list[int]
) -> tuple[dict[int, Entry], dict[int, str]]:
    entries: dict[int, Entry] = {}
    damaged: dict[int, str] = {}
    for number in numbers:
        path = folder.entry(number)
        try:
            entry = decode_entry(unframe(disk.read(path), path))
        except FileNotFoundError:
            continue
        except (FrameError, OSError) as error:
            damaged[number] = str(error)
            continue
        if entry.number == number:
            entries[number] = entry
        else:
            damaged[number] = f"it is change {entry.number}"
    return entries, damaged


def _judged(head: Head | None, entries: dict[int, Entry], damaged: dict[int, str]) -> Journal:
    last = max([*entries, *damaged, head.number if head else 0])
    first = entries[max(entries)].since if entries else last
    acknowledged = head.number if head else last
    missing = [n for n in range(max(first, 1), last + 1) if n not in entries]
    needed = [number for number in missing if number <= acknowledged]
    trusted_from = max(needed) + 1 if needed else first
    used = [entries[number] for number in sorted(entries) if number >= trusted_from]
    keys = used[-1].keys if used else head.keys if head and head.number == last else None
    return Journal(
        entries=used,
        trusts_copies=bool(needed),
        last=last,
        keys=keys,
        damaged=damaged,
        needed=needed,
        is_headless=head is None or head.number != last,
        superfluous=[n for n in (*entries, *damaged) if n < trusted_from or n in damaged],
    )


_NAMED = 10  # of many files, in the log


class Repair:
    """One comparison of all of a store; ``lost`` are the keys that neither copy has, and why."""

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
            self._ensure(self._folder.copy(key), value)
            if self.begins_anew:
                self._ensure(self._folder.value(key), value)
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
            self._ensure(second, payload)
            return
        payload, other_problem = self._look(second)
        if payload is None:
            self.lost[key] = f"{first} {problem}, {second} {other_problem}"
            return
        if self._journal.trusts_copies and key in self._copied:
            self.doubts.append(f"{key} may be older than it was")
        self._ensure(first, payload)

    def _look(self, path: Path) -> tuple[bytes | None, str]:
        """Return the payload, or None and what is wrong."""
        try:
            return unframe(self._disk.read(path), path), ""
        except FileNotFoundError:
            return None, "is missing"
        except (FrameError, OSError) as error:
            return None, f"is damaged: {error}"

    def _ensure(self, path: Path, payload: bytes) -> None:
        """Write a file, unless it holds this already."""
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
        except FileNotFoundError:  # removed, and a reader makes nothing
            names = []
        found.append({key for key in map(key_of, names) if key is not None})
    return found[0], found[1]
