"""A process shows what it has counted in memory, and others of its host read it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

from greenroom.actors.runtime import shared_metrics
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.shared_metrics import OtherMetrics, SharedMetrics
from greenroom.core.metrics import Group, Registry

SHOW = """
import sys
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.metrics import Registry

registry = Registry()
counter = registry.counter("seen_total", "")
shared = SharedMetrics(lambda: [({"pid": "mine"}, registry.families())])
for _ in sys.stdin:
    counter.add(1)
    shared.show()
    print("shown", flush=True)
"""


def test_another_process_reads_what_was_shown_last_until_the_first_ends():
    other = OtherMetrics()
    with subprocess.Popen(
        [sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shows:
        process = identify(shows.pid)
        assert process is not None
        for count in (1, 2):
            shows.stdin.write("\n")
            shows.stdin.flush()
            assert shows.stdout.readline() == "shown\n"
            ((labels, (family,)),) = other.read(process)
            assert (labels, family.samples) == ({"pid": "mine"}, {(): count})
        shows.stdin.close()
        shows.wait(20)
    other.keep(set())
    assert other.read(process) == []


def test_a_process_that_shows_nothing_has_nothing():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as silent:
        process = identify(silent.pid)
        assert process is not None
        assert OtherMetrics().read(process) == []
        silent.communicate(b"\n")


def test_what_is_too_large_is_left_out_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(shared_metrics, "MAX_BYTES", 4096)
    registry = Registry()
    gauge = registry.gauge("level", "", "who")
    shared = SharedMetrics(lambda: [({}, registry.families())])
    for number in range(3):
        gauge.set(number, "x" * 5000 + str(number))
        shared.show()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    shared.close()


def test_a_process_without_descriptors_goes_on(caplog, monkeypatch):
    def full(_name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    groups: list[Group] = [({}, [])]
    shared = SharedMetrics(lambda: groups)
    shared.show()
    assert "this process cannot show its metrics" in caplog.text
    shared.close()
