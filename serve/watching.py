"""Noticing that source files changed, for ``greenroom run --reload``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

INTERVAL_S = 0.5
SETTLE_S = 0.2
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}


class Watcher:
    """Watches the ``.py`` files under a folder, by polling: it works on every file system.

    ``wait(seconds)`` waits and says True when watching is over.
    """

    def __init__(self, folder: Path, wait: Callable[[float], bool]) -> None:
        self._folder = folder
        self._wait = wait

    def changes(self) -> Iterator[None]:
        """Return once for each change, after the files have been still for a moment."""
        seen = self._scan()
        while not self._wait(INTERVAL_S):
            now = self._scan()
            if now == seen:
                continue
            # An editor or a checkout writes several files, or one file in several steps.
            while not self._wait(SETTLE_S) and (newer := self._scan()) != now:
                now = newer
            seen = now
            yield

    def _scan(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [f for f in folders if f not in _SKIPPED and not f.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)  # ten times as fast as Path
                    try:
                        stat = os.stat(path)
                    except FileNotFoundError:
                        continue  # editors replace files; the next scan sees the new one
                    found[path] = (stat.st_mtime_ns, stat.st_size)
        return found
