"""What is one host's: its settings, its records of processes, and its host process.

The host process is a short driver of what actors/host/process.py has do the work: the real
membership, finders and leader election. Only the election's thread is a timer here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.actors.cluster import leader_lease
from greenroom.actors.cluster.membership import Membership
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.cluster.key_rotation import KeyIds
from greenroom.core.cluster.leader_lease import CHECK_S
from tests.simulation.channels import Address
from tests.simulation.database import URL
from tests.simulation.links import PORT, host_at, ip_of
from tests.simulation.world import SimProcess

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

ALONE, JOINED, LEADERS, DATABASE = "alone", "joined", "leaders", "database"


def settings_of(number: int, shape: str, leaders: int, folder: Path) -> HostSettings:
    """Return the settings of a host; ``leaders`` is how many of the first may lead.

    Its state dir, below the folder, has what is neither the store's nor the actor system's.
    """
    state_dir = folder / str(number)
    (state_dir / "run").mkdir(parents=True)
    if shape == ALONE:
        return HostSettings(state_dir=state_dir, host_name="localhost")
    if shape == DATABASE:
        return HostSettings(
            state_dir=state_dir, host_name=f"host {number}", bind=ip_of(number), store=URL
        )
    addresses = [f"{ip_of(host)}:{PORT}" for host in range(leaders)]
    return HostSettings(
        state_dir=state_dir,
        host_name=f"host {number}",
        bind=ip_of(number),
        store="/shared" if shape == LEADERS and number < leaders else None,
        join=",".join(addresses) if number >= leaders else None,
    )


def parse_address(text: str) -> Address:
    """Stand in for the transport's: an admin's address, or a process's."""
    ip, _, number = text.rpartition(":")
    host = host_at(ip)
    return Address(-1 - host if int(number) == PORT else int(number))


class Records:
    """The records of a host's processes, of which only replicas' are asked for."""

    def __init__(self, simulation: Simulation, host: int) -> None:
        self._simulation = simulation
        self._host = host

    def add(self, process: Any, role: str, _title: str, **details: Any) -> None:
        if role == "replica":
            self._simulation.world.processes[process.pid].record = details

    def remove(self, _process: Any) -> None:
        """Nothing is needed: the dead are left out."""

    def details(self, _role: str) -> list[dict[str, Any]]:
        return [p.record for p in self._replicas() if p.record]

    def with_role(self, _role: str) -> list[Any]:
        return [p.identity for p in self._replicas()]

    def _replicas(self) -> list[SimProcess]:
        return [p for p in self._simulation.replicas() if p.host == self._host]


class Keys:
    """The cluster's keys, which never change here."""

    def __init__(self, _path: Path) -> None:
        pass

    def __call__(self) -> list[bytes]:
        return [b"the cluster's key"]

    def ids(self) -> KeyIds:
        return KeyIds("a key")


class LeaderElection(leader_lease.LeaderElection):
    """The real one, that checks by a timer and not on a thread, unless a database is waited for."""

    def start(self) -> None:
        if self._settings.store == URL:
            super().start()
            return
        self._check_again()

    def _check_again(self) -> None:
        if not self._stopped.is_set():
            self._check()
            self._loop.call_later(CHECK_S, self._check_again)


class HostProcess:
    """What a host process does for the shells."""

    def __init__(self, simulation: Simulation, number: int, process: SimProcess) -> None:
        settings = simulation.settings[number]
        loop: Any = process
        port: Any = Port(PORT, process.identity, loop, machine=simulation.machine)
        port.loop.keep_beating(simulation.machine.pulse(), settings.silence_timeout_s)
        records: Any = Records(simulation, number)
        self.membership = Membership(settings, records, port, lambda: {"name": settings.host_name})
        self.membership.begin()
