"""Where a store keeps what: the names inside one namespace folder.

format    text: the version of everything below; written last, so its presence means complete
lock      flock of the one writer, and its pid
change    locked, by fcntl, around each look at the epoch and the change after it
epoch     number and token of the writer who opened last
lease     who leads, where several hosts share the folder
redo      the batch being carried out; absent at rest
values/   one file per key
corrupt/  files set aside because they were not whole
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from greenroom.persistence.disk import Disk
from greenroom.persistence.encoding import FORMAT_VERSION, check_version, file_name
from greenroom.persistence.errors import CorruptValueError

_FORMAT_TITLE = "greenroom store format"


class Folder:
    """The paths of one namespace, and what is done to the folder as a whole."""

    def __init__(self, path: Path, namespace: str, disk: Disk) -> None:
        self.root = path / file_name(namespace)
        self.format = self.root / "format"
        self.lock = self.root / "lock"
        self.change = self.root / "change"
        self.epoch = self.root / "epoch"
        self.lease = self.root / "lease"
        self.redo = self.root / "redo"
        self.values = self.root / "values"
        self.corrupt = self.root / "corrupt"
        self._disk = disk

    def value(self, key: str) -> Path:
        """Return the path of the file that holds ``key``."""
        return self.values / file_name(key)

    def make(self) -> None:
        """Make the folders that are missing; claiming then fsyncs the root, and so their names."""
        self._make_ancestors(self.root.parent)
        for folder in (self.root, self.values, self.corrupt):
            with suppress(FileExistsError):
                self._disk.mkdir(folder)
        # Also where nothing was missing: a writer may have died between mkdir and fsync.
        self._disk.fsync_dir(self.root.parent)

    def check_format(self) -> bool:
        """Return whether the store is complete; raise NewerFormatError or CorruptValueError."""
        try:
            text = self._disk.read(self.format).decode(errors="replace").strip()
        except FileNotFoundError:
            return False
        title, _, version = text.rpartition(" ")
        if title != _FORMAT_TITLE or not version.isdecimal():
            raise CorruptValueError(
                f"{self.format} holds {text!r}, expected '{_FORMAT_TITLE} {FORMAT_VERSION}'. "
                "Check that this is a store's folder, then restore that line or remove the folder"
            )
        check_version(int(version), self.format)
        return True

    @staticmethod
    def format_text() -> bytes:
        """Return what the format file says."""
        return f"{_FORMAT_TITLE} {FORMAT_VERSION}\n".encode()

    def _make_ancestors(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_ancestors(path.parent)
        with suppress(FileExistsError):
            self._disk.mkdir(path)
        self._disk.fsync_dir(path.parent)
