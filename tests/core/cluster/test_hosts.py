"""Hosts join, are lost, are back, are emptied, leave; replicas follow, and nothing runs twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from greenroom.core.autoscaling.decision import EXPIRE_S
from greenroom.core.cluster.admin import CARRIED_OUT, Now
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.host_report import HostReport
from greenroom.core.cluster.hosts import HOST_EXPECTED_S, STABLE_S, STEADY_S, HostState, away
from greenroom.core.effects import Start
from greenroom.core.errors import ConflictError, UnknownNameError
from greenroom.core.lifecycle.failures import AVOID_S, OF_STARTS, WITH_HOST_S
from greenroom.core.lifecycle.health import MAX_MISSED_CHECKS
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.lifecycle.replicas import LIVE, ReplicaState, RestartReason
from greenroom.core.long_poll import PROXY_EXPECTED_S
from greenroom.core.operations import RebalanceHosts
from greenroom.core.records import HostRecord
from tests.core import requests as ask
from tests.core.worlds import BROKEN, UNLOADABLE, Spec, World

FULL = {"num_cpus": 4.0, "num_gpus": 0.0, "memory": 0.0}


def described(name: str, **fields: Any) -> dict[str, Any]:
    values = {"id": f"id of {name}", "address": f"{name}:1900", "capacity": FULL, "labels": {}}
    return {**values, **fields}


def record(name: str, **fields: Any) -> HostRecord:
    return HostRecord(name=name, **described(name, **fields))


def report(name: str, **fields: Any) -> HostReport:
    said = {"process": "first", "replicas": (), "report": {}, **described(name, **fields)}
    return HostReport(host=name, **said)


def rebalance(cluster: Cluster, now: float) -> Any:
    return CARRIED_OUT[RebalanceHosts](cluster, RebalanceHosts(), Now(now, 0.0))


class Hosts(World):
    """A world with the controller's host, "", and others that the test has joined."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.alive: set[str] = set()
        self.broken: set[str] = set()  # where no code starts
        self.code_there = BROKEN
        super().__init__(capacity=FULL, **options)
        for name in names:
            self.join(name)

    def join(self, name: str, incarnation: str = "first", **fields: Any) -> None:
        """Let a host report, with what runs there, and beat from now on."""
        self.alive.add(name)
        replicas = tuple((tag, "") for tag in self.on(name))
        said = report(name, process=incarnation, replicas=replicas, **fields)
        self.cluster.hosts.reported(said, "there", self.now)
        self.flush()

    def on(self, name: str) -> list[str]:
        """Return the tags of the processes on a host."""
        return [tag for tag in self.processes if self.host_of(tag) == name]

    def die_on(self, name: str) -> None:
        """End all replicas' processes on a host."""
        for tag in self.on(name):
            self.die(tag)

    def host_of(self, tag: str) -> str:
        backend = self.records["backend"].get(tag.rpartition("#")[0])
        replica = None if backend is None else backend.replicas.get(tag)
        return "" if replica is None else replica.host

    def turn(self) -> None:
        for name in self.alive:
            self.cluster.hosts.beat(name, self.now)
        super().turn()

    def work(self) -> None:
        for name in self.broken:
            for tag in self.on(name):
                if self.processes[tag].state == "starting":
                    self.processes[tag].code = self.code_there
        super().work()

    def spread(self, backend: str = "a#d") -> Counter[str]:
        """Return how many of a backend's replicas count, by host."""
        replicas = self.cluster.state.backends[backend].replicas.values()
        return Counter(r.host for r in replicas if r.state is ReplicaState.RUNNING)

    def routed(self, backend: str = "a#d") -> Counter[str]:
        """Return what routers are told, by host."""
        return Counter(each.host for each in self.table(f"backend/{backend}").replicas)


def deploy(replicas: int, **options: Any) -> ask.Request:
    spec = Spec("d", b"one", {"num_replicas": replicas}, actor_options=options)
    return ask.deploy("a", spec, route="/a")


@pytest.fixture
def three() -> Hosts:
    world = Hosts("x", "y")
    world.complete(deploy(6))
    return world


