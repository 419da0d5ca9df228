"""The system calls that change a store: one method each, so that a test can die between any two."""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """The machine's file system. Every method blocks and raises OSError."""

    def read(self, path: Path) -> bytes:
        """Return the whole file."""
        # pathlib's read_bytes goes through a buffered reader and costs three times as much.
        fd = os.open(path, os.O_RDONLY)
        try:
            chunks = [os.read(fd, os.fstat(fd).st_size + 1)]
            while chunks[-1]:
                chunks.append(os.read(fd, 1 << 20))
        finally:
            os.close(fd)
        return b"".join(chunks)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, in no order."""
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """Open a file for writing, emptied, readable by its owner only; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(self, fd: int, chunk: memoryview) -> int:
        """Write some of ``chunk``; return how many bytes that was."""
        return os.write(fd, chunk)

    def fsync(self, fd: int) -> None:
        """Make a file's content durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its new name in one step, replacing what had it."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def mkdir(self, folder: Path) -> None:
        """Make a folder that only its owner may enter."""
        os.mkdir(folder, 0o700)

    def fsync_dir(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
