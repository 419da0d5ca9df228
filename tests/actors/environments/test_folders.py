"""Folders of a runtime_env, as they arrive at a host."""

from __future__ import annotations

import hashlib
import io
import queue
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from greenroom.actors.environments.folders import Arrival
from greenroom.core.errors import DeployFailedError


def test_a_folder_that_cannot_be_unpacked_for_any_reason_fails_its_replica(
    tmp_path: Path,
) -> None:
    """And gives the lock back: others would wait for it for ever."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.py", "")
    zipped = bytearray(content.getvalue())
    for header, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = zipped.index(header) + offset
        zipped[at : at + 2] = (99).to_bytes(2, "little")  # a compression that there is not
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    results: list[Any] = []
    loop: Any = SimpleNamespace(
        post=posted.put, call_later=lambda *_: SimpleNamespace(cancel=lambda: None)
    )
    digest = hashlib.sha256(zipped).hexdigest()
    for _ in range(2):
        arrival = Arrival(loop, tmp_path, digest, lambda: None, results.append)
        arrival.begin()
        arrival.arrived(memoryview(bytes(zipped)), "")
        posted.get(timeout=10)()
    assert [type(each) for each in results] == [DeployFailedError] * 2
    assert "cannot be unpacked: That compression method is not supported" in str(results[0])
