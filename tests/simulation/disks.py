"""The controller's store: what is applied outlives every process; the disk may be slow or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import NothingSavedError, StoreLockedError, StoreNotWritableError
from greenroom.persistence.memory import MemoryStore
from tests.simulation.world import Killed, World


class Disk:
    """One cluster's disk. ``trouble`` is the chance of each kind of mishap in an ``apply``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kept = MemoryStore()
        self.epoch = 0
        self.trouble = 0.0
        self.lies = 0.0  # the chance of a save that is lost, though the disk says otherwise
        self.slow_until = 0.0
        self.full_until = 0.0
        self.checks = 0
        self.on_applied: Callable[[Mapping[str, bytes], list[str]], None] = lambda _p, _d: None
        self._writer: Any = None

    def open(self) -> Store:
        """Stand in for FileLocation.open."""
        if self.world.now < self.full_until:
            raise StoreNotWritableError("the disk is full. Nothing was changed")
        if self._writer is not None and self._writer.alive:
            raise StoreLockedError("another controller has it")
        self._writer = self.world.current
        self.epoch += 1
        return Store(self, self.epoch)

    def read(self, wanted: Callable[[str], object] = bool) -> MemoryStore:
        """Stand in for FileLocation.read."""
        found = self.kept.load()
        return MemoryStore({key: found[key] for key in filter(wanted, found)})

    def try_to_write(self) -> None:
        """Stand in for FileLocation.try_to_write."""
        self.checks += 1
        if self.world.now < self.full_until:
            raise NothingSavedError("the disk is still full. Nothing was changed")

    def records(self, kind: str) -> dict[str, Any]:
        """Return what a new controller would load."""
        return Checkpoints(self.kept).load(kind)


class Store:
    """What one controller has of the disk."""

    def __init__(self, disk: Disk, epoch: int) -> None:
        self.epoch = epoch
        self.store_id = "its only disk"
        self.lost: Mapping[str, str] = {}
        self._disk = disk
        self._owner = disk.world.current

    def get(self, key: str) -> bytes | None:
        return self._disk.kept.get(key)

    def load(self, prefix: str = "") -> dict[str, bytes]:
        return self._disk.kept.load(prefix)

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Apply, or die before or after it, or fail before or after it."""
        disk, world = self._disk, self._disk.world
        assert self._owner is not None
        deletes = list(deletes)
        world.elapsed += world.rng.uniform(0.0, 0.8) if world.now < disk.slow_until else 0.001
        self._owner.acts()
        if world.now < disk.full_until:
            raise NothingSavedError("the disk is full. Nothing was changed")
        mishap = world.rng.random() / disk.trouble if disk.trouble else 9.0
        if mishap < 1.0:
            world.log(self._owner, "dies before it has saved")
            raise Killed
        if mishap < 2.0:
            disk.full_until = world.now + world.rng.choice([0.0, world.rng.uniform(0.0, 5.0)])
            raise NothingSavedError("the disk is full. Nothing was changed")
        if disk.lies and world.rng.random() < disk.lies:
            world.log(self._owner, "loses a save")
            return
        disk.kept.apply(puts, deletes)
        disk.on_applied(puts, deletes)
        if mishap < 3.0:
            world.log(self._owner, "dies after it has saved")
            raise Killed
        if mishap < 4.0:
            raise StoreNotWritableError("the disk took it, perhaps")
        self._owner.acts()

    def close(self) -> None:
        """Let the next one have it."""
        if self._disk._writer is self._owner:
            self._disk._writer = None
