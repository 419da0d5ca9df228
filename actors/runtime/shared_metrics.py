"""What a process has counted, in memory that the proxy of its host reads.

Theory of operation. As with its pulse (liveness.py), a process shows it in an anonymous file that
any process of the same user finds under ``/proc/<pid>/fd``. So a scrape asks nothing of a process
that computes or hangs, costs it nothing where it is idle, and there is no port and no file to clean
up: the samples end with their process. They are shown once a second, where anything has changed.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from typing import Any

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.processes import open_page, shared_page
from greenroom.core.metrics import Group

logger = logging.getLogger(__name__)

SHOW_S = 1.0
MAX_BYTES = 4 * 1024 * 1024  # a page takes memory only once something is written to it
READ_TRIES = 3  # while it is being written
_HEAD = struct.Struct("=II")  # size and CRC-32


class SharedMetrics:
    """Shows the calling process's metrics: what ``collect`` returns, every second."""

    def __init__(self, collect: Callable[[], list[Group]]) -> None:
        self._collect = collect
        self._shown = b""
        self._has_logged = False
        self._timer: Any = None
        self._page = shared_page("metrics", MAX_BYTES)

    def keep_showing(self, call_later: Callable[[float, Callable[[], None]], Any]) -> None:
        """Show them now and from now on."""
        self.show()
        self._timer = call_later(SHOW_S, lambda: self.keep_showing(call_later))

    def close(self) -> None:
        """Show them no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._page.close()

    def show(self) -> None:
        """Show what was counted so far."""
        shown = pickle.dumps(self._collect(), 5)
        if shown == self._shown:
            return
        if len(shown) > MAX_BYTES - _HEAD.size:
            if not self._has_logged:
                logger.warning("the metrics take %d bytes; at most %d fit", len(shown), MAX_BYTES)
            self._has_logged = True
            return
        self._shown = shown
        self._page[_HEAD.size : _HEAD.size + len(shown)] = shown
        _HEAD.pack_into(self._page, 0, len(shown), zlib.crc32(shown))


class OtherMetrics:
    """The metrics that other processes of this host show; keeps what was read last."""

    def __init__(self) -> None:
        self._fds: dict[Process, int] = {}
        self._last: dict[Process, list[Group]] = {}

    def read(self, process: Process) -> list[Group]:
        """Return what a process shows, empty where it shows nothing."""
        fd = self._fds.get(process)
        if fd is None:
            found = open_page(process, "metrics")
            if found is None:
                return []
            fd = self._fds[process] = found[0]
        for _ in range(READ_TRIES):
            size, checksum = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
            shown = os.pread(fd, size, _HEAD.size)
            if size and zlib.crc32(shown) == checksum:
                self._last[process] = pickle.loads(shown)
                break
        return self._last.get(process, [])

    def keep(self, processes: set[Process]) -> None:
        """Let go of all others."""
        for process in self._fds.keys() - processes:
            os.close(self._fds.pop(process))
            self._last.pop(process, None)
