"""The controller while its store cannot be used: it refuses changes, and waits.

Theory of operation. A controller that cannot save ends, because its memory no longer matches the
disk, and the next one cannot take the store over. That one becomes a read-only controller, so that
a client that asks for a change is told at once that it was not made, and why. Serving does not
depend on it: proxies and replicas go on with what they have. Every :data:`LOOK_S` it checks whether
the store can be written, and ends when it can; the next controller starts as after any crash. The
same happens if a different store is in the place of the one used before, until that one is back.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from greenroom.actors.controller.requests import not_saved
from greenroom.actors.messages import admin as am
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.operations import GetStatus, StopCluster
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import StoreError
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

LOOK_S = 1.0
STORE_PATIENCE_S = 60.0  # that a store may take: a disk or a database is slow, a lock is held
_NOTHING_KNOWN: dict[str, Any] = {
    "hosts": [],
    "applications": {},
    "backends": {},
    "endpoints": {},
    "goals": [],
    "pending_goals": 0,
    "rollouts": {},
    "resources": {},
}


class ReadOnlyController:
    """Answers requests in a controller's place; on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        process: Process,
        pulse: Pulse,
        error: StoreError,
        look: Callable[[], object] | None = None,
    ) -> None:
        """Wait until ``look`` raises no StoreError; by default, until something can be written."""
        self._loop = loop
        self._settings = settings
        self._shown = {"pid": process.pid, "host": settings.host_name}
        self._pulse = pulse
        self._error = error
        self._try = look or self._try_to_write
        self._since = time.time()
        with pulse.patience(STORE_PATIENCE_S):
            self._saved = self._requests_on_disk()
        logger.error("the state cannot be saved, so this controller only waits: %s", error)
        self._loop.call_later(LOOK_S, self._look)

    def take(self, message: am.Request, sender: Address) -> None:
        """Answer a request: with what was known last, or that it cannot be carried out.

        One that is on disk was carried out, and is answered by the next controller.
        """
        if message.request_id in self._saved:
            return
        if message.operation == GetStatus.key:
            reply = am.RequestReply(request_id=message.request_id, value=self._status())
        elif message.operation == StopCluster.key:  # there is nothing that it would have to save
            reply = am.RequestReply(request_id=message.request_id, value=True)
        else:
            reply = not_saved(message.request_id, self._error)
        self._loop.send(sender, reply)

    def _try_to_write(self) -> None:
        location_at(self._settings.store_name).try_to_write()

    def _look(self) -> None:
        try:
            with self._pulse.patience(STORE_PATIENCE_S):
                self._try()
        except StoreError as error:
            self._error = error
            self._loop.call_later(LOOK_S, self._look)
        else:
            logger.warning("the state can be saved again; the next controller goes on")
            os._exit(0)

    def _requests_on_disk(self) -> set[str]:
        try:
            store = location_at(self._settings.store_name).open_reader()
            entries: Any = Checkpoints(store).load("history").values()
            return {entry.request_id for entry in entries}
        except StoreError:
            logger.exception("the history cannot be read")
            return set()

    def _status(self) -> dict[str, Any]:
        """Return the last snapshot, or nothing known, with what is the matter."""
        try:
            snapshot = json.loads(self._settings.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            snapshot = {}
        return {
            **_NOTHING_KNOWN,
            **snapshot,
            "controller": self._shown,
            "saving": saving(self._settings, self._since, str(self._error)),
        }


def saving(settings: HostSettings, since: float | None = None, error: str = "") -> dict[str, Any]:
    """Return what the status tells of the store: since when, as wall time, it takes nothing."""
    return {"path": str(location_at(settings.store_name)), "failing_since": since, "error": error}
