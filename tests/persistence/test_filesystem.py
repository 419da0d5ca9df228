"""The store on disk: who may write, what a reader sees, and what is left in the folder."""

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path

import pytest

from greenroom.persistence import claims, filesystem
from greenroom.persistence.filesystem import FileLocation, FileStore
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

from .disks import (  # noqa: TID251 - the tests' own folder
    LOGS,
    FullDisk,
    SteppingDisk,
    UnsyncedDisk,
    open_or_read,
    open_store,
    read_store,
    state_of,
)

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


def test_a_change_of_any_size_is_one_fsync_and_a_check_of_the_claim(tmp_path: Path) -> None:
    calls: list[str] = []

    class RecordingDisk(UnsyncedDisk):
        def read(self, path: Path, at: int = 0, size: int = -1) -> bytes:
            calls.append(f"read {path.name}")
            return super().read(path, at, size)

        def write(self, fd: int, chunk: memoryview) -> int:
            calls.append("write")
            return super().write(fd, chunk)

        def fsync(self, fd: int) -> None:
            calls.append("fsync")

        def create(self, path: Path) -> int:
            calls.append(f"create {path.name}")
            return super().create(path)

        def fsync_dir(self, folder: Path) -> None:
            calls.append(f"fsync_dir {folder.name}")

    store = open_store(tmp_path, disk=RecordingDisk())
    calls.clear()
    store.apply({"a": b"1", "b": b"1"}, ["c"])
    assert calls == ["write", "fsync", "read epoch", "write"]
    calls.clear()
    store.apply({"a": bytes(filesystem.LARGE), "b": bytes(filesystem.LARGE + 1)})
    apart = ["create 1-1", "write", "fsync", "create 1-1.copy", "write", "fsync_dir large"]
    assert calls == [*apart, "write", "fsync", "read epoch", "write"]
    store.close()


def test_a_log_is_begun_anew_once_it_has_grown_and_holds_no_more_than_that(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    value = bytes(60_000)
    store.apply({f"kept {number}": value for number in range(20)})
    sizes = []
    for number in range(400):
        store.apply({"a": value, "large": bytes(70_000 + number)}, ["b"])
        files = [path.stat().st_size for path in (tmp_path / "default").rglob("*")]
        sizes.append(sum(files))
        assert len(files) < 15
    live = 21 * len(value)
    assert max(sizes) < 2 * (2 * live + 2 * filesystem.SPARE)
    assert any(after < before for before, after in pairwise(sizes))
    expected = {f"kept {number}": value for number in range(20)}
    expected |= {"a": value, "large": bytes(70_399)}
    assert state_of(store) == expected
    store.close()
    store = open_store(tmp_path)
    assert state_of(store) == expected
    store.close()


def test_a_log_that_cannot_be_begun_anew_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoNewFiles(UnsyncedDisk):
        is_full = False

        def create(self, path: Path) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path)

    monkeypatch.setattr(filesystem, "SPARE", 1)
    disk = NoNewFiles()
    store = open_store(tmp_path, disk=disk)
    disk.is_full = True
    for number in range(50):
        store.apply({"a": b"%d" % number, "b": bytes(100)})
    disk.is_full = False
    before = sorted(os.listdir(tmp_path / "default"))
    store.apply({"a": bytes(1000)})
    store.apply({"a": b"50"})
    assert sorted(os.listdir(tmp_path / "default")) != before
    store.close()
    assert state_of(read_store(tmp_path)) == {"a": b"50", "b": bytes(100)}


def test_a_change_whose_copy_cannot_be_written_is_made_and_the_next_one_makes_both(
    tmp_path: Path,
) -> None:
    class NoRoomForACopy(UnsyncedDisk):
        has_synced = False

        def fsync(self, fd: int) -> None:
            self.has_synced = True

        def write(self, fd: int, chunk: memoryview) -> int:
            if self.has_synced and is_open:
                self.has_synced = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, chunk)

    is_open = False
    disk = NoRoomForACopy()
    store = open_store(tmp_path, disk=disk)
    is_open, disk.has_synced = True, False
    store.apply({"a": b"1"})
    assert not disk.has_synced, "it has failed"
    is_open = False
    assert store.get("a") == b"1"
    store.apply({"b": b"1"})
    store.close()
    log, copy = sorted((tmp_path / "default").glob("log-*"))
    assert log.read_bytes() == copy.read_bytes()
    assert state_of(read_store(tmp_path)) == {"a": b"1", "b": b"1"}


