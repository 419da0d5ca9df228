"""Our Thespian system base, and the transport that Thespian calls, on one asyncio loop.

Theory of operation. Thespian runs a process by calling :meth:`Transport.run` with a handler; the
loop runs as long, and the handler is called inside it for each envelope, so an actor may start
tasks on that loop. Envelopes that arrive while ``run`` is not running wait. A process with a loop
of its own *attaches*: it gives the loop and a callback, and never calls ``run``.

The loop belongs to the thread that runs it. Another thread may schedule a transmit at any time: it
pickles the message itself and posts the rest to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from logging import LogRecord
from time import monotonic
from typing import Any

from thespian.actors import ActorAddress, ActorExitRequest, WakeupMessage, WatchMessage
from thespian.system import multiprocCommon
from thespian.system.addressManager import ActorLocalAddress, CannotPickleAddress
from thespian.system.messages.multiproc import ChildMayHaveDied, EndpointConnected
from thespian.system.multiprocCommon import multiprocessCommon
from thespian.system.timing import ExpirationTimer, currentTime
from thespian.system.transport import (
    SendStatus,
    Thespian__Run_HandlerResult,
    Thespian__Run_Terminated,
    Thespian__UpdateWork,
    TransmitOnly,
    TransportInit__Base,
)
from thespian.system.utilis import thesplog_control

from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.transport import endpoints as descriptors, envelopes
from greenroom.actors.transport.addresses import ProcessAddress, parse_address
from greenroom.actors.transport.admission import Trouble
from greenroom.actors.transport.beats import BeatLink
from greenroom.actors.transport.cluster_key import ClusterKeyError
from greenroom.actors.transport.connection import Unsent
from greenroom.actors.transport.endpoints import (
    Attach,
    Endpoint,
    ExternalCopy,
    Naming,
    RepairedMultiProcAdmin,
    Way,
    close_loop,
    descriptors_of,
    keys_of,
    loop_for,
    place_of,
)
from greenroom.actors.transport.envelopes import Envelope, decode, encode
from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.links import Links, Peer

# --- Messages of our own code, past Thespian ------------------------------------------------------


class Delivery:
    """A message of our own code on its way: what Thespian's TransmitIntent is, at a tenth of it.

    It has no time limit: it ends when it is acknowledged, or with its target.
    """

    __slots__ = ("kind", "on_failed", "on_sent", "target")

    def __init__(
        self,
        target: Any,
        kind: type,
        on_sent: Callable[[], None] | None,
        on_failed: Callable[[], None] | None,
    ) -> None:
        self.target = target
        self.kind = kind
        self.on_sent = on_sent
        self.on_failed = on_failed

    def tx_done(self, status: Any) -> None:
        """Call back."""
        callback = self.on_sent if status is SendStatus.Sent else self.on_failed
        if callback is not None:
            callback()


def target_of(intent: Any) -> Any:
    """Return where a Delivery goes, or an intent of Thespian's."""
    return intent.target if type(intent) is Delivery else intent.targetAddr


# --- Messages that wait for their handler ---------------------------------------------------------
#
# Theory of operation. A handler may take long, and meanwhile the loop must write what handlers send
# and read what peers answer. So after ``SLICE_S`` of handling, the loop gets its turn, and the
# remaining messages are handled after that. But the loop then reads more messages. It acknowledges
# what it reads, and only unacknowledged messages hold their sender back. So once more than
# ``MAX_WAITING_BYTES`` wait, they are handled before anything else is read.

SLICE_S = 0.005
MAX_WAITING_BYTES = 1024 * 1024


class Inbox:
    """Envelopes in the order of their arrival; true when there are any."""

    def __init__(self) -> None:
        self._envelopes: deque[Envelope] = deque()
        self._bytes = 0  # of those that wait

    def __len__(self) -> int:
        return len(self._envelopes)

    def __iter__(self) -> Iterator[Envelope]:
        return iter(self._envelopes)

    def put(self, envelope: Envelope) -> None:
        """Add one."""
        self._envelopes.append(envelope)
        self._bytes += envelope.size

    def put_first(self, envelope: Envelope) -> None:
        """Add one that all others wait for."""
        self._envelopes.appendleft(envelope)
        self._bytes += envelope.size

    def take(self) -> Envelope:
        """Remove the first; IndexError when there is none."""
        envelope = self._envelopes.popleft()
        self._bytes -= envelope.size
        return envelope

    def take_slice(self) -> Iterator[Envelope]:
        """Remove and yield what is to be handled before the loop gets its turn."""
        ends_at = monotonic() + SLICE_S
        for _ in range(len(self._envelopes)):
            yield self.take()
            if monotonic() > ends_at and self._bytes < MAX_WAITING_BYTES:
                return


