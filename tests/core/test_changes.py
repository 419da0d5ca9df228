"""Changes that were not saved go with the next ones."""

from __future__ import annotations

from greenroom.core.changes import Changes


def changes(**puts: object) -> Changes:
    made = Changes()
    for name, record in puts.items():
        made.put("listener", name, record)
    return made


def test_later_changes_go_over_earlier_ones() -> None:
    earlier, later = changes(one=1, two=2, three=None), changes(one=None, three=3)
    both = earlier.precede(later)
    assert both.puts == {("listener", "two"): 2, ("listener", "three"): 3}
    assert both.deletes == {("listener", "one")}
    assert earlier.puts == {("listener", "one"): 1, ("listener", "two"): 2}


def test_whether_they_are_all_of_one_kind_is_known() -> None:
    assert changes(one=1, two=None).concern_only("listener")
    assert not changes(one=1).concern_only("backend")
    mixed = changes(one=1)
    mixed.put("backend", "b", 1)
    assert not mixed.concern_only("listener")
    with_code = changes(one=1)
    with_code.put_code("digest", b"code")
    assert not with_code.concern_only("listener")
    assert not Changes().concern_only("listener")
