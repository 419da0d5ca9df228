"""Actors that were made and never told anything are ended; all others are not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from greenroom.actors.host.process import Unasked
from greenroom.actors.host.records import RunRecords
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.processes import identify, is_alive, this_process
from tests.support.systems import wait_until

ONE, TWO = Process(1, 10, ""), Process(2, 20, "")


def test_only_who_is_unknown_at_two_looks_in_a_row_is_to_go() -> None:
    unasked = Unasked()
    assert unasked.look([ONE, TWO], {2}) == []
    assert unasked.look([ONE, TWO], {1, 2}) == []  # it was told something meanwhile
    assert unasked.look([ONE, TWO], {2}) == []
    assert unasked.look([Process(1, 11, "")], set()) == []  # another process of that pid
    assert unasked.look([Process(1, 11, ""), TWO], set()) == [Process(1, 11, "")]
    assert unasked.look([], set()) == []


def test_a_child_of_the_admin_that_is_on_no_record_is_killed(tmp_path: Path) -> None:
    """This process stands for the admin, and its children for actors, one of them another's."""
    records, unasked, admin = RunRecords(tmp_path), Unasked(), this_process()
    with named("Replica a") as known, named("Replica b") as unknown, named("Theirs c") as theirs:
        process, other = identify(known.pid), identify(unknown.pid)
        assert process is not None
        assert other is not None
        records.add(process, "replica")
        for _ in range(2):  # it is on no record itself
            assert unasked.end(admin, records) == []
        records.add(admin, "host")
        assert unasked.end(admin, records) == []
        assert unasked.end(admin, records) == [other]
        wait_until(lambda: unknown.poll() is not None, 5, "its end")
        assert is_alive(process)
        assert theirs.poll() is None
        known.kill()
        theirs.kill()


def named(title: str) -> subprocess.Popen[bytes]:
    """Start a process that has this title."""
    return subprocess.Popen([title, "600"], executable=shutil.which("sleep"))
