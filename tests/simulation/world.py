"""The world that the shells run in: a clock, processes, messages between them, and their deaths.

Theory of operation. One thread, one random generator, one heap of events: the seed decides all. A
*process* has a queue of what is to be run there, messages and callbacks; it takes what has gathered
as one turn, then runs what was put off to the turn's end. While it is blocked (its disk is slow,
it was stopped) things gather. A process dies between two turns, or inside one: at the n-th thing
that it does to the outside, by :class:`Killed`, which nothing catches.

Messages of a pair arrive in order, at most once. What a process has sent when it dies arrives up to
some message, and not what is after it. Who sent to a dead process hears that it failed, also, at
times, of what the process had read; who hears that it arrived hears it later than the receiver.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from understudy.actors.messages import Process

Step = Callable[[], None]
TRACE = 120  # steps that a failure shows
QUICK, SLOW, SLUGGISH = (0.0001, 0.002), (0.002, 0.05), (0.05, 0.6)  # seconds that a message takes


class Killed(BaseException):
    """The process in which this is raised is dead."""


class InvariantError(Exception):
    """What must never be has come about."""


class Address:
    """Where messages go; opaque to the shells. One of an actor that is being made comes to be its.

    It cannot be hashed, as Thespian's cannot.
    """

    __slots__ = ("later", "number")
    __hash__ = None  # type: ignore[assignment]
    host = "127.0.0.1"

    def __init__(self, number: int | None, later: Address | None = None) -> None:
        self.number = number
        self.later = later

    @property
    def addressDetails(self) -> Address:  # Thespian's name
        return self

    def resolved(self) -> int | None:
        return self.number if self.later is None else self.later.number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self.resolved()
        return isinstance(other, Address) and mine is not None and mine == other.resolved()

    def __repr__(self) -> str:
        return f"<{self.resolved()}>"


class Timer:
    """What ``call_later`` returns."""

    __slots__ = ("call",)

    def __init__(self, call: Step | None) -> None:
        self.call = call

    def cancel(self) -> None:
        self.call = None

    def __call__(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


class Message:
    """A message under way."""

    __slots__ = ("body", "channel", "departs", "dropped", "on_failed", "on_sent", "sender", "to")

    def __init__(
        self,
        channel: Channel,
        sender: Address,
        to: int,
        body: Any,
        on_sent: Step | None,
        on_failed: Step | None,
        departs: float,
    ) -> None:
        self.channel = channel
        self.sender = sender
        self.to = to
        self.body = body
        self.on_sent = on_sent
        self.on_failed = on_failed
        self.departs = departs
        self.dropped = False


class Channel:
    """The way from one process to one address."""

    __slots__ = ("arrives", "outcome", "owner", "under_way")

    def __init__(self, owner: SimProcess) -> None:
        self.owner = owner
        self.arrives = 0.0  # the last message
        self.outcome = 0.0  # the last one told
        self.under_way: deque[Message] = deque()


class SimProcess:
    """One process, with the loop that its shells see as asyncio's."""

    def __init__(self, world: World, role: str) -> None:
        self.world = world
        self.role = role
        self.pid = next(world.pids)
        self.identity = Process(self.pid, self.pid, f"{world.rng.getrandbits(64):016x}")
        self.alive = True
        self.actor: Any = None
        self.numbers: list[int] = []
        self.queue: deque[Message | Step] = deque()
        self.turn_end: deque[Step] = deque()
        self.channels: dict[int, Channel] = {}
        self.blocked_until = 0.0
        self.dies_in: int | None = None  # after so many more things that it does
        self.died_at = float("inf")
        self.was_stopped = False  # for a while, as by SIGSTOP
        self.watchers: dict[int, tuple[SimProcess, Step]] = {}  # who wants to know of its end
        self._woken = False
        world.processes[self.pid] = self

    def __repr__(self) -> str:
        return f"{self.role}({self.pid})"

    # --- What the shells see of asyncio -----------------------------------------------------------

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        timer = Timer((lambda: call(*args)) if args else call)
        self.world.after(
            delay_s + self.world.elapsed, lambda: timer.call is None or self.enqueue(timer)
        )
        return timer

    def call_soon_threadsafe(self, call: Step) -> None:
        self.enqueue(call)

    def add_reader(self, fd: int, call: Step) -> None:
        self.world.watched[fd].watchers[fd] = (self, call)

    def remove_reader(self, fd: int) -> None:
        self.world.watched.pop(fd).watchers.pop(fd, None)

    # --- Turns ------------------------------------------------------------------------------------

    def enqueue(self, what: Message | Step) -> None:
        """Have something run here, when the process gets to it."""
        if not self.alive:
            if isinstance(what, Message):
                self.world.fail(what)
            return
        self.queue.append(what)
        if self._woken:
            return
        world = self.world
        if self.blocked_until > world.now or world.current is not None:
            self._wake_at(self.blocked_until)
        elif world.rng.random() < 0.2:
            self._wake_at(world.now + world.rng.random() * 0.004)
        else:
            world.turn(self)

    def _wake_at(self, time: float) -> None:
        self._woken = True
        self.world.at(time, self._wake)

    def _wake(self) -> None:
        if not self.alive:
            return
        if self.world.now < self.blocked_until:
            self._wake_at(self.blocked_until)
            return
        self._woken = False
        self.world.turn(self)

    def resume(self) -> None:
        """Go on, if it is stopped."""
        self.blocked_until = min(self.blocked_until, self.world.now)
        self._wake_at(self.world.now)

    def acts(self) -> None:
        """Count what the process does to the outside; die if it was the last of it."""
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise Killed


