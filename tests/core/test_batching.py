import pytest

from greenroom.core.batching import Batches


def drained(batches: Batches, now: float) -> list[list]:
    taken = []
    while (batch := batches.take(now)) is not None:
        taken.append(batch)
    return taken


def test_only_items_of_one_group_share_a_batch() -> None:
    batches: Batches[str] = Batches(2, 1.0, max_batches=9)
    for at, item in enumerate(["a1", "b1", "a2", "a3", "b2"]):
        batches.add(item, item[0], float(at))
    assert drained(batches, 4.0) == [["a1", "a2"], ["b1", "b2"], ["a3"]]


def test_the_group_whose_first_item_came_first_is_next_and_none_before_its_time() -> None:
    batches: Batches[str] = Batches(2, 1.0)
    for at, item in ((0.0, "a1"), (0.1, "a2"), (0.2, "a3"), (0.5, "b1")):
        batches.add(item, item[0], at)
    assert (batches.due_at(), batches.take(0.1)) == (0.0, ["a1", "a2"])
    assert (batches.due_at(), batches.take(1.4)) == (1.5, None)  # no place for group a
    assert drained(batches, 2.0) == [["b1"]]
    assert batches.due_at() is None
    batches.ended("a")
    assert (batches.due_at(), batches.take(2.0)) == (1.2, ["a3"])


def test_batches_of_several_groups_run_at_once_and_of_each_no_more_than_the_limit() -> None:
    batches: Batches[str] = Batches(1, 0.0)
    for number, item in enumerate(["a1", "a2", "b1", "c1", "c2"]):
        batches.add(item, item[0], float(number))
    assert drained(batches, 9.0) == [["a1"], ["b1"], ["c1"]]
    batches.ended("c")
    assert drained(batches, 9.0) == [["c2"]]
    for group in "abc":
        batches.ended(group)
    assert drained(batches, 9.0) == [["a2"]]
    batches.ended("a")
    assert batches.is_idle


def test_what_is_removed_makes_room_for_what_comes_next() -> None:
    batches: Batches[int] = Batches(10, 1.0, size_of=sum)
    for item in (6, 5, 4):
        batches.add(item, None, 0.0)
    assert batches.due_at() == 0.0  # 6 is all that fits
    batches.remove(5, None)
    batches.remove(5, None)  # again, which is harmless
    assert (batches.due_at(), batches.take(0.0)) == (0.0, [6, 4])


def test_lower_limits_hold_for_what_waits_and_refuse_what_fits_no_more() -> None:
    batches: Batches[int] = Batches(10, 100.0, size_of=sum)
    for item in (3, 4, 2):
        batches.add(item, None, 0.0)
    batches.set_limits(3, 1.0)
    assert batches.take(0.0) == [3]
    batches.ended(None)
    [(item, problem)] = batches.refused
    assert (item, str(problem).partition(";")[0]) == (
        4,
        "an item of size 4 is larger than max_batch_size=3",
    )
    assert (batches.take(0.5), batches.take(1.0)) == (None, [2])


@pytest.mark.parametrize("size", [None, "2", float("nan"), 1j])
def test_a_size_that_is_no_number_refuses_the_item(size: object) -> None:
    batches: Batches[int] = Batches(10, 1.0, size_of=lambda _: size)
    batches.add(1, None, 0.0)
    assert "which is no number" in str(batches.refused[0][1])
    assert batches.due_at() is None
