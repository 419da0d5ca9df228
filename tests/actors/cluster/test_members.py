"""The hosts of a cluster, as the controller deals with them: without any, and with a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from thespian.actors import ActorAddress

from greenroom.actors.cluster import members
from greenroom.actors.cluster.members import Members
from greenroom.actors.messages import control as cm
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.transport.addresses import ProcessAddress, own_release
from greenroom.actors.transport.cluster_key import ensure_key
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import HostState
from greenroom.core.cluster.key_rotation import KeyIds
from greenroom.core.errors import ConflictError
from greenroom.core.lifecycle.placement import Placement, anywhere
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.operations import DrainHost
from greenroom.core.records import BackendRecord, HostRecord, Release
from tests.support.lone_loop import LoneLoop


class FakePort:
    """Keeps what is asked of other hosts' admins."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[tuple[str, str]] = []
        self.described: cm.EndDescribed | None = None

    async def locate(self, _kind: str, name: str, gate: Any) -> Any:
        self.asked.append((name, gate().addressDetails.text))
        return "there"

    async def ask(self, _host_process: Any, request: cm.DescribeEnd, _timeout_s: float) -> Any:
        assert (request.replica, request.address) == ("t#1", "there")
        return self.described

    def detach(self) -> None:
        """There is nothing to end."""


def sent(loop: LoneLoop) -> list[tuple[str, Any]]:
    return [(target.addressDetails.text, message) for target, message in loop.sent]


SENDER = ActorAddress(ProcessAddress("10.0.0.2", 2001))


def report_of(host: str, address: str = "10.0.0.2:1900", **fields: Any) -> cm.HostReported:
    return cm.HostReported(
        **{
            "host": host,
            "process": this_process(),
            "id": "1",
            "address": address,
            "capacity": {"num_cpus": 1.0},
            "labels": {},
            "replicas": (),
            "report": {"name": host, "state": "RUNNING"},
            "keys": KeyIds("a key"),
            **fields,
        }
    )


def led_by(tmp_path: Path, own_host: str) -> tuple[Members, Cluster, LoneLoop, HostSettings]:
    """Return the members of a cluster without any, and all that they act on."""
    cluster = Cluster({kind: {} for kind in KINDS}, 1, 100.0, anywhere(), own_host=own_host)
    settings = read_settings({}, state_dir=str(tmp_path), host_name="a")
    ensure_key(settings.cluster_key)
    loop = LoneLoop()
    return Members(loop, cluster, settings, this_process(), lambda: None), cluster, loop, settings


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> FakePort:
    made = FakePort()
    monkeypatch.setattr(members, "Port", lambda *_, **__: made)
    return made


def test_a_replica_is_asked_for_at_its_own_host(tmp_path: Path, port: FakePort) -> None:
    records: dict[str, Any] = {kind: {} for kind in KINDS}
    records["host"]["b"] = HostRecord(
        name="b", id="1", address="10.0.0.2:1900", capacity={"num_cpus": 1.0}, labels={}
    )
    cluster = Cluster(records, 1, 100.0, Placement(), own_host="a")
    settings = read_settings({}, state_dir=str(tmp_path))
    loop = LoneLoop()
    hosts = Members(loop, cluster, settings, this_process(), lambda: None)
    assert asyncio.run(hosts.locate("t#1", "b")) == "there"
    assert asyncio.run(hosts.locate("t#1", "gone")) is None
    assert port.asked == [("replica t#1", "10.0.0.2:1900")]


@pytest.mark.parametrize("answer", [cm.EndDescribed(request_id="1", cause="exit code 3"), None])
def test_a_host_is_asked_how_a_process_ended_and_need_not_say(
    tmp_path: Path, port: FakePort, answer: cm.EndDescribed | None
) -> None:
    hosts, _, _, settings = led_by(tmp_path, "a")
    port.described = answer
    assert asyncio.run(hosts.cause_of_end("t#1", "there", "a")) == "", "it has not reported yet"
    state = {"name": "a", "state": "RUNNING", "release": own_release()}
    hosts.reported(report_of("a", settings.own_address, report=state), SENDER)
    cause = asyncio.run(hosts.cause_of_end("t#1", "there", "a"))
    assert cause == ("" if answer is None else "exit code 3")


