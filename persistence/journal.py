"""The changes that were made lately, a file each, and which of a store's two copies to trust.

Theory of operation. Every value is on disk twice: in ``values/``, durable, and in ``copies/``,
written at once and never synced. What was changed lately is in the journal, durable too, for
``values/`` follow later. So there are two ways to the same state, and no file is on both: values
with the journal over them, and the copies alone. A file that is damaged or missing is on one way
only, and is made again from the other.

What tells that a journal is whole: its newest entry names the first that must be there, and the
head, a file of its own, the last change whose copies are written. Where an entry up to the head is
missing or damaged, the copies have what it said; one after the head was never acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from greenroom.persistence.disk import Disk
from greenroom.persistence.encoding import (
    Entry,
    FrameError,
    decode_entry,
    decode_head,
    unframe,
)
from greenroom.persistence.folder import Folder

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
    is_headless: bool = False  # the head is damaged, or behind
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
    """Return the journal; raises OSError and NewerFormatError.

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
        return []  # of an older version, or removed
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
