"""A state as one file, and from store to store: whole, of one moment, never over another state."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from greenroom.persistence.backup import copy_store, restore_backup, write_backup
from greenroom.persistence.checkpoints import Checkpoints, code_digest
from greenroom.persistence.kv import (
    CorruptValueError,
    StoreLocation,
    StoreMissingError,
    StoreNotWritableError,
)
from greenroom.persistence.locations import location_at
from tests.support.postgres import PostgresServer


@pytest.fixture
def files(tmp_path: Path) -> StoreLocation:
    return location_at(tmp_path / "store")


@pytest.fixture
def rows(postgres: PostgresServer) -> StoreLocation:
    return location_at(postgres.new_database())


def content(location: StoreLocation) -> dict[str, bytes]:
    return location.read().load()


def _save(location: StoreLocation) -> dict[str, bytes]:
    store = location.open()
    code = {("code", code_digest(each)): each for each in (bytes(range(256)) * 400, b"")}
    Checkpoints(store).save({("backend", "a"): {"x": 1}, **code})
    values = store.load()
    store.close()
    assert len(values) == 3
    return values


@pytest.mark.slow
def test_a_state_goes_from_files_to_a_database_and_back_by_copy_and_by_backup(
    files: StoreLocation, rows: StoreLocation, tmp_path: Path
) -> None:
    values = _save(files)
    assert copy_store(files, rows) == (3, [])
    assert content(rows) == values
    file = tmp_path / "backup"
    assert write_backup(rows, file) == 3
    assert file.stat().st_mode & 0o777 == 0o600
    again = location_at(tmp_path / "again")
    assert restore_backup(file, again) == 3
    assert content(again) == values


def test_a_copy_has_the_jobs_and_a_backup_has_none(
    files: StoreLocation, rows: StoreLocation, tmp_path: Path
) -> None:
    _save(files)
    name = "jobs default#Slow mail/ü"
    with closing(files.in_namespace(name).open()) as store:
        store.apply({"job 1": b"call"})
    (tmp_path / "store" / "no folder").touch()
    assert copy_store(files, rows) == (4, [])
    again = location_at(tmp_path / "again")
    assert copy_store(rows, again) == (4, [])
    assert content(again.in_namespace(name)) == {"job 1": b"call"}
    assert files.namespaces() == rows.namespaces() == again.namespaces() == ["controller", name]
    assert write_backup(files, tmp_path / "backup") == 3

    third = location_at(tmp_path / "third")
    with closing(third.in_namespace(name).open()) as store:
        store.apply({"job 7": b"other"})
    with pytest.raises(StoreNotWritableError, match="has a state already"):
        copy_store(files, third)
    assert third.namespaces() == [name]


def test_nothing_is_overwritten(files: StoreLocation, rows: StoreLocation, tmp_path: Path) -> None:
    _save(files)
    copy_store(files, rows)
    file = tmp_path / "backup"
    write_backup(files, file)
    content = file.read_bytes()
    with pytest.raises(FileExistsError):
        write_backup(files, file)
    assert file.read_bytes() == content
    for target in (files, rows):
        epoch = target.read_claim().epoch
        with pytest.raises(StoreNotWritableError, match="has a state already"):
            restore_backup(file, target)
        with pytest.raises(StoreNotWritableError, match="has a state already"):
            copy_store(files, target)
        assert target.read_claim().epoch == epoch, "who writes there goes on"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "store"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty"])
def test_a_file_that_is_not_whole_is_refused_before_anything_is_written(
    files: StoreLocation, tmp_path: Path, damage: str
) -> None:
    _save(files)
    file = tmp_path / "backup"
    write_backup(files, file)
    whole = file.read_bytes()
    flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    damaged = {"cut": whole[:-1], "flipped": flipped, "other": b"PK" + whole, "empty": b""}
    file.write_bytes(damaged[damage])
    target = location_at(tmp_path / "target")
    with pytest.raises(CorruptValueError, match=r"is no backup|damaged or cut short"):
        restore_backup(file, target)
    assert not (tmp_path / "target").exists()


def test_where_there_is_no_store_there_is_no_backup(
    files: StoreLocation, rows: StoreLocation, tmp_path: Path
) -> None:
    for location in (files, rows):
        with pytest.raises(StoreMissingError):
            write_backup(location, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_what_is_lost_keeps_the_rest_from_being_copied(
    files: StoreLocation, tmp_path: Path
) -> None:
    with closing(files.open()) as store:
        store.apply({"backend/a": b"a value", "backend/b": b"b"})
    for path in (tmp_path / "store" / "controller").glob("log-*"):
        path.write_bytes(path.read_bytes().replace(b"a value", b"another"))
    with pytest.raises(CorruptValueError, match=r"backend/a: .*are damaged"):
        write_backup(files, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    with pytest.raises(CorruptValueError, match="See greenroom status"):
        copy_store(files, location_at(tmp_path / "target"), without_lost_jobs=True)


def test_jobs_that_are_lost_are_left_out_of_a_copy_only_where_that_is_asked_for(
    files: StoreLocation, tmp_path: Path
) -> None:
    _save(files)
    with closing(files.in_namespace("jobs mail").open()) as store:
        store.apply({"job/1": b"one job", "job/2": b"another"})
        store.apply({"job/3": b"its name is lost"})
        store.apply({"job/4": b"the last"})
    for old, new in (b"one job", b"boj eno"), (b"job/3", b"job/5"):
        for path in (tmp_path / "store").glob("jobs*/log-*"):
            path.write_bytes(path.read_bytes().replace(old, new))
    target = location_at(tmp_path / "target")
    with pytest.raises(CorruptValueError, match=r"job/1: .*unknown/changes: .*--without-lost-jobs"):
        copy_store(files, target)
    copied = copy_store(files, target, without_lost_jobs=True)
    assert copied.values == 3 + 2
    one, unnamed = copied.left_out
    assert one.startswith("job/1 of jobs mail: ")
    assert "damaged" in one
    assert unnamed.startswith("unknown/changes of jobs mail: ")
    assert content(target.in_namespace("jobs mail")) == {"job/2": b"another", "job/4": b"the last"}
    assert not target.in_namespace("jobs mail").read().lost


@pytest.mark.parametrize("lost", ["job", "call", "result"])
def test_a_job_of_which_any_value_is_lost_is_left_out_of_a_copy_as_a_whole(
    files: StoreLocation, tmp_path: Path, lost: str
) -> None:
    _save(files)
    jobs = files.in_namespace("jobs mail")
    keys = [f"{kind}/{number}" for number in (1, 2) for kind in ("call", "job", "result")]
    with closing(jobs.open()) as store:
        store.apply({key: f"the value of {key}".encode() for key in keys})
    for path in (tmp_path / "store").glob("jobs*/log-*"):
        whole = f"the value of {lost}/1".encode()
        path.write_bytes(path.read_bytes().replace(whole, whole.upper()))
    assert set(jobs.read().lost) == {f"{lost}/1"}
    target = location_at(tmp_path / "target")
    count, left_out = copy_store(files, target, without_lost_jobs=True)
    assert content(target.in_namespace("jobs mail")).keys() == set(keys[3:])
    assert count == 3 + 3
    texts = {each.split(" ")[0]: each for each in left_out}
    assert texts.keys() == set(keys[:3])
    for key in set(keys[:3]) - {f"{lost}/1"}:
        assert texts[key] == f"{key} of jobs mail: {lost}/1 is lost"


@pytest.mark.parametrize("kind", ["files", "rows"])
def test_a_backup_while_a_writer_works_is_of_one_moment(
    request: pytest.FixtureRequest, kind: str
) -> None:
    location: StoreLocation = request.getfixturevalue(kind)
    store = location.open()
    store.apply({"a": b"0", "b": b"0"})
    enough = threading.Event()

    def write() -> None:
        number = 0
        while not enough.wait(0.02):
            number += 1
            store.apply({"a": b"%d" % number, "b": b"%d" % number})

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(20):
            values = content(location)
            assert values["a"] == values["b"]
    finally:
        enough.set()
        writing.join()
        store.close()
