"""Leases in a world of two clocks: nobody leads beside another, and somebody leads soon."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from understudy.core.leases import (
    LOOK_S,
    OVER_S,
    RANK_S,
    RENEW_S,
    TERM_S,
    Allegiance,
    Lease,
    Succession,
    Tenure,
)

LONG = 100.0


class World:
    """One leader, a store, and one who looks; ``skew`` is between their clocks."""

    def __init__(self, skew: float = 0.0, rank: int = 1) -> None:
        self.now, self.skew = 0.0, skew
        self.tenure = Tenure()
        self.succession = Succession("b", rank)
        self.lease = Lease(1, "a", 0)
        self.renew()

    def renew(self) -> None:
        self.tenure.renewed(self.now)
        self.lease = self.lease._replace(number=self.lease.number + 1)

    def look(self, silent_s: float = LONG) -> bool:
        return self.succession.look(self.lease, self.now + self.skew, silent_s)


pauses = st.lists(
    st.tuples(st.sampled_from(["renew", "look", "both"]), st.floats(0.01, 6.0)), max_size=60
)


@given(pauses, st.floats(0, 1e6), st.booleans())
def test_who_may_take_over_never_does_so_within_the_term_of_the_other(
    steps: list[tuple[str, float]], skew: float, is_silent: bool
) -> None:
    world = World(skew)
    for who, pause_s in steps:
        world.now += pause_s
        if who != "look" and not world.tenure.is_over(world.now):
            world.renew()
        if who != "renew" and world.look(LONG if is_silent else 0.0):
            assert world.tenure.is_over(world.now)
            return


def test_no_takeover_while_the_leader_renews_however_long_nothing_else_is_heard() -> None:
    world = World()
    for _ in range(1000):
        world.now += LOOK_S
        if _ % 3 == 0:
            world.renew()
        assert not world.look()
    assert RENEW_S < 3 * LOOK_S


def takes_over_after(world: World, silent_s: float) -> float:
    begun = world.now
    world.look(silent_s)
    while not world.look(silent_s):
        world.now += LOOK_S
    return world.now - begun


def test_a_dead_leader_is_succeeded_within_the_term_and_a_bit_in_the_order_of_leaders() -> None:
    first, second = takes_over_after(World(rank=1), LONG), takes_over_after(World(rank=2), LONG)
    assert TERM_S < first < OVER_S + RANK_S + 2 * LOOK_S < 4.1
    assert second > first


def test_a_leader_that_is_heard_and_does_not_renew_is_given_twice_the_time() -> None:
    assert takes_over_after(World(), 0.1) > 2 * OVER_S


def test_who_was_stopped_itself_begins_to_wait_anew() -> None:
    world = World()
    assert not world.look()
    world.now += 30
    assert not world.look()
    world.now += LOOK_S
    assert not world.look()
    assert takes_over_after(world, LONG) > OVER_S - LOOK_S


def test_where_nobody_ever_led_only_the_first_does() -> None:
    assert Succession("a", 0).look(Lease(), 0.0, LONG)
    second = Succession("b", 1)
    assert not any(second.look(Lease(), now * LOOK_S, LONG) for now in range(1000))


def test_a_host_whose_own_controller_died_leads_on_at_once() -> None:
    assert Succession("b", 1).look(Lease(4, "b", 17), 0.0, LONG)


def test_a_tenure_counts_from_before_its_renewal() -> None:
    tenure = Tenure()
    assert tenure.is_over(0.0)
    tenure.renewed(10.0)
    assert not tenure.is_over(10.0 + TERM_S - 0.001)
    assert tenure.is_over(10.0 + TERM_S)


@given(st.lists(st.integers(0, 9)))
def test_orders_of_an_earlier_epoch_are_refused_from_the_first_later_one_on(
    epochs: list[int],
) -> None:
    allegiance = Allegiance()
    taken = [epoch for epoch in epochs if allegiance.accepts(epoch) and epoch]
    assert taken == sorted(taken)
    assert allegiance.accepts(0)
    assert taken == [
        epoch for at, epoch in enumerate(epochs) if epoch and epoch >= max(epochs[: at + 1])
    ]
