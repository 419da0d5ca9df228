"""Three hosts that share nothing but a database, and what may happen to it and to the leader."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.cluster.conftest import WHO
from tests.cluster.test_takeover import controllers
from tests.support.cluster import Cluster, ClusterHost, cluster_of
from tests.support.postgres import PASSWORD, PostgresServer, postgres_server
from tests.support.systems import wait_until

TAKEOVER_S = 5.0
SLACK_S = 4.0
ALL = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}


def answers(url: str) -> bool:
    """Return whether a database does. Called on a host."""
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def route(*args: str) -> None:
    """Change a host's routes. Called on it."""
    subprocess.run(["ip", "route", *args], check=True, capture_output=True)


class Shared:
    """Hosts a, b and c, and a database on another one."""

    def __init__(self, cluster: Cluster, server: PostgresServer) -> None:
        self.cluster = cluster
        self.server = server
        self.machine = cluster.hosts.pop()
        server.address = self.machine.address
        cluster.store = server.url

    def start_server(self) -> None:
        self.server.start(prefix=("ip", "netns", "exec", self.machine.name))
        a = self.cluster.hosts[0]
        wait_until(lambda: a.call(answers, self.server.url), 20, "the database answers")

    def leader(self) -> ClusterHost:
        """Return the host whose controller acts, as any that answers says."""
        name = self.others_say(*self.cluster.hosts)
        return next(host for host in self.cluster.hosts if host.label == name)

    @staticmethod
    def others_say(*hosts: ClusterHost) -> str:
        return str(hosts[-1].status()["controller"]["host"])

    def runs_on_all(self) -> bool:
        """Return whether a controller answers, and tells that all hosts run."""
        with contextlib.suppress(AssertionError):
            return self.leader().hosts() == ALL
        return False

    def followers(self) -> list[ClusterHost]:
        leader = self.leader()
        return [host for host in self.cluster.hosts if host is not leader]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with (
        cluster_of(4, tmp_path_factory.mktemp("shared")) as cluster,
        postgres_server() as server,
    ):
        machine = cluster.hosts[3]
        made = Shared(cluster, server)
        try:
            made.start_server()
            cluster.start()
            cluster.deploy(WHO)
            yield made
        finally:
            server.stop(now=True)
            machine.kill()


@pytest.fixture(autouse=True)
def whole(shared: Shared) -> None:
    """Wait until all is as it was before the last test."""
    cluster = shared.cluster
    cluster.wait_for(shared.runs_on_all, 40, "all hosts run")
    cluster.wait_for(
        lambda: len(shared.leader().replicas("default#Who")) == 3, 30, "three replicas run"
    )


def test_hosts_find_each_other_by_the_database_and_no_password_is_shown(shared: Shared) -> None:
    for host in shared.cluster.hosts:
        assert host.hosts() == ALL
        assert host.get("/")[0] == 200
        told = [host.check("status", "--json"), host.log("host.log"), host.log("actors.log")]
        assert f"postgresql://postgres@{shared.server.address}" in told[0]
        assert not [text for text in told if PASSWORD in text]
        titles = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids()]
        assert not [title for title in titles if PASSWORD.encode() in title]
    shared.cluster.wait_for(lambda: len(controllers(shared.cluster)) == 1, 20, "one controller")


def test_another_leads_when_the_leader_dies(shared: Shared) -> None:
    leader, (one, other) = shared.leader(), shared.followers()
    with one.load(connections=8) as end_load:
        begun = time.monotonic()
        leader.crash()
        shared.cluster.wait_for(
            lambda: shared.others_say(one) in {one.label, other.label}, 20, "another leads"
        )
        took_s = time.monotonic() - begun
        tally = end_load()
    print(f"takeover after a crash: {took_s:.2f} s")
    assert took_s < TAKEOVER_S + SLACK_S
    assert not tally.failures, tally
    leader.reboot()
    leader.start()
    assert leader.get("/")[0] == 200


def test_another_leads_when_the_leader_is_cut_off_from_the_database(shared: Shared) -> None:
    leader, (one, _) = shared.leader(), shared.followers()
    with leader.load(connections=8) as end_load:
        begun = time.monotonic()
        leader.call(route, "add", "blackhole", f"{shared.server.address}/32")
        try:
            shared.cluster.wait_for(
                lambda: shared.others_say(one) != leader.label, 20, "another leads"
            )
            took_s = time.monotonic() - begun
        finally:
            leader.call(route, "del", "blackhole", f"{shared.server.address}/32")
        shared.cluster.wait_for(
            lambda: leader.label not in controllers(shared.cluster), 20, "it steps down"
        )
        tally = end_load()
    print(f"takeover after a cut from the database: {took_s:.2f} s")
    assert took_s < TAKEOVER_S + SLACK_S
    assert not tally.failures, tally


def test_another_leads_when_the_leader_is_cut_off_from_the_hosts(shared: Shared) -> None:
    leader, (one, other) = shared.leader(), shared.followers()
    addresses = [f"{host.address}/32" for host in (one, other)]
    begun = time.monotonic()
    for address in addresses:
        leader.call(route, "add", "blackhole", address)
    try:
        shared.cluster.wait_for(lambda: shared.others_say(one) != leader.label, 40, "another leads")
        print(f"takeover after a cut from the hosts: {time.monotonic() - begun:.2f} s")
    finally:
        for address in addresses:
            leader.call(route, "del", "blackhole", address)


def test_while_the_database_is_away_http_goes_on_and_changes_are_refused(shared: Shared) -> None:
    (one, _) = shared.followers()
    (shared.cluster.folder / "late.py").write_text(WHO, encoding="utf-8")
    with one.load(connections=8) as end_load:
        shared.server.stop(now=True)
        try:
            code, out, err = one.run("deploy", "late:app", "--name", "late", "--route-prefix",
                                     "/late", "--app-dir", str(shared.cluster.folder),
                                     "--timeout", "30")  # fmt: skip
            assert code == 1, out
            assert "cannot use the store postgresql://postgres@" in err
            assert PASSWORD not in err
        finally:
            shared.start_server()
        shared.cluster.wait_for(shared.runs_on_all, 40, "one leads again")
        tally = end_load()
    assert not tally.failures, tally
    shared.cluster.wait_for(lambda: len(controllers(shared.cluster)) == 1, 20, "one controller")
