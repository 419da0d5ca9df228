"""Thespian's system base, over our links: what of an actor's life is Thespian's, on one page.

Thespian starts and ends processes: an admin on each host, and actors, which it forks. It knows
global names, capabilities and conventions. It runs each of these processes by
:meth:`Transport.run` with a handler, which gets one envelope at a time. Names in camelCase are
those that it calls.

Everything else is ours. :class:`Transport` gives Thespian's own messages to the process's mailbox
(mailbox.py), which has the links to other processes. Messages of our actors go from mailbox to
mailbox and to their handlers past Thespian, at a tenth of the cost, except to an actor whose
address only its parent's Thespian knows.

These are all of Thespian's private names that Greenroom uses, as no public ones reach so far. The
processes are an admin and, around each actor, a manager.

    name                         of                what for
    _myRef                       an actor          its manager, which has its transport
    _parentAddr, _childReqs      a manager         to go on in another interpreter
    _updateStatusResponse        a transport       Thespian calls it
    _startAdmin                  a system base     to start our admin instead of Thespian's
    _startLogger                 multiprocCommon   to start no process that logs
    _activate, _cleanupAdmin     an admin          to begin and end without such a process
    _send_intent                 both processes    Thespian calls it; its own sleeps, and formats
                                                   each message for a log that is off
    _send_intent_to_transport    both processes    what it does when a send raises
    _addrManager, _sCBStats      both processes    what it looks up and counts when it sends
    _childExited, _child_procs   both processes    to report each child's death once
    _checkChildLiveness          both processes    whether a child's process has ended
    childProc                    a child           its process, for the exit code
    _not_compatible              an admin          to remove what made later calls for a name hang
    _pendingChildren             an admin          the same
    _createInstance              a manager         to give our actors our messages past Thespian
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.config
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NoReturn

from thespian.actors import (
    ActorAddress,
    ActorExitRequest,
    ActorSystemStartupFailure,
    ChildActorExited,
    WakeupMessage,
    WatchMessage,
)
from thespian.system import multiprocCommon
from thespian.system.addressManager import ActorLocalAddress, CannotPickleAddress
from thespian.system.messages.multiproc import ChildMayHaveDied, EndpointConnected
from thespian.system.multiprocCommon import (
    MultiProcAdmin,
    MultiProcManager,
    actorStartupFailed,
    multiprocessCommon,
    startChild,
)
from thespian.system.timing import ExpirationTimer
from thespian.system.transport import (
    ExternalInterfaceTransportInit,
    SendStatus,
    Thespian__Run_HandlerResult,
    Thespian__Run_Terminated,
    Thespian__UpdateWork,
    TransmitIntent,
    TransmitOnly,
    TransportInit__Base,
)
from thespian.system.utilis import thesplog_control

from greenroom.actors.transport import addresses, descriptors
from greenroom.actors.transport.addresses import ProcessAddress, admin_of_port, drawn_for
from greenroom.actors.transport.mailbox import Callback, Delivery, Envelope, Mailbox, encode
from greenroom.actors.transport.sockets import is_listening, keep_listeners

logger = logging.getLogger(__name__)

NAME = "greenroomBase"

if "THESPLOG_FILE_MAXSIZE" not in os.environ:  # else each process writes Thespian's log in /tmp
    thesplog_control(logging.WARNING, useLogging=False, tmpFileMaxSize=0)

_NAMED_ONCE = re.compile(r"^(greenroom\.actors)\.(controller|proxy|replica)\.actor\.")
EXPIRY_CHECK_S = 1.0
DELIVERY_TIMEOUT_S = 30.0  # of what our actors send by Thespian


# --- Wake-ups, readable descriptors and signals ---------------------------------------------------


class Interrupts:
    """Turns these into messages for ``arrive``; on the loop's thread, unless said otherwise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrive: Callable[[Any], None]) -> None:
        self._loop = loop
        self._arrive = arrive
        self._wakeups: dict[int, Any] = {}  # Thespian's timers, by identity
        self._watches: list[int] = []
        self._ready: list[int] = []
        self._must_exit = self._must_check_children = False

    @property
    def wakeups(self) -> list[Any]:
        """Return the timers that are not due yet."""
        return list(self._wakeups.values())

    def wake_after(self, timer: Any, payload: Any) -> None:
        """Deliver a WakeupMessage when the timer is over."""
        self._wakeups[id(timer)] = timer
        self._loop.call_later(timer.view().remainingSeconds(), self._wake, timer, payload)

    def watch(self, numbers: list[int]) -> None:
        """Deliver a WatchMessage when one of these, and no other, is readable."""
        # Anew each time: a number that was closed and opened again is another file.
        for fd in self._watches:
            self._loop.remove_reader(fd)
        self._watches = []
        for fd in numbers:
            try:
                self._loop.add_reader(fd, self._readable, fd)
            except (OSError, ValueError) as error:
                logger.warning("cannot watch descriptor %s: %s", fd, error)
            else:
                self._watches.append(fd)

    def on_signal(self, *, exits: bool, checks_children: bool) -> None:
        """Remember what a signal asks for, until :meth:`check_signals`; from signal handlers."""
        self._must_exit |= exits
        self._must_check_children |= checks_children

    def check_signals(self) -> None:
        """Do what signals asked for."""
        if self._must_check_children:
            self._must_check_children = False
            self._arrive(ChildMayHaveDied())
        if self._must_exit:
            self._must_exit = False
            self._arrive(ActorExitRequest())

    def _wake(self, timer: Any, payload: Any) -> None:
        del self._wakeups[id(timer)]
        self._arrive(WakeupMessage(timer.duration, payload))

    def _readable(self, fd: int) -> None:
        self._loop.remove_reader(fd)  # once: the handler says what to watch from then on
        if fd in self._watches:
            self._watches.remove(fd)
        if not self._ready:
            self._loop.call_soon(self._report)
        self._ready.append(fd)

    def _report(self) -> None:
        ready, self._ready = self._ready, []
        self._arrive(WatchMessage(ready))


