"""The :class:`~understudy.actors.loop.Loop` of processes on our own transport: an asyncio loop.

Messages, timers and posts are callbacks of one asyncio loop, the one that the transport is on.
What is put off to the end of a turn runs when all messages of one arrival are handled, just before
the transport writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from understudy.actors.loop import Callback, Loop, Timer, intent
from understudy.actors.messages import Address
from understudy.actors.transport.endpoints import Attach
from understudy.actors.transport.envelopes import Envelope
from understudy.actors.transport.thespian_transport import Transport

STOP_TIMEOUT_S = 5.0


class AsyncTimer(Timer):
    """A timer of the asyncio loop."""

    __slots__ = ("handle",)

    handle: asyncio.TimerHandle

    def cancel(self) -> None:
        """See :meth:`Timer.cancel`."""
        super().cancel()
        self.handle.cancel()


class AsyncLoop(Loop):
    """The loop of a transport; ``schedule`` takes Thespian's description of a delivery."""

    def __init__(self, transport: Transport, schedule: Callable[[Any], None]) -> None:
        self._transport = transport
        self._asyncio = transport.loop
        self._schedule = schedule
        self._posted: deque[Callback] = deque()
        self._woken = False
        self._watched: dict[int, Callback] = {}
        self._in_turn = False

    def send(
        self,
        target: Address,
        message: Any,
        on_sent: Callback | None = None,
        on_failed: Callback | None = None,
    ) -> None:
        """See :meth:`Loop.send`."""
        self._schedule(
            intent(target, message, self._delivered(on_sent), self._delivered(on_failed))
        )

    def fileno(self) -> int:
        """Raise: nobody has to watch this loop."""
        raise NotImplementedError

    def post(self, callback: Callback) -> None:
        """See :meth:`Loop.post`."""
        self._posted.append(callback)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # closed
                self._asyncio.call_soon_threadsafe(self._run_posted)

    def at_turn_end(self, callback: Callback) -> None:
        """See :meth:`Loop.at_turn_end`."""
        self._transport.peers.at_turn_end(partial(self._guarded, callback))

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """See :meth:`Loop.call_later`."""
        timer = AsyncTimer(callback)
        timer.handle = self._asyncio.call_later(max(delay_s, 0), self._guarded, callback)
        return timer

    def watch(self, fd: int, callback: Callback) -> None:
        """See :meth:`Loop.watch`."""
        self._watched[fd] = callback
        self._asyncio.add_reader(fd, self._guarded, callback)

    def unwatch(self, fd: int) -> None:
        """See :meth:`Loop.unwatch`."""
        if self._watched.pop(fd, None) is not None:
            self._asyncio.remove_reader(fd)

    def run_ready(self) -> None:
        """Do nothing: asyncio does."""

    def begin_turn(self) -> None:
        """Do nothing: the transport knows its turns."""

    def finish_turn(self) -> None:
        """Do nothing: the transport ends its turns."""

    def next_timer_at(self) -> float | None:
        """Return None: asyncio looks after its timers."""
        return None

    def close(self) -> None:
        """Stop watching, and close what was watched."""
        for fd in list(self._watched):
            self.unwatch(fd)
            os.close(fd)

    def _run_posted(self) -> None:
        self._woken = False  # before the first is taken: what is posted from here on wakes again
        while self._posted:
            self._guarded(self._posted.popleft())

    def _delivered(self, callback: Callback | None) -> Callback | None:
        return None if callback is None else partial(self._guarded, callback)


class PortLoop(AsyncLoop):
    """The loop of a process outside the actor system, with a transport of its own on it.

    ``on_message(message, sender)`` gets everything that arrives.
    """

    def __init__(
        self,
        admin_port: int,
        on_message: Callable[[Any, Address], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        capabilities = {"Admin Port": admin_port}
        transport = Transport(Attach(loop, self._received), capabilities)
        super().__init__(transport, partial(transport.scheduleTransmit, None))
        self.admin_address: Address = Transport.getAdminAddr(capabilities)
        self.address: Address = transport.myAddress
        self._on_message = on_message

    def start(self) -> None:
        """Do nothing: the loop runs."""

    def stop(self) -> None:
        """Close the transport; what is under way is dropped."""
        self.post(self._close)

    def _close(self) -> None:
        self._transport.close()
        self.close()

    def _received(self, envelope: Envelope) -> None:
        self._guarded(partial(self._on_message, envelope.message, envelope.sender))


class ThreadPortLoop(PortLoop):
    """A :class:`PortLoop` whose loop runs on a daemon thread of its own."""

    def __init__(self, admin_port: int, on_message: Callable[[Any, Address], None]) -> None:
        super().__init__(admin_port, on_message, asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run, name="understudy-port", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the transport; what is under way is dropped."""
        with contextlib.suppress(RuntimeError):  # closed
            self._asyncio.call_soon_threadsafe(self._asyncio.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def _run(self) -> None:
        self._asyncio.run_forever()
        self._close()
        self._asyncio.close()
