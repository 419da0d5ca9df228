"""What is observed of a backend's replicas: reports, checks, ends, and silence.

Failures are counted (core/lifecycle/failures.py). A release that fails too often before it has come
up in full is taken back, or fails.
"""

from __future__ import annotations

from operator import attrgetter

from greenroom.core.config import BackendConfig
from greenroom.core.effects import Effect, Kill
from greenroom.core.errors import last_line
from greenroom.core.lifecycle import failures, releases
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.replicas import Replica, ReplicaState, Report, RestartReason

MAX_UNUSABLE_TRIES = 3  # of code that cannot be loaded; max_constructor_retry_count is for the rest
MAX_LOSSES_PER_UPDATE = 3  # of replicas that ran; then the update is taken back
MAX_MISSED_CHECKS = 3
MAX_EJECTIONS = 3  # of a replica, in a row
# All that a check may change in a replica and the next steps depend on.
_FACTS = attrgetter(
    *("state", "address", "process", "config_id", "sent_config_id", "missed_checks"),
    *("check_error", "worn", "recovering"),
)


def reported(backend: Backend, report: Report, now: float) -> float:
    """Take a replica's report of itself; return when to reconcile, at the latest.

    That is the time of the next check after a check that says nothing new. To reconcile all
    replicas for each of those would cost the square of their number.
    """
    replica = backend.replicas.get(report.replica)
    if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.LOST}:
        return now
    before = _FACTS(replica), backend.failures.check_error
    _take_report(backend, replica, report, now)
    after = _FACTS(replica), backend.failures.check_error
    return backend.orders.due_at(replica) if report.check_id and after == before else now


def _take_report(backend: Backend, replica: Replica, report: Report, now: float) -> None:
    replica.reported, replica.recovering = True, False
    replica.address, replica.process = report.queries_at, report.process
    replica.ongoing, replica.trouble = report.ongoing, report.trouble
    replica.worn_at = replica.worn_at if replica.worn else now
    replica.stats, replica.worn = report.stats, report.worn
    if replica.state is ReplicaState.RUNNING and report.state == "draining":
        replica.become(ReplicaState.SHOULD_STOP, now)  # asked to by a controller that died
    if report.check_id:
        _checked(backend, replica, report, now)
        return
    if report.error and report.state == "running":
        _refused(backend, replica, report)
    replica.config_id = max(report.config_id, replica.config_id)
    if replica.state is ReplicaState.STARTING:
        _start_reported(backend, replica, report, now)


def _checked(backend: Backend, replica: Replica, report: Report, now: float) -> None:
    """Take the answer to a health check."""
    if report.check_id != replica.check_id or replica.state is not ReplicaState.RUNNING:
        return
    replica.check_sent_at = None
    replica.ask_at = now + backend.config.health_check_period_s
    replica.config_id = max(replica.config_id, report.config_id)  # its report may be lost
    replica.sent_config_id = min(replica.sent_config_id, report.config_id)  # or it is sent anew
    replica.check_error = report.error
    if report.error:
        replica.missed_checks += 1
        backend.failures.last_error = report.error
    else:
        replica.missed_checks = 0
        backend.failures.passed(replica.since)


def _refused(backend: Backend, replica: Replica, report: Report) -> None:
    """Go back to the last settings that all replicas took: reconfigure raised on these."""
    newest = backend.record.newest
    if (replica.release, report.config_id) != (newest.number, newest.config_id):
        return
    if backend.record.fallback_config is not None:
        backend.set_config(BackendConfig.read(backend.record.fallback_config))
    backend.update(update_failure=report.error, exception=report.exception)


def _start_reported(backend: Backend, replica: Replica, report: Report, now: float) -> None:
    replica.ask_at = now + backend.config.health_check_period_s
    if report.state == "running":
        replica.become(ReplicaState.RUNNING, now)
        backend.failures.started(replica)
        if releases.is_newest(backend.record, replica) and not backend.record.newest.served:
            backend.record = releases.with_newest(backend.record, served=True)
    elif report.state in {"failed", "draining"}:
        if report.state == "failed":
            _failed(backend, replica, report.error, report.exception, now, lasts=report.lasts)
        replica.become(ReplicaState.SHOULD_STOP, now)