# --- The transport --------------------------------------------------------------------------------


class Endpoint(TransportInit__Base):  # type: ignore[misc]  # Thespian ships no types
    """What a parent gives to a child process to make its transport from."""

    def __init__(
        self, instance: int | None, assigned: Any, parent: Any, admin: Any, inherited: list[int]
    ) -> None:
        self.addrInst = instance  # Thespian's name for it
        self.assigned = assigned
        self.parent = parent
        self.admin = admin
        self.inherited = inherited
        # Of an actor that goes on as another program: its sockets by their names, and
        # the message that it handles first, with its sender.
        self.listeners: dict[bytes, int] = {}
        self.first: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Be a child, before there is a transport: let go of what a fork has of its parent."""
        take_over()
        if descriptors.is_forked():
            descriptors.let_go(self.inherited)
            asyncio._set_running_loop(None)  # the parent's, which forked inside it
            signal.set_wakeup_fd(-1)  # the parent's too
        keep_listeners(self.listeners)


class ExternalCopy(TransportInit__Base):  # type: ignore[misc]
    """Asks for one more transport of a process outside the system."""


class Naming:
    """The addresses of admins."""

    @staticmethod
    def getAdminAddr(capabilities: dict[str, Any]) -> Any:
        """Return the address of this host's admin."""
        port = int(capabilities.get("Admin Port", addresses.ADMIN_PORT))
        return ActorAddress(admin_of_port(port))

    @staticmethod
    def getAddressFromString(address: Any, adminRouting: bool = False) -> Any:
        """Return the address of the admin at ``host:port``."""
        del adminRouting
        return ActorAddress(addresses.admin_address(address))

    @staticmethod
    def getConventionAddress(capabilities: dict[str, Any]) -> Any:
        """Return the addresses of a convention's leaders; None without one, as in Greenroom."""
        named = capabilities.get("Convention Address.IPv4")
        if not named:
            return None
        each = named if isinstance(named, list) else [named]
        return [Naming.getAddressFromString(address) for address in each]

    @staticmethod
    def probeAdmin(address: Any) -> bool:
        """Return whether a process of this user listens where the admin should."""
        return is_listening([address.addressDetails.socket_name]) is not None


