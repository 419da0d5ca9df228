"""A system whose files on disk were damaged while it was stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from greenroom import serve
from tests.persistence.disks import damage_value, places_in
from tests.support.systems import RunningSystem, wait_until

pytestmark = pytest.mark.slow


def application(text: str) -> serve.Application:
    return serve.deployment(lambda: text, name="D").bind()


def healthy(running: RunningSystem) -> list[str]:
    applications = running.status()["applications"].items()
    return [name for name, application in applications if application["status"] == "RUNNING"]


@pytest.fixture
def damaged(tmp_path):
    """Deploy "one" and "two", stop, damage the files of that kind that ``which`` picks."""
    running = RunningSystem(tmp_path / "state")
    running.start()
    for name in ("one", "two"):
        running.deploy(application(name), name=name, route_prefix=f"/{name}")
    running.stop()

    def damage(kind: str, which: Callable[[list[str]], list[str]] = lambda all_: all_) -> None:
        """Damage both copies of these."""
        root = running.settings.store_dir / "controller"
        places = places_in(root)
        for key in which(sorted(key for key in places if key.startswith(f"{kind}/"))):
            damage_value(root, places[key])

    yield running, damage
    running.disconnect()
    running.greenroom("stop")


def test_lost_code_hurts_its_own_application_alone_until_it_is_deployed_again(damaged):
    running, damage = damaged
    damage("code", lambda names: names[:1])
    root = running.settings.store_dir / "controller"
    damage_value(root, places_in(root)["application/two"], suffixes=[""])  # one copy alone
    (root / "epoch").write_bytes(b"")
    running.start()
    log = (running.settings.logs_dir / "controller.log").read_text()
    assert "or its copy is damaged, and both are written anew" in log
    assert f"{root / 'epoch'} is damaged (0 bytes long" in log
    wait_until(lambda: len(healthy(running)) == 1, 10, "one application serves")
    (name,) = healthy(running)
    assert running.get(f"/{name}") == (200, name.encode())
    message = "deploy that code again"
    wait_until(lambda: message in str(running.status()["applications"]), 10, "status tells it")
    for name in ("one", "two"):
        running.deploy(application(name), name=name, route_prefix=f"/{name}")
    wait_until(lambda: running.get("/one") == (200, b"one"), 10, "one")
    wait_until(lambda: running.get("/two") == (200, b"two"), 10, "two")


@pytest.fixture(name="vanishing")
def make_vanishing(tmp_path):
    running = RunningSystem(tmp_path / "state")
    running.start()
    running.deploy(application("one"), name="one", route_prefix="/one")
    yield running
    running.disconnect()
    running.greenroom("stop")


def test_a_store_that_vanishes_is_refused_until_it_is_back_and_requests_are_served(vanishing):
    store = vanishing.settings.store_dir
    away = store.with_name("away")
    before = vanishing.pid_of("controller")
    store.rename(away)
    os.kill(before, signal.SIGKILL)

    def trouble() -> str:
        return str(vanishing.status()["saving"]["error"])

    wait_until(lambda: "is not the store that was used" in trouble(), 15, "it is refused")
    assert vanishing.get("/one") == (200, b"one")
    output = vanishing.greenroom("status")
    assert output.returncode == 1
    assert "Is a volume not mounted?" in " ".join(output.stdout.split())
    os.kill(vanishing.status()["controller"]["pid"], signal.SIGKILL)  # nor is it taken next time
    wait_until(lambda: "is not the store that was used" in trouble(), 15, "it is refused again")
    assert vanishing.get("/one") == (200, b"one")
    store.rename(store.with_name("empty"))
    away.rename(store)
    wait_until(lambda: not trouble(), 15, "it is taken")
    vanishing.deploy(application("two"), name="two", route_prefix="/two")
    assert vanishing.get("/one") == (200, b"one")
    assert vanishing.get("/two") == (200, b"two")
