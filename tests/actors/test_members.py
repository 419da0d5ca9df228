"""The hosts of a cluster, as the controller deals with them: without any, and with a clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.actors import members
from understudy.actors.controller import KINDS
from understudy.actors.members import LOCATE_AGAIN_S, Members
from understudy.actors.processes import this_process
from understudy.actors.settings import read_settings
from understudy.core.cluster import Cluster
from understudy.core.placement import Placement
from understudy.core.records import HostRecord


class FakePort:
    """Keeps what is asked of other hosts' admins."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[tuple[str, str, Callable[[Any], None]]] = []

    def locate(self, _kind: str, name: str, on_located: Callable[[Any], None], gate: Any) -> None:
        self.asked.append((name, gate.addressDetails.text, on_located))


class FakeLoop:
    asyncio = None


def test_a_replica_is_asked_for_again_when_no_answer_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, port = [100.0], FakePort()
    found: list[Any] = []
    monkeypatch.setattr(members.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(members, "Port", lambda *_: port)
    records: dict[str, Any] = {kind: {} for kind in KINDS}
    records["host"]["b"] = HostRecord(
        name="b", id="1", address="10.0.0.2:1900", capacity={}, labels={}
    )
    cluster = Cluster(records, 1, now[0], Placement(), own_host="a")
    settings = read_settings({}, state_dir=str(tmp_path))
    hosts = Members(FakeLoop(), cluster, settings, this_process(), lambda: None)  # type: ignore[arg-type]

    def locate() -> None:
        hosts.locate("t#1", "b", found.append)

    locate()
    locate()
    assert [each[:2] for each in port.asked] == [("replica t#1", "10.0.0.2:1900")]
    now[0] += LOCATE_AGAIN_S
    locate()
    assert len(port.asked) == 2
    port.asked[1][2]("there")
    assert found == ["there"] * 3
    port.asked[0][2]("there")  # the first answer, after all
    assert found == ["there"] * 3
    hosts.locate("t#1", "gone", found.append)
    assert len(port.asked) == 2