class World:
    """Everything, for one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.elapsed = 0.0  # within the present turn
        self.wall_offset = 1.7e9
        self.current: SimProcess | None = None
        self.processes: dict[int, SimProcess] = {}  # alive
        self.handlers: dict[int, tuple[SimProcess, Callable[[Any, Address], None]]] = {}
        self.watched: dict[int, SimProcess] = {}
        self.pids = itertools.count(100)
        self.numbers = itertools.count(1)
        self.fds = itertools.count(1)
        self.steps = 0
        self.slow_until = 0.0  # while messages are slow
        self.on_death: Callable[[SimProcess], None] = lambda _: None
        self._heap: list[tuple[float, int, Step]] = []
        self._order = itertools.count()
        self._trace: deque[tuple[float, str, Any]] = deque(maxlen=TRACE)

    # --- Time -------------------------------------------------------------------------------------

    def at(self, time: float, call: Step) -> None:
        heapq.heappush(self._heap, (time, next(self._order), call))

    def after(self, delay_s: float, call: Step) -> None:
        self.at(self.now + delay_s, call)

    def clock(self) -> float:
        """Return monotonic seconds, as the running process sees them."""
        return self.now + self.elapsed

    def run(self, until: float) -> None:
        """Let everything happen that is to happen until then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, call = heapq.heappop(heap)
            self.now = max(self.now, time)
            self.steps += 1
            call()
        self.now = max(self.now, until)

    def note(self, who: Any, what: Any) -> None:
        """Keep for the trace."""
        self._trace.append((self.now, repr(who), what))

    def trace(self) -> list[str]:
        """Return the last steps, one line each."""
        return [
            f"{at - 1000.0:10.4f} {who:18} {(what if isinstance(what, str) else repr(what))[:300]}"
            for at, who, what in self._trace
        ]

    # --- Turns and deaths -------------------------------------------------------------------------

    def turn(self, process: SimProcess) -> None:
        """Have a process take what has gathered."""
        self.current, self.elapsed = process, 0.0
        queue, turn_end = process.queue, process.turn_end
        try:
            while queue:
                self._take(process, queue.popleft())
            while turn_end:
                turn_end.popleft()()
        except Killed:
            self.kill(process)
        finally:
            process.blocked_until = max(process.blocked_until, self.now + self.elapsed)
            self.current, self.elapsed = None, 0.0

    def run_as(self, process: SimProcess, call: Step) -> None:
        """Run something in a process, as its next turn."""
        process.queue.append(call)
        self.turn(process)

    def _take(self, process: SimProcess, what: Message | Step) -> None:
        if not isinstance(what, Message):
            what()
            return
        entry = self.handlers.get(what.to)
        if entry is None or entry[0] is not process:
            self.fail(what)
            return
        self.note(process, what.body)
        if what.on_sent is not None or what.on_failed is not None:
            self.after(self.delay(), lambda: self._acknowledged(process, what))
        entry[1](what.body, what.sender)

    def kill(self, process: SimProcess) -> None:
        """End a process, as by SIGKILL."""
        if not process.alive:
            return
        self.note(process, "DIES")
        process.alive = False
        process.died_at = self.now
        del self.processes[process.pid]
        for number in process.numbers:
            self.handlers.pop(number, None)
        for what in process.queue:
            if isinstance(what, Message):
                self.fail(what)
        process.queue.clear()
        process.turn_end.clear()
        for channel in process.channels.values():
            self._cut(channel)
        for fd, (watcher, call) in process.watchers.items():
            self.after(
                self.rng.random() * 0.01, lambda w=watcher, c=call, f=fd: self._tell(w, c, f)
            )
        self.on_death(process)

    def _cut(self, channel: Channel) -> None:
        sent = [each for each in channel.under_way if each.departs <= self.now]
        kept = self.rng.randint(0, len(sent))
        for each in itertools.islice(channel.under_way, kept, None):
            each.dropped = True

    def _tell(self, watcher: SimProcess, call: Step, fd: int) -> None:
        if watcher.alive:
            watcher.enqueue(lambda: call() if fd in self.watched else None)

    def open_pidfd(self, process: Process) -> int | None:
        """Return what to watch for a process's end, None when it is gone."""
        found = self.processes.get(process.pid)
        if found is None:
            return None
        fd = next(self.fds)
        self.watched[fd] = found
        return fd

    # --- Messages ---------------------------------------------------------------------------------

    def listen(
        self, process: SimProcess, handler: Callable[[Any, Address], None], number: int = 0
    ) -> Address:
        """Give a process an address."""
        number = number or next(self.numbers)
        self.handlers[number] = (process, handler)
        process.numbers.append(number)
        return Address(number)

    def delay(self) -> float:
        """Return how long a message takes."""
        chance = self.rng.random()
        if self.now < self.slow_until:
            low, high = SLUGGISH if chance < 0.5 else SLOW
        else:
            low, high = QUICK if chance < 0.9 else SLOW if chance < 0.995 else SLUGGISH
        return low + (high - low) * self.rng.random()

    def send(
        self,
        process: SimProcess,
        sender: Address,
        to: int,
        body: Any,
        on_sent: Step | None,
        on_failed: Step | None,
    ) -> None:
        """Send from a process to an address."""
        process.acts()
        channel = process.channels.get(to)
        if channel is None:
            channel = process.channels[to] = Channel(process)
        departs = self.now + self.elapsed
        message = Message(channel, sender, to, body, on_sent, on_failed, departs)
        channel.under_way.append(message)
        channel.arrives = max(channel.arrives, departs + self.delay())
        self.at(channel.arrives, lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        message.channel.under_way.popleft()
        if message.dropped:
            return
        entry = self.handlers.get(message.to)
        if entry is None:
            self.fail(message)
        else:
            entry[0].enqueue(message)

    def _acknowledged(self, receiver: SimProcess, message: Message) -> None:
        if receiver.died_at < self.now and self.rng.random() < 0.5:
            self.fail(message)
        else:
            self._outcome(message, message.on_sent)

    def fail(self, message: Message) -> None:
        """Tell the sender that a message did not arrive."""
        self._outcome(message, message.on_failed)

    def _outcome(self, message: Message, call: Step | None) -> None:
        owner = message.channel.owner
        if call is None or not owner.alive:
            return
        channel = message.channel
        channel.outcome = max(channel.outcome, self.now + self.delay())
        self.at(channel.outcome, lambda: owner.enqueue(call))
