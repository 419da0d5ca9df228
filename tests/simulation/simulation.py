"""One run: a cluster of real shells, clients that use it, faults, and what is looked for.

First comes trouble, of a kind and an amount that the seed decides; then it ends, clients finish,
and everything must come to rest as the saved state says.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thespian.actors import ChildActorExited
from thespian.system.messages.admin import PendingActor, PendingActorResponse

from greenroom.actors.cluster.controller_seeker import LEADING_CONTROLLER
from greenroom.actors.cluster.members import REPLICA
from greenroom.actors.controller.controller import Controller, LeadingController
from greenroom.actors.proxy.proxy import Proxy
from greenroom.actors.replica.replica import Replica
from greenroom.actors.replica.wear import HARD
from greenroom.actors.runtime import liveness as silence
from greenroom.actors.runtime.port import CONTROLLER, PROXY
from tests.simulation.applications import Deployer
from tests.simulation.callers import SimCaller
from tests.simulation.channels import Address, Message
from tests.simulation.checks import Checks
from tests.simulation.clients import Client
from tests.simulation.database import Database
from tests.simulation.faults import Faults
from tests.simulation.hosts import ALONE, DATABASE, JOINED, LEADERS, HostProcess, settings_of
from tests.simulation.links import OUTSIDE
from tests.simulation.processes import Mailbox, Manager, SimMachine, replaced
from tests.simulation.scripted_code import MEMORY
from tests.simulation.shared_disk import SharedDisk
from tests.simulation.world import InvariantError, SimProcess, World

SIZES = (*[1] * 8, 2, 3, *[1] * 6)  # several hosts take twice the time
EACH_WITH_DATABASE = 5  # of the runs with several hosts, every fifth
EACH_WITH_APPLICATION = 4
CONVERGE_S = 200.0  # how long coming to rest may take
MEMORY_DISK = "/dev/shm"
MOST_FRAMES = 10_000  # processes that stand still do so within each other, see World.stand_still
_CLASSES = {
    CONTROLLER[0]: Controller,
    LEADING_CONTROLLER[0]: LeadingController,
    PROXY[0]: Proxy,
    REPLICA: Replica,
}
_ERRORS = logging.getLogger("greenroom")


class Simulation(logging.Handler):
    """One seed's run. As a log handler it takes note of what handlers were not to raise.

    The seed decides how many hosts there are, where ``hosts`` is 0, and what they share, where
    ``shape`` is "".
    """

    def __init__(self, seed: int, hosts: int = 0, shape: str = "") -> None:
        super().__init__(logging.ERROR)
        self.world = world = World(seed)
        self.machine = SimMachine(self)
        rng = world.rng
        self.deliveries_at_once = rng.choice([1, 3, 256])
        self.size = hosts or rng.choice(SIZES)
        self.shape = ALONE if self.size == 1 else rng.choice([JOINED, LEADERS, LEADERS])
        if shape:
            self.shape = shape
        elif self.size > 1 and seed % EACH_WITH_DATABASE == 0:
            self.shape = DATABASE
        self.leaders = rng.randint(2, min(self.size, 3)) if self.shape == LEADERS else 1
        in_memory = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
        self.folder = TemporaryDirectory(dir=in_memory)
        folder = Path(self.folder.name)
        self.settings = {
            number: settings_of(number, self.shape, self.leaders, folder)
            for number in range(self.size)
        }
        self.settings[OUTSIDE] = self.settings[0]
        if self.size > 1:
            self._set_clocks()
        self.disk = Database(self) if self.shape == DATABASE else SharedDisk(self)
        self.checks = Checks(self)
        self.disk.on_applied = self.checks.saved
        self.routers: dict[int, Any] = {}  # by the proxy's pid
        self.names: dict[tuple[int, str], SimProcess] = {}  # actors by host and global name
        self.admins: list[SimProcess | None] = []
        self.hosts: list[SimProcess | None] = []
        self.broken = ""  # by an outage
        self.bad_replicas: dict[SimProcess, str] = {}  # and how: see faults.BAD
        self.stillborn: set[int] = set()  # hosts where no replica lives to report
        self.parents: dict[SimProcess, tuple[SimProcess, Address]] = {}  # that hear of their ends
        self.made: Counter[str] = Counter()  # of those, by name
        self.leaks: dict[SimProcess, tuple[float, int]] = {}  # since when, and bytes a second
        self.tries = 0  # what was begun, or looked for, while it was
        self.converge_s = CONVERGE_S
        self.quiet = False  # nothing is made to go wrong any more
        self.duration_s = rng.uniform(3.0, 12.0) if self.size == 1 else rng.uniform(6.0, 18.0)
        self.clients: list[Client] = []
        self.callers: list[SimCaller | None] = []
        self.faults = Faults(self)
        world.on_death = self._died

    def _set_clocks(self) -> None:
        rng = self.world.rng
        for number in range(self.size):
            self.world.clocks[number] = rng.uniform(0.0, 1e5), rng.uniform(0.995, 1.005)

    # --- The run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run; raise InvariantError where something is wrong."""
        handlers, _ERRORS.handlers[:] = list(_ERRORS.handlers), [self]
        level, propagate = _ERRORS.level, _ERRORS.propagate
        _ERRORS.setLevel(logging.ERROR)
        _ERRORS.propagate = False
        frames = sys.getrecursionlimit()
        sys.setrecursionlimit(MOST_FRAMES)
        try:
            with replaced(self):
                self._run()
        finally:
            self.folder.cleanup()
            sys.setrecursionlimit(frames)
            for thread in self.world.threads:
                thread.end()
            _ERRORS.handlers[:], _ERRORS.propagate = handlers, propagate
            _ERRORS.setLevel(level)

    def _run(self) -> None:
        world = self.world
        for number in range(self.size):
            self.admins.append(None)
            self.hosts.append(None)
            self.start_host(number)
        for number in range(world.rng.randint(1, 3)):
            self.clients.append(Client(self, number))
        if world.seed % EACH_WITH_APPLICATION == 2:
            self.clients.append(Deployer(self, len(self.clients)))
        for number in range(world.rng.randint(1, 2)):
            self.callers.append(None)
            self.start_caller(number)
        self.faults.begin()
        world.run(world.now + self.duration_s)
        self.quiet = True
        self.faults.end()
        self._converge()

    def _converge(self) -> None:
        world = self.world
        deadline = world.now + self.converge_s
        while True:
            world.run(world.now + 1.0)
            unsettled = self.checks.unsettled()
            if not unsettled:
                break
            self.checks.expect(world.now < deadline, f"did not come to rest: {unsettled}")
        world.run(world.now + 3.0)
        unsettled = self.checks.unsettled()
        self.checks.expect(not unsettled, f"did not stay at rest: {unsettled}")
        self.checks.at_the_end()

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of an exception that a shell caught and logged."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            if record.name == silence.__name__ and isinstance(record.args, tuple):
                self.checks.silenced(int(str(record.args[1])))
            return  # user code's error, told in the way that it should be
        if isinstance(error, InvariantError):
            self.checks.failed(error)
        elif not self.checks.is_expected(error):
            self.world.log(self.world.current, f"{type(error).__name__}: {error}")
            self.checks.failed(InvariantError(f"{record.getMessage()}: {error!r}"), error)

    # --- Hosts, admins, actors --------------------------------------------------------------------

    def admin_number(self, host: int) -> int:
        """Return the address of a host's admin, which is the same for the next one."""
        return -1 - host

    def spawn(self, role: str, host: int = 0) -> SimProcess:
        return SimProcess(self.world, role, host)

    def attach(self, arrived: Callable[[Any, Any], None]) -> Mailbox:
        """Give the running process another address, as a Port has it."""
        process = self.world.current
        assert process is not None
        address = self.world.listen(process, arrived)
        admin = 0 if process.host == OUTSIDE else process.host
        return Mailbox(self, process, address, self.admin_number(admin))

    def start_host(self, number: int) -> None:
        """Start a host's admin and host process, from what is on the disk."""
        if self.admins[number] is None:
            admin = self.admins[number] = self.spawn("admin", number)
            self.world.listen(admin, partial(self._asked, number), self.admin_number(number))
        host = self.hosts[number] = self.spawn("host", number)
        self.world.run_as(host, lambda: self._set_host(number, host))

    def _set_host(self, number: int, host: SimProcess) -> None:
        host.actor = HostProcess(self, number, host)

    def _asked(self, host: int, body: Any, sender: Address) -> None:
        """Answer, as an admin, who asks for an actor by its name."""
        admin = self.admins[host]
        if not isinstance(body, PendingActor) or admin is None:
            return
        if body.actorClassName == CONTROLLER[0] and self.shape == JOINED and host:
            mailbox = Mailbox(self, admin, sender, 0)  # the leader's admin answers
            mailbox.send(Address(self.admin_number(0)), body, None, None)
            return

        def answer() -> None:
            if admin.alive:
                address = self._actor(host, body.globalName, _CLASSES[body.actorClassName])
                reply = PendingActorResponse(
                    sender,
                    body.instanceNum,
                    body.globalName,
                    actualAddress=address,
                    errorCode=None if address is not None else 3586,  # no capable system
                )
                self._tell(host, sender, reply)

        is_quick = (host, body.globalName) in self.names
        self.world.after(0.001 if is_quick else self.world.rng.uniform(0.005, 0.05), answer)

    def ask_admin(
        self,
        process: SimProcess,
        sender: Address,
        actor_class: Any,
        name: str,
        answered: Callable[[int | None], None],
    ) -> None:
        """Ask the host's admin for an actor, as an actor does."""
        del actor_class
        departs = self.world.clock()

        def received() -> None:
            if process.died_at < departs:
                return
            admin = self.admins[process.host]
            number = None
            if admin is not None and admin.alive:
                is_new = (process.host, name) not in self.names
                number = self._actor(process.host, name, Replica).resolved()
                if is_new:
                    self.parents[self.names[process.host, name]] = process, sender
            if process.alive:
                process.enqueue(lambda: answered(number))

        process.acts()
        self.world.at(departs + self.world.rng.uniform(0.005, 0.05), received)

    def _actor(self, host: int, name: str, actor_class: Any) -> Any:
        """Return the actor of that name, made where there is none; None where it may not be."""
        known = self.names.get((host, name))
        if known is None:
            if actor_class is Controller and self.shape in {LEADERS, DATABASE}:
                return None
            known = self.names[host, name] = self.spawn(actor_class.role, host)
            actor = known.actor = actor_class()
            actor.machine = self.machine
            actor.created(known)
            address = self.world.listen(known, actor.receiveMessage)
            actor._myRef = Manager(self, known, address)
            if actor_class is Replica and host in self.stillborn:
                self.made[name] += 1
                self.world.after(0.001, lambda: self.world.kill(known))
        return Address(known.numbers[0])

    def memory_bytes(self) -> int:
        """Return what the current process has of memory."""
        process = self.world.current
        assert process is not None
        since, rate = self.leaks.get(process, (0.0, 0))
        size = MEMORY + int(rate * (self.world.now - since))
        self.checks.counts["full"] += size > 2 * MEMORY * HARD
        return size

    def _died(self, process: SimProcess) -> None:
        """Tell the processes that look after this one of its death."""
        self.routers.pop(process.pid, None)
        parent, at = self.parents.pop(process, (None, None))
        if parent is not None and parent.alive:
            exited = ChildActorExited(Address(process.numbers[0]))
            delay_s = self.world.rng.uniform(0.001, 0.05)
            self.world.after(delay_s, lambda: self._tell(parent.host, at, exited))
        if isinstance(self.disk, Database):
            self.disk.died(process)
        rng = self.world.rng
        if process in self.admins:
            number = self.admins.index(process)
            self.admins[number] = None
            self.world.after(rng.uniform(0.02, 0.2), partial(self.start_over, number))
        elif process in self.hosts:
            number = self.hosts.index(process)
            self.hosts[number] = None
            self.world.after(rng.uniform(0.5, 3.0), partial(self._host_again, number))
        for number, caller in enumerate(self.callers):
            if caller is not None and caller.process is process:
                self.callers[number] = None
                self.world.after(rng.uniform(0.1, 1.0), partial(self.start_caller, number))
        for name, known in list(self.names.items()):
            if known is process:
                self.world.after(rng.uniform(0.001, 0.05), partial(self._forget, name, known))

    def _tell(self, host: int, to: Any, message: Any) -> None:
        """Send something as a host's admin."""
        admin = self.admins[host]
        if admin is not None and admin.alive:
            mailbox = Mailbox(self, admin, Address(self.admin_number(host)), 0)
            self.world.run_as(admin, lambda: mailbox.send(to, message, None, None))

    def _forget(self, name: tuple[int, str], process: SimProcess) -> None:
        if self.names.get(name) is process:
            del self.names[name]

    def _host_again(self, number: int) -> None:
        if self.hosts[number] is None:
            self.start_host(number)

    def start_over(self, number: int) -> None:
        """Do what a host process does when its admin died: kill all actors, start all anew."""
        for process in self.actors_of(number):
            self.world.kill(process)
        for name, process in list(self.names.items()):
            if name[0] == number and not process.alive:
                del self.names[name]
        if (host := self.hosts[number]) is not None:
            self.hosts[number] = None  # else it would be started again by another way
            self.world.kill(host)
        self.world.after(self.world.rng.uniform(0.1, 1.0), partial(self._host_again, number))

    def actors_of(self, host: int) -> list[SimProcess]:
        """Return a host's actors."""
        return [p for (number, _), p in self.names.items() if p.alive and number == host]

    def start_caller(self, number: int) -> None:
        if self.callers[number] is None:
            process = self.spawn("caller", self.world.rng.randrange(self.size))
            self.world.run_as(process, lambda: self._set_caller(number, process))

    def _set_caller(self, number: int, process: SimProcess) -> None:
        self.callers[number] = SimCaller(self, process)

    def replicas(self) -> list[SimProcess]:
        """Return the replicas' processes that live."""
        return [p for p in self.world.processes.values() if p.role == "replica"]

    def proxies(self) -> list[SimProcess]:
        """Return the proxies' processes that live."""
        return [p for p in self.world.processes.values() if p.role == "proxy"]

    def pending(self) -> list[Message]:
        """Return the messages that no process has taken yet."""
        return [w for p in self.world.processes.values() for w in p.queue if isinstance(w, Message)]
