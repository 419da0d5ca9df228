"""warmup() runs after the constructor and reconfigure, and before the replica takes traffic."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from typing import Any, ClassVar

import pytest

from greenroom import serve
from greenroom.actors.replica.servable import http_methods
from greenroom.actors.replica.user_code import Failure, UserCode
from greenroom.serve.exceptions import DeployFailedError
from tests.support.systems import wait_until

STEPS: list[str] = []


class Sync:
    def __init__(self) -> None:
        STEPS.append("constructor")

    def reconfigure(self, config: Any) -> None:
        STEPS.append(f"config {config}")

    def warmup(self) -> None:
        STEPS.append(f"warm {threading.current_thread().name.partition('_')[0]}")


class Async(Sync):
    async def warmup(self) -> None:
        await asyncio.sleep(0)
        STEPS.append("warm, awaited")


class Raises(Sync):
    def warmup(self) -> None:
        raise ValueError("no weights")


class TakesSomething(Sync):
    def warmup(self, batch: int) -> None:  # type: ignore[override]
        """Never called."""


def function() -> None:
    """Have an attribute of that name, as functions may."""


function.warmup = "no method"  # type: ignore[attr-defined]


def loaded(target: Any) -> Failure | None:
    STEPS.clear()
    code = UserCode()
    code.start()
    config = "c" if target is not function else None
    failure = code.load(pickle.dumps((target, (), {})), config).result(10)
    code.end()
    return failure


def test_it_runs_last_on_a_thread_or_on_the_loop():
    assert loaded(Sync) is None
    assert STEPS == ["constructor", "config c", "warm user"]
    assert loaded(Async) is None
    assert STEPS == ["constructor", "config c", "warm, awaited"]
    assert loaded(function) is None


def test_what_it_raises_is_a_failed_start():
    failure = loaded(Raises)
    assert failure is not None
    assert failure.text == "ValueError: no weights"
    assert not failure.lasts
    failure = loaded(TakesSomething)
    assert failure is not None
    assert "warmup() is called without arguments: missing a required argument" in failure.text
    assert failure.lasts


def test_no_request_may_name_it():
    assert http_methods(Sync) == frozenset()


def test_a_replica_takes_no_traffic_before_it_and_it_counts_as_the_constructor(deployed):
    class Warm:
        def __init__(self) -> None:
            self.is_warm = False

        async def warmup(self) -> None:
            await asyncio.sleep(0.3)
            self.is_warm = True

        def __call__(self) -> bool:
            return self.is_warm

    assert deployed(serve.deployment(Warm).bind()).remote().result(10) is True
    late = serve.deployment(constructor_timeout_s=0.2, max_constructor_retry_count=1, version="2")
    with pytest.raises(DeployFailedError, match=r"constructor_timeout_s=0\.2"):
        deployed(late(Warm).bind())


def test_what_user_code_cancels_before_it_begins_has_failed_and_the_next_one_is_taken():
    code = UserCode()
    code.start()
    assert code.load(pickle.dumps((Sync, (), {})), None).result(10) is None
    posted = []

    def cancel_all():
        for task in asyncio.all_tasks(code.loop):
            task.cancel()

    def post():
        posted.append(code.reconfigure("c"))
        code.loop.call_soon(cancel_all)

    code.loop.call_soon_threadsafe(post)
    wait_until(lambda: posted, 10, "it is posted")
    assert "user code cancelled it before it began" in posted[0].result(10).text
    assert code.reconfigure("d").result(10) is None
    code.end()


class Waiting:
    """Waits for what only a cycle of references holds, and says how that ended."""

    ends: ClassVar[list[str]] = []

    async def check_health(self):
        inbox: asyncio.Queue[None] = asyncio.Queue()

        async def feed():
            inbox.put_nowait(await asyncio.get_running_loop().create_future())

        feeding = asyncio.ensure_future(feed())
        try:
            await inbox.get()
        except BaseException as error:
            Waiting.ends.append(type(error).__name__)
            raise
        finally:
            feeding.cancel()


def test_what_nobody_waits_for_any_more_is_cancelled_and_not_collected_before():
    code = UserCode()
    code.start()
    assert code.load(pickle.dumps((Waiting, (), {})), None).result(10) is None
    check = code.check_health()
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), code.loop).result(10) is None
    gc.collect()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), code.loop).result(10)
    assert not Waiting.ends
    assert check.cancel()
    wait_until(lambda: Waiting.ends, 10, "it has ended")
    assert Waiting.ends == ["CancelledError"]
    code.end()


def test_settings_that_come_before_the_code_are_no_failure():
    """While packages or folders are made; it is loaded with the newest."""
    STEPS.clear()
    code = UserCode()
    code.start()
    assert code.reconfigure("c").result(10) is None
    assert code.load(pickle.dumps((Sync, (), {})), "c").result(10) is None
    code.end()
    assert STEPS[:2] == ["constructor", "config c"]
