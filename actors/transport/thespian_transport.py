"""The transport API that Thespian calls, on one asyncio loop.

Theory of operation. Thespian runs a process by calling :meth:`Transport.run` with a handler; the
loop runs as long, and the handler is called inside it for each envelope, so an actor may start
tasks on that loop. Envelopes that arrive while nobody runs wait. A process with a loop of its own
*attaches*: it gives the loop and a callback, and never calls ``run``.

The loop belongs to the thread that runs it. Another thread may schedule a transmit at any time: it
pickles the message itself and posts the rest to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from thespian.actors import (
    ActorAddress,
    ActorExitRequest,
    ActorSystemStartupFailure,
    WakeupMessage,
    WatchMessage,
)
from thespian.system.addressManager import ActorLocalAddress, CannotPickleAddress
from thespian.system.logdirector import LoggerExitRequest
from thespian.system.messages.multiproc import ChildMayHaveDied
from thespian.system.timing import ExpirationTimer, currentTime
from thespian.system.transport import (
    ExternalInterfaceTransportInit,
    SendStatus,
    Thespian__Run_HandlerResult,
    Thespian__Run_Terminated,
    Thespian__UpdateWork,
    TransmitOnly,
    TransportInit__Base,
)

from understudy.actors.transport import addresses, descriptors, roles
from understudy.actors.transport.addresses import ProcessAddress, drawn_address
from understudy.actors.transport.envelopes import Envelope, decode, encode
from understudy.actors.transport.events import Unsent
from understudy.actors.transport.frames import Buffer
from understudy.actors.transport.identity import Identity
from understudy.actors.transport.peers import Peer, Peers

logger = logging.getLogger(__name__)

EXPIRY_CHECK_S = 1.0
LOGGER_INSTANCE = -1  # Thespian's own number for its logger process
Handler = Callable[[Any], Any]


class Endpoint(TransportInit__Base):  # type: ignore[misc]
    """What a parent gives to a child process to make its transport from."""

    def __init__(
        self, instance: int | None, assigned: Any, parent: Any, admin: Any, inherited: list[int]
    ) -> None:
        self.addrInst = instance  # Thespian's name for it
        self.assigned = assigned
        self.parent = parent
        self.admin = admin
        self.inherited = inherited


class ExternalCopy(TransportInit__Base):  # type: ignore[misc]
    """Asks for one more transport of a process outside the system."""


class Attach(TransportInit__Base):  # type: ignore[misc]
    """Asks for a transport on a loop that runs already; ``on_envelope`` gets what arrives."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_envelope: Callable[[Envelope], None]
    ) -> None:
        self.loop = loop
        self.on_envelope = on_envelope


