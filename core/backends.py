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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from understudy.core.config import BackendConfig
from understudy.core.effects import Check, Effect, Kill, Reconfigure, Start, Stop
from understudy.core.records import BackendRecord
from understudy.core.replica_states import LIVE, ReplicaEvent, ReplicaState, next_state
from understudy.core.tables import BackendTable, ReplicaTable

RESEND_S = 1.0
SILENT_START_S = 30.0  # a process that has not reported by then is taken for broken
KILL_MARGIN_S = 1.0  # past the drain time, before SIGKILL
SILENT_EXIT_S = 5.0  # past that; one that has never reported is then taken for gone
RELEASE_TIMEOUT_S = 5.0  # how long a slow proxy may hold up a stop
BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0  # a replica that ran this long was no crash loop
TRIES_PER_REPLICA = 3  # Ray Serve's rule: min(max_constructor_retry_count, 3 * num_replicas)
MAX_MISSED_CHECKS = 3


@dataclass(slots=True, eq=False)
class Replica:
    """What is observed of one replica."""

    tag: str
    state: ReplicaState = ReplicaState.SHOULD_START
    since: float = 0.0  # when it came to this state
    address: Any = None
    process: Any = None
    config_id: int = 0  # the newest that it has applied
    told_config_id: int = 0
    ongoing: int = 0
    ask_at: float = 0.0  # when to send again what its state asks for, or the next health check
    check_id: int = 0
    check_sent_at: float | None = None
    missed_checks: int = 0
    reported: bool = False
    recovering: bool = False  # known from the record only

    def move(self, event: ReplicaEvent, now: float) -> None:
        """Take the table's transition."""
        self.state, self.since = next_state(self.state, event), now