def test_a_second_writer_hears_who_holds_the_store(tmp_path: Path) -> None:
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
def test_a_writer_whose_epoch_files_were_removed_is_refused_once_there_is_another(
    tmp_path: Path,
) -> None:
    first = open_store(tmp_path)
    epoch = tmp_path / "default" / "epoch"
    epoch.unlink()
    epoch.with_name("epoch.copy").unlink()
    second = open_store(tmp_path)
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(StaleWriterError):
        first.apply({"a": b"1"})
    first.close()
    second.close()


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("logs", LOGS)
def test_a_writer_superseded_at_any_step_of_a_change_answers_nothing_and_spoils_nothing(
    tmp_path: Path, logs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LOGS[logs].items():
        monkeypatch.setattr(filesystem, name, value)
    monkeypatch.setattr(filesystem, "LARGE", 8)
    before = {"a": b"older", "b": b"a large one"}
    change = {"a": b"newer", "c": b"another large one"}
    for step in count():
        path = tmp_path / str(step)
        successors: list[FileStore] = []

        class SupersededDisk(SteppingDisk):
            at: float = float("inf")

            def step(self, number: int) -> None:
                if number >= self.at and not successors:  # noqa: B023 - it is called in this turn
                    successors.append(open_store(path))  # noqa: B023

        disk = SupersededDisk()
        first = open_store(path, disk=disk)
        first.apply(before)
        disk.at = disk.steps + step
        is_answered = False
        with suppress(StoreError):
            first.apply(change, ["b"])
            is_answered = True
        if not successors:
            assert step > 10
            first.close()
            return
        (second,) = successors
        assert state_of(second) in ([change] if is_answered else [before, change])
        expected = {**state_of(second), "d": b"of the second, large"}
        second.apply({"d": b"of the second, large"})
        with pytest.raises(StoreError):
            first.apply({"a": b"oldest"})
        with pytest.raises(StoreError):
            first.apply({"b": b"large, and of the first"}, ["d"])
        assert state_of(second) == expected
        assert state_of(read_store(path)) == expected
        first.close()
        second.close()
        third = open_store(path)
        assert state_of(third) == expected
        third.close()


def test_temporary_files_of_dead_writers_are_removed_by_the_next(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    root = tmp_path / "default"
    leftovers = [root / ".1-epoch-dead.tmp", root / "large" / ".1-1-3-dead.tmp"]
    leftovers += [root / "large" / "1-3", root / ".0-try-99999.tmp"]
    for path in leftovers:
        path.write_bytes(b"half")
    read_store(tmp_path)
    assert all(path.exists() for path in leftovers)
    (root / ".9-epoch-alive.tmp").write_bytes(b"of a later writer")
    open_store(tmp_path).close()
    assert not any(path.exists() for path in leftovers)
    assert (root / ".9-epoch-alive.tmp").exists()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_path_below_a_regular_file_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").touch()
    expected = StoreNotReadableError if read_only else StoreNotWritableError
    with pytest.raises(expected, match=f"file/store/default as uid {os.geteuid()}: .*directory"):
        open_or_read(tmp_path / "file" / "store", read_only=read_only)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    FileLocation(folder, "taken").open().close()

    def check(read_only: bool, namespace: str, expected: type[StoreError]) -> None:
        location = FileLocation(folder, namespace)
        with pytest.raises(expected, match=f"as uid {os.geteuid()}: .*Permission denied"):
            _ = location.read() if read_only else location.open()

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


def test_a_reader_of_no_store_hears_so(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match="there is no store at"):
        read_store(tmp_path / "nowhere")
    assert not [*tmp_path.iterdir()]


def test_a_reader_never_goes_back_while_a_writer_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "SPARE", 10_000)  # logs are removed while they are read
    monkeypatch.setattr(filesystem, "LARGE", 2500)
    open_store(tmp_path).close()

    def write() -> None:
        store = open_store(tmp_path)
        for number in range(300):
            value = f"{number:04}".encode() * 500
            store.apply({"a": value, "b": value, "large": value + value})

    writer = multiprocessing.get_context("fork").Process(target=write, daemon=True)
    writer.start()
    newest = b""
    while writer.is_alive():
        found = read_store(tmp_path)
        values = found.load()
        assert not found.lost
        if values:
            value = values["a"]
            assert value == value[:4] * 500
            assert values == {"a": value, "b": value, "large": value + value}
            assert value >= newest
            newest = value
    assert writer.exitcode == 0
    found = read_store(tmp_path)
    assert found.get("a") == found.get("b") == b"0299" * 500


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
                FileLocation(path, disk=disk).try_to_write()
            disk.fail_at = None
            FileLocation(path, disk=disk).try_to_write()
            open_store(path, disk=disk).close()
        else:
            return


class _StopsAtTheLease(UnsyncedDisk):
    """Stops its process before it gives the lease its name."""

    def rename(self, old: Path, new: Path) -> None:
        if new.name == "lease":
            os.kill(os.getpid(), signal.SIGSTOP)
        super().rename(old, new)


def test_who_is_stopped_while_it_writes_the_lease_keeps_others_out_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CHANGE_TIMEOUT_S", 0.1)
    child = os.fork()
    if child == 0:
        open_store(tmp_path, disk=_StopsAtTheLease(), after=0).renew(b"lease", 3.0)
        os._exit(7)
    try:
        os.waitid(os.P_PID, child, os.WSTOPPED)
        with pytest.raises(StoreLockedError, match="stopped while it held it"):
            open_store(tmp_path, after=1)
    finally:
        os.kill(child, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert open_store(tmp_path, after=1).epoch == 2