def test_replicas_are_spread_over_hosts_and_stay_where_they_are(three: Hosts) -> None:
    assert three.spread() == {"": 2, "x": 2, "y": 2}
    three.join("z")
    three.wait(60)
    assert three.spread() == three.routed() == {"": 2, "x": 2, "y": 2}


def test_those_that_are_too_many_go_where_most_are(three: Hosts) -> None:
    three.complete(deploy(5))
    assert sorted(three.spread().values()) == [1, 2, 2]
    three.complete(deploy(2))
    assert sorted(three.spread().values()) == [1, 1]


def test_a_gateway_takes_no_replicas_and_says_so() -> None:
    world = Hosts("x")
    world.join("gate", capacity={})
    world.complete(deploy(6))
    assert world.spread() == world.routed() == {"": 3, "x": 3}
    rebalance(world.cluster, world.now)
    world.wait(60)
    assert world.spread()["gate"] == 0
    assert not world.cluster.state.placement.shown("gate")
    world.cluster.hosts.stop("gate", world.now)  # there is nothing to move
    world.converge()
    assert world.spread() == {"": 3, "x": 3}
    assert world.cluster.hosts.is_empty("gate")


def test_a_host_that_comes_back_as_a_gateway_gives_its_replicas_to_others(three: Hosts) -> None:
    three.die_on("x")
    three.join("x", incarnation="second", capacity={})
    three.go_on(5)
    assert three.spread() == three.routed() == {"": 3, "y": 3}
    three.join("x", incarnation="third")  # and takes some again, when it is no gateway any more
    three.converge()
    rebalance(three.cluster, three.now)
    three.go_on(30)
    assert three.spread() == {"": 2, "x": 2, "y": 2}


def test_where_there_are_only_gateways_replicas_wait_for_another_host() -> None:
    world = Hosts("x")
    world.cluster.state.placement.set_host("", {})
    world.join("x", capacity={})
    world.request(deploy(2))
    world.go_on(5)
    assert not world.spread()
    found = world.cluster.state.backends["a#d"].waiting
    assert "host x: it takes no replicas, as it was started with --no-replicas" in found
    assert "or another host joins" in found
    world.join("y")
    world.converge()
    assert world.spread() == {"y": 2}


def test_a_lost_host_is_noticed_within_three_seconds_and_its_replicas_replaced(
    three: Hosts,
) -> None:
    three.alive.remove("x")
    three.wait(3)
    assert three.cluster.hosts.state("x") is HostState.LOST
    assert three.routed()["x"] == 0
    three.go_on(5)
    assert three.spread() == {"": 3, "y": 3}
    (backend,) = three.cluster.state.backends.values()
    assert backend.failures.restarts[RestartReason.HOST_LOST] == 2


def lose_and_replace(world: Hosts, name: str = "x") -> None:
    world.alive.remove(name)
    world.wait(5)
    world.go_on(5)
    assert world.spread()[name] == 0


def test_a_host_that_was_cut_off_is_back_without_duplicates_or_kills(three: Hosts) -> None:
    kept = set(three.on("x"))
    lose_and_replace(three)
    assert len(three.processes) == 8
    three.join("x")
    three.converge()
    assert three.spread() == {"": 2, "x": 2, "y": 2}
    assert set(three.on("x")) == kept


def test_health_checks_that_failed_before_a_host_was_lost_count_no_more(three: Hosts) -> None:
    kept = set(three.on("x"))
    replicas = three.cluster.state.backends["a#d"].replicas
    for tag in kept:
        three.processes[tag].sick = True

    def fail_checks(count: int) -> None:
        for _ in range(3 * 10):  # seconds; each 10 there is one
            if {replicas[tag].missed_checks for tag in kept} == {count}:
                return
            three.wait(1)
        raise AssertionError(three.describe())

    fail_checks(MAX_MISSED_CHECKS - 1)
    lose_and_replace(three)
    three.join("x")
    fail_checks(1)
    assert set(three.on("x")) == kept


