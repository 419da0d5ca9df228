"""The asyncio loops that transports run on.

Why not uvloop, as in the gunicorn workers: over our own sockets it is hardly faster (an ask took
117 to 127 us against 112 to 120; one way went 197,000 to 219,000 messages/s against 175,000 to
185,000), and actors are forked inside a running loop, which it does not expect.
"""

from __future__ import annotations

import asyncio

from thespian.system.transport import TransportInit__Base

from greenroom.actors.transport.endpoints import Attach


def loop_for(init: TransportInit__Base) -> tuple[asyncio.AbstractEventLoop, bool]:
    """Return the loop of a transport, and whether it is the transport's own to run and close."""
    if isinstance(init, Attach):
        return init.loop, False
    return asyncio.new_event_loop(), True


def descriptors_of(loop: asyncio.AbstractEventLoop) -> list[int]:
    """Return the numbers of the loop's own descriptors: its selector and its way to wake."""
    holders = (getattr(loop, name, None) for name in ("_selector", "_ssock", "_csock"))
    return [holder.fileno() for holder in holders if holder is not None]
