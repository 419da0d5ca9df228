"""Rollouts over real systems: injected errors, restarts, the command line."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from greenroom.core.errors import DeployFailedError
from tests.support.systems import RunningSystem, wait_until


class Sometimes:
    """Fails each ``every``-th time; 0 is never."""

    def __init__(self, tag: str, every: int = 0) -> None:
        self.tag, self.every, self.calls = tag, every, 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.every and self.calls % self.every == 0:
            raise ValueError("injected")
        return self.tag


class Traffic:
    """GETs a path until it is told to end, and counts the answers."""

    def __init__(self, running: RunningSystem, path: str) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        self._running, self._path = running, path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def flowing(self) -> Iterator[Counter[tuple[int, str]]]:
        self._thread.start()
        try:
            yield self.counts
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            status, body = self._running.get(self._path)
            self.counts[status, body.decode() if status == 200 else ""] += 1


QUICK: dict[str, Any] = {"hold_s": 1.0, "min_samples": 20, "abort_if": {"error_rate_increase": 0}}


def test_a_good_version_gets_all_traffic_and_a_bad_one_none(running, client, name, serving):
    old, new, shop = serving(Sometimes, "v1"), serving(Sometimes, "v2", 4), name
    with Traffic(running, f"/{shop}").flowing() as counts:
        goal = client.rollout(shop, to=new, steps=[0.2, 1], **QUICK)
        with pytest.raises(DeployFailedError, match="queries were bad"):
            client.wait_for_goal(goal, 60)
        assert client.list_endpoints()[shop]["traffic"] == {old: 1.0}
        found = client.list_rollouts()[shop]
        assert found["state"] == "went back"
        # The last one may have been counted here before its client has.
        wait_until(lambda: found["new"]["errors"] <= counts[500, ""], 5, "no more than there were")
        goal = client.rollout(
            shop, to=new, steps=[0.5, 1], **{**QUICK, "abort_if": {"error_rate": 0.9}}
        )
        client.wait_for_goal(goal, 60)
    assert client.list_endpoints()[shop]["traffic"] == {new: 1.0}
    assert {status for status, _ in counts} == {200, 500}
    changes = [entry["what"] for entry in client.history()]
    assert not any("went back" in each for each in changes), "that changed no definition"
    assert changes[-1].startswith(f"rollout of endpoint {shop!r} to {new!r}: promoted")