def test_a_new_controller_replaces_what_is_on_a_host_that_it_does_not_hear_of(
    three: Hosts,
) -> None:
    for tag in three.on("x"):
        three.processes[tag].stuck = True
    three.alive.remove("x")
    three.boot()
    three.join("y")
    three.wait(HOST_EXPECTED_S - 1)
    assert three.cluster.hosts.state("x") is HostState.EXPECTED
    assert three.routed()["x"] == 2  # proxies keep what they have meanwhile
    three.wait(2)
    three.go_on(5)
    assert three.cluster.hosts.state("x") is HostState.LOST
    assert three.spread() == {"": 3, "y": 3}


def test_a_host_is_emptied_only_as_others_take_over(three: Hosts) -> None:
    three.request(lambda cluster: cluster.hosts.drain("x"))
    three.flush()
    assert three.routed() == {"": 2, "x": 2, "y": 2}  # nothing has gone before its replacement
    three.converge()
    assert three.cluster.hosts.is_empty("x")
    assert three.spread() == {"": 3, "y": 3}
    three.request(lambda cluster: cluster.hosts.forget("x", three.now))
    assert "x" not in three.records["host"]


def test_what_fits_nowhere_else_stays_on_a_host_that_is_to_be_emptied() -> None:
    world = Hosts("x")
    world.complete(deploy(8, num_cpus=1))
    world.request(lambda cluster: cluster.hosts.drain("x"))
    world.wait(30)
    assert world.spread() == {"": 4, "x": 4}
    assert "host x: it is drained, until" in world.cluster.state.backends["a#d"].waiting


def drain(world: Hosts, name: str, **options: bool) -> None:
    world.request(lambda cluster: cluster.hosts.drain(name, **options))


def undrain(world: Hosts, name: str) -> None:
    world.request(lambda cluster: cluster.hosts.undrain(name))


@pytest.mark.parametrize("name", ["", "x"])
def test_a_drained_host_is_drained_under_a_new_controller_too(three: Hosts, name: str) -> None:
    three.cluster.hosts.own_reported(report(""), "here", three.now, keeps=False)
    drain(three, name)
    three.converge()
    others = three.spread()
    assert others[name] == 0
    three.boot()
    three.join("x")
    three.join("y")
    three.complete(deploy(8))
    assert three.spread()[name] == 0
    assert three.cluster.hosts.state(name) is HostState.DRAINING
    undrain(three, name)
    three.boot()
    three.join("x")
    three.join("y")
    three.complete(deploy(9))
    assert three.spread()[name] == 1
    assert ("" in three.records["host"]) is False, "which leads, and cannot be followed"


def test_a_drained_host_that_was_lost_and_is_back_is_emptied(three: Hosts) -> None:
    three.alive.remove("x")
    three.wait(3)
    drain(three, "x")
    assert three.cluster.hosts.state("x") is HostState.LOST
    three.join("x")
    three.converge()
    assert three.cluster.hosts.state("x") is HostState.DRAINING
    assert three.spread() == {"": 3, "y": 3}
    undrain(three, "x")
    assert three.cluster.hosts.state("x") is HostState.RUNNING


def test_a_host_that_was_to_stop_and_did_not_takes_replicas_again(three: Hosts) -> None:
    three.request(lambda cluster: cluster.hosts.stop("x", three.now))
    with pytest.raises(ConflictError, match="host 'x' is stopping; start it again"):
        undrain(three, "x")
    three.converge()
    assert three.spread()["x"] == 0
    three.alive.remove("x")
    three.wait(3)
    three.join("x", "second")
    three.wait(3)
    assert three.cluster.hosts.state("x") is HostState.RUNNING


def test_the_last_host_that_takes_replicas_is_drained_only_by_force() -> None:
    world = Hosts("x")
    world.join("gate", capacity={})
    world.cluster.hosts.own_reported(report(""), "here", world.now, keeps=True)
    drain(world, "")
    with pytest.raises(ConflictError, match="host 'x' is the last that takes replicas: "):
        drain(world, "x")
    drain(world, "")  # repeated, and harmless
    drain(world, "gate")  # takes none anyway
    drain(world, "x", force=True)
    world.request(deploy(1))
    world.go_on(5)
    assert not world.spread()
    undrain(world, "")
    world.converge()
    assert world.spread() == {"": 1}


