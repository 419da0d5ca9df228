from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, cluster_of

WHO = """
import os
from understudy import serve

@serve.deployment(num_replicas=3, max_ongoing_requests=20)
class Who:
    def __call__(self, request):
        return serve.get_replica_context().replica_tag

app = Who.bind()
"""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts, nothing running."""
    with cluster_of(3, tmp_path) as cluster:
        yield cluster


@pytest.fixture
def serving(three: Cluster) -> Cluster:
    """Three hosts in one cluster, with a replica of one application on each."""
    three.start()
    three.deploy(WHO)
    return three