class Transport(Naming):
    """Thespian's hold on a process's mailbox.

    The loop runs as long as :meth:`run` does, so an actor may start tasks on it; what arrives at
    other times waits. It belongs to the thread that runs it. Another thread may send at any time:
    it pickles the message itself, and posts the rest to the loop.
    """

    # Called in an admin's process with its loop; actors see to all of theirs by themselves.
    on_admin: ClassVar[Callable[[asyncio.AbstractEventLoop], None] | None] = None

    def __init__(self, init: TransportInit__Base, *args: Any) -> None:
        is_child = isinstance(init, Endpoint)
        if is_child:
            init.begin()
            admin = init.admin
        elif isinstance(init, ExternalInterfaceTransportInit):
            admin = self.getAdminAddr(args[0])
        elif isinstance(init, ExternalCopy):
            admin = args[0]
        else:
            raise ActorSystemStartupFailure(f"no transport can be made from a {type(init)}")
        assigned = init.assigned if is_child else None
        own = assigned.addressDetails if assigned else drawn_for(admin.addressDetails)
        self.loop = asyncio.new_event_loop()
        try:
            self.mailbox = Mailbox(self.loop, own, admin)
        except BaseException:
            descriptors.close_loop(self.loop)
            raise
        self.mailbox.unfinished.on_finished = self._finished
        self.myAddress = self.mailbox.address
        self._interrupts = Interrupts(self.loop, self.mailbox.arrive)
        self._is_watching = self._expiry_due = False
        self._is_running = self._is_draining = self._was_aborted = False
        self._result: Any = None
        self._raised: BaseException | None = None
        descriptors.release_in_children(self)
        on_admin = type(self).on_admin if is_child and own.is_admin else None
        if on_admin is not None:
            self.loop.call_soon(on_admin, self.loop)
        self._is_announced = is_child and init.first is not None
        if self._is_announced:
            message, sender = init.first
            self.mailbox.inbox.append(Envelope(sender, message))

    def descriptors(self) -> list[int]:
        """Return the numbers of the loop's own descriptors."""
        return descriptors.descriptors_of(self.loop)

    # --- Addresses and children ---------------------------------------------------------------

    def setAddressManager(self, manager: Any) -> None:
        """Do nothing: scheduleTransmit is given it each time."""

    def deadAddress(self, _manager: Any, address: Any) -> None:
        """Give up what was sent to a child that exited and did not arrive."""
        self.mailbox.unfinished.finish_sent_to(address)

    def lostRemote(self, address: Any) -> None:
        """Do nothing: what is under way to another host ends with its connection."""

    def prepEndpoint(self, assigned: Any, _capabilities: dict[str, Any]) -> Endpoint:
        """Make what a child's transport is made from, just before the child is started."""
        details = assigned.addressDetails
        is_local = isinstance(details, ActorLocalAddress)
        return Endpoint(
            details.addressInstanceNum if is_local else None,
            None if is_local else assigned,
            self.myAddress,
            self.mailbox.admin_address,
            descriptors.inheritable(),
        )

    def connectEndpoint(self, endpoint: Endpoint) -> None:
        """Do nothing: the child reports itself."""

    def external_transport_clone(self) -> Transport:
        """Return another transport of this process, with messages of its own."""
        return type(self)(ExternalCopy(), self.mailbox.admin_address)

    def childResetFileNumList(self) -> list[int]:
        """Return nothing: a child lets go of descriptors by its own rule (descriptors.py)."""
        return []

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
        is_known = self._is_announced and isinstance(intent.message, EndpointConnected)
        if is_known or isinstance(intent.message, Thespian__UpdateWork):
            intent.tx_done(SendStatus.Sent)
            return
        buffers = encode(intent.message)
        self.mailbox.unfinished[intent] = None
        try:
            self.mailbox.on_loop(self._put, intent, buffers)
        except RuntimeError:
            del self.mailbox.unfinished[intent]
            raise

    def _put(self, intent: Any, buffers: Any) -> None:
        self.mailbox.put(intent, intent.message, buffers)
        if not self._expiry_due:
            self._expiry_due = True
            self.loop.call_later(EXPIRY_CHECK_S, self._expire)

    def _expire(self) -> None:
        """Give up intents whose time is over; their messages may arrive all the same."""
        unfinished = [each for each in list(self.mailbox.unfinished) if type(each) is not Delivery]
        self._expiry_due = bool(unfinished)
        if self._expiry_due:
            self.loop.call_later(EXPIRY_CHECK_S, self._expire)
        for intent in unfinished:
            if intent.expired():
                self.mailbox.unfinished.finish(intent, SendStatus.Failed)

    def _finished(self) -> None:
        """Note that the outcome of something that was sent is known."""
        if self._is_draining and not (self._was_aborted and self.mailbox.unfinished):
            self._stop(Thespian__Run_Terminated() if self._was_aborted else None)

    # --- Wake-ups, watches, signals -----------------------------------------------------------

    def addWakeup(self, period: Any, payload: Any) -> None:
        """Deliver a WakeupMessage after ``period``; from any thread."""
        self.mailbox.on_loop(self._interrupts.wake_after, ExpirationTimer(period), payload)

    def set_watch(self, numbers: list[int]) -> None:
        """Deliver a WatchMessage when one of these descriptors is readable."""
        if numbers or self._is_watching:
            self._is_watching = bool(numbers)
            self._interrupts.watch(numbers)

    def interrupt_wait(self, signal_shutdown: bool = False, check_children: bool = False) -> None:
        """Make the loop look for exit requests and dead children; from signal handlers too."""
        self._interrupts.on_signal(exits=signal_shutdown, checks_children=check_children)
        with contextlib.suppress(RuntimeError):  # closed, or inherited from the parent
            self.mailbox.post(self._interrupts.check_signals)

    # --- Running ------------------------------------------------------------------------------

    def run(self, incomingHandler: Any, maximumDuration: timedelta | float | None = None) -> Any:
        """Run the loop and hand each envelope to the handler until it returns something false.

        Without a handler the first envelope is returned. TransmitOnly: nothing is handled, and the
        number of unfinished transmits is returned as soon as one is finished. None when the time is
        over; Thespian__Run_Terminated after ``abort_run``.
        """
        mailbox = self.mailbox
        if incomingHandler is TransmitOnly or isinstance(incomingHandler, TransmitOnly):
            if not mailbox.unfinished:
                return 0
            self._run(None, maximumDuration, is_draining=True)
            return Thespian__Run_Terminated() if self._was_aborted else len(mailbox.unfinished)
        if incomingHandler is None:
            inbox = mailbox.inbox
            return inbox.popleft() if inbox else self._run(self._stop, maximumDuration)
        return self._run(partial(self._handle, incomingHandler), maximumDuration)

    def _run(
        self,
        handle: Callable[[Envelope], object] | None,
        maximum: timedelta | float | None,
        *,
        is_draining: bool = False,
    ) -> Any:
        if self._is_running:
            raise RuntimeError("this transport's loop is running already")
        self._result, self._was_aborted, self._is_draining = None, False, is_draining
        timer = None
        if maximum is not None:
            seconds = ExpirationTimer(maximum).view().remainingSeconds()
            timer = self.loop.call_later(seconds, self._stop, None)
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # an actor or a coroutine may use a system of its own
        self._is_running, self.mailbox.inbox.handle = True, handle
        if self.mailbox.inbox:
            self.loop.call_soon(self.mailbox.inbox.deliver)
        try:
            self.loop.run_forever()
        finally:
            self._is_running, self.mailbox.inbox.handle = False, None
            asyncio._set_running_loop(outer)
            if timer is not None:
                timer.cancel()
        self.mailbox.turn_end.run()  # before the loop pauses
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        return self._result

    def abort_run(self, drain: bool = False) -> None:
        """End the present run; with ``drain`` once all transmits are finished."""
        self._was_aborted = True
        if drain and self.mailbox.unfinished:
            self._is_draining = True
        else:
            self._stop(Thespian__Run_Terminated())

    def _handle(self, handler: Callable[[Envelope], object], envelope: Envelope) -> None:
        try:
            result = handler(envelope)
        except BaseException as error:
            self._raised = error  # run() raises it, SystemExit too
            self._stop(None)
        else:
            if not result:
                self._stop(Thespian__Run_HandlerResult(result))

    def _stop(self, result: Any) -> None:
        if self._is_running:
            self._is_running, self.mailbox.inbox.handle = False, None
            self._result = result
            self.loop.stop()

    def close(self) -> None:
        """Fail what is unfinished and let go of everything."""
        if not self.loop.is_closed():
            self.set_watch([])
            self.mailbox.close()
            descriptors.close_loop(self.loop)

    # --- Status -------------------------------------------------------------------------------

    def _updateStatusResponse(self, response: Any) -> None:
        """Add what is under way to Thespian's status."""
        for tag in list(self.mailbox.unfinished):
            what = tag.kind.__name__ if type(tag) is Delivery else str(tag.message)
            response.addPendingMessage(self.myAddress, tag.targetAddr, what)
        for envelope in self.mailbox.inbox:
            response.addReceivedMessage(envelope.sender, self.myAddress, str(envelope.message))
        response.addWakeups([(self.myAddress, timer) for timer in self._interrupts.wakeups])