def test_an_unknown_host_is_not_drained_and_the_one_that_may_be_meant_is_named() -> None:
    world = Hosts("one", "three")
    for ask_for in (drain, undrain):
        with pytest.raises(UnknownNameError, match=r"'thre'; there are: .*did you mean three"):
            ask_for(world, "thre")
    world.cluster.hosts.stop("thre", world.now)  # it has left, and repeats what it said
    world.cluster.hosts.stop("thre", world.now, leaves=True)


def test_a_drained_host_that_left_takes_replicas_when_it_joins_again(three: Hosts) -> None:
    drain(three, "x")
    three.request(lambda cluster: cluster.hosts.stop("x", three.now, leaves=True))
    three.request(lambda cluster: cluster.hosts.forget("x", three.now))
    three.join("x")
    assert three.cluster.hosts.state("x") is HostState.RUNNING


def test_a_host_whose_name_has_changed_under_its_own_record_is_not_waited_for() -> None:
    world = Hosts()
    world.records["host"]["old"] = record("old", id="id of ")
    world.boot()
    world.cluster.hosts.own_reported(report(""), "here", world.now, keeps=False)
    world.flush()
    assert not world.records["host"]


def test_the_own_record_is_saved_from_when_it_is_to_be_kept_on() -> None:
    world = Hosts()
    for keeps in (False, True, False):
        world.cluster.hosts.own_reported(report(""), "here", world.now, keeps=keeps)
        world.flush()
        assert ("" in world.records["host"]) is keeps


def test_a_host_whose_record_the_store_loses_is_saved_again(three: Hosts) -> None:
    three.cluster.hosts.own_reported(report(""), "here", three.now, keeps=False)
    known = three.records["host"]["x"]
    assert three.cluster.found_lost([("host", "x"), ("host", "")])
    assert three.cluster.take_changes().puts == {("host", "x"): known}
    assert three.cluster.state.lost == {("host", "")}, "which is kept nowhere"


def test_a_name_is_taken_while_its_host_is_there(three: Hosts) -> None:
    with pytest.raises(ConflictError, match="'x' is taken by the host that is at x:1900; give"):
        three.cluster.hosts.reported(report("x", id="b", address="z:1900"), "", three.now)
    with pytest.raises(ConflictError, match="taken by the host that the controller is on"):
        three.cluster.hosts.reported(report("", id="another"), "", three.now)


def test_a_host_that_lost_its_state_dir_takes_its_own_place_at_once(three: Hosts) -> None:
    three.die_on("x")
    three.join("x", id="another")  # at the same address, where the one before cannot be any more
    three.converge()
    assert three.cluster.hosts.state("x") is HostState.RUNNING
    assert len(three.running("a#d")) == 6


def test_another_host_may_have_the_name_of_a_lost_one(three: Hosts) -> None:
    lose_and_replace(three)
    three.die_on("x")
    three.join("x", id="another")
    three.converge()
    assert three.cluster.hosts.state("x") is HostState.RUNNING
    assert three.spread() == {"": 3, "y": 3}


def test_only_a_lost_host_can_be_evicted(three: Hosts) -> None:
    hosts = three.cluster.hosts
    with pytest.raises(UnknownNameError, match="no host is named 'q'; there are: , x, y"):
        hosts.evict("q", three.now)
    with pytest.raises(ConflictError, match="is RUNNING, and leads"):
        hosts.evict("", three.now)
    with pytest.raises(ConflictError, match="host 'x' is RUNNING; stop it first"):
        hosts.evict("x", three.now)
    lose_and_replace(three)
    three.request(lambda cluster: cluster.hosts.evict("x", three.now))
    assert "x" not in three.records["host"]
    assert not [tag for tag in three.recorded() if three.host_of(tag) == "x"]


def test_a_rebalance_moves_what_is_too_much_and_nothing_goes_before_its_replacement() -> None:
    world = Hosts()
    world.complete(deploy(6))
    world.join("x")
    world.join("y")
    assert world.request(lambda cluster: rebalance(cluster, world.now)) == 4
    world.flush()
    assert world.routed() == {"": 6}
    world.converge()
    assert world.spread() == {"": 2, "x": 2, "y": 2}
    assert world.request(lambda cluster: rebalance(cluster, world.now)) == 0


