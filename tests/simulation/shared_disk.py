"""The store of one host, or of leaders that share it: the real FileStore on simulated files.

A writer does one step after the other here, and may die, stand still or fail at each, also with its
change half made, or with the lock around its lease in its hands. Whoever's epoch file is there is
the one that may change the lease, and answer; what others append to their logs must be read by
nobody.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.persistence.filesystem import FileLocation, FileStore
from greenroom.persistence.kv import Claim, MemoryStore, NothingSavedError, StoreLockedError
from greenroom.persistence.layout import Disk, unframe
from greenroom.persistence.locations import NAMESPACE

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import SimProcess

FOLDER = Path("/shared/store")
LOCK_PATIENCE_S = 2.0
LOG_SIZES = {"SPARE": 4000, "TOGETHER": 1000}  # so that logs are begun all the time
ROT = 0.5  # the chance of a damaged file at an opening
OUT_OF_REACH_S = 0.3  # until an operation fails


class SharedDisk:
    """One file system, of one host or of those that share a store.

    ``trouble`` is the chance of a mishap in a step.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.trouble = 0.0
        self.slow_until = 0.0
        self.full_until = 0.0
        self.out_of_reach: set[int] = set()  # hosts that cannot reach it
        self.on_applied: Callable[[Mapping[str, bytes], list[str]], None] = lambda _p, _d: None
        self.files: dict[str, bytes] = {}
        self.locked_by: SimProcess | None = None  # the change lock
        self.claim: tuple[Any, bytes] = (None, b"")  # the last one, and whose
        self.alone: SimProcess | None = None  # who holds a lock for its life, and shares with none
        self.lies = 0.0  # the chance of a save that is lost, though the disk says otherwise
        self.checks = 0  # whether there is room
        self.rotten = 0  # the number of the damage, until an opening has repaired it
        self._damages = 0
        self.writers: dict[str, Any] = {}  # of logs
        self.read_by_others: set[str] = set()  # logs that a successor has read
        self.cut: set[str] = set()  # files behind whose rotten end nothing more can be read
        self.rot = random.Random(self.world.seed)  # of its own, so that it changes nothing else

    def open(self, *, after: int | None = None, lease: bytes | None = None) -> Store:
        """Stand in for FileLocation.open."""
        if after is None:  # no other host shares it
            if self.alone is not None and self.alone.alive:
                raise StoreLockedError("another controller has it")
            after, self.alone = self._location().read_claim().epoch, self.world.current
        self._damage()
        files, damage = Files(self), self.rotten
        store = FileLocation(FOLDER, NAMESPACE, disk=files).open(after=after, lease=lease)
        if self.rotten == damage:  # else it came in the midst of the opening, which may have passed
            self.rotten = 0
        return Store(store, files)

    def read(self, wanted: Callable[[str], object] = bool) -> MemoryStore:
        """Stand in for FileLocation.read."""
        self._damage()
        return self._location().read(wanted)

    def _location(self) -> FileLocation:
        return FileLocation(FOLDER, NAMESPACE, disk=Files(self))

    def _damage(self) -> None:
        """Have a file rot that was whole: one at a time, for each opening repairs what it finds.

        Not one whose copy is another: a writer who died may have left either as the only trace of a
        change or of its claim. Nor the lease, which has none: a leader that lives writes it anew.
        """
        if self.rotten or self.rot.random() > ROT:
            return
        sound = [name for name in sorted(self.files) if self._is_twice(name)]
        if sound:
            name = self.rot.choice(sound)
            self._damages += 1
            self.rotten = self._damages
            self.world.log("faults", f"{name} rots")
            if self.rot.random() < 0.3:
                del self.files[name]
            else:
                whole = self.files[name]
                cut = self.rot.randrange(len(whole) + 1)
                self.files[name] = whole[:cut] + bytes(self.rot.randrange(3))
                if self.files[name] != whole:
                    self.cut.add(name)

    def _is_twice(self, name: str) -> bool:
        """Return whether a file and its copy are the same."""
        file = name.removesuffix(".copy")
        return self.files.get(file) == self.files.get(f"{file}.copy")

    def try_to_write(self) -> None:
        """Stand in for FileLocation.try_to_write."""
        self.checks += 1
        try:
            Files(self).try_to_write()
        except OSError as error:
            raise NothingSavedError(f"{error}. Nothing was changed") from error

    def reader(self) -> MemoryStore:
        """Return what a next controller would find."""
        return self._location().read()

    def read_claim(self) -> Claim:
        """Stand in for FileLocation.read_claim."""
        seen = self._location().read_claim()
        if self.world.now < self.slow_until:
            self.world.elapsed += self.world.rng.uniform(0.0, 0.9)
        return seen


