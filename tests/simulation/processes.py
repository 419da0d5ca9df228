"""What the shells take for the operating system and for Thespian, in a :class:`World`.

The real controller, proxies, replicas, ports, finders and callers run here unchanged. Replaced are,
in every module of ours that has them: the clocks, randomness, ``os._exit``, pidfds and signals, the
store, user code, and the transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thespian.actors import ActorAddress

from greenroom.actors.caller import streams
from greenroom.actors.cluster import (
    election as candidate,
)
from greenroom.actors.cluster import (
    leader_lease as bidding,
)
from greenroom.actors.cluster import (
    leader_lease as leading,
)
from greenroom.actors.controller import policies, status_file
from greenroom.actors.host import capacity, records
from greenroom.actors.proxy import metrics
from greenroom.actors.replica import logging as user_logging
from greenroom.actors.replica import user_code
from greenroom.actors.runtime import (
    actor as crash_loop,
)
from greenroom.actors.runtime import (
    liveness as pulse,
)
from greenroom.actors.runtime import (
    logs,
    processes,
    settings,
    state_dir,
)
from greenroom.actors.runtime import (
    settings as binding,
)
from greenroom.actors.runtime.actor import CrashLoop
from greenroom.actors.runtime.liveness import Seen
from greenroom.actors.transport import addresses, base
from greenroom.actors.transport import cluster_key as key_files
from greenroom.actors.transport.admission import Trouble
from greenroom.core.cluster.state import State
from greenroom.core.routing.router import Router
from greenroom.core.routing.tickets import Observer
from greenroom.core.silence import TICK_S, Doing
from greenroom.persistence import writer
from greenroom.persistence.filesystem import FileStore
from tests.simulation import hosts
from tests.simulation.channels import Address
from tests.simulation.checked_router import CheckedRouter
from tests.simulation.coroutines import Asyncio
from tests.simulation.links import Socket
from tests.simulation.scripted_code import ScriptedCode
from tests.simulation.shared_disk import ChangeLock
from tests.simulation.world import Killed, SimProcess, World

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

CAPACITY = {"num_cpus": 64.0, "num_gpus": 0.0, "memory": 2.0**36}


class Transport:
    """What loops and ports need of a transport, for one address of a process."""

    is_quiet = False
    starved_s = 0.0

    def __init__(
        self, simulation: Simulation, process: SimProcess, address: Address, admin: int
    ) -> None:
        self.loop = process
        self.deliveries_at_once = simulation.deliveries_at_once
        self.myAddress = address
        self.admin_address = Address(admin)
        self._world = simulation.world

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        process = self.loop
        process.turn_end.append(callback)
        if self._world.current is not process:
            process.enqueue(lambda: None)

    def send(self, target: Any, message: Any, on_sent: Any, on_failed: Any) -> bool:
        if isinstance(target, Later) and target.resolved() is None:
            target.waiting.append((message, on_sent, on_failed))
        else:
            to = target.resolved()
            self._world.send(self.loop, self.myAddress, to, message, on_sent, on_failed)
        return True

    def watch_remote(self, target: Any, on_lost: Callable[[bool], None]) -> Any:
        return self._world.links.watch(self.loop, target.resolved(), on_lost)

    def trouble_with(self, _gate: Any) -> Trouble:
        return Trouble("nobody answers")

    def write(self, _target: Any) -> None:
        """Do nothing: what was sent is on its way."""

    def scheduleTransmit(self, _manager: Any, intent: Any) -> None:
        raise AssertionError(f"every address can be reached: {intent}")

    def close(self) -> None:
        """Nothing is needed."""


class Later(Address):
    """An actor's address at whoever asked for it, until it is up."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        super().__init__(None)
        self.waiting: list[tuple[Any, Any, Any]] = []