def test_a_rebalance_fills_an_empty_host_with_backends_of_one_replica() -> None:
    world = Hosts("x")
    for name in "abcdef":
        world.complete(ask.deploy(name, Spec("d", b"one", {}), route=f"/{name}"))
    world.join("y")
    assert world.request(lambda cluster: rebalance(cluster, world.now)) == 2
    world.converge()
    assert world.cluster.state.placement.held() == {"": 2, "x": 2, "y": 2}
    assert world.request(lambda cluster: rebalance(cluster, world.now)) == 0


@pytest.mark.parametrize("why", ["it is full", "it is smaller", "it lacks a label"])
def test_a_rebalance_moves_nothing_to_where_it_would_be_no_better_off(why: str) -> None:
    world = Hosts()
    options: dict[str, Any] = {"num_cpus": 0.5}
    if why == "it lacks a label":
        options["label_selector"] = {"disk": "fast"}
        world.cluster.state.placement.set_host("", FULL, {"disk": "fast"})
    for name in "abcd":
        world.complete(ask.deploy(name, Spec("d", b"one", {}, None, options), route=f"/{name}"))
    sizes = {"it is full": 0.4, "it is smaller": 0.9}
    world.join("x", capacity=FULL | {"num_cpus": sizes.get(why, 4.0)})
    if why == "it is smaller":
        world.complete(ask.deploy("e", Spec("d", b"one", {}, None, options), route="/e"))
    assert world.request(lambda cluster: rebalance(cluster, world.now)) == 0


def test_an_update_goes_on_where_every_host_has_as_many_as_it_may() -> None:
    """One on each host, as of a cache or an agent."""
    world = Hosts("x", "y")
    config = {"num_replicas": 3, "max_replicas_per_host": 1}
    world.complete(ask.deploy("a", Spec("d", b"one", config), route="/a"))
    assert world.spread() == {"": 1, "x": 1, "y": 1}
    world.complete(ask.deploy("a", Spec("d", b"two", config), route="/a"))
    backend = world.cluster.state.backends["a#d"]
    assert {r.release for r in backend.replicas.values()} == {backend.record.newest.number}
    assert world.spread() == {"": 1, "x": 1, "y": 1}


def test_what_no_host_can_take_over_finishes_before_its_host_leaves() -> None:
    world = Hosts("x")
    world.complete(deploy(8, num_cpus=1))
    draining = world.on("x")
    world.request(lambda cluster: cluster.hosts.stop("x", world.now, leaves=True))
    world.flush()
    assert {world.processes[tag].state for tag in draining} == {"draining"}
    world.work()
    world.flush()
    assert world.cluster.hosts.is_empty("x")
    assert world.spread() == {"": 4}


def end_and_start_again(world: Hosts, name: str, incarnation: str) -> HostState:
    """End all of a host's processes and start it again; return how it counts then."""
    world.alive.remove(name)
    world.die_on(name)
    world.flush()
    world.request(lambda cluster: cluster.hosts.gone(name, world.now))
    world.flush()
    world.join(name, incarnation)
    return world.cluster.hosts.state(name)


def test_a_host_that_ended_and_is_started_again_counts_again_at_once(three: Hosts) -> None:
    three.wait(STABLE_S)
    assert end_and_start_again(three, "x", "second") is HostState.RUNNING
    three.converge()
    three.wait(STABLE_S)
    assert three.cluster.hosts.state("x") is HostState.RUNNING
    assert sum(three.spread().values()) == 6


def test_a_late_report_of_a_host_that_ended_does_not_have_it_count(three: Hosts) -> None:
    three.wait(STABLE_S)
    assert end_and_start_again(three, "x", "first") is HostState.LOST


