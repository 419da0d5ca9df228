"""Threads of sync code: order, cancelling, batches, and code that is bound to its thread."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from greenroom.actors.replica import threads as threads_module
from greenroom.actors.replica.pickling import dumps
from greenroom.actors.replica.servable import is_sync
from greenroom.actors.replica.threads import PR_SET_TIMERSLACK, USERS_SLACK_NS, Threads, UserLoop
from greenroom.actors.replica.user_code import UserCode
from greenroom.serve.handle import DeploymentHandle
from tests.actors.one_process import load
from tests.support.systems import wait_until

pytestmark = pytest.mark.anyio
LIMIT_S = 10
MANY = 300  # calls, after which their mean counts


@contextlib.contextmanager
def having(size: int) -> Iterator[Threads]:
    threads = Threads(asyncio.get_running_loop(), size)
    try:
        yield threads
    finally:
        threads.end()


async def test_calls_begin_in_their_order():
    begun: list[int] = []
    with having(1) as threads:
        await asyncio.gather(*(threads.run(begun.append, (n,)) for n in range(100)))
        assert begun == list(range(100))


async def test_no_more_threads_than_calls_or_the_limit():
    together = threading.Barrier(3)

    def meet() -> int:
        together.wait(LIMIT_S)
        return threading.get_ident()

    with having(3) as threads:
        assert len({await threads.run(threading.get_ident, ()) for _ in range(5)}) == 1
        used = await asyncio.gather(*(threads.run(meet, ()) for _ in range(6)))
        assert len(set(used)) == 3


@pytest.mark.parametrize("error", [StopIteration(1), KeyError("a"), SystemExit(2)])
async def test_what_a_call_raises_is_raised_here(error):
    def fail() -> None:
        raise error

    with having(1) as threads:
        caught: BaseException | None = None
        try:
            await threads.run(fail, ())
        except RuntimeError as raised:  # what a coroutine makes of StopIteration
            caught = raised.__cause__
        except BaseException as raised:
            caught = raised
        assert caught is error
        assert await threads.run(len, ("abc",)) == 3


async def test_a_call_has_the_context_of_its_task():
    name: ContextVar[str] = ContextVar("name")

    async def named(threads: Threads, value: str) -> None:
        name.set(value)
        assert await threads.run(name.get, ()) == value

    with having(4) as threads:
        await asyncio.gather(*(named(threads, str(n)) for n in range(20)))


async def test_a_call_that_is_cancelled_while_it_waits_never_runs():
    gate, ran = threading.Event(), []
    with having(1) as threads:
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


async def test_a_call_that_is_cancelled_while_it_runs_holds_its_thread():
    begun, gate = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(LIMIT_S)

    with having(1) as threads:
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


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    woken = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(*args, **options)


def test_results_that_come_while_the_loop_is_busy_wake_it_once():
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


def test_threads_ask_for_the_interpreter_with_the_slack_of_user_code():
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


# --- Short calls, between turns of the loop ---------------------------------------------------


@pytest.fixture
def user_loop():
    """Yield a loop that expects calls to be short, though it has seen none."""
    user_loop = UserLoop()
    user_loop.start()
    user_loop.threads.takes_short_calls = True
    user_loop.threads.mean_s = 0.0
    yield user_loop
    if not user_loop.loop.is_closed():
        user_loop.end()
    wait_until(user_loop.loop.is_closed, LIMIT_S, "the loop's end")
    wait_until(lambda: "user-loop" not in thread_names(), LIMIT_S, "the end of its threads")


def on_loop(user_loop: UserLoop, test: Coroutine[Any, Any, Any]) -> Any:
    limited = asyncio.wait_for(test, LIMIT_S)
    return asyncio.run_coroutine_threadsafe(limited, user_loop.loop).result(2 * LIMIT_S)


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_short_calls_run_on_the_loops_thread(user_loop, monkeypatch):
    monkeypatch.setattr(threads_module, "SHORT_S", LIMIT_S)  # on a busy machine they are not
    monkeypatch.setattr(threads_module, "WATCH_S", 1.0)
    threads, order = user_loop.threads, []

    async def called(number: int) -> str:
        await threads.run(order.append, (number,))
        with pytest.raises(RuntimeError):  # as on any other thread: asyncio.run() works there
            await threads.run(asyncio.get_running_loop, ())
        with pytest.raises(KeyError):
            await threads.run({}.__getitem__, ("a",))
        return (await threads.run(threading.current_thread, ())).name

    async def test() -> list[str]:
        return await asyncio.gather(*(called(number) for number in range(200)))

    assert set(on_loop(user_loop, test())) == {"user-loop"}
    assert order == list(range(200))
    assert threads.taken == 0


def test_short_calls_leave_turns_to_the_loop(user_loop):
    threads, turns = user_loop.threads, 0

    async def counting() -> None:
        nonlocal turns
        while threads.taken:
            turns += 1
            await asyncio.sleep(0)

    async def test() -> None:
        calls = [threads.run(time.sleep, (0.00002,)) for _ in range(500)]
        await asyncio.gather(*calls, counting())

    on_loop(user_loop, test())
    assert turns > 5  # 10 ms of calls at the least, and a turn after each of them


def test_a_call_that_is_not_short_does_not_hold_the_loop(user_loop):
    threads = user_loop.threads

    async def test() -> None:
        for number in range(3):  # the thread that has taken over the loop may lose it in turn
            threads.mean_s = 0.0
            gate, seen = threading.Event(), []
            before = asyncio.ensure_future(threads.run(seen.append, (number,)))
            long = asyncio.ensure_future(threads.run(gate.wait, (LIMIT_S,)))
            behind = asyncio.ensure_future(threads.run(threading.current_thread, ()))
            await before  # their answers do not wait for the long one's
            assert (await behind).name != "user-loop"
            assert seen == [number]
            assert threads.mean_s >= 0.5, "calls are given to other threads for a while"
            assert not long.done()
            gate.set()
            assert await long

    on_loop(user_loop, test())


class LateEvent(threading.Event):
    """An event whose users go on late, as on a busy machine."""

    def is_set(self) -> bool:
        found = super().is_set()
        time.sleep(4 * threads_module.WATCH_S)
        return found

    def set(self) -> None:
        super().set()
        time.sleep(4 * threads_module.WATCH_S)


def test_a_loop_whose_thread_comes_late_to_a_call_is_watched_all_the_same():
    user_loop = UserLoop()
    user_loop._to_watch = LateEvent()
    user_loop.start()
    threads = user_loop.threads
    threads.takes_short_calls = True

    async def test() -> None:
        for _ in range(10):
            threads.mean_s, gate = 0.0, threading.Event()
            long = asyncio.ensure_future(threads.run(gate.wait, (LIMIT_S,)))
            await threads.run(len, ("a",))  # behind it
            gate.set()
            assert await long
            threads.mean_s = 0.0
            await threads.run(len, ("a",))
            await asyncio.sleep(2 * threads_module.WATCH_S)  # now the watcher has looked

    try:
        on_loop(user_loop, test())
    finally:
        user_loop.end()


def test_where_nobody_can_watch_calls_are_given_to_other_threads(user_loop, monkeypatch):
    def start(_work: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(user_loop, "_start_thread", start)
    threads = user_loop.threads
    for expected in ("user-loop", "user_1"):
        assert on_loop(user_loop, threads.run(thread_name, ())) == expected


def test_short_calls_may_wait_for_each_other(user_loop):
    together = threading.Barrier(3)

    async def test() -> list[int]:
        waits = [user_loop.threads.run(together.wait, (LIMIT_S,)) for _ in range(3)]
        return await asyncio.gather(*waits)

    assert sorted(on_loop(user_loop, test())) == [0, 1, 2]


def test_a_call_that_is_not_short_is_cancelled_as_others_are(user_loop):
    threads, gate, begun = user_loop.threads, threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(LIMIT_S)

    async def test() -> None:
        call = asyncio.ensure_future(threads.run(wait, ()))
        while not begun.is_set():
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        gate.set()
        await asyncio.wait([call])
        assert call.cancelled()
        assert threads.taken == 0

    on_loop(user_loop, test())


def test_a_loop_ends_while_a_call_has_its_thread(user_loop):
    gate, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(LIMIT_S)

    call = asyncio.run_coroutine_threadsafe(user_loop.threads.run(wait, ()), user_loop.loop)
    assert begun.wait(LIMIT_S)
    user_loop.end()
    wait_until(user_loop.loop.is_closed, LIMIT_S, "the loop's end")
    assert not call.done()
    gate.set()


def thread_name() -> str:
    return threading.current_thread().name


class Sync:
    """Has no async code."""

    def record_autoscaling_stats(self) -> dict[str, int]:
        return {threading.current_thread().name: 1}


class Mixed(Sync):
    """Has async code, which may be bound to the loop's thread."""

    async def other(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "expected"),
    [(Sync, True), (thread_name, True), (Mixed, False), (Mixed.other, False)],
)
def test_only_what_has_no_async_parts_is_sync(target, expected):
    assert is_sync(target) is expected