def reported(
    tmp_path: Path, host: str, epoch: int, *, drain_s: Sequence[float] = (), **led: str
) -> list[tuple[str, Any]]:
    """Return what is sent, and where to, when a host reports a replica that is nobody's."""
    records: dict[str, Any] = {kind: {} for kind in KINDS}
    for number, each in enumerate(drain_s):
        config = {"graceful_shutdown_timeout_s": each}
        release = Release(code_hash="h", code_digest="d", config=config)
        records["backend"][f"b{number}"] = BackendRecord(tag=f"b{number}", releases=(release,))
    cluster = Cluster(records, 1, 100.0, Placement(), own_host="a")
    settings = read_settings({}, state_dir=str(tmp_path), host_name="a").model_copy(update=led)
    ensure_key(settings.cluster_key)
    loop = LoneLoop()
    members = Members(loop, cluster, settings, this_process(), lambda: None, epoch=epoch)
    address = settings.own_address if host == "a" else "10.0.0.2:1900"
    replicas = (("t#1", "10.0.0.2:2000"),)
    members.reported(report_of(host, address, replicas=replicas, report={}), SENDER)
    members.close()
    return sent(loop)


def test_a_host_that_is_forgotten_is_forgotten_everywhere(tmp_path: Path) -> None:
    hosts, cluster, loop, settings = led_by(tmp_path, "")
    state = {"name": "b", "state": "RUNNING", "host_pid": 7}
    report = report_of("b", report=state, may_lead=True)
    hosts.reported(report, SENDER)
    assert hosts.addresses() == (settings.own_address, "10.0.0.2:1900")
    assert len(loop.watched()) == 1
    cluster.hosts.forget("b", 100.0)
    assert loop.watched() == []
    assert hosts.shown() == []
    hosts.reported(replace(report, host="c", address="10.0.0.3:1900", id="2"), SENDER)
    (*_, found) = [each for _, each in loop.sent if isinstance(each, cm.HostAnswered)]
    assert found.hosts == (settings.own_address, "10.0.0.3:1900")
    hosts.close()


@pytest.mark.parametrize("is_stopping", [True, False])
def test_what_a_host_that_stops_asks_for_is_not_kept_and_what_others_ask_for_is(
    tmp_path: Path, is_stopping: bool
) -> None:
    members, cluster, _, _ = led_by(tmp_path, "")
    state = {"state": "DRAINING" if is_stopping else "RUNNING", "host_pid": 7}
    members.reported(report_of("b", report=state), SENDER)
    asked = DrainHost(host="b")
    members.drain(asked)
    assert cluster.hosts.records["b"].draining is not is_stopping
    assert cluster.hosts.state("b") is HostState.DRAINING
    assert members.is_drained(asked)
    if not is_stopping:
        cluster.hosts.undrain("b")
        with pytest.raises(ConflictError, match="host 'b' was told meanwhile to take replicas"):
            members.is_drained(asked)
    members.close()


def test_a_host_that_was_lost_is_shown_as_running_once_its_proxy_has_called_too(
    tmp_path: Path,
) -> None:
    members, cluster, _, _ = led_by(tmp_path, "a")

    def report_itself() -> str:
        members.reported(report_of("b"), SENDER)
        (shown,) = members.shown()
        return str(shown["state"])

    assert report_itself() == "EXPECTED"
    cluster.state.long_poll.listen("its proxy", (1, 1, "its proxy"), 0, "there", "b")
    assert report_itself() == "RUNNING"
    cluster.hosts.gone("b", 200.0)
    assert report_itself() == "LOST"
    for tenth in range(30):
        cluster.hosts.beat("b", 201.0 + tenth / 10)
        cluster.hosts.reconcile(201.0 + tenth / 10)
    assert report_itself() == "EXPECTED"
    cluster.state.long_poll.listen("its proxy", (1, 1, "its proxy"), 0, "there", "b")
    assert report_itself() == "RUNNING"
    members.close()


