"""Hosts join, answer every route, show everywhere, and leave."""

from __future__ import annotations

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from greenroom.actors.transport.cluster_key import ensure_key
from tests.cluster.conftest import WHO
from tests.support.cluster import Cluster
from tests.support.namespaces import run_ip
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

ALL = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}
RELEASE = """
from greenroom.core import formats
formats.FORMAT = 7
"""


def test_every_host_answers_and_shows_all_and_one_that_leaves_is_replaced_first(
    serving: Cluster,
) -> None:
    a, b, c = serving.hosts
    for host in serving.hosts:
        assert host.hosts() == ALL
        status, body = host.get("/")
        assert (status, body[:12]) == (200, "default#Who#")
        assert host.replicas("default#Who")[body] == host.label  # its own, while it has room
    assert sorted(b.replicas("default#Who").values()) == ["a", "b", "c"]
    with a.load() as end:
        b.check("stop")
        tally = end()
    assert not tally.failures, tally.summary()
    assert a.hosts() == {"a": "RUNNING", "c": "RUNNING"}
    assert sorted(set(a.replicas("default#Who").values())) == ["a", "c"]
    assert len(a.replicas("default#Who")) == 3
    assert not b.log("host.log").count("Traceback")
    b.start()
    assert c.hosts() == ALL  # as soon as the command has returned
    assert b.get("/")[0] == 200  # by replicas of others, for nothing is moved unasked
    assert "b" not in a.replicas("default#Who").values()
    a.check("rebalance")
    wait_until(lambda: "b" in a.replicas("default#Who").values(), 20, "one is moved to b")


def test_a_scrape_of_any_host_has_all_and_can_be_of_one(serving: Cluster) -> None:
    """As it is put in Prometheus' own format, whose labels name the host."""
    b = serving.hosts[1]

    def hosts(query: str, metric: str) -> set[str]:
        text = b.get(f"/-/metrics{query}")[1]
        return set(re.findall(rf'^{metric}{{.*host="(\w+)"', text, re.MULTILINE))

    for host in serving.hosts:
        assert host.get("/")[0] == 200
    metric = "greenroom_replica_requests_total"
    wait_until(lambda: hosts("", metric) == {"a", "b", "c"}, 20, "each replica's queries")
    assert hosts("", "greenroom_build_info") == {"a", "b", "c"}
    assert hosts("?host=self", "greenroom_build_info") == {"b"}


def test_any_host_shows_the_logs_of_all(serving: Cluster) -> None:
    a, b, _ = serving.hosts
    token = a.check("token", "create", "reader", "--role", "viewer").strip()

    def asked(query: str) -> Any:
        return json.loads(b.get(f"/-/api/logs{query}", token)[1])

    names = {each["log"] for each in asked("?host=a")["logs"]}
    (replica,) = [tag for tag, host in a.replicas("default#Who").items() if host == "a"]
    assert {"controller", "proxy", "host", f"replica-{replica}"} <= names
    assert "controller" not in {each["log"] for each in asked("?host=b")["logs"]}
    first = asked("?host=a&log=controller")
    assert any("create token 'reader'" in line for line in first["lines"])
    a.check("token", "revoke", "reader")
    token = a.check("token", "create", "another", "--role", "viewer").strip()
    more = asked(f"?host=a&log=controller&after={first['next']}")["lines"]
    assert any("create token 'another'" in line for line in more)
    assert not any("create token 'reader'" in line for line in more)
    assert asked("?host=a&log=../store/x")["status"] == 404
    assert "there are: a, b, c" in asked("?host=d")["detail"]
    a.check("token", "revoke", "another")


def test_the_client_and_commands_work_against_any_host(serving: Cluster) -> None:
    b = serving.hosts[1]
    key = str(serving.hosts[0].state_dir / "cluster.key")
    elsewhere = str(serving.folder / "nothing")
    for address in ("10.77.0.1:1900", "10.77.0.2:1900", "10.77.0.3:1900"):
        shown = b.check(
            *("status", "--json", "--address", address, "--key-file", key),
            GREENROOM_STATE_DIR=elsewhere,
        )
        assert '"default#Who"' in shown
    listed = "10.77.0.77:1900,nobody.invalid:1900,10.77.0.3:1900"  # only the last is there
    shown = b.check(
        *("status", "--json", "--address", listed, "--key-file", key),
        GREENROOM_STATE_DIR=elsewhere,
    )
    assert '"default#Who"' in shown
    assert b.call(_ask_everyone, key) == [["default#Who"]] * 3
    code, _, err = b.run("status", "--address", "10.77.0.3:1900", GREENROOM_STATE_DIR=elsewhere)
    assert (code, "name a copy with --key-file" in err) == (1, True), err
    other = serving.folder / "other.key"
    ensure_key(other)
    code, _, err = b.run(
        *("status", "--address", "10.77.0.3:1900", "--key-file", str(other)),
        GREENROOM_STATE_DIR=elsewhere,
    )
    assert (code, "its certificate is not this cluster's" in err) == (1, True), err


