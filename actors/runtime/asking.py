"""The controller, as those see it that ask it to carry out operations.

Whatever becomes of a controller, of its host or of an answer on its way: a request is sent again,
with its id, to the controller that leads by then. The controller carries it out once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from greenroom.actors.messages.admin import Request, RequestReply
from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.core.errors import NotRunningError, StateNotReadableError, StateNotSavedError

CHECK_EVERY_S = 0.5  # whether there is a later controller: one that is cut off does not say so
_OF_STORE = frozenset({StateNotSavedError.__name__, StateNotReadableError.__name__})


class Controller(Finder):
    """Follows the controller, and asks it; all on the port's loop.

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
        late. TimeoutError past ``timeout_s``, NotRunningError when there is nothing to wait for.
        """
        asked_epoch = 0  # of the latest controller that it was sent to, where several may lead

        def target() -> Address | None:
            nonlocal asked_epoch
            if self.found is None:
                return None
            asked_epoch = max(asked_epoch, self.epoch)
            return self.found[0]

        def is_final(reply: RequestReply, sender: Address) -> bool:
            # A controller that cannot use its store may not know of its successor, which may have
            # made the change. So only the latest one's word that nothing was changed is believed.
            return reply.error_kind not in _OF_STORE or self.is_latest(sender, asked_epoch)

        now = asyncio.get_running_loop().time
        there_at = now()
        asking = asyncio.ensure_future(self._port.ask(target, request, timeout_s, is_final))
        try:
            while not (await asyncio.wait((asking,), timeout=CHECK_EVERY_S))[0]:
                self.doubt()  # a stopped controller may have a successor
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


def new_id() -> str:
    """Return the id of a new request."""
    return secrets.token_hex(16)
