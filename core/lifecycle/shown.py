"""How a backend is shown: to people in words, to routers as a table."""

from __future__ import annotations

from dataclasses import fields

from greenroom.core.config import BackendConfig
from greenroom.core.errors import last_line
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.failures import START
from greenroom.core.lifecycle.health import MAX_MISSED_CHECKS
from greenroom.core.lifecycle.releases import may_fail
from greenroom.core.lifecycle.replicas import ReplicaState
from greenroom.core.routing.tables import BackendTable, ReplicaTable

SLOW_START_S = 10.0  # from then on the status names a constructor
# Those that a table has under the same name and as they are.
SETTINGS_OF_ROUTERS = BackendConfig.model_fields.keys() & {
    each.name for each in fields(BackendTable) if each.name != "session_affinity"
}


def trouble(backend: Backend) -> str:
    """Return why a replica has no room, and the last error, while they last; else ''."""
    if backend.record.failure or backend.converged:
        return backend.record.failure
    error = backend.failures.last_error
    failures = len(backend.failures.row(START, backend.record.newest.number))
    if failures:
        most = backend.config.max_constructor_retry_count
        of_how_many = f" of at most {most}" if may_fail(backend.record) else ""
        tries = "try to start it has" if failures == 1 else "tries to start it have"
        error = f"{failures}{of_how_many} {tries} failed, the last one: {last_line(error)}"
    return "; ".join(filter(None, (backend.waiting, error)))


def sickness(backend: Backend) -> tuple[bool, str]:
    """Return whether a running replica fails its checks, or where others do not, and what of it.

    What failed in a health check is shown until it passes.
    """
    running = backend.in_state(ReplicaState.RUNNING)
    is_sick = any(r.missed_checks >= MAX_MISSED_CHECKS or r.ejections for r in running)
    for replica in running:
        if replica.ejections:
            return is_sick, replica.ejection
        if replica.check_error:
            count = f"{replica.missed_checks} of {MAX_MISSED_CHECKS} times"
            problem = f"the health check of {replica.tag} failed {count}"
            return is_sick, f"{problem}, the last time: {last_line(replica.check_error)}"
    return is_sick, backend.failures.check_error


def slow_starts(backend: Backend, now: float) -> str:
    """Return what takes long in a start, and for how long it has; else ''."""
    for replica in backend.in_state(ReplicaState.STARTING):
        if replica.reported and now - replica.since >= SLOW_START_S:
            took_s = now - replica.since
            text = f"the constructor of {replica.tag} has been running for {took_s:.0f} s"
            return f"{replica.tag}: {replica.trouble}" if replica.trouble else text
    return ""


def table_of(backend: Backend) -> BackendTable:
    """Return what routers get of a backend."""
    record, config, affinity = backend.record, backend.config, backend.config.session_affinity
    request_router = config.request_router_config
    has_run = _has_run(backend)
    return BackendTable(
        tag=record.tag,
        replicas=tuple(
            ReplicaTable(tag=r.tag, address=r.address, process=r.process, host=r.host)
            for r in backend.in_state(ReplicaState.RUNNING)
        ),
        **{name: getattr(config, name) for name in SETTINGS_OF_ROUTERS},
        unavailable="it could not be started" if record.failure else "",
        is_wanted=backend.wanted > 0 or bool(record.failure),
        is_expected=record.was_running and backend.wanted > 0,
        session_affinity=None if affinity is None else affinity.model_dump(),
        request_router=None if request_router is None else request_router.model_dump(),
        has_run=has_run,
        trouble="" if has_run else trouble(backend),
    )


def _has_run(backend: Backend) -> bool:
    """Return whether a replica has ever run, or waits for the query that wakes it."""
    record, scaled = backend.record, backend.autoscaled_by
    is_asleep = scaled is not None and not scaled.min_replicas
    return is_asleep or record.was_running or any(each.served for each in record.releases)