# --- Thespian's admin and actor processes, repaired -----------------------------------------------
#
# Each repair names the fault that it removes; all of these faults were measured.

OnEnd = Callable[[ProcessAddress, int], None]


class _Repaired:
    """What admin and actors have in common; before Thespian's classes in the order of bases."""

    _send_intent_to_transport: Callable[[Any], None]
    _checkChildLiveness: Callable[[Any], bool]
    transport: Any
    _addrManager: Any
    _sCBStats: Any
    on_child_end: ClassVar[OnEnd | None] = None

    def _send_intent(self, intent: Any, curtime: Any = None) -> None:
        """Send without the governor, which slept, and without formatting the message for a log."""
        del curtime
        try:
            self.transport.scheduleTransmit(self._addrManager, intent)
        except Exception:  # it is tried again where Thespian deals with it
            self._send_intent_to_transport(intent)
        else:
            self._sCBStats.inc("Actor.Message Send.Transmit Started")

    def _childExited(self, address: Any) -> None:
        """Record that a child's exit was reported; its process is reaped when it has ended.

        Thespian reported it a second time when the process outlived its farewell, and of two
        children that died at once it never reported the second.
        """
        for child in getattr(self, "_child_procs", []):
            if getattr(child, "childRealAddr", child.childAddr) == address:
                child.is_reported = True

    def childDied(self) -> bool:
        """Reap dead children, and report each once."""
        alive = []
        for child in getattr(self, "_child_procs", []):
            if self._checkChildLiveness(child):
                alive.append(child)
                continue
            address = getattr(child, "childRealAddr", child.childAddr)
            details, on_end = address.addressDetails, type(self).on_child_end
            if on_end is not None and isinstance(details, ProcessAddress):
                on_end(details, child.childProc.exitcode)
            if not getattr(child, "is_reported", False):
                self._notify_exited(address)
        self._child_procs = alive
        return True

    def _notify_exited(self, address: Any) -> None:
        notice = TransmitIntent(self.transport.myAddress, ChildActorExited(address))
        try:
            self.transport.scheduleTransmit(None, notice)
        except CannotPickleAddress:
            logger.error("a child died before its address was known: %s", address)  # noqa: TRY400


