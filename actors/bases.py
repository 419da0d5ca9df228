"""The two system bases, by name: ours, and Thespian's stock one, loaded when it is asked for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

from thespian.system.utilis import thesplog_control

from greenroom.actors.loop import Transport
from greenroom.actors.settings import STOCK
from greenroom.actors.transport import base as own
from greenroom.actors.transport.admission import Trouble
from greenroom.actors.transport.network import Way

if "THESPLOG_FILE_MAXSIZE" not in os.environ:  # else each process writes Thespian's log in /tmp
    thesplog_control(logging.WARNING, useLogging=False, tmpFileMaxSize=0)


class Attached(Transport, Protocol):
    """The transport of a process that is no actor; names in camelCase are Thespian's."""

    @property
    def myAddress(self) -> Any:
        """The address that this process has in the system."""

    @property
    def admin_address(self) -> Any:
        """The address of the system's admin."""

    def scheduleTransmit(self, manager: Any, intent: Any) -> None:
        """Send."""

    def trouble_with(self, gate: Any) -> Trouble:
        """Return why the host of an address could not be reached the last time."""

    def watch_remote(self, target: Any, on_lost: Callable[[bool], None]) -> Any:
        """See :class:`greenroom.actors.loop.Transport`."""

    def close(self) -> None:
        """Leave the system."""


class Base(Protocol):
    """A module that brings a system base."""

    def install(self) -> str:
        """Prepare this process to start a system; return the name for ``ActorSystem``."""

    def attach(
        self,
        admin_port: int,
        loop: asyncio.AbstractEventLoop,
        on_envelope: Callable[[Any], None],
        way: Way | None = None,
    ) -> Attached:
        """Give this process a transport on ``loop``."""


def get(transport: str) -> Base:
    """Return the base that ``GREENROOM_TRANSPORT`` names."""
    if transport == STOCK:
        from greenroom.actors.stock import base as stock  # noqa: PLC0415  # see above

        return stock
    return own
