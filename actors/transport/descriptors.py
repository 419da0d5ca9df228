"""The descriptors of a process: those that a forked child must let go, and the lack of them.

Theory of operation. After a fork both processes hold every descriptor. As long as the child keeps
a listening socket, its parent's death goes unnoticed and the parent's name stays taken; as long
as it keeps a pipe, the reader never sees the end of it. Closing the descriptors in the child is
not enough: the child also has the parent's Python objects, and when one of them is collected
later, it would close a *new* descriptor of the same number. So each descriptor is replaced by
/dev/null: the file that was open is released, and the number stays taken. Standard streams and
log files are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

SHORTAGE_GAP_S = 3.0  # more than the pauses between tries

_imported_in = os.getpid()


class HoldsDescriptors(Protocol):
    """Something that only the process that made it may use."""

    def descriptors(self) -> list[int]:
        """Return the numbers of all descriptors that it holds."""


class Shortage:
    """For how long a process has lacked a descriptor that it needed, again and again."""

    def __init__(self) -> None:
        self._since = 0.0
        self._last = float("-inf")

    def failed(self, error: OSError, now: float) -> None:
        """Take why something could not be opened."""
        if error.errno == errno.EMFILE:
            if now - self._last > SHORTAGE_GAP_S:
                self._since = now
            self._last = now

    def over(self) -> None:
        """Note that something was opened."""
        self._last = float("-inf")

    def lasted_s(self, now: float) -> float:
        """Return for how long nothing could be opened; 0 if nothing was tried lately."""
        return self._last - self._since if now - self._last <= SHORTAGE_GAP_S else 0.0


_holders: weakref.WeakSet[HoldsDescriptors] = weakref.WeakSet()


def is_forked() -> bool:
    """Return whether this process has its modules from another one."""
    return os.getpid() != _imported_in


def inheritable() -> list[int]:
    """Return the numbers of the open descriptors that a child, if forked now, should let go."""
    kept = {0, 1, 2} | _numbers_of([sys.stdin, sys.stdout, sys.stderr]) | _logs()
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd not in kept]


def let_go(numbers: Iterable[int]) -> None:
    """Replace the descriptors of these numbers by /dev/null, where they are open."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in numbers:
        if fd != null and _is_open(fd):
            try:
                os.dup2(null, fd, inheritable=False)
            except OSError:  # opened under a higher limit than there is now: it is given no more
                os.close(fd)
    os.close(null)


def release_in_children(holder: HoldsDescriptors) -> None:
    """Have every forked child let go of what ``holder`` holds; until it is collected."""
    _holders.add(holder)


def _logs() -> set[int]:
    """Return the files that are logged to: appending to them together is harmless."""
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    return _numbers_of([getattr(handler, "stream", None) for handler in handlers])


def _numbers_of(streams: Iterable[Any]) -> set[int]:
    numbers = set()
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            numbers.add(stream.fileno())
    return numbers


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _forked() -> None:
    let_go([fd for holder in list(_holders) for fd in holder.descriptors()])


os.register_at_fork(after_in_child=_forked)


# --- Of asyncio's loops ---------------------------------------------------------------------------


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that is not running, and end what is left of its tasks."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # a coroutine may use a system of its own
        try:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            asyncio._set_running_loop(outer)
    loop.close()


def descriptors_of(loop: asyncio.AbstractEventLoop) -> list[int]:
    """Return the numbers of the loop's own descriptors: its selector and its way to wake."""
    holders = (getattr(loop, name, None) for name in ("_selector", "_ssock", "_csock"))
    return [holder.fileno() for holder in holders if holder is not None]
