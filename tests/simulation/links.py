"""The links between hosts: messages that are late, cuts that heal, packets that are lost.

Theory of operation. A link leads one way, from one host to another. What a process sends over one
that is cut waits, as with TCP, and arrives after the heal. Unless its sender abandons it before:
then it never arrives, the sender hears that it failed, and whoever watches the other end that it
cannot be reached. A cut of the way back alone holds up what tells of arrivals, so what has arrived
may have failed for its sender. Which of two ends abandons the other first, and whether any does
before the heal, the seed decides; the other one hears of it when it can. On a link that loses,
messages and beats are late. Of the beats that meet a cut, some arrive after it, when
they mean nothing any more.

Who has sent to a process that died on another host, or watches one, hears of it over these links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.channels import Channel, Message
    from tests.simulation.world import SimProcess, Step, World

Answered = Callable[[bytes], None]

HOST = 1_000_000  # of numbers of addresses; those of a host's admin are below zero
OUTSIDE = 100_000  # where clients are, whose links nobody cuts
PORT = 1900
ABANDON_S = (1.6, 3.7)  # after which a process counts another as unreachable
LATE_S = (0.0, 2.0)  # for which the system of a dead process tries to deliver what that had sent
LOST_PACKETS = 0.3
RESEND_S = (0.2, 1.2)  # what is lost comes that much later
OLD_BEATS = 0.3  # how many of those that met a cut come later


def host_of(number: int) -> int:
    """Return the host of an address."""
    return number // HOST if number > 0 else -1 - number


def ip_of(host: int) -> str:
    return f"10.0.{(1 + host) // 256}.{(1 + host) % 256}"


def host_at(ip: str) -> int:
    """Return the host that has an address."""
    _, _, high, low = map(int, ip.split("."))
    return 256 * high + low - 1


class Watch:
    """What a process knows of one on another host.

    It is *open* while they are connected, or this one dials: whatever ends that is reported, and
    nothing after that until it sends something again, or the other one does.
    """

    __slots__ = ("callbacks", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self.callbacks: list[Callable[[bool], None]] = []


class Links:
    """All links of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cut: set[tuple[int, int]] = set()
        self._lossy_until: dict[tuple[int, int], float] = {}
        self._abandoned: set[tuple[SimProcess, SimProcess]] = set()  # one by the other

    # --- What goes wrong --------------------------------------------------------------------------

    def cut(self, directions: set[tuple[int, int]]) -> None:
        """Let nothing through from the first host of each pair to the second."""
        self._cut |= directions
        for process in list(self._world.processes.values()):
            for number in process.watches:
                if self._is_hindered(process.host, host_of(number)):
                    self._abandon_later(process, number)

    def heal(self, directions: set[tuple[int, int]]) -> None:
        """Let things through again."""
        self._cut -= directions
        for process in list(self._world.processes.values()):
            for channel in process.channels.values():
                if channel.stalled or channel.untold:
                    self._flush_later(channel)
            for number in process.watches:
                if number not in self._world.handlers:
                    self._later(lambda p=process, n=number: self.dead(p, n))
        for pair in sorted(self._abandoned, key=lambda pair: (pair[0].pid, pair[1].pid)):
            self._later(lambda pair=pair: self._hears(*pair))

    def heal_all(self) -> None:
        """Let everything through again."""
        self._lossy_until.clear()
        self.heal(set(self._cut))

    def lose(self, directions: set[tuple[int, int]], until: float) -> None:
        """Lose some of what goes this way, until then."""
        self._lossy_until.update(dict.fromkeys(directions, until))

    def is_cut(self, source: int, target: int) -> bool:
        """Return whether nothing gets from one host to another."""
        return (source, target) in self._cut

    def _is_hindered(self, one: int, other: int) -> bool:
        return (one, other) in self._cut or (other, one) in self._cut

    def _is_lossy(self, source: int, target: int) -> bool:
        return self._lossy_until.get((source, target), 0.0) > self._world.now

    # --- Messages ---------------------------------------------------------------------------------

    def lateness(self, source: int, target: int) -> float:
        """Return by how much a message is late for having been lost."""
        rng = self._world.rng
        if not self._is_lossy(source, target) or rng.random() > LOST_PACKETS:
            return 0.0
        return rng.uniform(*RESEND_S)

    def holds(self, message: Message) -> bool:
        """Return whether a message waits for a heal; if not, it may be delivered."""
        channel = message.channel
        source, target = channel.owner.host, host_of(message.to)
        if source == target:
            return False
        if not channel.stalled and not self.is_cut(source, target):
            self._connected(channel.owner, message.to)
            return False
        channel.stalled.append(message)
        if (watch := channel.owner.watches.get(message.to)) is not None:
            watch.is_open = True
        self._abandon_later(channel.owner, message.to)
        return True

    def holds_outcome(self, message: Message, call: Step) -> bool:
        """Return whether the way back is cut; then the outcome is reported after a heal."""
        channel = message.channel
        source, target = channel.owner.host, host_of(message.to)
        if source == target or not (channel.untold or self.is_cut(target, source)):
            return False
        channel.untold.append((message, call))
        self._abandon_later(channel.owner, message.to)
        return True

    def left(self, channel: Channel) -> None:
        """Let what a dead process sent over a cut arrive after all, if that heals soon."""
        if channel.stalled:
            channel.untold.clear()
            self._world.after(self._world.rng.uniform(*LATE_S), lambda: self._end(channel))

    def _end(self, channel: Channel) -> None:
        self._flush(channel)
        channel.stalled.clear()

    def _flush_later(self, channel: Channel) -> None:
        self._later(lambda: self._flush(channel))

    def _flush(self, channel: Channel) -> None:
        world, source = self._world, channel.owner.host
        while channel.stalled and not self.is_cut(source, host_of(channel.stalled[0].to)):
            message = channel.stalled.popleft()
            self._connected(channel.owner, message.to)
            world.deliver(message)
        while channel.untold and not self.is_cut(host_of(channel.untold[0][0].to), source):
            message, call = channel.untold.popleft()
            world.report(message, call)

    def _later(self, call: Step) -> None:
        self._world.after(self._world.rng.uniform(0.001, 0.6), call)

    # --- The other ends ---------------------------------------------------------------------------

    def watch(
        self, process: SimProcess, number: int, on_gone: Callable[[bool], None]
    ) -> Callable[[], None] | None:
        """Tell when the process of an address is gone, or cannot be reached; None if it is here."""
        if host_of(number) == process.host:
            return None
        watch = process.watches.setdefault(number, Watch())
        watch.callbacks.append(on_gone)
        watch.is_open = True
        self._world.after(self._world.rng.uniform(0.001, 0.02), lambda: self._dial(process, number))

        def cancel() -> None:
            if on_gone in watch.callbacks:
                watch.callbacks.remove(on_gone)

        return cancel

    def _dial(self, process: SimProcess, number: int) -> None:
        if self._is_hindered(process.host, host_of(number)):
            self._abandon_later(process, number)
        elif number not in self._world.handlers:
            self.dead(process, number)
        else:
            self._connected(process, number)

    def _connected(self, process: SimProcess, number: int) -> None:
        """Let both ends notice if the other goes; one that was abandoned hears of that first."""
        if (watch := process.watches.get(number)) is not None:
            watch.is_open = True
        entry = self._world.handlers.get(number)
        if entry is not None:
            self._hears(entry[0], process)
            for own in process.numbers:
                if (watch := entry[0].watches.get(own)) is not None:
                    watch.is_open = True

    def died(self, process: SimProcess) -> None:
        """Tell other hosts' processes of the death of one, as far as links allow."""
        for other in list(self._world.processes.values()):
            for number in process.numbers:
                watch = other.watches.get(number)
                if watch is not None and watch.is_open:
                    self._later(lambda p=other, n=number: self.dead(p, n))

    def dead(self, process: SimProcess, number: int) -> None:
        """Tell a process that there is none at an address, if the link allows it."""
        hindered = self._is_hindered(process.host, host_of(number))
        if number not in self._world.handlers and not hindered:
            self._lose(process, number, is_certain=True)

    def _abandon_later(self, process: SimProcess, number: int) -> None:
        def abandon() -> None:
            if self._is_hindered(process.host, host_of(number)):
                self._lose(process, number, is_certain=False)
                entry = self._world.handlers.get(number)
                if entry is not None and entry[0].alive:
                    self._abandoned.add((entry[0], process))
                    self._later(lambda: self._hears(entry[0], process))

        self._world.after(self._world.rng.uniform(*ABANDON_S), abandon)

    def _hears(self, process: SimProcess, other: SimProcess) -> None:
        """Tell a process that another gave it up, as that one's next session would."""
        if (process, other) in self._abandoned and not self._is_hindered(process.host, other.host):
            for number in other.numbers:
                self._lose(process, number, is_certain=False)

    def _lose(self, process: SimProcess, number: int, *, is_certain: bool) -> None:
        self._abandoned = {
            pair
            for pair in self._abandoned
            if pair[0] is not process or number not in pair[1].numbers
        }
        if not process.alive:
            return
        kind = "is dead" if is_certain else "cannot be reached"
        self._world.log(process, f"notices that {number} {kind}")
        channel = process.channels.get(number)
        if channel is not None:
            lost = [each for each in (*channel.stalled, *channel.under_way) if not each.dropped]
            lost = [message for message, _ in channel.untold] + lost
            channel.stalled.clear()
            channel.untold.clear()
            for message in lost:
                message.dropped = True
                self._world.report(message, message.on_failed)
        watch = process.watches.get(number)
        if watch is not None and (watch.is_open or is_certain):
            watch.is_open = False
            for on_gone in list(watch.callbacks):
                process.enqueue(lambda call=on_gone: call(is_certain))

    # --- Beats ------------------------------------------------------------------------------------

    def beat(self, process: SimProcess, number: int, beat: bytes, on_answer: Answered) -> None:
        """Send a beat to the process of an address; its answer comes back, or does not."""
        source, target = process.host, host_of(number)

        def arrived() -> None:
            process = self._answering(number)
            if process is not None:
                process.enqueue(lambda: answered(process.answer_beat(beat)))

        def answered(answer: bytes) -> None:
            if answer:
                self._carry_beat(target, source, lambda: process.enqueue(lambda: on_answer(answer)))

        self._carry_beat(source, target, arrived)

    def _answering(self, number: int) -> SimProcess | None:
        """Return the process of an address; for an admin's the host's proxy."""
        if number > 0:
            entry = self._world.handlers.get(number)
            return entry[0] if entry is not None and entry[0].alive else None
        return self._world.proxies.get(host_of(number))

    def _carry_beat(self, source: int, target: int, arrived: Step, *, again: bool = True) -> None:
        world = self._world
        if not self.is_cut(source, target):
            world.after(world.delay() + self.lateness(source, target), arrived)
        elif again and world.rng.random() < OLD_BEATS:
            old = lambda: self._carry_beat(source, target, arrived, again=False)  # noqa: E731
            world.after(world.rng.uniform(*ABANDON_S), old)


class BeatLink:
    """What a process beats over."""

    def __init__(self, links: Links, process: SimProcess, number: int, on_answer: Answered) -> None:
        self._links, self._process, self._number = links, process, number
        self._on_answer = on_answer
        self._is_closed = False

    def send(self, beat: bytes) -> None:
        self._links.beat(self._process, self._number, beat, self._answered)

    def close(self) -> None:
        self._is_closed = True

    def _answered(self, answer: bytes) -> None:
        if not self._is_closed:
            self._on_answer(answer)
