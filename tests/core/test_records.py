"""Records by name: what is assigned or deleted is what is saved."""

from __future__ import annotations

import pytest

from greenroom.core.records import Changes, Records


def test_what_was_loaded_is_not_saved_again() -> None:
    changes = Changes()
    records = Records("token", {"a": "1"}, changes)
    assert records == {"a": "1"}
    assert not changes


def test_every_way_to_change_them_is_saved() -> None:
    changes = Changes()
    records = Records("token", {"a": "1", "b": "2", "c": "3"}, changes)
    records["d"] = "4"
    records.update({"a": "5"})
    records.setdefault("e", "6")
    del records["b"]
    assert records.pop("c") == "3"
    assert records == {"a": "5", "d": "4", "e": "6"}
    assert changes.puts == {("token", name): record for name, record in records.items()}
    assert changes.deletes == {("token", "b"), ("token", "c")}


def test_deleting_what_is_not_there_saves_nothing() -> None:
    changes = Changes()
    records: Records[str] = Records("token", {}, changes)
    with pytest.raises(KeyError):
        del records["a"]
    assert records.pop("a", None) is None
    assert not changes
