"""The cluster's keys as files, which every process of a host reads again when they change.

Theory of operation. Beside the key there may be the next one, and the last one, while the key is
being replaced (core/key_rotation.py). A process proves that it holds the key, and takes peers that
hold any of these. It looks at the files whenever it dials, is dialed or beats: so a key is in use
on all of a host as soon as it is on its disk, and nobody has to be told. Each file is whole or not
there; a step of several files is made in such an order that no crash amid it leaves a host without
a key that the others take, and is made again after one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from greenroom.actors.transport.cluster_key import (
    ClusterKeyError,
    key_id,
    read_key,
    retire,
    write_key,
)
from greenroom.actors.transport.handshake import KEY_SIZE
from greenroom.core.key_rotation import KeyIds

logger = logging.getLogger(__name__)

# The keys of the moment: the first is what to prove, and all are what to take.
Keys: TypeAlias = Callable[[], Sequence[bytes]]
_Mark: TypeAlias = "tuple[int, int, int, int] | None"


class KeyFiles:
    """The keys in ``path`` and beside it; callable, for :data:`Keys`.

    ClusterKeyError when the key cannot be used. If that happens to files that change later, what
    was read last stays in use, and the reason is logged.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (
            path,
            path.with_name(path.name + ".next"),
            path.with_name(path.name + ".last"),
        )
        self._marks = self._look()
        self._slots = self._read()

    def __call__(self) -> Sequence[bytes]:
        """Return the key, then the others that are taken."""
        self._refresh()
        return [key for key in self._slots if key]

    def ids(self) -> KeyIds:
        """Return the names of the key, the next one and the last one."""
        self._refresh()
        current, following, last = (key and key_id(key) for key in self._slots)
        # Amid a step one key may be in two files.
        return KeyIds(
            str(current),
            "" if following == current else str(following or ""),
            "" if last == current else str(last or ""),
        )

    def get(self, name: str) -> bytes | None:
        """Return a key by its name; None when it is not here."""
        return next((key for key in self() if key_id(key) == name), None)

    def begin(self) -> None:
        """Make the next key; harmless while there is one."""
        if self.ids() == KeyIds(self.ids().current):
            write_key(self._paths[1], secrets.token_bytes(KEY_SIZE))

    def hold(self, wanted: KeyIds, *given: bytes) -> str:
        """Have the files hold these keys, taken from those here and ``given``.

        Return the name of one that is missing, "" when it is done. ClusterKeyError where a file
        cannot be written.
        """
        known = {key_id(key): key for key in (*self(), *given)}
        missing = [name for name in wanted if name and name not in known]
        if missing:
            return missing[0]
        before = self.ids()
        current, following, last = self._paths
        for path, name in (
            (last, wanted.last),
            (following, wanted.next),
            (current, wanted.current),
        ):
            if name:
                write_key(path, known[name])
        for name in before:
            if name and name not in wanted:
                retire(current, name)
        for path, name in ((following, wanted.next), (last, wanted.last)):
            if not name:
                path.unlink(missing_ok=True)
        return ""

    def _refresh(self) -> None:
        marks = self._look()
        if marks == self._marks:
            return
        self._marks = marks
        try:
            self._slots = self._read()
        except ClusterKeyError as error:
            logger.warning("%s; what it held before stays in use", error)

    def _look(self) -> list[_Mark]:
        return [_mark(path) for path in self._paths]

    def _read(self) -> list[bytes | None]:
        current, *others = self._paths
        return [read_key(current), *(read_key(path) if path.exists() else None for path in others)]


def _mark(path: Path) -> _Mark:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
    return None
