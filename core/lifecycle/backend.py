"""One backend: its replicas, brought from what is observed to what is desired.

Theory of operation. The record (hard state) names the replicas that may have a process; it is saved
before a process is asked for, so that no restart of the controller can lose one. Each replica's
state (soft) follows the table in replica_states and is learnt anew by a new controller, which sends
Start to every recorded replica: a running one answers that it runs.

Until such a replica has answered, or is given up as silent, it is *recovering*, and is not told to
stop: whether it is the one to go is not known yet.

:meth:`Backend.reconcile` compares and takes the next steps; it is cheap to call, and safe at any
time. Stopping goes router first: a replica that is to go leaves the published table, and is told to
stop when every proxy holds the table without it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from greenroom.core.autoscaling.config import AutoscalingConfig
from greenroom.core.autoscaling.decision import first_target
from greenroom.core.cluster.placement import Placement, Request, anywhere, needs_of
from greenroom.core.config import BackendConfig
from greenroom.core.effects import Check, Effect, Kill, Reconfigure, Start, Stop
from greenroom.core.lifecycle import releases
from greenroom.core.lifecycle.replicas import (
    LEAVING,
    LIVE,
    Replica,
    ReplicaEvent,
    ReplicaState,
    Retries,
)
from greenroom.core.records import BackendRecord, Release
from greenroom.core.routing.tables import BackendTable, ReplicaTable

# How many replicas a backend is to have: a number of its settings, or what autoscaling makes it.
#
# The autoscaled number is the record's ``target``, so that it outlives the controller; it is no
# part of the settings, so that neither history nor a replica hears of it.


class Sized:
    """A backend's record and its settings, as far as they say how many replicas there should be.

    ``changed`` is set when the record was replaced and needs saving.
    """

    def __init__(self, record: BackendRecord) -> None:
        self.record = record
        self.config = BackendConfig(**record.config)
        self.changed = False
        self.rescaling = ""  # while replicas come or go for that alone: UPSCALING or DOWNSCALING
        if self.config.autoscaling_config is not None and record.target is None:
            self.update(target=first_target(self.config.autoscaling_config, None, 0))

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self.record = replace(self.record, **changes)
        self.changed = True

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return 0 if self.record.deleting or self.record.failure else self.target

    @property
    def target(self) -> int:
        """How many replicas there should be, were it not deleted or given up."""
        return self.config.num_replicas or self.record.target or 0

    @property
    def autoscaled_by(self) -> AutoscalingConfig | None:
        """The settings of autoscaling, where it decides on the number of replicas."""
        is_over = self.record.deleting or self.record.failure
        return None if is_over else self.config.autoscaling_config

    @property
    def names(self) -> tuple[str, str]:
        """The names of its deployment and of its application, if it has any."""
        return self.record.deployment, self.record.application

    def rescale(self, target: int) -> None:
        """Make this the number of replicas that there should be, as autoscaling has decided."""
        before = self.target
        self.update(target=target)
        self.note_rescaling(before)

    def target_with(self, config: BackendConfig, *, anew: bool = False) -> int | None:
        """Return the record's target for other settings; ``anew`` as if it had run no replica."""
        scaling = config.autoscaling_config
        if scaling is None:
            return None
        before = None if anew else self.config.autoscaling_config
        return first_target(scaling, before, 0 if anew else self.target)

    def note_rescaling(self, before: int) -> None:
        """Say that replicas come or go, where the target is another than ``before``."""
        if self.target != before:
            self.rescaling = "UPSCALING" if self.target > before else "DOWNSCALING"


# The replicas of one backend and where they are: started on hosts, retired, lost with a host.
#
# Theory of operation. Each replica is decided for a host, and stays there. One whose host is lost
# is
# *lost*: it is not counted, another is started elsewhere, and its record stays, for its process may
# live on behind a broken link. When the host is back it is asked as a new controller asks: if it
# still runs it counts again, and if there are too many then, those go that are furthest from being
# spread. So nothing healthy is killed, and nothing runs twice.
#
# A replica that is to be *moved* goes when another runs in its place, and stays while there is no
# room for one.


