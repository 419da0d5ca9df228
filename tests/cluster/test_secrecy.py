"""What can be read on the wires between hosts, and where hosts listen."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, ClusterHost, listening

# Each starts three hosts; see test_far.py.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

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


def use(cluster: Cluster) -> None:
    """Start three hosts, deploy, ask from two of them, and replace the cluster file."""
    a, b, c = cluster.hosts
    (cluster.folder / "known.py").write_text(MODULE)
    (cluster.folder / "knownmodule.py").write_text(HELPER)
    cluster.switch("listen_in")
    for host in cluster.hosts:
        flags = ("--resources", "zone=there") if host is c else ()
        host.start(*flags, PYTHONPATH="")
    b.check("deploy", "known:app", "--app-dir", str(cluster.folder), "--route-prefix",
            "/known-route", PYTHONPATH="")  # fmt: skip
    for number in range(20):
        for host in (a, b):
            answer = host.get(f"/known-route?said=known-request-{number}")
            assert answer == (200, f"known-answer-to-known-request-{number}")
    b.check("rotate-key")


def check_listeners(host: ClusterHost) -> None:
    """Nothing of a host listens but at its address for others, and HTTP at the loopback one."""
    found = host.call(listening)
    allowed = {f"{host.address}:1900", "127.0.0.1:8000"}
    assert {each for kind, each in found if kind == "tcp"} == allowed, found
    assert not [each for kind, each in found if kind == "udp"], found


def test_nothing_is_readable_and_nothing_listens_elsewhere(three: Cluster) -> None:
    use(three)
    heard = bytes(three.switch("heard"))
    assert len(heard) > 100_000
    assert [word for word in WORDS if word in heard] == []
    for host in three.hosts:
        check_listeners(host)
