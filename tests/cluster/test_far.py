"""Replicas of other hosts do all that one's own do, and their limits hold over all routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import ALL
from tests.support import far
from tests.support.cluster import HTTP_PORT, cluster_of, listening
from tests.support.timing import check_within

# The first one starts three hosts, and a machine with other work takes its time for that.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BUSY_S = 1.0  # what a busy machine may add


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Three hosts, with the only replica on the last one."""
    folder: Path = tmp_path_factory.mktemp("apart")
    with cluster_of(3, folder) as cluster:
        for host in cluster.hosts:
            host.start(*(("--resources", "zone=there,gpu=1") if host.label == "c" else ()))
        cluster.deploy(far.APP)
        yield cluster


def test_streams_uploads_and_websockets_cross_hosts(apart):
    shown = {host["name"]: host for host in apart.hosts[0].status()["hosts"]}["c"]
    assert shown["labels"] == {"zone": "there"}
    assert shown["resources"]["gpu"] == {"total": 1, "taken": 0}
    for host in apart.hosts[:2]:
        assert host.call(far.read_parts, HTTP_PORT, 300)
        assert host.call(far.upload, HTTP_PORT, 4 * 2**20)
        assert host.call(far.talk, HTTP_PORT, 300)


def test_max_ongoing_requests_holds_over_all_routers_together(apart):
    with (
        apart.hosts[0].load("/count") as end_at_a,
        apart.hosts[1].load("/count") as end_at_b,
        apart.hosts[2].load("/count") as end_at_c,
    ):
        apart.wait_for(lambda: apart.hosts[0].get("/count")[1] == "4", 20, "it is full")
        tallies = [end_at_a(), end_at_b(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    assert all(tally.ok > 0 for tally in tallies), tallies
    assert apart.hosts[1].get("/count") == (200, "4")  # and never was more


def test_an_answer_of_a_host_that_vanishes_ends_soon_though_nothing_is_sent(apart):
    _, b, _ = apart.hosts

    def attempt() -> float:
        b.call(far.begin_to_wait, HTTP_PORT)
        assert b.hosts() == ALL  # meanwhile all is written that acknowledges what came
        apart.wait_for(lambda: b.call(far.is_idle), 10, "nothing is under way between hosts")
        b.cut()  # so that no controller tells it either
        try:
            took_s: float = b.call(far.seconds_until_broken)
        finally:
            b.heal()
        apart.wait_for(lambda: b.hosts() == ALL, 20, "all are there")
        return took_s

    # Silent for half a second, two seconds without an acknowledgement, dialed for 1.5 s.
    check_within(4.0 + BUSY_S, attempt)


def test_they_cross_a_link_that_loses_thirty_percent(apart):
    a, _, c = apart.hosts
    before = a.replicas(far.BACKEND)
    assert a.call(far.read_parts, HTTP_PORT, 1)  # connections are there, whatever ran before
    c.link(sent={"loss": 0.3}, received={"loss": 0.3})
    try:
        assert a.call(far.read_parts, HTTP_PORT, 10)
        assert a.call(far.upload, HTTP_PORT, 2**16)
        assert a.call(far.talk, HTTP_PORT, 10)
    finally:
        c.heal()
    apart.wait_for(lambda: a.hosts() == ALL, 10, "all are there")
    assert a.replicas(far.BACKEND) == before


# --- What can be read on the wires, and where hosts listen ----------------------------------------

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


def test_nothing_is_readable_and_nothing_listens_elsewhere(apart):
    a, b, _ = apart.hosts
    folder = apart.folder / "known"  # from which no host imports
    folder.mkdir()
    (folder / "known.py").write_text(MODULE)
    (folder / "knownmodule.py").write_text(HELPER)
    apart.switch("listen_in")
    where = ("--name", "known", "--route-prefix", "/known-route")
    b.check("deploy", "known:app", "--app-dir", str(folder), *where, PYTHONPATH="")
    for number in range(20):
        for host in (a, b):
            answer = host.get(f"/known-route?said=known-request-{number}")
            assert answer == (200, f"known-answer-to-known-request-{number}")
    b.check("rotate-key")
    heard = bytes(apart.switch("heard"))
    assert len(heard) > 100_000
    assert [word for word in WORDS if word in heard] == []
    for host in apart.hosts:
        found = host.call(listening)
        allowed = {f"{host.address}:1900", f"127.0.0.1:{HTTP_PORT}"}
        assert {each for kind, each in found if kind == "tcp"} == allowed, found
        assert not [each for kind, each in found if kind == "udp"], found
