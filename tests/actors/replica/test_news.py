"""When a replica tells its router that a slot is free."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.actors.runtime.loop import Outbox
from greenroom.serve.handle import DeploymentHandle
from tests.actors.one_process import OneProcess


async def quick(number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("limit", "waits"), [(1, False), (2, True), (3, True)], ids=["one slot", "two", "three"]
)
def test_the_news_of_a_full_replica_do_not_wait_for_others(
    monkeypatch: pytest.MonkeyPatch, limit: int, waits: bool
) -> None:
    """With one slot the router can send nothing before it knows: 2 ms of waiting for each query."""
    waited: list[Any] = []
    put_patiently = Outbox.put_patiently

    def noting(outbox: Outbox, item: Any, within_s: float) -> None:
        waited.append(item)
        put_patiently(outbox, item, within_s)

    monkeypatch.setattr(Outbox, "put_patiently", noting)
    one = OneProcess(quick, limit=limit)
    try:
        handle = DeploymentHandle("e", None, client=one.client)

        async def ask() -> int:
            return await handle.remote(7)

        assert one.loop.run_until_complete(ask()) == 7
        assert any(field == "answered" for field, _ in waited) is waits
    finally:
        one.close()
