"""What goes wrong: how much of it, and of which kind, the seed decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from greenroom.core.config import MIB
from tests.simulation.host_faults import HostFaults

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import SimProcess

CALM, ROUGH, STORMY = 0.0, 0.25, 1.5  # faults per second
RAISING = {"controller", "proxy"}  # whose turns are whole, or have not been
BAD = ("fails", "fails by chance", "fails for a key", "slow")  # of user code in one replica
SPARED = {"client", "admin"}  # the first is its driver; the other has a fault of its own


class Faults:
    """Makes trouble until :meth:`end`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._rng = rng = simulation.world.rng
        self.rate = rng.choice([CALM, ROUGH, ROUGH, STORMY])
        self.happened: list[str] = []
        self._ended = False
        kinds: list[Callable[[], None]] = [
            self._kill,
            self._kill,
            self._kill_at_a_step,
            self._kill_at_a_step,
            self._kill_at_a_step,
            self._raise_in_a_turn,
            self._raise_in_a_turn,
            self._pause,
            self._slow_messages,
            self._slow_disk,
            self._clock_jumps,
            self._everything_late,
            self._kill_admin,
            self._crash_host,
            self._spoil_a_replica,
            self._leak,
        ]
        self.of_hosts = HostFaults(simulation)
        self._kinds = rng.sample(kinds, rng.randint(2, len(kinds)))
        if of_hosts := self.of_hosts.kinds():  # about as often as the others
            some = rng.sample(of_hosts, rng.randint(2, len(of_hosts)))
            self._kinds += some * (1 + len(self._kinds) // len(some))

    def begin(self) -> None:
        if self.rate:
            self._simulation.disk.trouble = self._rng.choice([0.0, 0.005, 0.03])
            self._next()

    def end(self) -> None:
        """Let everything be well from now on."""
        self._ended = True
        self._simulation.disk.trouble = 0.0
        self._simulation.bad_replicas.clear()
        self._simulation.leaks.clear()
        self.of_hosts.end()
        for process in self._world.processes.values():
            process.dies_in = process.raises_in = process.raises_in_change = None
            process.resume()

    @property
    def calm(self) -> bool:
        """Whether nothing has gone wrong, and nothing will."""
        return self.rate == CALM

    def _next(self) -> None:
        self._world.after(self._rng.expovariate(self.rate), self._happen)

    def _happen(self) -> None:
        if not self._ended:
            if any(p.role not in SPARED for p in self._world.processes.values()):
                self._rng.choice(self._kinds)()
            self._next()

    def _victim(self) -> SimProcess:
        by_role: dict[str, list[SimProcess]] = {}
        for process in self._world.processes.values():
            if process.role not in SPARED:
                by_role.setdefault(process.role, []).append(process)
        role = self._rng.choice(sorted(by_role))
        if "controller" in by_role and self._rng.random() < 0.25:
            role = "controller"
        return self._rng.choice(by_role[role])

    def _kill(self) -> None:
        self._world.kill(self._victim())

    def _kill_at_a_step(self) -> None:
        self._victim().dies_in = int(self._rng.expovariate(0.1))

    def _raise_in_a_turn(self) -> None:
        """Raise an exception within a turn of a controller or a proxy."""
        victims = [p for p in self._world.processes.values() if p.role in RAISING]
        if not victims:
            return
        victim = self._rng.choice(victims)
        if victim.role == "controller" and self._rng.random() < 0.5:
            victim.raises_in_change = int(self._rng.expovariate(0.5))
        else:
            victim.raises_in = int(self._rng.expovariate(0.1))

    def _pause(self) -> None:
        victim = self._victim()
        self._world.log(victim, "is stopped for a while")
        victim.stop(self._rng.uniform(0.05, 8.0))

    def _slow_messages(self) -> None:
        self._world.log("faults", "messages are slow")
        self._world.slow_until = self._world.now + self._rng.uniform(0.5, 5.0)

    def _slow_disk(self) -> None:
        self._world.log("faults", "the disk is slow")
        self._simulation.disk.slow_until = self._world.now + self._rng.uniform(0.5, 5.0)

    def _clock_jumps(self) -> None:
        self._world.wall_offset += self._rng.uniform(-1e5, 1e5)

    def _everything_late(self) -> None:
        """Let the whole machine stand still, as a suspended one does."""
        self._world.log("faults", "everything stands still")
        self._world.now += self._rng.uniform(0.5, 10.0)

    def _kill_admin(self) -> None:
        admin = self._rng.choice(self._simulation.admins)
        if admin is not None:
            self._world.kill(admin)

    def _spoil_a_replica(self) -> None:
        """Have the user code of one replica do badly what it does well elsewhere, for a while."""
        replicas = [p for p in self._world.processes.values() if p.role == "replica"]
        if replicas:
            victim, how = self._rng.choice(replicas), self._rng.choice(BAD)
            self._world.log(victim, f"is bad: {how}")
            bad = self._simulation.bad_replicas
            bad[victim] = how
            self._world.after(self._rng.uniform(1.0, 60.0), lambda: bad.pop(victim, None))

    def _leak(self) -> None:
        """Have one replica take more and more memory, until it ends."""
        replicas = [p for p in self._world.processes.values() if p.role == "replica"]
        if replicas:
            victim, rate = self._rng.choice(replicas), self._rng.choice([10, 40, 400]) * MIB
            self._world.log(victim, f"leaks {rate} bytes a second")
            self._simulation.leaks.setdefault(victim, (self._world.now, rate))

    def _crash_host(self) -> None:
        self.crash(self._rng.randrange(len(self._simulation.hosts)))

    def crash(self, number: int) -> None:
        """End all processes of a host."""
        simulation = self._simulation
        self._world.log("faults", f"host {number} crashes")
        callers = [each for each in simulation.callers if each is not None]
        for process in [
            *simulation.actors_of(number),
            *(each.process for each in callers if each.process.host == number),
            simulation.hosts[number],
            simulation.admins[number],
        ]:
            if process is not None:
                self._world.kill(process)