class RepairedMultiProcAdmin(_Repaired, MultiProcAdmin):  # type: ignore[misc]  # Thespian ships no types
    """The admin of one host, which is also what Thespian has a logger process for."""

    def log_by_itself(self, log_defs: Any) -> None:
        """Log here what others forward, as their loggers begin; tell the starter that all is up."""
        logging.root = logging.Logger.root = logging.RootLogger(logging.WARNING)
        logging.Logger.manager = logging.Manager(logging.root)
        if log_defs:
            logging.config.dictConfig(log_defs)
        else:
            logging.basicConfig()
        self.asLogger = self.transport.myAddress
        started = TransmitIntent(self.addrOfStarter, EndpointConnected(0))
        self.transport.scheduleTransmit(None, started.addCallback(onFailure=actorStartupFailed))
        self._activate()

    def h_LogRecord(self, envelope: Any) -> bool:
        """Log what an actor forwards."""
        logging.getLogger(envelope.message.name).handle(envelope.message)
        return True

    def h_PendingActor(self, envelope: Any) -> Any:
        """Make an actor; ours have the names between hosts that they had in format 2."""
        asked = envelope.message
        asked.actorClassName = _NAMED_ONCE.sub(r"\1.\2.\2.", asked.actorClassName)
        return super().h_PendingActor(envelope)

    def _cleanupAdmin(self, finish_cleanup: Callable[[], None]) -> None:
        """End without a logger to be waited for."""
        finish_cleanup()

    def _not_compatible(self, envelope: Any) -> Any:
        """Ask another host; the entry left behind made every later call for the name hang."""
        try:
            return super()._not_compatible(envelope)
        finally:  # also when there is no other host to ask, which it raises
            for instance, waiting in list(self._pendingChildren.items()):
                if waiting and waiting[0] is envelope:
                    del self._pendingChildren[instance]