@pytest.mark.parametrize("target", [Sync, Mixed])
def test_only_sync_code_has_short_calls(target):
    code = UserCode()
    code.configure({"max_ongoing_requests": 100})
    code.start()
    used: set[str] = set()

    def has_short_calls() -> bool:
        for _ in range(MANY):
            stats = code.autoscaling_stats()
            assert stats is not None
            used.update(stats.result(LIMIT_S))
        return "user-loop" in used

    try:
        assert code.load(dumps((target, (), {})), None).result(LIMIT_S) is None
        if target is Sync:  # soon, unless other processes make its calls long again and again
            wait_until(has_short_calls, LIMIT_S, "a call on the loop's thread")
        assert has_short_calls() is (target is Sync)
        assert used <= {"user-loop", "user_1"}
    finally:
        code.end()


def test_one_at_a_time_has_no_short_calls(user_loop):
    user_loop.threads.size = 1
    name = on_loop(user_loop, user_loop.threads.run(thread_name, ()))
    assert name == "user_1"


# --- Code that is bound to its thread ---------------------------------------------------------


class Bound:
    """Refuses all threads but the one that has made it, as connections of sqlite3 do."""

    def __init__(self) -> None:
        self.thread, self.heard = threading.get_ident(), list[int]()

    def reconfigure(self, config: dict[str, int]) -> None:
        self.add(config["first"])

    def add(self, value: int) -> int:
        self.check_health()
        self.heard.append(value)
        return sum(self.heard)

    def all(self) -> Iterator[int]:
        for value in self.heard:
            self.check_health()
            yield value

    def check_health(self) -> None:
        assert threading.get_ident() == self.thread


