"""Which multiplexed models this process has, and who wants to know.

A replica tells its proxies, which prefer it for queries for those models, and has them unloaded
when it stops. Ids that are being loaded count: the next query for one should wait for it there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol


class Holder(Protocol):
    """What keeps models: see :mod:`greenroom.serve.multiplex`."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The models that it has, or loads."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it belongs to; None when that is gone."""

    def unload_all(self) -> Awaitable[None]:
        """Unload them; called on that loop when the replica stops."""


_lock = threading.Lock()
_ids: dict[Holder, tuple[str, ...]] = {}
_listener: Callable[[], None] | None = None


def on_change(listener: Callable[[], None] | None) -> None:
    """Call ``listener`` after each change, on the thread that made it; a replica does it."""
    global _listener  # noqa: PLW0603  # one per process, like the process's actor
    _listener = listener


def all_ids() -> tuple[str, ...]:
    """Return the ids of all models here, in their order."""
    with _lock:
        return tuple(sorted({model_id for ids in _ids.values() for model_id in ids}))


def changed(holder: Holder) -> None:
    """Know what a holder has now, if that changed; one without any is forgotten."""
    ids = holder.ids
    with _lock:
        if set(ids) == set(_ids.get(holder, ())):
            return
        if ids:
            _ids[holder] = ids
        else:
            del _ids[holder]
    if _listener is not None:
        _listener()


async def close() -> None:
    """Unload all models that belong to the running event loop."""
    loop = asyncio.get_running_loop()
    for holder in [each for each in _ids if each.loop is loop]:
        await holder.unload_all()
