"""The store of the controller at work: whether it is still this one's, and still the one it was.

Where it turns out to be a different one than before, it is left alone until the right one is back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from greenroom.actors.cluster.leader_lease import LeaderLease
from greenroom.actors.controller.read_only import STORE_PATIENCE_S, saving
from greenroom.actors.messages import control as cm
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.long_poll import epoch_of
from greenroom.core.records import Changes
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import Claim, LeasedStore, OtherStoreError, StoreError
from greenroom.persistence.locations import location_at


class HeldStore:
    """Reads and writes the store, while that may be done.

    ``lease`` is None where no other host may lead. ``refused`` is called once the store is not to
    be used any more, with why, and with what raises a StoreError until it is right again.
    """

    def __init__(
        self,
        settings: HostSettings,
        pulse: Pulse,
        store: LeasedStore,
        lease: LeaderLease | None,
        refused: Callable[[StoreError, Callable[[], object]], None],
    ) -> None:
        self._settings = settings
        self._pulse = pulse
        self._store = store
        self._refused = refused
        self.lease = lease
        self.checkpoints = Checkpoints(store)
        self.id, self.epoch, self.close = store.store_id, store.epoch, store.close

    def may_act(self) -> bool:
        """Return whether no other host leads by now."""
        return self.lease is None or self.lease.may_act()

    def load(self) -> dict[str, dict[str, Any]]:
        """Return all records by kind and name."""
        return {kind: self.checkpoints.load(kind) for kind in KINDS}

    def save(self, changes: Changes) -> None:
        """Save all of it or nothing; NotSavedError. Blocks."""
        try:
            with self._pulse.patience(STORE_PATIENCE_S):
                self.checkpoints.save(changes.puts, changes.deletes)
        except (StoreError, OSError) as error:
            # What is in memory is not what is on disk: start again from the disk. Nothing was sent,
            # so the change has not been seen.
            raise NotSavedError(changes, error) from error

    def shown(self) -> dict[str, Any]:
        """Return what status shows."""
        lost = self.checkpoints.lost.items()
        damaged = [{"kind": kind, "name": name, "reason": why} for (kind, name), why in lost]
        return {"saving": saving(self._settings), "damaged": damaged}

    # --- Another store in its place -------------------------------------------------------------

    def superseded(self, message: cm.Superseded) -> None:
        """Look whether there is a later controller, and step down if so.

        Where this one is the last that the store knows of, the store is not what it was.
        """
        epoch = message.epoch
        if self.lease is not None and epoch > self.epoch and self.lease.is_confirmed():
            self._refuse(f"it is obeyed from epoch {epoch} on", Claim(epoch))

    def has_given(self, message: cm.Listen, *, is_believed: bool) -> bool:
        """Return whether a proxy's tables are of this store, and not of a later state of it.

        Else the store is refused, unless they are of another store and are not ``is_believed``.
        """
        claim = Claim(epoch_of(message.seen), store_id=message.store)
        if message.store == self.id:
            is_other = claim.epoch > self.epoch
        else:
            is_other = bool(message.store) and is_believed
        if is_other:
            self._refuse(f"host {message.host} has tables of {_described(claim)}", claim)
        return not is_other

    def _refuse(self, known: str, claim: Claim) -> None:
        """Leave a store alone that is not the one that was used; proxies keep their tables."""
        location = location_at(self._settings.store_name)

        def check() -> None:
            there = location.read_claim()
            if there.epoch < claim.epoch or claim.store_id not in {"", there.store_id}:
                raise OtherStoreError(
                    f"{location} is not the store that was used: it is "
                    f"{_described(there)}, and {known}. Is a volume not mounted? Bring that store "
                    "back; or stop all of the cluster and start it again, to go on with this one"
                )

        try:
            check()
        except StoreError as error:
            trouble = error
        else:
            os._exit(1)  # it is back: the next controller begins with it
        if self.lease is not None:
            self.lease.abandon()
        self._refused(trouble, check)


class NotSavedError(Exception):
    """The store did not take these changes."""

    def __init__(self, changes: Changes, error: Exception) -> None:
        super().__init__(str(error))
        self.changes = changes
        self.error = error


def _described(claim: Claim) -> str:
    return f"store {claim.store_id or '?'} at epoch {claim.epoch}"