def _ask_everyone(key: str) -> list[list[str]]:
    from greenroom import serve  # noqa: PLC0415  # on the host

    found = []
    for number in (1, 2, 3):
        with serve.Client.connect(f"10.77.0.{number}:1900", key_file=key) as client:
            found.append(list(client.list_backends()))
            handle = client.get_handle("default#Who")
            assert handle.remote(None).result(timeout_s=10).startswith("default#Who#")
    return found


def test_who_has_another_key_or_release_is_refused_naming_it_on_both_sides(three: Cluster) -> None:
    a, b, c = three.hosts
    a.start()
    other = three.folder / "other.key"
    ensure_key(other)
    old = three.folder / "old"
    old.mkdir()
    (old / "sitecustomize.py").write_text(RELEASE)
    with ThreadPoolExecutor() as pool:  # each tries for some seconds
        with_another_key = pool.submit(b.start, key_file=other)
        of_another_release = pool.submit(c.start, PYTHONPATH=str(old))
    with pytest.raises(
        AssertionError, match=r"cannot join .*its certificate is not this cluster's"
    ):
        with_another_key.result()
    with pytest.raises(AssertionError) as raised:
        of_another_release.result()
    told = str(raised.value)
    assert "cannot join" in told
    assert re.search(r"this end greenroom \S+, Python \S+, format 7; all hosts must run", told), (
        told
    )
    refused = "it refuses this host's certificate"
    wait_until(lambda: refused in a.log("host.log"), 5, "it says so")
    assert a.log("host.log").count(refused) == 1
    refused = re.compile(r"it runs greenroom \S+, Python \S+, format 7, this end")
    wait_until(lambda: refused.search(a.log("host.log")), 5, "it says so")
    assert a.hosts() == {"a": "RUNNING"}
    assert not [host for host in three.hosts if "was destroyed but" in host.log("host.log")]
    b.start()  # with the right one
    assert a.hosts() == {"a": "RUNNING", "b": "RUNNING"}


def test_hosts_whose_addresses_are_translated_advertise_those_that_others_reach(
    three: Cluster,
) -> None:
    """Each is bound to one address, and is reached by the others at another one alone."""
    a, b, c = three.hosts
    for host, public in ((a, "10.77.0.21"), (b, "10.77.0.22")):
        in_it = ("ip", "netns", "exec", host.name, "iptables", "-w")
        run_ip("-n", host.name, "addr", "add", f"{public}/24", "dev", "cable")
        to_own = ("-d", public, "-j", "DNAT", "--to-destination", host.address)
        subprocess.run([*in_it, "-t", "nat", "-A", "PREROUTING", *to_own], check=True)
        directly = ("-i", "cable", "-m", "conntrack", "--ctorigdst", host.address, "--ctdir")
        refused = (*directly, "ORIGINAL", "-p", "tcp", "--syn", "-j", "REJECT")
        subprocess.run([*in_it, "-A", "INPUT", *refused], check=True)
    a.start("--advertise", "10.77.0.21")
    key = str(a.state_dir / "cluster.key")
    joins = ("--join", "10.77.0.21:1900", "--key-file", key, "--advertise", "10.77.0.22")
    b.check("start", "--bind", b.address, *joins)
    assert a.hosts() == b.hosts() == {"a": "RUNNING", "b": "RUNNING"}
    shown = [each["address"] for each in a.status()["hosts"]]
    assert shown == ["10.77.0.21:1900", "10.77.0.22:1900"]
    three.deploy(WHO.replace("num_replicas=3", "num_replicas=2"))
    assert sorted(a.replicas("default#Who").values()) == ["a", "b"]
    for host in (a, b):
        with host.load(connections=40) as end:  # more than its own replica takes
            time.sleep(0.5)
        assert not (tally := end()).failures, tally.summary()
    # From a machine that runs no Greenroom.
    assert c.call(_ask, "10.77.0.22:1900", key).startswith("default#Who#")
    b.check("stop")
    assert a.hosts() == {"a": "RUNNING"}


def _ask(address: str, key: str) -> str:
    from greenroom import serve  # noqa: PLC0415  # on the host

    with serve.Client.connect(address, key_file=key) as client:
        return str(client.get_handle("default#Who").remote(None).result(timeout_s=10))


def test_an_unreachable_leader_is_named(three: Cluster) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"cannot join 10\.77\.0\.1:1900: nothing listens"):
        three.hosts[1].start(key_file=_key(three.folder))
    assert time.monotonic() - begun < 30


def _key(folder: Path) -> Path:
    ensure_key(folder / "cluster.key")
    return folder / "cluster.key"
