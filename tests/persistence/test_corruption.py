"""Damage on disk: of one file nothing is lost, of more than one what is lost is named."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from greenroom.persistence import filesystem
from greenroom.persistence.filesystem import FileLocation, FileStore
from greenroom.persistence.kv import UNNAMED, CorruptValueError, OtherFormatError
from greenroom.persistence.layout import FrameError, frame, unframe

from .disks import (  # noqa: TID251 - the tests' own folder
    Death,
    DyingDisk,
    UnsyncedDisk,
    copy_with_damage,
    files_under,
    log_of,
    open_or_read,
    open_store,
    read_store,
    state_of,
)

VALUE = b"the value"
LARGE = bytes(range(200))


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


UNTOLD = ("lock", "change", "epoch", "epoch.copy")
DAMAGES: list[Callable[[Path], None]] = [flip, truncate, empty, zero, Path.unlink]


@pytest.fixture(autouse=True)
def call_few_bytes_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "LARGE", len(LARGE) - 1)


@pytest.fixture(name="store")
def make_store(tmp_path: Path) -> Iterator[FileStore]:
    store = open_store(tmp_path)
    store.apply({"a": VALUE, "b": b"sound"})
    yield store
    store.close()


@pytest.fixture(name="root")
def find_root(store: FileStore, tmp_path: Path) -> Path:
    return tmp_path / "default"


def replace_in_both(log: Path, old: bytes, new: bytes) -> None:
    for path in (log, log.with_name(f"{log.name}.copy")):
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_every_torn_flipped_or_lengthened_frame_is_noticed() -> None:
    whole = frame(VALUE)
    assert unframe(whole) == VALUE
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [whole + b"\0", whole + whole, bytes(len(whole))]
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        with pytest.raises(FrameError):
            unframe(content)


# --- One file -------------------------------------------------------------------------------------

HISTORY: list[tuple[dict[str, bytes], list[str]]] = [
    ({"a": b"1", "b": b"1", "c": b"1", "d": b"1"}, []),
    ({"a": b"2"}, ["b"]),
    ({"code": LARGE, "e": b"1"}, []),
    ({"c": b"3"}, []),
    ({}, ["d"]),
    ({"f": b"1", "b": b"4"}, ["e"]),
    ({"a": b"5"}, ["f"]),
]
EXPECTED = {"a": b"5", "b": b"4", "c": b"3", "code": LARGE}


@pytest.fixture(name="template", params=[-1000, 300, 10**6], ids=lambda spare: f"spare {spare}")
def make_template(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setattr(filesystem, "SPARE", request.param)
    template = tmp_path / "template"
    for _ in range(2):
        store = open_store(template)
        for puts, deletes in HISTORY:
            store.apply(puts, deletes)
        store.close()
    return template


@pytest.mark.slow
def test_every_flipped_byte_of_a_log_and_every_end_of_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "template"
    store = open_store(template)
    for puts, deletes in HISTORY:
        store.apply(puts, deletes)
    store.close()
    log = log_of(template / "default")
    whole = log.read_bytes()
    ways = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(len(whole))]
    ways += [whole[:at] for at in range(len(whole))]
    for name in (log.name, f"{log.name}.copy"):
        for content in ways:
            (template / "default" / name).write_bytes(content)
            reader = read_store(template)
            assert reader.load() == EXPECTED
            assert not reader.lost
        (template / "default" / name).write_bytes(whole)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_no_single_file_loses_anything_whatever_becomes_of_it(
    template: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for file in files_of(template):
        path = template.with_name("damaged")
        name = str(file.relative_to(template))
        copy_with_damage(template, path, [name], damage)
        assert state_of(read_store(path)) == EXPECTED, name
        store = open_store(path)
        assert state_of(store) == EXPECTED, name
        assert not store.lost, name
        is_named = "damaged" in caplog.text
        # An end that a kill may have kept from being copied is no damage.
        assert is_named or damage is truncate or file.name in UNTOLD, name
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
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
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
            # A copy that is begun shows that there was a change, of which the log may be gone.
            assert not store.lost or (died and "log-" in name), f"{name}, died at step {step}"
            store.close()
            shutil.rmtree(path)
        shutil.rmtree(killed)
        if not died:
            return


def test_a_value_that_rots_while_the_store_is_open_is_taken_from_its_copy(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.apply({"large": LARGE})
    log = log_of(root)
    log.write_bytes(log.read_bytes().replace(VALUE, VALUE[::-1]))
    (large,) = (root / "large").glob("*[!y]")
    flip(large)
    assert (store.get("a"), store.get("large")) == (VALUE, LARGE)
    assert not store.lost
    store.close()
    store = open_store(tmp_path)
    assert state_of(store) == {"a": VALUE, "b": b"sound", "large": LARGE}
    for copy in root.rglob("*.copy"):
        flip(copy)
    assert state_of(read_store(tmp_path)) == state_of(store)
    store.close()


def test_what_the_disk_cannot_read_is_taken_from_the_copy(tmp_path: Path) -> None:
    class BadSector(UnsyncedDisk):
        def read(self, path: Path, at: int = 0, size: int = -1) -> bytes:
            if path.name.startswith("log-") and not path.name.endswith(".copy"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, at, size)

    store = open_store(tmp_path)
    store.apply({"a": VALUE})
    store.close()
    assert state_of(read_store(tmp_path, BadSector())) == {"a": VALUE}


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["flipped", "removed"])
def test_a_writer_whose_epoch_file_is_damaged_goes_on_and_the_next_repairs_it(
    store: FileStore, root: Path, damage: Callable[[Path], None]
) -> None:
    damage(root / "epoch")
    assert FileLocation(root.parent).read_claim()[0] == 1
    store.apply({"a": b"2"})
    store.close()
    store = open_store(root.parent)
    assert (store.epoch, store.get("a")) == (2, b"2")
    assert (root / "epoch").read_bytes() == (root / "epoch.copy").read_bytes()
    store.close()


# --- Both of a pair -------------------------------------------------------------------------------


def test_what_is_damaged_twice_is_named_at_every_opening_until_it_is_put_or_deleted(
    store: FileStore, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.apply({"c": b"c value", "large": LARGE})
    store.close()
    replace_in_both(log_of(root), VALUE, VALUE[::-1])
    replace_in_both(log_of(root), b"sound", b"noise")
    for large in (root / "large").iterdir():
        large.unlink()
    for _ in range(2):
        caplog.clear()
        store = open_store(tmp_path)
        assert store.load() == {"c": b"c value"}
        assert store.lost.keys() == {"a", "b", "large"}
        assert caplog.text.count("Lost in the store") == 3
        with pytest.raises(CorruptValueError, match=r"'a' is lost: log-.* and its copy are damage"):
            store.get("a")
        store.close()
    store = open_store(tmp_path)
    store.apply({"a": b"again"}, ["b"])
    store.apply({"large": LARGE})
    assert not store.lost
    store.close()
    store = open_store(tmp_path)
    expected = {"a": b"again", "c": b"c value", "large": LARGE}
    assert (state_of(store), dict(store.lost)) == (expected, {})
    store.close()


def test_what_is_damaged_twice_while_the_store_is_open_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.apply({"a": LARGE, "b": b"sound"})
    for path in (tmp_path / "default" / "large").iterdir():
        path.unlink()
    with pytest.raises(CorruptValueError, match=r"'a' is lost: .*large/1-1 and its copy are damag"):
        store.get("a")
    assert store.lost.keys() == {"a"}
    assert store.load() == {"b": b"sound"}
    store.close()


def test_a_head_that_is_damaged_twice_loses_its_own_change_which_is_lost_until_it_is_deleted(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.apply({"c": b"c value"})
    store.apply({"d": b"d value"})
    store.close()
    replace_in_both(log_of(root), b'"c"', b'"x"')
    for _ in range(3):
        store = open_store(tmp_path)
        assert "bytes log-0000000001-000001 and its copy are damaged" in store.lost[UNNAMED]
        assert state_of(store) == {"a": VALUE, "b": b"sound", "d": b"d value"}
        store.apply({"e": b"1"})
        store.apply({}, ["e"])
        store.close()
    for _ in range(2):
        store = open_store(tmp_path)
        store.apply({}, [UNNAMED])
        assert not store.lost
        store.close()


def test_what_both_files_of_a_log_were_cut_off_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.apply({f"key {n}": bytes(30_000 // len(LARGE)) for n in range(900)})
    store.close()
    store = open_store(tmp_path)  # begins a log with several entries
    store.close()
    log = log_of(tmp_path / "default")
    for path in (log, log.with_name(f"{log.name}.copy")):
        path.write_bytes(path.read_bytes()[:-50_000])
    store = open_store(tmp_path)
    found = store.load()
    assert 100 < len(found) < 900
    assert found.keys() | store.lost.keys() - {UNNAMED} == {f"key {n}" for n in range(900)}
    assert "key 99" in store.lost
    assert "cut off" in store.lost["key 99"]
    store.close()


def test_a_store_whose_logs_are_gone_is_refused_and_left_alone(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    for path in root.glob("log-*"):
        empty(path)
    for read_only in (True, False):
        with pytest.raises(CorruptValueError, match="no log that can be read"):
            open_or_read(tmp_path, read_only=read_only).load()
    for path in root.glob("log-*"):
        path.unlink()
    for read_only in (True, False):
        with pytest.raises(CorruptValueError, match="no log that can be read"):
            open_or_read(tmp_path, read_only=read_only).load()


@pytest.mark.parametrize("template", [300], indirect=True, ids=["spare 300"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=lambda each: each.__name__)
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
            kind = names[0].removeprefix("default/").partition("-")[0]
            assert kind in {"epoch", "format", "log"}, names
        else:
            found = store.load()
            assert found == EXPECTED or store.lost, names
            store.close()
        shutil.rmtree(path)


def test_a_reader_names_damage_and_leaves_it_in_place(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    store.close()
    replace_in_both(log_of(root), VALUE, VALUE[::-1])
    before = files_under(tmp_path)
    reader = read_store(tmp_path)
    assert reader.load() == {"b": b"sound"}
    assert reader.lost.keys() == {"a"}
    with pytest.raises(CorruptValueError, match="'a' is lost"):
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
    assert (reopened.epoch, reopened.get("a")) == (2, VALUE)
    reopened.close()


# --- The format -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "notes of mine", "greenroom store format two"])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_format_file_of_something_else_is_refused(
    store: FileStore, root: Path, tmp_path: Path, text: str, read_only: bool
) -> None:
    store.close()
    (root / "format").write_text(text)
    (root / "format.copy").write_text(text)
    with pytest.raises(CorruptValueError, match="expected 'greenroom store format 2'"):
        open_or_read(tmp_path, read_only=read_only)


@pytest.mark.parametrize("version", [1, 12])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_store_of_another_format_is_refused_and_left_alone(
    store: FileStore, root: Path, tmp_path: Path, read_only: bool, version: int
) -> None:
    store.close()
    (root / "format").write_text(f"greenroom store format {version}\n")
    before = files_under(tmp_path)
    with pytest.raises(OtherFormatError, match=rf"format {version}; this version reads 2\."):
        open_or_read(tmp_path, read_only=read_only)
    assert files_under(tmp_path) == before
