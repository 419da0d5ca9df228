"""A process outside the actor system that takes part in it: its transport on a thread of its own.

The gunicorn workers, the host process and scripts have a loop of their own or none; Thespian's
blocking loop therefore runs on a thread, with the :class:`~understudy.actors.loop.Loop` of that
thread as the way in and out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from understudy.actors import thespian_repairs

thespian_repairs.apply()

from thespian.actors import WatchMessage
from thespian.system import isInternalActorSystemMessage
from thespian.system.messages.admin import (
    PendingActor,
    PendingActorResponse,
    QueryAck,
    QueryExists,
)
from thespian.system.transport import ExternalInterfaceTransportInit, ReceiveEnvelope
from thespian.system.transport.TCPTransport import TCPTransport

from understudy.actors.async_loop import PortLoop, ThreadPortLoop
from understudy.actors.loop import Callback, Loop, intent
from understudy.actors.messages import Address, Identify, IdentifyReply, Process
from understudy.actors.settings import STOCK, default_transport
from understudy.core.errors import NotRunningError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
FIND_RETRY_S = 0.3
CONTROLLER = ("understudy.actors.controller.Controller", "understudy.controller")
PROXY = ("understudy.actors.proxy.Proxy", "understudy.proxy")
_MAX_SLEEP_S = 60.0


class ThreadLoop(Loop):
    """A loop that runs Thespian's transport on its own daemon thread.

    ``on_message(message, sender)`` gets everything that arrives, on that thread.
    """

    def __init__(self, admin_port: int, on_message: Callable[[Any, Address], None]) -> None:
        super().__init__()
        capabilities = {"Admin Port": admin_port}
        self._transport = TCPTransport(ExternalInterfaceTransportInit(), capabilities, None, None)
        self.admin_address: Address = TCPTransport.getAdminAddr(capabilities)
        self.address: Address = self._transport.myAddress
        self._on_message = on_message
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-port", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(
        self,
        target: Address,
        message: Any,
        on_sent: Callback | None = None,
        on_failed: Callback | None = None,
    ) -> None:
        """See :meth:`Loop.send`."""
        sent, failed = self._delivered(on_sent), self._delivered(on_failed)
        self._transport.scheduleTransmit(None, intent(target, message, sent, failed))

    def stop(self) -> None:
        """End the thread and close the transport; what is under way is dropped."""
        self._closing = True
        self.post(lambda: None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        self._transport.set_watch([self.fileno()])
        while not self._closing:
            due = self.next_timer_at()
            sleep_s = _MAX_SLEEP_S if due is None else min(due - time.monotonic(), _MAX_SLEEP_S)
            envelope = self._transport.run(None, timedelta(seconds=max(sleep_s, 0)))
            if isinstance(envelope, ReceiveEnvelope):
                self._guarded(partial(self._received, envelope))
            self.finish_turn()
        self._close_transport()
        self.close()

    def _close_transport(self) -> None:
        """Close it with its idle and half-done connections, which Thespian leaves open."""
        transport = self._transport
        sockets = [transport.socket, *(idle.socket for idle in transport._openSockets.values())]
        sockets += [intent.socket for intent in transport._transmitIntents.values()]
        transport.close()
        for each in sockets:
            each.close()

    def _received(self, envelope: Any) -> None:
        if isinstance(envelope.message, WatchMessage):
            self.run_ready()
        else:
            self._on_message(envelope.message, envelope.sender)


class Port:
    """This process's place in the actor system: messages by class, and actors by global name.

    With our own transport and a ``loop`` that runs, it is on that loop, without a thread.
    """

    def __init__(
        self,
        admin_port: int,
        process: Process,
        transport: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.process = process
        self.admin_port = admin_port
        self.loop = _loop_for(transport or default_transport(), admin_port, self._received, loop)
        self._handlers: dict[type, Callable[[Any, Address], None]] = {
            IdentifyReply: self._identified,
            PendingActorResponse: self._located,
            QueryAck: self._acknowledged,
        }
        self._instances = itertools.count(1)
        self._locating: dict[int, Callable[[Address | None], None]] = {}
        self._identifying: dict[str, Callable[[Address, Process], None]] = {}
        self._probe = threading.Event()

    def on(self, message_class: type, handler: Callable[[Any, Address], None]) -> None:
        """Have ``handler(message, sender)`` called, on the loop's thread, for this class."""
        self._handlers[message_class] = handler

    def open(self, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Start, and make sure that an actor system answers; else close, raise NotRunningError."""
        self.loop.start()
        if not self.answers(timeout_s):
            self.close()
            raise NotRunningError(
                f"no actor system answers on port {self.admin_port} of this host; "
                "start one with `understudy start`, or name its port with UNDERSTUDY_ADMIN_PORT"
            )

    def close(self) -> None:
        """End the port's thread."""
        self.loop.stop()

    def answers(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Ask the actor system's admin whether it is there; blocks, so not on the loop's thread."""
        self._probe.clear()
        self.loop.post(lambda: self.loop.send(self.loop.admin_address, QueryExists()))
        return self._probe.wait(timeout_s)

    def locate(
        self, class_name: str, global_name: str, on_located: Callable[[Address | None], None]
    ) -> None:
        """Ask the admin for the actor of that global name; it is created when there is none.

        On the loop's thread; ``on_located`` gets None when the admin refuses.
        """
        instance = next(self._instances)
        self._locating[instance] = on_located
        request = PendingActor(class_name, None, instance, None, globalName=global_name)
        self.loop.send(
            self.loop.admin_address,
            request,
            on_failed=lambda: self._tell_located(instance, None),
        )

    def identify(self, address: Address, on_identified: Callable[[Address, Process], None]) -> None:
        """Ask one of our actors who it is; on the loop's thread. A dead one never answers."""
        request_id = secrets.token_hex(8)
        self._identifying[request_id] = on_identified
        self.loop.send(address, Identify(request_id=request_id))

    def _received(self, message: Any, sender: Address) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, sender)
        elif not isInternalActorSystemMessage(message):
            logger.warning("ignored an unknown message %s", type(message).__name__)

    def _located(self, message: Any, _sender: Address) -> None:
        address = None if message.errorCode else message.actualAddress
        self._tell_located(message.instanceNum, address)

    def _tell_located(self, instance: int, address: Address | None) -> None:
        on_located = self._locating.pop(instance, None)
        if on_located is not None:
            on_located(address)

    def _identified(self, message: IdentifyReply, sender: Address) -> None:
        on_identified = self._identifying.pop(message.request_id, None)
        if on_identified is not None:
            on_identified(sender, message.process)

    def _acknowledged(self, message: Any, _sender: Address) -> None:
        if not message.inShutdown:
            self._probe.set()


def _loop_for(
    transport: str,
    admin_port: int,
    on_message: Callable[[Any, Address], None],
    running: asyncio.AbstractEventLoop | None,
) -> ThreadLoop | PortLoop:
    if transport == STOCK:
        return ThreadLoop(admin_port, on_message)
    if running is None:
        return ThreadPortLoop(admin_port, on_message)
    return PortLoop(admin_port, on_message, running)


class Finder:
    """Follows a globally named actor through its deaths; all on the loop's thread.

    ``on_found(address, process)`` is called for each new incarnation, ``on_lost()`` at its death.
    Nobody else needs to announce a new one: asking for the name creates it.
    """

    def __init__(
        self,
        port: Port,
        names: tuple[str, str],
        on_found: Callable[[Address, Process], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._port = port
        self._names = names
        self._on_found = on_found
        self._on_lost = on_lost
        self._attempt = 0
        self._stopped = False
        self._unwatch: Callback = lambda: None
        self.found: tuple[Address, Process] | None = None

    def start(self) -> None:
        """Look for the actor, again and again until it answers."""
        if self._stopped:
            return
        self._attempt += 1
        attempt = self._attempt
        self._port.locate(*self._names, lambda address: self._located(attempt, address))
        self._port.loop.call_later(FIND_RETRY_S, lambda: self._retry(attempt))

    def stop(self) -> None:
        """Follow it no more."""
        self._stopped = True
        self._unwatch()

    def _located(self, attempt: int, address: Address | None) -> None:
        if attempt == self._attempt and address is not None:
            self._port.identify(address, lambda _, process: self._identified(address, process))

    def _identified(self, address: Address, process: Process) -> None:
        if self._stopped or self.found is not None:
            return
        self.found = (address, process)
        self._unwatch = self._port.loop.watch_process(process, self._exited)
        self._on_found(address, process)

    def _retry(self, attempt: int) -> None:
        if attempt == self._attempt and self.found is None:
            self.start()

    def _exited(self) -> None:
        self.found = None
        self._on_lost()
        self.start()
