"""Rollouts over real systems: injected errors, restarts, the command line."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from greenroom import serve
from greenroom.core.errors import DeployFailedError
from greenroom.core.operations import Canary, DeployApplications
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.build import build
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


@serve.deployment
class Inner:
    def __init__(self, version: str) -> None:
        self.version = version

    async def name(self) -> str:
        return self.version


@serve.deployment
class Outer:
    def __init__(self, inner: Any, version: str, every: int = 0) -> None:
        self.inner, self.version, self.every, self.calls = inner, version, every, 0

    async def __call__(self) -> list[str]:
        self.calls += 1
        if self.every and self.calls % self.every == 0:
            raise ValueError("injected")
        return [self.version, await self.inner.name.remote()]


def deploy_composed(
    system: RunningSystem, version: str, canary: dict[str, Any] | None, every: int = 0
) -> str:
    built = build(Outer.bind(Inner.bind(version), version, every), "whole", "/whole")
    asked = DeployApplications(
        applications=built.applications,
        keep_others=True,
        canary=None if canary is None else Canary(**canary),
    )
    goal: str = system.connection.request(asked)["goals"]["whole"]
    return goal


def answer_of(version: str) -> str:
    return f'["{version}","{version}"]'


@pytest.mark.slow
def test_a_composed_application_is_new_or_old_as_a_whole_though_the_controller_dies(own_system):
    wait = partial(wait_for_goal, own_system.connection, timeout_s=60)
    canary = {"steps": (0.5, 1.0), "hold_s": 2.0, "min_samples": 20, "compare": "json"}
    wait(deploy_composed(own_system, "one", None))
    with Traffic(own_system, "/whole").flowing() as counts:
        goal = deploy_composed(own_system, "two", canary)
        wait_until(lambda: counts[200, answer_of("two")], 30, "an answer of the new version")
        os.kill(own_system.pid_of("controller"), signal.SIGKILL)
        wait(goal)
        assert own_system.get("/whole")[1].decode() == answer_of("two")
        goal = deploy_composed(own_system, "three", canary, every=2)
        with pytest.raises(DeployFailedError, match="'whole' went back: error_rate_increase"):
            wait(goal)
        judged = {**canary, "abort_if": {"difference_rate": 0.1}}
        goal = deploy_composed(own_system, "four", judged)
        with pytest.raises(DeployFailedError, match=r"'whole' went back: difference_rate: \d+ of"):
            wait(goal)
    assert own_system.get("/whole")[1].decode() == answer_of("two")
    known = {(200, answer_of(version)) for version in ("one", "two", "three", "four")}
    assert counts.keys() <= known | {(500, "")}
    gone = lambda: set(own_system.status()["applications"]) == {"whole"}  # noqa: E731
    wait_until(gone, 20, "the new version's end")