class RepairedMultiProcManager(_Repaired, MultiProcManager):  # type: ignore[misc]  # Thespian ships no types
    """What runs one actor."""

    def _createInstance(self) -> None:
        self.transport.mailbox.forward = self._forward
        super()._createInstance()
        actor = self.actorInst
        if hasattr(actor, "created"):
            actor.created(self.transport.loop)
            self.transport.mailbox.inbox.handle_ours = actor.receiveMessage

    def _forward(
        self, target: Any, message: Any, on_sent: Callback | None, on_failed: Callback | None
    ) -> None:
        """Send to a child; what is sent before it is up waits for its address."""
        self._send_intent(
            TransmitIntent(
                target,
                message,
                onSuccess=_outcome(on_sent),
                onError=_outcome(on_failed),
                maxPeriod=timedelta(seconds=DELIVERY_TIMEOUT_S),
            )
        )


def _outcome(callback: Callback | None) -> Callable[[Any, Any], None] | None:
    return None if callback is None else lambda _result, _intent: callback()


def _start_no_logger(
    _transport_class: Any, _transport: Any, admin: Any, _capabilities: Any, log_defs: Any, _: Any
) -> None:
    admin.log_by_itself(log_defs)


def take_over() -> None:
    """Have this process, which runs on our transport, use these classes."""
    multiprocCommon.MultiProcAdmin = RepairedMultiProcAdmin
    multiprocCommon._startLogger = _start_no_logger
    multiprocCommon.MultiProcManager = RepairedMultiProcManager


# --- An actor that goes on as another interpreter's program, with its pid and its address ---------
#
# Theory of operation. ``exec`` replaces the program of a process and keeps its pid, so its parent
# and all who watch it see nothing. Its listening sockets stay open across it, and so none of its
# peers finds it dead: they dial again, and wait until the new program accepts. Connections end, and
# what was on its way on them is lost as on a broken link. The new program makes the actor anew, in
# the way in which Thespian starts a child, and handles one message first: the one it was started
# for.

