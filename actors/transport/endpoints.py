"""The descriptions that transports are made from, and the names that Thespian needs before that."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import logging.config
import os
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from thespian.actors import ActorAddress, ActorSystemStartupFailure, ChildActorExited, PoisonMessage
from thespian.system import multiprocCommon
from thespian.system.addressManager import CannotPickleAddress
from thespian.system.admin import convention
from thespian.system.messages.multiproc import EndpointConnected
from thespian.system.multiprocCommon import MultiProcAdmin, MultiProcManager, actorStartupFailed
from thespian.system.transport import (
    ExternalInterfaceTransportInit,
    TransmitIntent,
    TransportInit__Base,
)

from greenroom.actors.transport import addresses
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.cluster_key import ClusterKeyError, KeyFiles
from greenroom.actors.transport.envelopes import Envelope
from greenroom.actors.transport.sockets import is_listening, keep_listeners, tcp_listener

# --- Descriptors in a forked child ----------------------------------------------------------------
#
# Theory of operation. After a fork both processes hold every descriptor. As long as the child keeps
# a listening socket, its parent's death goes unnoticed and the parent's name stays taken; as long
# as it keeps a pipe, the reader never sees the end of it. Closing the descriptors in the child is
# not enough: the child also has the parent's Python objects, and when one of them is collected
# later, it would close a *new* descriptor of the same number. So each descriptor is replaced by
# /dev/null: the file that was open is released, and the number stays taken. Standard streams and
# log files are kept.

SHORTAGE_GAP_S = 3.0  # more than the pauses between tries

_imported_in = os.getpid()


class HoldsDescriptors(Protocol):
    """Something that only the process that made it may use."""

    def descriptors(self) -> list[int]:
        """Return the numbers of all descriptors that it holds."""


class Shortage:
    """For how long a process has lacked a descriptor that it needed, again and again."""

    def __init__(self) -> None:
        self._since = 0.0
        self._last = float("-inf")

    def failed(self, error: OSError, now: float) -> None:
        """Take why something could not be opened."""
        if error.errno == errno.EMFILE:
            if now - self._last > SHORTAGE_GAP_S:
                self._since = now
            self._last = now

    def over(self) -> None:
        """Note that something was opened."""
        self._last = float("-inf")

    def lasted_s(self, now: float) -> float:
        """Return for how long nothing could be opened; 0 if nothing was tried lately."""
        return self._last - self._since if now - self._last <= SHORTAGE_GAP_S else 0.0


_holders: weakref.WeakSet[HoldsDescriptors] = weakref.WeakSet()


def is_forked() -> bool:
    """Return whether this process has its modules from another one."""
    return os.getpid() != _imported_in


def inheritable() -> list[int]:
    """Return the numbers of the open descriptors that a child, if forked now, should let go."""
    kept = {0, 1, 2} | _numbers_of([sys.stdin, sys.stdout, sys.stderr]) | _logs()
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd not in kept]


def let_go(numbers: Iterable[int]) -> None:
    """Replace the descriptors of these numbers by /dev/null, where they are open."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in numbers:
        if fd != null and _is_open(fd):
            try:
                os.dup2(null, fd, inheritable=False)
            except OSError:  # opened under a higher limit than there is now: it is given no more
                os.close(fd)
    os.close(null)


def release_in_children(holder: HoldsDescriptors) -> None:
    """Have every forked child let go of what ``holder`` holds; until it is collected."""
    _holders.add(holder)


def _logs() -> set[int]:
    """Return the files that are logged to: appending to them together is harmless."""
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    return _numbers_of([getattr(handler, "stream", None) for handler in handlers])


def _numbers_of(streams: Iterable[Any]) -> set[int]:
    numbers = set()
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            numbers.add(stream.fileno())
    return numbers


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _forked() -> None:
    let_go([fd for holder in list(_holders) for fd in holder.descriptors()])


os.register_at_fork(after_in_child=_forked)


# --- Thespian's admin and actor processes, repaired -----------------------------------------------
#
# Each repair names the fault that it removes; all of these faults were measured. A class of actors
# sets ``runs_handlers_once = True`` if its handlers must not run a second time after an exception.

logger = logging.getLogger(__name__)

# A member checks every second that it is registered, so that it is back a second after its leader
# or the network is; in Thespian that takes minutes. A member counts as dead when its transport says
# so, not when it was too busy to register in time. Environment variables override these values.
_CONVENTION = {
    "CONVENTION_REREGISTRATION_PERIOD": timedelta(seconds=1),
    "CONVENTION_RESTART_PERIOD": timedelta(seconds=1),
    "CONVENTION_REGISTRATION_MISS_MAX": 60,
}


