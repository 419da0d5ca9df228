"""The logs of the systems that tests run, for the report of a test that fails."""

from __future__ import annotations

import contextlib
from pathlib import Path

MOST_BYTES = 8_000  # of each file: its end, where the cause mostly is
_folders: dict[Path, bool] = {}  # of logs, and whether what writes them still runs
_sizes: dict[Path, int] = {}  # of the files when the test began


def begin(folder: Path) -> None:
    """A system begins to write its logs there."""
    _folders[folder] = True


def end(folder: Path) -> None:
    """It has ended; the test that runs may yet fail."""
    _folders[folder] = False


def next_test() -> None:
    """Forget what ended in the test before, and what the others wrote so far."""
    for folder in [folder for folder, runs in _folders.items() if not runs]:
        del _folders[folder]
    _sizes.clear()
    for path in _files():
        with contextlib.suppress(FileNotFoundError):  # a system deletes logs of old replicas
            _sizes[path] = path.stat().st_size


def written() -> dict[str, str]:
    """Return what has been written during this test: path -> the end of it."""
    found = {}
    for path in _files():
        text = b""
        with contextlib.suppress(FileNotFoundError):
            text = path.read_bytes()[_sizes.get(path, 0) :]
        if text:
            found[str(path)] = text[-MOST_BYTES:].decode(errors="replace")
    return found


def _files() -> list[Path]:
    return [path for folder in _folders for path in sorted(folder.glob("*.log"))]
