"""The cluster as it is shown: plain values made from the core's state.

Most are what ``greenroom status --json`` prints; :func:`metrics` makes what Prometheus gets, from
a proxy of the controller's host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from greenroom.core import formats
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import Host, HostState
from greenroom.core.config import config_shown, options_shown, without_credentials
from greenroom.core.errors import last_line
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.definitions import deployment_names, deployment_record, qualified
from greenroom.core.lifecycle.releases import numbered
from greenroom.core.lifecycle.replicas import LIVE, Replica
from greenroom.core.lifecycle.shown import sickness, slow_starts, trouble
from greenroom.core.lifecycle.state import DAMAGED
from greenroom.core.metrics import Family, Group, Values
from greenroom.core.operations import GetSeries
from greenroom.core.records import BACKEND, ApplicationRecord, EndpointRecord
from greenroom.core.rollouts.rollouts import ENDED


def overview(cluster: Cluster) -> dict[str, Any]:
    """Return what ``greenroom status --json`` prints of a cluster, as of its last step."""
    return {
        "version": cluster.state.history.last_id,
        "format": format_of(cluster),
        "longest_drain_s": cluster.state.longest_drain_s(),
        "hosts": hosts(cluster),
        "applications": applications(cluster),
        "backends": backends(cluster),
        "endpoints": endpoints(cluster),
        "goals": goals(cluster),
        "pending_goals": len(cluster.state.goals.pending()),
        "rollouts": cluster.rollouts.status(cluster.now),
        "resources": cluster.state.placement.shown(),
    }


def hosts(cluster: Cluster) -> list[dict[str, Any]]:
    """Return what is known of each host, the controller's own first.

    Another one is RUNNING once it has reported, and its proxy, which gets what it lacks then, has
    called, too.
    """
    own, others = cluster.hosts.own, cluster.hosts.records
    heard = {own.name, *cluster.state.long_poll.heard_hosts()}
    names = [own.name] * (own.said is not None) + sorted(others)
    return [_host(cluster, cluster.hosts.all[name], heard) for name in names]


def _host(cluster: Cluster, host: Host, heard: Collection[str]) -> dict[str, Any]:
    record, state = host.record, host.state
    assert record is not None
    shown = {"name": host.name, "address": record.address, **host.report}
    if host.said is not None and not host.has_process:
        shown["host_pid"] = None
    if state is HostState.RUNNING and not (host.said is not None and host.name in heard):
        state = HostState.EXPECTED  # its front has the routes of before, or none
    if state is not HostState.RUNNING:
        shown["state"] = state.value
    resources = cluster.state.placement.shown(host.name)
    return {**shown, "labels": dict(record.labels), "resources": resources}


def format_of(cluster: Cluster) -> int:
    """Return the lowest format of all hosts: what only a later one has must not be used yet.

    That of a host which has not reported yet counts as the oldest.
    """
    releases = (host.report.get("release", "") for host in cluster.hosts.all.values())
    return max(min(map(formats.named_in, releases)), formats.OLDEST)


def backends(cluster: Cluster) -> dict[str, Any]:
    """Return tag -> state and settings."""
    return {
        tag: backend_status(cluster, backend) | cluster.loads.of(tag)._asdict()
        for tag, backend in sorted(cluster.state.backends.items())
    }


def endpoints(cluster: Cluster) -> dict[str, Any]:
    """Return name -> route, methods, traffic, shadows; retryable and compares where set."""
    return {
        name: _endpoint(cluster.state.endpoints.served(name))
        for name in sorted(cluster.state.endpoints)
    }


def _endpoint(record: EndpointRecord) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "route": record.route,
        "methods": list(record.methods),
        "traffic": dict(record.traffic),
        "shadows": dict(record.shadows),
    }
    if record.retryable is not None:
        shown["retryable"] = record.retryable
    if record.compares:
        shown["compares"] = {tag: str(each) for tag, each in record.compares.items()}
    return shown


def differences(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return shadow -> by what its answers are compared, and what was found; UnknownNameError."""
    cluster.state.endpoint(name)
    endpoint = cluster.state.endpoints.served(name)
    return {
        tag: {"by": str(each), **cluster.differences.of((name, tag, each.id))}
        for tag, each in sorted(endpoint.compares.items())
    }


def applications(cluster: Cluster) -> dict[str, Any]:
    """Return name -> status, message, route prefix and deployments."""
    return {
        name: application_status(cluster, application)
        for name, application in sorted(cluster.state.applications.items())
    }


