"""Which proxies a new controller waits for before it counts a table as held by all."""

from __future__ import annotations

from greenroom.core.long_poll import PROXY_EXPECTED_S
from greenroom.core.routing.tables import ENDPOINT_PREFIX
from tests.core import requests as ask
from tests.core.worlds import Proxy, World


def with_two_proxies() -> World:
    world = World(proxies=2)
    world.request(ask.create("b"))
    world.complete(ask.endpoint("e", "b", route="/e"))
    return world


def restart_but_for(world: World, silent: int) -> None:
    """Start the controller anew, with one proxy that has not found it yet."""
    proxies = world.proxies
    world.proxies = [proxy for number, proxy in enumerate(proxies) if number != silent]
    world.boot()
    world.flush()
    world.proxies = proxies


def held(world: World) -> bool:
    return world.cluster.state.long_poll.held_by_all(ENDPOINT_PREFIX + "e")


def test_a_new_controller_waits_for_proxies_that_it_has_not_heard_of() -> None:
    world = with_two_proxies()
    restart_but_for(world, 1)
    world.request(ask.unname("e"))
    world.flush()
    assert not held(world)
    world.listen(world.proxies[1])
    world.flush()
    assert held(world)
    assert world.proxies[1].tables.keys() == world.proxies[0].tables.keys()


def test_a_proxy_that_is_gone_is_waited_for_no_more_and_its_record_goes() -> None:
    world = with_two_proxies()
    restart_but_for(world, 1)
    (expected,) = world.cluster.state.long_poll.expected()
    assert expected.name == "proxy 1"
    world.cluster.state.long_poll.gone("proxy 1")
    world.flush()
    assert held(world)
    assert world.records["listener"].keys() == {"proxy 0"}
    world.cluster.state.long_poll.gone("proxy 1")  # as its host may say again
    assert not world.cluster.take_changes()


def test_a_proxy_of_which_nothing_is_heard_counts_as_gone_after_a_while() -> None:
    world = with_two_proxies()
    restart_but_for(world, 1)
    began = world.now
    world.wait(PROXY_EXPECTED_S - 1)
    assert not held(world)
    world.wait(2)
    assert held(world)
    assert world.now < began + 2 * PROXY_EXPECTED_S
    world.listen(world.proxies[1])  # it was only late
    world.flush()
    assert world.records["listener"].keys() == {"proxy 0", "proxy 1"}


def test_replicas_are_not_stopped_while_a_proxy_that_is_expected_may_send_to_them() -> None:
    world = with_two_proxies()
    restart_but_for(world, 1)
    world.request(ask.unname("e"))
    world.request(ask.delete("b"))
    world.flush()
    (process,) = world.running("b")
    assert process.state == "running"
    world.listen(world.proxies[1])
    world.flush()
    assert not world.running("b")


def test_a_proxy_whose_host_never_reports_is_not_waited_for_for_ever() -> None:
    world = with_two_proxies()
    long_poll = world.cluster.state.long_poll
    long_poll.listen("far", (1, 1, "far"), 0, "far", "a host that left")
    world.wait(PROXY_EXPECTED_S - 1)
    assert not held(world)
    world.wait(2)
    assert held(world)
    assert world.records["listener"].keys() == {"proxy 0", "proxy 1"}


def test_a_live_proxy_of_a_host_that_left_counts_for_as_long_as_it_calls() -> None:
    world = with_two_proxies()
    found: list[str] = []
    world.cluster.state.gone.proxy.append(found.append)
    draining = Proxy("draining")
    world.proxies.append(draining)
    for _ in range(40):
        world.cluster.state.long_poll.listen(
            "draining", (1, 1, "draining"), draining.seen, draining, "a host that left"
        )
        world.wait(2)
        assert held(world)
    assert not found
    world.wait(PROXY_EXPECTED_S - 3)
    assert not found
    world.wait(2)
    assert found == ["draining"]
