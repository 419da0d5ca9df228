"""The controller's actor: one per cluster, at work while it has a store that it can write.

Without one it stays as a :class:`~greenroom.actors.controller.read_only.ReadOnlyController`, which
refuses changes and waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from thespian.actors import ActorExitRequest

from greenroom.actors.cluster.leader_lease import LeaderLease
from greenroom.actors.controller.active import ActiveController
from greenroom.actors.controller.held_store import HeldStore
from greenroom.actors.controller.read_only import STORE_PATIENCE_S, ReadOnlyController
from greenroom.actors.controller.requests import failure
from greenroom.actors.messages import admin as am, control as cm
from greenroom.actors.messages.queries import Address
from greenroom.actors.replica.replica import Replica
from greenroom.actors.runtime.actor import LoopActor
from greenroom.actors.runtime.settings import LEADS, MAY_LEAD
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.cluster import status
from greenroom.core.metrics import Group
from greenroom.persistence.kv import (
    LeasedStore,
    StoreError,
    StoreLockedError,
    StoreNotReadableError,
    StoreNotWritableError,
)
from greenroom.persistence.locations import location_at

LOCK_TIMEOUT_S = 5.0  # a dead predecessor's lock is free at once; a stopping one needs a moment


class Controller(LoopActor):
    """Takes messages for the active controller, or for the read-only one in its place."""

    role = "controller"

    def __init__(self) -> None:
        super().__init__()
        self.active: ActiveController | None = None
        self._read_only: ReadOnlyController | None = None

    @staticmethod
    def actorSystemCapabilityCheck(capabilities: Any, _requirements: Any) -> bool:
        """Tell Thespian where it may be: on the leader, so that any host's admin leads to it."""
        return bool(capabilities.get(LEADS))

    def started(self) -> None:
        """Take the store's lock and recover, or wait for a store that can be written."""
        with self.pulse.patience(STORE_PATIENCE_S):
            self._recover()
        SharedMetrics(self._metrics).keep_showing(self.loop.call_later)

    def _recover(self) -> None:
        lease = LeaderLease(self.settings, self.loop) if self.settings.may_lead else None
        try:
            store = self._open_store() if lease is None else lease.open()
        except (StoreNotWritableError, StoreNotReadableError) as error:
            self._wait(error)
            return
        self.active = ActiveController(
            self.loop,
            self.settings,
            self.process,
            self.records,
            HeldStore(self.settings, self.pulse, store, lease, self._wait),
            find=self._find_replica,
        )
        self.epoch = self.active.epoch

    def _metrics(self) -> list[Group]:
        cluster = None if self.active is None else self.active.cluster
        return status.metrics(cluster, self.settings.host_name)

    def _open_store(self) -> LeasedStore:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return location_at(self.settings.store_name).open()
            except StoreLockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # nothing else can be done before the lock is had

    def _wait(self, error: StoreError, check: Callable[[], object] | None = None) -> None:
        """Go on without a store, until ``check`` raises no more that it cannot be used."""
        if self.active is not None:
            self.active.close()
        self.active = None
        self._read_only = ReadOnlyController(
            self.loop, self.settings, self.process, self.pulse, error, check
        )

    def _find_replica(self, tag: str) -> Address:
        """Return where a replica is, by global name, for one that has not been heard of yet.

        The admin makes the process, so that it outlives this controller, and a later request for
        the name gets the same process: nothing that a crash left behind can be missed.
        """
        return self.createActor(Replica, globalName=f"replica {tag}")

    def _dispatch(self, message: Any, sender: Address) -> None:
        if isinstance(message, cm.Identify | ActorExitRequest):
            super()._dispatch(message, sender)
        elif self.active is not None:
            self.active.take(message, sender)
        elif self._read_only is not None and isinstance(message, am.Request):
            self._read_only.take(message, sender)  # the senders of all else send it again

    def survives(self, message: Any, sender: Address, error: Exception) -> bool:
        """Answer a request that failed before it had changed anything."""
        if not isinstance(message, am.Request):
            return False
        if self.active is not None and not self.active.has_changed_nothing(message):
            return False
        self.loop.send(sender, failure(message.request_id, error))
        return True

    def owed(self, message: Any, sender: Address, error: Exception) -> Iterable[Any]:
        """Return what to answer those whose requests are not saved; all others repeat them."""
        if isinstance(message, am.Request):
            yield sender, failure(message.request_id, error)
        elif self.active is not None:
            yield from self.active.owed(error)

    def exiting(self) -> None:
        """Leave the store to the next controller."""
        super().exiting()
        if self.active is not None:
            self.active.close()


class LeadingController(Controller):
    """The controller on a host that may lead; made by its host process when that host leads."""

    @staticmethod
    def actorSystemCapabilityCheck(capabilities: Any, _requirements: Any) -> bool:
        """Tell Thespian where it may be."""
        return bool(capabilities.get(MAY_LEAD))
