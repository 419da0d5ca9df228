"""An asyncio loop inside an actor of the stock base, whose own loop blocks.

Theory of operation. Thespian calls the actor for each message. Here a call enters the asyncio loop,
which runs until it would wait; it leaves behind its selector's descriptor for Thespian to watch,
and a wake-up for its next timer. So whatever the actor does happens on the asyncio loop, as it does
with our own transport.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from thespian.actors import ThespianWatch, WakeupMessage, WatchMessage
from thespian.system.multiprocCommon import MultiProcManager

LEAST_WAIT_S = 0.001  # what is due sooner is waited for: Thespian's wake-ups are coarser
OVERDUE_S = 0.05  # Thespian loses a wake-up that expires while it drains an overload


class _Unwaiting(selectors.EpollSelector):
    """Where a loop would wait, it notes for how long, and calls ``on_idle``."""

    def __init__(self) -> None:
        super().__init__()
        self.on_idle: Callable[[], None] = lambda: None
        self.idle_until: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready."""
        short = timeout is not None and timeout < LEAST_WAIT_S
        ready = super().select(timeout if short else 0)
        if not ready and not short:
            self.idle_until = None if timeout is None else time.monotonic() + timeout
            self.on_idle()
        return ready


class Guest:
    """The asyncio loop of one actor; ``receive`` is the actor's own way to take a message."""

    def __init__(self, manager: Any, receive: Callable[[Any, Any], None]) -> None:
        self._manager = manager
        self._receive = receive
        self._selector = _Unwaiting()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._selector.on_idle = self.loop.stop
        self._wakeup_at: float | None = None

    def receive(self, message: Any, sender: Any) -> ThespianWatch:
        """Handle one message, or what else Thespian calls for; say what to watch from now on."""
        if isinstance(message, WakeupMessage):
            self._wakeup_at = None
        elif not isinstance(message, WatchMessage):
            self.loop.call_soon(self._receive, message, sender)
        self._run()
        return ThespianWatch([self._selector.fileno()])

    def enter(self, callback: Callable[[], None]) -> None:
        """Run what Thespian calls, in a message of the actor's or between two, on the loop."""
        if self.loop.is_running():
            callback()
            return
        wakeup_at = self._wakeup_at
        self.loop.call_soon(callback)
        self._run()
        if self._wakeup_at != wakeup_at:  # Thespian has chosen how long to wait
            self.loop.call_soon_threadsafe(lambda: None)

    def _run(self) -> None:
        self.loop.run_forever()
        due_at = self._selector.idle_until
        if due_at is None:
            return
        now = time.monotonic()
        at = self._wakeup_at
        if at is None or due_at < at or at < now - OVERDUE_S:
            self._wakeup_at = max(due_at, now)
            self._manager.wakeupAfter(timedelta(seconds=max(due_at - now, LEAST_WAIT_S)))


class GuestManager(MultiProcManager):  # type: ignore[misc]  # Thespian ships no types
    """What runs one actor of the stock base; its transport gets what ours have."""

    _guest: Guest | None = None

    def _createInstance(self) -> None:
        super()._createInstance()
        if self.actorInst is not None:
            self._guest = guest = Guest(self, self.actorInst.receiveMessage)
            self.actorInst.receiveMessage = guest.receive
            self.transport.loop = guest.loop
            self.transport.at_turn_end = guest.loop.call_soon
            self.transport.deliveries_at_once = 1
            self.transport.is_quiet = False
            self.transport.send = _nothing_passes_thespian
            self.transport.write = _nothing_passes_thespian
            self.transport.watch_remote = _everybody_is_here

    def _send_intent(self, intent: Any, curtime: Any = None) -> None:
        if self._guest is not None:
            intent.completionCallback = partial(self._guest.enter, intent.completionCallback)
        super()._send_intent(intent, curtime)


def _everybody_is_here(*_args: Any) -> None:
    return None


def _nothing_passes_thespian(*_args: Any) -> bool:
    return False
