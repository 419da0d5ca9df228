"""The real loop of a process without other processes: time is the test's, what is sent is kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.loop import Callback, Loop, Timer, nothing
from greenroom.actors.runtime.machine import Machine
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.processes import this_process
from tests.support.virtual_time import VirtualTimeLoop

BEAT_TAKES_S = 0.01  # with its answer
PASSES = 4  # of the event loop, in which what one callback leads to is done


class Sent(NamedTuple):
    """What was sent, and how to say what became of it."""

    target: Any
    message: Any
    arrived: Callback
    failed: Callback


class Beats:
    """A link for beats to another host, which may be cut: then it keeps them."""

    def __init__(self, loop: LoneLoop, target: Any, on_answer: Callable[[bytes], None]) -> None:
        self.target = target
        self.on_answer = on_answer
        self.sent: list[bytes] = []
        self.kept: list[bytes] = []
        self.is_cut = loop.are_links_cut
        self.is_closed = False
        self._loop = loop

    def send(self, beat: bytes) -> None:
        self.sent.append(beat)
        if self.is_cut:
            self.kept.append(beat)
        elif answer := self._loop.answer_to(beat):
            self._loop.asyncio.call_later(BEAT_TAKES_S, self.on_answer, answer)

    def close(self) -> None:
        self.is_closed = True


class _EventLoop(VirtualTimeLoop):
    opened: ClassVar[list[_EventLoop]] = []  # kept: of a cycle, sockets may be collected first

    def __init__(self) -> None:
        super().__init__()
        self.opened.append(self)


def close_loops() -> None:
    """Close the loops of a test that is over, and what they watch."""
    while _EventLoop.opened:
        _EventLoop.opened.pop().close()
    while LoneMachine.opened:
        os.close(LoneMachine.opened.pop())


class TurnEnd:
    """The end of a turn, which comes soon."""

    on_error: Callable[[Exception, object], None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def add(self, callback: Callback) -> None:
        self._loop.call_soon(self._run, callback)

    def _run(self, callback: Callback) -> None:
        try:
            callback()
        except Exception as error:
            self.on_error(error, callback)


class LoneTransport:
    """A transport of this host that keeps what is sent; ``takes`` sees each message at once."""

    deliveries_at_once = 256
    starved_s = 0.0
    address: Any = "here"
    admin_address: Any = "a gate"

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or _EventLoop()
        self.turn_end = TurnEnd(self.loop)
        self.sent: list[Sent] = []
        self.takes: Callable[[Sent], None] = lambda _sent: None
        self.watching: list[Callable[[bool], None]] = []
        self.is_remote = False  # where the processes are that others watch

    def send(self, target: Any, message: Any, on_sent: Any, on_failed: Any) -> None:
        self.sent.append(Sent(target, message, on_sent or nothing, on_failed or nothing))
        self.takes(self.sent[-1])

    def send_loosely(self, target: Any, message: Any) -> None:
        self.send(target, message, None, None)

    def is_here(self, _target: Any) -> bool:
        return not self.is_remote

    def watch_remote(self, _target: Any, on_gone: Callable[[bool], None]) -> Callback | None:
        if not self.is_remote:
            return None
        self.watching.append(on_gone)
        return lambda: on_gone in self.watching and self.watching.remove(on_gone)

    def beat_link(self, _target: Any, _on_answer: Any) -> None:
        """Return None: it is on this host."""

    def answer_beats(self, _answer: Any) -> None:
        """Nothing beats."""

    def close(self) -> None:
        """There is nothing to close."""


class LoneMachine(Machine):
    """Every process lives until the test ends it, and each port has the same transport."""

    opened: ClassVar[set[int]] = set()  # descriptors

    def __init__(self, transport: LoneTransport) -> None:
        self.transport = transport
        self.monotonic = transport.loop.time  # type: ignore[method-assign]
        self.pidfds: dict[int, Process] = {}
        self.ended: set[Process] = set()  # those that were dead before they are watched
        self.arrived: Callable[[Any, Any], None]

    def open_pidfd(self, process: Process) -> int | None:  # type: ignore[override]
        if process in self.ended:
            return None
        number = os.eventfd(0)
        self.opened.add(number)
        self.pidfds[number] = process
        return number

    def close_pidfd(self, number: int) -> None:  # type: ignore[override]
        del self.pidfds[number]
        if number in self.opened:
            self.opened.remove(number)
            os.close(number)

    def watching(self) -> set[str]:
        """Return the incarnations of the processes whose ends are of interest."""
        return {process.incarnation for process in self.pidfds.values()}

    def end(self, process: Process) -> None:
        """Have those who watch a process see its end, in the next pass of their loop."""
        for number, known in self.pidfds.items():
            if known == process:
                os.eventfd_write(number, 1)

    def attach(self, _port: int, _loop: Any, arrived: Callable[[Any, Any], None], _way: Any) -> Any:  # type: ignore[override]
        self.arrived = arrived
        return self.transport


class LoneLoop(Loop):
    """A :class:`Loop` whose time stands still unless the test lets it pass; it begins with 100.

    One ``beside`` another is of another process of that machine, with the same clock.
    """

    def __init__(self, beside: LoneLoop | None = None) -> None:
        self.outside = transport = LoneTransport(beside and beside.asyncio)
        self.are_links_cut = False
        self.links: list[Beats] = []
        self.answer_to: Callable[[bytes], bytes] = lambda beat: beat  # of other hosts' processes
        self.tried: list[str] = []  # hosts of which it was asked whether they answer
        self._made: list[Timer] = []
        machine = LoneMachine(transport) if beside is None else beside.machine
        self.raised: list[Exception] = []  # by callbacks, and not by pass_time() yet
        super().__init__(transport, self.raised.append, machine)  # type: ignore[arg-type]
        if beside is None:
            self.stand_still(100.0)

    @property
    def outbox(self) -> list[Sent]:
        """What was sent so far, once all has been done that can be done now."""
        self.pass_time(0.0)
        return self.outside.sent

    @property
    def sent(self) -> list[tuple[Any, Any]]:
        """The targets and messages of :attr:`outbox`."""
        return [(each.target, each.message) for each in self.outbox]

    def arrive(self, message: Any, sender: Any = None) -> None:
        """Have a message arrive at the port that is on this loop."""
        self.machine.arrived(message, sender)  # type: ignore[attr-defined]

    def pass_time(self, seconds: float) -> None:
        """Let everything happen that happens within so many seconds; raise what that raises."""

        async def rest() -> None:
            await asyncio.sleep(seconds)
            for _ in range(PASSES):
                await asyncio.sleep(0)

        self.asyncio.run_until_complete(rest())
        if self.raised:
            raise self.raised.pop(0)

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which nothing runs here."""
        self.outside.loop.advance(seconds)  # type: ignore[attr-defined]

    def due(self) -> list[float]:
        """Return in how many seconds there is something to be done."""
        left = [each.when() - self.asyncio.time() for each in self._made if not each.cancelled()]
        return [seconds for seconds in left if seconds > 1e-6]  # what is due has run

    def watched(self) -> list[Process]:
        """Return the processes whose ends are of interest on this machine."""
        return [*self.machine.pidfds.values()]  # type: ignore[attr-defined]

    def end(self, process: Process) -> None:
        """End a process, as far as this machine sees."""
        self.machine.end(process)  # type: ignore[attr-defined]
        self.pass_time(0.0)

    # --- What a Loop does, noted ------------------------------------------------------------------

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        timer = super().call_later(delay_s, callback)
        self._made.append(timer)
        return timer

    def try_host(self, gate: str) -> None:
        self.tried.append(gate)

    def beat_link(self, target: Any, on_answer: Callable[[bytes], None]) -> Beats:
        self.links.append(Beats(self, target, on_answer))
        return self.links[-1]


class LonePort(Port):
    """A :class:`Port` on a :class:`LoneLoop`, to a system of which the test says what it does."""

    def __init__(self) -> None:
        self.lone = LoneLoop()
        super().__init__(1900, this_process(), self.lone.asyncio, machine=self.lone.machine)
        self.loop = self.lone
