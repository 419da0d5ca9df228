"""What must hold of leaders: one at a time changes the store, and nobody obeys one of before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenroom.persistence.checkpoints import Checkpoints

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.database import Database
    from tests.simulation.shared_disk import SharedDisk
    from tests.simulation.world import SimProcess


class LeaderChecks:
    """Follows who claims the store, who changes it, and whose orders are obeyed."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._expect = checks.expect
        self._world = checks.simulation.world
        self._epoch = 0
        self._writer: SimProcess | None = None  # of that epoch
        self._heard: dict[int, int] = {}  # by pid: the latest epoch of an order

    def claims(self, process: SimProcess, epoch: int) -> None:
        """A process becomes the store's writer; the one before it must know, or be gone."""
        before = self._writer
        self._expect(epoch > self._epoch, f"{process} claims epoch {epoch} after {self._epoch}")
        self._epoch, self._writer = epoch, process
        self._checks.counts["epoch begun"] += 1
        if before is None or before.host == process.host:
            return
        self._checks.simulation.faults.of_hosts.trouble(before.host, 0.0)  # it is suspected
        if before.alive:
            self._checks.counts["leader succeeded that lives"] += 1
            active = before.actor.active  # None where it has given way: it changes nothing then
            at = self._world.monotonic(before)
            message = f"{process} takes over while {before} may think that it leads"
            lease = None if active is None else active._store.lease
            is_over = lease is None or lease._is_released or lease._tenure.is_over(at)
            self._expect(is_over, message)

    def writes(self, process: SimProcess, what: str) -> None:
        """A process changes the store."""
        message = f"{process} changes {what} of epoch {self._epoch}, which is {self._writer}'s"
        self._expect(process is self._writer, message)

    def handles(self, process: SimProcess, order: Any, handle: Callable[[], None]) -> None:
        """Handle an order; one of an earlier epoch than another must change nothing."""
        heard = self._heard.get(process.pid, 0)
        is_old = 0 < order.epoch < heard
        before = _state(process) if is_old else None
        handle()
        if is_old:
            self._checks.counts["order of before"] += 1
            message = f"{process} has heard of epoch {heard}, and obeys {order}"
            self._expect(_state(process) == before, message)
        self._heard[process.pid] = max(heard, order.epoch)

    def at_the_end(self, disk: SharedDisk | Database, kinds: tuple[str, ...]) -> None:
        """Compare what the next controller would read with what was acknowledged."""
        checkpoints = Checkpoints(disk.reader())
        kept = {(kind, n): r for kind in kinds for n, r in checkpoints.load(kind).items()}
        on_disk = {key: record for key, record in self._checks.on_disk.items() if key[0] in kinds}
        differ = {key for key in kept.keys() | on_disk.keys() if kept.get(key) != on_disk.get(key)}
        self._expect(not differ, f"the store does not hold what was saved of {differ}")


def _state(process: SimProcess) -> Any:
    actor = process.actor
    if process.role == "replica":
        return actor.state, actor.config_id, actor.controller.resolved()
    if process.role == "proxy":
        known = actor.link.known
        return actor.link.seen, known and known[0].resolved()
    if process.role == "host":
        return actor.membership.refusal, len(process.world.processes)
    return None