HANDLE = DeploymentHandle("e", None)


def test_one_at_a_time_is_one_thread_for_all_of_a_class(one_process):
    replica = one_process(Bound, limit=1)
    code = replica.user_code

    async def test() -> None:
        assert await asyncio.wrap_future(code.reconfigure({"first": 1})) is None
        calls = [HANDLE.add.remote(value) for value in range(10)]
        assert [await call for call in calls][-1] == 46
        streamed = [value async for value in HANDLE.options(stream=True).all.remote()]
        assert streamed == [1, *range(10)]
        assert await asyncio.wrap_future(code.check_health()) is None

    replica.run(test())


class Slow:
    """Has a check that would wait for ever behind its call."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()

    def wait(self) -> bool:
        self.begun.set()
        return self.gate.wait(LIMIT_S)

    def check_health(self) -> None:
        raise AssertionError("between calls alone")


def test_a_call_that_runs_for_long_does_not_make_its_replica_unhealthy(one_process):
    replica = one_process(Slow, limit=1)
    slow = replica.user_code.servable.instance

    async def health() -> Any:
        return await asyncio.wrap_future(replica.user_code.check_health())

    async def test() -> None:
        call = asyncio.ensure_future(HANDLE.wait.remote())
        await replica.loop.run_in_executor(None, slow.begun.wait, LIMIT_S)
        assert await health() is None
        slow.gate.set()
        assert await call
        assert "between calls alone" in (await health()).text

    replica.run(test())


class Loops:
    """Wants the event loop in its constructor, as its async method does."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def __call__(self) -> bool:
        return self.loop is asyncio.get_running_loop()


def test_a_class_with_async_methods_is_made_on_the_event_loop(one_process):
    async def test() -> None:
        assert await HANDLE.remote()

    one_process(Loops, limit=1).run(test())


class Refuses:
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no model here")


def test_what_a_constructor_raises_on_its_thread_is_reported():
    failure = load(Refuses, limit=1)
    assert failure is not None
    assert failure.text == "ValueError: no model here"
    assert "in __init__" in failure.traceback


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_calls_go_to_the_threads_that_there_are_where_the_system_gives_no_more(monkeypatch):
    with having(3) as threads:
        assert await threads.run(len, ("a",)) == 1
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert await asyncio.gather(*(threads.run(len, ("ab",)) for _ in range(3))) == [2, 2, 2]
        assert threads.taken == 0
        monkeypatch.undo()


async def test_a_call_that_no_thread_can_be_had_for_fails_and_takes_no_place(monkeypatch):
    with having(3) as threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await threads.run(len, ("a",))
        monkeypatch.undo()
        assert threads.taken == 0
        assert await threads.run(len, ("a",)) == 1


def test_a_process_whose_loop_has_lost_its_thread_ends(monkeypatch, capfd):
    """Nothing else would show it: orders are answered on another thread."""
    exits: list[int] = []

    def fail(_library: str | None) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(threads_module.os, "_exit", exits.append)
    monkeypatch.setattr(threads_module.ctypes, "CDLL", fail)
    lost = UserLoop()
    lost.start()
    wait_until(lambda: exits == [1], 5, "the end of the process")
    assert "MemoryError: no room" in capfd.readouterr().err
    lost.loop.close()
