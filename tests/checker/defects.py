"""Three defects that can be planted into a system under test, to see that the checker notices.

They live here alone: a host is started by an interpreter whose ``sitecustomize`` plants one before
anything runs. Every process of the host is a fork of that one, and has it, too.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LATE_S = 0.3  # that a revocation comes after the acknowledgement


def ack_before_fsync() -> None:
    """Save a change of endpoints with the next change only, and answer at once."""
    from greenroom.persistence.checkpoints import Checkpoints  # noqa: PLC0415  # in a host

    save = Checkpoints.save
    owed: list[tuple[Any, Any]] = []

    def save_later(self: Checkpoints, puts: Any, deletes: Any, **code: Any) -> None:
        while owed:
            save(self, *owed.pop())
        if not any(code.values()) and all(kind in _ENDPOINTS for kind, _ in (*puts, *deletes)):
            owed.append((puts, deletes))
        else:
            save(self, puts, deletes, **code)

    Checkpoints.save = save_later  # type: ignore[method-assign]


_ENDPOINTS = {"endpoint", "history", "request"}


def stale_controller() -> None:
    """Have controllers that have been succeeded go on, and obey them."""
    from greenroom.actors.cluster.epoch_fence import EpochFence  # noqa: PLC0415  # in a host
    from greenroom.actors.cluster.leader_lease import LeaderLease  # noqa: PLC0415
    from greenroom.persistence.checkpoints import Checkpoints  # noqa: PLC0415
    from greenroom.persistence.kv import StaleWriterError  # noqa: PLC0415

    save = Checkpoints.save

    def save_anyway(self: Checkpoints, *args: Any, **code: Any) -> None:
        with contextlib.suppress(StaleWriterError):
            save(self, *args, **code)

    Checkpoints.save = save_anyway  # type: ignore[method-assign]
    EpochFence.accepts = lambda *_: True  # type: ignore[assignment]
    LeaderLease.may_act = lambda _: True  # type: ignore[assignment]
    LeaderLease._step_down = lambda *_: None  # type: ignore[assignment,method-assign]


def lease_not_revoked() -> None:
    """Acknowledge tables at once, and revoke the leases that they end a while later."""
    from greenroom.actors.proxy.leases import LeaseDesk  # noqa: PLC0415  # in a host
    from greenroom.core.routing.leases import Leases  # noqa: PLC0415

    revoke = LeaseDesk.revoke

    def revoke_late(self: LeaseDesk, effect: Any) -> None:
        self._loop.call_later(LATE_S, lambda: revoke(self, effect))

    LeaseDesk.revoke = revoke_late  # type: ignore[method-assign]
    Leases.unconfirmed = property(lambda _: set())  # type: ignore[assignment]


DEFECTS = {each.__name__: each for each in (ack_before_fsync, stale_controller, lease_not_revoked)}


def crash_around_saves() -> None:
    """Kill the controller before or after one save in five: no defect, but to be survived."""
    from greenroom.persistence.checkpoints import Checkpoints  # noqa: PLC0415  # in a host

    save = Checkpoints.save

    def save_or_die(self: Checkpoints, *args: Any, **code: Any) -> None:
        _die_by_chance()
        save(self, *args, **code)
        _die_by_chance()

    Checkpoints.save = save_or_die  # type: ignore[method-assign]


def _die_by_chance() -> None:
    if random.random() < 0.1:
        os.kill(os.getpid(), signal.SIGKILL)


def planted(name: str, folder: Path) -> dict[str, str]:
    """Return what has to be in a host's environment for one of these; writes into the folder."""
    text = f"from tests.checker import defects\n\ndefects.{name}()\n"
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}
