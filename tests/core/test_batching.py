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
    batches.add("a1", "a", 0.0)
    batches.add("b1", "b", 0.5)
    assert (batches.due_at(), batches.take(0.9)) == (1.0, None)
    assert batches.take(2.0) == ["a1"]
    assert (batches.due_at(), batches.take(2.0)) == (None, None)  # no place
    batches.ended()
    assert (batches.due_at(), batches.take(2.0)) == (1.5, ["b1"])


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
    batches.ended()
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