def test_a_host_that_ends_again_and_again_has_to_be_heard_steadily(three: Hosts) -> None:
    three.wait(STABLE_S)
    assert end_and_start_again(three, "x", "second") is HostState.RUNNING
    three.wait(STABLE_S / 2)
    assert end_and_start_again(three, "x", "third") is HostState.LOST
    three.wait(STEADY_S + 1)
    assert three.cluster.hosts.state("x") is HostState.RUNNING


@pytest.mark.parametrize("is_noticed_late", [False, True])
def test_what_dies_with_its_host_is_no_crash_loop(three: Hosts, is_noticed_late: bool) -> None:
    """However often: it is replaced at once."""
    for number in range(6):
        name = "x" if number % 2 else "y"
        three.die_on(name)
        three.flush()
        three.alive.remove(name)
        if is_noticed_late:
            three.wait(3)
        else:
            three.request(lambda cluster, name=name: cluster.hosts.gone(name, three.now))
        three.flush()
        assert three.cluster.hosts.state(name) is HostState.LOST
        replicas = three.cluster.state.backends["a#d"].replicas.values()
        assert sum(each.state in LIVE for each in replicas) == 6, "none waits to be started"
        three.go_on(5)
        three.join(name, f"{number}")
        three.wait(3)
        three.complete(lambda cluster: rebalance(cluster, three.now))
        assert three.spread() == {"": 2, "x": 2, "y": 2}


def test_a_replica_that_crashes_on_a_host_that_is_lost_later_is_a_crash_loop(three: Hosts) -> None:
    for _ in range(4):
        three.die(next(tag for tag in three.processes if three.host_of(tag) == "x"))
        three.converge()
    backend = three.cluster.state.backends["a#d"]
    start_at = backend.failures.pause_ends_at(1, *OF_STARTS)
    three.wait(WITH_HOST_S + 1)
    three.request(lambda cluster: cluster.hosts.gone("x", three.now))
    assert backend.failures.pause_ends_at(1, *OF_STARTS) == start_at > three.now - 60


def test_a_host_that_comes_by_another_name_is_the_same(three: Hosts) -> None:
    lose_and_replace(three)
    three.die_on("x")
    three.join("renamed", id="id of x")
    three.converge()
    assert set(three.records["host"]) == {"renamed", "y"}


def test_one_that_starts_on_a_host_that_drains_goes_on_where_there_is_no_other_room() -> None:
    world = Hosts("x")
    world.cluster.state.placement.close_host("", "it is full")
    world.request(deploy(1))
    world.flush()
    (tag,) = world.processes
    drain(world, "x", force=True)
    world.converge()
    assert world.recorded() == {tag}


@pytest.mark.parametrize("code", [BROKEN, UNLOADABLE])
def test_what_keeps_failing_on_one_host_is_started_on_others(three: Hosts, code: bytes) -> None:
    three.broken, three.code_there = {"x"}, code
    three.die_on("x")
    three.go_on(20, 1.0)
    assert three.spread() == three.routed() == {"": 3, "y": 3}
    tries = [e for e in three.effects if isinstance(e, Start) and three.host_of(e.replica) == "x"]
    assert len(tries) <= 4, "the two that were there, and two at once when these had died"
    three.request(lambda cluster: rebalance(cluster, three.now))
    three.go_on(10, 1.0)
    assert three.spread() == {"": 3, "y": 3}


def test_a_host_on_which_starts_have_failed_is_taken_where_no_other_can_be(three: Hosts) -> None:
    three.broken = {"x"}
    three.die_on("x")
    three.go_on(20, 1.0)
    three.broken.clear()
    for name in ("", "y"):
        three.cluster.state.placement.close_host(name, "it is full")
    three.complete(deploy(7))
    assert three.spread() == {"": 3, "x": 1, "y": 3}
    for name in ("", "y"):
        three.cluster.state.placement.open_host(name)
    three.complete(deploy(8))
    assert three.spread() == {"": 3, "x": 2, "y": 3}, "it is as good as any, once one has started"


def test_a_host_on_which_starts_failed_long_ago_is_as_good_as_any(three: Hosts) -> None:
    three.broken = {"x"}
    three.die_on("x")
    three.go_on(20, 1.0)
    three.broken.clear()
    three.wait(AVOID_S)
    three.complete(deploy(7))
    assert three.spread() == {"": 3, "x": 1, "y": 3}


