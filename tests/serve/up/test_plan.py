"""What `greenroom up` does follows from what is wanted and what was found alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from greenroom.actors.transport.cluster_key import make_key
from greenroom.serve.up.hosts_file import Target, WantedHost
from greenroom.serve.up.plan import Found, FoundHost, plan, problems

KEY, OTHER_KEY = make_key().decode(), make_key().decode()


def wanted(names: str = "abc", version: str = "2", **environ: str) -> dict[str, WantedHost]:
    return {
        name: WantedHost(Target(name, name, "~/greenroom", "python3"), environ, f"{version}-wheels")
        for name in names
    }


def as_wanted(host: WantedHost, **found: Any) -> FoundHost:
    """What is found on a host that is as it should be."""
    has = {"python": "3.11", "releases": (host.release,), "generation": host.generation}
    return FoundHost(**{**has, "healthy": host.generation, "key": KEY, **found})


def reporting(found: dict[str, FoundHost], leader: str = "a", **states: str) -> Found:
    """The same where the cluster tells its state: hosts run unless told otherwise."""
    states = {**dict.fromkeys(found, "RUNNING"), **states}
    hosts = [{"name": name, "state": state} for name, state in states.items()]
    report = {"hosts": hosts, "controller": {"host": leader}}
    return Found(found, report)


def steps(hosts: dict[str, WantedHost], found: Found, leads: str = "a") -> list[str]:
    return [str(step) for step in plan(hosts, found, leads)]


def test_bare_hosts_are_installed_and_the_one_that_leads_starts_first():
    hosts = wanted()
    found = Found(dict.fromkeys(hosts, FoundHost(python="3.11")))
    assert steps(hosts, found) == [
        "a: install 2-wheels",
        "b: install 2-wheels",
        "c: install 2-wheels",
        "a: start",
        "b: start",
        "c: start",
    ]


def test_there_is_nothing_to_do_where_all_is_as_it_should_be():
    hosts = wanted()
    assert steps(hosts, reporting({n: as_wanted(h) for n, h in hosts.items()})) == []


def test_another_release_is_installed_everywhere_and_the_leader_restarts_last():
    old, new = wanted(version="1"), wanted(version="2")
    found = reporting({name: as_wanted(host) for name, host in old.items()})
    why = "restart from 1-wheels to 2-wheels"
    assert steps(new, found)[3:] == [f"b: {why}", f"c: {why}", f"a: {why}"]


def test_the_leader_is_the_host_that_leads_now():
    """Where several can, as by a store that they share."""
    old, new = wanted(version="1"), wanted(version="2")
    found = reporting({name: as_wanted(host) for name, host in old.items()}, leader="b")
    assert [step.host for step in plan(new, found, "b")][3:] == ["a", "c", "b"]


def test_a_leader_that_does_not_run_is_started_before_the_others_change():
    """As where the command was interrupted while the last host restarted."""
    old, new = wanted(version="1"), wanted(version="2")
    have = {"a": as_wanted(old["a"]), "b": as_wanted(new["b"]), "c": as_wanted(old["c"])}
    have = {name: host._replace(releases=("2-wheels",)) for name, host in have.items()}
    why = "restart from 1-wheels to 2-wheels"
    assert steps(new, Found(have)) == [f"a: {why}", "b: start, as it does not run", f"c: {why}"]


def test_other_settings_of_one_host_restart_that_one_alone():
    hosts = wanted()
    found = reporting({name: as_wanted(host) for name, host in hosts.items()})
    hosts |= wanted("b", GREENROOM_LOG_FILES="9")
    assert steps(hosts, found) == ["b: restart with other settings"]


def test_a_host_that_is_lost_or_was_not_yet_healthy_is_started():
    hosts = wanted()
    have = {name: as_wanted(host) for name, host in hosts.items()}
    have["c"] = have["c"]._replace(healthy="")
    assert steps(hosts, reporting(have, b="LOST")) == [
        "b: start, as it does not run",
        "c: start, as it was not healthy yet",
    ]


def test_new_hosts_start_before_others_restart():
    """There is more room then for the replicas of those that restart."""
    old, new = wanted("ab", version="1"), wanted("abcd", version="2")
    have = {name: as_wanted(host) for name, host in old.items()}
    have |= dict.fromkeys("cd", FoundHost(python="3.11"))
    found = reporting(have, c="", d="")
    assert [step.host for step in plan(new, found, "a")][4:] == ["c", "d", "b", "a"]


def test_hosts_that_left_the_file_go_at_the_end():
    hosts = wanted("ab")
    had = {name: {"leads": name == "a"} for name in "abc"}
    found = reporting({name: as_wanted(host, hosts=had) for name, host in hosts.items()})
    assert steps(hosts, found) == ["c: drain, stop and remove, as the file does not name it"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"b": {"python": "3.12"}}, r"same minor release of Python: a has 3\.11, b has 3\.12"),
        ({"b": {"key": OTHER_KEY}}, "different clusters, by their cluster files: a has .*, b has"),
    ],
    ids=["pythons", "keys"],
)
def test_what_stands_in_the_way_names_the_hosts(found, message):
    hosts = wanted("ab")
    have = {name: as_wanted(host, **found.get(name, {})) for name, host in hosts.items()}
    (problem,) = problems(hosts, Found(have))
    assert re.search(message, problem)


def test_the_only_host_that_can_lead_stays_the_first():
    hosts = wanted("ba")
    had = {name: {"leads": name == "a"} for name in "ab"}
    have = {name: as_wanted(host, hosts=had) for name, host in hosts.items()}
    for found in (Found(have), reporting(have)):
        assert "host 'a' leads and has the cluster's state" in "".join(problems(hosts, found))
    assert "host 'a' leads" in "".join(problems(wanted("b"), Found({"b": have["b"]})))


def test_any_host_can_be_the_first_where_they_share_a_store():
    hosts = wanted("ba", GREENROOM_STORE="/shared")
    found = reporting({name: as_wanted(host) for name, host in hosts.items()}, leader="a")
    assert list(problems(hosts, found)) == []