class Manager:
    """What an actor has of Thespian."""

    def __init__(self, simulation: Simulation, process: SimProcess, address: Address) -> None:
        self.address = address
        admin = simulation.admin_number(process.host)
        self.transport = Transport(simulation, process, address, admin)
        self._simulation = simulation
        self._process = process

    def _send_intent(self, intent: Any) -> None:
        raise AssertionError(f"every address can be reached: {intent}")

    def createActor(
        self, actor_class: Any, _requirements: Any, global_name: str, _hash: Any
    ) -> Address:
        """Ask the admin; what is sent to the address meanwhile waits."""
        later = Later()

        def answered(number: int | None) -> None:
            waiting, later.waiting = later.waiting, []
            later.number = number
            # What is sent now was sent in an earlier turn: no mistake of this one can be in it.
            raises_in, self._process.raises_in = self._process.raises_in, None
            for message, on_sent, on_failed in waiting:
                if number is not None:
                    self.transport.send(later, message, on_sent, on_failed)
                elif on_failed is not None:
                    on_failed()
            self._process.raises_in = raises_in

        self._simulation.ask_admin(self._process, self.address, actor_class, global_name, answered)
        return later


class _Os:
    """The module, for processes that end as simulated ones."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _exit(self, code: int) -> None:
        self._world.note(self._world.current, f"exits with {code}")
        raise Killed

    def kill(self, _pid: int, _signal: int) -> None:
        raise Killed

    def close(self, _fd: int) -> None:
        """A pidfd is only a number."""


def _fallible_state(simulation: Simulation) -> type[State]:
    """Return the core's State, in which a turn may raise between one change and the next."""

    world = simulation.world

    def may_raise(in_change: bool) -> None:
        if world.current is not None:
            world.current.may_raise()
            if in_change:
                world.current.may_raise_in_change()

    class FallibleState(State):
        def note(self, key: Any) -> None:
            may_raise(self.is_changing)
            super().note(key)

        def touch(self, backend: str) -> None:
            may_raise(self.is_changing)
            super().touch(backend)

        def put_endpoint(self, record: Any) -> None:
            super().put_endpoint(record)
            may_raise(self.is_changing)

        def take_changes(self) -> Any:
            if simulation.broken == "turns" and world.current is not None:
                simulation.tries += 1
                world.current.raise_here()
            may_raise(in_change=False)
            return super().take_changes()

    return FallibleState


class _Sockets:
    """The module, for packets between hosts."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def socket(self, *_: Any) -> Socket:
        return Socket(self._world)


class Thread:
    """A pool of one thread: what it is given is done some time later, one after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_at = 0.0
        process = world.current
        assert process is not None
        self._process = process

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        begins = max(self._free_at, self._world.clock())
        self._free_at = begins + self._world.rng.uniform(0.0, 0.2)
        self._process.call_later(self._free_at - self._world.clock(), call, *args)


class OwnPulse:
    """See :class:`greenroom.actors.runtime.liveness.Pulse`."""

    def __init__(self, world: World, *, runs_user_code: bool = False) -> None:
        self._world = world
        self._seen = Seen(0, 0.0, 0.0, 0, runs_user_code)
        self.beat_at = world.clock()
        assert world.current is not None
        world.current.pulse = self

    def beat(self) -> None:
        self._seen = self._seen._replace(beats=self._seen.beats + 1, at=self._world.monotonic())
        self.beat_at = self._world.clock()

    def keep_beating(self, loop: SimProcess) -> None:
        self.beat()
        loop.call_later(TICK_S, self.keep_beating, loop)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        before, self._seen = self._seen, self._seen._replace(patience_s=seconds)
        yield
        self._seen = self._seen._replace(patience_s=before.patience_s)

    def read(self) -> Seen:
        return self._seen


