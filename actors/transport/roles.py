"""Thespian's admin and actor processes, with the repairs that a base can make.

Each repair names the trouble, seen by measurement, that it removes. A class of actors whose handler
must not run a second time after an exception says ``runs_handlers_once = True``.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from thespian.actors import ChildActorExited, PoisonMessage
from thespian.system import multiprocCommon
from thespian.system.addressManager import CannotPickleAddress
from thespian.system.admin import convention
from thespian.system.multiprocCommon import MultiProcAdmin, MultiProcManager
from thespian.system.transport import TransmitIntent

from greenroom.actors.transport.addresses import ProcessAddress

logger = logging.getLogger(__name__)

# A member looks every second whether it is registered, so that it is back in a second when its
# leader is, or the network; Thespian did so after some minutes. It has died when its transport says
# so, not when it was too busy to register in time. What the environment says goes first.
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
        self._replace_logger()
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

    def _replace_logger(self) -> None:
        """Do nothing: only the admin has a logger."""


class RepairedMultiProcAdmin(_Repaired, MultiProcAdmin):  # type: ignore[misc]  # Thespian ships no types
    """The admin of one host."""

    def _replace_logger(self) -> None:
        """Start another logger; Thespian's way raised, for an attribute it has by another name."""
        process = getattr(self, "asLogProc", None)
        if process is None or hasattr(self, "_exiting") or self._checkChildLiveness(process):
            return
        multiprocCommon._startLogger(
            type(self.transport),
            self.transport,
            self,
            self.capabilities,
            self.logdefs,
            self.mpcontext,
        )

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
        """Have a host whose admin is dead leave the convention at once; it waited for minutes."""
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
        """Tell the actor that its children there have exited; Thespian told nobody."""
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


def take_over() -> None:
    """Have this process, which runs on our transport, use these classes."""
    for name, value in _CONVENTION.items():
        if name not in os.environ:
            setattr(convention, name, value)
    multiprocCommon.MultiProcAdmin = RepairedMultiProcAdmin
    multiprocCommon.MultiProcManager = RepairedMultiProcManager
