"""Damage on disk is found, named and set aside; nothing damaged is ever returned."""

import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.persistence.encoding import encode_batch, frame, key_of
from greenroom.persistence.errors import CorruptValueError, NewerFormatError
from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import Batch

from .disks import (  # noqa: TID251 - the tests' own folder
    files_under,
    open_store,
    state_of,
)

VALUE = b"the value"
WHOLE = frame(VALUE)


@pytest.fixture(name="store")
def make_store(tmp_path: Path) -> Iterator[FileStore]:
    store = open_store(tmp_path)
    store.apply({"a": VALUE, "b": b"sound"})
    yield store
    store.close()


@pytest.fixture(name="root")
def find_root(store: FileStore, tmp_path: Path) -> Path:
    return tmp_path / "default"


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


def newer(version: int = 2) -> bytes:
    header = struct.pack(">4sHQ", b"UNDR", version, len(VALUE))
    return header + struct.pack(">I", zlib.crc32(VALUE, zlib.crc32(header))) + VALUE


def test_every_torn_flipped_or_lengthened_value_is_refused(store: FileStore, root: Path) -> None:
    for content in damaged():
        (root / "values" / "a").write_bytes(content)
        with pytest.raises(CorruptValueError, match="values/a is damaged"):
            store.get("a")
        assert store.get("b") == b"sound"


def test_a_damaged_value_is_set_aside_under_the_name_in_the_error(
    store: FileStore, root: Path
) -> None:
    (root / "values" / "a").write_bytes(WHOLE[:-1])
    with pytest.raises(CorruptValueError) as caught:
        store.get("a")
    (kept,) = (root / "corrupt").iterdir()
    assert str(kept) in str(caught.value)
    assert "holds 8 bytes of value, its header says 9" in str(caught.value)
    assert kept.read_bytes() == WHOLE[:-1]
    assert store.list() == ["b"]
    assert store.get("a") is None
    store.apply({"a": b"saved again"})
    assert store.get("a") == b"saved again"


def test_a_key_damaged_twice_is_kept_twice(store: FileStore, root: Path) -> None:
    for content in (b"first", b"second"):
        (root / "values" / "a").write_bytes(content)
        with pytest.raises(CorruptValueError):
            store.get("a")
    assert {kept.read_bytes() for kept in (root / "corrupt").iterdir()} == {b"first", b"second"}


def test_the_longest_key_can_be_set_aside(store: FileStore, root: Path) -> None:
    store.apply({"é" * 90: VALUE})
    (path,) = (file for file in (root / "values").iterdir() if file.name.startswith("="))
    path.write_bytes(b"torn")
    with pytest.raises(CorruptValueError):
        store.get("é" * 90)


def test_opening_warns_of_what_was_set_aside(
    store: FileStore, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "values" / "a").write_bytes(b"torn")
    with pytest.raises(CorruptValueError):
        store.get("a")
    store.close()
    with caplog.at_level(logging.WARNING):
        open_store(tmp_path).close()
    assert "1-1-a" in caplog.text


def test_a_reader_names_damage_and_leaves_it_in_place(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    (root / "values" / "a").write_bytes(WHOLE[:-1])
    (root / "redo").write_bytes(b"")
    before = files_under(tmp_path)
    reader = open_store(tmp_path, read_only=True)
    with pytest.raises(CorruptValueError, match="redo is damaged"):
        reader.get("b")
    (root / "redo").unlink()
    before = files_under(tmp_path)
    with pytest.raises(CorruptValueError, match="values/a is damaged"):
        reader.get("a")
    assert files_under(tmp_path) == before


def test_a_damaged_redo_file_is_refused_once_and_set_aside(
    store: FileStore, root: Path, tmp_path: Path
) -> None:
    whole = frame(encode_batch(Batch(puts={"a": b"1"}, deletes=("b",))))
    store.close()
    for content in (b"", whole[:-1], whole + b"x"):
        (root / "redo").write_bytes(content)
        with pytest.raises(CorruptValueError, match="redo is damaged"):
            open_store(tmp_path)
        reopened = open_store(tmp_path)
        assert state_of(reopened) == {"a": VALUE, "b": b"sound"}
        reopened.close()


def test_a_damaged_epoch_file_needs_a_person(store: FileStore, root: Path, tmp_path: Path) -> None:
    store.close()
    (root / "epoch").write_bytes((root / "epoch").read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(CorruptValueError, match="the next epoch is unknown"):
            open_store(tmp_path)
    (root / "epoch").unlink()
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
    with pytest.raises(CorruptValueError, match="expected 'greenroom store format 1'"):
        open_store(tmp_path, read_only=read_only)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_newer_store_is_refused_and_left_alone(
    store: FileStore, root: Path, tmp_path: Path, read_only: bool
) -> None:
    store.close()
    (root / "format").write_text("greenroom store format 12\n")
    before = files_under(tmp_path)
    with pytest.raises(NewerFormatError, match=r"format 12; this version reads up to 1\."):
        open_store(tmp_path, read_only=read_only)
    assert files_under(tmp_path) == before


def test_a_newer_value_is_refused_and_stays(store: FileStore, root: Path) -> None:
    (root / "values" / "a").write_bytes(newer())
    for _ in range(2):
        with pytest.raises(NewerFormatError, match=r"values/a has store format 2; .* up to 1\."):
            store.get("a")


def test_files_that_no_key_is_spelled_like_are_ignored(store: FileStore, root: Path) -> None:
    for name in ("=a", "=YQ", "%zz", "%61", "two words", ".hidden"):
        (root / "values" / name).write_bytes(WHOLE)
        assert key_of(name) is None
    assert store.list() == ["a", "b"]
