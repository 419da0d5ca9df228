"""The world that the shells run in: a clock, processes, messages between them, and their deaths.

Theory of operation. One thread, one random generator, one heap of events: the seed decides all. A
*process* has a queue of what is to be run there, messages and callbacks; it takes what has gathered
as one turn, then runs what was put off to the turn's end. While it is blocked (its disk is slow,
it was stopped) things gather. A process dies between two turns, or inside one: at the n-th thing
that it does to the outside, by :class:`Killed`, which nothing catches.

Messages of a pair arrive in order, at most once. What a process has sent when it dies arrives up to
some message, and not what is after it. Who sent to a dead process hears that it failed, also, at
times, of what the process had read; who hears that it arrived hears it later than the receiver.
Between hosts there are links, which may be cut (links.py), and clocks differ.

A process can also be stopped in the midst of a turn, as by SIGSTOP: :meth:`World.stand_still` lets
the rest of the world go on from there, before it returns.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from greenroom.actors.messages.queries import Process
from tests.simulation.channels import Address, Channel, Message
from tests.simulation.coroutines import SimFuture, Task
from tests.simulation.links import HOST, Links, Watch, host_of

if TYPE_CHECKING:
    from tests.simulation.threads import SimThread

Step = Callable[[], None]
SOON_S = 0.002
LEFT_S = 0.02  # within which what a dead controller has sent is with whom it is for
TRACE = 120  # steps that a failure shows
QUICK, SLOW, SLUGGISH = (0.0001, 0.002), (0.002, 0.05), (0.05, 0.6)  # seconds that a message takes


class Killed(BaseException):
    """The process in which this is raised is dead."""


class InvariantError(Exception):
    """What must never be has come about."""


class InjectedError(Exception):
    """What a turn may raise at any place, as if there were a mistake in it."""


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


class SimProcess:
    """One process, with the loop that its shells see as asyncio's."""

    def __init__(self, world: World, role: str, host: int = 0) -> None:
        self.world = world
        self.role = role
        self.host = host
        self.pid = next(world.pids)
        self.identity = Process(self.pid, self.pid, f"{world.rng.getrandbits(64):016x}")
        self.alive = True
        self.actor: Any = None
        self.record: dict[str, Any] = {}  # that a replica leaves on its host
        self.numbers: list[int] = []
        self.queue: deque[Message | Step] = deque()
        self.turn_end: deque[Step] = deque()
        self.channels: dict[int, Channel] = {}
        self.watches: dict[int, Watch] = {}  # of addresses on other hosts
        self.blocked_until = 0.0
        self.dies_in: int | None = None  # after so many more things that it does
        self.raises_in: int | None = None  # after so many more, and calls of its core
        self.raises_in_change: int | None = None  # after so many more steps of requests
        self.stands_in: tuple[int, float] | None = None  # after how many things, for how long
        self.died_at = float("inf")
        self.stands = False  # in the midst of a turn
        self.was_stopped = False  # for a while, as by SIGSTOP
        self.stopped: tuple[float, float] = (0.0, 0.0)  # from when until when, the last time
        self.pulse: Any = None  # as others see it
        self.watchers: dict[int, tuple[SimProcess, Step]] = {}  # who wants to know of its end
        self.answer_beat: Callable[[bytes], bytes] = lambda beat: beat
        self._woken = False
        world.processes[self.pid] = self
        if role == "proxy":
            world.proxies[host] = self

    def __repr__(self) -> str:
        return f"{self.role}({self.pid})"

    # --- What the shells see of asyncio -----------------------------------------------------------

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        timer = Timer((lambda: call(*args)) if args else call)
        if (rate := self.world.clocks[self.host][1]) != 1.0:
            delay_s = delay_s / rate + 1e-6  # never early, whatever is lost by rounding
        self.world.after(
            delay_s + self.world.elapsed, lambda: timer.call is None or self.enqueue(timer)
        )
        return timer

    def time(self) -> float:
        return self.world.monotonic()

    def call_soon_threadsafe(self, call: Step) -> None:
        self.enqueue(call)

    def create_task(self, coroutine: Coroutine[Any, None, None]) -> Task:
        return Task(coroutine, lambda _: None)

    def create_future(self) -> SimFuture:
        return SimFuture(self)

    def add_reader(self, fd: int, call: Step) -> None:
        self.world.watched[fd].watchers[fd] = (self, call)

    def remove_reader(self, fd: int) -> None:
        self.world.watched.pop(fd).watchers.pop(fd, None)

    # --- Turns ------------------------------------------------------------------------------------

    def enqueue(self, what: Message | Step) -> None:
        """Run something here, when the process gets to it."""
        if not self.alive:
            if isinstance(what, Message):
                self.world.fail(what)
            return
        self.queue.append(what)
        if self._woken or self.stands:
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
        if not self.stands:  # else what is there is taken when the turn goes on
            self._mix()
            self.world.turn(self)

    def _mix(self) -> None:
        """Mix what gathered of all connections; the order within each stays."""
        if len(self.queue) < 2:
            return
        queues: dict[Channel | None, deque[Message | Step]] = {}
        for what in self.queue:
            channel = what.channel if isinstance(what, Message) else None
            queues.setdefault(channel, deque()).append(what)
        if len(queues) == 1:
            return
        self.queue.clear()
        left = list(queues.values())
        while left:
            chosen = self.world.rng.choice(left)
            self.queue.append(chosen.popleft())
            if not chosen:
                left.remove(chosen)

    def go_on(self) -> None:
        """Take what has gathered when the turn is over."""
        if not self._woken:
            self._wake_at(self.blocked_until)

    def resume(self) -> None:
        """Go on, if it is stopped; one that waits for a disk waits on."""
        if self.blocked_until <= self.stopped[1]:
            self.blocked_until = min(self.blocked_until, self.world.now)
            self._wake_at(self.world.now)
        self.stopped = (self.stopped[0], min(self.stopped[1], self.world.now))

    def stop(self, seconds: float) -> None:
        """Stand still for so long, as by SIGSTOP and SIGCONT."""
        self.was_stopped = True
        since, until = self.stopped if self.is_stopped() else (self.world.now, 0.0)
        self.stopped = (since, max(until, self.world.now + seconds))
        self.blocked_until = max(self.blocked_until, self.world.now + seconds)

    def is_stopped(self) -> bool:
        """Return whether it stands still now."""
        return self.world.clock() < self.stopped[1]

    def acts(self) -> None:
        """Count what the process does to the outside; die if it was the last of it, or stand."""
        self.may_raise()
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise Killed
        if self.stands_in is not None:
            left, seconds = self.stands_in
            self.stands_in = (left - 1, seconds) if left else None
            if not left:
                self.world.stand_still(self, seconds)

    def may_raise(self) -> None:
        """Count a place in which there may be a mistake; raise if it is the one."""
        if self.raises_in is not None:
            self.raises_in -= 1
            if self.raises_in < 0:
                self.raises_in = None
                self.raise_here()

    def may_raise_in_change(self) -> None:
        """Count such a place amid a client's request."""
        if self.raises_in_change is not None:
            self.raises_in_change -= 1
            if self.raises_in_change < 0:
                self.raises_in_change = None
                self.raise_here()

    def raise_here(self) -> None:
        self.world.log(self, "raises in a turn")
        self.world.raised += 1
        raise InjectedError


