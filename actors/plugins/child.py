"""A child process that runs code of the user's, and the connection to it. Nothing here blocks.

Theory of operation. The process is started when there is something to send, and kept. Frames go
both ways, each with its length before it. A process that ends, or is killed because it takes too
long, is killed with all that it has started. It is started again for what is sent later, after a
pause that doubles each time until one has run for a while. Its prints go to a log of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from greenroom.actors.messages.queries import Process
from greenroom.actors.plugins.program import HEADER, MAX_FRAME_BYTES, POLICY, REQUEST_ROUTER, frame
from greenroom.actors.runtime import forking
from greenroom.actors.runtime.logs import open_log
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.backoff import pause_s

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 30.0  # for the first answer: it imports what the code needs
BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
STABLE_S = 30.0  # a process that ran this long, from its first answer on, was no crash loop
REAP_POLL_S = 0.01
_PROGRAMS = {POLICY: "program:run_policy", REQUEST_ROUTER: "routing:main"}
Answer = dict[str, Any]
MAX_UNSENT_BYTES = 4 * 1024 * 1024  # of what it does not read


class Child:
    """One process, as far as there is one.

    ``role`` is what it does (see program.py), ``name`` what it does that for. ``on_answer`` gets
    each JSON object that it sends, ``on_end`` why it has ended or was killed; neither follows
    :meth:`end`.
    """

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        records: RunRecords,
        *,
        role: str,
        name: str,
        code: bytes,
        on_answer: Callable[[Answer], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._records = records
        self._role = role
        self._name = name
        self._code = code
        self._on_answer = on_answer
        self._on_end = on_end
        self._popen: subprocess.Popen[bytes] | None = None  # None where none runs
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None  # None until it is connected
        self._unsent = b""  # before it is connected
        self._failures = 0  # in a row
        self._start_at = 0.0
        self._answered_at: float | None = None  # for the first time since it was started

    @property
    def has_answered(self) -> bool:
        """Whether it has, since it was started."""
        return self._answered_at is not None

    @property
    def pause_s(self) -> float:
        """How long it is not started again yet; 0 where it runs or may be started."""
        if self._popen is not None:
            return 0.0
        return max(self._start_at - time.monotonic(), 0.0)

    def send(self, body: bytes) -> str:
        """Send a frame, to a new process where there is none; return what is wrong, else ""."""
        if self._popen is None:
            if left_s := self.pause_s:
                return f"its process ended; it is started again in {left_s:.0f} s"
            try:
                self._start()
            except OSError as error:
                self._count_failure()
                return f"its process cannot be started: {error}"
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            return "its process takes no question"
        if self._writer is None:
            self._unsent += frame(body)
        else:
            self._writer.write(frame(body))
        return ""

    def fail(self, why: str) -> None:
        """Kill a process that takes too long, and count that as a failure."""
        self._count_failure()
        self.end()
        self._on_end(why)

    def end(self) -> None:
        """Kill the process, if there is one."""
        popen, self._popen = self._popen, None
        if popen is None:
            return
        self._answered_at = None
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        process, self._process = self._process, None
        if process is not None:
            self._records.remove(process)
            self._loop.watch_process(process, lambda: self._reap(popen))
        else:
            self._reap(popen)  # it had ended before it could be identified

    # --- Inside ---------------------------------------------------------------------------------

    @property
    def _unsent_bytes(self) -> int:
        if self._writer is None:
            return len(self._unsent)
        return self._writer.transport.get_write_buffer_size()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        code_fd = os.memfd_create(self._role)
        try:
            with os.fdopen(code_fd, "wb", closefd=False) as stored:
                stored.write(self._code)
            file_name = re.sub(r"[^\w.#:-]", "_", self._name)
            with os.fdopen(open_log(self._settings, f"{self._role}-{file_name}"), "ab") as output:
                fds = (theirs.fileno(), code_fd)
                self._popen = forking.spawn(
                    f"greenroom.actors.plugins.{_PROGRAMS[self._role]}",
                    *map(str, (*fds, os.getpid())),
                    output=output.fileno(),
                    keep=fds,
                    start_new_session=True,  # so that what it starts ends with it
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(code_fd)
        self._unsent = b""
        self._process = process = identify(self._popen.pid)
        if process is not None:
            self._records.add(process, self._role)
        logger.info("started the %s of %s, pid %d", self._role, self._name, self._popen.pid)
        self._loop.start(self._converse(self._popen, ours))

    async def _converse(self, popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
        """Send what waits for the connection, and hear what comes until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            reader, writer = await asyncio.open_connection(sock=connection)
            with contextlib.closing(writer):
                if self._popen is popen:
                    self._writer = writer
                    writer.write(self._unsent)
                while self._popen is popen:
                    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                    if length > MAX_FRAME_BYTES:
                        break  # user code wrote into the connection
                    body = await reader.readexactly(length)
                    if self._popen is popen:
                        self._answered_at = self._answered_at or time.monotonic()
                        self._loop.guarded(self._on_answer, _decoded(body))
        if self._popen is popen:
            self.fail("its process ended")

    def _count_failure(self) -> None:
        now, answered_at = time.monotonic(), self._answered_at
        was_stable = answered_at is not None and now - answered_at > STABLE_S
        self._failures = 1 if was_stable else self._failures + 1
        self._start_at = now + pause_s(self._failures, BACKOFF_S, MAX_BACKOFF_S)

    def _reap(self, popen: subprocess.Popen[bytes]) -> None:
        """Reap a child, which would stay a zombie, once the last of its threads has ended."""
        if popen.poll() is None:
            self._loop.call_later(REAP_POLL_S, lambda: self._reap(popen))


def _decoded(body: bytes) -> Answer:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):  # user code may have written anything
        answer = None
    return answer if isinstance(answer, dict) else {"error": "its answer is no JSON object"}
