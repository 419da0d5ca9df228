"""The machine that simulated processes run on, and all else that is simulated around the shells.

The real controller, proxies, replicas, ports, finders and callers run here unchanged. What they
have of the operating system and of the actor system comes from their loop's
:class:`~greenroom.actors.runtime.machine.Machine`; here that is a :class:`SimMachine`. Clocks,
random numbers and the end of a process are the standard library's: a simulation has the interpreter
for itself, and replaces those functions of the library while it runs. What is left are classes of
ours with threads, files or user code in them. Each stands in :func:`_classes`, by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from greenroom.actors.runtime.liveness import Seen, SilenceWatch
from greenroom.actors.runtime.machine import Machine
from greenroom.actors.transport.admission import Trouble
from greenroom.core.lifecycle.state import State
from greenroom.core.routing.router import Router
from greenroom.core.silence import TICK_S, Doing
from greenroom.persistence.locations import location_at
from tests.simulation import hosts, threads
from tests.simulation.channels import Address
from tests.simulation.checked_router import CheckedRouter
from tests.simulation.coroutines import running_loop, wait_for, yield_turn
from tests.simulation.database import Database
from tests.simulation.links import BeatLink, host_of
from tests.simulation.scripted_code import ScriptedCode
from tests.simulation.shared_disk import LOG_SIZES, change_lock
from tests.simulation.world import Killed, SimProcess, World

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

CAPACITY = {"num_cpus": 64.0, "num_gpus": 0.0, "memory": 2.0**36}
WINDOW = 512  # of a stream; two parts are ahead of a slow reader then
LARGE = 21  # bytes of an answer, from which it leaves in parts: some have more, and some fewer


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for what the simulation has no need of."""


class Mailbox:
    """What loops and ports need of a mailbox, for one address of a process."""

    starved_s = 0.0

    def __init__(
        self, simulation: Simulation, process: SimProcess, address: Address, admin: int
    ) -> None:
        self.loop = process
        self.deliveries_at_once = simulation.deliveries_at_once
        self.address = address
        self.admin_address = Address(admin)
        self.turn_end = TurnEnd(simulation.world, process)
        self._world = simulation.world

    def send(self, target: Any, message: Any, on_sent: Any, on_failed: Any) -> None:
        if isinstance(target, Later) and target.resolved() is None:
            target.waiting.append((message, on_sent, on_failed))
        else:
            to = target.resolved()
            self._world.send(self.loop, self.address, to, message, on_sent, on_failed)

    def send_loosely(self, target: Any, message: Any) -> None:
        self.send(target, message, None, None)

    def is_here(self, target: Any) -> bool:
        return host_of(target.resolved()) == self.loop.host

    def watch_remote(self, target: Any, on_gone: Callable[[bool], None]) -> Any:
        return self._world.links.watch(self.loop, target.resolved(), on_gone)

    def beat_link(self, target: Any, on_answer: Callable[[bytes], None]) -> BeatLink | None:
        number = target.resolved()
        if host_of(number) == self.loop.host:
            return None
        return BeatLink(self._world.links, self.loop, number, on_answer)

    def answer_beats(self, answer: Callable[[bytes], bytes]) -> None:
        self.loop.answer_beat = answer

    def try_host(self, _gate: Any) -> None:
        """Do nothing: whoever watches learns of the end of its host at once."""

    def trouble_with(self, _gate: Any) -> Trouble:
        return Trouble("nobody answers")

    def close(self) -> None:
        """Nothing is needed."""


class TurnEnd:
    """What a process puts off to the end of its turn."""

    on_error: Callable[[Exception, object], None]

    def __init__(self, world: World, process: SimProcess) -> None:
        self._world, self._process = world, process

    def add(self, callback: Callable[[], None]) -> None:
        def run() -> None:
            try:
                callback()
            except Exception as error:
                self.on_error(error, callback)

        self._process.turn_end.append(run)
        if self._world.current is not self._process:
            self._process.enqueue(lambda: None)


class Later(Address):
    """The address of an actor that has been asked for and is not up yet."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        super().__init__(None)
        self.waiting: list[tuple[Any, Any, Any]] = []


class Manager:
    """What an actor has of Thespian."""

    def __init__(self, simulation: Simulation, process: SimProcess, address: Address) -> None:
        self.address = address
        admin = simulation.admin_number(process.host)
        self.mailbox = Mailbox(simulation, process, address, admin)
        self.transport = SimpleNamespace(mailbox=self.mailbox)
        self._simulation = simulation
        self._process = process

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
                    self.mailbox.send(later, message, on_sent, on_failed)
                elif on_failed is not None:
                    on_failed()
            self._process.raises_in = raises_in

        self._simulation.ask_admin(self._process, self.address, actor_class, global_name, answered)
        return later


def _fallible_state(simulation: Simulation) -> type[State]:
    """Return the core's State, in which a turn may raise between one change and the next."""

    world = simulation.world

    def may_raise(in_change: bool) -> None:
        if world.current is not None:
            world.current.may_raise()
            if in_change:
                world.current.may_raise_in_change()

    class FallibleState(State):
        def define(self, key: Any, wanted: Any, change: Any) -> bool:
            may_raise(in_change=True)
            changed = super().define(key, wanted, change)
            may_raise(in_change=True)
            return changed

        def save_backend(self, backend: Any) -> None:
            may_raise(in_change=False)
            super().save_backend(backend)

        def take_changes(self) -> Any:
            if simulation.broken == "turns" and world.current is not None:
                simulation.tries += 1
                world.current.raise_here()
            may_raise(in_change=False)
            return super().take_changes()

    return FallibleState


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
        try:
            yield
        finally:
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


