"""Leases in a world of two clocks: there are never two leaders, and soon there is one."""

from __future__ import annotations

from hypothesis import given, strategies as st

from greenroom.core.cluster.leader_lease import (
    CHECK_S,
    OVER_S,
    PAUSE_S,
    TERM_S,
    Lease,
    Succession,
    Tenure,
)

LONG = 100.0


class World:
    """A leader, a store, and a candidate that looks at it; ``skew`` is between their clocks."""

    def __init__(self, skew: float = 0.0) -> None:
        self.now, self.skew = 0.0, skew
        self.tenure = Tenure()
        self.succession = Succession("b")
        self.lease = Lease(1, "a", 0)
        self.renew()

    def renew(self) -> None:
        self.tenure.renewed(self.now)
        self.lease = self.lease._replace(number=self.lease.number + 1)

    def check(self, silent_s: float = LONG) -> bool:
        return self.succession.check(self.lease, self.now + self.skew, silent_s)


pauses = st.lists(
    st.tuples(st.sampled_from(["renew", "check", "both"]), st.floats(0.01, 6.0)), max_size=60
)


@given(pauses, st.floats(0, 1e6), st.booleans())
def test_a_candidate_never_takes_over_within_the_term_of_the_leader(
    steps: list[tuple[str, float]], skew: float, is_silent: bool
) -> None:
    world = World(skew)
    for who, pause_s in steps:
        world.now += pause_s
        if who != "check" and not world.tenure.is_over(world.now):
            world.renew()
        if who != "renew" and world.check(LONG if is_silent else 0.0):
            assert world.tenure.is_over(world.now)
            return


def takes_over_after(world: World, silent_s: float) -> float:
    begun = world.now
    world.check(silent_s)
    while not world.check(silent_s):
        world.now += CHECK_S
    return world.now - begun


def test_a_dead_leader_is_succeeded_within_the_term_and_a_bit() -> None:
    assert TERM_S < takes_over_after(World(), LONG) < OVER_S + 2 * CHECK_S < 3.5


def test_a_leader_that_is_heard_and_does_not_renew_is_given_twice_the_time() -> None:
    assert takes_over_after(World(), 0.1) > 2 * OVER_S


def test_a_candidate_that_was_stopped_itself_begins_to_wait_anew() -> None:
    world = World()
    assert not world.check()
    world.now += 30
    assert not world.check()
    world.now += CHECK_S
    assert not world.check()
    assert takes_over_after(world, LONG) > OVER_S - CHECK_S


def released(heir: str, leaves: bool = False) -> Lease:
    return Lease(1, "a", 9, heir=heir, leaves=leaves)


def test_a_lease_that_is_released_goes_to_its_heir_at_once_and_to_others_if_that_is_gone() -> None:
    assert Succession("b").check(released("b"), 0.0, LONG)
    world = World()
    world.lease = released("c")
    assert OVER_S < takes_over_after(world, 0.0) <= OVER_S + 2 * CHECK_S
    former = World()
    former.succession = Succession("a")
    former.lease = released("b")
    assert takes_over_after(former, LONG) > OVER_S


def test_a_clock_of_the_store_does_not_let_others_come_before_the_heir() -> None:
    assert Succession("b").check(released("b"), 0.0, LONG, is_over=True)
    former = Succession("a")
    assert not former.check(released("b"), 0.0, LONG, is_over=True)
    assert not former.check(released("b"), PAUSE_S, LONG, is_over=True)
    checks = [former.check(released("b"), n * CHECK_S, LONG, is_over=True) for n in range(5, 40)]
    assert checks == [n * CHECK_S > 2 * OVER_S for n in range(5, 40)]


def test_where_no_host_ever_led_any_begins() -> None:
    assert Succession("a").check(Lease(), 0.0, LONG)


def test_a_host_that_holds_the_lease_leads_on_at_once() -> None:
    assert Succession("b").check(Lease(4, "b", 17), 0.0, LONG)


def test_a_tenure_counts_from_before_its_renewal() -> None:
    tenure = Tenure()
    assert tenure.is_over(0.0)
    tenure.renewed(10.0)
    assert not tenure.is_over(10.0 + TERM_S - 0.001)
    assert tenure.is_over(10.0 + TERM_S)
