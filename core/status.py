"""The cluster as ``understudy status --json`` shows it: plain values made from the core's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.core.backends import Backend, Replica
from understudy.core.cluster import Cluster
from understudy.core.records import ApplicationRecord, DeploymentRecord
from understudy.core.replica_states import LIVE


def backends(cluster: Cluster) -> dict[str, Any]:
    """Return tag -> state and settings."""
    return {tag: backend_status(backend) for tag, backend in sorted(cluster.backends.items())}


def endpoints(cluster: Cluster) -> dict[str, Any]:
    """Return name -> route, methods, traffic, shadows."""
    return {
        name: {
            "route": e.route,
            "methods": list(e.methods),
            "traffic": dict(e.traffic),
            "shadows": {},
        }
        for name, e in sorted(cluster.endpoints.items())
    }


def applications(cluster: Cluster, host: str) -> dict[str, Any]:
    """Return name -> status, message, route prefix and deployments."""
    return {
        name: application_status(cluster, application, host)
        for name, application in sorted(cluster.applications.items())
    }


def goals(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the goals that are kept, oldest first."""
    return [
        {
            "id": goal.id,
            "subject": f"{goal.subject[0]} {goal.subject[1]}",
            "what": goal.what,
            "state": goal.state,
            "error": goal.error.strip().rpartition("\n")[2],
            "created_at": goal.created_at,
        }
        for goal in cluster.goals.all()
    ]


def backend_status(backend: Backend) -> dict[str, Any]:
    """Return one backend's state and settings."""
    record = backend.record
    status, message = _health(backend)
    return {
        "status": status,
        "message": message,
        "version": record.version,
        "code_hash": record.code_hash,
        "config": dict(record.config),
        "target_replicas": backend.wanted,
        "replicas": [_replica(replica, "") for replica in backend.replicas.values()],
    }


def application_status(
    cluster: Cluster, application: ApplicationRecord, host: str
) -> dict[str, Any]:
    """Return one application's state, as the worst of its deployments' states."""
    deployments = {
        name: _deployment(cluster, deployment, host)
        for name, deployment in application.deployments.items()
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
    return {
        "status": status,
        "message": "\n".join(m for m in messages if not m.endswith(": ")),
        "route_prefix": application.route_prefix,
        "ingress": application.ingress,
        "deployments": deployments,
    }


def _deployment(cluster: Cluster, deployment: DeploymentRecord, host: str) -> dict[str, Any]:
    tags = [deployment.target]
    if deployment.serving not in {None, deployment.target}:
        tags.append(str(deployment.serving))
    found = [cluster.backends[tag] for tag in tags if tag in cluster.backends]
    status, message = "UPDATING", ""
    if deployment.failure:
        status, message = "DEPLOY_FAILED", deployment.failure
    elif found:
        status, message = _health(found[0])
        if deployment.serving != deployment.target and status == "HEALTHY":
            status = "UPDATING"
    return {
        "status": status,
        "message": message,
        "version": found[0].record.version if found else None,
        "target_replicas": found[0].wanted if found else 0,
        "replicas": [_replica(r, host) for backend in found for r in backend.replicas.values()],
    }


def _health(backend: Backend) -> tuple[str, str]:
    if backend.record.failure:
        return "DEPLOY_FAILED", backend.record.failure
    if backend.record.deleting:
        return "DELETING", ""
    if backend.settled:
        return "HEALTHY", ""
    live = [r for r in backend.replicas.values() if r.state in LIVE]
    wait = f"{sum(r.state == 'RUNNING' for r in live)} of {backend.wanted} replicas run"
    message = f"{wait}; {backend.trouble}" if backend.trouble else wait
    return ("UNHEALTHY" if backend.record.ran else "UPDATING"), message


def _replica(replica: Replica, host: str) -> Mapping[str, Any]:
    return {
        "tag": replica.tag,
        "pid": replica.process.pid if replica.process is not None else None,
        "host": host,
        "state": replica.state.value,
        "ongoing": replica.ongoing,
    }