def test_a_host_whose_proxy_is_heard_before_its_report_has_a_state_too(tmp_path: Path) -> None:
    records: dict[str, Any] = {kind: {} for kind in KINDS}
    records["host"]["b"] = HostRecord(
        name="b", id="1", address="10.0.0.2:1900", capacity={"num_cpus": 1.0}, labels={}
    )
    cluster = Cluster(records, 1, 100.0, Placement(), own_host="a")
    settings = read_settings({}, state_dir=str(tmp_path))
    members = Members(LoneLoop(), cluster, settings, this_process(), lambda: None)
    cluster.hosts.gone("b", 200.0)  # it was cut off when this controller began, and is back
    for tenth in range(30):
        cluster.hosts.beat("b", 201.0 + tenth / 10)
        cluster.hosts.reconcile(201.0 + tenth / 10)
    cluster.state.long_poll.listen("its proxy", (1, 1, "its proxy"), 0, "there", "b")
    assert cluster.hosts.state("b") is HostState.RUNNING
    assert [each["state"] for each in members.shown()] == ["EXPECTED"]
    members.close()


def stopped(tmp_path: Path, host: str, epoch: int) -> list[str]:
    """Return where a replica that is nobody's is told to go, as its host reports it."""
    sent = reported(tmp_path, host, epoch)
    return [at for at, message in sent if isinstance(message, cm.StopReplica)]


def test_a_host_that_may_not_lead_hears_of_those_that_may(tmp_path: Path) -> None:
    sent = reported(tmp_path, "c", 1)
    (found,) = [message for _, message in sent if isinstance(message, cm.HostAnswered)]
    assert found.hosts == ("127.0.0.1:1900",)


def test_replicas_that_are_nobodys_go_also_on_the_host_of_who_leads_after_another(
    tmp_path: Path,
) -> None:
    assert stopped(tmp_path, "b", epoch=0) == ["10.0.0.2:2000"]
    assert stopped(tmp_path, "a", epoch=2) == ["10.0.0.2:2000"]
    assert stopped(tmp_path, "a", epoch=0) == []  # nobody else has led, and lost it


@pytest.mark.parametrize("has_heard", [True, False])
@pytest.mark.parametrize(("own", "heir"), [("a", "b"), ("b", "c"), ("c", "a")])
def test_a_leader_that_hears_no_other_any_more_gives_way_to_the_next_by_name(
    tmp_path: Path, own: str, heir: str, has_heard: bool
) -> None:
    records: dict[str, Any] = {kind: {} for kind in KINDS}
    records["host"] = {
        name: HostRecord(name=name, id=name, address=f"{name}:1900", capacity={}, labels={})
        for name in "abc"
    }
    placement = Placement()
    placement.set_host(own, None)
    cluster = Cluster(records, 1, 100.0, placement, own_host=own)
    settings = read_settings({}, state_dir=str(tmp_path), host_name=own)
    hosts = Members(LoneLoop(), cluster, settings, this_process(), lambda: None)
    assert hosts.away() == "", "they may be heard yet"
    first, second = sorted({*"abc"} - {own})
    if has_heard:
        cluster.hosts.reported(records["host"][first], (), 100.0, "process")
        assert hosts.away() == ""
    cluster.hosts.gone(first, 101.0)
    assert hosts.away() == "", "the other may be heard yet"
    cluster.hosts.gone(second, 101.0)
    assert hosts.away() == (heir if has_heard else ""), "those never heard may be dead"
    hosts.close()


def test_a_host_gets_the_longest_time_that_any_deployment_has_to_finish(tmp_path: Path) -> None:
    sent = reported(tmp_path, "c", 1)
    assert [m.drain_s for _, m in sent if isinstance(m, cm.HostAnswered)] == [20.0]
    sent = reported(tmp_path, "c", 1, drain_s=(20.0, 90.0, 5.0))
    assert [m.drain_s for _, m in sent if isinstance(m, cm.HostAnswered)] == [90.0]
