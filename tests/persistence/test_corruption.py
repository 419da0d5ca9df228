"""Damage on disk: of one file nothing is lost, of more than one what is lost is named."""

import logging
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from greenroom.persistence import filesystem
from greenroom.persistence.filesystem import UNNAMED, FileStore
from greenroom.persistence.kv import CorruptValueError, OtherFormatError
from greenroom.persistence.layout import frame, key_of

from .disks import Death, DyingDisk, copy_with_damage, files_under, open_store, state_of  # noqa: TID251 - the tests' own folder

VALUE = b"the value"
WHOLE = frame(VALUE)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


DAMAGES: list[Callable[[Path], None]] = [flip, truncate, empty, zero, Path.unlink]


@pytest.fixture(name="store")
def make_store(tmp_path: Path) -> Iterator[FileStore]:
    store = open_store(tmp_path)
    store.apply({"a": VALUE, "b": b"sound"})
    yield store
    store.close()


@pytest.fixture(name="root")
def find_root(store: FileStore, tmp_path: Path) -> Path:
    return tmp_path / "default"


def settle(tmp_path: Path) -> None:
    """Have the values hold all, and the journal nothing that would say it once more."""
    for path in (tmp_path / "default" / "journal").iterdir():
        path.unlink()
    open_store(tmp_path).close()


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def damaged() -> Iterator[bytes]:
    for length in range(len(WHOLE)):
        yield WHOLE[:length]
    for bit in range(len(WHOLE) * 8):
        flipped = bytearray(WHOLE)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    yield WHOLE + b"\0"
    yield WHOLE + WHOLE
    yield bytes(len(WHOLE))


def newer(version: int = 3) -> bytes:
    header = struct.pack(">4sHQ", b"GRNR", version, len(VALUE))
    return header + struct.pack(">I", zlib.crc32(VALUE, zlib.crc32(header))) + VALUE


# --- One file -------------------------------------------------------------------------------------