def goals(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the goals that are kept, oldest first."""
    return [
        {
            "id": goal.id,
            "subject": f"{goal.subject[0]} {goal.subject[1]}",
            "what": goal.what,
            "state": goal.state,
            "error": last_line(goal.error),
            "created_at": goal.created_at,
        }
        for goal in cluster.state.goals.all()
    ]


def deployments(cluster: Cluster) -> dict[str, Any]:
    """Return name -> settings and state of the deployments that stand alone."""
    return {name: deployment(cluster, name) for name in deployment_names(cluster.state)}


def deployment(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the settings and the state of a deployment that stands alone; UnknownNameError."""
    record = deployment_record(cluster.state, name)
    endpoint = cluster.state.endpoints.get(name)
    shown = backend_status(cluster, cluster.state.backends[name]) | cluster.loads.of(name)._asdict()
    route_prefix = endpoint.route if endpoint is not None else None
    options = options_shown(record.newest.actor_options)
    return {"name": name, "route_prefix": route_prefix, "actor_options": options, **shown}


def backend_status(cluster: Cluster, backend: Backend) -> dict[str, Any]:
    """Return one backend's state and settings."""
    record = backend.record
    return {
        **_state(cluster, backend),
        "code_hash": record.newest.code_hash,
        "application": record.application,
        "deployment": record.deployment,
        "config": without_credentials(config_shown(record.newest.config)),
    }


def application_status(cluster: Cluster, application: ApplicationRecord) -> dict[str, Any]:
    """Return one application's state, as the worst of its deployments' states."""
    deployments = {
        name: _deployment(cluster, qualified(application.name, name))
        for name in application.deployments
    }
    states = {each["status"] for each in deployments.values()}
    messages = [f"{name}: {each['message']}" for name, each in deployments.items()]
    status = "RUNNING"
    if application.deleting:
        status = "DELETING"
    elif "DEPLOY_FAILED" in states:
        status = "DEPLOY_FAILED"
    elif "UPDATING" in states:
        status = "DEPLOYING"
    elif "UNHEALTHY" in states:
        status = "UNHEALTHY"
    canary = cluster.canaries.status(application.name)
    if canary is not None and canary["state"] not in ENDED:
        messages.append(f"its new version is {canary['state']}: {canary['why']}")
    return {
        "status": status,
        "message": "\n".join(m for m in messages if not m.endswith(": ")),
        "route_prefix": application.route_prefix,
        "ingress": application.ingress,
        "deployments": deployments,
        **({} if canary is None else {"canary": canary}),
    }


def _deployment(cluster: Cluster, tag: str) -> dict[str, Any]:
    backend = cluster.state.backends.get(tag)
    if backend is None:
        is_damaged = (BACKEND, tag) in cluster.state.lost
        return {
            "status": "UNHEALTHY" if is_damaged else "UPDATING",
            "message": DAMAGED if is_damaged else "",
            "version": None,
            "target_replicas": 0,
            "replicas": [],
        }
    return _state(cluster, backend)


def _state(cluster: Cluster, backend: Backend) -> dict[str, Any]:
    status, message = _health(backend, cluster.now)
    shown: dict[str, Any] = {
        "status": status,
        "message": message,
        "version": backend.record.newest.version,
        "target_replicas": backend.wanted,
        "replicas": [_replica(backend, replica) for replica in backend.replicas.values()],
    }
    if restarts := {
        reason.value: count for reason, count in backend.failures.restarts.items() if count
    }:
        shown["restarts"] = restarts
    if failure := cluster.autoscaler.policy_failure(backend.record.tag):
        shown["policy_failure"] = last_line(failure)
        problem = f"its autoscaling policy failed, so the target stays: {shown['policy_failure']}"
        shown["message"] = f"{message}; {problem}" if message else problem
    return shown


def _health(backend: Backend, now: float) -> tuple[str, str]:
    if failure := backend.record.failure or backend.record.update_failure:
        return "DEPLOY_FAILED", failure
    if backend.record.deleting:
        return "DELETING", ""
    if backend.rescaling and not backend.updating and (backend.waiting or not trouble(backend)):
        message = f"{backend.running} of {backend.wanted} replicas run"
        return backend.rescaling, f"{message}; {backend.waiting}" if backend.waiting else message
    if backend.converged:
        is_sick, problem = sickness(backend)
        return "UNHEALTHY" if is_sick else "HEALTHY", problem
    newest = [r for r in backend.replicas.values() if r.release == backend.record.newest.number]
    live = [r for r in newest if r.state in LIVE]
    wait = f"{sum(r.state == 'RUNNING' for r in live)} of {backend.wanted} replicas run"
    if backend.updating:
        old = len(backend.replicas) - len(newest)
        wait += f" the new version, {old} an old one"
    message = "; ".join(filter(None, (wait, slow_starts(backend, now), trouble(backend))))
    return ("UNHEALTHY" if backend.record.newest.ran else "UPDATING"), message


def autoscaling(cluster: Cluster, now: float, wall_now: float) -> dict[str, Any]:
    """Return tag -> bounds, target, load and the latest decisions of each autoscaled backend."""
    return {
        tag: {
            "application": backend.record.application,
            "deployment": backend.record.deployment,
            "target_replicas": backend.wanted,
            "running_replicas": backend.running,
            "config": config_shown(backend.record.newest.config)["autoscaling_config"],
            **cluster.autoscaler.describe(tag, now, wall_now),
        }
        for tag, backend in sorted(cluster.state.backends.items())
        if backend.config.autoscaling_config is not None
    }


def series(cluster: Cluster, asked: GetSeries, wall_now: float) -> dict[str, Any]:
    """Return the traffic over time, of the cluster and of each endpoint at each of its backends."""
    if asked.endpoint is not None:
        cluster.state.endpoint(asked.endpoint)
    served = cluster.state.endpoints.served
    pairs = [(name, tag) for name in cluster.state.endpoints for tag in served(name).traffic]
    shown = cluster.series.shown(asked.span, asked.last, pairs, wall_now, asked.endpoint)
    shown["deployments"] = [
        {
            "endpoint": endpoint,
            "backend": tag,
            "application": cluster.state.backends[tag].record.application,
            "deployment": cluster.state.backends[tag].record.deployment,
            **columns,
        }
        for (endpoint, tag), columns in shown["deployments"].items()
        if tag in cluster.state.backends
    ]
    return shown


def metrics(cluster: Cluster | None, own_host: str) -> list[Group]:
    """Return the cluster's metrics; ``cluster`` is None while the state cannot be saved."""
    is_saved: dict[Values, float] = {(): 0.0 if cluster is None else 1.0}
    families = [
        _gauge("greenroom_state_saved", "Whether changes of the state can be saved", (), is_saved)
    ]
    if cluster is not None:
        names = (own_host, *cluster.hosts.records)
        hosts: dict[Values, float] = {(n, cluster.hosts.state(n).value): 1.0 for n in names}
        rollouts: dict[Values, float] = {
            (name, record.state): 1.0 for name, record in cluster.rollouts.records.items()
        }
        restarts: dict[Values, float] = {  # 0 before the first, or increase() would not see it
            (tag, reason): count
            for tag, backend in cluster.state.backends.items()
            for reason, count in backend.failures.restarts.items()
        }
        families += [
            _gauge("greenroom_hosts", "1 for each host of the cluster", ("name", "state"), hosts),
            _gauge(
                "greenroom_rollouts",
                "1 for the last rollout of each endpoint",
                ("endpoint", "state"),
                rollouts,
            ),
            Family(
                "greenroom_replica_restarts_total",
                "counter",
                "Replicas that were replaced and were to go on, by reason",
                ("backend", "reason"),
                (),
                {**restarts},
            ),
        ]
    return [({}, families)]


def _gauge(
    name: str, description: str, labels: tuple[str, ...], samples: dict[Values, float]
) -> Family:
    return Family(name, "gauge", description, labels, (), {**samples})


def _replica(backend: Backend, replica: Replica) -> Mapping[str, Any]:
    devices = {name: list(numbers) for name, numbers in replica.devices.items()}
    return {
        "tag": replica.tag,
        "pid": replica.process.pid if replica.process is not None else None,
        "host": replica.host,
        "version": numbered(backend.record, replica.release).version,
        "state": replica.state.value,
        "ongoing": replica.ongoing,
        "rank": replica.known_rank[0] if replica.known_rank and replica.state in LIVE else None,
        **({"devices": devices} if devices else {}),
        **({"trouble": problem} if (problem := replica.trouble or replica.worn) else {}),
    }