class Placing(Sized):
    """A backend's replicas, by tag, and its part of the placement."""

    def __init__(self, record: BackendRecord, now: float, placement: Placement | None) -> None:
        super().__init__(record)
        self.placement = placement or anywhere()
        self.waiting = ""  # why a replica that is wanted has no room, and what would make it fit
        self.retries = Retries()
        self._start_due_at = float("inf")  # when one is to start that has to wait
        # Recorded replicas may have a process already: they are asked, as if just told to start.
        self.replicas = {
            tag: Replica(
                tag,
                number,
                record.hosts.get(tag, ""),
                ReplicaState.STARTING,
                since=now,
                ask_at=now,
                recovering=True,
            )
            for tag, number in releases.release_numbers(record).items()
            if self.placement.knows(record.hosts.get(tag, ""))
        }
        for replica in self.replicas.values():
            self._take_room(replica)

    def release_of(self, replica: str) -> Release:
        """Return the release that a replica runs."""
        return releases.release_of(self.record, replica)

    def host_of(self, replica: str) -> str:
        """Return the host that a replica was decided for."""
        return self.replicas[replica].host

    def _take_room(self, replica: Replica) -> None:
        options = releases.numbered(self.record, replica.release).actor_options
        self.placement.take(replica.tag, replica.host, needs_of(options))

    def _live(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state in LIVE]

    # --- More and fewer -------------------------------------------------------------------------

    def _add(self, count: int, release: int, start_at: float, now: float) -> None:
        if count and now < start_at:
            self._start_due_at = min(self._start_due_at, start_at)
            return
        options = releases.numbered(self.record, release).actor_options
        request = Request(
            needs=needs_of(options),
            labels=options.get("label_selector", {}),
            max_per_host=self.config.max_replicas_per_host,
        )
        for _ in range(count):
            siblings = self._by_host(release)
            host = self.placement.choose(request, siblings)
            if host is None:
                self.waiting = self.placement.why_not(request, siblings)
                return
            tag = f"{self.record.tag}#{secrets.token_hex(3)}"
            self.replicas[tag] = Replica(tag, release, host, since=now)
            self._take_room(self.replicas[tag])

    def _by_host(self, release: int) -> Counter[str]:
        # Not those that leave: code that cannot start on a host would be moved about, and found out
        # or not by chance. Nor those of another release, which go as these come: where every host
        # has as many as it may, nothing could ever be updated.
        return Counter(r.host for r in self._live() if r.release == release)

    def _retire_surplus(self, live: list[Replica], surplus: int, now: float) -> None:
        if any(replica.recovering for replica in live):
            # Which of them runs, and which has been told to stop already, their reports will tell.
            # And a process that this controller has never told to start cannot be told to stop.
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

    # --- Moves ----------------------------------------------------------------------------------

    def move_from(self, host: str) -> None:
        """Have all replicas on a host replaced elsewhere."""
        for replica in self._live():
            replica.moving = replica.moving or replica.host == host

    def retire_from(self, host: str, now: float) -> None:
        """Have all replicas on a host go now, in their own time."""
        for replica in self._live():
            if replica.host == host:
                replica.move(ReplicaEvent.RETIRE, now)

    def rebalance(self) -> int:
        """Have replicas on hosts that have too many replaced elsewhere; return how many.

        An update places anew anyway, so there is nothing to move while one is under way.
        """
        live = [r for r in self._live() if r.state is ReplicaState.RUNNING and not r.moving]
        counts = Counter(dict.fromkeys(self.placement.open_hosts(), 0))
        counts.update(replica.host for replica in live)
        moved = 0
        while counts and not self.updating:
            most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
            if counts[most] - counts[least] <= 1:
                break
            next(r for r in live if r.host == most and not r.moving).moving = True
            counts[most] -= 1
            counts[least] += 1
            moved += 1
        return moved

    @property
    def updating(self) -> bool:
        """Whether replicas of another release are to be replaced, or are there to go back to."""
        old = any(r.release != self.record.release for r in self._live())
        return old or releases.fallback(self.record) is not None

    def is_at(self, host: str) -> bool:
        """Tell whether any replica is on a host, leaving ones too."""
        return any(replica.host == host for replica in self.replicas.values())

    def _choose_moves(self, live: list[Replica], now: float) -> None:
        """Start what is missing beside those that are to be moved, and let go whom it replaces."""
        moving = [replica for replica in live if replica.moving]
        staying = len(live) - len(moving)
        if staying < self.wanted:
            missing = self.wanted - staying
            self._add(missing, self.record.release, self.retries.start_at, now)
        running = sum(r.state is ReplicaState.RUNNING and not r.moving for r in live)
        self._retire_surplus(moving, max(running + len(moving) - self.wanted, 0), now)

    # --- Hosts that are lost, and back ----------------------------------------------------------

    def host_lost(self, host: str, now: float) -> None:
        """Count no more on what is on a host."""
        for replica in self.replicas.values():
            if replica.host != host or replica.state is ReplicaState.LOST:
                continue
            is_asked = replica.recovering and replica.state is ReplicaState.STARTING
            if replica.state is ReplicaState.RUNNING or is_asked:
                replica.move(ReplicaEvent.LOSE, now)
            elif replica.state is ReplicaState.SHOULD_START:
                replica.move(ReplicaEvent.RETIRE, now)
            elif replica.state is not ReplicaState.STOPPED:
                replica.move(ReplicaEvent.EXITED, now)  # if it lives, it is told to go when back
            replica.recovering = False
            replica.check_sent_at, replica.missed_checks = None, 0

    def host_back(self, host: str, running: Collection[str], now: float) -> None:
        """Ask those of a host that was lost which still have a process there."""
        for replica in self.replicas.values():
            if replica.host == host and replica.state is ReplicaState.LOST:
                if replica.tag in running:
                    replica.move(ReplicaEvent.FIND, now)
                    replica.recovering, replica.reported, replica.ask_at = True, False, now
                else:
                    replica.move(ReplicaEvent.EXITED, now)

    def host_gone(self, host: str, now: float) -> None:
        """Forget what was on a host that does not come back."""
        self.host_lost(host, now)
        self.host_back(host, (), now)