def test_every_torn_flipped_or_lengthened_value_is_repaired_when_it_is_read(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    settle(tmp_path)
    store = open_store(tmp_path)
    for content in damaged():
        (root / "values" / "a").write_bytes(content)
        assert store.get("a") == VALUE
        assert (root / "values" / "a").read_bytes() == WHOLE
    (root / "values" / "a").unlink()
    assert store.get("a") == VALUE
    assert (root / "values" / "a").read_bytes() == WHOLE
    assert not store.lost
    store.close()


HISTORY: list[tuple[dict[str, bytes], list[str]]] = [
    ({"a": b"1", "b": b"1", "c": b"1", "d": b"1"}, []),
    ({"a": b"2"}, ["b"]),
    ({"code": bytes(5000), "e": b"1"}, []),
    ({"c": b"3"}, []),
    ({}, ["d"]),
    ({"f": b"1", "b": b"4"}, ["e"]),
    ({"a": b"5"}, ["f"]),
]


@pytest.fixture(name="template", params=[1, 3, 32], ids=lambda kept: f"journal of {kept}")
def make_template(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setattr(filesystem, "KEPT_CHANGES", request.param)
    template = tmp_path / "template"
    for _ in range(2):
        store = open_store(template)
        for puts, deletes in HISTORY:
            store.apply(puts, deletes)
        store.close()
    return template


EXPECTED = {"a": b"5", "b": b"4", "c": b"3", "code": bytes(5000)}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_no_single_file_loses_anything_whatever_becomes_of_it(
    template: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for file in files_of(template):
        path = template.with_name("damaged")
        name = str(file.relative_to(template))
        copy_with_damage(template, path, [name], damage)
        assert state_of(open_store(path, read_only=True)) == EXPECTED, name
        store = open_store(path)
        assert state_of(store) == EXPECTED, name
        assert not store.lost, name
        assert store.epoch == 3, name
        store.apply({"g": b"1"}, ["a"])
        store.close()
        caplog.clear()
        store = open_store(path)
        after = {key: value for key, value in EXPECTED.items() if key != "a"} | {"g": b"1"}
        assert state_of(store) == after, name
        assert not caplog.records, f"{name}: repaired at once"
        store.close()
        shutil.rmtree(path)


@pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "removed"])
def test_a_file_that_is_damaged_after_a_kill_loses_no_more_than_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(filesystem, "KEPT_CHANGES", 2)
    template = tmp_path / "template"
    store = open_store(template)
    for puts, deletes in HISTORY[:-1]:
        store.apply(puts, deletes)
    before = state_of(store)
    store.close()
    for step in range(100):
        killed = tmp_path / "killed"
        shutil.copytree(template, killed)
        disk = DyingDisk(killed, float("inf"))
        store = open_store(killed, disk=disk)
        disk.die_at = disk.steps + step
        try:
            store.apply(*HISTORY[-1])
        except Death:
            died = True
        else:
            died = False
        store.close()
        for file in files_of(killed):
            path = tmp_path / "damaged"
            name = str(file.relative_to(killed))
            copy_with_damage(killed, path, [name], damage)
            store = open_store(path)
            allowed = [before, EXPECTED] if died else [EXPECTED]
            assert state_of(store) in allowed, f"{name}, died at step {step}"
            # Without the head nothing tells a change cut short from one whose entry is gone.
            assert not store.lost or name == "default/head", f"{name}, died at step {step}"
            store.close()
            shutil.rmtree(path)
        shutil.rmtree(killed)
        if not died:
            return


def test_what_was_repaired_is_logged(
    store: FileStore, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.close()
    settle(tmp_path)
    (root / "values" / "a").write_bytes(WHOLE[:-1])
    with caplog.at_level(logging.WARNING):
        open_store(tmp_path).close()
    assert "Repaired in the store" in caplog.text
    assert "values/a is damaged: holds 8 bytes of value, its header says 9" in caplog.text


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["flipped", "removed"])
def test_a_writer_whose_epoch_file_is_damaged_goes_on_and_repairs_it(
    store: FileStore, root: Path, damage: Callable[[Path], None]
) -> None:
    sound = (root / "epoch").read_bytes()
    damage(root / "epoch")
    assert FileStore.look(root.parent)[0] == 1
    store.apply({"a": b"2"})
    assert (root / "epoch").read_bytes() == sound


def test_what_is_damaged_twice_is_named_at_every_opening_until_it_is_put_or_deleted(
    store: FileStore, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.close()
    settle(tmp_path)
    for folder in ("values", "copies"):
        truncate(root / folder / "a")
        truncate(root / folder / "b")
    for _ in range(2):
        caplog.clear()
        store = open_store(tmp_path)
        assert store.list() == ["a", "b"]
        assert store.lost.keys() == {"a", "b"}
        assert "its header says 9" in store.lost["a"]
        assert caplog.text.count("Lost in the store") == 2
        with pytest.raises(CorruptValueError, match=r"'a' is lost: .*values/a is damaged"):
            store.get("a")
        store.close()
    store = open_store(tmp_path)
    store.apply({"a": b"again"}, ["b"])
    assert not store.lost
    store.close()
    store = open_store(tmp_path)
    assert (state_of(store), dict(store.lost)) == ({"a": b"again"}, {})
    store.close()


def test_what_is_damaged_twice_while_the_store_is_open_is_named(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    settle(tmp_path)
    store = open_store(tmp_path)
    for folder in ("values", "copies"):
        (root / folder / "a").unlink()
    with pytest.raises(CorruptValueError, match=r"'a' is lost: .*is missing and .*is missing"):
        store.get("a")
    assert store.lost.keys() == {"a"}
    assert store.get("b") == b"sound"
    store.close()


def test_what_is_missing_twice_is_missed_until_a_person_removes_the_note(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    settle(tmp_path)
    for folder in ("values", "copies"):
        (root / folder / "a").unlink()
    for _ in range(3):
        store = open_store(tmp_path)
        assert "1 of 2 records are missing without a trace" in store.lost[UNNAMED]
        assert state_of(store) == {"b": b"sound"}
        store.apply({"c": b"1"})
        store.apply({}, ["c"])
        store.close()
    (note,) = (root / "corrupt").iterdir()
    note.unlink()
    store = open_store(tmp_path)
    assert not store.lost
    store.close()


@pytest.mark.parametrize("template", [3], indirect=True, ids=["journal of 3"])
@pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "removed"])
def test_of_any_two_files_nothing_is_lost_unseen(
    template: Path, damage: Callable[[Path], None]
) -> None:
    for two in combinations(files_of(template), 2):
        path = template.with_name("damaged")
        names = [str(each.relative_to(template)) for each in two]
        copy_with_damage(template, path, names, damage)
        try:
            store = open_store(path)
        except CorruptValueError:
            assert names[0].endswith(("epoch", "format")), names
        else:
            found = {key: store.get(key) for key in store.list() if key not in store.lost}
            assert found == EXPECTED or store.lost, names
            store.close()
        shutil.rmtree(path)


def test_a_reader_names_damage_and_leaves_it_in_place(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    settle(tmp_path)
    truncate(root / "values" / "a")
    truncate(root / "copies" / "b")
    before = files_under(tmp_path)
    reader = open_store(tmp_path, read_only=True)
    assert state_of(reader) == {"a": VALUE, "b": b"sound"}
    truncate(root / "copies" / "a")
    before = files_under(tmp_path)
    with pytest.raises(CorruptValueError, match="values/a is damaged"):
        reader.get("a")
    assert files_under(tmp_path) == before


def test_a_damaged_epoch_file_and_copy_need_a_person(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    truncate(root / "epoch")
    truncate(root / "epoch.copy")
    for _ in range(2):
        with pytest.raises(CorruptValueError, match="the next epoch is unknown"):
            open_store(tmp_path)
    (root / "epoch").unlink()
    (root / "epoch.copy").unlink()
    reopened = open_store(tmp_path)
    assert reopened.epoch == 1
    reopened.close()


@pytest.mark.parametrize("text", ["", "notes of mine", "greenroom store format two"])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_format_file_of_something_else_is_refused(
    store: FileStore, root: Path, tmp_path: Path, text: str, read_only: bool
) -> None:
    store.close()
    (root / "format").write_text(text)
    (root / "format.copy").write_text(text)
    with pytest.raises(CorruptValueError, match="expected 'greenroom store format 1'"):
        open_store(tmp_path, read_only=read_only)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_newer_store_is_refused_and_left_alone(
    store: FileStore, root: Path, tmp_path: Path, read_only: bool
) -> None:
    store.close()
    (root / "format").write_text("greenroom store format 12\n")
    before = files_under(tmp_path)
    with pytest.raises(OtherFormatError, match=r"format 12; this version reads up to 1\."):
        open_store(tmp_path, read_only=read_only)
    assert files_under(tmp_path) == before


def test_a_newer_value_is_refused_and_stays(store: FileStore, root: Path, tmp_path: Path) -> None:
    store.close()
    settle(tmp_path)
    store = open_store(tmp_path)
    (root / "values" / "a").write_bytes(newer())
    for _ in range(2):
        with pytest.raises(OtherFormatError, match=r"values/a has store format 3; .* up to 1\."):
            store.get("a")
    store.close()


def test_files_that_no_key_is_spelled_like_are_ignored(store: FileStore, root: Path) -> None:
    for name in ("=a", "=YQ", "%zz", "%61", "two words", ".hidden"):
        (root / "values" / name).write_bytes(WHOLE)
        assert key_of(name) is None
    assert store.list() == ["a", "b"]


def test_copies_that_a_power_cut_has_torn_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.mkdir()
    disk = DyingDisk(path, float("inf"))
    store = open_store(path, disk=disk)
    for puts, deletes in HISTORY:
        store.apply(puts, deletes)
    store.close()
    disk.cut_power(lambda folder: False)
    assert not any((path / "default" / "copies" / "a").read_bytes())
    store = open_store(path)
    assert state_of(store) == EXPECTED
    assert (path / "default" / "copies" / "a").read_bytes() == frame(b"5")
    store.close()
