"""Where replicas go: where they fit, apart from their siblings, where most is free."""

from __future__ import annotations

from collections import Counter

import pytest

from greenroom.core.cluster.placement import Placement, Request


def placement_of(**hosts: dict[str, float]) -> Placement:
    placement = Placement()
    for name, total in hosts.items():
        placement.set_host(name, total)
    return placement


def place(placement: Placement, count: int, request: Request, backend: str = "b") -> list[str]:
    """Place so many replicas of one backend; return their hosts, as far as there is room."""
    siblings: Counter[str] = Counter()
    hosts: list[str] = []
    for number in range(count):
        host = placement.choose(request, siblings)
        if host is None:
            break
        placement.take(f"{backend}#{number}", host, request.needs)
        siblings[host] += 1
        hosts.append(host)
    return hosts


def test_replicas_of_a_backend_are_spread_whatever_they_need() -> None:
    placement = placement_of(a={"num_cpus": 8.0}, b={"num_cpus": 8.0}, c={"num_cpus": 8.0})
    assert Counter(place(placement, 6, Request())) == {"a": 2, "b": 2, "c": 2}
    needs = Request(needs={"num_cpus": 1})
    assert Counter(place(placement, 3, needs, "other")) == {"a": 1, "b": 1, "c": 1}


def test_the_host_with_more_free_of_what_is_needed_goes_first() -> None:
    placement = placement_of(a={"num_cpus": 4.0}, b={"num_cpus": 4.0})
    placement.take("other#1", "a", {"num_cpus": 3})
    assert place(placement, 1, Request(needs={"num_cpus": 1})) == ["b"]


def test_one_replica_each_of_many_backends_is_spread_too() -> None:
    placement = placement_of(a={"num_cpus": 4.0}, b={"num_cpus": 4.0})
    hosts = [place(placement, 1, Request(), f"backend{number}")[0] for number in range(10)]
    assert Counter(hosts) == {"a": 5, "b": 5}


def test_what_does_not_fit_anywhere_waits_and_is_told_why_for_each_host() -> None:
    placement = placement_of(a={"num_cpus": 2.0}, b={"num_gpus": 1.0})
    request = Request(needs={"num_cpus": 1})
    assert place(placement, 5, request) == ["a", "a"]
    assert placement.why_not(request, {"a": 2}) == (
        "host a: a replica needs 1 num_cpus, and 0 num_cpus of 2 num_cpus is free: it fits when "
        "1 num_cpus more is given back by b (2 num_cpus); "
        "host b: a replica needs 1 num_cpus, and the host has 0 num_cpus in all: ask for less, or "
        "start the system with a larger GREENROOM_NUM_CPUS; or another host joins"
    )


def test_a_cluster_of_many_hosts_names_a_few_of_them() -> None:
    placement = placement_of(**{f"h{number}": {"num_cpus": 0.0} for number in range(9)})
    told = placement.why_not(Request(needs={"num_cpus": 1}), {})
    assert told.count(": a replica needs") == 3
    assert told.endswith("; and 6 other hosts; or another host joins")


def test_no_host_gets_more_of_a_backend_than_is_allowed() -> None:
    placement = placement_of(a={"num_cpus": 9.0}, b={"num_cpus": 9.0})
    request = Request(max_per_host=2)
    assert Counter(place(placement, 9, request)) == {"a": 2, "b": 2}
    told = placement.why_not(request, {"a": 2, "b": 2})
    assert "it has 2 of its replicas already, and max_replicas_per_host is 2" in told


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"zone": "b"}, "a replica needs zone=b, and it has zone=a"),
        ({"disk": "ssd"}, "a replica needs disk=ssd, and it has no disk"),
    ],
)
def test_labels_that_a_backend_asks_for_must_be_there(labels: dict[str, str], why: str) -> None:
    placement = Placement()
    placement.set_host("one", {"num_cpus": 1.0}, {"zone": "a"})
    assert placement.choose(Request(labels={"zone": "a"}), {}) == "one"
    assert placement.choose(Request(labels=labels), {}) is None
    assert placement.why_not(Request(labels=labels), {}) == why


def test_a_closed_host_gets_nothing_and_keeps_what_it_has() -> None:
    placement = placement_of(a={"num_cpus": 4.0}, b={"num_cpus": 4.0})
    placement.take("b#1", "a", {"num_cpus": 1})
    placement.close_host("a", "it is lost")
    assert not placement.is_open("a")
    assert place(placement, 2, Request()) == ["b", "b"]
    assert placement.shown("a")["num_cpus"]["taken"] == 1
    assert placement.shown()["num_cpus"]["total"] == 4
    placement.close_host("b", "it is lost")
    assert placement.why_not(Request(), {}).startswith("host a: it is lost; host b: it is lost")
    placement.open_host("a")
    assert placement.choose(Request(), {}) == "a"


def test_what_a_replica_had_is_free_when_it_is_gone_and_gone_with_its_host() -> None:
    placement = placement_of(a={"num_cpus": 1.0}, b={"num_cpus": 1.0})
    placement.take("b#1", "a", {"num_cpus": 1})
    placement.take("b#2", "b", {"num_cpus": 1})
    placement.give_back("b#1")
    placement.give_back("b#1")  # harmless
    assert placement.shown()["num_cpus"] == {"total": 2, "taken": 1}
    placement.drop_host("b")
    placement.give_back("b#2")
    assert not placement.knows("b")
    assert placement.shown()["num_cpus"] == {"total": 1, "taken": 0}
