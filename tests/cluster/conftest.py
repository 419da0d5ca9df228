from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, cluster_of
from tests.support.kept import Kept
from tests.support.systems import wait_until

WHO = """
import os
from greenroom import serve

@serve.deployment(num_replicas=3, max_ongoing_requests=20)
class Who:
    def __call__(self, request):
        return serve.get_replica_context().replica_tag

app = Who.bind()
"""
ALL = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}


@pytest.fixture
def three(tmp_path):
    """Three hosts, nothing running."""
    with cluster_of(3, tmp_path) as cluster:
        yield cluster


def _is_on_each(cluster: Cluster) -> bool:
    return sorted(cluster.hosts[0].replicas("default#Who").values()) == list(ALL)


def _restore(cluster: Cluster) -> None:
    """Wait until all hosts run, and have a replica on each."""
    wait_until(lambda: all(host.hosts() == ALL for host in cluster.hosts), 20, "all hosts run")
    if not _is_on_each(cluster):
        cluster.hosts[0].check("rebalance")
        wait_until(lambda: _is_on_each(cluster), 20, "a replica on each host")


@contextlib.contextmanager
def keep(tmp_path_factory: pytest.TempPathFactory, leaders: int = 0) -> Iterator[Kept[Cluster]]:
    """Keep three hosts in one cluster, with a replica of one application on each."""

    @contextlib.contextmanager
    def make() -> Iterator[Cluster]:
        with cluster_of(3, tmp_path_factory.mktemp("kept"), leaders) as cluster:
            cluster.start()
            cluster.deploy(WHO)
            yield cluster

    kept = Kept(make, _restore)
    yield kept
    kept.end()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    with keep(tmp_path_factory) as kept:
        yield kept


@pytest.fixture
def serving(request, kept):
    """Three hosts in one cluster, with a replica of one application on each."""
    with kept.lent(request) as cluster:
        yield cluster