class OtherPulse:
    """See :class:`greenroom.actors.runtime.liveness.OtherPulse`."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self.read = process.pulse.read

    def is_current(self) -> bool:
        return self._process.alive

    def doing(self, _thread: int) -> Doing:
        process = self._process
        is_busy = process.blocked_until > process.world.clock() and not process.is_stopped()
        return Doing.DISK if is_busy else Doing.STILL

    def heard(self) -> None:
        """Nothing is measured."""

    def close(self) -> None:
        """Nothing is open."""


OURS = (
    "greenroom.actors",
    "greenroom.core",
    "greenroom.persistence.writer",  # names stores
    "tests.simulation.hosts",
)
WINDOW = 512  # of a stream; two parts are ahead of a slow reader then


def _replacements(simulation: Simulation) -> list[tuple[Any, Any]]:
    world = simulation.world
    current = lambda: world.current  # noqa: E731

    def sleep(seconds: float) -> None:
        world.elapsed += seconds

    def send_signal(process: Any, _number: int) -> bool:
        found = world.local(process)
        if found is None:
            return False
        current().acts()
        world.kill(found)
        return True

    clocks = SimpleNamespace(
        monotonic=world.monotonic,
        monotonic_ns=lambda: int(1e9 * world.monotonic()),
        time=lambda: world.clock() + world.wall_offset,
        sleep=sleep,
    )
    tokens = SimpleNamespace(
        token_hex=lambda count: f"{world.rng.getrandbits(8 * count):0{2 * count}x}"
    )

    def find_pulse(process: Any) -> OtherPulse | None:
        found = world.local(process)
        return None if found is None or found.pulse is None else OtherPulse(found)

    nothing = lambda *_args, **_kwargs: None  # noqa: E731
    attach = lambda _port, _loop, arrived, _way: simulation.attach(arrived)  # noqa: E731
    here = lambda: 0 if current() is None else current().host  # noqa: E731
    bids: dict[str, Any] = {}  # by the host's address

    def bids_by_name() -> dict[str, Any]:
        names = {each.own_address: each.host_name for each in simulation.settings.values()}
        return {names[address]: bid for address, bid in bids.items()}

    return [
        (time, clocks),
        (random, world.rng),
        (secrets, tokens),
        (os, _Os(world)),
        (asyncio, Asyncio(world)),
        (ThreadPoolExecutor, lambda *_: Thread(world)),
        (base, SimpleNamespace(attach=attach)),
        (processes.this_process, lambda: current().identity),
        (processes.open_pidfd, world.open_pidfd),
        (processes.is_alive, lambda process: world.local(process) is not None),
        (processes.send_signal, send_signal),
        (pulse.Pulse, partial(OwnPulse, world)),
        (pulse.OtherPulse, SimpleNamespace(find=find_pulse)),
        (processes.command_line, lambda pid: world.processes[pid].role),
        (processes.kill_all, nothing),
        (processes.descendants, nothing),
        (records.RunRecords, lambda *_, **__: hosts.Records(simulation, here())),
        (settings.read_settings, lambda: simulation.settings[here()]),
        (ActorAddress, lambda address: address),
        (addresses.parse_address, hosts.parse_address),
        (socket, _Sockets(world)),
        (key_files.KeyFiles, hosts.Keys),
        (binding.host_id, lambda settings: f"the id of {settings.host_name}"),
        (leading.store_id, lambda settings: "shared" if settings.leaders else ""),
        (state_dir.write_private, lambda path, text: path.write_text(text)),
        (leading.word_file, lambda _: simulation.word_files[here()]),
        (candidate.LeaderElection, hosts.LeaderElection),
        (crash_loop.CrashLoop, lambda _, role: CrashLoop(simulation.run_dirs[here()], role)),
        (bidding.Bidding, hosts.bidding_in(bids)),
        (bidding.read_bids, lambda _: bids_by_name()),
        (logs.configure_logging, nothing),
        (logs.redirect_output, nothing),
        (user_logging.configure, nothing),
        (status_file.StatusFile, lambda *_: SimpleNamespace(changed=nothing, close=nothing)),
        (policies.Policies, lambda *_: SimpleNamespace(tidy=nothing, close=nothing)),
        (capacity.capacity_of, lambda _: CAPACITY),
        (FileStore, simulation.disk),
        (user_code.UserCode, lambda post: ScriptedCode(simulation, post)),
        (State, _fallible_state(simulation)),
        (Router, lambda draw, host: CheckedRouter(Router(draw, host), simulation)),
        (metrics.Metrics, Observer),
    ]


@contextlib.contextmanager
def replaced(simulation: Simulation) -> Iterator[None]:
    """Have every module of ours use the simulation's; one at a time."""
    by_id = {id(old): new for old, new in _replacements(simulation)}
    undo: list[tuple[Any, str, Any]] = [
        (streams, name, getattr(streams, name)) for name in ("WINDOW", "BODY_WINDOW")
    ]
    undo.append((writer, "ChangeLock", writer.ChangeLock))
    streams.WINDOW = streams.BODY_WINDOW = WINDOW
    writer.ChangeLock = lambda _: ChangeLock(simulation.disk)  # type: ignore[assignment, misc]
    for name, module in list(sys.modules.items()):
        if not name.startswith(OURS) or module is processes:
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in by_id:
                undo.append((module, attribute, value))
                setattr(module, attribute, by_id[id(value)])
    try:
        yield
    finally:
        for module, attribute, value in undo:
            setattr(module, attribute, value)
