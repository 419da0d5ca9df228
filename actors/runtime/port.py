"""The place in the actor system of a process that is no actor: messages by class, actors by name.

Host processes and HTTP workers have their :class:`Port` on the asyncio loop that they run on.
Scripts block, so theirs is on a loop of its own, on a thread: :class:`ThreadPort`. A
:class:`Finder` follows an actor of a given name through its deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # its own class until 3.11
from dataclasses import dataclass
from functools import partial
from typing import Any

from thespian.system import isInternalActorSystemMessage
from thespian.system.messages.admin import PendingActor, PendingActorResponse, QueryAck, QueryExists

from greenroom.actors.messages.control import Identify, IdentifyReply
from greenroom.actors.messages.queries import Address, AskProxy, AskProxyReply, Process
from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.machine import MACHINE, Machine
from greenroom.actors.transport.addresses import Way
from greenroom.actors.transport.admission import Trouble
from greenroom.actors.transport.descriptors import close_loop
from greenroom.core.errors import NotRunningError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
BUSY_S = 20.0  # that an admin may take for its answer while it starts hundreds of replicas
OPEN_RETRY_S = 0.02
FIND_RETRY_S = 0.3
STOP_TIMEOUT_S = 5.0
ASK_AGAIN_S = 1.0
MAX_UNANSWERED = 10_000  # more than replicas are asked for at once
CONTROLLER = ("greenroom.actors.controller.actor.Controller", "greenroom.controller")
PROXY = ("greenroom.actors.proxy.actor.Proxy", "greenroom.proxy")


@dataclass(eq=False)
class _Probe:
    """A question whether an admin is there, and those that have not said no."""

    on_probed: Callable[[bool], None]
    gates: set[str]


class Port:
    """This process's place in the actor system, on ``loop``, whose thread everything runs on."""

    def __init__(
        self,
        admin_port: int,
        process: Process,
        loop: asyncio.AbstractEventLoop,
        way: Way | None = None,
        on_error: Callable[[Exception], None] | None = None,
        machine: Machine = MACHINE,
    ) -> None:
        self.process = process
        self.admin_port = admin_port
        self._given: list[Address] = [
            machine.address_of(gate) for gate in (way.gates if way is not None else ())
        ]
        self._learnt: list[Address] = []
        self._mailbox = machine.attach(admin_port, loop, self._arrived, way)
        self.loop = Loop(self._mailbox, on_error, machine)
        self.address: Address = self._mailbox.address
        self._handlers: dict[type, Callable[[Any, Address], None]] = {
            IdentifyReply: self._identified,
            AskProxyReply: lambda message, _: self._answered(message.request_id, message.value),
            PendingActorResponse: self._located,
            QueryAck: self._probe_answered,
        }
        self._instances = itertools.count(1)
        # By the id of what was asked. The oldest go, for the dead never answer.
        self._unanswered: dict[int | str, Callable[..., None]] = {}
        self._probing: deque[_Probe] = deque(maxlen=MAX_UNANSWERED)

    def on(self, message_class: type, handler: Callable[[Any, Address], None]) -> None:
        """Have ``handler(message, sender)`` called for this class."""
        self._handlers[message_class] = handler

    def detach(self) -> None:
        """Leave; what is under way is dropped."""
        self._mailbox.close()
        self.loop.close()

    def learn_gates(self, addresses: Iterable[str]) -> None:
        """Ask these hosts' admins too from now on, after those that were given."""
        learnt = [self.loop.machine.address_of(address) for address in addresses]
        self._learnt = [gate for gate in learnt if gate not in self._given]

    @property
    def gates(self) -> list[Address]:
        """The known admins of the system, any of which will do."""
        return [*self._given, *self._learnt] or [self._mailbox.admin_address]

    def trouble(self, gate: Address | None = None) -> Trouble:
        """Return why an admin, by default the system's, was not reached last."""
        return self._mailbox.trouble_with(gate or self._mailbox.admin_address)

    def reach(self, gate: Address, on_lost: Callback) -> None:
        """Connect to another host's admin; ``on_lost``, once, when it cannot be reached, or ends.

        So a caller that repeats this from there has one such call under way.
        """

        def lost(_is_certain: bool) -> None:
            if cancel is not None:
                cancel()
            self.loop.guarded(on_lost)

        cancel = self._mailbox.watch_remote(gate, lost)

    def probe(self, on_probed: Callable[[bool], None]) -> None:
        """Ask the actor system's admins whether one is there; one that hangs never answers."""
        gates = self.gates
        self._probing.append(_Probe(on_probed, {str(gate) for gate in gates}))
        for gate in gates:
            gone = partial(self._is_not_there, str(gate))
            self.loop.send(gate, QueryExists(), on_failed=gone)

    async def answers(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Return whether an admin of the actor system is there."""
        return bool(await self.answer(self.probe, timeout_s))

    async def answer(
        self, ask: Callable[[Callable[[Any], None]], None], timeout_s: float
    ) -> Any | None:
        """Return what ``ask``, given where to put it, is answered with; None if not in time."""
        answer: asyncio.Future[Any] = self.loop.asyncio.create_future()
        ask(lambda value: None if answer.done() else answer.set_result(value))
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        return answer.result() if done else None

    def locate(
        self,
        class_name: str,
        global_name: str,
        on_located: Callable[[Address | None], None],
        gate: Address | None = None,
    ) -> None:
        """Ask the admin for the actor of that global name; it makes one when there is none.

        ``gate`` is another host's admin. ``on_located`` gets None when the admin refuses.
        """
        instance = next(self._instances)
        self._await(instance, on_located)
        request = PendingActor(class_name, None, instance, None, globalName=global_name)
        self.loop.send(
            gate or self._mailbox.admin_address,
            request,
            on_failed=lambda: self._answered(instance, None),
        )

    def identify(
        self, address: Address, on_identified: Callable[[Address, Process, int], None]
    ) -> None:
        """Ask one of our actors for its process and its epoch. A dead one never answers."""
        request_id = self._await(secrets.token_hex(8), on_identified)
        self.loop.send(address, Identify(request_id=request_id))

    def ask_proxy(
        self,
        proxy: Address,
        what: str,
        arguments: tuple[Any, ...],
        on_value: Callable[[Any], None],
    ) -> None:
        """Ask a proxy; see AskProxy. A dead one never answers."""
        request_id = self._await(secrets.token_hex(8), on_value)
        self.loop.send(proxy, AskProxy(request_id=request_id, what=what, arguments=arguments))

    async def ask_until(
        self,
        target: Callable[[], Address | None],
        request: Any,
        reply_class: type,
        timeout_s: float,
    ) -> bool:
        """Send a request again and again until it is answered; return whether that was in time.

        ``target`` returns where to send it now, None for nowhere.
        """
        answered = asyncio.Event()

        def arrived(message: Any, _sender: Address) -> None:
            if message.request_id == request.request_id:
                answered.set()

        self.on(reply_class, arrived)
        deadline = time.monotonic() + timeout_s
        while not answered.is_set() and (left_s := deadline - time.monotonic()) > 0:
            address = target()
            if address is not None:
                self.loop.send(address, request)
            with contextlib.suppress(asyncio.TimeoutError):  # its own class until 3.11
                await asyncio.wait_for(answered.wait(), min(left_s, ASK_AGAIN_S))
        return answered.is_set()

    def _await(self, asked: Any, on_answer: Callable[..., None]) -> Any:
        self._unanswered[asked] = on_answer
        if len(self._unanswered) > MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]
        return asked

    def _answered(self, asked: int | str, *answer: Any) -> None:
        on_answer = self._unanswered.pop(asked, None)
        if on_answer is not None:
            on_answer(*answer)

    def _arrived(self, envelope: Any) -> None:
        self.loop.guarded(self._received, envelope.message, envelope.sender)

    def _received(self, message: Any, sender: Address) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, sender)
        elif not isInternalActorSystemMessage(message):
            logger.warning("ignored an unknown message %s", type(message).__name__)

    def _located(self, message: Any, _sender: Address) -> None:
        address = None if message.errorCode else message.actualAddress
        self._answered(message.instanceNum, address)

    def _identified(self, message: IdentifyReply, sender: Address) -> None:
        self._answered(message.request_id, sender, message.process, message.epoch)

    def _probe_answered(self, message: Any, sender: Address) -> None:
        if message.inShutdown:  # which says nothing of the others
            self._is_not_there(str(sender))
            return
        probing, self._probing = self._probing, deque(maxlen=MAX_UNANSWERED)
        for probe in probing:
            probe.on_probed(True)

    def _is_not_there(self, gate: str) -> None:
        """Take that an admin is not there; a probe ends with the last of its admins."""
        probing, self._probing = self._probing, deque(maxlen=MAX_UNANSWERED)
        for probe in probing:
            probe.gates.discard(gate)
            if probe.gates:
                self._probing.append(probe)
            else:
                probe.on_probed(False)


class ThreadPort(Port):
    """A :class:`Port` on a loop of its own on a daemon thread, for callers that block.

    What :class:`Port` offers is for that thread, by way of ``loop.post``; the methods here are for
    all others.
    """

    def __init__(self, admin_port: int, process: Process, way: Way | None = None) -> None:
        loop = asyncio.new_event_loop()
        try:
            super().__init__(admin_port, process, loop, way)
        except BaseException:
            loop.close()
            raise
        self._thread = threading.Thread(target=self._run, name="greenroom-port", daemon=True)

    def open(self, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Start, and wait until an actor system answers; else close, raise NotRunningError.

        One that is there, and is busy, may take up to ``BUSY_S`` for that.
        """
        self._thread.start()
        begun_at = time.monotonic()
        while not self.is_answered(timeout_s):
            waited_s = time.monotonic() - begun_at
            if waited_s > (max(timeout_s, BUSY_S) if self._probing else timeout_s):
                silence = self._silence(waited_s)
                self.close()
                raise NotRunningError(silence)
            time.sleep(OPEN_RETRY_S)

    def is_answered(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Return whether an admin of the actor system is there; blocks."""
        answer = asyncio.run_coroutine_threadsafe(self.answers(timeout_s), self.loop.asyncio)
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError:
            return False

    def close(self) -> None:
        """End the thread and leave; what is under way is dropped."""
        with contextlib.suppress(RuntimeError):  # closed
            self.loop.asyncio.call_soon_threadsafe(self.loop.asyncio.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def _silence(self, waited_s: float) -> str:
        if self._probing:
            gates = [gate.addressDetails.text for gate in self._given]
            where = " or ".join(gates) if gates else f"port {self.admin_port} of this host"
            return (
                f"the actor system at {where} has not answered for {waited_s:.3g} s: it is busy, "
                "or stands still; see its host.log"
            )
        if self._given:
            return "; ".join(
                f"no actor system answers at {gate.addressDetails.text}"
                + (f": {trouble.reason}" if (trouble := self.trouble(gate)) else "")
                for gate in self._given
            )
        return (
            f"no actor system answers on port {self.admin_port} of this host to user "
            f"{os.geteuid()}; start one with `greenroom start`, or name its port with "
            "GREENROOM_ADMIN_PORT; "
            + (self.trouble().reason or "one of another user answers only them")
        )

    def _run(self) -> None:
        self.loop.asyncio.run_forever()
        self.detach()
        close_loop(self.loop.asyncio)


class Finder:
    """Follows a globally named actor through its deaths; all on the port's loop.

    ``on_found(address, process)`` is called for each new incarnation, ``on_lost()`` at its death.
    No incarnation needs to be announced: asking for the name makes one. ``gates`` are the admins to
    ask in turn, by default those that the port knows. Where hosts take turns in leading, an admin
    makes no controller on request; then its host's proxy says which one it obeys.
    """

    def __init__(
        self,
        port: Port,
        names: tuple[str, str],
        on_found: Callable[[Address, Process], None],
        on_lost: Callable[[], None] = lambda: None,
        gates: Callable[[], Sequence[Address]] = tuple,
    ) -> None:
        self._port = port
        self._names = names
        self._on_found = on_found
        self._on_lost = on_lost
        self._own_gates = gates
        self._attempt = 0
        self._stopped = False
        self._unwatch: Callback = lambda: None
        self.found: tuple[Address, Process] | None = None
        self.epoch = 0  # of the controller that was found, where it told one

    def start(self) -> None:
        """Look for the actor, again and again until it answers."""
        if self._stopped:
            return
        self._attempt += 1
        attempt, gates = self._attempt, self._gates
        gate = gates[(attempt - 1) % len(gates)]
        self._port.locate(*self._names, lambda address: self._located(address, gate), gate)
        if self._names == CONTROLLER and attempt > 1:  # an admin may be slow to refuse
            self._ask_proxy(gate)
        self._port.loop.call_later(FIND_RETRY_S, lambda: self._retry(attempt))

    @property
    def _gates(self) -> Sequence[Address]:
        return self._own_gates() or self._port.gates

    def stop(self) -> None:
        """Follow it no more."""
        self._stopped = True
        self._unwatch()

    def is_latest(self, sender: Address, epoch: int) -> bool:
        """Return whether ``sender`` is the controller that was found, and of no earlier epoch."""
        return self.found is not None and self.found[0] == sender and self.epoch >= epoch

    def doubt(self) -> None:
        """Look whether any proxy obeys a later controller than the one that was found."""
        for gate in self._gates:
            self._ask_proxy(gate)

    def _located(self, address: Address | None, gate: Address | None) -> None:
        if self._stopped or self.found is not None:
            return
        if address is not None:
            self._identify(address)
        elif self._names == CONTROLLER:
            self._ask_proxy(gate)

    def _ask_proxy(self, gate: Address | None) -> None:
        def located(proxy: Address | None) -> None:
            if proxy is not None:
                self._port.ask_proxy(proxy, "controller", (), self._told)

        self._port.locate(*PROXY, located, gate)

    def _told(self, known: tuple[Address, Process, int] | None) -> None:
        if known is None:
            return
        address, process, epoch = known
        is_found = self.found is not None and self.found[1] == process
        if not is_found and (self.found is None or epoch > self.epoch):
            self._identify(address)

    def _identify(self, address: Address) -> None:
        """Ask for the epoch too: the proxy may know only of an earlier one."""
        self._port.identify(
            address, lambda _, process, epoch: self._identified(address, process, epoch)
        )

    def _identified(self, address: Address, process: Process, epoch: int) -> None:
        if self._stopped:
            return
        if self.found is not None:
            if epoch <= self.epoch or self.found[1] == process:
                return
            self._unwatch()
            self._on_lost()
        self.found, self.epoch = (address, process), epoch
        self._unwatch = self._port.loop.watch_process(process, self._exited, address)
        self._on_found(address, process)

    def _retry(self, attempt: int) -> None:
        if attempt == self._attempt and self.found is None:
            self.start()

    def _exited(self) -> None:
        self.found = None
        self._on_lost()
        self.start()
