"""The lease of a controller: what it does when the store refuses it, and when it gives way."""

from __future__ import annotations

import queue
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.cluster import leader_lease as leading
from greenroom.actors.cluster.leader_lease import (
    LeaderLease,
    SeenLease,
    expected_lease_file,
    is_known,
    read_lease,
    remember_store,
)
from greenroom.actors.runtime.loop import nothing
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.cluster.leader_lease import MIN_TENURE_S, RENEW_S, TERM_S, Lease
from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import StoreNotWritableError
from greenroom.persistence.locations import location_at
from tests.support.lone_loop import LoneLoop


@pytest.fixture
def loop(monkeypatch):
    made = LoneLoop()
    monkeypatch.setattr(leading.time, "monotonic", made.asyncio.time)
    monkeypatch.setattr(leading.os, "_exit", sys.exit)
    return made


@pytest.fixture
def settings(tmp_path):
    given = {"store": str(tmp_path / "shared"), "state_dir": str(tmp_path), "host_name": "one"}
    made = read_settings({}, bind="10.0.0.1", **given)
    made.run_dir.mkdir(parents=True)
    expected_lease_file(made).write_text("0")
    return made


@pytest.fixture
def reign(loop, settings):
    made = LeaderLease(settings, loop)
    made.open()
    return made


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"/some\x80where"])
def test_a_store_counts_as_known_where_its_file_is_damaged(settings, damaged):
    location = location_at(settings.store_name)
    assert not is_known(settings, location)
    settings.known_store_file.write_bytes(damaged)
    assert is_known(settings, location)
    remember_store(settings, location)
    assert settings.known_store_file.read_text() == str(location)
    settings.known_store_file.write_text("/another/store")
    assert not is_known(settings, location)


def test_who_looks_for_the_leader_goes_on_after_an_error_of_any_kind(settings, monkeypatch, caplog):
    """It is a thread of its own: if it ended, this host would never lead nor follow again."""
    outcomes = ["a decoder's", "a decoder's", "another's"]

    def read(_location: object) -> SeenLease:
        if outcomes:
            raise RuntimeError(f"an error, {outcomes.pop(0)}")
        return SeenLease(Lease(), b"")

    monkeypatch.setattr(leading, "CHECK_S", 0.001)
    monkeypatch.setattr(leading, "read_lease", read)
    posted: queue.Queue[Callable[[], None]] = queue.Queue()
    loop: Any = SimpleNamespace(post=posted.put)
    election = leading.LeaderElection(loop, settings, lambda: 0.0, nothing)
    election.start()
    try:
        assert [posted.get(timeout=20) for _ in range(3)] == [election._could_not_check] * 3
        assert posted.get(timeout=20) != election._could_not_check  # the lease is seen
    finally:
        election.stop()
    message = "cannot see who leads: an error, "
    assert caplog.messages == [f"{message}a decoder's", f"{message}another's"]  # each once
    assert election.trouble == ""


def refuse(_store: FileStore, _lease: bytes, _term_s: float) -> None:
    raise StoreNotWritableError("cannot write to the store: No space left on device")


def test_a_leader_goes_on_that_can_write_again_before_its_term_is_over(reign, loop, monkeypatch):
    loop.pass_time(5.0)
    with monkeypatch.context() as full:
        full.setattr(FileStore, "renew", refuse)
        loop.pass_time(TERM_S - RENEW_S)
        assert reign.may_act()
    loop.pass_time(5.0)
    assert reign.may_act()


def test_a_leader_that_has_stood_still_goes_on_if_it_can_still_renew(reign, loop):
    loop.stand_still(60.0)
    assert reign.may_act()


@pytest.mark.parametrize("stands_still", [True, False])
def test_a_leader_that_cannot_write_until_its_term_is_over_ends_and_says_why(
    reign, loop, monkeypatch, caplog, stands_still
):
    monkeypatch.setattr(FileStore, "renew", refuse)
    if stands_still:
        loop.stand_still(60.0)
    with pytest.raises(SystemExit):
        reign.may_act() if stands_still else loop.pass_time(TERM_S + RENEW_S)
    failed, ended = caplog.messages  # however often it has tried
    assert "No space left on device" in failed
    assert ended == "this controller steps down: its term is over"


def test_one_that_cannot_write_its_lease_at_first_does_not_lead(loop, settings, monkeypatch):
    monkeypatch.setattr(FileStore, "renew", refuse)
    with pytest.raises(StoreNotWritableError, match="No space left on device"):
        LeaderLease(settings, loop).open()


def test_a_leader_that_steps_down_names_its_heir_and_never_acts_again(reign, loop, settings):
    reign.release("two", leaves=True)
    lease = read_lease(location_at(settings.store_name)).lease
    assert (lease.holder, lease.heir, lease.leaves, lease.epoch) == ("one", "two", True, 1)
    for _ in range(3):
        assert not reign.may_act()
        loop.pass_time(5.0)
    assert read_lease(location_at(settings.store_name)).lease == lease


def test_a_leader_that_hears_no_other_host_gives_way_and_ends(reign, loop, settings):
    reign.away = lambda: "two"
    loop.pass_time(MIN_TENURE_S - 2 * RENEW_S)
    assert reign.may_act(), "it has led for too short a time"
    reign.away = lambda: ""
    loop.pass_time(5.0)
    assert reign.may_act(), "it hears others"
    reign.away = lambda: "two"
    with pytest.raises(SystemExit):
        loop.pass_time(5.0)
    assert read_lease(location_at(settings.store_name)).lease.heir == "two"


def test_a_leader_that_another_has_succeeded_steps_down_at_its_next_renewal(
    reign, loop, settings, caplog
):
    location_at(settings.store_name).open(after=1).close()
    assert reign.may_act(), "as it has renewed lately, and others wait for that"
    with pytest.raises(SystemExit):
        loop.pass_time(RENEW_S)
    assert re.search("this controller steps down: .* now names another writer", caplog.text)
