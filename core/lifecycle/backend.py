"""One backend: its replicas, brought from what is observed to what is desired.

Theory of operation. The record (hard state) names the replicas that may have a process. It is saved
before a process is asked for, so that no restart of the controller can lose one. Each replica's
state (soft) follows the table in core/lifecycle/replicas.py. A new controller has to learn these
states: it sends Start to every recorded replica, and a running one answers that it runs. A recorded
replica that has not answered yet, nor failed as silent, is *recovering*. It is not asked to
stop, because it is not known yet which replicas are surplus.

:meth:`Backend.reconcile` compares and takes the next steps. It is cheap to call, and safe at any
time. To stop a replica, it first removes it from the published table, and asks it to stop only
when every proxy holds the table without it.

Each replica is placed on a host and stays there. A replica whose host is lost does not count, and
another one is started elsewhere. Its record stays, because its process may live on behind a broken
link. When the host is back, the replica is sent Start, as by a new controller. If it still runs, it
counts again. If there are then too many replicas, those whose removal leaves the others best spread
are stopped. A replica that is to be *moved* is stopped when another one runs in its place; it stays
while there is no room for another.

The number of replicas is a setting or, with autoscaling, the record's ``target``. The target is
kept when the controller restarts, but it is not a setting: it is neither in the history nor sent to
replicas.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from greenroom.core.autoscaling.config import AutoscalingConfig
from greenroom.core.config import BackendConfig
from greenroom.core.effects import Effect, Kill
from greenroom.core.errors import last_line
from greenroom.core.lifecycle import failures, releases
from greenroom.core.lifecycle.failures import Failures
from greenroom.core.lifecycle.orders import NEVER, Orders
from greenroom.core.lifecycle.placement import Placement, anywhere, needs_of, request_of
from greenroom.core.lifecycle.replicas import (
    LEAVING,
    LIVE,
    Replica,
    ReplicaEvent,
    ReplicaState,
    Report,
    RestartReason,
    bounded,
    rank,
    recorded_rank,
)
from greenroom.core.records import BackendRecord, Release, ReplicaRecord

MAX_UNUSABLE_TRIES = 3  # of code that cannot be loaded; max_constructor_retry_count is for the rest
MAX_LOSSES_PER_UPDATE = 3  # of replicas that ran; then the update is taken back
MAX_MISSED_CHECKS = 3
MAX_EJECTIONS = 3  # of a replica, in a row
OF_STARTS = (failures.START, failures.DEATH, failures.BRIEF_LIFE)  # after which starts wait


class Backend:
    """A backend's record and its replicas. Times are monotonic seconds."""

    def __init__(
        self, record: BackendRecord, now: float, placement: Placement | None = None
    ) -> None:
        self.record = record
        self.config = BackendConfig.read(record.newest.config)
        self.placement = placement or anywhere()
        self.failures = Failures()
        self.restarts = dict.fromkeys(RestartReason, 0)  # since this controller began
        self.saved = record
        self.proven = False  # all replicas have taken the newest settings, at some time
        self.rescaling = ""  # while replicas come or go for that alone: UPSCALING or DOWNSCALING
        self.waiting = ""  # why a wanted replica has no room, and what would make it fit
        self._start_due_at = NEVER  # when a replica is to start that has to wait
        self._replace_due_at = NEVER  # and when one is to be replaced
        # Recorded replicas may have a process: they are asked, as if they had just been started.
        self.replicas = {
            tag: Replica(
                tag,
                each.release,
                each.host,
                ReplicaState.STARTING,
                since=now,
                ask_at=now,
                recovering=True,
                may_have_served=True,
                devices=each.devices or {},
                rank=recorded_rank(each.rank),
            )
            for tag, each in record.replicas.items()
            if self.placement.knows(each.host)
        }
        for replica in self.replicas.values():
            self._take_room(replica)
        if self.config.autoscaling_config is not None and record.target is None:
            self.update(target=self.config.autoscaling_config.first_target(None, 0))

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self.record = replace(self.record, **changes)

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
    def _orders(self) -> Orders:
        return Orders(self.record, self.config)

    def rescale(self, target: int) -> None:
        """Set the number of replicas that autoscaling has decided on."""
        before = self.target
        self.update(target=target)
        self._record_rescaling(before)

    def set_config(self, config: BackendConfig) -> bool:
        """Take a new config; return False when it is the present one."""
        if config == self.config:
            return False
        before, newest = self.target, self.record.newest
        fallback = newest.config if self.proven else self.record.fallback_config
        self.update(target=self._target_with(config), fallback_config=fallback, update_failure="")
        self.config, self.proven = config, False
        self.record = releases.with_newest(
            self.record, config=config.model_dump(), config_id=newest.config_id + 1
        )
        self._record_rescaling(before)
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
            self.try_again()
        if releases.is_made_of(self.record.newest, release):
            changed = self.set_config(config)
            if again:
                self.update(target=target)
            if self.record.update_failure:
                self.update(update_failure="", exception=None)
                changed = True
            return changed or again
        self.failures = Failures()
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

    def try_again(self) -> None:
        """Start anew after it failed or was to be deleted, as if it had never run."""
        self.failures = Failures()
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

    def _record_rescaling(self, before: int) -> None:
        if self.target != before:
            self.rescaling = "UPSCALING" if self.target > before else "DOWNSCALING"

    # --- How it is ------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many replicas run."""
        return _count_running(self.replicas.values())

    @property
    def converged(self) -> bool:
        """Whether exactly the wanted replicas run, with the newest config."""
        live, newest = self._live(), self.record.newest
        return len(live) == self.wanted and all(
            r.state is ReplicaState.RUNNING
            and r.release == newest.number
            and r.config_id >= newest.config_id
            for r in live
        )

    @property
    def updating(self) -> bool:
        """Whether replicas of another release are to be replaced, or are there to go back to."""
        old = any(not releases.is_newest(self.record, r) for r in self._live())
        return old or releases.fallback(self.record) is not None

    @property
    def recovered(self) -> bool:
        """Whether the state of every recorded replica is known."""
        return not any(replica.recovering for replica in self.replicas.values())

    def _live(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state in LIVE]

    def in_state(self, state: ReplicaState) -> list[Replica]:
        """Return the replicas that are in a state."""
        return [replica for replica in self.replicas.values() if replica.state is state]

    # --- What is observed -----------------------------------------------------------------------

    def reported(self, report: Report, now: float) -> float:
        """Take a replica's report of itself; return when to reconcile, at the latest.

        That is the time of the next check after a check that says nothing new. To reconcile all
        replicas for each of those would cost the square of their number.
        """
        replica = self.replicas.get(report.replica)
        if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.LOST}:
            return now
        if report.error:  # older replicas report it whole
            error, exception = bounded(report.error, report.exception)
            report = replace(report, error=error, exception=exception)
        before = _facts(replica), self.failures.check_error
        self._take_report(replica, report, now)
        after = _facts(replica), self.failures.check_error
        return self._orders.due_at(replica) if report.check_id and after == before else now

    def _take_report(self, replica: Replica, report: Report, now: float) -> None:
        replica.reported, replica.recovering = True, False
        replica.address, replica.process = report.queries_at, report.process
        replica.ongoing, replica.trouble = report.ongoing, report.trouble
        replica.worn_at = replica.worn_at if replica.worn else now
        replica.stats, replica.worn = report.stats, report.worn
        if replica.state is ReplicaState.RUNNING and report.state == "draining":
            replica.move(ReplicaEvent.RETIRE, now)  # asked to stop by a controller that died
        if report.check_id:
            self._checked(replica, report, now)
            return
        if report.error and report.state == "running" and report.config_id > replica.config_id:
            self._refused(replica, report)
        replica.config_id = max(report.config_id, replica.config_id)
        if replica.state is ReplicaState.STARTING:
            self._start_reported(replica, report, now)

    def exited(self, tag: str, now: float, cause: str = "") -> None:
        """Record that a replica's process is gone; ``cause`` is how it ended, where it is known."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.SHOULD_START}:
            return
        ended = replica.why_ended(cause)
        reason = RestartReason.parse(ended)
        why = f"{f': {cause}' if cause else ''}; see: greenroom logs {tag}"
        if replica.state is ReplicaState.STARTING:
            if reason is RestartReason.OUT_OF_MEMORY:
                self._count_restart(replica, reason)
            self._failed(replica, f"its process died while it was starting{why}", None, now)
        elif replica.state is ReplicaState.RUNNING:
            error = ended if replica.worn else f"a replica's process died{why}"
            self._lost(replica, reason, error, now, failures.DEATH, failures.BRIEF_LIFE)
        replica.recovering = False
        replica.move(ReplicaEvent.EXITED, now)

    def _checked(self, replica: Replica, report: Report, now: float) -> None:
        """Take the answer to a health check."""
        if report.check_id != replica.check_id or replica.state is not ReplicaState.RUNNING:
            return
        replica.check_sent_at = None
        replica.ask_at = now + self.config.health_check_period_s
        replica.config_id = max(replica.config_id, report.config_id)  # its report may be lost
        replica.sent_config_id = min(replica.sent_config_id, report.config_id)  # or it is sent anew
        replica.check_error = report.error
        if report.error:
            replica.missed_checks += 1
            self.failures.last_error = report.error
        else:
            replica.missed_checks = 0
            self.failures.passed(replica.since)

    def _refused(self, replica: Replica, report: Report) -> None:
        """Go back to the last settings that all replicas took: reconfigure raised on these."""
        newest = self.record.newest
        if (replica.release, report.config_id) != (newest.number, newest.config_id):
            return
        if self.record.fallback_config is not None:
            self.set_config(BackendConfig.read(self.record.fallback_config))
        self.update(update_failure=report.error, exception=report.exception)

    def _start_reported(self, replica: Replica, report: Report, now: float) -> None:
        replica.ask_at = now + self.config.health_check_period_s
        if report.state == "running":
            replica.move(ReplicaEvent.STARTED, now)
            self.failures.started(replica)
            if releases.is_newest(self.record, replica) and not self.record.newest.served:
                self.record = releases.with_newest(self.record, served=True)
        elif report.state in {"failed", "draining"}:
            if report.state == "failed":
                self._failed(replica, report.error, report.exception, now, lasts=report.lasts)
            replica.move(ReplicaEvent.FAILED, now)

    def _failed(
        self,
        replica: Replica,
        error: str,
        exception: bytes | None,
        now: float,
        *,
        lasts: bool = False,
    ) -> None:
        """Count a failed start; fail a release that has failed too often and never ran."""
        has_run = replica.may_have_served  # under an earlier controller
        reason = RestartReason.CRASHED if has_run else RestartReason.FAILED_START
        self._count_restart(replica, reason)
        self.failures.last_error = error = self.placement.with_host(replica.host, error)
        self.failures.add(failures.START, replica, now)
        # Code that a host cannot load is to be found out, unless it has been good once: where the
        # other hosts took it all, a missing package would show or not by chance.
        if not lasts or releases.numbered(self.record, replica.release).ran:
            self.failures.add(failures.START_HERE, replica, now)
        if not releases.is_newest(self.record, replica):
            return
        most = self.config.max_constructor_retry_count
        tries = min(most, MAX_UNUSABLE_TRIES) if lasts else most
        # What one host cannot load, though another runs it, no other try mends either.
        hopeless = lasts and not (self.record.failure or self.record.newest.ran)
        is_spent = self.failures.is_spent(replica.release, tries, now)
        if (hopeless or releases.may_fail(self.record)) and is_spent:
            self._fail(error, exception)

    def _lost(
        self,
        replica: Replica,
        reason: RestartReason,
        error: str,
        now: float,
        *kinds: failures.Kind,
    ) -> None:
        """Count the loss of a replica that runs.

        Go back from a release whose replicas start, and are lost one after the other.
        """
        self._count_restart(replica, reason)
        self.failures.last_error = error
        for kind in (*kinds, failures.LOSS):
            self.failures.add(kind, replica, now, now - replica.since)
        if not releases.is_newest(self.record, replica) or releases.fallback(self.record) is None:
            return
        losses = len(self.failures.row(failures.LOSS, replica.release))
        if losses >= min(self.config.max_constructor_retry_count, MAX_LOSSES_PER_UPDATE):
            self._fail(self.placement.with_host(replica.host, error), None)

    def _fail(self, error: str, exception: bytes | None) -> None:
        earlier = releases.fallback(self.record)
        if earlier is None:
            self.update(failure=error, exception=exception)
            return
        target = self._target_with(BackendConfig.read(earlier.config))
        record = releases.rolled_back(self.record, earlier, error)
        self._take_release(replace(record, exception=exception, target=target))

    # --- Hosts ----------------------------------------------------------------------------------

    def rebalance(self, held: Counter[str], now: float) -> int:
        """Replace replicas on hosts that have too many elsewhere; return how many.

        Those are hosts with two more of this backend's replicas than others, or with one more where
        the other host is freer and holds two less of all: ``held`` counts these, and is changed as
        replicas will move. An update places anew anyway, so nothing is moved while one goes on.
        """
        if self.updating:
            return 0
        live = [r for r in self.in_state(ReplicaState.RUNNING) if not r.moving]
        avoided = self.failures.avoided(self.record.newest.number, now)
        own = Counter(replica.host for replica in live if replica.host not in avoided)
        request = request_of(self.record.newest.actor_options, self.config.max_replicas_per_host)
        hosts = [host for host in self.placement.fitting(request, own) if host not in avoided]

        def order(host: str) -> tuple[int, int]:
            return own[host], held[host]

        moved = 0
        while own and hosts:
            most, least = max(own, key=order), min(hosts, key=order)
            more = own[most] - own[least]
            is_freer = self.placement.is_freer(least, most, request.needs)
            if more < 1 or (more == 1 and not (is_freer and held[most] - held[least] > 1)):
                break
            next(r for r in live if r.host == most and not r.moving).moving = True
            for counts in (own, held):
                counts[most] -= 1
                counts[least] += 1
            moved += 1
        return moved

    def host_gone(self, replica: Replica, now: float) -> None:
        """Count a replica no more whose host is lost."""
        if replica.state is ReplicaState.LOST:
            return
        is_asked = replica.recovering and replica.state is ReplicaState.STARTING
        if replica.state is ReplicaState.RUNNING or is_asked:
            self._count_restart(replica, RestartReason.HOST_LOST)
            replica.move(ReplicaEvent.LOSE, now)
        elif replica.state is ReplicaState.SHOULD_START:
            replica.move(ReplicaEvent.RETIRE, now)
        elif replica.state is not ReplicaState.STOPPED:
            replica.move(ReplicaEvent.EXITED, now)  # if it lives, it is asked to go when back
        replica.recovering = False
        replica.check_sent_at, replica.missed_checks = None, 0

    # --- The next steps -------------------------------------------------------------------------

    def reconcile(self, publish: Callable[[Backend], bool], now: float) -> list[Effect]:
        """Take the next steps toward what is wanted.

        ``publish`` makes its table the newest, and returns whether every proxy holds it already.
        """
        self._forget_stopped()  # first, so that what they had is free for others
        effects = self._fail_silent(now)
        self._retire_unhealthy(now)
        self._replace_worn(now)
        self._choose(now)
        self._rank()
        released = publish(self)
        for replica in self.replicas.values():
            effects += self._orders.next(replica, now, released=released)
        self._record_replicas()
        if self.wanted and self.converged:
            self.failures.came_up()
            self.proven = True
            if not self.record.newest.ran:
                self.record = releases.with_newest(self.record, ran=True)
        lost = len(self.in_state(ReplicaState.LOST))
        if self.converged and len(self.replicas) - lost == self.wanted:
            self.rescaling = ""
        self.record = releases.pruned(self.record)
        return effects

    def due_at(self) -> float:
        """Return when :meth:`reconcile` has something to do, if nothing happens before."""
        times = [self._orders.due_at(each) for each in self.replicas.values()]
        return min([*times, self._start_due_at, self._replace_due_at])

    def _forget_stopped(self) -> None:
        for replica in self.in_state(ReplicaState.STOPPED):
            self.placement.give_back(replica.tag)
            del self.replicas[replica.tag]

    def _record_replicas(self) -> None:
        self._forget_stopped()
        records = {tag: _record_of(replica) for tag, replica in self.replicas.items()}
        if records != self.record.replicas:
            self.update(replicas=records)

    def _fail_silent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for replica in self.in_state(ReplicaState.STARTING):
            if now < self._orders.ends_at(replica):
                continue
            error = "its process did not report"
            if replica.reported:
                limit = f"constructor_timeout_s={self.config.constructor_timeout_s:g}"
                error = f"its constructor did not return within {limit}"
            self._failed(replica, error, None, now)
            replica.recovering = False
            replica.move(ReplicaEvent.FAILED, now)
            effects.append(Kill(replica.tag))
        return effects

    def _retire_unhealthy(self, now: float) -> None:
        timeout_s = self.config.health_check_timeout_s
        for replica in self.in_state(ReplicaState.RUNNING):
            is_silent = now >= self._orders.ends_at(replica)
            if is_silent:
                replica.check_sent_at = None
                replica.missed_checks += 1
                replica.check_error = f"no answer within {timeout_s:g} s"
            kind, reason = failures.HEALTH, RestartReason.UNHEALTHY
            if replica.missed_checks >= MAX_MISSED_CHECKS:
                problem = f"{replica.tag} failed {MAX_MISSED_CHECKS} health checks"
                error = f"{problem}, the last one: {last_line(replica.check_error)}"
            elif replica.ejections >= MAX_EJECTIONS:
                kind, reason = failures.EJECTION, RestartReason.EJECTED
                error = replica.ejection
            else:
                continue
            is_early = now < self.failures.pause_ends_at(replica.release, kind)
            if is_early and not (is_silent or self.updating):
                continue  # one that answers may be better than the next that fails as well
            self.failures.check_error = error
            self._lost(replica, reason, error, now, kind)
            replica.move(ReplicaEvent.RETIRE, now)

    def _replace_worn(self, now: float) -> None:
        """Have worn replicas replaced by fresh ones: as many at a time as an update may start."""
        self._replace_due_at = NEVER
        running = self.in_state(ReplicaState.RUNNING)
        worn = [replica for replica in running if replica.worn and not replica.moving]
        most = releases.surge(self.wanted, self.config.max_surge_percent)
        room = most - sum(replica.moving for replica in running)
        if self.updating or not worn or room <= 0:
            return
        start_at = self.failures.pause_ends_at(self.record.newest.number, failures.WEAR)
        if now < start_at:
            self._replace_due_at = start_at
            return
        for replica in worn[:room]:
            replica.moving = True
            self._count_restart(replica, RestartReason.parse(replica.worn))
            self.failures.add(failures.WEAR, replica, now, replica.worn_at - replica.since)

    def _count_restart(self, replica: Replica, reason: RestartReason) -> None:
        """Count a replica that is replaced and was to go on: once, by the first reason."""
        if replica.replaced_for is None:
            replica.replaced_for = reason
            self.restarts[reason] += 1

    # --- More and fewer -------------------------------------------------------------------------

    def _choose(self, now: float) -> None:
        """Decide which replicas to add and which to retire, in favour of those that are to stay."""
        self._start_due_at, self.waiting = NEVER, ""
        if not self.wanted and self.record.capacity:
            self.update(capacity=0)  # what autoscaling ended is not brought back by an update
        is_update, live = bool(self.wanted) and self.updating, self._live()
        newest = self.record.newest
        old = [r for r in live if (r.release != newest.number if is_update else r.moving)]
        new = [r for r in live if (r.release == newest.number if is_update else not r.moving)]
        earlier = releases.fallback(self.record) if is_update else None
        counts = releases.Counts(
            wanted=self.wanted,
            capacity=self.record.capacity if is_update else self.wanted,
            live=len(new),
            running=_count_running(new),
            old_live=len(old),
            old_useful=_count_running(old) if is_update else len(old),
            leaving=sum(r.state in LEAVING for r in self.replicas.values()),
            can_start_old=earlier is not None,
            max_surge_percent=self.config.max_surge_percent if is_update else None,
        )
        # In an update, what runs has to be known first, and so what is missing.
        if not (is_update and any(replica.recovering for replica in live)):
            steps = releases.next_steps(counts)
            self._retire_surplus(old, steps.retire_old, now)
            self._add(steps.start, newest, now)
            if earlier is not None:
                self._add(steps.start_old, earlier, now)
        self._retire_surplus(new, len(new) - self.wanted, now)

    def _add(self, count: int, release: Release, now: float) -> None:
        if count <= 0:
            return
        start_at = self.failures.pause_ends_at(release.number, *OF_STARTS)
        if now < start_at:
            self._start_due_at = min(self._start_due_at, start_at)
            return
        avoided = self.failures.avoided(release.number, now)
        request = request_of(release.actor_options, self.config.max_replicas_per_host)
        for _ in range(count):
            # Siblings are not those that leave: code that cannot start on a host would be moved
            # about, and found out or not by chance. Nor those of another release, which go as
            # these come: where every host has as many as it may, nothing could be updated.
            siblings = Counter(r.host for r in self._live() if r.release == release.number)
            host = self.placement.choose(request, siblings, avoided)
            if host is None:
                self.waiting = self.placement.why_not(request, siblings)
                return
            tag = f"{self.record.tag}#{secrets.token_hex(3)}"
            self.replicas[tag] = Replica(tag, release.number, host, since=now)
            self._take_room(self.replicas[tag])

    def _take_room(self, replica: Replica) -> None:
        options = releases.numbered(self.record, replica.release).actor_options
        needs = needs_of(options)
        replica.devices = self.placement.take(replica.tag, replica.host, needs, replica.devices)

    def _retire_surplus(self, live: list[Replica], surplus: int, now: float) -> None:
        """Retire so many: those that do not run, then from the most crowded hosts."""
        if any(replica.recovering for replica in live):
            # Their reports will tell which of them run, and which were asked to stop already.
            # And a process that this controller has never asked to start cannot be asked to stop.
            live = [] if self.wanted else [r for r in live if not r.recovering]
        crowded = Counter(replica.host for replica in live)
        for _ in range(min(surplus, len(live))):
            goes = min(
                live,
                key=lambda r: (
                    r.state is ReplicaState.RUNNING,
                    not r.moving,
                    -crowded[r.host],
                    -r.since,
                ),
            )
            live.remove(goes)
            crowded[goes.host] -= 1
            goes.move(ReplicaEvent.RETIRE, now)

    def _rank(self) -> None:
        """Give the living replicas their numbers, once all that are recorded were heard of.

        One that is recorded may have been on its way to its end: its number may be another's by
        now. If that were recorded as well, a controller that dies after each checkpoint would
        change the numbers back and forth, and come no further.
        """
        live = self._live()
        if not any(each.recovering for each in live) or any(each.rank is None for each in live):
            rank(live)


def _facts(replica: Replica) -> tuple[Any, ...]:
    """Return all that a check may change in a replica and the next steps depend on."""
    return (
        replica.state,
        replica.address,
        replica.process,
        replica.config_id,
        replica.sent_config_id,
        replica.missed_checks,
        replica.check_error,
        replica.worn,
        replica.recovering,
    )


def _record_of(replica: Replica) -> ReplicaRecord:
    return ReplicaRecord(
        release=replica.release,
        host=replica.host,
        rank=0 if replica.rank is None else replica.rank.rank,
        devices=replica.devices or None,
    )


def _count_running(replicas: Iterable[Replica]) -> int:
    return sum(replica.state is ReplicaState.RUNNING for replica in replicas)
