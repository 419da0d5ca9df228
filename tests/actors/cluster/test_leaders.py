"""Leaders that cannot be: each is refused before it does harm, naming what and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.errors import StartError
from tests.support.systems import RunningSystem, free_port, running_system

OWN, OTHER = "127.0.0.8", "127.0.0.9"


def leader(tmp_path: Path, name: str, bind: str, port: int, **more: str) -> RunningSystem:
    leaders = ",".join(sorted({f"{OWN}:{port}", f"{OTHER}:{port}"}, reverse=True))
    environ = {
        "GREENROOM_BIND": bind,
        "GREENROOM_ADMIN_PORT": str(port),
        "GREENROOM_LEADERS": leaders,
        "GREENROOM_HOST_NAME": name,
    }
    return RunningSystem(tmp_path, **{**environ, **more})


def test_who_is_not_first_does_not_begin_alone_with_a_state_dir_nobody_led_from(
    tmp_path: Path,
) -> None:
    alone = leader(tmp_path, "two", OWN, free_port())
    with pytest.raises(StartError, match="no host has led from the state dir") as refused:
        alone.start()
    told = str(refused.value)
    first = alone.settings.leader_addresses[0]
    assert first.startswith(OTHER)
    assert f"cannot join {first}: nothing listens at its port" in told
    assert f"start {first} first, or name the folder that all leaders share" in told
    assert not alone.pids()


def test_leaders_with_different_lists_are_told_so(tmp_path: Path) -> None:
    port = free_port()
    first = leader(tmp_path, "one", OTHER, port)
    first.start()
    try:
        other_way_round = f"{OWN}:{port},{OTHER}:{port}"
        second = leader(tmp_path, "two", OWN, port, GREENROOM_LEADERS=other_way_round)
        with pytest.raises(StartError, match=r"the same list, in the same order"):
            second.start()
        assert [host["name"] for host in first.status()["hosts"]] == ["one"]
    finally:
        first.stop()


def test_the_first_does_not_begin_anew_where_another_holds_another_key(tmp_path: Path) -> None:
    """As when the shared folder is not mounted: it would serve none of what was deployed."""
    port = free_port()
    with running_system(tmp_path / "other", GREENROOM_BIND=OWN, GREENROOM_ADMIN_PORT=str(port)):
        alone = leader(tmp_path / "alone", "one", OTHER, port)
        with pytest.raises(StartError, match="it has another cluster's file") as refused:
            alone.start()
    assert "name the folder that all leaders share" in str(refused.value)
    assert not alone.pids()


def test_leaders_whose_state_dirs_are_not_one_folder_are_told_so(tmp_path: Path) -> None:
    port = free_port()
    first = leader(tmp_path / "one", "one", OTHER, port)
    first.start()
    try:
        key = str(first.settings.cluster_key)
        second = leader(tmp_path / "two", "two", OWN, port, GREENROOM_KEY_FILE=key)
        with pytest.raises(StartError, match="they hold different ids"):
            second.start()
        assert not second.pids()
        assert first.status()["controller"]["host"] == "one"
        assert [host["name"] for host in first.status()["hosts"]] == ["one"]
    finally:
        first.stop()
