"""The controller while its store cannot be used: it refuses changes, and waits.

Theory of operation. A controller that cannot save ends, because its memory no longer matches the
disk, and the next one cannot take the store over. That one becomes a read-only controller, so that
a client that asks for a change hears at once that it was not made, and why. Questions are
answered from what the store has, where it can be read. Serving does not depend on it: proxies and
replicas go on with what they have. Every :data:`CHECK_S` it tests whether the store can be written,
and ends when it can; the next controller starts as after any crash. The same happens if a different
store is in the place of the one used before, until that one is back.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from greenroom.actors.controller.requests import failure, not_saved
from greenroom.actors.messages import admin as am
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.cluster.admin import CARRIED_OUT, Now, carry_out
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.status import overview
from greenroom.core.errors import GreenroomError, StateNotReadableError
from greenroom.core.lifecycle.history import Author
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.operations import GetStatus, Operation, StopCluster, read_operation
from greenroom.persistence.checkpoints import Checkpoints, is_record
from greenroom.persistence.kv import StoreError
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

CHECK_S = 1.0
STORE_PATIENCE_S = 60.0  # that a store may take: a disk or a database is slow, a lock is held


class ReadOnlyController:
    """Answers requests in a controller's place; on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        process: Process,
        pulse: Pulse,
        error: StoreError,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Wait until ``check`` raises no StoreError; by default, until something can be written."""
        self._loop = loop
        self._settings = settings
        self._shown = {"pid": process.pid, "host": settings.host_name}
        self._pulse = pulse
        self._error = error
        self._try = check or self._try_to_write
        self._since = time.time()
        self._known: Cluster | None = None  # once it could be read
        try:
            self._cluster()
        except StateNotReadableError:
            logger.exception("nothing is known of what is saved")
        logger.error("the state cannot be saved, so this controller only waits: %s", error)
        self._loop.call_later(CHECK_S, self._check)

    def take(self, message: am.Request, sender: Address) -> None:
        """Answer a request: with what was known last, or that it cannot be carried out.

        One that is on disk was carried out, and is answered by the next controller.
        """
        if self._known is not None and self._known.state.history.answered(message.request_id):
            return
        try:
            reply = self._reply(message)
        except GreenroomError as error:
            reply = failure(message.request_id, error)
        self._loop.send(sender, reply)

    def _reply(self, message: am.Request) -> am.RequestReply:
        operation = read_operation(message.operation, message.fields)
        if isinstance(operation, GetStatus):
            value: Any = self._status()
        elif isinstance(operation, StopCluster):  # there is nothing that it would have to save
            value = True
        elif operation.is_read:
            value = self._answer(operation)
        else:
            return not_saved(message.request_id, self._error)
        return am.RequestReply(request_id=message.request_id, value=value)

    def _answer(self, operation: Operation) -> Any:
        """Answer from the records in the store; StateNotReadableError where it cannot be read."""
        if type(operation) not in CARRIED_OUT:
            raise StateNotReadableError(
                f"{operation.key} has no answer while the state cannot be saved: {self._error}"
            )
        author, now = Author("", "", ""), Now(time.monotonic(), time.time())
        return carry_out(self._cluster(), operation, author, now)

    def _cluster(self) -> Cluster:
        """Return the cluster as the store has it: nothing can change while nothing is saved."""
        if self._known is None:
            own, now = self._settings.host_name, time.monotonic()
            try:
                with self._pulse.patience(STORE_PATIENCE_S):
                    store = location_at(self._settings.store_name).read(is_record)
                    checkpoints = Checkpoints(store)
                    records = {kind: checkpoints.load(kind) for kind in KINDS}
            except StoreError as error:
                raise StateNotReadableError(f"the state cannot be read: {error}") from error
            lost = checkpoints.lost
            self._known = Cluster(records, 0, now, Placement(), own_host=own, lost=lost)
        return self._known

    def _try_to_write(self) -> None:
        location_at(self._settings.store_name).try_to_write()

    def _check(self) -> None:
        try:
            with self._pulse.patience(STORE_PATIENCE_S):
                self._try()
        except StoreError as error:
            self._error = error
            self._loop.call_later(CHECK_S, self._check)
        else:
            logger.warning("the state can be saved again; the next controller goes on")
            os._exit(0)

    def _status(self) -> dict[str, Any]:
        """Return the last snapshot, or nothing known, with what is the matter."""
        try:
            snapshot = json.loads(self._settings.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            snapshot = {}
        return {
            **overview(Cluster({}, 0, time.monotonic())),
            **snapshot,
            "controller": self._shown,
            "saving": saving(self._settings, self._since, str(self._error)),
        }


def saving(settings: HostSettings, since: float | None = None, error: str = "") -> dict[str, Any]:
    """Return what the status says of the store: since when, as wall time, it takes nothing."""
    return {"path": str(location_at(settings.store_name)), "failing_since": since, "error": error}
