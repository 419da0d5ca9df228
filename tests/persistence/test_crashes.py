"""The writer dies between every two system calls; what is left must be all before or all after.

Two deaths: a kill (the system keeps what was done), and a power cut (what was not fsynced is lost,
in every combination of folders).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from greenroom.persistence import filesystem
from greenroom.persistence.kv import NothingSavedError, StoreNotWritableError
from greenroom.persistence.layout import Disk

from .disks import LOGS, Death, DyingDisk, FullDisk, open_store, read_store, state_of  # noqa: TID251 - the tests' own folder

Change = tuple[dict[str, bytes], list[str]]

MEMORY = "/dev/shm"
LARGE = b"a large one"
BEFORE = {"a": b"old a", "b": b"old b", "c": LARGE}
CHANGES: dict[str, Change] = {
    "a new key": ({"d": b"new d"}, []),
    "a replaced key": ({"a": b"new a"}, []),
    "an emptied key": ({"a": b""}, []),
    "a deleted key": ({}, ["b"]),
    "an absent key deleted": ({}, ["z"]),
    "a large value": ({"b": LARGE[::-1], "c": LARGE[::-1]}, []),
    "a batch": ({"a": b"new a", "d": b"new d"}, ["b", "z"]),
    "a batch of deletes": ({}, ["a", "b", "c"]),
}
DEATHS: dict[str, Callable[[DyingDisk], None]] = {
    "a kill": lambda disk: None,
    "a power cut that loses all names": lambda disk: disk.cut_power(lambda folder: True),
    "a power cut that loses no names": lambda disk: disk.cut_power(lambda folder: False),
    "a power cut that loses the names of large values": lambda disk: disk.cut_power(
        lambda folder: folder.name == "large"
    ),
    "a power cut that leaves zeros": lambda disk: disk.cut_power(
        lambda folder: False, leaves_zeros=True
    ),
}


@pytest.fixture(autouse=True)
def call_few_bytes_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "LARGE", len(LARGE) - 1)


@pytest.fixture(name="empty")
def make_empty() -> Iterator[Path]:
    """Make a folder in memory where there is such a place.

    Thousands of stores are made here, and what a death leaves of them is worked out by DyingDisk.
    """
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        path = Path(folder) / "template"
        path.mkdir()
        yield path


@pytest.fixture(name="template")
def make_template(empty: Path) -> Path:
    store = open_store(empty)
    store.apply(BEFORE)
    store.close()
    return empty


def after(state: dict[str, bytes], change: Change) -> dict[str, bytes]:
    puts, deletes = change
    return {key: value for key, value in {**state, **puts}.items() if key not in deletes}


def reopened(path: Path) -> dict[str, bytes | None]:
    """Open for writing with a sound disk, check that nothing is left over, return the state."""
    as_seen_by_reader = None
    if (path / "default" / "format").exists():
        as_seen_by_reader = state_of(read_store(path))
    store = open_store(path)
    try:
        state = state_of(store)
        assert as_seen_by_reader in (None, state)
    finally:
        store.close()
    root = path / "default"
    log = f"log-{store.epoch:010d}-000001"
    assert {file.name for file in root.iterdir()} == {
        *("change", "format", "format.copy", "lock", "epoch", "epoch.copy", "large"),
        *(log, f"{log}.copy"),
    }
    assert (root / log).read_bytes() == (root / f"{log}.copy").read_bytes()
    large = [value for value in state.values() if value and len(value) > filesystem.LARGE]
    assert sorted(file.read_bytes() for file in (root / "large").iterdir()) == sorted(2 * large)
    return state


def die(path: Path, step: int, death: str, act: Callable[[Disk], None]) -> bool:
    """Die at one step of ``act``, or after it; return False where it had fewer steps."""
    disk = DyingDisk(path, step)
    died = False
    try:
        act(disk)
    except Death:
        died = True
    DEATHS[death](disk)
    return died


def copies(template: Path) -> Iterator[tuple[int, Path]]:
    for step in count():
        path = template.with_name(f"{template.name}-{step}")
        shutil.copytree(template, path)
        yield step, path


def applying(path: Path, changes: list[Change], returned: list[Change]) -> Callable[[Disk], None]:
    def act(disk: Disk) -> None:
        store = open_store(path, disk=disk)
        try:
            for puts, deletes in changes:
                store.apply(puts, deletes)
                returned.append((puts, deletes))
        finally:
            store.close()

    return act


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_made_wholly_or_not_at_all(template: Path, change: Change, death: str) -> None:
    for step, path in copies(template):
        returned: list[Change] = []
        died = die(path, step, death, applying(path, [change], returned))
        allowed = [after(BEFORE, change)] if returned else [BEFORE, after(BEFORE, change)]
        assert reopened(path) in allowed, f"died at step {step}"
        if not died:
            assert returned
            return


@pytest.mark.slow
@pytest.mark.parametrize("logs", LOGS)
@pytest.mark.parametrize("death", DEATHS)
def test_every_change_whose_apply_returned_is_there(
    template: Path, death: str, logs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LOGS[logs].items():
        monkeypatch.setattr(filesystem, name, value)
    changes: list[Change] = [
        ({"a": b"1", "b": b"1"}, ["c"]),
        ({}, ["b"]),
        ({"b": b"3", "c": LARGE}, ["a"]),
        ({"a": b"5", "c": b"5"}, []),
    ]
    states = [BEFORE]
    for change in changes:
        states.append(after(states[-1], change))
    for step, path in copies(template):
        returned: list[Change] = []
        died = die(path, step, death, applying(path, changes, returned))
        assert reopened(path) in states[len(returned) : len(returned) + 2], f"died at step {step}"
        if not died:
            return


@pytest.mark.parametrize("death", DEATHS)
def test_a_store_half_made_is_made_by_the_next_opening(empty: Path, death: str) -> None:
    for step, path in copies(empty):
        returned: list[Change] = []
        deep = path / "new" / "store"
        died = die(path, step, death, applying(deep, [CHANGES["a batch"]], returned))
        whole = after({}, CHANGES["a batch"])
        assert not returned or read_store(deep)
        assert reopened(deep) in ([whole] if returned else [{}, whole]), f"died at step {step}"
        if not died:
            return


@pytest.mark.parametrize("death", DEATHS)
def test_what_was_seen_after_a_kill_survives_a_power_cut(template: Path, death: str) -> None:
    for step, path in copies(template):
        disk = DyingDisk(path, step)
        with suppress(Death):
            applying(path, [CHANGES["a replaced key"]], [])(disk)
        died = disk.steps > step
        disk.die_at = inf
        store = open_store(path, disk=disk)
        seen = state_of(store)
        store.close()
        DEATHS[death](disk)
        assert reopened(path) == seen, f"died at step {step}"
        if not died:
            return


@pytest.mark.slow
@pytest.mark.parametrize("death", ["a kill", "a power cut that loses all names"])
def test_dying_again_while_recovering_changes_nothing(template: Path, death: str) -> None:
    change: Change = ({"a": b"new a"}, ["b"])
    done = after(BEFORE, change)
    for first, path in copies(template):
        died = die(path, first, "a kill", applying(path, [change], []))
        if not died:
            return
        if state_of(read_store(path)) != done:
            continue  # it was not made
        for second, copy in copies(path):
            recovering = die(copy, second, death, applying(copy, [], []))
            assert reopened(copy) == done, f"died at step {first}, then at step {second}"
            shutil.rmtree(copy)
            if not recovering:
                break


@pytest.mark.parametrize("death", DEATHS)
def test_the_epoch_grows_whenever_an_opening_dies(template: Path, death: str) -> None:
    for step, path in copies(template):
        died = die(path, step, death, applying(path, [], []))
        store = open_store(path)
        store.close()
        assert store.epoch >= 2, f"died at step {step}"
        if not died:
            assert store.epoch == 3
            return


@pytest.mark.parametrize("logs", LOGS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_disk_that_fails_once_leaves_a_store_that_works_on(
    template: Path, change: Change, logs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LOGS[logs].items():
        monkeypatch.setattr(filesystem, name, value)
    for step, path in copies(template):
        disk = FullDisk()
        store = open_store(path, disk=disk)
        store.apply({"first": b"1"})
        disk.fail_at = reached = disk.steps + step
        failed = is_undone = False
        try:
            store.apply(*change)
        except StoreNotWritableError as error:
            failed, is_undone = True, isinstance(error, NothingSavedError)
        is_last = disk.steps <= reached
        disk.fail_at = None
        seen = state_of(store)
        before = {**BEFORE, "first": b"1"}
        assert seen == before or not is_undone, f"it was made, failing at step {step}"
        assert seen in ([before, after(before, change)] if failed else [after(before, change)])
        assert state_of(read_store(path)) == seen, f"failed at step {step}"
        store.apply({"other": b"1"})
        store.apply({"a": b"later", "other": b"2"})
        expected = {**seen, "a": b"later", "other": b"2"}
        assert state_of(store) == expected
        store.close()
        assert reopened(path) == expected, f"failed at step {step}"
        if is_last:
            assert not failed
            return