class Transport:
    """One process's place in the actor system; names in camelCase are Thespian's."""

    def __init__(self, init: TransportInit__Base, *args: Any) -> None:
        own = self._take_place(init, args)
        self._prepare()
        self._pid = os.getpid()
        self.myAddress = ActorAddress(own)
        self._own = own
        self.loop, self._is_own_loop = _loop_for(init)
        self._thread: int | None = None  # the one that runs the loop
        host_name = socket.gethostname().encode("ascii", "replace").decode() or "unknown"
        identity = Identity(own.text, secrets.token_hex(8), os.getpid(), host_name[:200])
        try:
            self.peers = Peers(self.loop, identity, own, self)
        except OSError:
            if self._is_own_loop:
                self.loop.close()
            raise
        descriptors.release_in_children(self)
        if isinstance(init, Attach):
            self._handler, self._is_running = init.on_envelope, True
            self._thread = threading.get_ident() if self.loop.is_running() else None
            self.loop.call_soon_threadsafe(self._attached)

    def _attached(self) -> None:
        self._thread = threading.get_ident()

    def _take_place(self, init: TransportInit__Base, args: tuple[Any, ...]) -> ProcessAddress:
        self._parent: Any = None
        self._is_logger = False
        if isinstance(init, Endpoint):
            roles.take_over()
            if descriptors.is_forked():
                descriptors.let_go(init.inherited)
                asyncio._set_running_loop(None)  # the parent's, which forked inside it
            self._admin, self._parent = init.admin, init.parent
            self._is_logger = init.addrInst == LOGGER_INSTANCE
            host = self._admin.addressDetails.host
            return init.assigned.addressDetails if init.assigned else drawn_address(host)
        if isinstance(init, ExternalInterfaceTransportInit | Attach):
            self._admin = self.getAdminAddr(args[0])
        elif isinstance(init, ExternalCopy):
            self._admin = args[0]
        else:
            raise ActorSystemStartupFailure(f"no transport can be made from a {type(init)}")
        return drawn_address(self._admin.addressDetails.host)

    def _prepare(self) -> None:
        self._arrived: deque[Envelope] = deque()
        self._unfinished: dict[Any, None] = {}  # intents, oldest first
        self._wakeups: dict[int, Any] = {}
        self._watches: list[int] = []
        self._ready_watches: list[int] = []
        self._handler: Handler | None = None
        self._is_running = False
        self._is_sending_only = False
        self._is_delivering = False
        self._is_closed = False
        self._result: Any = None
        self._raised: BaseException | None = None
        self._draining = False
        self._expiry_due = False
        self._must_exit = self._must_check_children = False

    # --- Addresses ----------------------------------------------------------------------------

    @staticmethod
    def getAdminAddr(capabilities: dict[str, Any]) -> Any:
        """Return the address of this host's admin."""
        port = int(capabilities.get("Admin Port", addresses.ADMIN_PORT))
        return ActorAddress(ProcessAddress(addresses.own_host(), port))

    @staticmethod
    def getAddressFromString(address: Any, adminRouting: bool = False) -> Any:
        """Return the address of the admin at ``host:port``."""
        return ActorAddress(addresses.admin_address(address))

    @staticmethod
    def getConventionAddress(capabilities: dict[str, Any]) -> Any:
        """Return the addresses of the convention's leaders; None without a convention."""
        named = capabilities.get("Convention Address.IPv4")
        if not named:
            return None
        each = named if isinstance(named, list) else [named]
        return [Transport.getAddressFromString(address) for address in each]

    @staticmethod
    def probeAdmin(address: Any) -> bool:
        """Return whether something listens where the admin should."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(address.addressDetails.socket_name)
            except OSError:
                return False
        return True

    def setAddressManager(self, manager: Any) -> None:
        """Do nothing: scheduleTransmit is given it each time."""

    def deadAddress(self, _manager: Any, address: Any) -> None:
        """Give up what was sent to a child that exited and did not arrive."""
        for intent in [each for each in self._unfinished if each.targetAddr == address]:
            self._finish(intent, SendStatus.DeadTarget)

    def lostRemote(self, address: Any) -> None:
        """Do nothing: what is under way to another host ends with its connection."""

    # --- Children -----------------------------------------------------------------------------

    def prepEndpoint(self, assigned: Any, _capabilities: dict[str, Any]) -> Endpoint:
        """Make what a child's transport is made from, just before the child is started."""
        details = assigned.addressDetails
        inherited = descriptors.inheritable()
        if isinstance(details, ActorLocalAddress):
            instance = details.addressInstanceNum
            return Endpoint(instance, None, self.myAddress, self._admin, inherited)
        return Endpoint(None, assigned, self.myAddress, self._admin, inherited)

    def connectEndpoint(self, endpoint: Endpoint) -> None:
        """Do nothing: the child reports itself."""

    def external_transport_clone(self) -> Transport:
        """Return another transport of this process, with messages of its own."""
        return type(self)(ExternalCopy(), self._admin)

    def protectedFileNumList(self) -> list[int]:
        """Return what a child must not touch."""
        return self.descriptors()

    def childResetFileNumList(self) -> list[int]:
        """Return nothing: a child lets go of descriptors by its own rule (descriptors.py)."""
        return []

    def descriptors(self) -> list[int]:
        """Return the numbers of the sockets and of the loop's own descriptors."""
        if self._is_closed:
            return []
        numbers = self.peers.descriptors() if hasattr(self, "peers") else []
        return numbers + (_descriptors_of(self.loop) if self._is_own_loop else [])

    # --- Sending ------------------------------------------------------------------------------

    def enableRXPauseFlowControl(self, enable: bool = True) -> None:
        """Do nothing: receiving is never paused for the sake of sending."""

    def scheduleTransmit(self, manager: Any, intent: Any, has_exclusive_flag: bool = False) -> None:
        """Send; from any thread. CannotPickleAddress when an address is not known yet."""
        if manager is not None:
            target, message = manager.prepMessageSend(intent.targetAddr, intent.message)
            if message is SendStatus.DeadTarget:
                intent.tx_done(SendStatus.Sent)  # a notice about the dead to the dead
                return
            if target is None:
                raise CannotPickleAddress(intent.targetAddr)
            intent.changeTargetAddr(target)
            intent.changeMessage(message)
        if isinstance(intent.message, Thespian__UpdateWork):
            intent.tx_done(SendStatus.Sent)
            return
        buffers = encode(intent.message)
        self._unfinished[intent] = None
        if threading.get_ident() == self._thread:
            self._submit(intent, buffers)
        else:
            self._post(self._submit, intent, buffers)

    def _submit(self, intent: Any, buffers: list[Buffer]) -> None:
        address = intent.targetAddr.addressDetails
        if address == self._own:
            self.loop.call_soon(self._arrived_from_self, intent)
        elif isinstance(address, ProcessAddress):
            self.peers.send(address, buffers, intent)
            if not self._expiry_due:
                self._expiry_due = True
                self.loop.call_later(EXPIRY_CHECK_S, self._expire)
        else:
            self.loop.call_soon(self._finish, intent, SendStatus.DeadTarget)

    def _arrived_from_self(self, intent: Any) -> None:
        self._arrived.append(Envelope(intent.targetAddr, intent.message))
        self._finish(intent, SendStatus.Sent)
        self.deliver()

    def _finish(self, intent: Any, status: Any) -> None:
        if intent not in self._unfinished:
            return
        del self._unfinished[intent]
        intent.tx_done(status)
        if self._is_sending_only:
            self._stop(None)
        elif self._draining and not self._unfinished:
            self._stop(Thespian__Run_Terminated())

    def _expire(self) -> None:
        """Give up intents whose time is over; their messages may arrive all the same."""
        self._expiry_due = bool(self._unfinished)
        if self._expiry_due:
            self.loop.call_later(EXPIRY_CHECK_S, self._expire)
        now = currentTime()
        for intent in [
            each
            for each in self._unfinished
            if each._quitTime._time_to_quit is not None and each._quitTime._time_to_quit <= now
        ]:
            self._finish(intent, SendStatus.Failed)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this actor system connection was made by process {self._pid}; after a fork, "
                "make a new ActorSystem in the child"
            )
        self.loop.call_soon_threadsafe(callback, *args)

    # --- What the peers tell ------------------------------------------------------------------

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """See :class:`~understudy.actors.transport.peers.Shell`."""
        if sender.sender is None:
            sender.sender = ActorAddress(sender.address)
        try:
            message = decode(buffers)
        except Exception:
            logger.exception("cannot read a message of %s", sender.address)
            return
        self._arrived.append(Envelope(sender.sender, message))

    def sent(self, tags: Sequence[object]) -> None:
        """See Shell."""
        for intent in tags:
            self._finish(intent, SendStatus.Sent)

    def undeliverable(self, messages: Sequence[Unsent]) -> None:
        """See Shell."""
        for message in messages:
            self._finish(message.tag, SendStatus.DeadTarget)

    def refused(self, tag: object, reason: str) -> None:
        """See Shell."""
        logger.error("a message was not sent: %s", reason)
        self.loop.call_soon(self._finish, tag, SendStatus.Failed)

    def lost(self, address: ProcessAddress) -> None:
        """See Shell; the logger ends with its admin, for nobody else would end it."""
        if self._is_logger and address == self._parent.addressDetails:
            self._arrive(LoggerExitRequest())

    # --- Wake-ups, watches, signals -----------------------------------------------------------

    def addWakeup(self, period: Any, payload: Any) -> None:
        """Have a WakeupMessage arrive after ``period``; from any thread."""
        timer = ExpirationTimer(period)
        self._wakeups[id(timer)] = timer
        if threading.get_ident() == self._thread:
            self._set_alarm(timer, payload)
        else:
            self._post(self._set_alarm, timer, payload)

    def _set_alarm(self, timer: Any, payload: Any) -> None:
        self.loop.call_later(timer.view().remainingSeconds(), self._wake, timer, payload)

    def _wake(self, timer: Any, payload: Any) -> None:
        del self._wakeups[id(timer)]
        self._arrive(WakeupMessage(timer.duration, payload))

    def set_watch(self, numbers: list[int]) -> None:
        """Have a WatchMessage arrive when one of these descriptors is readable."""
        if not numbers and not self._watches:
            return
        # Anew each time: a number that was closed and opened again is another file.
        for fd in self._watches:
            self.loop.remove_reader(fd)
        self._watches = []
        for fd in numbers:
            try:
                self.loop.add_reader(fd, self._watched_ready, fd)
            except (OSError, ValueError) as error:
                logger.warning("cannot watch descriptor %s: %s", fd, error)
            else:
                self._watches.append(fd)

    def _watched_ready(self, fd: int) -> None:
        self.loop.remove_reader(fd)  # once: the handler says what to watch from then on
        if fd in self._watches:
            self._watches.remove(fd)
        if not self._ready_watches:
            self.loop.call_soon(self._tell_watches)
        self._ready_watches.append(fd)

    def _tell_watches(self) -> None:
        ready, self._ready_watches = self._ready_watches, []
        self._arrive(WatchMessage(ready))

    def interrupt_wait(self, signal_shutdown: bool = False, check_children: bool = False) -> None:
        """Have the loop look for exit requests and dead children; from signal handlers too."""
        self._must_exit |= signal_shutdown
        self._must_check_children |= check_children
        with contextlib.suppress(RuntimeError):  # closed, or inherited from the parent
            self._post(self._check_signals)

    def _check_signals(self) -> None:
        if self._must_check_children:
            self._must_check_children = False
            self._arrive(ChildMayHaveDied())
        if self._must_exit:
            self._must_exit = False
            self._arrive(ActorExitRequest())

    def _arrive(self, message: Any) -> None:
        self._arrived.append(Envelope(self.myAddress, message))
        self.deliver()

    # --- Running ------------------------------------------------------------------------------

    def run(self, incomingHandler: Any, maximumDuration: timedelta | float | None = None) -> Any:
        """Run the loop and hand each envelope to the handler until it returns something false.

        Without a handler the first envelope is returned. TransmitOnly: nothing is handled, and the
        number of unfinished transmits is returned as soon as one is finished. None when the time is
        over; Thespian__Run_Terminated after ``abort_run``.
        """
        if incomingHandler is TransmitOnly or isinstance(incomingHandler, TransmitOnly):
            return self._run_sending(maximumDuration)
        if incomingHandler is None and self._arrived:
            return self._arrived.popleft()
        self._handler = incomingHandler
        if self._arrived:
            self.loop.call_soon(self.deliver)
        return self._run_loop(maximumDuration)

    def _run_sending(self, maximum: timedelta | float | None) -> Any:
        if not self._unfinished:
            return 0
        self._is_sending_only = True
        try:
            aborted = self._run_loop(maximum)
        finally:
            self._is_sending_only = False
        return len(self._unfinished) if aborted is None else aborted

    def _run_loop(self, maximum: timedelta | float | None) -> Any:
        if self._is_running or not self._is_own_loop:
            raise RuntimeError("this transport's loop is running already")
        self._result, self._draining = None, False
        timer = None
        if maximum is not None:
            seconds = ExpirationTimer(maximum).view().remainingSeconds()
            timer = self.loop.call_later(seconds, self._stop, None)
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # an actor or a coroutine may use a system of its own
        self._is_running, self._thread = True, threading.get_ident()
        try:
            self.loop.run_forever()
        finally:
            self._is_running, self._thread = False, None
            asyncio._set_running_loop(outer)
            if timer is not None:
                timer.cancel()
        self.peers.finish_turn()
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        return self._result

    def abort_run(self, drain: bool = False) -> None:
        """End the present run; with ``drain`` once all transmits are finished."""
        if drain and self._unfinished:
            self._draining = True
        else:
            self._stop(Thespian__Run_Terminated())

    def deliver(self) -> None:
        """Hand what has arrived to the handler; see Shell."""
        if self._is_delivering or not self._is_running or self._is_sending_only:
            return
        self._is_delivering = True
        try:
            for _ in range(len(self._arrived)):
                if not self._is_running:
                    break
                self._deliver(self._arrived.popleft())
        finally:
            self._is_delivering = False
        if self._arrived and self._is_running:
            self.loop.call_soon(self.deliver)

    def _deliver(self, envelope: Envelope) -> None:
        if self._handler is None:
            self._stop(envelope)
            return
        try:
            result = self._handler(envelope)
        except BaseException as error:
            if not self._is_own_loop:
                raise  # the loop's owner hears of it
            self._raised = error  # run() raises it, SystemExit too
            self._stop(None)
            return
        if not result and self._is_own_loop:
            self._stop(Thespian__Run_HandlerResult(result))

    def _stop(self, result: Any) -> None:
        if self._is_running and self._is_own_loop:
            self._is_running = False
            self._result = result
            self.loop.stop()

    def close(self) -> None:
        """Fail what is unfinished and let go of everything."""
        if self._is_closed:
            return
        for intent in list(self._unfinished):
            self._finish(intent, SendStatus.Failed)
        self.set_watch([])
        self.peers.close()
        self._is_closed = True
        if self._is_own_loop:
            self.loop.close()

    # --- Status -------------------------------------------------------------------------------

    def _updateStatusResponse(self, response: Any) -> None:
        """Add what is under way to Thespian's status."""
        for intent in self._unfinished:
            response.addPendingMessage(self.myAddress, intent.targetAddr, str(intent.message))
        for envelope in self._arrived:
            response.addReceivedMessage(envelope.sender, self.myAddress, str(envelope.message))
        response.addWakeups([(self.myAddress, timer) for timer in self._wakeups.values()])


def _loop_for(init: TransportInit__Base) -> tuple[asyncio.AbstractEventLoop, bool]:
    if isinstance(init, Attach):
        return init.loop, False
    return asyncio.new_event_loop(), True


def _descriptors_of(loop: asyncio.AbstractEventLoop) -> list[int]:
    """Return the numbers of the loop's own descriptors: its selector and its way to wake."""
    holders = (getattr(loop, name, None) for name in ("_selector", "_ssock", "_csock"))
    return [holder.fileno() for holder in holders if holder is not None]