def test_code_that_one_host_has_never_loaded_is_found_out_and_not_moved_to_others() -> None:
    world = Hosts("x")
    world.broken, world.code_there = {"x"}, UNLOADABLE
    goal = world.request(deploy(2))
    world.go_on(20, 1.0)
    assert world.goal_state(goal) == "failed"


def test_an_idle_proxy_of_a_lost_host_counts_no_more_and_counts_again_when_it_is_back() -> None:
    world = Hosts("x")
    loads, process = world.cluster.loads, (1, 1, "of x")
    found: list[str] = []
    world.cluster.state.gone.proxy.append(found.append)
    world.cluster.state.long_poll.listen("of x", process, 0, "its address", host="x")
    loads.report("of x", {}, world.now)
    loads.report("other", {"a#d": (20, 0)}, world.now)
    assert sorted(loads.queues("a#d")) == [0, 20]
    world.alive.remove("x")
    world.wait(3)
    assert loads.queues("a#d") == (20,)
    assert found == ["of x"]
    world.join("x")
    world.cluster.state.long_poll.listen("of x", process, 0, "its address", host="x")
    loads.expect("of x", world.now)
    loads.report("other", {"a#d": (20, 0)}, world.now + EXPIRE_S)
    loads.reconcile("of x")  # as it is due: it has nothing to report
    assert sorted(loads.queues("a#d")) == [0, 20]


def test_a_late_call_of_a_proxy_whose_host_is_lost_holds_changes_up_for_a_while_only() -> None:
    world = Hosts("x")
    world.alive.remove("x")
    world.wait(3)
    world.cluster.state.long_poll.listen("of x", (1, 1, "of x"), 0, "its address", host="x")
    world.wait(PROXY_EXPECTED_S - 1)
    assert "of x" in world.records["listener"]
    world.wait(2)
    assert "of x" not in world.records["listener"]


def test_a_proxy_that_called_while_its_host_was_lost_goes_with_the_host_that_is_back() -> None:
    world = Hosts("x")
    world.alive.remove("x")
    world.wait(3)
    world.cluster.state.long_poll.listen("of x", (1, 1, "of x"), 0, "its address", host="x")
    world.flush()
    world.join("x")
    world.wait(2 * PROXY_EXPECTED_S)
    assert "of x" in world.records["listener"]
    world.alive.remove("x")
    world.wait(3)
    assert "of x" not in world.records["listener"]


def test_each_replica_and_host_that_is_gone_is_reported_once(three: Hosts) -> None:
    replicas: list[str] = []
    hosts: list[str] = []
    three.cluster.state.gone.replica.append(replicas.append)
    three.cluster.state.gone.host.append(hosts.append)
    on_x = three.on("x")
    lose_and_replace(three)
    three.die_on("x")
    three.request(lambda cluster: cluster.hosts.evict("x", three.now))
    assert hosts == ["x"]
    assert sorted(replicas) == sorted(on_x)
    three.complete(ask.undeploy("a"))
    assert len(replicas) == len(set(replicas)) == 8


@pytest.mark.parametrize("has_seen", [True, False])
@pytest.mark.parametrize(("own", "next_one"), [("a", "b"), ("b", "c"), ("c", "a")])
def test_a_leader_that_hears_no_other_any_more_gives_way_to_the_next_by_name(
    own: str, next_one: str, has_seen: bool
) -> None:
    records: dict[str, Any] = {"host": {name: record(name) for name in "abc"}}
    placement = Placement()
    placement.set_host(own, None)
    hosts = Cluster(records, 1, 100.0, placement, own_host=own).hosts
    assert away(hosts) == "", "they may be heard yet"
    first, second = sorted({*"abc"} - {own})
    if has_seen:
        hosts.reported(report(first), "there", 100.0)
        assert away(hosts) == ""
    hosts.gone(first, 101.0)
    assert away(hosts) == "", "the other may be heard yet"
    hosts.gone(second, 101.0)
    assert away(hosts) == (next_one if has_seen else ""), "those never heard may be dead"
