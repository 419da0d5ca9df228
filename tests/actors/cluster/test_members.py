"""The hosts of a cluster, as the controller deals with them: without any, and with a clock."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from thespian.actors import ActorAddress
from thespian.system.messages.admin import PendingActor, PendingActorResponse

from greenroom.actors.cluster.members import Members
from greenroom.actors.messages import control as cm
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.settings import read_settings
from greenroom.actors.transport.addresses import ProcessAddress, own_release
from greenroom.actors.transport.cluster_key import ensure_key
from greenroom.core.cluster.admin import CARRIED_OUT, Later, Now
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import HostState
from greenroom.core.cluster.key_rotation import KeyIds
from greenroom.core.errors import ConflictError
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.operations import DrainHost
from greenroom.core.records import BackendRecord, HostRecord, Release
from tests.support.lone_loop import LoneLoop, Sent

SENDER = ActorAddress(ProcessAddress("10.0.0.2", 2001))
ADDRESS = "10.0.0.2:1900"


class Led:
    """The members of a cluster that a host leads, and all that they act on."""

    def __init__(
        self, folder: Path, own: str = "a", *hosts: HostRecord, epoch: int = 0, **records: Any
    ) -> None:
        kept: dict[str, Any] = {kind: {} for kind in KINDS} | records
        kept["host"] = {each.name: each for each in hosts}
        placement = Placement()
        placement.set_host(own, None)
        self.cluster = Cluster(kept, 1, 100.0, placement, own_host=own)
        self.settings = read_settings({}, state_dir=str(folder), host_name=own or "a")
        ensure_key(self.settings.cluster_key)
        self.loop = LoneLoop()
        self.members = Members(
            self.loop, self.cluster, self.settings, this_process(), lambda: None, epoch=epoch
        )

    def hear_of(self, name: str, address: str = ADDRESS, **fields: Any) -> None:
        """Have a host report itself."""
        known = {"id": name, "capacity": {"num_cpus": 1.0}, "labels": {}, "replicas": ()}
        known |= {"report": {"name": name, "state": "RUNNING"}, "keys": KeyIds("a key")}
        report = cm.HostReported(
            host=name, address=address, process=this_process(), **{**known, **fields}
        )
        self.members.reported(report, SENDER)

    def sent(self, kind: type) -> list[tuple[str, Any]]:
        """Return the messages of a class that were sent, and where to."""
        sent = [(to.addressDetails.text, message) for to, message in self.loop.sent]
        return [each for each in sent if isinstance(each[1], kind)]

    def asked(self, question: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.asyncio.run_until_complete(question)

    def is_back(self, name: str) -> None:
        """Have a host that counts as lost beat for three seconds."""
        for tenth in range(30):
            self.cluster.hosts.beat(name, 201.0 + tenth / 10)
            self.cluster.hosts.reconcile(201.0 + tenth / 10)

    def hear_proxy(self, host: str) -> None:
        proxy = (1, 1, "its proxy")
        self.cluster.state.long_poll.listen("its proxy", proxy, 0, "there", host)


def host(name: str, address: str = ADDRESS) -> HostRecord:
    return HostRecord(name=name, id=name, address=address, capacity={"num_cpus": 1.0}, labels={})


def test_a_replica_is_asked_for_at_its_own_host(tmp_path):
    led = Led(tmp_path, "a", host("b"))

    def answer(sent: Sent) -> None:
        asked = sent.message
        located = PendingActorResponse(None, asked.instanceNum, asked.globalName, 0)
        located.actualAddress = "there"
        led.loop.arrive(located, sent.target)

    led.loop.outside.takes = answer
    assert led.asked(led.members.locate("t#1", "b")) == "there"
    assert led.asked(led.members.locate("t#1", "gone")) is None
    ((at, asked),) = led.sent(PendingActor)
    assert (at, asked.globalName) == (ADDRESS, "replica t#1")


@pytest.mark.parametrize("cause", ["exit code 3", ""])
def test_a_host_is_asked_how_a_process_ended_and_need_not_say(tmp_path, cause):
    led = Led(tmp_path)

    def answer(sent: Sent) -> None:
        asked = sent.message
        if isinstance(asked, cm.DescribeEnd) and cause:
            assert (asked.replica, asked.address) == ("t#1", "there")
            led.loop.arrive(cm.EndDescribed(request_id=asked.request_id, cause=cause))

    led.loop.outside.takes = answer
    ask = lambda: led.asked(led.members.cause_of_end("t#1", "there", "a"))  # noqa: E731
    assert ask() == "", "it has not reported yet"
    state = {"name": "a", "state": "RUNNING", "release": own_release()}
    led.hear_of("a", led.settings.own_address, report=state)
    assert ask() == cause


def test_a_host_that_is_forgotten_is_forgotten_everywhere(tmp_path):
    led = Led(tmp_path, "")
    state = {"name": "b", "state": "RUNNING", "host_pid": 7}
    led.hear_of("b", report=state, may_lead=True)
    assert led.members.addresses() == (led.settings.own_address, ADDRESS)
    assert len(led.loop.watched()) == 1
    led.cluster.hosts.forget("b", 100.0)
    assert led.loop.watched() == []
    assert led.members.shown() == []
    led.hear_of("c", "10.0.0.3:1900", report=state, may_lead=True)
    (*_, (_, found)) = led.sent(cm.HostAnswered)
    assert found.hosts == (led.settings.own_address, "10.0.0.3:1900")


@pytest.mark.parametrize("is_stopping", [True, False])
def test_what_a_host_that_stops_asks_for_is_not_kept_and_what_others_ask_for_is(
    tmp_path, is_stopping
):
    led = Led(tmp_path, "")
    state = {"state": "DRAINING" if is_stopping else "RUNNING", "host_pid": 7}
    led.hear_of("b", report=state)
    drained: Later = CARRIED_OUT[DrainHost](led.cluster, DrainHost(host="b"), Now(100.0, 0.0))
    assert led.cluster.hosts.records["b"].draining is not is_stopping
    assert led.cluster.hosts.state("b") is HostState.DRAINING
    assert drained.poll() is True
    if not is_stopping:
        led.cluster.hosts.undrain("b")
        with pytest.raises(ConflictError, match="host 'b' was told meanwhile to take replicas"):
            drained.poll()


def test_a_host_that_was_lost_is_shown_as_running_once_its_proxy_has_called_too(tmp_path):
    led = Led(tmp_path)

    def report_itself() -> str:
        led.hear_of("b")
        (shown,) = led.members.shown()
        return str(shown["state"])

    assert report_itself() == "EXPECTED"
    led.hear_proxy("b")
    assert report_itself() == "RUNNING"
    led.cluster.hosts.gone("b", 200.0)
    assert report_itself() == "LOST"
    led.is_back("b")
    assert report_itself() == "EXPECTED"
    led.hear_proxy("b")
    assert report_itself() == "RUNNING"


def test_a_host_whose_proxy_is_heard_before_its_report_has_a_state_too(tmp_path):
    led = Led(tmp_path, "a", host("b"))
    led.cluster.hosts.gone("b", 200.0)  # it was cut off when this controller began, and is back
    led.is_back("b")
    led.hear_proxy("b")
    assert led.cluster.hosts.state("b") is HostState.RUNNING
    assert [each["state"] for each in led.members.shown()] == ["EXPECTED"]


def test_a_host_that_may_not_lead_hears_of_those_that_may(tmp_path):
    led = Led(tmp_path, epoch=1)
    led.hear_of("c")
    ((_, found),) = led.sent(cm.HostAnswered)
    assert found.hosts == ("127.0.0.1:1900",)


@pytest.mark.parametrize(
    ("name", "epoch", "is_stopped"),
    [("b", 0, True), ("a", 2, True), ("a", 0, False)],  # nobody else has led, and lost it
)
def test_replicas_that_are_nobodys_go_also_on_the_host_of_who_leads_after_another(
    tmp_path, name, epoch, is_stopped
):
    led = Led(tmp_path, epoch=epoch)
    address = led.settings.own_address if name == "a" else ADDRESS
    led.hear_of(name, address, replicas=(("t#1", "10.0.0.2:2000"),), report={})
    assert [at for at, _ in led.sent(cm.StopReplica)] == ["10.0.0.2:2000"] * is_stopped


@pytest.mark.parametrize(("drain_s", "longest_s"), [((), 20.0), ((20.0, 90.0, 5.0), 90.0)])
def test_a_host_gets_the_longest_time_that_any_deployment_has_to_finish(
    tmp_path, drain_s, longest_s
):
    configs = [{"graceful_shutdown_timeout_s": each} for each in drain_s]
    releases = [Release(code_hash="h", code_digest="d", config=config) for config in configs]
    records = [BackendRecord(tag=f"b{n}", releases=(each,)) for n, each in enumerate(releases)]
    led = Led(tmp_path, epoch=1, backend={each.tag: each for each in records})
    led.hear_of("c", report={})
    assert [message.drain_s for _, message in led.sent(cm.HostAnswered)] == [longest_s]
