"""Disks that die, fail, or report each step, in place of the real one."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from greenroom.persistence.filesystem import FileLocation, FileStore
from greenroom.persistence.kv import KVStore, MemoryStore
from greenroom.persistence.layout import Disk
from greenroom.persistence.log import BOTH, Place, read_log

LOGS = {  # settings of the store, by when it begins a log
    "one log": {},
    "a log for each change": {"SPARE": -1000},
    "an entry for each value": {"SPARE": -1000, "TOGETHER": 0},
}


class Death(BaseException):
    """The process is dead from here on; nothing may catch it."""


class UnsyncedDisk(Disk):
    """A real disk without the waiting."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_dir(self, folder: Path) -> None:
        pass


class SteppingDisk(UnsyncedDisk):
    """Calls ``step(number)`` before each call that changes something; reads do not count."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, number: int) -> None:
        raise NotImplementedError

    def _take_step(self) -> None:
        self.steps += 1
        self.step(self.steps - 1)

    def create(self, path: Path) -> int:
        self._take_step()
        return super().create(path)

    def write(self, fd: int, chunk: memoryview) -> int:
        # In two parts, so that a step falls between them: a torn write.
        self._take_step()
        return super().write(fd, chunk[: max(16, len(chunk) // 2)])

    def fsync(self, fd: int) -> None:
        self._take_step()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._take_step()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._take_step()
        super().unlink(path)

    def mkdir(self, folder: Path) -> None:
        self._take_step()
        super().mkdir(folder)

    def fsync_dir(self, folder: Path) -> None:
        self._take_step()
        super().fsync_dir(folder)


class FullDisk(SteppingDisk):
    """Fails one step with ENOSPC once armed, and works before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at: int | None = None

    def step(self, number: int) -> None:
        if number == self.fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")


class DyingDisk(SteppingDisk):
    """Raises Death before step ``die_at`` and ever after, and keeps books on what is durable.

    ``cut_power`` then leaves of ``root`` what a power cut would: file contents as last fsynced, or
    with zeros for the rest, and in the folders that lost their last changes the names as last
    fsynced. Setting ``die_at`` to infinity starts a new process on a system that has been up all
    along.
    """

    def __init__(self, root: Path, die_at: float) -> None:
        super().__init__()
        self.die_at = die_at
        self._root = root
        self._names: dict[Path, dict[str, int]] = {}
        self._contents: dict[int, bytes] = {}
        self._open: dict[int, int] = {}
        self._files = 0
        for folder, folders, files in os.walk(root):
            entries = self._names[Path(folder)] = dict.fromkeys(folders, 0)
            for name in files:
                entries[name] = self._new_file()
                self._contents[entries[name]] = (Path(folder) / name).read_bytes()
        self._durable_names = {folder: dict(names) for folder, names in self._names.items()}

    def step(self, number: int) -> None:
        if number >= self.die_at:
            raise Death

    def _new_file(self) -> int:
        self._files += 1
        return self._files

    def create(self, path: Path) -> int:
        fd = super().create(path)
        file = self._names[path.parent].setdefault(path.name, self._new_file())
        self._open[fd] = file
        return fd

    def close(self, fd: int) -> None:
        del self._open[fd]
        super().close(fd)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._contents[self._open[fd]] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._names[new.parent][new.name] = self._names[old.parent].pop(old.name)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        del self._names[path.parent][path.name]

    def mkdir(self, folder: Path) -> None:
        super().mkdir(folder)
        self._names[folder.parent][folder.name] = 0
        self._names[folder] = {}
        self._durable_names[folder] = {}

    def fsync_dir(self, folder: Path) -> None:
        super().fsync_dir(folder)
        self._durable_names[folder] = dict(self._names[folder])

    def cut_power(self, loses: Callable[[Path], bool], *, leaves_zeros: bool = False) -> None:
        sizes = {
            file: (folder / name).stat().st_size
            for folder, names in self._names.items()
            for name, file in names.items()
            if file and leaves_zeros
        }
        shutil.rmtree(self._root)
        self._leave(self._root, loses, sizes)

    def _leave(self, folder: Path, loses: Callable[[Path], bool], sizes: dict[int, int]) -> None:
        folder.mkdir()
        names = (self._durable_names if loses(folder) else self._names)[folder]
        for name, file in names.items():
            if file:
                content = self._contents.get(file, b"")
                (folder / name).write_bytes(content.ljust(sizes.get(file, 0), b"\0"))
            else:
                self._leave(folder / name, loses, sizes)


def copy_with_damage(
    store: Path, to: Path, names: Iterable[Path | str], damage: Callable[[Path], None]
) -> None:
    """Copy a store that is closed, and damage some of its files there.

    The other files are the same ones, for a store changes no file that it has not made itself.
    """
    shutil.copytree(store, to, copy_function=os.link)
    for name in names:
        (to / name).unlink()
        shutil.copyfile(store / name, to / name)
        damage(to / name)


def log_of(root: Path) -> Path:
    """Return the one log of a store that is closed."""
    (log,) = (path for path in root.glob("log-*") if not path.name.endswith(".copy"))
    return log


def places_in(root: Path) -> dict[str, Place]:
    """Return where the values of a closed store are, by their keys."""
    return read_log(Disk(), root, log_of(root).name).values


def damage_value(root: Path, place: Place, suffixes: Iterable[str] = BOTH) -> None:
    """Flip a bit of a value, in the file and in its copy."""
    for suffix in suffixes:
        path = root / f"{place.file}{suffix}"
        content = bytearray(path.read_bytes())
        content[place.at + place.size // 2] ^= 0x10
        path.write_bytes(content)


def open_store(
    path: Path,
    namespace: str = "default",
    *,
    disk: Disk | None = None,
    **options: Any,
) -> FileStore:
    return FileLocation(path, namespace, disk=disk or UnsyncedDisk()).open(**options)


def read_store(path: Path, disk: Disk | None = None) -> MemoryStore:
    """Return what is saved, read by another process than the writer."""
    return FileLocation(path, disk=disk or UnsyncedDisk()).read()


def open_or_read(path: Path, *, read_only: bool) -> KVStore:
    """Open a store for writing, or read it."""
    return read_store(path) if read_only else open_store(path)


def state_of(store: KVStore) -> dict[str, bytes | None]:
    return store.load()


def files_under(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }
