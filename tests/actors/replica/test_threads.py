"""Threads of sync code: order, cancelling, batches, and code that is bound to its thread."""

from __future__ import annotations

import asyncio
import ctypes
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

import cloudpickle
import pytest

from greenroom.actors.replica.threads import Threads
from greenroom.actors.replica.user_code import (
    PR_SET_TIMERSLACK,
    USERS_SLACK_NS,
    UserCode,
    UserLoop,
)
from greenroom.serve.handle import DeploymentHandle
from tests.actors.one_process import OneProcess

LIMIT_S = 10


def run(test: Callable[[Threads], Coroutine[Any, Any, None]], size: int) -> None:
    async def all_of_it() -> None:
        threads = Threads(asyncio.get_running_loop(), size)
        try:
            await asyncio.wait_for(test(threads), LIMIT_S)
        finally:
            threads.end()

    asyncio.run(all_of_it())


def test_calls_begin_in_their_order() -> None:
    begun: list[int] = []

    async def test(threads: Threads) -> None:
        await asyncio.gather(*(threads.run(begun.append, (n,)) for n in range(100)))
        assert begun == list(range(100))

    run(test, 1)


def test_no_more_threads_than_calls_or_the_limit() -> None:
    together = threading.Barrier(3)

    async def test(threads: Threads) -> None:
        before = threading.active_count()
        for _ in range(5):
            await threads.run(len, ("",))
        assert threading.active_count() == before + 1
        await asyncio.gather(*(threads.run(together.wait, (LIMIT_S,)) for _ in range(6)))
        assert threading.active_count() == before + 3

    run(test, 3)


