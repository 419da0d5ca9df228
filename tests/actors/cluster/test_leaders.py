"""Hosts that may lead, by a folder that they share; and folders that cannot be shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.actors.transport.cluster_key import ensure_key
from greenroom.core.errors import StartError
from tests.support.systems import RunningSystem, free_port

pytestmark = pytest.mark.slow

ONE, TWO = "127.0.0.8", "127.0.0.9"


def leader(tmp_path: Path, name: str, bind: str, port: int, store: Path) -> RunningSystem:
    key = tmp_path / "cluster.key"
    ensure_key(key)
    return RunningSystem(
        tmp_path / name,
        GREENROOM_BIND=bind,
        GREENROOM_ADMIN_PORT=str(port),
        GREENROOM_HOST_NAME=name,
        GREENROOM_KEY_FILE=str(key),
        GREENROOM_STORE=str(store),
    )


def test_a_host_does_not_begin_anew_in_a_folder_that_is_not_there_or_has_lost_its_state(tmp_path):
    """As when the folder is not mounted: it would serve none of what was deployed."""
    store = tmp_path / "store of all"
    alone = leader(tmp_path, "one", ONE, free_port(), store)
    with pytest.raises(StartError, match="all: there is no such folder; make it, or mount"):
        alone.start()
    assert not store.exists()
    store.mkdir()
    alone.start()
    alone.stop()
    known = alone.settings.known_store_file
    (store / "store").rename(tmp_path / "elsewhere")
    for content in (known.read_bytes(), b"", b"\xff\xfe"):
        known.write_bytes(content)  # a damaged one cannot say that nothing was seen
        with pytest.raises(StartError, match="is empty, and this host has seen a state") as caught:
            alone.start()
        assert not alone.pids()
    assert f"to begin anew, delete {known}" in str(caught.value)
    known.unlink()
    alone.start()
    alone.stop()