class World:
    """Everything, for one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.elapsed = 0.0  # within the present turn
        self.wall_offset = 1.7e9
        self.current: SimProcess | None = None
        self.thread: SimThread | None = None  # of the current process, if it is not its main one
        self.threads: list[SimThread] = []
        self.processes: dict[int, SimProcess] = {}  # alive
        self.proxies: dict[int, SimProcess] = {}  # of these, by host
        self.handlers: dict[int, tuple[SimProcess, Callable[[Any, Address], None]]] = {}
        self.watched: dict[int, SimProcess] = {}
        self.pids = itertools.count(100)
        self.numbers = itertools.count(1)
        self.fds = itertools.count(1)
        self.links = Links(self)
        self.clocks: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 1.0))  # by host
        self.steps = 0
        self.raised = 0  # turns that were made to fail
        self.slow_until = 0.0  # while messages are slow
        self.on_death: Callable[[SimProcess], None] = lambda _: None
        self.on_order: Callable[[SimProcess, Any, Step], None] = lambda _p, _o, handle: handle()
        self._heap: list[tuple[float, int, Step]] = []
        self._order = itertools.count()
        self._trace: deque[tuple[float, str, Any]] = deque(maxlen=TRACE)

    # --- Time -------------------------------------------------------------------------------------

    def at(self, time: float, call: Step) -> None:
        heapq.heappush(self._heap, (time, next(self._order), call))

    def after(self, delay_s: float, call: Step) -> None:
        self.at(self.now + delay_s, call)

    def clock(self) -> float:
        """Return the world's time, as it is for the running process."""
        return self.now + self.elapsed

    def monotonic(self, process: SimProcess | None = None) -> float:
        """Return monotonic seconds by the clock of a process's host, by default the running one's.

        Such a clock has a beginning and a rate of its own; all rates are about the same.
        """
        process = process or self.current
        offset, rate = self.clocks[0 if process is None else process.host]
        return offset + rate * self.clock()

    def run(self, until: float) -> None:
        """Let everything happen that is to happen until then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, call = heapq.heappop(heap)
            self.now = max(self.now, time)
            self.steps += 1
            call()
        self.now = max(self.now, until)

    def log(self, who: Any, what: Any) -> None:
        """Keep for the trace."""
        self._trace.append((self.now, repr(who), what))

    def trace(self) -> list[str]:
        """Return the last steps, one line each."""
        return [
            f"{at - 1000.0:10.4f} {who:18} {_described(what)[:300]}"
            for at, who, what in self._trace
        ]

    # --- Turns and deaths -------------------------------------------------------------------------

    def turn(self, process: SimProcess) -> None:
        """Let a process take what has gathered."""
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
            if queue:  # it stood still at the turn's end
                process.go_on()

    def stand_still(self, process: SimProcess, seconds: float) -> None:
        """Stop the running process where it is, and let all others go on meanwhile.

        It stands for longer where another one does too by then: that one goes on first.
        """
        if seconds:
            self.log(process, f"is stopped in the midst of a turn, for {seconds:.3f} s")
            process.was_stopped = True
            process.stopped = (self.now, self.clock() + seconds)  # its turn has just begun
        process.stands = True
        process.blocked_until = self.clock() + seconds
        self.current, self.elapsed = None, 0.0
        try:
            self.run(process.blocked_until - 1e-6)
        finally:
            self.current, self.elapsed, process.stands = process, 0.0, False
        if not process.alive:
            raise Killed

    def catch_up(self, process: SimProcess) -> None:
        """Let all other processes catch up with the running one's time."""
        if self.elapsed > SOON_S:
            self.stand_still(process, 0.0)

    def stand_until(
        self, process: SimProcess, is_over: Callable[[], bool], deadline: float
    ) -> None:
        """Let all others go on until something has come about, or until then."""

        def ends_at() -> float:
            return max(process.stopped[1], self.now if is_over() else deadline)

        while self.clock() < (until := ends_at()):
            coming = self._heap[0][0] if self._heap else until
            self.elapsed = max(self.elapsed, min(coming, until) + 2e-6 - self.now)
            self.stand_still(process, 0.0)

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
        self.log(process, what.body)
        if what.on_sent is not None or what.on_failed is not None:
            self.after(self.delay(), lambda: self._acknowledged(process, what))
        if getattr(what.body, "epoch", 0):
            self.on_order(process, what.body, lambda: entry[1](what.body, what.sender))
        else:
            entry[1](what.body, what.sender)

    def kill(self, process: SimProcess) -> None:
        """End a process, as by SIGKILL."""
        if not process.alive:
            return
        self.log(process, "DIES")
        process.alive = False
        process.died_at = self.now
        del self.processes[process.pid]
        if self.proxies.get(process.host) is process:
            del self.proxies[process.host]
        for number in process.numbers:
            self.handlers.pop(number, None)
        for what in process.queue:
            if isinstance(what, Message):
                self.fail(what)
        process.queue.clear()
        process.turn_end.clear()
        for channel in process.channels.values():
            self._cut(channel)
        self.links.died(process)
        for fd, (watcher, call) in process.watchers.items():
            self.after(
                self.rng.random() * 0.01, lambda w=watcher, c=call, f=fd: self._report(w, c, f)
            )
        self.on_death(process)

    def _cut(self, channel: Channel) -> None:
        sent = [each for each in channel.under_way if each.departs <= self.now]
        is_here = not sent or host_of(sent[0].to) == channel.owner.host
        if channel.owner.role == "controller" and is_here:  # before the next one has begun
            sent = [each for each in sent if each.arrives <= self.now + LEFT_S]
        kept = self.rng.randint(0, len(sent))
        for each in itertools.islice(channel.under_way, kept, None):
            each.dropped = True
        self.links.left(channel)

    def _report(self, watcher: SimProcess, call: Step, fd: int) -> None:
        if watcher.alive:
            watcher.enqueue(lambda: call() if fd in self.watched else None)

    def open_pidfd(self, process: Process) -> int | None:
        """Return what to watch for a process's end, None when it is gone."""
        found = self.local(process)
        if found is None:
            return None
        fd = next(self.fds)
        self.watched[fd] = found
        return fd

    def local(self, process: Process) -> SimProcess | None:
        """Return a process by its pid, which says nothing on other hosts than its own."""
        found = self.processes.get(process.pid)
        is_here = found is not None and self.current is not None and found.host == self.current.host
        return found if is_here else None

    # --- Messages ---------------------------------------------------------------------------------

    def listen(
        self, process: SimProcess, handler: Callable[[Any, Address], None], number: int = 0
    ) -> Address:
        """Give a process an address."""
        number = number or process.host * HOST + next(self.numbers)
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
        message = Message(channel, sender, to, body, departs)
        message.on_sent, message.on_failed = on_sent, on_failed
        channel.under_way.append(message)
        delay = self.delay()
        if (host := host_of(to)) != process.host:
            delay += self.links.lateness(process.host, host)
        channel.arrives = message.arrives = max(channel.arrives, departs + delay)
        self.at(channel.arrives, lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        message.channel.under_way.popleft()
        if not (message.dropped or self.links.holds(message)):
            self.deliver(message)

    def deliver(self, message: Message) -> None:
        """Give a message to its receiver, if there is one."""
        entry = self.handlers.get(message.to)
        if entry is None:
            self.fail(message)
            if (owner := message.channel.owner).host != host_of(message.to):
                self.links.dead(owner, message.to)
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
        if call is not None and not message.dropped and not self.links.holds_outcome(message, call):
            self.report(message, call)

    def report(self, message: Message, call: Step | None) -> None:
        """Tell the sender of a message what came of it."""
        owner = message.channel.owner
        if call is None or not owner.alive:
            return
        channel = message.channel
        channel.outcome = max(channel.outcome, self.now + self.delay())
        self.at(channel.outcome, lambda: owner.enqueue(call))


def _described(what: Any) -> str:
    """Return a text that is the same in each run, as Thespian's own messages' are not."""
    if isinstance(what, str):
        return what
    return type(what).__name__ if type(what).__repr__ is object.__repr__ else repr(what)
