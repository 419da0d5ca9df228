"""Which streams of a continuous batch are live, and which wait."""

from __future__ import annotations

from hypothesis import given, strategies as st

from greenroom.core.batching import ContinuousBatch


def test_places_are_given_in_the_order_of_coming():
    batch = ContinuousBatch(max_size=2, max_waiting=2)
    assert all(batch.add(each, None) for each in "abcd")
    assert not batch.add("e", None)
    assert batch.admit() == ["a", "b"]
    assert batch.admit() == []
    batch.remove("a")
    batch.remove("never there")
    assert batch.admit() == ["c"]
    assert batch.live == ["b", "c"]
    assert batch.waiting == 1


def test_what_is_past_its_deadline_leaves_from_wherever_it_is():
    batch = ContinuousBatch(max_size=1, max_waiting=5)
    for name, deadline_at in {"a": 5.0, "b": 3.0, "c": None}.items():
        batch.add(name, deadline_at)
    batch.admit()
    assert batch.expire(2.9) == []
    assert batch.expire(3.0) == ["b"]
    assert batch.expire(9.0) == ["a"]
    assert batch.admit() == ["c"]
    assert batch.expire(1e9) == []


@given(st.lists(st.sampled_from(["add", "admit", "remove", "expire"]), max_size=60), st.randoms())
def test_no_stream_is_lost_or_overtaken(events, random):
    batch: ContinuousBatch[int] = ContinuousBatch(max_size=3, max_waiting=4)
    here: dict[int, float] = {}
    admitted: list[int] = []
    for number, event in enumerate(events):
        if event == "add":
            deadline_at = number + random.randrange(1, 30)
            if batch.add(number, deadline_at):
                here[number] = deadline_at
            else:
                assert batch.waiting >= 4
        elif event == "admit":
            admitted += batch.admit()
            assert not batch.waiting or len(batch.live) == 3
        elif event == "remove" and here:
            gone = random.choice(list(here))
            batch.remove(gone)
            del here[gone]
        elif event == "expire":
            for late in batch.expire(number):
                assert here.pop(late) <= number
        assert len(batch.live) <= 3
        assert batch.waiting <= 4 + 3
        assert len(batch.live) + batch.waiting == len(here)
    assert admitted == sorted(admitted)
