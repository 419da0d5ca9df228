"""Hosts join, answer every route, show everywhere, take a new key, and leave."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import time
from typing import Any

import pytest

from greenroom.actors.transport.cluster_key import ensure_key, read_key
from tests.cluster.conftest import ALL, WHO
from tests.support.namespaces import run_ip
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

RELEASE = """
from greenroom.core import formats
formats.FORMAT = 7
"""
GIVEN = """
from greenroom import serve

@serve.deployment(num_replicas=6)
class Given:
    def __call__(self, request):
        import words
        return words.WORD

app = Given.bind()
"""


def test_every_host_answers_and_shows_all_and_one_that_leaves_is_replaced_first(serving):
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


def test_a_scrape_of_any_host_has_all_and_can_be_of_one(serving):
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


def test_any_host_shows_the_logs_of_all(serving):
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


def test_the_client_and_commands_work_against_any_host(serving):
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


def test_a_folder_reaches_every_host_once_and_a_module_it_lacks_is_named_with_the_host(serving):
    a, b, c = serving.hosts
    project = serving.folder / "project"
    project.mkdir()
    (project / "words.py").write_text("WORD = 'from the folder'")
    (project / "given.py").write_text(GIVEN)
    deploy = ("deploy", "given:app", "--name", "given", "--route-prefix", "/given")
    deploy += ("--working-dir", str(project))
    b.check(*deploy)
    for host in serving.hosts:
        assert host.get("/given") == (200, "from the folder")
        (unpacked,) = [p for p in (host.state_dir / "folders").iterdir() if p.is_dir()]
        assert (unpacked / "words.py").read_text() == "WORD = 'from the folder'"
    assert sorted(a.replicas("given#Given").values()) == ["a", "a", "b", "b", "c", "c"]
    assert a.log("controller.log").count("sending folder") == 3
    here = serving.folder / "installed"
    here.mkdir()
    (here / "onlyhere.py").write_text("WORD = 'here'")
    uses_it = GIVEN.replace("words.WORD", "onlyhere.WORD")
    (project / "given.py").write_text("import onlyhere\n" + uses_it)
    code, _, err = c.run(*deploy, PYTHONPATH=str(here))
    assert code == 1
    assert re.search("on host '[abc]': ModuleNotFoundError: No module named 'onlyhere'", err), err
    assert a.get("/given") == (200, "from the folder")  # the earlier version serves on
    a.check("delete", "given")


def test_a_host_that_cannot_join_hears_why_and_joins_when_it_can(serving):
    a, _, c = serving.hosts
    key = str(a.state_dir / "cluster.key")
    old = serving.folder / "old"
    old.mkdir()
    (old / "sitecustomize.py").write_text(RELEASE)
    c.check("stop")
    with pytest.raises(AssertionError) as raised:
        c.start(PYTHONPATH=str(old))
    found = str(raised.value)
    assert "cannot join" in found
    assert re.search(r"this end greenroom \S+, Python \S+, format 7; all hosts must run", found), (
        found
    )
    refused = re.compile(r"it runs greenroom \S+, Python \S+, format 7, this end")
    wait_until(lambda: refused.search(a.log("host.log")), 5, "it says so")
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"cannot join 10\.77\.0\.1:1901: nothing listens"):
        c.check("start", "--bind", c.address, "--join", "10.77.0.1:1901", "--key-file", key)
    assert time.monotonic() - begun < 30
    assert a.hosts() == {"a": "RUNNING", "b": "RUNNING"}
    assert not [host for host in serving.hosts if "was destroyed but" in host.log("host.log")]
    c.start()
    assert a.hosts() == ALL


@pytest.mark.timeout(240)  # it starts many processes, which a machine with other work has to do
def test_the_key_is_replaced_under_load_and_an_evicted_host_stays_out(serving):
    a, b, c = serving.hosts
    before = read_key(a.state_dir / "cluster.key")
    replicas = a.replicas("default#Who")
    with a.load(connections=4) as end_at_a, c.load(connections=4) as end_at_c:
        assert "the key is replaced on a, b, c\n" in c.check("rotate-key")
        for host in serving.hosts:
            path = host.state_dir / "cluster.key"
            assert before != read_key(path) == read_key(a.state_dir / "cluster.key")
            files = host.state_dir.glob("cluster.key*")
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in files}
            assert modes == {"cluster.key": 0o600}
            assert host.hosts() == ALL
        assert a.replicas("default#Who") == replicas
        b.cut()
        serving.wait_for(lambda: c.hosts()["b"] == "LOST", 20, "b is lost")
        code, out, err = a.run("rotate-key")
        assert (code, out) == (0, "the key is replaced on a, c\n")
        assert "host 'b' is lost and lacks the new key: copy cluster.key" in err
        a.check("evict", "b")
        b.heal()
        message = "or a newer one since `greenroom rotate-key`: then copy"
        serving.wait_for(lambda: message in b.log("host.log"), 20, "b is told what it lacks")
        serving.wait_for(
            lambda: "it refuses this host's certificate" in a.log("host.log"), 20, "and a says so"
        )
        assert a.hosts() == c.hosts() == {"a": "RUNNING", "c": "RUNNING"}
        tallies = [end_at_a(), end_at_c()]
    assert not [tally.failures for tally in tallies if tally.failures], tallies
    new = (a.state_dir / "cluster.key").read_bytes()
    (b.state_dir / "cluster.key").write_bytes(new)  # by hand, as it was told
    serving.wait_for(lambda: c.hosts() == ALL, 20, "it is back, without a restart")


def test_hosts_whose_addresses_are_translated_advertise_those_that_others_reach(three):
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


def test_a_shutdown_on_any_host_stops_all_and_deletes_their_state(serving, kept):
    for host in serving.hosts:
        assert (host.state_dir / "run").exists()
    serving.hosts[1].check("destroy", "--yes")
    for host in serving.hosts:
        serving.wait_for(
            lambda h=host: not (h.state_dir / "run").exists(), 40, f"{host.label} has stopped"
        )
        assert not (host.state_dir / "store").exists()
        code, _, err = host.run("status")
        assert (code, "no actor system answers" in err) == (1, True)
    kept.end()
