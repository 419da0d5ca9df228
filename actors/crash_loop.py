"""How long an actor that failed waits before its successor may begin.

Whoever needs an actor asks for its name, and gets a new one at once when the old one is gone. So it
is the one that failed that waits, deaf, before it goes. How often the role has failed in a row is
kept in a file, for each of these processes fails but once.
"""

from __future__ import annotations

import logging
from pathlib import Path

from greenroom.actors.state_dir import write_private
from greenroom.core.backoff import pause_s

logger = logging.getLogger(__name__)

STABLE_S = 30.0  # a process that lived this long did not fail for what it had begun with
FIRST_S, MOST_S = 0.1, 10.0
UNKNOWN_S = 1.0  # where the count cannot be kept


class CrashLoop:
    """The failures of one role on this host, one after the other."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self._path = run_dir / f"{role}.failures"

    def failed(self, lived_s: float) -> float:
        """Count the end of a process; return the seconds to wait: 0 for the first in a row."""
        count = 1 if lived_s > STABLE_S else self._count() + 1
        try:
            write_private(self._path, str(count))
        except OSError:
            logger.exception("%s cannot be written", self._path)
            return UNKNOWN_S
        return pause_s(count - 1, FIRST_S, MOST_S) if count > 1 else 0.0

    def _count(self) -> int:
        try:
            return int(self._path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0
