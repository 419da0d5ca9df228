"""The way in: the stock base for ``ActorSystem``, and the transport of other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from greenroom.actors.stock import repairs

repairs.apply()

from thespian.system import multiprocCommon

from greenroom.actors.stock.guest import GuestManager
from greenroom.actors.stock.outside import OutsideTransport
from greenroom.actors.transport.network import Way
from greenroom.core.errors import NotRunningError

NAME = "multiprocTCPBase"


def install() -> str:
    """Have the actors that are forked from this process run asyncio; return the base's name."""
    multiprocCommon.MultiProcManager = GuestManager
    return NAME


def attach(
    admin_port: int,
    loop: asyncio.AbstractEventLoop,
    on_envelope: Callable[[Any], None],
    way: Way | None = None,
) -> OutsideTransport:
    """Give this process, which is no actor, a transport; ``on_envelope`` is called on ``loop``."""
    if way is not None and way.gates:
        raise NotRunningError("the stock transport does not reach other hosts")
    return OutsideTransport(admin_port, loop, on_envelope)
