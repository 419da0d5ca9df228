"""The place in the actor system of a process that is no actor: messages by class, actors by name.

Host processes and HTTP workers have their :class:`Port` on the asyncio loop that they run on.
Scripts block, so theirs is on a loop of its own, on a thread: :class:`ThreadPort`. A
:class:`Finder` follows an actor of a given name through its deaths, and :class:`Controller` the
controller.

Whatever they want to know they ask for by :meth:`Port.ask`: an admin for an actor, an actor who it
is, a proxy what it knows, the controller for an operation. An answer has the id of its question.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thespian.system import isInternalActorSystemMessage
from thespian.system.messages.admin import PendingActor, QueryAck, QueryExists

from greenroom.actors.messages.control import Identify
from greenroom.actors.messages.queries import Address, AskProxy, Process
from greenroom.actors.runtime.loop import Callback, Loop, Repeats, Timer, nothing, resolve
from greenroom.actors.runtime.machine import MACHINE, Machine
from greenroom.actors.transport.addresses import Access
from greenroom.actors.transport.admission import Trouble
from greenroom.actors.transport.descriptors import close_loop
from greenroom.core.errors import NotRunningError, StateNotReadableError, StateNotSavedError

if TYPE_CHECKING:  # few processes have operations
    from greenroom.actors.messages.admin import Request, RequestReply

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
BUSY_S = 20.0  # that an admin may take for its answer while it starts hundreds of replicas
OPEN_RETRY_S = 0.02
FIND_RETRY_S = 0.3
STOP_TIMEOUT_S = 5.0
REPEAT_S = 2.0  # a lost request or answer is asked again; requests are idempotent
CHECK_EVERY_S = 0.5  # whether there is a later controller: one that is cut off does not say so
DOUBTED_S = 10.0  # within which a successor is there that can use the store, if one can
_OF_STORE = frozenset({StateNotSavedError.__name__, StateNotReadableError.__name__})
# By what class and name any release's admin has them: see docs/formats.md.
CONTROLLER = ("greenroom.actors.controller.actor.Controller", "greenroom.controller")
PROXY = ("greenroom.actors.proxy.actor.Proxy", "greenroom.proxy")


Target = Address | Callable[[], Address | None]
IsFinal = Callable[[Any, Address], bool]


@dataclass(eq=False, slots=True)
class _Question:
    """What was asked and is not answered yet."""

    answer: asyncio.Future[Any]
    is_final: IsFinal
    send: Callback


class Port:
    """This process's place in the actor system, on ``loop``, whose thread everything runs on."""

    def __init__(
        self,
        admin_port: int,
        process: Process,
        loop: asyncio.AbstractEventLoop,
        access: Access | None = None,
        on_error: Callable[[Exception], None] | None = None,
        machine: Machine = MACHINE,
    ) -> None:
        self.process = process
        self.admin_port = admin_port
        self._given: list[Address] = [
            machine.address_of(gate) for gate in (access.gates if access is not None else ())
        ]
        self._learnt: list[Address] = []
        self._mailbox = machine.attach(admin_port, loop, self._arrived, access)
        self.loop = Loop(self._mailbox, on_error, machine)
        self.address: Address = self._mailbox.address
        self._handlers: dict[type, Callable[[Any, Address], None]] = {}
        self._instances = itertools.count(1)
        self._asked: dict[Any, list[_Question]] = {}  # by the id that the answer has

    def on(self, message_class: type, handler: Callable[[Any, Address], None]) -> None:
        """Have ``handler(message, sender)`` called for this class."""
        self._handlers[message_class] = handler

    def detach(self) -> None:
        """Leave; what is under way is dropped."""
        self._mailbox.close()
        self.loop.close()
        for question in itertools.chain(*self._asked.values()):
            resolve(question.answer, None)

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

    async def ask(
        self,
        target: Target,
        request: Any,
        timeout_s: float | None = BUSY_S,
        is_final: IsFinal = lambda _reply, _sender: True,
    ) -> Any:
        """Return the answer to a request, or None where it is late.

        The request is sent again until it is answered. ``target`` is one process; where that cannot
        be reached the answer is None. Or it returns the process to ask by now, None for none. An
        answer that is not ``is_final`` is ignored. Of requests with one id all get the answer.
        """
        asked, loop = _id_of(request), self.loop
        answer: asyncio.Future[Any] = loop.asyncio.create_future()
        repeats = Repeats(loop)

        timers: dict[str, Timer] = {}
        if timeout_s is not None:
            timers["late"] = loop.call_later(timeout_s, lambda: resolve(answer, None))

        def send() -> None:
            if "repeat" in timers:
                timers["repeat"].cancel()
            timers["repeat"] = loop.call_later(REPEAT_S, send)
            address = target() if callable(target) else target
            if address is not None:
                repeats.send(address, request, unreachable)

        unreachable = nothing if callable(target) else lambda: resolve(answer, None)
        question = _Question(answer, is_final, send if callable(target) else nothing)
        self._asked.setdefault(asked, []).append(question)
        try:
            send()
            return await answer
        finally:
            for timer in timers.values():
                timer.cancel()
            self._asked[asked].remove(question)
            if not self._asked[asked]:
                del self._asked[asked]

    def ask_again(self) -> None:
        """Send what is not answered once more now: there is another process to answer it."""
        for question in list(itertools.chain(*self._asked.values())):
            question.send()

    async def answers(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool | None:
        """Return whether an admin of the actor system is there; None where one hangs."""

        def ask(gate: Address) -> Coroutine[Any, Any, Any]:
            return self.ask(
                gate, QueryExists(), timeout_s, lambda ack, of: not ack.inShutdown or of == gate
            )

        asked = [asyncio.ensure_future(ask(gate)) for gate in self.gates]
        begun_at = self.loop.machine.monotonic()
        try:
            for answer in asyncio.as_completed(asked):
                ack = await answer
                if ack is not None and not ack.inShutdown:
                    return True
        finally:
            for each in asked:
                each.cancel()
        return None if self.loop.machine.monotonic() - begun_at >= timeout_s else False

    async def locate(
        self,
        class_name: str,
        global_name: str,
        gate: Target | None = None,
        timeout_s: float = BUSY_S,
    ) -> Address | None:
        """Return the actor of that global name; the admin makes one when there is none.

        ``gate`` is another host's admin. None when the admin refuses, or cannot be reached.
        """
        instance = next(self._instances)
        request = PendingActor(class_name, None, instance, None, globalName=global_name)
        located = await self.ask(gate or self._mailbox.admin_address, request, timeout_s)
        return None if located is None or located.errorCode else located.actualAddress

    async def identify(self, address: Address) -> tuple[Process, int] | None:
        """Return the process of one of our actors, and its epoch. A dead one never answers."""
        reply = await self.ask(address, Identify(request_id=secrets.token_hex(8)))
        return None if reply is None else (reply.process, reply.epoch)

    async def ask_proxy(
        self, proxy: Address, what: str, *arguments: Any, timeout_s: float = BUSY_S
    ) -> Any:
        """Return what a proxy says; see AskProxy. None where it does not answer in time."""
        request = AskProxy(request_id=secrets.token_hex(8), what=what, arguments=arguments)
        reply = await self.ask(proxy, request, timeout_s)
        return None if reply is None else reply.value

    def _arrived(self, message: Any, sender: Address) -> None:
        self.loop.guarded(self._handlers.get(type(message), self._answered), message, sender)

    def _answered(self, message: Any, sender: Address) -> None:
        if (asked := _id_of(message)) is not None:
            for question in list(self._asked.get(asked, ())):
                if question.is_final(message, sender):
                    resolve(question.answer, message)
        elif not isInternalActorSystemMessage(message):
            logger.warning("ignored an unknown message %s", type(message).__name__)


def _id_of(message: Any) -> Any:
    """Return what a question and its answers have in common; None for another message."""
    if isinstance(message, QueryExists | QueryAck):  # the only one without an id
        return QueryExists
    return getattr(message, "request_id", None) or getattr(message, "instanceNum", None)


class ThreadPort(Port):
    """A :class:`Port` on a loop of its own on a daemon thread, for callers that block.

    What :class:`Port` offers is for that thread, by way of ``loop.post``; the methods here are for
    all others.
    """

    def __init__(self, admin_port: int, process: Process, access: Access | None = None) -> None:
        loop = asyncio.new_event_loop()
        try:
            super().__init__(admin_port, process, loop, access)
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
        while not (answer := self.is_answered(timeout_s)):
            waited_s = time.monotonic() - begun_at
            if waited_s > (max(timeout_s, BUSY_S) if answer is None else timeout_s):
                silence = self._silence(waited_s, hangs=answer is None)
                self.close()
                raise NotRunningError(silence)
            time.sleep(OPEN_RETRY_S)

    def is_answered(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool | None:
        """Return whether an admin of the actor system is there, None where one hangs; blocks."""
        answer = asyncio.run_coroutine_threadsafe(self.answers(timeout_s), self.loop.asyncio)
        try:
            return answer.result(timeout_s + OPEN_RETRY_S)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End the thread and leave; what is under way is dropped."""
        with contextlib.suppress(RuntimeError):  # closed
            self.loop.asyncio.call_soon_threadsafe(self.loop.asyncio.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def _silence(self, waited_s: float, *, hangs: bool) -> str:
        if hangs:
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

    ``on_found(address, process)`` is called for each new incarnation, ``on_gone()`` at its death.
    No incarnation needs to be announced: asking for the name makes one. ``gates`` are the admins to
    ask in turn, by default those that the port knows. Where hosts take turns in leading, an admin
    makes no controller on request; then its host's proxy says which one it obeys. Those of an epoch
    up to ``after`` are not followed by a proxy's word.
    """

    def __init__(
        self,
        port: Port,
        names: tuple[str, str],
        on_found: Callable[[Address, Process], None],
        on_gone: Callable[[], None] = lambda: None,
        gates: Callable[[], Sequence[Address]] = tuple,
        after: int = 0,
    ) -> None:
        self._port = port
        self._names = names
        self._on_found = on_found
        self._on_gone = on_gone
        self._own_gates = gates
        self._after = after
        self._attempt = 0
        self._under_way: set[tuple[str, str]] = set()  # searches, and where
        self._stopped = False
        self._unwatch: Callback = nothing
        self._retry: Callback = nothing  # cancels the next attempt
        self.found: tuple[Address, Process] | None = None
        self.epoch = 0  # of the controller that was found, where it sent one

    def start(self) -> None:
        """Look for the actor, again and again until it answers."""
        if self._stopped or self.found is not None:
            return
        gates = self._gates
        gate = gates[self._attempt % len(gates)]
        self._begin(self._find_at, gate)
        if self._attempt and self._names == CONTROLLER:  # an admin may be slow to refuse
            self._begin(self._ask_proxy, gate)
        self._attempt += 1
        self._retry()
        self._retry = self._port.loop.call_later(FIND_RETRY_S, self.start).cancel

    def _begin(self, search: Callable[[Address], Coroutine[Any, Any, None]], at: Address) -> None:
        """Begin a search, unless that is under way: for an answer it may wait ``BUSY_S``."""
        name = (search.__name__, str(at))
        if name in self._under_way:
            return
        self._under_way.add(name)

        async def run() -> None:
            try:
                await search(at)
            finally:
                self._under_way.discard(name)

        self._port.loop.start(run())

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

    def doubt(self, gates: Sequence[Address] = ()) -> None:
        """Check whether any proxy, of these hosts, obeys a later controller than the one found."""
        for gate in gates or self._gates:
            self._begin(self._ask_proxy, gate)

    async def _find_at(self, gate: Address) -> None:
        address = await self._port.locate(*self._names, gate)
        if address is not None:
            self._begin(self._identify, address)
        elif self._names == CONTROLLER:
            self._begin(self._ask_proxy, gate)

    async def _ask_proxy(self, gate: Address) -> None:
        proxy = await self._port.locate(*PROXY, gate)
        known = None if proxy is None else await self._port.ask_proxy(proxy, "controller")
        if known is not None:
            address, process, epoch = known
            if not 0 < epoch <= self._after and self._is_later(process, epoch):
                self._begin(self._identify, address)  # which may be of a later epoch by now

    async def _identify(self, address: Address) -> None:
        identified = await self._port.identify(address)
        if identified is None or not self._is_later(*identified):
            return
        process, epoch = identified
        if self.found is not None:
            self._unwatch()
        self.found, self.epoch = (address, process), epoch
        self._unwatch = self._port.loop.watch_process(process, self._exited, address)
        self._port.ask_again()
        self._on_found(address, process)

    def _is_later(self, process: Process, epoch: int) -> bool:
        """Return whether to go on to this incarnation: any, or of a later epoch than the one."""
        if self._stopped or self.found is None:
            return not self._stopped
        return process != self.found[1] and epoch > self.epoch

    def _exited(self) -> None:
        self.found = None
        self._on_gone()
        self.start()


class Controller(Finder):
    """Follows the controller, and asks it to carry out operations; all on the port's loop.

    Whatever becomes of a controller, of its host or of an answer on its way: a request is sent
    again, with its id, to the controller that leads by then. The controller carries it out once.
    ``is_there`` says whether waiting is of any use: where it has said no for ``patience_s``, a
    request ends with a NotRunningError that says ``why``.
    """

    def __init__(
        self,
        port: Port,
        is_there: Callable[[], Awaitable[bool | None]],
        patience_s: float,
        why: str,
    ) -> None:
        super().__init__(port, CONTROLLER, lambda *_: None)
        self._is_there = is_there
        self._patience_s = patience_s
        self._why = why

    async def ask(self, request: Request, timeout_s: float | None = None) -> RequestReply:
        """Return the controller's answer.

        The request is sent again, with its id, when the controller was restarted or an answer is
        late. TimeoutError past ``timeout_s``, and where a controller that had it has ended and for
        ``DOUBTED_S`` none is there that can use the store; NotRunningError when there is nothing to
        wait for.
        """
        asked = _Asked(self, request.operation)
        now = asyncio.get_running_loop().time
        there_at = now()
        asking = asyncio.ensure_future(
            self._port.ask(asked.target, request, timeout_s, asked.is_final)
        )
        try:
            while not (await asyncio.wait((asking,), timeout=CHECK_EVERY_S))[0]:
                self.doubt()  # a stopped controller may have a successor
                asked.check(now())
                if await self._is_there():
                    there_at = now()
                elif now() - there_at > self._patience_s:
                    raise NotRunningError(self._why)
        finally:
            asking.cancel()
        reply: RequestReply | None = asking.result()
        if reply is None:
            away = ", for no controller was found: the host that leads may be stopped, or cut off"
            raise TimeoutError(
                f"{request.operation} was not answered within {timeout_s or 0:g} s"
                f"{away if self.found is None else ''}; it may have been carried out"
            )
        return reply


class _Asked:
    """A request, and what those controllers say of it that cannot use their store.

    Such a one may not know of another one, which may have made the change. So only the latest one
    that had the request is believed when it says that nothing was changed.
    """

    def __init__(self, controller: Controller, operation: str) -> None:
        self._controller = controller
        self._operation = operation
        self._epoch = 0  # of the latest controller that it was sent to, where several may lead
        self._doubted_at: float | None = None
        self._doubted = ""  # the last word of one that may not know

    def target(self) -> Address | None:
        """Return whom to ask by now."""
        if self._controller.found is None:
            return None
        self._epoch = max(self._epoch, self._controller.epoch)
        return self._controller.found[0]

    def is_final(self, reply: RequestReply, sender: Address) -> bool:
        """Return whether to believe an answer."""
        if reply.error_kind not in _OF_STORE or self._controller.is_latest(sender, self._epoch):
            return True
        self._doubted = reply.error
        return False

    def check(self, now: float) -> None:
        """Raise TimeoutError where none that could know has been there for long enough."""
        is_known = self._controller.found is not None and self._controller.epoch >= self._epoch
        if is_known or not self._doubted:
            self._doubted_at, self._doubted = None, ""
        elif self._doubted_at is None:
            self._doubted_at = now
        elif now - self._doubted_at >= DOUBTED_S:
            raise TimeoutError(
                f"{self._operation} may have been carried out, by a controller that has ended; the "
                f"one that there is says: {self._doubted}"
            )


def new_id() -> str:
    """Return the id of a new request."""
    return secrets.token_hex(16)