# --- Wake-ups, readable descriptors and signals ---------------------------------------------------

logger = logging.getLogger(__name__)


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

    def note_signal(self, *, exits: bool, checks_children: bool) -> None:
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
            self._loop.call_soon(self._tell)
        self._ready.append(fd)

    def _tell(self) -> None:
        ready, self._ready = self._ready, []
        self._arrive(WatchMessage(ready))


OnLost = Callable[[bool], None]  # gets whether the process is certainly dead


NAME = "greenroomBase"

if "THESPLOG_FILE_MAXSIZE" not in os.environ:  # else each process writes Thespian's log in /tmp
    thesplog_control(logging.WARNING, useLogging=False, tmpFileMaxSize=0)

EXPIRY_CHECK_S = 1.0
Handler = Callable[[Any], Any]


class Transport(Naming):
    """One process's place in the actor system; names in camelCase are Thespian's."""

    deliveries_at_once = 256  # see greenroom.actors.runtime.loop.Transport

    _handler: Handler | None = None
    # Called with the address of another host's admin that is dead, by then outside of a turn.
    on_host_lost: Callable[[Any], None] | None = None

    def __init__(self, init: TransportInit__Base, *args: Any) -> None:
        place = place_of(init, args)
        own, self._admin = place.own, place.admin
        self._prepare()
        self._pid = os.getpid()
        self.myAddress = ActorAddress(own)
        self._own = own
        self.loop, self._is_own_loop = loop_for(init)
        self._interrupts = Interrupts(self.loop, self._arrive)
        self._thread: int | None = None  # the one that runs the loop
        try:
            keys = keys_of(own, place.environ)
            self.links = Links(self.loop, own, self, keys, place.gate)
        except (OSError, ClusterKeyError):
            if place.gate is not None:
                place.gate.close()
            if self._is_own_loop:
                close_loop(self.loop)
            raise
        descriptors.release_in_children(self)
        if place.parent is not None and own.is_admin:
            self.loop.call_soon(Pulse().keep_beating, self.loop)  # actors see to theirs
        self._is_announced = isinstance(init, Endpoint) and init.first is not None
        if isinstance(init, Endpoint) and init.first is not None:
            message, sender = init.first
            self._inbox.put(Envelope(sender, message))
        if isinstance(init, Attach):
            self._handler = init.on_envelope
            self._is_running = True
            self._thread = threading.get_ident() if self.loop.is_running() else None
            self.loop.call_soon_threadsafe(self._attached)

    def _attached(self) -> None:
        self._thread = threading.get_ident()

    def _prepare(self) -> None:
        self._inbox = Inbox()
        self._unfinished: dict[Any, None] = {}  # intents; copied to be iterated: threads add to it
        self._is_watching = False
        self._is_running = False
        self._is_sending_only = False
        self._is_delivering = self._deliver_due = False
        self._is_closed = False
        self._result: Any = None
        self._raised: BaseException | None = None
        self._draining = self._was_aborted = False
        self._expiry_due = False
        self._watching: dict[str, list[OnLost]] = {}  # by the address's text

    # --- Addresses ----------------------------------------------------------------------------

    @property
    def admin_address(self) -> Any:
        """Return the address of this host's admin."""
        return self._admin

    def setAddressManager(self, manager: Any) -> None:
        """Do nothing: scheduleTransmit is given it each time."""

    def deadAddress(self, _manager: Any, address: Any) -> None:
        """Give up what was sent to a child that exited and did not arrive."""
        for intent in [each for each in list(self._unfinished) if target_of(each) == address]:
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

    def childResetFileNumList(self) -> list[int]:
        """Return nothing: a child lets go of descriptors by its own rule (endpoints.py)."""
        return []

    def descriptors(self) -> list[int]:
        """Return the numbers of the sockets and of the loop's own descriptors."""
        if self._is_closed:
            return []
        numbers = self.links.descriptors() if hasattr(self, "links") else []
        return numbers + (descriptors_of(self.loop) if self._is_own_loop else [])

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
        self._unfinished[intent] = None
        if threading.get_ident() == self._thread:
            self._submit(intent, buffers)
            return
        try:
            self._post(self._submit, intent, buffers)
        except RuntimeError:
            del self._unfinished[intent]
            raise

    def send(
        self,
        target: Any,
        message: Any,
        on_sent: Callable[[], None] | None,
        on_failed: Callable[[], None] | None,
    ) -> bool:
        """Send to another process and return True, if its address is known; on the loop's thread.

        The acknowledgement is not urgent, so it may come with others.
        """
        address = target.addressDetails
        if type(address) is not ProcessAddress or address == self._own:
            return False  # a child that is not up yet, or this process
        buffers = encode(message)
        if on_sent is None and on_failed is None and self.links.send_loosely(address, buffers):
            return True
        delivery = Delivery(target, type(message), on_sent, on_failed)
        self._unfinished[delivery] = None
        self.links.send(address, buffers, delivery, is_patient=True)
        return True

    @property
    def starved_s(self) -> float:
        """See :class:`greenroom.actors.runtime.loop.Transport`."""
        return self.links.shortage.lasted_s(self.loop.time())

    def write(self, target: Any) -> None:
        """Write what was sent to ``target`` now; on the loop's thread only."""
        self.links.write(target.addressDetails)

    def _submit(self, intent: Any, buffers: list[Buffer]) -> None:
        address = intent.targetAddr.addressDetails
        if address == self._own:
            self.loop.call_soon(self._arrived_from_self, intent)
        elif isinstance(address, ProcessAddress):
            self.links.send(address, buffers, intent)
            if not self._expiry_due:
                self._expiry_due = True
                self.loop.call_later(EXPIRY_CHECK_S, self._expire)
        else:
            self.loop.call_soon(self._finish, intent, SendStatus.DeadTarget)

    def _arrived_from_self(self, intent: Any) -> None:
        self._inbox.put(Envelope(intent.targetAddr, intent.message))
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
        for intent in list(self._unfinished):
            if type(intent) is Delivery:
                continue
            quits_at = intent._quitTime._time_to_quit
            if quits_at is not None and quits_at <= now:
                self._finish(intent, SendStatus.Failed)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this actor system connection was made by process {self._pid}; after a fork, "
                "make a new ActorSystem in the child"
            )
        self.loop.call_soon_threadsafe(callback, *args)

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """See :class:`greenroom.actors.runtime.loop.Transport`."""
        self.links.at_turn_end(callback)

    # --- What the peers tell ------------------------------------------------------------------

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """See :class:`~greenroom.actors.transport.links.Shell`."""
        if sender.sender is None:
            sender.sender = ActorAddress(sender.address)
        try:
            message = decode(buffers, is_exact=sender.has_our_format)
        except Exception:
            logger.exception("cannot read a message of %s; it is sent back", sender.address)
            self.links.send(sender.address, envelopes.sent_back(buffers), tag=None)
            return
        if type(message) is envelopes.Unreadable:
            message = envelopes.poison_from(message)
            if message is None:
                return
        envelope = Envelope(sender.sender, message, sum(map(len, buffers)))
        if type(message) is EndpointConnected:
            self._inbox.put_first(envelope)  # what was sent to the child waits for its address
        else:
            self._inbox.put(envelope)

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
        if not isinstance(getattr(tag, "message", None), LogRecord):  # it would log without end
            logger.error("a message was not sent: %s", reason)
        self.loop.call_soon(self._finish, tag, SendStatus.Failed)

    def lost(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """See Shell."""
        self._tell_watchers(address, is_certain=is_certain)
        if address.is_admin and self.on_host_lost is not None:
            self.loop.call_soon(self.on_host_lost, ActorAddress(address))

    # --- Watching processes of other hosts ----------------------------------------------------

    def is_here(self, target: Any) -> bool:
        """See :class:`greenroom.actors.runtime.loop.Transport`."""
        address = target.addressDetails
        return type(address) is ProcessAddress and address.host == self._own.host

    def watch_remote(self, target: Any, on_lost: OnLost) -> Callable[[], None] | None:
        """See :class:`greenroom.actors.runtime.loop.Transport`."""
        address = target.addressDetails
        if type(address) is not ProcessAddress or address.host == self._own.host:
            return None
        watching = self._watching.setdefault(address.text, [])
        watching.append(on_lost)
        self.links.reach(address)

        def cancel() -> None:
            if on_lost in watching:
                watching.remove(on_lost)
                if not watching and self._watching.get(address.text) is watching:
                    del self._watching[address.text]

        return cancel

    def beat_link(self, target: Any, on_answer: Callable[[bytes], None]) -> BeatLink | None:
        """See :class:`greenroom.actors.runtime.loop.Transport`."""
        return self.links.beat_link(target.addressDetails, on_answer)

    def answer_beats(self, answer: Callable[[bytes], bytes]) -> None:
        """See :class:`greenroom.actors.runtime.loop.Transport`."""
        self.links.answer_beats(answer)

    def trouble_with(self, gate: Any) -> Trouble:
        """Return why the host of an address could not be reached the last time."""
        return self.links.trouble_with(gate.addressDetails)

    def forgotten(self, address: ProcessAddress) -> None:
        """See Shell; what the other end could not send is lost, as if it had not been reached."""
        self._tell_watchers(address, is_certain=False)

    def _tell_watchers(self, address: ProcessAddress, *, is_certain: bool) -> None:
        for on_lost in list(self._watching.get(address.text, ())):
            self.links.loop.call_soon(on_lost, is_certain)

    # --- Wake-ups, watches, signals -----------------------------------------------------------

    def addWakeup(self, period: Any, payload: Any) -> None:
        """Deliver a WakeupMessage after ``period``; from any thread."""
        timer = ExpirationTimer(period)
        if threading.get_ident() == self._thread:
            self._interrupts.wake_after(timer, payload)
        else:
            self._post(self._interrupts.wake_after, timer, payload)

    def set_watch(self, numbers: list[int]) -> None:
        """Deliver a WatchMessage when one of these descriptors is readable."""
        if numbers or self._is_watching:
            self._is_watching = bool(numbers)
            self._interrupts.watch(numbers)

    def interrupt_wait(self, signal_shutdown: bool = False, check_children: bool = False) -> None:
        """Make the loop look for exit requests and dead children; from signal handlers too."""
        self._interrupts.note_signal(exits=signal_shutdown, checks_children=check_children)
        with contextlib.suppress(RuntimeError):  # closed, or inherited from the parent
            self._post(self._interrupts.check_signals)

    def _arrive(self, message: Any) -> None:
        self._inbox.put(Envelope(self.myAddress, message))
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
        if incomingHandler is None and self._inbox:
            return self._inbox.take()
        self._handler = incomingHandler
        if self._inbox:
            self._deliver_soon()
        return self._run_loop(maximumDuration)

    def _run_sending(self, maximum: timedelta | float | None) -> Any:
        if not self._unfinished:
            return 0
        self._is_sending_only = True
        try:
            self._run_loop(maximum)
        finally:
            self._is_sending_only = False
        return Thespian__Run_Terminated() if self._was_aborted else len(self._unfinished)

    def _run_loop(self, maximum: timedelta | float | None) -> Any:
        if self._is_running or not self._is_own_loop:
            raise RuntimeError("this transport's loop is running already")
        self._result, self._draining, self._was_aborted = None, False, False
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
        self.links.finish_turn()
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        return self._result

    def abort_run(self, drain: bool = False) -> None:
        """End the present run; with ``drain`` once all transmits are finished."""
        self._was_aborted = True
        if drain and self._unfinished:
            self._draining = True
        else:
            self._stop(Thespian__Run_Terminated())

    def deliver(self) -> None:
        """Hand what has arrived to the handler; see Shell and :class:`Inbox`."""
        if self._deliver_due or self._is_delivering or not self._is_running:
            return
        if self._is_sending_only:
            return
        self._is_delivering = True
        try:
            for envelope in self._inbox.take_slice():
                self._deliver(envelope)
                if not self._is_running:
                    break
        finally:
            self._is_delivering = False
            if self._inbox and self._is_running:
                self._deliver_soon()

    def _deliver_soon(self) -> None:
        if not self._deliver_due:
            self._deliver_due = True
            self.loop.call_soon(self._deliver_now)

    def _deliver_now(self) -> None:
        self._deliver_due = False
        self.deliver()

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
        self.links.close()
        self._is_closed = True
        if self._is_own_loop:
            close_loop(self.loop)

    # --- Status -------------------------------------------------------------------------------

    def _updateStatusResponse(self, response: Any) -> None:
        """Add what is under way to Thespian's status."""
        for intent in list(self._unfinished):
            if type(intent) is Delivery:
                response.addPendingMessage(self.myAddress, intent.target, intent.kind.__name__)
            else:
                response.addPendingMessage(self.myAddress, intent.targetAddr, str(intent.message))
        for envelope in self._inbox:
            response.addReceivedMessage(envelope.sender, self.myAddress, str(envelope.message))
        response.addWakeups([(self.myAddress, timer) for timer in self._interrupts.wakeups])


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


def install() -> str:
    """Make the base known to Thespian, which finds bases by name; return that name."""
    sys.modules.setdefault(f"thespian.system.{NAME}", sys.modules[__name__])
    return NAME


def attach(
    admin_port: int,
    loop: asyncio.AbstractEventLoop,
    on_envelope: Callable[[Any], None],
    way: Way | None = None,
) -> Transport:
    """Give this process, which is no actor, a transport on ``loop``; envelopes go to a callback.

    Without a ``way`` it belongs to this host's system, and has all else by environment.
    """
    if way is None:
        init = Attach(loop, on_envelope)
    else:
        gate = parse_address(way.gates[0]) if way.gates else None
        init = Attach(loop, on_envelope, gate, way.environ)
    return Transport(init, {"Admin Port": admin_port})