@pytest.mark.parametrize("error", [StopIteration(1), KeyError("a"), SystemExit(2)])
def test_what_a_call_raises_is_raised_here(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def test(threads: Threads) -> None:
        caught: BaseException | None = None
        try:
            await threads.run(fail, ())
        except RuntimeError as raised:  # what a coroutine makes of StopIteration
            caught = raised.__cause__
        except BaseException as raised:
            caught = raised
        assert caught is error
        assert await threads.run(len, ("abc",)) == 3

    run(test, 1)


def test_a_call_has_the_context_of_its_task() -> None:
    name: ContextVar[str] = ContextVar("name")

    async def named(threads: Threads, value: str) -> None:
        name.set(value)
        assert await threads.run(name.get, ()) == value

    async def test(threads: Threads) -> None:
        await asyncio.gather(*(named(threads, str(n)) for n in range(20)))

    run(test, 4)


def test_a_call_that_is_cancelled_while_it_waits_never_runs() -> None:
    gate, ran = threading.Event(), []

    async def test(threads: Threads) -> None:
        first = asyncio.create_task(threads.run(gate.wait, (LIMIT_S,)))
        second = asyncio.create_task(threads.run(ran.append, (1,)))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert threads.taken == 1
        gate.set()
        assert await first
        await threads.run(ran.append, (2,))
        assert ran == [2]

    run(test, 1)


def test_a_call_that_is_cancelled_while_it_runs_holds_its_thread() -> None:
    begun, gate = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(LIMIT_S)

    async def test(threads: Threads) -> None:
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(threads.run(wait, ()))
        await loop.run_in_executor(None, begun.wait, LIMIT_S)
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        assert threads.taken == 1
        assert threads.stuck(1, loop.time() + 1000).unwanted_s > 0
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert threads.stuck(1, loop.time() + 1000).unwanted_s == 0
        assert threads.taken == 0

    run(test, 1)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    woken = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(*args, **options)


def test_results_that_come_while_the_loop_is_busy_wake_it_once() -> None:
    loop, calls, ended = CountingLoop(), 50, threading.Semaphore(0)

    async def test() -> None:
        threads = Threads(loop, 1)
        tasks = [asyncio.create_task(threads.run(ended.release, ())) for _ in range(calls)]
        await asyncio.sleep(0)
        for _ in range(calls):  # this loop stands still until all have run
            assert ended.acquire(timeout=LIMIT_S)
        # Its last thread's result may come a moment after what the call has done.
        await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
        threads.end()

    try:
        loop.run_until_complete(test())
    finally:
        loop.close()
    assert 1 <= loop.woken <= 2


def test_threads_ask_for_the_interpreter_with_the_slack_of_user_code() -> None:
    user_loop = UserLoop()
    timer_slack(set_to=1)  # as the thread has that starts it in a replica
    user_loop.start()

    async def slacks() -> list[int]:
        threads = Threads(user_loop.loop, 1)
        try:
            return [timer_slack(), await threads.run(timer_slack, ())]
        finally:
            threads.end()

    try:
        found = asyncio.run_coroutine_threadsafe(slacks(), user_loop.loop).result(LIMIT_S)
    finally:
        user_loop.end()
        timer_slack(set_to=0)  # what it was
    assert found == [USERS_SLACK_NS] * 2


def timer_slack(set_to: int | None = None) -> int:
    option = 30 if set_to is None else PR_SET_TIMERSLACK  # 30 is PR_GET_TIMERSLACK
    slack: int = ctypes.CDLL(None).prctl(option, set_to or 0, 0, 0, 0)
    return slack


# --- Code that is bound to its thread ---------------------------------------------------------


class Bound:
    """Has a connection that refuses all threads but the one that has made it."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table heard (value integer)")

    def reconfigure(self, config: dict[str, int]) -> None:
        self.add(config["first"])

    def add(self, value: int) -> int:
        self.connection.execute("insert into heard values (?)", (value,))
        (total,) = self.connection.execute("select sum(value) from heard").fetchone()
        return int(total)

    def all(self) -> Iterator[int]:
        for (value,) in self.connection.execute("select value from heard"):
            yield value

    def check_health(self) -> None:
        self.connection.execute("select 1")


@pytest.fixture
def bound() -> Iterator[OneProcess]:
    replica = OneProcess(Bound, limit=1)
    yield replica
    replica.close()


def test_one_at_a_time_is_one_thread_for_all_of_a_class(bound: OneProcess) -> None:
    handle = DeploymentHandle("e", None)

    async def test() -> None:
        told: asyncio.Future[Any] = bound.loop.create_future()
        bound.user_code.reconfigure({"first": 1}, told.set_result)
        assert await told is None
        calls = [handle.add.remote(value) for value in range(10)]
        assert [await call for call in calls][-1] == 46
        streamed = [value async for value in handle.options(stream=True).all.remote()]
        assert streamed == [1, *range(10)]
        healthy: asyncio.Future[Any] = bound.loop.create_future()
        bound.user_code.check_health(healthy.set_result)
        assert await healthy is None

    bound.loop.run_until_complete(asyncio.wait_for(test(), LIMIT_S))


class Slow:
    """Has a check that would wait for ever behind its call."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()

    def wait(self) -> bool:
        self.begun.set()
        return self.gate.wait(LIMIT_S)

    def check_health(self) -> None:
        raise AssertionError("between calls alone")


def test_a_call_that_runs_for_long_does_not_make_its_replica_unhealthy() -> None:
    replica = OneProcess(Slow, limit=1)
    slow = replica.user_code.servable_object
    handle = DeploymentHandle("e", None)

    async def health() -> Any:
        told: asyncio.Future[Any] = replica.loop.create_future()
        replica.user_code.check_health(told.set_result)
        return await told

    async def test() -> None:
        call = asyncio.ensure_future(handle.wait.remote())
        await replica.loop.run_in_executor(None, slow.begun.wait, LIMIT_S)
        assert await health() is None
        slow.gate.set()
        assert await call
        assert "between calls alone" in (await health()).text

    try:
        replica.loop.run_until_complete(asyncio.wait_for(test(), LIMIT_S))
    finally:
        replica.close()


class Loops:
    """Wants the event loop in its constructor, as its async method does."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def __call__(self) -> bool:
        return self.loop is asyncio.get_running_loop()


def test_a_class_with_async_methods_is_made_on_the_event_loop() -> None:
    replica = OneProcess(Loops, limit=1)
    handle = DeploymentHandle("e", None)
    try:
        assert replica.loop.run_until_complete(asyncio.wait_for(_awaited(handle.remote()), LIMIT_S))
    finally:
        replica.close()


async def _awaited(response: Any) -> Any:
    return await response


class Refuses:
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no model here")


def test_what_a_constructor_raises_on_its_thread_is_told() -> None:
    told: list[Any] = []
    heard = threading.Event()

    def take(failure: Any) -> None:
        told.append(failure)
        heard.set()

    code = UserCode(lambda callback: callback())
    code.set_max_ongoing_requests(1)
    code.start()
    try:
        code.load(cloudpickle.dumps((Refuses, (), {})), None, take)
        assert heard.wait(LIMIT_S)
        assert told[0].text == "ValueError: no model here"
        assert "in __init__" in told[0].traceback
    finally:
        code.end()
