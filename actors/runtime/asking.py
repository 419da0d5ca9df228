"""Requests to the controller, each sent until it is answered.

Whatever becomes of a controller, of its host or of an answer on its way: a request is sent again,
with its id, to the controller that leads by then. The controller carries it out once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from greenroom.actors.messages.admin import Request, RequestReply
from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Repeats
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.core.errors import NotRunningError, StateNotReadableError, StateNotSavedError

LOOK_AGAIN_S = 0.5  # whether there is a later controller: one that is cut off does not say so
_OF_STORE = frozenset({StateNotSavedError.__name__, StateNotReadableError.__name__})
REPEAT_S = 2.0  # a lost request or answer is asked again; requests are idempotent


@dataclass(slots=True)
class _Pending:
    """A request that is not answered yet."""

    request: Request
    answer: asyncio.Future[RequestReply]
    waiting: int = 0  # a client of the admin API may repeat a request while it is under way
    repeat_at: float = 0.0
    epoch: int = 0  # of the latest controller that it was sent to, where several may lead


class ControllerRequests:
    """Follows the controller, and sends it what it is asked for; all on the port's loop.

    ``is_there`` says whether waiting is of any use: where it has said no for ``patience_s``, a
    request ends with a NotRunningError that says ``why``.
    """

    def __init__(
        self, port: Port, is_there: Callable[[], Awaitable[bool]], patience_s: float, why: str
    ) -> None:
        self._is_there = is_there
        self._patience_s = patience_s
        self._why = why
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

    async def ask(self, request: Request, timeout_s: float | None = None) -> RequestReply:
        """Return the controller's answer.

        The request is sent again, with its id, when the controller was restarted or an answer is
        late. TimeoutError past ``timeout_s``, NotRunningError when there is nothing to wait for.
        """
        now = asyncio.get_running_loop().time
        there_at = began_at = now()
        pending = self._pending.get(request.request_id)
        if pending is None:
            pending = _Pending(request, asyncio.get_running_loop().create_future())
            self._pending[request.request_id] = pending
            self._send(request.request_id)
        pending.waiting += 1
        try:
            while not pending.answer.done():
                left_s = LOOK_AGAIN_S if timeout_s is None else began_at + timeout_s - now()
                if left_s <= 0:
                    raise TimeoutError(
                        f"{request.operation} was not answered within {timeout_s:g} s"
                        f"{self._absence}; it may have been carried out"
                    )
                done, _ = await asyncio.wait((pending.answer,), timeout=min(left_s, LOOK_AGAIN_S))
                if done:
                    break
                self._finder.doubt()  # a stopped controller may have a successor
                if time.monotonic() >= pending.repeat_at:
                    self._send(request.request_id)
                if await self._is_there():
                    there_at = now()
                elif now() - there_at > self._patience_s:
                    raise NotRunningError(self._why)
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                del self._pending[request.request_id]
        return pending.answer.result()

    @property
    def _absence(self) -> str:
        if self.is_found:
            return ""
        return ", for no controller was found: the host that leads may be stopped, or cut off"

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
        if not pending.answer.done():
            pending.answer.set_result(message)


def new_id() -> str:
    """Return the id of a new request."""
    return secrets.token_hex(16)
