"""The machine that a process runs on: its processes, its files, its clock, its actor system.

Actors and ports use all that through one :class:`Machine`, which they get from their
:class:`~.loop.Loop`. There are two machines: the real one here, and that of the simulator
(tests/simulation), where processes, signals and messages are simulated.
"""

from __future__ import annotations

import os
import time

from thespian.actors import ActorAddress

from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.liveness import Pulse, SilenceWatch
from greenroom.actors.runtime.logs import configure_logging
from greenroom.actors.runtime.processes import (
    descendants,
    is_alive,
    kill_all,
    open_pidfd,
    send_signal,
    this_process,
)
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import read_settings
from greenroom.actors.transport.addresses import parse_address
from greenroom.actors.transport.mailbox import attach


class Machine:
    """The real machine."""

    this_process = staticmethod(this_process)
    is_alive = staticmethod(is_alive)
    send_signal = staticmethod(send_signal)
    open_pidfd = staticmethod(open_pidfd)
    close_pidfd = staticmethod(os.close)
    read_settings = staticmethod(read_settings)
    configure_logging = staticmethod(configure_logging)
    run_records = RunRecords
    pulse = Pulse
    silence_watch = SilenceWatch
    attach = staticmethod(attach)
    monotonic = staticmethod(time.monotonic)

    def kill_descendants(self, process: Process) -> None:
        """SIGKILL all that a process has started, at any depth."""
        kill_all(descendants([process.pid]))

    def address_of(self, text: str) -> Address:
        """Return the address of an admin, given as HOST:PORT."""
        return ActorAddress(parse_address(text))


MACHINE = Machine()
