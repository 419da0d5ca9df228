"""The gRPC server of a host, where one is asked for: a process that the host process keeps up."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from greenroom.actors.host.records import GRPC_ROLE, RunRecords, role_of
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.logs import open_log_or_stderr
from greenroom.actors.runtime.processes import identify, is_alive, send_signal, wait_gone
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.backoff import pause_s
from greenroom.core.errors import StartError

logger = logging.getLogger(__name__)

STABLE_S = 10.0  # a server that ran this long did not die of its start
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
STOP_TIMEOUT_S = 25.0
_PROGRAM = "from greenroom.http_front.grpc.server import main; main()"


class GrpcServer:
    """The server's process, in the host process; it does nothing where none is asked for."""

    def __init__(self, settings: HostSettings, records: RunRecords) -> None:
        self._settings = settings
        self._records = records
        self.process: Process | None = next(iter(records.find(GRPC_ROLE)), None)

    @property
    def is_wanted(self) -> bool:
        """Return whether the settings ask for one."""
        return self._settings.grpc_port is not None

    @property
    def is_ready(self) -> bool:
        """Return whether it takes calls, or none has to."""
        return not self.is_wanted or (
            self.process is not None and role_of(self.process.pid) == GRPC_ROLE
        )

    @property
    def has_ended(self) -> bool:
        """Return whether it should be there and is not."""
        return self.is_wanted and (self.process is None or not is_alive(self.process))

    def start(self) -> None:
        """Start it unless it runs; StartError where the extra is missing."""
        if not self.has_ended:
            return
        if importlib.util.find_spec("grpc_health") is None:
            raise StartError("gRPC needs the extra 'grpc': pip install 'greenroom[grpc]'")
        output = open_log_or_stderr(self._settings, "grpc")
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        finally:
            os.close(output)
        self.process = identify(child.pid)
        if self.process is not None:  # else it has ended already
            self._records.add(self.process, GRPC_ROLE)

    async def keep_up(self, ended: Callable[[Process], Awaitable[None]]) -> None:
        """Start another whenever one has ended, later where they end one after the other."""
        failures = 0
        while self.is_wanted:
            started_at = time.monotonic()
            try:
                self.start()
            except StartError as error:  # the extra was uninstalled meanwhile
                logger.warning("the gRPC server cannot start: %s", error)
            if self.process is not None:
                await ended(self.process)
            failures = 1 if time.monotonic() - started_at > STABLE_S else failures + 1
            delay_s = 0.0 if failures == 1 else pause_s(failures - 1, FIRST_PAUSE_S, MAX_PAUSE_S)
            logger.error("the gRPC server died (see grpc.log); another starts in %g s", delay_s)
            await asyncio.sleep(delay_s)
        await asyncio.Event().wait()

    def stop(self) -> None:
        """Let it finish what it has, and end it. Blocks."""
        if self.process is not None:
            send_signal(self.process, signal.SIGTERM)
            wait_gone([self.process], STOP_TIMEOUT_S)
