"""A round's history has all that its clients saw, from the first of them on; hosts are fakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checker import clients
from tests.checker.faults import Faults
from tests.checker.histories import Journal
from tests.checker.runs import Plan, Run


class Host:
    """Its client creates an endpoint, and asks it once, before :func:`clients.begin` returns."""

    pid = 1

    def __init__(self, cluster: Any, label: str) -> None:
        self.cluster, self.label = cluster, label
        self.environ = {"GREENROOM_HTTP_PORT": "8000"}

    def start(self, **_environ: str) -> None:
        pass

    def another(self) -> Host:
        return self

    def end(self) -> None:
        pass

    def call(self, function: Any, *args: Any) -> None:
        if function is not clients.begin:
            return
        (work,) = args
        journal = Journal(work.folder / f"clients-{work.name}")
        runs = Journal(self.cluster.folder / "runs" / f"replica-{work.name}")
        endpoint, key = f"e{self.label}", f"{work.name}-0"
        journal.write("asked", f"{key}-made", endpoint, "create", {"v0": 1.0})
        journal.write("answered", f"{key}-made", "ok", None)
        journal.write("sent", key, self.label, endpoint, "GET")
        runs.write("began", key, "v0")
        runs.write("ended", key, "v0")
        journal.write("got", key, 200, f"v0 {key}")
        journal.close()
        runs.close()


def test_what_first_clients_are_answered_before_the_last_have_begun_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faults, "run", lambda *_: iter(()))
    monkeypatch.setattr(Faults, "heal", lambda _: True)
    cluster: Any = SimpleNamespace(folder=tmp_path)
    cluster.hosts = [Host(cluster, label) for label in "abc"]
    run = Run(cluster, Plan(folder=tmp_path, hosts=3))
    run.begin()
    for _ in range(2):
        verdict = run.round()
        assert not verdict.violations, verdict.violations
        assert len(verdict.history.requests) == len(verdict.history.runs) == 3