class _Repaired:
    """What admin and actors have in common; before Thespian's classes in the order of bases."""

    _send_intent_to_transport: Callable[[Any], None]
    _checkChildLiveness: Callable[[Any], bool]
    transport: Any
    _addrManager: Any
    _sCBStats: Any

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
        """Note that a child's exit was told; its process is reaped when it has ended.

        Thespian told it a second time when the process outlived its farewell, and of two children
        that died at once it forgot the second untold.
        """
        for child in getattr(self, "_child_procs", []):
            if getattr(child, "childRealAddr", child.childAddr) == address:
                child.is_told = True

    def childDied(self) -> bool:
        """Reap dead children, and tell of each once."""
        alive = []
        for child in getattr(self, "_child_procs", []):
            if self._checkChildLiveness(child):
                alive.append(child)
            elif not getattr(child, "is_told", False):
                self._tell_exited(getattr(child, "childRealAddr", child.childAddr))
        self._child_procs = alive
        return True

    def _tell_exited(self, address: Any) -> None:
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

    def _activate(self) -> None:
        super()._activate()
        self.transport.on_host_lost = self._host_lost

    def _host_lost(self, admin: Any) -> None:
        """Remove a host whose admin is dead from the convention at once, not after minutes."""
        if self._cstate._conventionMembers.find(admin) is not None and not self.isShuttingDown():
            logger.warning("lost the actor system at %s", admin)
            self._performIO(self._cstate._remote_system_cleanup(admin))


