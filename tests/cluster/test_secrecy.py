"""What can be read on the wires between hosts, with TLS and without, and where hosts listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.certificates import certificate
from tests.support.cluster import Cluster, ClusterHost, cluster_of, listening

pytestmark = pytest.mark.timeout(240)  # each starts three hosts; see test_far.py

MODULE = """
import knownmodule
from greenroom import serve

@serve.deployment(name="KnownDeployment",
                  ray_actor_options={"label_selector": {"zone": "there"}})
class Known:
    def __call__(self, request):
        return knownmodule.answer(request.query_params["said"])

app = Known.bind()
"""
HELPER = "def answer(said):\n    return 'known-answer-to-' + said\n"
# Of the route, the deployment, the module, the code, a request and its answer.
WORDS = [b"known-route", b"KnownDeployment", b"knownmodule", b"known-answer-to-", b"known-request"]


def overheard(cluster: Cluster, *tls: dict[str, str]) -> bytes:
    """Start three hosts, deploy and ask from two of them; return all that passed between them."""
    a, b, c = cluster.hosts
    (cluster.folder / "known.py").write_text(MODULE)
    (cluster.folder / "knownmodule.py").write_text(HELPER)
    cluster.switch("listen_in")
    for host, environ in zip(cluster.hosts, tls or ({},) * 3, strict=True):
        flags = ("--resources", "zone=there") if host is c else ()
        host.start(*flags, PYTHONPATH="", **environ)
    b.check("deploy", "known:app", "--app-dir", str(cluster.folder), "--route-prefix",
            "/known-route", PYTHONPATH="")  # fmt: skip
    for number in range(20):
        for host in (a, b):
            answer = host.get(f"/known-route?said=known-request-{number}")
            assert answer == (200, f"known-answer-to-known-request-{number}")
    return bytes(cluster.switch("heard"))


def check_listeners(host: ClusterHost) -> None:
    """Nothing of a host listens but at its address for others, and HTTP at the loopback one."""
    found = host.call(listening)
    allowed = {f"{host.address}:1900", "127.0.0.1:8000"}
    assert {each for kind, each in found if kind == "tcp"} == allowed, found
    udp = [each for kind, each in found if kind == "udp"]
    assert all(each.startswith(f"{host.address}:") for each in udp), found


def test_with_tls_nothing_is_readable_and_nothing_listens_elsewhere(
    tmp_path: Path, three: Cluster
) -> None:
    made = [certificate(tmp_path, host.label).environ() for host in three.hosts]
    heard = overheard(three, *made)
    assert len(heard) > 100_000
    assert [word for word in WORDS if word in heard] == []
    for host in three.hosts:
        check_listeners(host)


def test_without_tls_all_of_that_is_readable_but_no_key(tmp_path: Path) -> None:
    """So that the test above can fail."""
    folder = tmp_path / "plain"
    folder.mkdir()
    with cluster_of(3, folder) as cluster:
        heard = overheard(cluster)
        assert [word for word in WORDS if word in heard] == WORDS
        cluster.switch("listen_in")
        key_file = cluster.hosts[0].state_dir / "cluster.key"
        keys = [key_file.read_bytes()]
        cluster.hosts[1].check("rotate-key")
        keys.append(key_file.read_bytes())
        heard += cluster.switch("heard")
    assert not any(key in heard for key in keys)
