"""A store of format 1, a file per key, is converted when it is opened; nothing of it is lost."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from greenroom.persistence import claims, filesystem
from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import StaleWriterError
from greenroom.persistence.layout import file_name, frame
from greenroom.persistence.log import UNNAMED

from .disks import Death, DyingDisk, SteppingDisk, copy_with_damage, files_under, open_store  # noqa: TID251 - the tests' own folder

LARGE = bytes(range(100))
EXPECTED = {"backend/a": b"3", "backend/b": b"1", "code/c": LARGE, "goal/1": b"new"}
FOLDERS = ("journal", "values", "copies", "corrupt")


@pytest.fixture(name="old")
def make_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a store as the release before this one leaves it, which has done four changes.

    Three are in the journal: one that puts, one that replaces and deletes, one that puts again.
    """
    monkeypatch.setattr(filesystem, "LARGE", 50)
    path = tmp_path / "old"
    root = path / "default"
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    values = {"backend/a": b"1", "backend/b": b"1", "code/c": LARGE, "gone": b"old"}
    for folder, content in (("values", values), ("copies", EXPECTED)):
        for key, value in content.items():
            (root / folder / file_name(key)).write_bytes(frame(value))
    changes = [
        (2, 2, 5, {"goal/1": b"old"}, ()),
        (3, 2, 4, {"backend/a": b"2"}, ("gone",)),
        (4, 2, 4, {"backend/a": b"3", "goal/1": b"new"}, ()),
    ]
    for change in changes:
        payload = pickle.dumps(change, protocol=5)
        (root / "journal" / f"{change[0]:012d}").write_bytes(frame(payload))
    (root / "head").write_bytes(frame(b"4 4"))
    for name, content in (
        ("epoch", frame(b"7 token id")),
        ("format", b"greenroom store format 1\n"),
    ):
        (root / name).write_bytes(content)
        (root / f"{name}.copy").write_bytes(content)
    return path


def test_a_reader_reads_it_and_changes_nothing(old: Path) -> None:
    before = files_under(old)
    reader = open_store(old, read_only=True)
    assert reader.load() == EXPECTED
    assert reader.load("backend/") == {"backend/a": b"3", "backend/b": b"1"}
    assert files_under(old) == before


def test_a_writer_converts_it_and_goes_on_with_its_epoch_and_id(old: Path) -> None:
    store = open_store(old)
    assert (store.epoch, store.store_id) == (8, "id")
    assert store.load() == EXPECTED
    assert not store.lost
    store.apply({"backend/b": b"2"}, ["goal/1"])
    store.close()
    assert (old / "default" / "format").read_text() == "greenroom store format 2\n"
    assert {path.name for path in (old / "default").iterdir()} == {
        *("change", "lock", "large", "epoch", "epoch.copy", "format", "format.copy"),
        *("log-0000000008-000001", "log-0000000008-000001.copy"),
    }
    store = open_store(old)
    assert store.load() == {"backend/a": b"3", "backend/b": b"2", "code/c": LARGE}
    store.close()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["flipped", "removed"])
def test_whatever_becomes_of_one_file_nothing_is_lost(
    old: Path, damage: Callable[[Path], None]
) -> None:
    names = [file.relative_to(old) for file in old.rglob("*") if file.is_file()]
    assert len(names) == 8 + 3 + 1 + 4
    for name in names:
        path = old.with_name("damaged")
        copy_with_damage(old, path, [name], damage)
        store = open_store(path)
        assert store.load() == EXPECTED, name
        assert not store.lost, name
        assert store.epoch == 8, name
        store.close()
        shutil.rmtree(path)


def test_what_is_damaged_twice_or_missing_without_a_trace_is_told(old: Path) -> None:
    for folder in ("values", "copies"):
        flip(old / "default" / folder / file_name("backend/b"))
        (old / "default" / folder / file_name("code/c")).unlink()
    (old / "default" / "corrupt" / "1-1.note").write_text("history/3 is given up")
    for _ in range(2):
        store = open_store(old)
        assert store.load() == {"backend/a": b"3", "goal/1": b"new"}
        assert store.lost.keys() == {"backend/b", UNNAMED}
        assert "1 of 4 records are missing without a trace" in store.lost[UNNAMED]
        assert "history/3 is given up" in store.lost[UNNAMED]
        store.close()


@pytest.mark.parametrize("cuts_power", [False, True], ids=["a kill", "a power cut"])
def test_who_dies_while_converting_it_leaves_one_of_both_formats_whole(
    old: Path, cuts_power: bool
) -> None:
    for step in count():
        path = old.with_name(f"died-{step}")
        shutil.copytree(old, path)
        disk = DyingDisk(path, step)
        try:
            open_store(path, disk=disk).close()
        except Death:
            died = True
        else:
            died = False
        if cuts_power and died:
            disk.cut_power(lambda folder: True)
        assert open_store(path, read_only=True).load() == EXPECTED, step
        store = open_store(path)
        assert (store.load(), dict(store.lost)) == (EXPECTED, {}), step
        store.close()
        assert not (path / "default" / "values").exists()
        shutil.rmtree(path)
        if not died:
            assert step > 10
            return


def test_of_two_that_convert_it_at_once_the_later_one_has_all(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming: list[Path] = []

    @contextmanager
    def noted_lock(path: Path) -> Iterator[None]:
        """Tell who else is kept out: the lock is of the process, and both are in this one."""
        claiming.append(path)
        try:
            yield
        finally:
            claiming.remove(path)

    monkeypatch.setattr(claims, "change_lock", noted_lock)
    for step in count():
        path = old.with_name(f"two-{step}")
        shutil.copytree(old, path)
        others: list[FileStore] = []

        class Superseded(SteppingDisk):
            def step(self, number: int) -> None:
                if number >= step and not others and not claiming:  # noqa: B023 - in this turn
                    others.append(open_store(path, after=FileStore.look(path).epoch))  # noqa: B023

        with suppress(StaleWriterError):
            first = open_store(path, after=7, disk=Superseded())
            if not others:
                assert step > 10
                return
            first.apply({"a": b"1"})
            pytest.fail(f"superseded at step {step}, it goes on")
        (other,) = others
        assert (other.load(), dict(other.lost)) == (EXPECTED, {}), step
        other.apply({"b": b"2"})
        other.close()
        assert open_store(path, read_only=True).load() == {**EXPECTED, "b": b"2"}, step
