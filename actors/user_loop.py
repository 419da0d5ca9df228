"""The event loop that user code runs on, in a thread of its own beside the message loop's."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Coroutine
from typing import Any

from greenroom.actors.logs import one_record

# The message thread waits for the interpreter lock at each of its twenty or so system calls per
# message, and asks for it only after a switch interval in which nobody let go of it. User code that
# lets go of it for a moment more often than that, say with a stat() per millisecond, starves it:
# seen, with 1 ms, control messages 4 s late; with 20 us, below 20 ms. Shorter costs computing
# threads a third of their speed.
SWITCH_INTERVAL_S = 0.00002
PR_SET_TIMERSLACK = 29  # prctl(2); without it, timed waits are 50 us late
END_TIMEOUT_S = 1.0  # for cancelled tasks to end; those that will not are dropped


class UserLoop:
    """An event loop and its thread. The process ends when user code closes the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="user-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread; whatever runs on the loop is cancelled. For a process that lives on."""
        self._is_over = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not (self._is_over or self.loop.is_closed()):
            self._run_until(None)
        if not self._is_over:
            os._exit(1)  # closed by user code: nothing can be answered any more
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self._run_until(asyncio.wait(tasks, timeout=END_TIMEOUT_S))
        self._run_until(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run_until(self, end: Coroutine[Any, Any, Any] | None) -> None:
        # A task of the user's own may raise SystemExit through the loop, or stop it.
        try:
            if end is None:
                self.loop.run_forever()
            else:
                self.loop.run_until_complete(end)
        except BaseException:
            _print(traceback.format_exc())


def give_way_to_messages() -> None:
    """Have this thread, the message loop's, get the interpreter soon whatever user code does."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _print(text: str) -> None:
    """Write to the replica's log, if it takes it: the disk may be full, user code closes files."""
    with contextlib.suppress(OSError, ValueError):
        print(one_record(text), file=sys.stderr)  # noqa: T201
