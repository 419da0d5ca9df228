"""Reads a store of format 1, which is converted when it is opened: a file per key, and a journal.

    journal/  the changes made lately, one file each, by number
    head      the number of the last change that copies/ has, and how many keys there are since
    values/   one file per key, without the changes in the journal
    copies/   the same with them
    corrupt/  notes of what could not be repaired

The values with the journal over them, and the copies alone, are the same state twice. The newest
change names the first that must be in the journal. Where one is missing up to the head, the copies
are older or newer than nothing else, and count.
"""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import NamedTuple, Never

from greenroom.persistence.layout import Disk, FrameError, key_of, unframe


class _Change(NamedTuple):
    number: int
    since: int  # the first change that is in the journal with it
    keys: int  # that there are after it
    puts: dict[str, bytes]
    deletes: tuple[str, ...]


def read_format_1(root: Path, disk: Disk) -> tuple[dict[str, bytes], dict[str, str], list[str]]:
    """Return the values, the keys that are damaged twice and why, and what else may be missing.

    Raises OSError.
    """
    journal = _payloads(disk, root / "journal")
    changes = {c.number: c for each in journal.items() if (c := _change_of(*each)) is not None}
    done, keys_then = _read_head(disk, root)
    last = max((*(int(name) for name in journal if name.isdecimal()), done))
    first = changes[max(changes)].since if changes else last
    missing = [n for n in range(max(first, 1), (done or last) + 1) if n not in changes]
    used = [changes[n] for n in sorted(changes) if n >= (max(missing) + 1 if missing else first)]
    newest: dict[str, bytes | None] = {}
    for change in used:
        newest |= {**change.puts, **dict.fromkeys(change.deletes)}

    copies, own = _by_key(disk, root / "copies"), _by_key(disk, root / "values")
    files = [copies, own] if missing else [own, copies]
    keys = {*copies, *(() if missing else own), *newest}
    values: dict[str, bytes] = {}
    lost: dict[str, str] = {}
    for key in keys:
        found = [newest[key]] if key in newest else [each.get(key) for each in files]
        value = next((each for each in found if each is not None), None)
        if value is not None:
            values[key] = value
        elif key not in newest:
            lost[key] = "both of its files in format 1 were damaged or missing"
    expected = used[-1].keys if used else keys_then if done == last else 0
    short = expected - len(values) - len(lost)
    doubts = [f"{short} of {expected} records are missing without a trace"] if short > 0 else []
    notes = _names(disk, root / "corrupt")
    doubts += [disk.read(root / "corrupt" / name).decode(errors="replace") for name in notes]
    return values, lost, doubts


def remove_format_1(root: Path) -> None:
    """Remove its files, once a log has what was in them."""
    for folder in ("journal", "values", "copies", "corrupt"):
        shutil.rmtree(root / folder, ignore_errors=True)
    (root / "head").unlink(missing_ok=True)


def _names(disk: Disk, folder: Path) -> list[str]:
    try:
        return sorted(name for name in disk.names(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def _payloads(disk: Disk, folder: Path) -> dict[str, bytes | None]:
    """Return what the files hold by their names, None for a damaged one."""
    found: dict[str, bytes | None] = {}
    for name in _names(disk, folder):
        try:
            found[name] = unframe(disk.read(folder / name))
        except (FrameError, FileNotFoundError):
            found[name] = None
    return found


def _by_key(disk: Disk, folder: Path) -> dict[str, bytes | None]:
    files = _payloads(disk, folder).items()
    return {key: payload for name, payload in files if (key := key_of(name)) is not None}


def _read_head(disk: Disk, root: Path) -> tuple[int, int]:
    """Return the number of the last change in copies/, and the keys since; 0 if it is damaged."""
    try:
        number, keys = unframe(disk.read(root / "head")).split()
    except (FrameError, FileNotFoundError):
        return 0, 0
    return int(number), int(keys)


def _change_of(name: str, payload: bytes | None) -> _Change | None:
    if payload is None or not name.isdecimal():
        return None
    try:
        change = _Change(*_PlainUnpickler(io.BytesIO(payload)).load())
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError):
        return None
    return change if change.number == int(name) else None


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, text, bytes, tuples and dicts."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