PROGRAM = "from greenroom.actors.transport.thespian_base import go_on; go_on()"


def hand_over(manager: Any, python: str, message: Any, sender: Any) -> NoReturn:
    """Replace this actor's process by ``python``, where ``message`` of ``sender`` comes first.

    ``manager`` is Thespian's of the actor. Greenroom must be importable there. OSError when there
    is no such program; the actor then goes on as it was.
    """
    transport, kind = manager.transport, type(manager.actorInst)
    listeners = transport.mailbox.links.listeners()
    own, admin = transport.myAddress, transport.mailbox.admin_address
    endpoint = Endpoint(None, own, manager._parentAddr, admin, [])
    endpoint.listeners, endpoint.first = listeners, (message, sender)
    arguments: tuple[Any, ...] = (
        f"{kind.__module__}.{kind.__qualname__}",
        manager.globalName,
        endpoint,
        type(transport),
        *(None, None),  # no source of its own
        manager._parentAddr,
        admin,
        own,  # to tell that it has started, which its parent knows
        manager.asLogger,
        manager._childReqs,
        manager.capabilities,
        *([], None),  # no descriptors to close; it starts no actors
        manager.logdefs,
    )
    description = os.memfd_create("greenroom-actor")
    try:
        with open(description, "wb", closefd=False) as file:
            pickle.dump(arguments, file)
        os.lseek(description, 0, os.SEEK_SET)
        for fd in (description, *listeners.values()):
            os.set_inheritable(fd, True)
        os.execv(python, [python, "-c", PROGRAM, str(description)])
    finally:
        os.close(description)
        for fd in listeners.values():
            os.set_inheritable(fd, False)


def go_on() -> None:
    """Be the actor that :func:`hand_over` has described; returns when it has ended."""
    with open(int(sys.argv.pop()), "rb") as file:
        arguments = pickle.load(file)
    # Before Thespian has a root logger of its own, which takes no handlers: what is imported first
    # knows Python's, and puts it back.
    import_module(arguments[0].rpartition(".")[0])
    startChild(*arguments)


# --- The system base ------------------------------------------------------------------------------


class ActorSystemBase(multiprocessCommon):  # type: ignore[misc]  # Thespian ships no types
    """Thespian's multi-process base over our transport."""

    transportType = Transport

    def __init__(self, system: Any, logDefs: Any = None) -> None:
        system.capabilities["Thespian ActorSystem Name"] = NAME
        system.capabilities["Thespian ActorSystem Version"] = 1
        system.capabilities["Thespian Watch Supported"] = True
        try:
            super().__init__(system, logDefs)
        except BaseException:
            if hasattr(self, "transport"):
                self.transport.close()
            raise

    def shutdown(self) -> None:
        """Stop the system; close the transport even when nothing answers any more."""
        try:
            super().shutdown()
        finally:
            self.transport.close()

    def _startAdmin(self, *args: Any) -> None:
        before, multiprocCommon.MultiProcAdmin = (
            multiprocCommon.MultiProcAdmin,
            RepairedMultiProcAdmin,
        )
        try:
            super()._startAdmin(*args)
        finally:
            multiprocCommon.MultiProcAdmin = before


def install(
    on_admin: Callable[[asyncio.AbstractEventLoop], None] | None = None,
    on_child_end: OnEnd | None = None,
) -> str:
    """Make the base known to Thespian, which finds bases by name; return that name.

    An admin that is forked from this process calls ``on_admin`` with its loop. It calls
    ``on_child_end`` with the address of a child that has ended, and with its exit code or the
    negative number of a signal.
    """
    Transport.on_admin = on_admin
    if on_child_end is not None:
        RepairedMultiProcAdmin.on_child_end = on_child_end
    sys.modules.setdefault(f"thespian.system.{NAME}", sys.modules[__name__])
    return NAME
