"""What goes wrong with hosts, their links, and those that lead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.database import Database
from tests.simulation.hosts import DATABASE, LEADERS

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

BRIEF_S, LONG_S = (0.1, 2.0), (2.0, 15.0)


class HostFaults:
    """Faults of hosts; each ends by itself, and all with :meth:`end`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._rng = simulation.world.rng
        self._until: dict[int, float] = {}  # by host: until when something is wrong there

    def is_troubled(self, host: int, within_s: float) -> bool:
        """Return whether anything was wrong with a host or its links within the last seconds."""
        return self._until.get(host, 0.0) >= self._world.now - within_s

    def trouble(self, host: int, duration_s: float) -> None:
        """Take note that something is wrong with a host, for so long."""
        self._until[host] = max(self._until.get(host, 0.0), self._world.now + duration_s)

    def kinds(self) -> list[Callable[[], None]]:
        """Return what may go wrong; nothing on one host."""
        if self._simulation.size == 1:
            return []
        kinds = [
            self._cut_link,
            self._cut_link,
            self._cut_off,
            self._cut_off,
            self._lose_packets,
            self._vanish,
            self._stop_host,
            self._stillborn,
        ]
        if self._simulation.shape == DATABASE:
            kinds += [self._restart_database, self._restart_database, self._lose_disk]
        if self._simulation.shape in {LEADERS, DATABASE}:
            kinds += [self._stop_leader, self._stop_leader, self._stop_leader, self._lose_disk]
        return kinds

    def end(self) -> None:
        """Let all hosts reach each other, and the disk."""
        self._world.links.heal_all()
        self._simulation.stillborn.clear()
        disk = self._simulation.disk
        disk.out_of_reach.clear()
        if isinstance(disk, Database):
            disk.away_until = disk.full_until = 0.0
        for process in self._world.processes.values():
            process.stands_in = None

    def _host(self) -> int:
        return self._rng.randrange(self._simulation.size)

    def _duration_s(self) -> float:
        return self._rng.uniform(*self._rng.choice([BRIEF_S, LONG_S]))

    def _cut(self, directions: set[tuple[int, int]]) -> None:
        duration_s = self._duration_s()
        self._world.log("faults", f"cut for {duration_s:.1f} s: {sorted(directions)}")
        self._simulation.checks.counts["link cut"] += 1
        self._world.links.cut(directions)
        for host in {host for direction in directions for host in direction}:
            self.trouble(host, duration_s)
        self._world.after(duration_s, lambda: self._heal(directions))

    def _heal(self, directions: set[tuple[int, int]]) -> None:
        self._world.log("faults", f"healed: {sorted(directions)}")
        self._world.links.heal(directions)

    def _ways(self, host: int) -> set[tuple[int, int]]:
        others = [each for each in range(self._simulation.size) if each != host]
        directions = self._rng.choice(["in", "out", "both", "both", "both"])
        to, back = {(host, each) for each in others}, {(each, host) for each in others}
        return to | back if directions == "both" else to if directions == "out" else back

    def _cut_link(self) -> None:
        one, other = self._rng.sample(range(self._simulation.size), 2)
        is_one_direction = self._rng.random() < 0.4
        self._cut({(one, other)} if is_one_direction else {(one, other), (other, one)})

    def _cut_off(self) -> None:
        self._cut(self._ways(self._host()))

    def _lose_packets(self) -> None:
        host = self._host()
        others = range(self._simulation.size)
        directions = {(host, each) for each in others} | {(each, host) for each in others}
        until = self._world.now + self._rng.uniform(1.0, 6.0)
        self._world.log("faults", f"host {host} loses packets")
        self._world.links.lose(directions, until)

    def _vanish(self) -> None:
        """Cut a host's power: nothing is heard of it, and it starts anew."""
        host = self._host()
        self._cut({w for w in self._ways(host) for w in (w, w[::-1])})
        self._simulation.faults.crash(host)

    def _stop_host(self) -> None:
        host = self._host()
        duration_s = self._duration_s()
        until = self._world.now + duration_s
        self.trouble(host, duration_s)
        self._world.log("faults", f"host {host} is stopped until {until - 1000.0:.1f}")
        for process in self._world.processes.values():
            if process.host == host:
                process.stop(duration_s)

    def _stillborn(self) -> None:
        """Have all replicas that are made on a host die before they report, for a while."""
        host, duration_s = self._host(), self._duration_s()
        self._world.log("faults", f"replicas are stillborn on host {host}")
        stillborn = self._simulation.stillborn
        stillborn.add(host)
        self._world.after(duration_s, lambda: stillborn.discard(host))

    def _stop_leader(self) -> None:
        """Stop a controller in the midst of whatever it does next."""
        for process in self._world.processes.values():
            if process.role == "controller":
                process.stands_in = int(self._rng.expovariate(0.2)), self._rng.uniform(*LONG_S)

    def _lose_disk(self) -> None:
        disk, host = self._simulation.disk, self._host()
        self._world.log("faults", f"host {host} does not reach the store")
        disk.out_of_reach.add(host)
        self._world.after(self._duration_s(), lambda: disk.out_of_reach.discard(host))

    def _restart_database(self) -> None:
        disk, duration_s = self._simulation.disk, self._duration_s()
        if isinstance(disk, Database):
            self._world.log("faults", f"the database is away for {duration_s:.1f} s")
            disk.restart(duration_s)
