"""Where queries go: exact splits in the long run, and keys that stay where they are."""

import random
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from greenroom.core.routing.tables import BackendTable, EndpointTable
from greenroom.core.routing.tickets import NewQuery
from greenroom.core.routing.traffic import RoutedEndpoint, Split, key_of
from tests.core.routing.queries import Ended, Query, WatchedRouter, only

# What chi-square stays below in 999 of 1,000 fair runs, by degrees of freedom.
CHI_SQUARE_BOUND = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 9: 27.88}
SPLITS = [
    {"a": 0.5, "b": 0.5},
    {"a": 0.99, "b": 0.01},
    {"a": 0.7, "b": 0.2, "c": 0.1},
    {"old": 0.899, "new": 0.001, "newer": 0.1},
    {f"b{i}": 0.1 for i in range(10)},
]
KEYS = [f"customer {i}" for i in range(2_000)]


def chi_square(counts: Counter[str], weights: dict[str, float]) -> float:
    total = sum(counts.values())
    return sum((counts[tag] - total * w) ** 2 / (total * w) for tag, w in weights.items())


def by_key(weights: dict[str, float], keys: list[str] = KEYS) -> list[str]:
    split = Split(weights)
    return [str(split.choose(key)) for key in keys]


def normalised(weights: dict[str, int]) -> dict[str, float]:
    return {tag: weight / sum(weights.values()) for tag, weight in weights.items()}


def test_a_retry_budget_outlives_the_table_of_its_endpoint() -> None:
    table = EndpointTable(name="e", traffic={"b": 1.0})
    before = RoutedEndpoint(table)
    before.budgets["b"].pay_in(5, queries=5)
    assert RoutedEndpoint(table, before).budgets["b"].tokens == 5


# --- By the numbers of queries --------------------------------------------------------------------


@pytest.mark.parametrize("weights", SPLITS, ids=str)
def test_the_split_is_exact_in_the_long_run(weights: dict[str, float]) -> None:
    counts = Counter(by_key(weights, [key_of(Query(n), "caller") for n in range(100_000)]))
    assert chi_square(counts, weights) < CHI_SQUARE_BOUND[len(weights) - 1]


def test_callers_have_keys_of_their_own_and_a_query_that_is_tried_again_keeps_its_key() -> None:
    keys = {key_of(Query(number), caller) for number in (1, 2, -2) for caller in ("one", "two")}
    assert len(keys) == 4
    assert key_of(Query(1, shard_key="user"), "one") == key_of(Query(2, shard_key="user"), "two")


@given(
    weights=st.dictionaries(st.text(max_size=3), st.floats(1e-9, 1.0), min_size=1, max_size=6),
    key=st.text(),
)
def test_every_key_belongs_to_a_backend(weights: dict[str, float], key: str) -> None:
    """Weights sum to 1 within a tolerance only."""
    assert Split(weights).choose(key) in weights


# --- By key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", SPLITS, ids=str)
def test_keys_split_by_the_weights_too(weights: dict[str, float]) -> None:
    counts = Counter(by_key(weights, [f"key {i}" for i in range(6_000)]))
    assert chi_square(counts, weights) < CHI_SQUARE_BOUND[len(weights) - 1]


def test_a_key_leads_to_the_same_backend_in_every_release() -> None:
    """Written down, because a change of it would move the users of whoever upgrades."""
    weights = {"v1": 0.5, "v2": 0.3, "v3": 0.2}
    found = {key: Split(weights).choose(key) for key in ("", "alice", "bob", "é", "\udcff")}
    assert found == {"": "v1", "alice": "v1", "bob": "v3", "\xe9": "v1", "\udcff": "v1"}


def test_the_order_in_which_weights_are_given_changes_nothing() -> None:
    assert by_key({"a": 0.2, "b": 0.8}) == by_key({"b": 0.8, "a": 0.2, "none": 0.0})


def test_two_routers_agree_on_every_key_whatever_chance_and_order_they_have() -> None:
    def places(seed: int, tags: list[str]) -> list[str]:
        made = WatchedRouter(random.Random(seed).random)
        for tag in tags:
            made.set_backend(tag, BackendTable(tag=tag, unavailable="only counted here"), 0.0)
        made.set_endpoint("e", EndpointTable(name="e", traffic=dict.fromkeys(tags, 0.25)), 0.0)
        queries = (Query(number, shard_key=key) for number, key in enumerate(KEYS))
        effects = [effect for query in queries for effect in made.submit(NewQuery("c", query), 0.0)]
        return [ended.backend for ended in only(Ended, effects)]

    tags = ["v1", "v2", "v3", "v4"]
    assert places(1, tags) == places(2, tags[::-1])


def test_names_and_keys_do_not_run_together() -> None:
    one, other = Split({"a": 0.5, "ab": 0.5}), Split({"a": 0.5, "b": 0.5})
    assert [one.choose(key) for key in KEYS] != [other.choose(key) for key in KEYS]


WEIGHTS = st.dictionaries(
    st.sampled_from("abcde"), st.integers(0, 20), min_size=1, max_size=5
).filter(lambda weights: sum(weights.values()) > 0)


@given(before=WEIGHTS, after=WEIGHTS)
def test_a_key_moves_only_to_what_has_grown_in_relation_to_where_it_was(
    before: dict[str, int], after: dict[str, int]
) -> None:
    keys = KEYS[:200]
    was, now = by_key(normalised(before), keys), by_key(normalised(after), keys)
    for old, new in zip(was, now, strict=True):
        if old != new:  # exact, as these are whole numbers
            assert after.get(new, 0) * before[old] > before.get(new, 0) * after.get(old, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 0.1, "b": 0.8, "c": 0.1}, {"a": 0.2, "b": 0.8}),
        ({"a": 0.6, "b": 0.3, "c": 0.1}, {"a": 0.1, "b": 0.3, "c": 0.6}),
        ({f"b{i}": 0.1 for i in range(10)}, {f"b{i}": 1 / 9 for i in range(1, 10)}),
    ],
    ids=str,
)
def test_no_more_keys_move_than_a_rule_without_memory_must(
    before: dict[str, float], after: dict[str, float]
) -> None:
    keys = [f"key {i}" for i in range(6_000)]
    moved = sum(o != n for o, n in zip(by_key(before, keys), by_key(after, keys), strict=True))
    tags = {*before, *after}
    distance = sum(abs(before.get(tag, 0) - after.get(tag, 0)) for tag in tags) / 2
    assert moved / len(keys) < 2 * distance / (1 + distance) + 0.02
