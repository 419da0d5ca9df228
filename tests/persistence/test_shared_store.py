"""A folder that hosts share: writers that die, fork or stop in the middle of a change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from greenroom.persistence import writer as lock
from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import StaleWriterError, StoreClosedError, StoreLockedError
from greenroom.persistence.layout import Disk


def test_a_batch_that_was_cut_short_by_a_successor_is_carried_out_by_it(tmp_path: Path) -> None:
    class Superseded(Disk):
        """Is superseded right after its batch is in the journal."""

        successor: FileStore | None = None

        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            if new.name == "000000000002":
                self.successor = FileStore.open(tmp_path, after=1)

    disk = Superseded()
    first = FileStore.open(tmp_path, after=0, disk=disk)
    with pytest.raises(StaleWriterError):
        first.apply({"a": b"1", "b": b"1"})
    assert disk.successor is not None
    assert (disk.successor.get("a"), disk.successor.get("b")) == (b"1", b"1")


def test_a_closed_or_forked_store_is_told_so(tmp_path: Path) -> None:
    store = FileStore.open(tmp_path, after=0)
    child = os.fork()
    if child == 0:
        try:
            store.apply({"a": b"1"})
        except StoreClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.apply({"a": b"1"})  # the child has taken nothing away
    store.close()
    with pytest.raises(StoreClosedError):
        store.apply({"a": b"2"})


class _StopsInside(Disk):
    """Stops its process between the look at the epoch and the change."""

    def rename(self, old: Path, new: Path) -> None:
        if new.name == "a":
            os.kill(os.getpid(), signal.SIGSTOP)
        super().rename(old, new)


def test_who_is_stopped_in_the_midst_of_a_change_keeps_others_out_until_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "CHANGE_TIMEOUT_S", 0.1)
    child = os.fork()
    if child == 0:
        FileStore.open(tmp_path, after=0, disk=_StopsInside()).apply({"a": b"1"})
        os._exit(7)
    try:
        os.waitid(os.P_PID, child, os.WSTOPPED)
        with pytest.raises(StoreLockedError, match="stopped in the middle of a change"):
            FileStore.open(tmp_path, after=1)
    finally:
        os.kill(child, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert FileStore.open(tmp_path, after=1).get("a") == b"1"
