"""Clusters are upgraded and downgraded host by host while they serve."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.core import formats
from tests.cluster.conftest import ALL, WHO
from tests.support import releases
from tests.support.cluster import Cluster, ClusterHost
from tests.support.programs import cannot_run

# They start up to nine hosts, one after the other, each within the 30 s of a start.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TAG = "default#Who"
LOAD: dict[str, Any] = {"connections": 4, "pause_s": 0.02}


@pytest.fixture(scope="module", name="folders")
def unpack(tmp_path_factory):
    """Folders of the releases by version; the last one's only where there is git."""
    base = tmp_path_factory.mktemp("releases")
    made = [releases.last_release, releases.this_release, releases.next_release]
    versions = ["0.0.1", "0.0.2", "0.0.3"]
    folders = {version: base / version for version in versions}
    return {v: folders[v] for v, make in zip(versions, made, strict=True) if make(folders[v], v)}


@pytest.mark.parametrize("versions", [("0.0.1", "0.0.2"), ("0.0.2", "0.0.3", "0.0.2")], ids=str)
def test_three_hosts_change_their_release_one_by_one_and_nothing_is_lost(three, folders, versions):
    """From the last release to this one, and to the next and back; the leader goes last."""
    if versions[0] not in folders:
        cannot_run("there is no git repository here, which has the last release")
    three.start(**_of(three, folders[versions[0]]))
    three.deploy(WHO, **_of(three, folders[versions[0]]))
    a, b, c = three.hosts
    anywhere = "10.77.0.3:1900,10.77.0.2:1900", str(a.state_dir / "cluster.key")
    limits = iter(range(21, 100))
    for old, new in pairwise(versions):
        for host in (b, c, a):
            _change(three, host, folders[old], folders[new])
            limit = next(limits)
            assert c.call(_limit_to, *anywhere, limit) == limit
        shown = a.status()
        assert {each["release"].split(",")[0] for each in shown["hosts"]} == {f"greenroom {new}"}
        assert shown["format"] == formats.FORMAT + (new == "0.0.3")
    changes = sum("max_ongoing_requests" in each for each in a.call(_changes, *anywhere))
    assert changes == 1 + next(limits) - 21  # the deploy and these


def _change(cluster: Cluster, host: ClusterHost, old: Path, new: Path) -> None:
    """Change a host's release under load on the others."""
    others = [each for each in cluster.hosts if each is not host]
    with others[0].load(**LOAD) as end, others[1].load(**LOAD) as end_other:
        host.check("stop", **_of(cluster, old))
        host.start(**_of(cluster, new))
        cluster.wait_for(lambda: others[0].hosts() == ALL, 20, "all hosts run")
        tallies = [end(), end_other()]
    for tally in tallies:
        message = f"{host.label}, {old.name} to {new.name}: {tally.summary()}"
        assert tally.ok > 10, message
        assert not tally.failures, message


def _of(cluster: Cluster, folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{folder}:{cluster.folder}",
        "PYTHONDONTWRITEBYTECODE": "",  # else each process of it compiles everything
    }


def _limit_to(address: str, key: str, limit: int) -> int:
    """Change a setting, and read it. Called on a host."""
    with serve.Client.connect(address, key_file=key) as client:
        client.update_backend_config(TAG, {"max_ongoing_requests": limit})
        assert client.get_handle(TAG).remote(None).result(timeout_s=10).startswith(TAG)
        return client.get_backend_config(TAG).max_ongoing_requests


def _changes(address: str, key: str) -> list[str]:
    with serve.Client.connect(address, key_file=key) as client:
        return [str(each) for each in client.history()]
