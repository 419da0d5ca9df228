"""Folders of a runtime_env, as they arrive at a host."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import weakref
import zipfile

import pytest

from greenroom.actors.environments.folders import Arrival
from greenroom.core.errors import DeployFailedError
from tests.support.timing import until

pytestmark = pytest.mark.anyio


def zipped() -> bytearray:
    """Return a folder with one file, as it travels."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.py", "")
    return bytearray(content.getvalue())


async def test_a_folder_that_cannot_be_unpacked_for_any_reason_fails_its_replica(tmp_path):
    """And gives the lock back: others would wait for it for ever."""
    sent = zipped()
    for header, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = sent.index(header) + offset
        sent[at : at + 2] = (99).to_bytes(2, "little")  # a compression that there is not
    digest = hashlib.sha256(sent).hexdigest()

    async def fetch() -> None:
        arrival = Arrival(tmp_path, digest, lambda: arrival.arrived(memoryview(sent), ""))
        await asyncio.wait_for(arrival.end(), 10)

    for _ in range(2):
        with pytest.raises(
            DeployFailedError,
            match="cannot be unpacked: That compression method is not supported",
        ):
            await fetch()


async def test_what_came_is_not_kept_in_memory(tmp_path):
    digest = hashlib.sha256(zipped()).hexdigest()
    kept: list[weakref.ref[memoryview]] = []

    def answer() -> None:
        view = memoryview(zipped())
        kept.append(weakref.ref(view))
        arrival.arrived(view, "")

    arrival = Arrival(tmp_path, digest, answer)
    await asyncio.wait_for(arrival.end(), 10)
    assert (tmp_path / digest / "a.py").exists()
    await until(lambda: gc.collect() >= 0 and kept[0]() is None)  # the thread lets go of it last
    arrival.arrived(None, "a repeat is ignored")


async def test_what_the_controller_does_not_have_fails_the_replica_and_a_repeat_is_ignored(
    tmp_path,
):
    def answer() -> None:
        for reason in ("it was deleted", "once more"):
            arrival.arrived(None, reason)

    arrival = Arrival(tmp_path, "0" * 64, answer)
    arrival.arrived(None, "an answer to another replica's question")
    with pytest.raises(DeployFailedError, match="it was deleted"):
        await asyncio.wait_for(arrival.end(), 10)
