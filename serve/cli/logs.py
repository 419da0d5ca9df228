"""Reading the log files of a host, as they stand or as they grow."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_CHUNK = 64 * 1024
_POLL_S = 0.2


class Line(NamedTuple):
    """One line of one log."""

    log: str
    text: str


class Logs:
    """The logs in a folder that a pattern and a name pick; files that appear later join in.

    ``name`` picks the logs whose name contains it, whatever characters separate its words: that of
    an application, a deployment, a replica, or ``controller``.
    """

    def __init__(self, folder: Path, pattern: str = "*.log", name: str | None = None) -> None:
        self._folder = folder
        self._pattern = pattern
        self._name = name
        self._read: dict[Path, int] = {}  # bytes that were read of each
        self._rests: dict[Path, bytes] = {}  # what follows the last newline

    def names(self) -> list[str]:
        """Return the names of the logs there are."""
        return [path.stem for path in self._paths()]

    def skip(self) -> None:
        """Go to the end: only what is written from now on is read."""
        for path in self._paths():
            self._read[path] = path.stat().st_size

    def tail(self, count: int) -> list[Line]:
        """Return the last lines of each log, and go to the end."""
        lines: list[Line] = []
        for path in self._paths():
            lines += deque(self._new_lines(path), maxlen=count)
        return lines

    def read(self) -> Iterator[Line]:
        """Return the lines that were completed since the last call."""
        for path in self._paths():
            yield from self._new_lines(path)

    def follow(self, wait: Callable[[float], bool]) -> Iterator[Line]:
        """Return lines as they are written, until ``wait(seconds)`` says True."""
        while True:
            yield from self.read()
            if wait(_POLL_S):
                yield from self.read()
                return

    def _paths(self) -> list[Path]:
        wanted = _words(self._name or "")
        return [p for p in sorted(self._folder.glob(self._pattern)) if wanted in _words(p.stem)]

    def _new_lines(self, path: Path) -> Iterator[Line]:
        try:
            with path.open("rb") as file:
                position = self._read.get(path, 0)
                if file.seek(0, os.SEEK_END) < position:  # truncated
                    position, self._rests[path] = 0, b""
                file.seek(position)
                while chunk := file.read(_CHUNK):
                    self._read[path] = file.tell()
                    yield from self._split(path, chunk)
        except FileNotFoundError:  # deleted between the listing and now
            self._read.pop(path, None)

    def _split(self, path: Path, chunk: bytes) -> Iterator[Line]:
        *whole, rest = (self._rests.get(path, b"") + chunk).split(b"\n")
        self._rests[path] = rest
        for line in whole:
            yield Line(path.stem, line.decode("utf-8", "replace"))


def _words(name: str) -> str:
    return re.sub(r"[^0-9a-z]+", "-", name.lower())
