"""Sticky sessions of real replicas, by cookie, header and handle."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from greenroom import serve
from tests.support.asking import ask as ask_url
from tests.support.systems import RunningSystem, wait_until


@serve.deployment(num_replicas=3, health_check_period_s=1)
class Pids:
    def __call__(self, _request: Any = None) -> str:
        return str(os.getpid())


def ask(system: RunningSystem, **headers: str) -> tuple[int, str | None]:
    """Return the pid that answers, and the cookie that it sets."""
    answer = ask_url(f"{system.url}/", headers=headers.items())
    return int(answer.body), answer.headers["Set-Cookie"]


@pytest.mark.slow
def test_sessions_stay_until_their_replica_is_gone(own_system):
    by_cookie = {"cookie": "chat", "max_age_s": 60}
    system = own_system
    system.deploy(Pids.options(session_affinity=by_cookie).bind())
    first, cookie = ask(system)
    assert cookie is not None
    assert "HttpOnly; SameSite=lax; Max-Age=60" in cookie.replace("Lax", "lax")
    value = cookie.partition(";")[0]
    for _ in range(6):
        assert ask(system, Cookie=value) == (first, None)
    assert len({ask(system)[0] for _ in range(12)}) == 3, "others are anywhere"
    with system.as_default():
        named = serve.get_app_handle("default").options(session_id="42")
        assert len({named.remote().result(10) for _ in range(6)}) == 1
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: first not in system.replica_pids(), 10, "it is gone")
    second, cookie = ask(system, Cookie=value)
    assert second != first
    assert cookie is not None
    moved = cookie.partition(";")[0]
    assert moved.partition(".")[0] == value.partition(".")[0], "the same session"
    wait_until(lambda: len(system.replica_pids()) == 3, 20, "another replica")
    for _ in range(6):
        assert ask(system, Cookie=moved) == (second, None)
    by_header = {"header": "X-Session-ID"}
    system.deploy(Pids.options(session_affinity=by_header).bind())
    assert len({ask(system, **{"X-Session-ID": "7"})[0] for _ in range(6)}) == 1
    assert ask(system, **{"X-Session-ID": "7"})[1] is None
