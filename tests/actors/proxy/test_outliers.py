"""A replica that fails where others do not gets no queries, over a real system."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.metrics import scraped, total
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow


class Hole:
    """Fails at once in the replica that has taken the file, while that is there."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        try:
            (self.folder / "bad").touch(exist_ok=False)
            self.is_bad = True
        except FileExistsError:
            self.is_bad = False

    def __call__(self, request: object = None) -> str:
        if self.is_bad and (self.folder / "bad").exists():
            raise RuntimeError("no GPU any more")
        time.sleep(0.01)
        return "good"


def test_a_black_hole_is_ejected_shown_and_let_in_again(running, client, name, serving, tmp_path):
    tag, route = serving(Hole, str(tmp_path), num_replicas=3), f"/{name}"

    def statuses(count: int) -> list[int]:
        return [running.get(route)[0] for _ in range(count)]

    def shown() -> dict[str, str]:
        return client.list_backends()[tag]

    def ejections() -> float:
        return total(scraped(running), "greenroom_replica_ejections_total", backend=tag)

    def is_ejected() -> bool:
        return 500 not in statuses(10) and ejections() == 1

    wait_until(is_ejected, 20, "the ejection")
    assert statuses(200).count(500) <= 1, "one may be a probe"
    wait_until(lambda: shown()["status"] == "UNHEALTHY", 5, "the report")
    assert "fails where other replicas do not" in shown()["message"]
    (tmp_path / "bad").unlink()

    def is_well() -> bool:
        statuses(1)
        return shown()["status"] == "HEALTHY"

    wait_until(is_well, 40, "the next probe")
    assert statuses(20) == [200] * 20
