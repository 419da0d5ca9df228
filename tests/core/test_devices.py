"""Which devices replicas get, and what they are told of them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, strategies as st

from greenroom.core.cluster import status
from greenroom.core.config import ActorOptions
from greenroom.core.devices import choose, variables
from greenroom.core.lifecycle.placement import PlacedHost
from greenroom.core.lifecycle.replicas import Replica, rank
from greenroom.core.validation import validated
from tests.core import requests as ask
from tests.core.worlds import Spec, World


@pytest.mark.parametrize(
    ("amount", "shares", "devices"),
    [
        (1, [0, 0], (0,)),
        (1, [1, 0], (1,)),
        (2, [0, 1, 0], (0, 2)),
        (2, [0, 1, 0.1], None),
        (1, [], None),
        (0.5, [0, 0], (0,)),
        (0.5, [0, 0.5], (1,)),  # packed, so that a whole one stays free
        (0.5, [0.6, 0.75, 1], None),
        (0.1, [0.9], (0,)),
        (1 / 3, [2 / 3], (0,)),
    ],
)
def test_whole_devices_are_free_ones_and_shares_are_packed(
    amount: float, shares: list[float], devices: tuple[int, ...] | None
) -> None:
    assert choose(amount, shares) == devices


@given(
    st.lists(
        st.one_of(
            st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0]),
            st.integers(0, 9),  # which replica goes
        ),
        max_size=40,
    )
)
def test_no_device_ever_has_more_than_its_share(steps: list[float]) -> None:
    host, living = PlacedHost("", {"num_gpus": 3.0}), list[str]()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if living:
                host.give_back(living.pop(step % len(living)))
        elif host.has_room({"num_gpus": step}):
            living.append(f"b#{number}")
            devices = host.take(f"b#{number}", {"num_gpus": step})["num_gpus"]
            assert len(devices) == max(int(step), 1)
        shares = host.shown()["num_gpus"]["devices"]
        assert max(shares) <= 1
        assert sum(shares) == pytest.approx(host.shown()["num_gpus"]["taken"])
    for replica in living:
        host.give_back(replica)
    assert host.shown()["num_gpus"]["devices"] == [0, 0, 0]


def test_a_process_is_shown_its_devices_alone() -> None:
    assert variables({"num_gpus": (0, 2)}, {}) == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "HIP_VISIBLE_DEVICES": "0,2",
    }
    assert variables({"TPU": (1,), "neuron_cores": (0, 1)}, {}) == {
        "TPU_VISIBLE_CHIPS": "1",
        "NEURON_RT_VISIBLE_CORES": "0,1",
    }
    host = {"CUDA_VISIBLE_DEVICES": "GPU-a, 5"}
    assert set(variables({"num_gpus": (1,)}, host).values()) == {"5"}
    assert set(variables({"num_gpus": (1,)}, {"HIP_VISIBLE_DEVICES": "2,3"}).values()) == {"3"}
    both = {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "2,3"}
    assert variables({"num_gpus": (0,)}, both) == {
        "CUDA_VISIBLE_DEVICES": "4",
        "HIP_VISIBLE_DEVICES": "2",
    }
    within = variables({"num_gpus": (0,)}, {"ROCR_VISIBLE_DEVICES": "6,7"})
    assert within == {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}
    with pytest.raises(ValueError, match="device 2 of num_gpus is not among CUDA_VISIBLE_DEVICES="):
        variables({"num_gpus": (2,)}, host)
    assert variables({}, host) == {}


def test_parts_of_what_is_no_device_and_whole_devices_are_fine() -> None:
    validated(ActorOptions, {"num_gpus": 2, "num_cpus": 1.5, "resources": {"disk": 2.5, "TPU": 1}})


# --- In a cluster ---------------------------------------------------------------------------------


def deploy(name: str, replicas: int, code: bytes = b"one", **options: Any) -> ask.Request:
    spec = Spec("d", code, {"num_replicas": replicas}, actor_options=options)
    return ask.deploy(name, spec, route=f"/{name}")


def world_with(**total: float) -> World:
    return World(capacity={"num_cpus": 0.0, "memory": 0.0, **total})


def devices(world: World, name: str) -> list[tuple[int, ...]]:
    found = status.applications(world.cluster)[name]["deployments"]["d"]["replicas"]
    return sorted(tuple(each["devices"]["num_gpus"]) for each in found)


def test_replicas_get_devices_of_their_own_and_shares_of_one() -> None:
    world = world_with(num_gpus=4.0)
    world.complete(deploy("whole", 1, num_gpus=2))
    world.complete(deploy("shares", 3, num_gpus=0.5))
    assert devices(world, "whole") == [(0, 1)]
    assert devices(world, "shares") == [(2,), (2,), (3,)]
    shown = world.cluster.state.placement.shown("")["num_gpus"]
    assert shown == {"total": 4.0, "taken": 3.5, "devices": [1, 1, 1, 0.5]}
    world.request(deploy("more", 1, num_gpus=1))
    world.go_on(5)
    found = status.applications(world.cluster)["more"]["message"]
    assert "a replica needs 1 num_gpus, and 0.5 num_gpus of 4 num_gpus is free" in found


def test_what_is_free_in_parts_of_several_devices_is_reported() -> None:
    world = world_with(num_gpus=2.0)
    world.complete(deploy("a", 2, num_gpus=0.6))
    world.request(deploy("b", 1, num_gpus=0.5))
    world.go_on(5)
    found = status.applications(world.cluster)["b"]["message"]
    assert (
        "needs 0.5 num_gpus of whole devices, or of one, and of these is taken: 0.6, 0.6" in found
    )


def test_a_device_is_given_back_by_a_kill_and_the_next_controller_knows_the_rest() -> None:
    world = world_with(num_gpus=2.0)
    world.complete(deploy("a", 2, num_gpus=1))
    assert devices(world, "a") == [(0,), (1,)]
    world.die(world.running("a#d")[0].tag)
    world.converge()
    assert devices(world, "a") == [(0,), (1,)]
    before = {each.tag for each in world.running("a#d")}
    world.boot()
    assert devices(world, "a") == [(0,), (1,)]
    world.converge()
    assert {each.tag for each in world.running("a#d")} == before
    world.complete(ask.undeploy("a"))
    assert world.cluster.state.placement.shown("")["num_gpus"]["devices"] == [0, 0]


# --- Ranks ----------------------------------------------------------------------------------------


def ranks(world: World, name: str = "a") -> list[int]:
    found = status.applications(world.cluster)[name]["deployments"]["d"]["replicas"]
    return [each["rank"] for each in found if each["rank"] is not None]


def by_tag(world: World) -> dict[str, int]:
    replicas = world.cluster.state.backends["a#d"].replicas.values()
    return {each.tag: each.rank.rank for each in replicas if each.rank}


def test_ranks_are_contiguous_and_those_that_stay_keep_theirs() -> None:
    world = World()
    world.complete(deploy("a", 4))
    assert sorted(ranks(world)) == [0, 1, 2, 3]
    kept = by_tag(world)
    gone = next(tag for tag, number in kept.items() if number == 1)
    world.die(gone)
    world.converge()
    now = by_tag(world)
    assert sorted(now.values()) == [0, 1, 2, 3]
    assert [now[tag] for tag in kept if tag != gone] == [n for n in kept.values() if n != 1]
    world.boot()
    assert by_tag(world) == now
    world.complete(deploy("a", 2))
    assert sorted(ranks(world)) == [0, 1]
    assert {
        r.rank.world_size for r in world.cluster.state.backends["a#d"].replicas.values() if r.rank
    } == {2}


def test_ranks_are_unique_at_each_moment_of_an_update() -> None:
    world = World()
    world.complete(deploy("a", 3))
    world.request(deploy("a", 3, b"two"))
    for _ in range(12):
        world.go_on(1)
        assert sorted(ranks(world)) == list(range(len(ranks(world))))
    world.converge()
    assert sorted(ranks(world)) == [0, 1, 2]


def test_a_new_controller_changes_no_rank_before_it_knows_what_runs() -> None:
    world = World()
    world.complete(deploy("a", 3))
    world.request(deploy("a", 2))
    world.flush()  # one drains, and another has its number by now
    recorded = by_tag(world)
    assert sorted(recorded.values()) == [0, 0, 1]
    world.boot()
    world.turn()
    assert by_tag(world) == recorded


def test_a_changed_rank_is_sent_at_once() -> None:
    world = World()
    world.complete(deploy("a", 2))
    world.effects.clear()
    world.complete(deploy("a", 3))
    found = [effect.replica for effect in world.effects if type(effect).__name__ == "CheckReplica"]
    assert len(set(found)) == 2, "those that were there have a larger world"


def test_hosts_have_ranks_too() -> None:

    living = [Replica(f"r{n}", host=host) for n, host in enumerate("abab")]
    rank(living)
    assert [each.rank for each in living] == [
        (0, 0, 0, 4),
        (1, 1, 0, 4),
        (2, 0, 1, 4),
        (3, 1, 1, 4),
    ]
    rank(living[1:])
    assert sorted(chain.from_iterable(each.rank[:1] for each in living[1:] if each.rank)) == [
        0,
        1,
        2,
    ]
