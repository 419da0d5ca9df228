"""The way in: the system base for ``ActorSystem``, and the transport of other processes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from thespian.system import multiprocCommon
from thespian.system.multiprocCommon import multiprocessCommon
from thespian.system.utilis import thesplog_control

from greenroom.actors.transport.addresses import parse_address
from greenroom.actors.transport.endpoints import Attach, RepairedMultiProcAdmin
from greenroom.actors.transport.network import Way
from greenroom.actors.transport.thespian_transport import Transport

NAME = "greenroomBase"

if "THESPLOG_FILE_MAXSIZE" not in os.environ:  # else each process writes Thespian's log in /tmp
    thesplog_control(logging.WARNING, useLogging=False, tmpFileMaxSize=0)


class ActorSystemBase(multiprocessCommon):  # type: ignore[misc]  # Thespian ships no types
    """Thespian's multi-process base over our transport."""

    transportType = Transport

    def __init__(self, system: Any, logDefs: Any = None) -> None:
        system.capabilities["Thespian ActorSystem Name"] = NAME
        system.capabilities["Thespian ActorSystem Version"] = 1
        system.capabilities["Thespian Watch Supported"] = True
        try:
            super().__init__(system, logDefs)
        except BaseException:
            if hasattr(self, "transport"):
                self.transport.close()
            raise

    def shutdown(self) -> None:
        """Stop the system; close the transport even when nothing answers any more."""
        try:
            super().shutdown()
        finally:
            self.transport.close()

    def _startAdmin(self, *args: Any) -> None:
        before, multiprocCommon.MultiProcAdmin = (
            multiprocCommon.MultiProcAdmin,
            RepairedMultiProcAdmin,
        )
        try:
            super()._startAdmin(*args)
        finally:
            multiprocCommon.MultiProcAdmin = before


def install() -> str:
    """Make the base known to Thespian, which finds bases by name; return that name."""
    sys.modules.setdefault(f"thespian.system.{NAME}", sys.modules[__name__])
    return NAME


def attach(
    admin_port: int,
    loop: asyncio.AbstractEventLoop,
    on_envelope: Callable[[Any], None],
    way: Way | None = None,
) -> Transport:
    """Give this process, which is no actor, a transport on ``loop``; envelopes go to a callback.

    Without a ``way`` it belongs to this host's system, and has all else by environment.
    """
    if way is None:
        init = Attach(loop, on_envelope)
    else:
        gate = parse_address(way.gates[0]) if way.gates else None
        init = Attach(loop, on_envelope, gate, way.environ)
    return Transport(init, {"Admin Port": admin_port})