def exited(backend: Backend, tag: str, now: float, cause: str = "") -> None:
    """Record that a replica's process is gone; ``cause`` is how it ended, where it is known."""
    replica = backend.replicas.get(tag)
    if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.SHOULD_START}:
        return
    ended = replica.why_ended(cause)
    reason = RestartReason.parse(ended)
    why = f"{f': {cause}' if cause else ''}; see: greenroom logs {tag}"
    if replica.state is ReplicaState.STARTING:
        if reason is RestartReason.OUT_OF_MEMORY:
            backend.failures.count_restart(replica, reason)
        _failed(backend, replica, f"its process died while it was starting{why}", None, now)
    elif replica.state is ReplicaState.RUNNING:
        error = ended if replica.worn else f"a replica's process died{why}"
        _lost(backend, replica, reason, error, now, failures.DEATH, failures.BRIEF_LIFE)
    replica.recovering = False
    replica.become(ReplicaState.STOPPED, now)


def host_gone(backend: Backend, replica: Replica, now: float) -> None:
    """Count a replica no more whose host is lost."""
    if replica.state is ReplicaState.LOST:
        return
    is_asked = replica.recovering and replica.state is ReplicaState.STARTING
    if replica.state is ReplicaState.RUNNING or is_asked:
        backend.failures.count_restart(replica, RestartReason.HOST_LOST)
        replica.become(ReplicaState.LOST, now)
    elif replica.state is not ReplicaState.STOPPED:
        replica.become(ReplicaState.STOPPED, now)  # if it lives, it is asked to go when back
    replica.recovering = False
    replica.check_sent_at, replica.missed_checks = None, 0


def fail_silent(backend: Backend, now: float) -> list[Effect]:
    """Fail the starts that have taken too long."""
    effects: list[Effect] = []
    for replica in backend.in_state(ReplicaState.STARTING):
        if now < backend.orders.ends_at(replica):
            continue
        error = "its process did not report"
        if replica.reported:
            limit = f"constructor_timeout_s={backend.config.constructor_timeout_s:g}"
            error = f"its constructor did not return within {limit}"
        _failed(backend, replica, error, None, now)
        replica.recovering = False
        replica.become(ReplicaState.SHOULD_STOP, now)
        effects.append(Kill(replica.tag))
    return effects


def retire_unhealthy(backend: Backend, now: float) -> None:
    """Have replicas replaced that fail health checks, or where others do not."""
    timeout_s = backend.config.health_check_timeout_s
    for replica in backend.in_state(ReplicaState.RUNNING):
        is_silent = now >= backend.orders.ends_at(replica)
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
        is_early = now < backend.failures.pause_ends_at(replica.release, kind)
        if is_early and not (is_silent or backend.updating):
            continue  # one that answers may be better than the next that fails as well
        backend.failures.check_error = error
        _lost(backend, replica, reason, error, now, kind)
        replica.become(ReplicaState.SHOULD_STOP, now)


def _failed(
    backend: Backend,
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
    backend.failures.count_restart(replica, reason)
    backend.failures.last_error = error = backend.placement.with_host(replica.host, error)
    backend.failures.add(failures.START, replica, now)
    # Code that a host cannot load is to be found out, unless it has been good once: where the
    # other hosts took it all, a missing package would show or not by chance.
    if not lasts or releases.numbered(backend.record, replica.release).ran:
        backend.failures.add(failures.START_HERE, replica, now)
    if not releases.is_newest(backend.record, replica):
        return
    most = backend.config.max_constructor_retry_count
    tries = min(most, MAX_UNUSABLE_TRIES) if lasts else most
    # What one host cannot load, though another runs it, no other try mends either.
    hopeless = lasts and not (backend.record.failure or backend.record.newest.ran)
    is_spent = backend.failures.is_spent(replica.release, tries, now)
    if (hopeless or releases.may_fail(backend.record)) and is_spent:
        backend.fail(error, exception)


def _lost(
    backend: Backend,
    replica: Replica,
    reason: RestartReason,
    error: str,
    now: float,
    *kinds: failures.Kind,
) -> None:
    """Count the loss of a replica that runs.

    Go back from a release whose replicas start, and are lost one after the other.
    """
    backend.failures.count_restart(replica, reason)
    backend.failures.last_error = error
    for kind in (*kinds, failures.LOSS):
        backend.failures.add(kind, replica, now, now - replica.since)
    if not releases.is_newest(backend.record, replica) or releases.fallback(backend.record) is None:
        return
    losses = len(backend.failures.row(failures.LOSS, replica.release))
    if losses >= min(backend.config.max_constructor_retry_count, MAX_LOSSES_PER_UPDATE):
        backend.fail(backend.placement.with_host(replica.host, error), None)
