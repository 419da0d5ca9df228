"""A folder that hosts share: writers that stop in the middle of a change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from greenroom.persistence import claims
from greenroom.persistence.filesystem import FileLocation
from greenroom.persistence.kv import StaleWriterError, StoreLockedError
from greenroom.persistence.layout import Disk


class _Stops(Disk):
    """Stops its process before it makes a change durable, or gives the lease its name."""

    is_open = False

    def fsync(self, fd: int) -> None:
        if self.is_open:
            self.is_open = False
            os.kill(os.getpid(), signal.SIGSTOP)
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        if new.name == "lease":
            os.kill(os.getpid(), signal.SIGSTOP)
        super().rename(old, new)


def test_a_writer_that_is_stopped_in_a_change_keeps_nobody_out_and_is_refused_later(
    tmp_path: Path,
) -> None:
    child = os.fork()
    if child == 0:
        disk = _Stops()
        store = FileLocation(tmp_path, disk=disk).open(after=0)
        store.apply({"a": b"1"})
        disk.is_open = True
        try:
            store.apply({"a": b"2"})
        except StaleWriterError:
            os._exit(7)
        os._exit(1)
    try:
        os.waitid(os.P_PID, child, os.WSTOPPED)
        successor = FileLocation(tmp_path).open(after=1)
        seen = successor.get("a")
        assert seen in {b"1", b"2"}
    finally:
        os.kill(child, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert successor.get("a") == seen
    successor.close()
    assert FileLocation(tmp_path).open(after=2).get("a") == seen


def test_who_is_stopped_while_it_writes_the_lease_keeps_others_out_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CHANGE_TIMEOUT_S", 0.1)
    child = os.fork()
    if child == 0:
        FileLocation(tmp_path, disk=_Stops()).open(after=0).renew(b"lease", 3.0)
        os._exit(7)
    try:
        os.waitid(os.P_PID, child, os.WSTOPPED)
        with pytest.raises(StoreLockedError, match="stopped while it held it"):
            FileLocation(tmp_path).open(after=1)
    finally:
        os.kill(child, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert FileLocation(tmp_path).open(after=1).epoch == 2
