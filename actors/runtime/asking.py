"""Requests to the controller, each sent until it is answered.

Whatever becomes of a controller, of its host or of an answer on its way: a request is sent again,
with its id, to the controller that leads by then. The controller carries it out once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from greenroom.actors.messages.admin import Request, RequestReply
from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Repeats
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.core.errors import StateNotReadableError, StateNotSavedError

LOOK_AGAIN_S = 0.5  # whether there is a later controller: one that is cut off does not say so
_OF_STORE = frozenset({StateNotSavedError.__name__, StateNotReadableError.__name__})
REPEAT_S = 2.0  # a lost request or answer is asked again; requests are idempotent

OnReply = Callable[[RequestReply], None]


class _Pending:
    """A request that is not answered yet."""

    __slots__ = ("epoch", "on_reply", "repeat_at", "request")

    def __init__(self, request: Request, on_reply: OnReply) -> None:
        self.request = request
        self.on_reply = on_reply
        self.repeat_at = 0.0
        self.epoch = 0  # of the latest controller that it was sent to, where several may lead


class ControllerRequests:
    """Follows the controller, and sends it what it is asked for."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._pending: dict[str, _Pending] = {}
        self._repeats = Repeats(port.loop)
        self._finder = Finder(port, CONTROLLER, lambda *_: self._met())
        port.on(RequestReply, self._replied)

    def start(self) -> None:
        """Look for the controller from now on."""
        self._finder.start()

    def stop(self) -> None:
        """Follow it no more."""
        self._finder.stop()

    @property
    def is_found(self) -> bool:
        """Whether a controller is known, alive as far as that is."""
        return self._finder.found is not None

    def ask(self, request: Request, on_reply: OnReply) -> None:
        """Have ``on_reply`` called, on the loop, with what the controller answers; on any thread.

        Call :meth:`ask_again` every LOOK_AGAIN_S until then, and :meth:`forget` to wait no longer.
        """
        self._pending[request.request_id] = _Pending(request, on_reply)
        self._port.loop.post(lambda: self._send(request.request_id))

    def ask_again(self, request_id: str) -> None:
        """Look for a stopped controller's successor; send again what is late. On any thread."""

        def send() -> None:
            self._finder.doubt()
            pending = self._pending.get(request_id)
            if pending is not None and time.monotonic() >= pending.repeat_at:
                self._send(request_id)

        self._port.loop.post(send)

    def forget(self, request_id: str) -> None:
        """Wait no longer; harmless when it is answered; on any thread."""
        self._pending.pop(request_id, None)

    def _met(self) -> None:
        for request_id in list(self._pending):
            self._send(request_id)

    def _send(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is None or self._finder.found is None:
            return
        pending.repeat_at = time.monotonic() + REPEAT_S
        pending.epoch = max(pending.epoch, self._finder.epoch)
        self._repeats.send(request_id, self._finder.found[0], pending.request)

    def _replied(self, message: RequestReply, sender: Address) -> None:
        pending = self._pending.get(message.request_id)
        if pending is None:
            return
        # A controller that cannot use its store may not know of its successor, which may have made
        # the change. So only the latest one's word that nothing was changed is believed.
        if message.error_kind in _OF_STORE and not self._finder.is_latest(sender, pending.epoch):
            return
        self.forget(message.request_id)
        pending.on_reply(message)


def new_id() -> str:
    """Return the id of a new request."""
    return secrets.token_hex(16)
