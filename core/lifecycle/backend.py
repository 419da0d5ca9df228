"""One backend: its replicas, brought from what is observed to what is desired.

Theory of operation. The record (hard state) names the replicas that may have a process. It is saved
before a process is asked for, so that no restart of the controller can lose one. Each replica's
state (soft) follows the table in core/lifecycle/replicas.py. A new controller has to learn these
states: it sends Start to every recorded replica, and a running one answers that it runs. A recorded
replica that has not answered yet, nor failed as silent, is *recovering*. It is not asked to
stop, because it is not known yet which replicas are surplus.

:func:`greenroom.core.lifecycle.steps.reconcile` compares and takes the next steps. It is cheap to
call, and safe at any time. To stop a replica, it first removes it from the published table, and
asks it to stop only when every proxy holds the table without it.

Each replica is placed on a host and stays there. A replica whose host is lost does not count, and
another one is started elsewhere. Its record stays, because its process may live on behind a broken
link. When the host is back, the replica is sent Start, as by a new controller. If it still runs, it
counts again. If there are then too many replicas, those whose removal leaves the others best spread
are stopped. A replica that is to be *moved* is stopped when another one runs in its place; it stays
while there is no room for another.

What is observed of replicas is in core/lifecycle/health.py, and which ones are added and retired in
core/lifecycle/steps.py: both change what is here.

The number of replicas is a setting or, with autoscaling, the record's ``target``. The target is
kept when the controller restarts, but it is not a setting: it is neither in the history nor sent to
replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from greenroom.core.agenda import NEVER
from greenroom.core.autoscaling.settings import AutoscalingConfig
from greenroom.core.config import BackendConfig
from greenroom.core.lifecycle import releases
from greenroom.core.lifecycle.failures import Failures
from greenroom.core.lifecycle.orders import Orders
from greenroom.core.lifecycle.placement import Placement, anywhere, needs_of
from greenroom.core.lifecycle.replicas import LIVE, Replica, ReplicaState
from greenroom.core.records import BackendRecord


class Backend:
    """A backend's record and its replicas. Times are monotonic seconds."""

    def __init__(
        self, record: BackendRecord, now: float, placement: Placement | None = None
    ) -> None:
        self.record = record
        self.config = BackendConfig.read(record.newest.config)
        self.placement = placement or anywhere()
        self.failures = Failures()
        self.proven = False  # all replicas have taken the newest settings, at some time
        self.rescaling = ""  # while replicas come or go for that alone: UPSCALING or DOWNSCALING
        self.waiting = ""  # why a wanted replica has no room, and what would make it fit
        self.start_due_at = NEVER  # when a replica is to start or to be replaced that has to wait
        self.replicas: dict[str, Replica] = {}
        for tag, each in record.replicas.items():
            if self.placement.knows(each.host):
                self.add(Replica.recorded(tag, each, now))
        if self.config.autoscaling_config is not None and record.target is None:
            self.update(target=self.config.autoscaling_config.first_target(None, 0))

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self.record = replace(self.record, **changes)

    def add(self, replica: Replica) -> None:
        """Add a replica, which takes its room."""
        self.replicas[replica.tag] = replica
        needs = needs_of(releases.numbered(self.record, replica.release).actor_options)
        replica.devices = self.placement.take(replica.tag, replica.host, needs, replica.devices)

    # --- What is wanted -------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return 0 if self.record.deleting or self.record.failure else self.target

    @property
    def target(self) -> int:
        """How many replicas there should be, were it not deleted or failed."""
        return self.config.num_replicas or self.record.target or 0

    @property
    def autoscaled_by(self) -> AutoscalingConfig | None:
        """The settings of autoscaling, where it decides on the number of replicas."""
        is_over = self.record.deleting or self.record.failure
        return None if is_over else self.config.autoscaling_config

    @property
    def orders(self) -> Orders:
        """What replicas are sent."""
        return Orders(self.record, self.config)

    def rescale(self, target: int | None, config: BackendConfig | None = None) -> None:
        """Set the number of replicas that autoscaling decides on, perhaps by another config."""
        before = self.target
        self.config = config or self.config
        self.update(target=target)
        if self.target != before:
            self.rescaling = "UPSCALING" if self.target > before else "DOWNSCALING"

    def set_config(self, config: BackendConfig) -> bool:
        """Take a new config; return False when it is the present one."""
        if config == self.config:
            return False
        newest = self.record.newest
        fallback = newest.config if self.proven else self.record.fallback_config
        self.rescale(self._target_with(config), config)
        self.proven = False
        self.record = releases.with_newest(
            replace(self.record, fallback_config=fallback, update_failure=""),
            config=config.model_dump(),
            config_id=newest.config_id + 1,
        )
        return True

    def deploy(self, **release: Any) -> bool:
        """Make a release of these fields the newest; return False when it is, and all is well.

        They are ``code_hash``, ``code_digest``, ``config``, ``actor_options`` and ``version``. If
        only settings differ they change in place; else the replicas are replaced, some at a time.
        """
        wanted, again = self.wanted, self.record.deleting or bool(self.record.failure)
        config = BackendConfig.read(release["config"])
        target = self._target_with(config, anew=again)
        if again:
            self._try_again()
        if releases.is_made_of(self.record.newest, release):
            changed = self.set_config(config)
            if again:
                self.update(target=target)
            if self.record.update_failure:
                self.update(update_failure="", exception=None)
                changed = True
            return changed or again
        self.failures.clear()
        self._take_release(replace(releases.updated(self.record, release, wanted), target=target))
        return True

    def delete(self, *, force: bool = False) -> bool:
        """Stop all replicas, then remove the backend; with ``force`` without draining.

        Return False where that is under way.
        """
        if self.record.deleting and (self.record.force or not force):
            return False
        self.update(deleting=True, force=force)
        return True

    def fail(self, error: str, exception: bytes | None) -> None:
        """Go back to the release before; without one it has failed."""
        earlier = releases.fallback(self.record)
        if earlier is None:
            self.update(failure=error, exception=exception)
            return
        target = self._target_with(BackendConfig.read(earlier.config))
        record = releases.rolled_back(self.record, earlier, error)
        self._take_release(replace(record, exception=exception, target=target))

    def _try_again(self) -> None:
        """Start anew after it failed or was to be deleted, as if it had never run."""
        self.failures.clear()
        self.record = releases.as_never_run(self.record)  # nor is there anything to go back to
        self.update(deleting=False, force=False, failure="", update_failure="", exception=None)

    def _take_release(self, record: BackendRecord) -> None:
        self.record = releases.pruned(record)
        self.config, self.proven = BackendConfig.read(self.record.newest.config), False

    def _target_with(self, config: BackendConfig, *, anew: bool = False) -> int | None:
        """Return the record's target for other settings; ``anew`` as if it had run no replica."""
        scaling = config.autoscaling_config
        if scaling is None:
            return None
        before = None if anew else self.config.autoscaling_config
        return scaling.first_target(before, 0 if anew else self.target)

    # --- How it is ------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many replicas run."""
        return count_running(self.replicas.values())

    @property
    def converged(self) -> bool:
        """Whether exactly the wanted replicas run, with the newest config."""
        live, newest = self.live(), self.record.newest
        return len(live) == self.wanted and all(
            r.state is ReplicaState.RUNNING
            and r.release == newest.number
            and r.config_id >= newest.config_id
            for r in live
        )

    @property
    def updating(self) -> bool:
        """Whether replicas of another release are to be replaced, or are there to go back to."""
        old = any(not releases.is_newest(self.record, r) for r in self.live())
        return old or releases.fallback(self.record) is not None

    @property
    def recovered(self) -> bool:
        """Whether the state of every recorded replica is known."""
        return not any(replica.recovering for replica in self.replicas.values())

    def live(self) -> list[Replica]:
        """Return the replicas that are there, and not about to go."""
        return [replica for replica in self.replicas.values() if replica.state in LIVE]

    def in_state(self, state: ReplicaState) -> list[Replica]:
        """Return the replicas that are in a state."""
        return [replica for replica in self.replicas.values() if replica.state is state]

    # --- The end of a step ----------------------------------------------------------------------

    def due_at(self) -> float:
        """Return when there is something to do, if nothing happens before."""
        orders = self.orders
        return min([self.start_due_at, *map(orders.due_at, self.replicas.values())])

    def forget_stopped(self) -> None:
        """Give back what replicas had that are gone."""
        for replica in self.in_state(ReplicaState.STOPPED):
            self.placement.give_back(replica.tag)
            del self.replicas[replica.tag]

    def record_replicas(self) -> None:
        """Record which replicas may have a process."""
        self.forget_stopped()
        records = {tag: replica.record for tag, replica in self.replicas.items()}
        if records != self.record.replicas:
            self.update(replicas=records)


def count_running(replicas: Iterable[Replica]) -> int:
    """Return how many of them run."""
    return sum(replica.state is ReplicaState.RUNNING for replica in replicas)