class Files(Disk):
    """The system calls of one process."""

    def __init__(self, shared: SharedDisk) -> None:
        self.process: Any = shared.world.current
        self.change: tuple[dict[str, bytes], list[str]] | None = None  # that is being made
        self._shared = shared
        self._world = shared.world
        self._open: dict[int, str] = {}

    def _acts(self) -> None:
        """Take some time, or fail, or be the last or the next to last thing that is done."""
        shared, world = self._shared, self._world
        self._check_reach()
        slow = world.now < shared.slow_until
        world.elapsed += world.rng.uniform(0.0, 0.2) if slow else 0.0003
        self.process.acts()
        world.catch_up(self.process)
        if shared.trouble and world.rng.random() < shared.trouble / 4:
            shared.full_until = world.clock() + world.rng.choice([0.0, world.rng.uniform(0.0, 5.0)])
            raise OSError(errno.ENOSPC, "the disk is full")
        if world.clock() < shared.full_until:
            raise OSError(errno.ENOSPC, "the disk is still full")

    def _check_reach(self) -> None:
        if self.process is not None and self.process.host in self._shared.out_of_reach:
            self._world.elapsed += OUT_OF_REACH_S
            raise OSError(errno.ETIMEDOUT, "the file system does not answer")

    def try_to_write(self) -> None:
        """Write some of nothing; raises OSError."""
        self._acts()

    def lies(self) -> bool:
        """Return whether what is to be saved now is lost instead."""
        chance = self._shared.lies
        is_lost = bool(chance) and self._world.rng.random() < chance
        if is_lost:
            self._world.log(self.process, "loses a save")
        return is_lost

    def close_store(self) -> None:
        """Let the next one have it."""
        if self._shared.alone is self.process:
            self._shared.alone = None

    def answers(self) -> None:
        """See that only the last claimant answers a change."""
        self._shared.simulation.checks.leaders.writes(self.process, "a log")

    def read(self, path: Path, at: int = 0, size: int = -1) -> bytes:
        self._check_reach()
        writer = self._shared.writers.get(str(path))
        if self.process is self._shared.claim[0] is not writer:
            self._shared.read_by_others.add(str(path))
        return self._content(path)[at : None if size < 0 else at + size]

    def size(self, path: Path) -> int:
        self._check_reach()
        return len(self._content(path))

    def _content(self, path: Path) -> bytes:
        try:
            return self._shared.files[str(path)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from None

    def names(self, folder: Path) -> list[str]:
        begin = f"{folder}/"
        return [
            path[len(begin) :]
            for path in self._shared.files
            if path.startswith(begin) and "/" not in path[len(begin) :]
        ]

    def create(self, path: Path) -> int:
        self._acts()
        fd = next(self._world.fds)
        self._open[fd] = str(path)
        self._shared.files[str(path)] = b""
        return fd

    def write(self, fd: int, chunk: memoryview) -> int:
        path = self._open[fd]
        if path in self._shared.files:  # else it has rotted away, or the next writer removed it
            self._shared.files[path] += bytes(chunk)
            self._made(path)
        return len(chunk)

    def fsync(self, fd: int) -> None:
        self._acts()

    def close(self, fd: int) -> None:
        del self._open[fd]

    def rename(self, old: Path, new: Path) -> None:
        self._acts()
        if str(old) not in self._shared.files:  # the next writer has tidied up
            raise FileNotFoundError(errno.ENOENT, "no such file", str(old))
        if new.name == "epoch":
            claim = self.process, self._shared.files[str(old)]
            epoch = int(unframe(claim[1]).split()[0])
            self._shared.simulation.checks.leaders.claims(self.process, epoch)
            self._shared.claim = claim
        elif new.name.startswith("log-"):
            self._shared.writers[str(new)] = self.process
        elif new.name == "lease":
            self._shared.simulation.checks.leaders.writes(self.process, new.name)
        self._shared.files[str(new)] = self._shared.files.pop(str(old))
        self._open = {fd: str(new) if at == str(old) else at for fd, at in self._open.items()}

    def unlink(self, path: Path) -> None:
        self._acts()
        if self._shared.files.pop(str(path), None) is None:
            raise FileNotFoundError

    def mkdir(self, folder: Path) -> None:
        """Folders are there once something is in them."""

    def fsync_dir(self, folder: Path) -> None:
        self._acts()

    def _made(self, path: str) -> None:
        """Tell of a change when it has happened: from then on the next writer reads it."""
        log = path.removesuffix(".copy")
        has_rotted = log not in self._shared.files or log in self._shared.cut
        is_first = path != log if has_rotted else path == log
        if self.change is None or "/log-" not in path or not is_first:
            return
        change, self.change = self.change, None
        if path not in self._shared.read_by_others:
            self._shared.on_applied(*change)


class Store:
    """The real store, whose changes are reported."""

    def __init__(self, store: FileStore, files: Files) -> None:
        self._store = store
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        if self._files.lies():
            return
        self._files.change = dict(puts), list(deletes)
        try:
            self._store.apply(puts, self._files.change[1])
        finally:
            self._files.change = None
        self._files.answers()

    def close(self) -> None:
        self._store.close()
        self._files.close_store()


@contextlib.contextmanager
def change_lock(shared: SharedDisk) -> Iterator[None]:
    """Stand in for the lock around a claim and the lease."""
    if shared.locked_by is not None and shared.locked_by.alive:
        shared.world.elapsed += LOCK_PATIENCE_S
        raise StoreLockedError("another process has held the lock for 2 s")
    shared.locked_by = shared.world.current
    try:
        yield
    finally:
        shared.locked_by = None
