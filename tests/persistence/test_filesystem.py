"""The store on disk: who may write, what a reader sees, and what is left in the folder."""

import fcntl
import multiprocessing
import os
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import (
    NothingSavedError,
    StaleWriterError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StoreMissingError,
    StoreNotReadableError,
    StoreNotWritableError,
)

from .disks import FullDisk, SteppingDisk, UnsyncedDisk, WatchedDisk, open_store, state_of  # noqa: TID251 - the tests' own folder

NOBODY = 65534


def in_a_child(check: Callable[[], None]) -> None:
    """Run ``check`` in a forked process, and fail where it raises."""
    child = os.fork()
    if not child:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture(name="no_flock")
def lose_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make flock what it is on some shared file systems: granted to everybody."""
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)


def test_only_the_owner_may_enter_or_read(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "path")
    store.apply({"a": b"1"})
    store.close()
    for path in (tmp_path / "new").rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_namespaces_do_not_share_keys(tmp_path: Path) -> None:
    one = open_store(tmp_path, namespace="one")
    two = open_store(tmp_path, namespace="../two")
    one.apply({"a": b"1"})
    two.apply({"a": b"2"})
    assert (one.get("a"), two.get("a")) == (b"1", b"2")
    assert len([*tmp_path.iterdir()]) == 2
    one.close()
    two.close()


def test_a_change_of_any_size_syncs_twice(tmp_path: Path) -> None:
    calls: list[str] = []

    class RecordingDisk(UnsyncedDisk):
        def fsync(self, fd: int) -> None:
            calls.append("fsync")

        def fsync_dir(self, folder: Path) -> None:
            calls.append(f"fsync_dir {folder.name}")

        def rename(self, old: Path, new: Path) -> None:
            calls.append(f"rename {new.name}")
            super().rename(old, new)

    store = open_store(tmp_path, disk=RecordingDisk())
    calls.clear()
    store.apply({"a": b"1", "b": b"1"}, ["c"])
    durable, rest = calls[:3], calls[3:]
    assert durable == ["fsync", "rename 000000000002", "fsync_dir journal"]
    assert rest == ["rename a", "rename b", "rename head"]
    store.close()


def test_a_second_writer_is_told_who_holds_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def check() -> None:
        with pytest.raises(StoreLockedError, match=f"another writer, pid {os.getppid()} on "):
            open_store(tmp_path)

    in_a_child(check)
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        open_store(tmp_path)
    store.apply({"a": b"1"})
    store.close()


def test_a_killed_writer_lets_the_next_one_in(tmp_path: Path) -> None:
    in_a_child(lambda: open_store(tmp_path).apply({"a": b"1"}))
    store = open_store(tmp_path)
    assert (store.epoch, store.get("a")) == (2, b"1")
    store.close()


def test_a_forked_child_neither_keeps_the_lock_nor_writes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fork = multiprocessing.get_context("fork")
    parent_end, child_end = fork.Pipe()

    def inherit() -> None:
        answer = "it wrote"
        try:
            store.apply({"a": b"by the child"})
        except StoreClosedError as error:
            answer = str(error)
        child_end.send(answer)
        child_end.recv()

    child = fork.Process(target=inherit, daemon=True)
    child.start()
    assert "opened before a fork" in parent_end.recv()
    store.apply({"a": b"by the parent"})
    store.close()
    successor = open_store(tmp_path)
    assert successor.get("a") == b"by the parent"
    parent_end.send(None)
    child.join()
    successor.close()


@pytest.mark.usefixtures("no_flock")
def test_a_writer_of_an_older_epoch_is_refused(tmp_path: Path) -> None:
    stale = open_store(tmp_path)
    stale.apply({"a": b"1"})
    current = open_store(tmp_path)
    before = state_of(current)
    for puts, deletes in (({"a": b"2"}, []), ({}, ["a"]), ({"a": b"2", "b": b"2"}, [])):
        with pytest.raises(StaleWriterError, match=r"epoch 1, and .*epoch now names another"):
            stale.apply(puts, deletes)
        assert state_of(current) == before
    current.apply({"a": b"3"})
    stale.close()
    current.close()


@pytest.mark.usefixtures("no_flock")
def test_of_two_writers_that_drew_the_same_epoch_one_is_refused(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    epoch = tmp_path / "default" / "epoch"
    first_claim = epoch.read_bytes()
    epoch.unlink()
    epoch.with_name("epoch.copy").unlink()
    second = open_store(tmp_path)
    assert first.epoch == second.epoch
    assert epoch.read_bytes() != first_claim
    with pytest.raises(StaleWriterError):
        first.apply({"a": b"1"})
    first.close()
    second.close()


@pytest.mark.usefixtures("no_flock")
def test_a_writer_superseded_half_way_through_a_batch_stops(tmp_path: Path) -> None:
    successors: list[FileStore] = []

    class SupersededDisk(SteppingDisk):
        def step(self, number: int) -> None:
            entry = tmp_path / "default" / "journal" / "000000000002"
            if not successors and entry.exists():
                successors.append(open_store(tmp_path))
                successors[0].apply({"a": b"newer", "b": b"newer"})

    stale = open_store(tmp_path, disk=SupersededDisk())
    with pytest.raises(StaleWriterError):
        stale.apply({"a": b"older", "b": b"older", "c": b"older"})
    (successor,) = successors
    assert state_of(successor) == {"a": b"newer", "b": b"newer", "c": b"older"}
    stale.close()
    successor.close()


@pytest.mark.usefixtures("no_flock")
def test_a_stale_writer_repairs_nothing(tmp_path: Path) -> None:
    open_store(tmp_path).apply({"a": b"1"})
    path = tmp_path / "default" / "values" / "a"
    for folder in ("journal", "values"):  # so that values have it
        for each in (tmp_path / "default" / folder).iterdir():
            each.unlink()
    stale, current = open_store(tmp_path), open_store(tmp_path)
    path.write_bytes(b"torn")
    with pytest.raises(StaleWriterError):
        stale.get("a")
    assert path.read_bytes() == b"torn"
    assert current.get("a") == b"1"
    assert path.read_bytes() != b"torn"
    stale.close()
    current.close()


def test_temporary_files_of_dead_writers_are_removed_by_the_next(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    root = tmp_path / "default"
    folders = [root, *(root / name for name in ("values", "copies", "journal"))]
    leftovers = [folder / ".1-dead.tmp" for folder in folders]
    for path in leftovers:
        path.write_bytes(b"half")
    open_store(tmp_path, read_only=True).close()
    assert all(path.exists() for path in leftovers)
    open_store(tmp_path).close()
    assert not any(path.exists() for path in leftovers)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_path_below_a_regular_file_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").touch()
    expected = StoreNotReadableError if read_only else StoreNotWritableError
    with pytest.raises(expected, match=f"file/store/default as uid {os.geteuid()}: .*directory"):
        FileStore.open(tmp_path / "file" / "store", read_only=read_only)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    FileStore.open(folder, namespace="taken").close()

    def check(read_only: bool, namespace: str, expected: type[StoreError]) -> None:
        with pytest.raises(expected, match=f"as uid {os.geteuid()}: .*Permission denied"):
            FileStore.open(folder, namespace=namespace, read_only=read_only)

    def check_all() -> None:
        if os.geteuid() == 0:
            os.setuid(NOBODY)  # root may write anywhere, so become somebody who may not
        check(False, "taken", StoreNotWritableError)
        check(True, "taken", StoreNotReadableError)
        check(False, "new", StoreNotWritableError)

    (folder / "taken").chmod(0)
    folder.chmod(0o500)
    try:
        in_a_child(check_all)
    finally:
        folder.chmod(0o700)
        (folder / "taken").chmod(0o700)


def test_a_reader_of_no_store_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match="there is no store at"):
        open_store(tmp_path / "nowhere", read_only=True)
    assert not [*tmp_path.iterdir()]


def test_a_reader_may_not_write(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    reader = open_store(tmp_path, read_only=True)
    assert reader.epoch == 0
    with pytest.raises(StoreNotWritableError, match="read_only=True"):
        reader.apply({"a": b"1"})
    with pytest.raises(StoreNotWritableError, match="read_only=True"):
        reader.apply({})


@pytest.mark.parametrize("deletes", [[], ["b", "c"]])
def test_a_reader_sees_all_of_a_batch_or_nothing_at_every_step(
    tmp_path: Path, deletes: list[str]
) -> None:
    before: dict[str, bytes] = {"a": b"old", "b": b"old", "c": b"old"}
    seen: list[dict[str, bytes | None]] = []
    reader: list[FileStore] = []
    disk = WatchedDisk(lambda: seen.extend(state_of(each) for each in reader))
    store = open_store(tmp_path, disk=disk)
    store.apply(before)
    reader.append(open_store(tmp_path, read_only=True))
    store.apply({"a": b"new", "d": b"new"}, deletes)
    after = state_of(reader[0])
    assert after["a"] == b"new"
    turn = seen.index(after)
    assert seen[:turn] == [before] * turn
    assert seen[turn:] == [after] * (len(seen) - turn)
    store.close()


def test_a_reader_beside_a_busy_writer_never_goes_back(tmp_path: Path) -> None:
    open_store(tmp_path).close()

    def write() -> None:
        store = open_store(tmp_path)
        for number in range(100):
            value = f"{number:04}".encode() * 500
            store.apply({"a": value, "b": value})

    writer = multiprocessing.get_context("fork").Process(target=write, daemon=True)
    writer.start()
    reader = open_store(tmp_path, read_only=True)
    newest = b""
    while writer.is_alive():
        for key in ("a", "b"):
            value = reader.get(key) or b""
            assert value == value[:4] * 500
            assert value >= newest
            newest = value
    assert writer.exitcode == 0
    assert reader.get("a") == reader.get("b") == b"0099" * 500


def test_a_store_whose_first_opening_found_no_room_can_be_written_once_there_is_some(
    tmp_path: Path,
) -> None:
    disk = FullDisk()
    for step in count():
        path = tmp_path / str(step) / "store"
        disk.fail_at = disk.steps + step
        try:
            open_store(path, disk=disk).close()
        except StoreNotWritableError:
            disk.fail_at = disk.steps
            with pytest.raises(NothingSavedError, match="No space left on device"):
                FileStore.try_to_write(path, disk=disk)
            disk.fail_at = None
            FileStore.try_to_write(path, disk=disk)
            open_store(path, disk=disk).close()
        else:
            return
