"""Three hosts that share nothing but a database, and what may happen to it and to the leader."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from greenroom.core.errors import StateNotSavedError
from greenroom.core.operations import CreateToken
from tests.cluster.conftest import WHO
from tests.support.cluster import connection, controllers
from tests.support.database import RUNNING, shared_database
from tests.support.postgres import PASSWORD

pytestmark = pytest.mark.slow

TAKEOVER_S = 5.0
SLACK_S = 4.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    with shared_database(folder, standby=True, size="120m") as shared:
        shared.cluster.start()
        shared.cluster.deploy(WHO)
        yield shared


@pytest.fixture(autouse=True)
def whole(shared):
    """Wait until all is as it was before the last test."""
    cluster = shared.cluster
    cluster.wait_for(shared.runs_on_all, 40, "all hosts run")
    cluster.wait_for(
        lambda: len(shared.leader().replicas("default#Who")) == 3, 30, "three replicas run"
    )


def test_hosts_find_each_other_by_the_database_and_no_password_is_shown(shared):
    for host in shared.cluster.hosts:
        assert host.hosts() == RUNNING
        assert host.get("/")[0] == 200
        found = [host.check("status", "--json"), host.log("host.log"), host.log("actors.log")]
        assert f"postgresql://postgres@{shared.server.address}" in found[0]
        assert not [text for text in found if PASSWORD in text]
        titles = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids()]
        assert not [title for title in titles if PASSWORD.encode() in title]
    shared.cluster.wait_for(lambda: len(controllers(shared.cluster)) == 1, 20, "one controller")


def test_another_leads_when_the_leader_is_cut_off_from_the_database(shared):
    leader, (one, _) = shared.leader(), shared.followers()
    with leader.load(connections=8) as end_load:
        begun = time.monotonic()
        heal = leader.part(*shared.machines)
        try:
            shared.cluster.wait_for(
                lambda: shared.others_say(one) != leader.label, 20, "another leads"
            )
            took_s = time.monotonic() - begun
            shared.cluster.wait_for(
                lambda: one.hosts() == RUNNING and leader.hosts() == RUNNING,
                20,
                "the former leader's host follows, by messages alone",
            )
        finally:
            heal()
        shared.cluster.wait_for(
            lambda: leader.label not in controllers(shared.cluster), 20, "it steps down"
        )
        tally = end_load()
    print(f"takeover after a cut from the database: {took_s:.2f} s")
    assert took_s < TAKEOVER_S + SLACK_S
    assert not tally.failures, tally


def test_while_the_database_is_away_http_goes_on_and_changes_are_refused(shared):
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


def make_token(environ: dict[str, str], name: str) -> str:
    """Make a small change; return why it was refused, or "". Called on a host."""
    token = CreateToken(name=name, digest="0" * 64, holder_role="viewer")
    try:
        connection(environ).request(token, timeout_s=30)
    except StateNotSavedError as refusal:
        return str(refusal)
    return ""


def test_a_failover_to_the_standby_keeps_what_was_acknowledged(shared):
    (one, _) = shared.followers()
    with one.load(connections=8) as end_load:
        before = [f"before-{number}" for number in range(10)]
        assert [one.call(make_token, one.environ, name) for name in before] == [""] * 10
        names = (f"after-{number}" for number in itertools.count())
        shared.server.stop(now=True)
        former = shared.promote()
        try:
            shared.cluster.wait_for(
                lambda: not one.call(make_token, one.environ, next(names)), 30, "a change is made"
            )
        finally:
            shared.follow(former)
        tally = end_load()
    assert set(before) <= set(one.check("token", "list").split())
    assert not tally.failures, tally


def test_with_a_full_disk_http_goes_on_and_changes_are_refused(shared):
    (one, _) = shared.followers()
    names = (f"full-{number}" for number in itertools.count())
    with one.load(connections=8) as end_load:
        make_room = shared.fill_disk()
        try:
            found = shared.cluster.wait_for(
                lambda: one.call(make_token, one.environ, next(names)), 30, "a change is refused"
            )
            assert "cannot use the store postgresql://postgres@" in found
        finally:
            make_room()
        shared.cluster.wait_for(
            lambda: not one.call(make_token, one.environ, next(names)), 30, "a change is made"
        )
        tally = end_load()
    assert not tally.failures, tally


def test_changes_are_made_while_each_takes_the_database_two_seconds(shared):
    (one, _) = shared.followers()
    machine = shared.machine
    with one.load(connections=8) as end_load:
        machine.link(sent={"delay_s": 1.0})  # and as much to the standby, which is waited for
        try:
            begun = time.monotonic()
            assert not one.call(make_token, one.environ, "slow")
            assert time.monotonic() - begun > 1.5
        finally:
            machine.heal()
        tally = end_load()
    assert not tally.failures, tally
    assert "slow" in one.check("token", "list").split()