RESEND_S = 1.0
SLOW_START_S = 10.0  # from then on the status tells of a constructor
SILENT_START_S = 30.0  # a process that has not reported by then is taken for broken
KILL_MARGIN_S = 1.0  # past the drain time, before SIGKILL
SILENT_EXIT_S = 5.0  # past that; one that has never reported is then taken for gone
RELEASE_TIMEOUT_S = 5.0  # how long a slow proxy may hold up a stop
MAX_UNUSABLE_TRIES = 3  # of code that cannot be loaded; max_constructor_retry_count is for the rest
MAX_ENDS_PER_UPDATE = 3  # of replicas that ran, one after the other; then the update is taken back
MAX_MISSED_CHECKS = 3


class Backend(Placing):
    """A backend's record and its replicas."""

    def __init__(
        self, record: BackendRecord, now: float, placement: Placement | None = None
    ) -> None:
        super().__init__(record, now, placement)
        self.proven = False  # all replicas have taken the newest settings, at some time

    # --- What is wanted -------------------------------------------------------------------------

    def set_config(self, config: BackendConfig) -> bool:
        """Take a new config; False when it is the present one."""
        if config == self.config:
            return False
        target, config_id = self.target_with(config), self.record.config_id + 1
        before = self.target
        fallback = self.record.config if self.proven else self.record.fallback_config
        self.config, self.proven = config, False
        self.update(
            config=config.model_dump(),
            config_id=config_id,
            fallback_config=fallback,
            target=target,
            update_failure="",
        )
        self.note_rescaling(before)
        return True

    def deploy(self, **release: Any) -> bool:
        """Have the newest release made of these fields; False when it is, and all is well.

        They are ``code_hash``, ``code_digest``, ``config``, ``actor_options`` and ``version``. Only
        other settings are changed in place; else the replicas are replaced, some at a time.
        """
        wanted, again = self.wanted, self.record.deleting or bool(self.record.failure)
        target = self.target_with(BackendConfig(**release["config"]), anew=again)
        if again:
            self.try_again()
        if releases.is_release(self.record, release):
            changed = self.set_config(BackendConfig(**release["config"]))
            if again:
                self.update(target=target)
            if self.record.update_failure:
                self.update(update_failure="", exception=None)
                changed = True
            return changed or again
        self.retries.begin_anew()
        self._take_release(releases.updated(self.record, release, wanted))
        self.update(target=target)
        return True

    def _take_release(self, record: BackendRecord) -> None:
        self.record, self.changed = releases.pruned(record), True
        self.config, self.proven = BackendConfig(**record.config), False

    def delete(self, *, force: bool = False) -> None:
        """Have all replicas stopped, then the backend gone; with ``force`` without draining."""
        if not self.record.deleting or (force and not self.record.force):
            self.update(deleting=True, force=force or self.record.force)

    def try_again(self) -> None:
        """Start anew after it was given up or was to be deleted, as if it had never run."""
        self.retries.begin_anew()
        self.record = releases.as_never_run(self.record)  # nor is there anything to go back to
        self.update(deleting=False, force=False, failure="", update_failure="", exception=None)

    @property
    def running(self) -> int:
        """How many replicas run."""
        return _running(list(self.replicas.values()))

    @property
    def settled(self) -> bool:
        """Whether exactly the wanted replicas run, with the newest config."""
        live = self._live()
        return len(live) == self.wanted and all(
            r.state is ReplicaState.RUNNING
            and r.release == self.record.release
            and r.config_id >= self.record.config_id
            for r in live
        )

    @property
    def lost(self) -> int:
        """How many replicas are on hosts that are lost."""
        return sum(replica.state is ReplicaState.LOST for replica in self.replicas.values())

    @property
    def recovered(self) -> bool:
        """Whether it is known of every recorded replica how it is."""
        return not any(replica.recovering for replica in self.replicas.values())

    @property
    def releasing(self) -> bool:
        """Whether a replica waits for all proxies to hold the table without it."""
        return any(r.state is ReplicaState.SHOULD_STOP for r in self.replicas.values())

    @property
    def trouble(self) -> str:
        """Why a replica has no room, and the last error, while they are not overcome; else ''."""
        if self.record.failure or self.settled:
            return self.record.failure
        return "; ".join(filter(None, (self.waiting, self._last_error)))

    @property
    def _last_error(self) -> str:
        error, failures = self.retries.last_error, self.retries.failures
        if not failures:
            return error
        of_how_many = f" of {self._tries}" if self._may_be_given_up else ""
        told = f"{failures}{of_how_many} tries to start it have failed"
        return f"{told}, the last one: {_last_line(error)}"

    @property
    def is_sick(self) -> bool:
        """Whether a replica that runs has failed its health checks, and waits to be replaced."""
        return any(r.missed_checks >= MAX_MISSED_CHECKS for r in self._running())

    @property
    def sickness(self) -> str:
        """What failed in health checks, until they pass; else ''."""
        for replica in self._running():
            if replica.check_error:
                count = f"{replica.missed_checks} of {MAX_MISSED_CHECKS} times"
                told = f"the health check of {replica.tag} failed {count}"
                return f"{told}, the last time: {_last_line(replica.check_error)}"
        return self.retries.check_error

    def slow_starts(self, now: float) -> str:
        """Return which constructor takes long, and for how long it has; else ''."""
        for replica in self.replicas.values():
            took_s = now - replica.since
            is_starting = replica.state is ReplicaState.STARTING and replica.reported
            if is_starting and took_s >= SLOW_START_S:
                return f"the constructor of {replica.tag} has been running for {took_s:.0f} s"
        return ""

    def _running(self) -> list[Replica]:
        return [r for r in self.replicas.values() if r.state is ReplicaState.RUNNING]

    def table(self) -> BackendTable:
        """Return what routers are told."""
        config = self.config
        running = [r for r in self.replicas.values() if r.state is ReplicaState.RUNNING]
        return BackendTable(
            tag=self.record.tag,
            replicas=tuple(
                ReplicaTable(tag=r.tag, address=r.address, process=r.process, host=r.host)
                for r in running
            ),
            max_ongoing_requests=config.max_ongoing_requests,
            max_queued_requests=config.max_queued_requests,
            request_timeout_s=config.request_timeout_s,
            retryable=config.retryable,
            unavailable="it could not be started" if self.record.failure else "",
            is_expected=self.record.was_running and self.wanted > 0,
        )

    # --- What is observed -----------------------------------------------------------------------

    def reported(
        self,
        tag: str,
        state: str,
        *,
        address: Any,
        process: Any,
        config_id: int,
        check_id: int,
        ongoing: int,
        error: str,
        exception: bytes | None,
        now: float,
        lasts: bool = False,
        trouble: str = "",
    ) -> None:
        """Take a replica's report of itself; ``lasts`` is of an error that no other try mends."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.LOST}:
            return
        replica.reported, replica.recovering = True, False
        replica.address, replica.process, replica.ongoing = address, process, ongoing
        replica.trouble = trouble
        if replica.state is ReplicaState.RUNNING and state == "draining":
            replica.move(ReplicaEvent.RETIRE, now)  # told to stop by a controller that died
        if check_id:
            self._checked(replica, check_id, config_id, error, now)
            return
        if error and state == "running" and config_id > replica.config_id:
            self._refused(replica, config_id, error, exception)
        replica.config_id = max(config_id, replica.config_id)
        if replica.state is ReplicaState.STARTING:
            self._start_reported(replica, state, error, exception, now, lasts=lasts)

    def _refused(
        self, replica: Replica, config_id: int, error: str, exception: bytes | None
    ) -> None:
        """Go back to the last settings that all took, for reconfigure raised on these."""
        newest = (self.record.release, self.record.config_id)
        if (replica.release, config_id) != newest:
            return
        if self.record.fallback_config is not None:
            self.set_config(BackendConfig(**self.record.fallback_config))
        self.update(update_failure=error, exception=exception)

    def _start_reported(
        self,
        replica: Replica,
        state: str,
        error: str,
        exception: bytes | None,
        now: float,
        *,
        lasts: bool,
    ) -> None:
        replica.ask_at, since = now + self.config.health_check_period_s, replica.since
        if state == "running":
            replica.move(ReplicaEvent.STARTED, now)
            if replica.release == self.record.release and not self.record.served:
                self.update(served=True)
        elif state in {"failed", "draining"}:
            replica.move(ReplicaEvent.FAILED, now)
            if state == "failed":
                self._failed(replica, error, exception, since, now, lasts=lasts)

    def exited(self, tag: str, now: float) -> None:
        """Take note that a replica's process is gone."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.SHOULD_START}:
            return
        before, since = replica.state, replica.since
        replica.recovering = False
        replica.move(ReplicaEvent.EXITED, now)
        if before is ReplicaState.STARTING:
            self._failed(replica, "its process died while it was starting", None, since, now)
        elif before is ReplicaState.RUNNING:
            error = "a replica's process died"
            is_old = replica.release != self.record.release
            self.retries.died(error, replica.host, since, now, old=is_old)
            self._ended_amid_update(replica, error, since, now)

    def _came_up(self) -> None:
        self.retries.came_up()
        self.proven = True
        if not self.record.ran:
            self.update(ran=True)

    def note_running(self) -> bool:
        """Note that its application, or it by itself, has been RUNNING; False if it was noted."""
        if self.record.was_running:
            return False
        self.update(was_running=True)
        return True

    def _failed(
        self,
        replica: Replica,
        error: str,
        exception: bytes | None,
        began_at: float,
        now: float,
        *,
        lasts: bool = False,
    ) -> None:
        """Count a failed start, and give the release up that has failed so often and never ran."""
        error = self.placement.told_at(replica.host, error)
        if replica.release != self.record.release:
            self.retries.old_failed(error, replica.host, began_at, now)
            return
        self.retries.failed(error, replica.host, began_at, now)
        tries = min(self._tries, MAX_UNUSABLE_TRIES) if lasts else self._tries
        # What one host cannot load, though another runs it, no other try mends either.
        hopeless = lasts and not (self.record.failure or self.record.ran)
        if (hopeless or self._may_be_given_up) and self.retries.failures >= tries:
            self._give_up(error, exception)

    @property
    def _tries(self) -> int:
        return self.config.max_constructor_retry_count

    @property
    def _may_be_given_up(self) -> bool:
        """Whether there is a release to go back to, or none of whose replicas has ever run."""
        if self.record.failure or self.record.ran:
            return False
        return not self.record.served or releases.fallback(self.record) is not None

    def _ended_amid_update(self, replica: Replica, error: str, since: float, now: float) -> None:
        """Go back from a release whose replicas start, and are lost one after the other."""
        if replica.release != self.record.release or releases.fallback(self.record) is None:
            return
        self.retries.ended_amid_update(replica.host, since, now)
        if self.retries.ended >= min(self._tries, MAX_ENDS_PER_UPDATE):
            self._give_up(self.placement.told_at(replica.host, error), None)

    def _give_up(self, error: str, exception: bytes | None) -> None:
        earlier = releases.fallback(self.record)
        if earlier is None:
            self.update(failure=error, exception=exception)
            return
        self.retries.went_back()
        target = self.target_with(BackendConfig(**earlier.config))
        self._take_release(releases.rolled_back(self.record, earlier, error))
        self.update(exception=exception, target=target)

    def _checked(
        self, replica: Replica, check_id: int, config_id: int, error: str, now: float
    ) -> None:
        if check_id != replica.check_id or replica.state is not ReplicaState.RUNNING:
            return
        replica.check_sent_at = None
        replica.ask_at = now + self.config.health_check_period_s
        replica.missed_checks = replica.missed_checks + 1 if error else 0
        replica.check_error = error
        if not error:
            self.retries.passed(replica.since)
        replica.config_id = max(replica.config_id, config_id)  # its report may have been lost
        replica.told_config_id = min(replica.told_config_id, config_id)  # or it is told again
        if error:
            self.retries.last_error = error

    # --- The next steps -------------------------------------------------------------------------

    def reconcile(self, publish: Callable[[BackendTable], bool], now: float) -> list[Effect]:
        """Take the next steps toward what is wanted.

        ``publish`` makes a table the newest, and tells whether every proxy holds it already.
        """
        effects = self._give_up_silent(now)
        self._retire_unhealthy(now)
        self._choose(now)
        released = publish(self.table())
        for replica in list(self.replicas.values()):
            effects += self._STEPS[replica.state](self, replica, released, now)
        self._record_replicas()
        if self.wanted and self.settled:
            self._came_up()
        if self.settled and len(self.replicas) - self.lost == self.wanted:
            self.rescaling = ""
        if (pruned := releases.pruned(self.record)) is not self.record:
            self.record, self.changed = pruned, True
        return effects

    def _record_replicas(self) -> None:
        tags = tuple(t for t, r in self.replicas.items() if r.state is not ReplicaState.STOPPED)
        if len(tags) < len(self.replicas) or tags != self.record.replicas:
            for tag in self.replicas.keys() - set(tags):
                self.placement.give_back(tag)
            self.replicas = {tag: self.replicas[tag] for tag in tags}
            numbers = {tag: self.replicas[tag].release for tag in tags}
            outdated = {t: n for t, n in numbers.items() if n != self.record.release}
            hosts = {tag: self.replicas[tag].host for tag in tags}
            self.update(replicas=tags, outdated=outdated, hosts=hosts)

    def due_at(self) -> float:
        """Return when :meth:`reconcile` has something to do, if nothing happens before."""
        times = [self._due_at(replica) for replica in self.replicas.values()]
        return min([*times, self._start_due_at])

    def _due_at(self, replica: Replica) -> float:
        if replica.state is ReplicaState.RUNNING:
            sent_at = replica.check_sent_at
            return replica.ask_at if sent_at is None else self._missed_at(sent_at)
        if replica.state is ReplicaState.SHOULD_STOP:
            return replica.since + RELEASE_TIMEOUT_S
        if replica.state is ReplicaState.LOST:
            return float("inf")
        if replica.state is ReplicaState.STARTING:
            return min(replica.ask_at, self._start_ends_at(replica))
        return replica.ask_at

    def _start_ends_at(self, replica: Replica) -> float:
        limit_s = self.config.constructor_timeout_s if replica.reported else SILENT_START_S
        return replica.since + limit_s

    def _missed_at(self, sent_at: float) -> float:
        return sent_at + self.config.health_check_timeout_s

    def _kill_at(self, replica: Replica) -> float:
        return replica.since + self._drain_s() + KILL_MARGIN_S

    def _give_up_silent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for replica in self.replicas.values():
            if replica.state is ReplicaState.STARTING and now >= self._start_ends_at(replica):
                error = "its process did not report"
                if replica.reported:
                    limit = f"constructor_timeout_s={self.config.constructor_timeout_s:g}"
                    error = f"its constructor did not return within {limit}"
                replica.recovering, since = False, replica.since
                replica.move(ReplicaEvent.FAILED, now)
                self._failed(replica, error, None, since, now)
                effects.append(Kill(replica.tag))
        return effects

    def _retire_unhealthy(self, now: float) -> None:
        for replica in self.replicas.values():
            if replica.state is not ReplicaState.RUNNING:
                continue
            sent_at = replica.check_sent_at
            is_silent = sent_at is not None and now >= self._missed_at(sent_at)
            if is_silent:
                replica.check_sent_at = None
                replica.missed_checks += 1
                replica.check_error = f"no answer within {self.config.health_check_timeout_s:g} s"
            if replica.missed_checks < MAX_MISSED_CHECKS:
                continue
            if not (is_silent or self.updating) and now < self.retries.replace_at:
                continue  # one that answers may be better than the next that fails as well
            told = f"{replica.tag} failed {MAX_MISSED_CHECKS} health checks"
            error, since = f"{told}, the last one: {_last_line(replica.check_error)}", replica.since
            self.retries.replaced(error, replica.host, since, now)
            replica.move(ReplicaEvent.RETIRE, now)
            self._ended_amid_update(replica, error, since, now)

    def _choose(self, now: float) -> None:
        self._start_due_at, self.waiting = float("inf"), ""
        live = self._live()
        if not self.wanted and self.record.capacity:
            self.update(capacity=0)  # what autoscaling ended is not brought back by an update
        if self.wanted and self.updating:
            self._choose_for_update(live, now)
            live = [r for r in self._live() if r.release == self.record.release]
        elif any(replica.moving for replica in live):
            self._choose_moves(live, now)
            return
        elif len(live) < self.wanted:
            self._add(self.wanted - len(live), self.record.release, self.retries.start_at, now)
        if len(live) > self.wanted:
            self._retire_surplus(live, len(live) - self.wanted, now)

    def _choose_for_update(self, live: list[Replica], now: float) -> None:
        if any(replica.recovering for replica in live):
            return  # what runs is not known yet, so neither is what is missing
        new = [r for r in live if r.release == self.record.release]
        old = [r for r in live if r.release != self.record.release]
        earlier = releases.fallback(self.record)
        steps = releases.next_steps(
            releases.Counts(
                wanted=self.wanted,
                capacity=self.record.capacity,
                live=len(new),
                running=_running(new),
                old_live=len(old),
                old_running=_running(old),
                leaving=sum(r.state in LEAVING for r in self.replicas.values()),
                can_start_old=earlier is not None,
            )
        )
        self._retire_surplus(old, steps.retire_old, now)
        self._add(steps.start, self.record.release, self.retries.start_at, now)
        if earlier is not None:
            self._add(steps.start_old, earlier.number, self.retries.start_old_at, now)

    def _start(self, replica: Replica, _released: bool, now: float) -> list[Effect]:
        replica.move(ReplicaEvent.START, now)
        replica.ask_at = now + RESEND_S
        return [Start(replica.tag, self.record.tag)]

    def _await_start(self, replica: Replica, _released: bool, now: float) -> list[Effect]:
        if now < replica.ask_at:
            return []
        if replica.reported:  # it is busy starting, or its later report was lost
            replica.ask_at = now + self.config.health_check_period_s
            return [Check(replica.tag, 0)]
        replica.ask_at = now + RESEND_S
        return [Start(replica.tag, self.record.tag)]

    def _keep(self, replica: Replica, _released: bool, now: float) -> list[Effect]:
        effects: list[Effect] = []
        newest = replica.release == self.record.release
        if newest and max(replica.config_id, replica.told_config_id) < self.record.config_id:
            replica.told_config_id = self.record.config_id
            effects.append(Reconfigure(replica.tag, self.record.tag))
        if replica.check_sent_at is None and now >= replica.ask_at:
            replica.check_id += 1
            replica.check_sent_at = now
            effects.append(Check(replica.tag, replica.check_id))
        return effects

    def _release(self, replica: Replica, released: bool, now: float) -> list[Effect]:
        if not (released or now >= replica.since + RELEASE_TIMEOUT_S):
            return []
        replica.move(ReplicaEvent.STOP, now)
        return self._ask_to_stop(replica, now)

    def _await_exit(self, replica: Replica, _released: bool, now: float) -> list[Effect]:
        kill_at = self._kill_at(replica)
        if now < kill_at:
            return self._ask_to_stop(replica, now) if now >= replica.ask_at else []
        if replica.process is None and now >= kill_at + SILENT_EXIT_S:
            replica.move(ReplicaEvent.EXITED, now)  # if it does come up, it is told to go
            return []
        replica.ask_at = now + RESEND_S
        return [Kill(replica.tag)]

    def _ask_to_stop(self, replica: Replica, now: float) -> list[Effect]:
        replica.ask_at = min(now + RESEND_S, self._kill_at(replica))
        return [Stop(replica.tag, self._drain_s())]

    def _drain_s(self) -> float:
        return 0.0 if self.record.force else self.config.graceful_shutdown_timeout_s

    def _await_host(self, replica: Replica, _released: bool, now: float) -> list[Effect]:
        if self.record.deleting or replica.release != self.record.release:
            replica.move(ReplicaEvent.EXITED, now)  # if it lives, it is told to go when back
        return []

    def _stopped(self, _replica: Replica, _released: bool, _now: float) -> list[Effect]:
        return []

    _STEPS = {  # noqa: RUF012  # a table, never changed
        ReplicaState.SHOULD_START: _start,
        ReplicaState.STARTING: _await_start,
        ReplicaState.RUNNING: _keep,
        ReplicaState.SHOULD_STOP: _release,
        ReplicaState.STOPPING: _await_exit,
        ReplicaState.STOPPED: _stopped,
        ReplicaState.LOST: _await_host,
    }


def _last_line(error: str) -> str:
    return error.strip().rpartition("\n")[2]


def _running(replicas: list[Replica]) -> int:
    return sum(replica.state is ReplicaState.RUNNING for replica in replicas)