class RepairedMultiProcManager(_Repaired, MultiProcManager):  # type: ignore[misc]  # Thespian ships no types
    """What runs one actor."""

    def _createInstance(self) -> None:
        super()._createInstance()
        self.transport.on_host_lost = self._host_lost
        actor = self.actorInst
        if getattr(actor, "runs_handlers_once", False):
            actor.receiveMessage = self._once(actor.receiveMessage)

    def _host_lost(self, admin: Any) -> None:
        """Tell the actor that its children there have exited, which Thespian does not."""
        lost = admin.addressDetails
        for child in list(self.childAddresses):
            details = child.addressDetails
            if isinstance(details, ProcessAddress) and details.is_beside(lost):
                self._tell_exited(child)

    def _once(self, receive: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def receive_once(message: Any, sender: Any) -> Any:
            try:
                return receive(message, sender)
            except Exception:
                logger.exception("%s failed on a message", self._actorClass)
                if not isinstance(message, PoisonMessage):
                    poison = PoisonMessage(message, traceback.format_exc())
                    self._send_intent(TransmitIntent(sender, poison))
                return None

        return receive_once


def _start_no_logger(
    _transport_class: Any, _transport: Any, admin: Any, _capabilities: Any, log_defs: Any, _: Any
) -> None:
    admin.log_by_itself(log_defs)


def take_over() -> None:
    """Have this process, which runs on our transport, use these classes."""
    for name, value in _CONVENTION.items():
        if name not in os.environ:
            setattr(convention, name, value)
    multiprocCommon.MultiProcAdmin = RepairedMultiProcAdmin
    multiprocCommon._startLogger = _start_no_logger
    multiprocCommon.MultiProcManager = RepairedMultiProcManager


class Way(NamedTuple):
    """How a process that is no actor comes to a system, where its environment does not say it."""

    gates: tuple[str, ...]  # IP:PORT of hosts of another system; empty for this host's
    environ: Mapping[str, str]  # where the cluster file is


def keys_of(own: ProcessAddress, environ: Mapping[str, str]) -> KeyFiles | None:
    """Return the cluster's files for the process at ``own``; None on a host that is not bound.

    ClusterKeyError when they cannot be used. Without one an admin raises, too; any other process,
    such as a command, then reaches this host's processes only.
    """
    if own.host == addresses.LOOPBACK:
        return None
    path = environ.get("GREENROOM_KEY_FILE")
    if path:
        files = KeyFiles(Path(path))
        files.tls()  # raises now rather than with the first connection
        return files
    if own.is_admin:
        raise ClusterKeyError(
            f"a system bound to {own.host} needs the cluster file: name it by GREENROOM_KEY_FILE"
        )
    return None


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
        # Of an actor that goes on as another program (handover.py): its sockets by their names, and
        # the message that it handles first, with its sender.
        self.listeners: dict[bytes, int] = {}
        self.first: tuple[Any, Any] | None = None


class ExternalCopy(TransportInit__Base):  # type: ignore[misc]
    """Asks for one more transport of a process outside the system."""


class Attach(TransportInit__Base):  # type: ignore[misc]
    """Asks for a transport on a loop that others run; ``on_envelope`` gets what arrives.

    ``gate`` is the admin of another host to belong to, None for this host's; ``environ`` says where
    the cluster file is.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_envelope: Callable[[Envelope], None],
        gate: ProcessAddress | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.loop = loop
        self.on_envelope = on_envelope
        self.gate = gate
        self.environ = os.environ if environ is None else environ


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a transport belongs; ``parent`` is None outside the system."""

    own: ProcessAddress
    admin: Any
    parent: Any = None
    gate: socket.socket | None = None  # of a process of another host's system
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def place_of(init: TransportInit__Base, args: tuple[Any, ...]) -> Place:
    """Find the place of a transport; a forked child lets go of what it has of its parent."""
    if isinstance(init, Endpoint):
        take_over()
        if is_forked():
            let_go(init.inherited)
            asyncio._set_running_loop(None)  # the parent's, which forked inside it
            signal.set_wakeup_fd(-1)  # the parent's too
        keep_listeners(init.listeners)
        assigned = init.assigned.addressDetails if init.assigned else None
        return Place(
            own=assigned or _drawn_beside(init.admin),
            admin=init.admin,
            parent=init.parent,
        )
    if isinstance(init, Attach):
        if init.gate is not None:
            return _place_outside(init.gate, init.environ)
        admin = Naming.getAdminAddr(args[0])
        return Place(own=_drawn_beside(admin), admin=admin, environ=init.environ)
    if isinstance(init, ExternalInterfaceTransportInit):
        admin = Naming.getAdminAddr(args[0])
    elif isinstance(init, ExternalCopy):
        admin = args[0]
    else:
        raise ActorSystemStartupFailure(f"no transport can be made from a {type(init)}")
    return Place(own=_drawn_beside(admin), admin=admin)


def _place_outside(gate: ProcessAddress, environ: Mapping[str, str]) -> Place:
    """Return the place of a process that belongs to another host's system.

    Replicas answer the asking process directly, so it has a gate of its own, at a port of its own.
    """
    host = addresses.host_towards(gate)
    listener = None if host == addresses.LOOPBACK else tcp_listener(host, 0)
    port = 0 if listener is None else listener.getsockname()[1]
    own = drawn_address(host, port)
    return Place(own=own, admin=ActorAddress(gate), environ=environ, gate=listener)


def _drawn_beside(admin: Any) -> ProcessAddress:
    return drawn_address(admin.addressDetails.host, admin.addressDetails.number)


class Naming:
    """The addresses of admins; names in camelCase are Thespian's."""

    @staticmethod
    def getAdminAddr(capabilities: dict[str, Any]) -> Any:
        """Return the address of this host's admin."""
        port = int(capabilities.get("Admin Port", addresses.ADMIN_PORT))
        return ActorAddress(ProcessAddress(addresses.host_of_admin(port), port))

    @staticmethod
    def getAddressFromString(address: Any, adminRouting: bool = False) -> Any:
        """Return the address of the admin at ``host:port``."""
        del adminRouting
        return ActorAddress(addresses.admin_address(address))

    @staticmethod
    def getConventionAddress(capabilities: dict[str, Any]) -> Any:
        """Return the addresses of the convention's leaders; None without a convention."""
        named = capabilities.get("Convention Address.IPv4")
        if not named:
            return None
        each = named if isinstance(named, list) else [named]
        return [Naming.getAddressFromString(address) for address in each]

    @staticmethod
    def probeAdmin(address: Any) -> bool:
        """Return whether a process of this user listens where the admin should."""
        return is_listening([address.addressDetails.socket_name]) is not None


# --- The asyncio loops of transports --------------------------------------------------------------
#
# uvloop, which the gunicorn workers use, is not used here. Over our own sockets it is hardly
# faster: a request and its reply took 117 to 127 us against 112 to 120, and one way it carried
# 197,000 to 219,000 messages/s against 175,000 to 185,000. Besides, actors are forked inside a
# running loop, which uvloop does not expect.


def loop_for(init: TransportInit__Base) -> tuple[asyncio.AbstractEventLoop, bool]:
    """Return the loop of a transport, and whether it is the transport's own to run and close."""
    if isinstance(init, Attach):
        return init.loop, False
    return asyncio.new_event_loop(), True


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that is not running, and end what is left of its tasks."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # a coroutine may use a system of its own
        try:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            asyncio._set_running_loop(outer)
    loop.close()


def descriptors_of(loop: asyncio.AbstractEventLoop) -> list[int]:
    """Return the numbers of the loop's own descriptors: its selector and its way to wake."""
    holders = (getattr(loop, name, None) for name in ("_selector", "_ssock", "_csock"))
    return [holder.fileno() for holder in holders if holder is not None]
