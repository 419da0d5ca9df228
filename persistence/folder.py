"""Where a store keeps what: the names inside one namespace folder.

format    text: the version of everything below; written last, so its presence means complete
lock      flock of the one writer, and its pid
change    locked, by fcntl, around each look at the epoch and the change after it
epoch     number and token of the writer who opened last, and the id of the store
lease     who leads, where several hosts share the folder; renewed all the time
journal/  the changes made lately, one file each, by number
head      the number of the last change that copies/ has
values/   one file per key, without the changes in the journal
copies/   the same with them
corrupt/  what could not be repaired
*.copy    the same as format and epoch
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from greenroom.persistence.disk import Disk
from greenroom.persistence.encoding import FORMAT_VERSION, check_version, file_name
from greenroom.persistence.errors import CorruptValueError

_FORMAT_TITLE = "greenroom store format"


def copy_of(path: Path) -> Path:
    """Return where the copy of a file is that is no key's."""
    return path.with_name(f"{path.name}.copy")


class Folder:
    """The paths of one namespace, and what is done to the folder as a whole."""

    def __init__(self, path: Path, namespace: str, disk: Disk) -> None:
        self.root = path / file_name(namespace)
        self.format = self.root / "format"
        self.lock = self.root / "lock"
        self.change = self.root / "change"
        self.epoch = self.root / "epoch"
        self.lease = self.root / "lease"
        self.redo = self.root / "redo"  # of format 1: a change to carry out
        self.head = self.root / "head"
        self.journal = self.root / "journal"
        self.copies = self.root / "copies"
        self.values = self.root / "values"
        self.corrupt = self.root / "corrupt"
        self.folders = (self.values, self.copies, self.journal, self.corrupt)
        self._disk = disk

    def value(self, key: str) -> Path:
        """Return the path of the file that holds ``key``."""
        return self.values / file_name(key)

    def copy(self, key: str) -> Path:
        """Return the path of the other file that holds ``key``."""
        return self.copies / file_name(key)

    def entry(self, number: int) -> Path:
        """Return the path of a change in the journal."""
        return self.journal / f"{number:012d}"

    def make(self) -> None:
        """Make the folders that are missing; claiming then fsyncs the root, and so their names."""
        self._make_ancestors(self.root.parent)
        for folder in (self.root, *self.folders):
            with suppress(FileExistsError):
                self._disk.mkdir(folder)
        # Also where nothing was missing: a writer may have died between mkdir and fsync.
        self._disk.fsync_dir(self.root.parent)

    def check_format(self) -> int:
        """Return the version of the store, 0 where it is not complete.

        Raises NewerFormatError, or CorruptValueError where neither copy names a version.
        """
        texts = []
        for path in (self.format, copy_of(self.format)):
            try:
                text = self._disk.read(path).decode(errors="replace").strip()
            except FileNotFoundError:
                continue
            title, _, version = text.rpartition(" ")
            if title == _FORMAT_TITLE and version.isdecimal():
                check_version(int(version), path)
                return int(version)
            texts.append(text)
        if texts:
            raise CorruptValueError(
                f"{self.format} holds {texts[0]!r}, expected '{_FORMAT_TITLE} {FORMAT_VERSION}'. "
                "Check that this is a store's folder, then restore that line or remove the folder"
            )
        return 0

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
