"""Messages of our own code on their way, past Thespian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thespian.system.transport import SendStatus


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
