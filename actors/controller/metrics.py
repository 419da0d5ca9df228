"""What the controller shows of the cluster to Prometheus; a proxy of its host reads it."""

from __future__ import annotations

from greenroom.core.cluster.cluster import Cluster
from greenroom.core.metrics import Family, Group, Values


def collect(cluster: Cluster | None, own_host: str) -> list[Group]:
    """Return the cluster's metrics; ``cluster`` is None while the state cannot be saved."""
    is_saved: dict[Values, float] = {(): 0.0 if cluster is None else 1.0}
    families = [
        _family("greenroom_state_saved", "Whether changes of the state can be saved", (), is_saved)
    ]
    if cluster is not None:
        names = (own_host, *cluster.hosts.records)
        hosts: dict[Values, float] = {(n, cluster.hosts.state(n).value): 1.0 for n in names}
        rollouts: dict[Values, float] = dict.fromkeys(cluster.rollouts.states().items(), 1.0)
        families += [
            _family("greenroom_hosts", "1 for each host of the cluster", ("name", "state"), hosts),
            _family(
                "greenroom_rollouts",
                "1 for the last rollout of each endpoint",
                ("endpoint", "state"),
                rollouts,
            ),
        ]
    return [({}, families)]


def _family(
    name: str, description: str, labels: tuple[str, ...], samples: dict[Values, float]
) -> Family:
    return Family(name, "gauge", description, labels, (), {**samples})
