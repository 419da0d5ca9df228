"""A store that vanishes while its system runs, as a volume that is not mounted any more."""

from __future__ import annotations

import os
import signal

import pytest

from greenroom import serve
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow


def application(text: str) -> serve.Application:
    return serve.deployment(lambda: text, name="D").bind()


def test_a_store_that_vanishes_is_refused_until_it_is_back_and_requests_are_served(own_system):
    own_system.deploy(application("one"), name="one", route_prefix="/one")
    store = own_system.settings.store_dir
    away = store.with_name("away")
    before = own_system.pid_of("controller")
    store.rename(away)
    os.kill(before, signal.SIGKILL)

    def trouble() -> str:
        return str(own_system.status()["saving"]["error"])

    wait_until(lambda: "is not the store that was used" in trouble(), 15, "it is refused")
    assert own_system.get("/one") == (200, b"one")
    output = own_system.greenroom("status")
    assert output.returncode == 1
    assert "Is a volume not mounted?" in " ".join(output.stdout.split())
    os.kill(own_system.status()["controller"]["pid"], signal.SIGKILL)  # nor is it taken next time
    wait_until(lambda: "is not the store that was used" in trouble(), 15, "it is refused again")
    assert own_system.get("/one") == (200, b"one")
    store.rename(store.with_name("empty"))
    away.rename(store)
    wait_until(lambda: not trouble(), 15, "it is taken")
    own_system.deploy(application("two"), name="two", route_prefix="/two")
    assert own_system.get("/one") == (200, b"one")
    assert own_system.get("/two") == (200, b"two")
