"""Leases in a world of two clocks: there are never two leaders, and soon there is one."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from greenroom.core.cluster.leader_lease import (
    BID_FRESH_S,
    LOOK_S,
    OVER_S,
    PAUSE_S,
    RENEW_S,
    SETTLED_S,
    TERM_S,
    Bid,
    Contest,
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

    def look(self, silent_s: float = LONG) -> bool:
        return self.succession.look(self.lease, self.now + self.skew, silent_s)


pauses = st.lists(
    st.tuples(st.sampled_from(["renew", "look", "both"]), st.floats(0.01, 6.0)), max_size=60
)


@given(pauses, st.floats(0, 1e6), st.booleans())
def test_a_candidate_never_takes_over_within_the_term_of_the_leader(
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


def test_a_dead_leader_is_succeeded_within_the_term_and_a_bit() -> None:
    assert TERM_S < takes_over_after(World(), LONG) < OVER_S + 2 * LOOK_S < 3.5


def test_a_leader_that_is_heard_and_does_not_renew_is_given_twice_the_time() -> None:
    assert takes_over_after(World(), 0.1) > 2 * OVER_S


def test_a_candidate_that_was_stopped_itself_begins_to_wait_anew() -> None:
    world = World()
    assert not world.look()
    world.now += 30
    assert not world.look()
    world.now += LOOK_S
    assert not world.look()
    assert takes_over_after(world, LONG) > OVER_S - LOOK_S


def given_up(heir: str, leaves: bool = False) -> Lease:
    return Lease(1, "a", 9, heir=heir, leaves=leaves)


def test_a_lease_that_is_given_up_goes_to_its_heir_at_once_and_to_others_if_that_is_gone() -> None:
    assert Succession("b").look(given_up("b"), 0.0, LONG)
    world = World()
    world.lease = given_up("c")
    assert OVER_S < takes_over_after(world, 0.0) <= OVER_S + 2 * LOOK_S
    former = World()
    former.succession = Succession("a")
    former.lease = given_up("b")
    assert takes_over_after(former, LONG) > OVER_S


def test_a_clock_of_the_store_does_not_let_others_come_before_the_heir() -> None:
    assert Succession("b").look(given_up("b"), 0.0, LONG, is_over=True)
    former = Succession("a")
    assert not former.look(given_up("b"), 0.0, LONG, is_over=True)
    assert not former.look(given_up("b"), PAUSE_S, LONG, is_over=True)
    looks = [former.look(given_up("b"), n * LOOK_S, LONG, is_over=True) for n in range(5, 20)]
    assert looks == [n * LOOK_S > OVER_S for n in range(5, 20)]


class Bidders:
    """Hosts that bid, and a leader that has led for long."""

    def __init__(self) -> None:
        self.now = 100.0
        self.contest = Contest(0.0)
        self.number = 0

    def heir(self, reach: int, **reaches: int) -> str:
        """Let all bid anew, and the leader look."""
        self.now += RENEW_S
        self.number += 1
        bids = {name: Bid(self.number, each) for name, each in reaches.items()}
        return self.contest.heir(bids, reach, self.now)


def test_a_leader_gives_way_to_the_host_that_reaches_most_and_not_in_a_tie() -> None:
    assert Bidders().heir(0, b=1) == ""  # seen once; it may have been left there
    bidders = Bidders()
    bidders.heir(0, b=0, c=0)
    assert bidders.heir(0, b=0, c=0) == ""  # two hosts, and the link between them is cut
    assert bidders.heir(1, b=1, c=1) == ""
    assert bidders.heir(0, b=1, c=1) == "b"
    assert bidders.heir(2, b=1, c=3) == "c"


def test_bids_that_change_no_more_count_for_nothing() -> None:
    bidders = Bidders()
    bidders.heir(5, b=1)
    assert bidders.heir(5, b=1) == ""
    left = {"b": Bid(bidders.number, 1)}
    assert bidders.contest.heir(left, 0, bidders.now + BID_FRESH_S) == "b"
    assert bidders.contest.heir(left, 0, bidders.now + BID_FRESH_S + 0.01) == ""
    assert bidders.contest.heir({}, 0, bidders.now + LONG) == ""


def test_a_leader_that_has_just_begun_does_not_give_way() -> None:
    bidders = Bidders()
    bidders.contest = Contest(bidders.now)
    while bidders.now < 100.0 + SETTLED_S - 2 * RENEW_S:
        assert bidders.heir(0, b=3) == ""
    bidders.now += RENEW_S
    assert bidders.heir(0, b=3) == "b"


pairs = st.sampled_from([(one, other) for other in range(5) for one in range(other)])


@settings(max_examples=40)
@given(st.lists(st.frozensets(pairs), min_size=1, max_size=3), st.integers(3, 5))
def test_whatever_links_are_cut_one_leads_and_soon_no_bid_is_higher(
    cuts: list[frozenset[tuple[int, int]]], count: int
) -> None:
    """Of the hosts the first three may lead; each cut stays for as long as three of them take."""
    places = {"a": 0, "b": 1, "c": 2}
    successions = {name: Succession(name) for name in places}
    lease, contest, now = Lease(1, "a"), Contest(0.0), 0.0

    def reach(place: int, cut: frozenset[tuple[int, int]]) -> int:
        others = set(range(count)) - {place}
        return sum((min(place, other), max(place, other)) not in cut for other in others)

    def bids(cut: frozenset[tuple[int, int]]) -> dict[str, Bid]:
        return {
            name: Bid(int(now / LOOK_S), reach(place, cut))
            for name, place in places.items()
            if tuple(sorted((place, places[lease.holder]))) in cut
        }

    for cut in cuts:
        until = now + 3 * (SETTLED_S + OVER_S)
        while now < until:
            now += LOOK_S
            leading = [name for name, each in successions.items() if each.look(lease, now, LONG)]
            assert leading == [lease.heir or lease.holder]
            if lease.heir:
                lease = Lease(lease.epoch + 1, lease.heir)
                contest = Contest(now)
            heir = contest.heir(bids(cut), reach(places[lease.holder], cut), now)
            lease = lease._replace(number=lease.number + 1, heir=heir)
        assert not lease.heir
        led = reach(places[lease.holder], cut)
        assert all(bid.reach <= led for bid in bids(cut).values())


def test_where_no_host_ever_led_any_begins() -> None:
    assert Succession("a").look(Lease(), 0.0, LONG)


def test_a_host_that_holds_the_lease_leads_on_at_once() -> None:
    assert Succession("b").look(Lease(4, "b", 17), 0.0, LONG)


def test_a_tenure_counts_from_before_its_renewal_until_it_is_given_up() -> None:
    tenure = Tenure()
    assert tenure.is_over(0.0)
    tenure.renewed(10.0)
    assert not tenure.is_over(10.0 + TERM_S - 0.001)
    assert tenure.is_over(10.0 + TERM_S)
    tenure.end()
    assert tenure.is_over(10.0)
