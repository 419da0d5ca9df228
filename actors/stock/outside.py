"""The stock transport of a process that is no actor, on a thread beside the asyncio loop.

What arrives crosses to the loop by ``call_soon_threadsafe``; what is sent crosses to the thread by
an eventfd that Thespian watches. Nothing else is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from thespian.actors import WatchMessage
from thespian.system.transport import ExternalInterfaceTransportInit, ReceiveEnvelope
from thespian.system.transport.TCPTransport import TCPTransport

from greenroom.actors.transport.admission import Trouble

STOP_TIMEOUT_S = 5.0
_LONGEST_RUN = timedelta(minutes=1)


class OutsideTransport:
    """A stock transport whose messages are handled on ``loop``; used on that loop's thread."""

    deliveries_at_once = 1  # each costs the stock transport a third of a millisecond
    is_quiet = False

    def __init__(
        self,
        admin_port: int,
        loop: asyncio.AbstractEventLoop,
        on_envelope: Callable[[Any], None],
    ) -> None:
        capabilities = {"Admin Port": admin_port}
        self.loop = loop
        self.admin_address = TCPTransport.getAdminAddr(capabilities)
        self._transport = TCPTransport(ExternalInterfaceTransportInit(), capabilities, None, None)
        self.myAddress = self._transport.myAddress
        self._on_envelope = on_envelope
        self._outgoing: deque[Any] = deque()  # None: the end
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="stock-transport", daemon=True)
        self._thread.start()

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """See :class:`greenroom.actors.loop.Transport`."""
        self.loop.call_soon(callback)

    def send(self, *_args: Any) -> bool:
        """See Transport: nothing passes Thespian."""
        return False

    def write(self, _target: Any) -> None:
        """Do nothing: see Transport."""

    def watch_remote(self, *_args: Any) -> None:
        """Watch nothing: everybody is on this host."""

    def trouble_with(self, _gate: Any) -> Trouble:
        """Return nothing: there is no other host."""
        return Trouble()

    def scheduleTransmit(self, _manager: Any, intent: Any) -> None:
        """Send; what completes the intent runs on the loop."""
        intent.completionCallback = partial(self._cross, intent.completionCallback)
        self._put(intent)

    def close(self) -> None:
        """End the thread; what is under way is dropped."""
        if self._is_closed:
            return
        self._put(None)
        self._is_closed = True
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _put(self, intent: Any) -> None:
        if not self._is_closed:
            self._outgoing.append(intent)
            os.eventfd_write(self._wake_fd, 1)

    def _cross(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(callback, *args)

    # --- On the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._transport.set_watch([self._wake_fd])
        while True:
            envelope = self._transport.run(None, _LONGEST_RUN)
            if not isinstance(envelope, ReceiveEnvelope):
                continue
            if not isinstance(envelope.message, WatchMessage):
                self._cross(self._on_envelope, envelope)
            elif not self._send_outgoing():
                self._close_transport()
                return

    def _send_outgoing(self) -> bool:
        """Send what was put; False at the end."""
        os.eventfd_read(self._wake_fd)  # before the first is taken: later ones wake again
        while self._outgoing:
            intent = self._outgoing.popleft()
            if intent is None:
                return False
            self._transport.scheduleTransmit(None, intent)
        return True

    def _close_transport(self) -> None:
        """Close it with its idle and half-done connections, which Thespian leaves open."""
        transport = self._transport
        sockets = [transport.socket, *(idle.socket for idle in transport._openSockets.values())]
        sockets += [intent.socket for intent in transport._transmitIntents.values()]
        transport.close()
        for each in sockets:
            each.close()