class Backend:
    """A backend's record and its replicas.

    ``changed`` is set when the record was replaced and needs saving.
    """

    def __init__(self, record: BackendRecord, now: float) -> None:
        self.record = record
        self.config = BackendConfig(**record.config)
        self.changed = False
        # Recorded replicas may have a process already: they are asked, as if just told to start.
        self.replicas = {
            tag: Replica(tag, ReplicaState.STARTING, since=now, ask_at=now, recovering=True)
            for tag in record.replicas
        }
        self._failures = 0  # constructors that raised or died, since the last success
        self._last_error = ""
        self._crashes = 0
        self._start_at = 0.0  # no new replica before

    # --- What is wanted -------------------------------------------------------------------------

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self.record = replace(self.record, **changes)
        self.changed = True

    def set_config(self, config: BackendConfig) -> bool:
        """Take a new config; False when it is the present one."""
        if config == self.config:
            return False
        self.config = config
        self.update(config=config.model_dump(), config_id=self.record.config_id + 1)
        return True

    def delete(self, *, force: bool = False) -> None:
        """Have all replicas stopped, then the backend gone; with ``force`` without draining."""
        if not self.record.deleting or (force and not self.record.force):
            self.update(deleting=True, force=force or self.record.force)

    def try_again(self) -> None:
        """Start anew after it was given up or was to be deleted, as if it had never run."""
        self._failures, self._start_at, self._last_error = 0, 0.0, ""
        self.update(deleting=False, force=False, ran=False, failure="", exception=None)

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return 0 if self.record.deleting or self.record.failure else self.config.num_replicas

    @property
    def settled(self) -> bool:
        """Whether exactly the wanted replicas run, with the newest config."""
        live = [r for r in self.replicas.values() if r.state in LIVE]
        return len(live) == self.wanted and all(
            r.state is ReplicaState.RUNNING and r.config_id >= self.record.config_id for r in live
        )

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
        """The last error of a constructor or a death, while it is not overcome; else ''."""
        return self.record.failure or (self._last_error if not self.settled else "")

    def table(self) -> BackendTable:
        """Return what routers are told."""
        config = self.config
        running = [r for r in self.replicas.values() if r.state is ReplicaState.RUNNING]
        return BackendTable(
            tag=self.record.tag,
            replicas=tuple(
                ReplicaTable(tag=r.tag, address=r.address, process=r.process) for r in running
            ),
            max_ongoing_requests=config.max_ongoing_requests,
            max_queued_requests=config.max_queued_requests,
            request_timeout_s=config.request_timeout_s,
            unavailable="it could not be started" if self.record.failure else "",
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
    ) -> None:
        """Take a replica's report of itself."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state is ReplicaState.STOPPED:
            return
        replica.reported, replica.recovering = True, False
        replica.address, replica.process, replica.ongoing = address, process, ongoing
        if replica.state is ReplicaState.RUNNING and state == "draining":
            replica.move(ReplicaEvent.RETIRE, now)  # told to stop by a controller that died
        if check_id:
            self._checked(replica, check_id, config_id, error, now)
            return
        if error and replica.state is ReplicaState.RUNNING and config_id > replica.config_id:
            self._last_error = error  # reconfigure raised; the replica goes on as it is
        replica.config_id = max(config_id, replica.config_id)
        if replica.state is ReplicaState.STARTING:
            self._start_reported(replica, state, error, exception, now)

    def _start_reported(
        self, replica: Replica, state: str, error: str, exception: bytes | None, now: float
    ) -> None:
        replica.ask_at = now + self.config.health_check_period_s
        if state == "running":
            replica.move(ReplicaEvent.STARTED, now)
        elif state in {"failed", "draining"}:
            replica.move(ReplicaEvent.FAILED, now)
            if state == "failed":
                self._failed(error, exception, now)

    def exited(self, tag: str, now: float) -> None:
        """Take note that a replica's process is gone."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.SHOULD_START}:
            return
        before, lived_s = replica.state, now - replica.since
        replica.recovering = False
        replica.move(ReplicaEvent.EXITED, now)
        if before is ReplicaState.STARTING:
            self._failed("its process died while it was starting", None, now)
        elif before is ReplicaState.RUNNING:
            self._crashes = 0 if lived_s > STABLE_S else self._crashes + 1
            self._last_error = "a replica's process died"
            if self._crashes > 1:
                self._start_at = now + _backoff(self._crashes - 1)

    def _came_up(self) -> None:
        self._failures, self._last_error = 0, ""
        if not self.record.ran:
            self.update(ran=True)

    def _failed(self, error: str, exception: bytes | None, now: float) -> None:
        self._failures += 1
        self._last_error = error
        self._start_at = now + _backoff(self._failures)
        limit = min(
            self.config.max_constructor_retry_count, TRIES_PER_REPLICA * self.config.num_replicas
        )
        if not self.record.ran and self._failures >= limit and not self.record.failure:
            self.update(failure=error, exception=exception)

    def _checked(
        self, replica: Replica, check_id: int, config_id: int, error: str, now: float
    ) -> None:
        if check_id != replica.check_id or replica.state is not ReplicaState.RUNNING:
            return
        replica.check_sent_at = None
        replica.ask_at = now + self.config.health_check_period_s
        replica.missed_checks = replica.missed_checks + 1 if error else 0
        replica.told_config_id = min(replica.told_config_id, config_id)  # or it is told again
        if error:
            self._last_error = error

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
        tags = tuple(t for t, r in self.replicas.items() if r.state is not ReplicaState.STOPPED)
        if len(tags) < len(self.replicas) or tags != self.record.replicas:
            self.replicas = {tag: self.replicas[tag] for tag in tags}
            self.update(replicas=tags)
        if self.wanted and self.settled:
            self._came_up()
        return effects

    def due_at(self) -> float:
        """Return when :meth:`reconcile` has something to do, if nothing happens before."""
        times = [self._due_at(replica) for replica in self.replicas.values()]
        if sum(r.state in LIVE for r in self.replicas.values()) < self.wanted:
            times.append(self._start_at)
        return min(times, default=float("inf"))

    def _due_at(self, replica: Replica) -> float:
        if replica.state is ReplicaState.RUNNING:
            sent_at = replica.check_sent_at
            return replica.ask_at if sent_at is None else self._missed_at(sent_at)
        if replica.state is ReplicaState.SHOULD_STOP:
            return replica.since + RELEASE_TIMEOUT_S
        return replica.ask_at

    def _missed_at(self, sent_at: float) -> float:
        return sent_at + self.config.health_check_timeout_s

    def _kill_at(self, replica: Replica) -> float:
        return replica.since + self._drain_s() + KILL_MARGIN_S

    def _give_up_silent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for replica in self.replicas.values():
            silent = replica.state is ReplicaState.STARTING and not replica.reported
            if silent and now >= replica.since + SILENT_START_S:
                replica.recovering = False
                replica.move(ReplicaEvent.FAILED, now)
                self._failed("its process did not report", None, now)
                effects.append(Kill(replica.tag))
        return effects

    def _retire_unhealthy(self, now: float) -> None:
        for replica in self.replicas.values():
            if replica.state is not ReplicaState.RUNNING:
                continue
            sent_at = replica.check_sent_at
            if sent_at is not None and now >= self._missed_at(sent_at):
                replica.check_sent_at = None
                replica.missed_checks += 1
            if replica.missed_checks >= MAX_MISSED_CHECKS:
                self._last_error = f"{replica.tag} failed {MAX_MISSED_CHECKS} health checks"
                replica.move(ReplicaEvent.RETIRE, now)

    def _choose(self, now: float) -> None:
        live = [r for r in self.replicas.values() if r.state in LIVE]
        surplus = len(live) - self.wanted
        if surplus > 0:
            self._retire_surplus(live, surplus, now)
        elif surplus < 0 and now >= self._start_at:
            for _ in range(-surplus):
                tag = f"{self.record.tag}#{secrets.token_hex(3)}"
                self.replicas[tag] = Replica(tag, since=now)

    def _retire_surplus(self, live: list[Replica], surplus: int, now: float) -> None:
        if any(replica.recovering for replica in live):
            # Which of them runs, and which has been told to stop already, their reports will tell.
            # And a process that this controller has never told to start cannot be told to stop.
            live = [] if self.wanted else [r for r in live if not r.recovering]
        live.sort(key=lambda r: (r.state is ReplicaState.RUNNING, -r.since))
        for replica in live[:surplus]:
            replica.move(ReplicaEvent.RETIRE, now)

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
        if max(replica.config_id, replica.told_config_id) < self.record.config_id:
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

    def _stopped(self, _replica: Replica, _released: bool, _now: float) -> list[Effect]:
        return []

    _STEPS = {  # noqa: RUF012  # a table, never changed
        ReplicaState.SHOULD_START: _start,
        ReplicaState.STARTING: _await_start,
        ReplicaState.RUNNING: _keep,
        ReplicaState.SHOULD_STOP: _release,
        ReplicaState.STOPPING: _await_exit,
        ReplicaState.STOPPED: _stopped,
    }


def _backoff(failures: int) -> float:
    return min(BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)
