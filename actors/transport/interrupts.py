"""What reaches a process besides messages: wake-ups, readable descriptors, signals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from thespian.actors import ActorExitRequest, WakeupMessage, WatchMessage
from thespian.system.messages.multiproc import ChildMayHaveDied

logger = logging.getLogger(__name__)


class Interrupts:
    """Turns them into messages for ``arrive``; on the loop's thread, unless said otherwise."""

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
        """Have a WakeupMessage arrive when the timer is over."""
        self._wakeups[id(timer)] = timer
        self._loop.call_later(timer.view().remainingSeconds(), self._wake, timer, payload)

    def watch(self, numbers: list[int]) -> None:
        """Have a WatchMessage arrive when one of these, and no other, is readable."""
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