class SimMachine(Machine):
    """The machine of whichever simulated process runs."""

    close_pidfd = staticmethod(nothing)
    configure_logging = staticmethod(nothing)
    kill_descendants = staticmethod(nothing)
    address_of = staticmethod(hosts.parse_address)

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world

    @property
    def _current(self) -> SimProcess:
        assert self._world.current is not None
        return self._world.current

    def monotonic(self) -> float:  # type: ignore[override]
        return self._world.monotonic()

    def this_process(self) -> Any:
        return self._current.identity

    def is_alive(self, process: Any) -> bool:
        return self._world.local(process) is not None

    def send_signal(self, process: Any, _number: int) -> bool:
        found = self._world.local(process)
        if found is None:
            return False
        self._current.acts()
        self._world.kill(found)
        return True

    def open_pidfd(self, process: Any) -> int | None:
        return self._world.open_pidfd(process)

    def read_settings(self) -> Any:
        return self._simulation.settings[self._current.host]

    def run_records(self, *_: Any, **__: Any) -> Any:
        return hosts.Records(self._simulation, self._current.host)

    def pulse(self, *, runs_user_code: bool = False) -> Any:
        return OwnPulse(self._world, runs_user_code=runs_user_code)

    def silence_watch(self, limit_s: float) -> SilenceWatch:
        find: Any = self._pulse_of
        role = lambda pid: self._world.processes[pid].role  # noqa: E731
        return SilenceWatch(limit_s, find, self.send_signal, role)

    def _pulse_of(self, process: Any) -> OtherPulse | None:
        found = self._world.local(process)
        return None if found is None or found.pulse is None else OtherPulse(found)

    def attach(self, _port: int, _loop: Any, arrived: Callable[[Any, Any], None], _way: Any) -> Any:
        return self._simulation.attach(arrived)


def _library(world: World) -> list[tuple[Any, str, Any]]:
    """Return what the standard library's functions are while a simulation runs."""

    def sleep(seconds: float) -> None:
        world.elapsed += seconds

    def token_hex(count: int) -> str:
        return f"{world.rng.getrandbits(8 * count):0{2 * count}x}"

    def end(code: int) -> None:
        world.log(world.current, f"exits with {code}")
        raise Killed

    def kill(_pid: int, _number: int) -> None:
        raise Killed

    return [
        (time, "monotonic", world.monotonic),
        (time, "monotonic_ns", lambda: int(1e9 * world.monotonic())),
        (time, "time", lambda: world.clock() + world.wall_offset),
        (time, "sleep", sleep),
        (random, "random", world.rng.random),
        (secrets, "token_hex", token_hex),
        (os, "_exit", end),
        (os, "kill", kill),
        (asyncio, "get_running_loop", partial(running_loop, world)),
        (asyncio, "sleep", yield_turn),
        (asyncio, "wrap_future", lambda future: future),
        (asyncio, "wait_for", wait_for),
    ]


def _classes(simulation: Simulation) -> dict[str, Any]:
    """Return what stands in for classes and functions of ours, by their full names."""
    world, disk = simulation.world, simulation.disk

    def without_effect(*methods: str) -> Any:
        return lambda *_: SimpleNamespace(**dict.fromkeys(methods, nothing))

    is_database = isinstance(disk, Database)
    location = location_at if is_database else lambda _: disk
    in_actors = {
        "cluster.key_rotation.KeyFiles": hosts.Keys,
        "cluster.leader_lease.location_at": location,
        "cluster.membership.capacity_of": lambda _: CAPACITY,
        "controller.held_store.location_at": location,
        "controller.controller.location_at": location,
        "controller.active.Policies": without_effect("tidy", "close"),
        "controller.active.StatusFile": without_effect("changed", "close"),
        "controller.active.capacity_of": lambda _: CAPACITY,
        "controller.read_only.location_at": location,
        "cluster.controller_seeker.LeaderElection": hosts.LeaderElection,
        "proxy.dispatcher.Router": lambda draw, host: CheckedRouter(Router(draw, host), simulation),
        "replica.replica.UserCode": partial(ScriptedCode, simulation),
        "controller.controller.SharedMetrics": without_effect("keep_showing"),
        "replica.replica.SharedMetrics": without_effect("keep_showing"),
        "replica.replica.redirect_output": nothing,
        "replica.comparisons.ThreadPoolExecutor": lambda *_: Thread(world),
        "replica.data_plane.LARGE": LARGE,
        "replica.logging.configure": nothing,
        "replica.wear.memory_bytes": simulation.memory_bytes,
        "caller.streams.WINDOW": WINDOW,
        "caller.streams.BODY_WINDOW": WINDOW,
    }
    if is_database:
        in_actors |= {
            "cluster.leader_lease.threading": SimpleNamespace(
                Thread=partial(threads.Thread, world), Event=partial(threads.Event, world)
            ),
            "cluster.leader_lease.ThreadPoolExecutor": lambda *_: threads.SimThread(world),
        }
    stand_ins = disk.stand_ins() if is_database else {}
    return (
        stand_ins
        | {f"greenroom.actors.{name}": new for name, new in in_actors.items()}
        | {
            "greenroom.core.cluster.cluster.State": _fallible_state(simulation),
            "greenroom.persistence.claims.change_lock": lambda _: change_lock(disk),
        }
        | {f"greenroom.persistence.filesystem.{name}": size for name, size in LOG_SIZES.items()}
    )


@contextlib.contextmanager
def replaced(simulation: Simulation) -> Iterator[None]:
    """Run a simulation's world in this interpreter, one at a time."""
    with contextlib.ExitStack() as stack:
        for name, new in _classes(simulation).items():
            stack.enter_context(mock.patch(name, new))
        for module, name, new in _library(simulation.world):
            stack.enter_context(mock.patch.object(module, name, new))
        yield
