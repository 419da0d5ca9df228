"""A system whose files on disk were damaged while it was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom import serve
from tests.support.systems import RunningSystem, wait_until


def application(text: str) -> serve.Application:
    return serve.deployment(lambda: text, name="D").bind()


def healthy(running: RunningSystem) -> list[str]:
    applications = running.status()["applications"].items()
    return [name for name, application in applications if application["status"] == "RUNNING"]


@pytest.fixture
def damaged(tmp_path: Path):
    """Deploy "one" and "two", stop, damage the files of that kind that ``which`` picks."""
    running = RunningSystem(tmp_path / "state")
    running.start()
    for name in ("one", "two"):
        running.deploy(application(name), name=name, route_prefix=f"/{name}")
    running.stop()

    def damage(kind: str, which: Callable[[list[Path]], list[Path]] = lambda all_: all_) -> None:
        for path in which(sorted(running.settings.store_dir.rglob(f"{kind}%2F*"))):
            raw = bytearray(path.read_bytes())
            raw[-9] ^= 0xFF
            path.write_bytes(raw)

    yield running, damage
    running.disconnect()
    running.greenroom("stop")


def test_lost_code_hurts_its_own_application_alone_until_it_is_deployed_again(damaged) -> None:
    running, damage = damaged
    damage("code", lambda paths: paths[:1])
    running.start()
    wait_until(lambda: len(healthy(running)) == 1, 10, "one application serves")
    (name,) = healthy(running)
    assert running.get(f"/{name}") == (200, name.encode())
    told = "deploy that code again"
    wait_until(lambda: told in str(running.status()["applications"]), 10, "status tells it")
    for name in ("one", "two"):
        running.deploy(application(name), name=name, route_prefix=f"/{name}")
    wait_until(lambda: running.get("/one") == (200, b"one"), 10, "one")
    wait_until(lambda: running.get("/two") == (200, b"two"), 10, "two")
