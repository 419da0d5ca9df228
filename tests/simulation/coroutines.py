"""Coroutines of the shells, run by a simulated process in place of asyncio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.world import SimProcess, World

Step = Callable[[], None]


class SimFuture:
    """What a coroutine waits for, as asyncio's future."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._done = False
        self._result: Any = None
        self.on_done: Step = lambda: None

    def __await__(self) -> Generator[SimFuture, None, Any]:
        if not self._done:
            yield self
        return self._result

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any) -> None:
        self._done, self._result = True, result
        self._process.enqueue(self.on_done)


async def pause(process: SimProcess, seconds: float) -> None:
    """Go on so much later."""
    future = SimFuture(process)
    process.call_later(seconds, future.set_result, None)
    await future


class Task:
    """A coroutine that runs in a process; ``on_end`` gets its result, or what it raised."""

    def __init__(self, coroutine: Coroutine[Any, None, Any], on_end: Callable[[Any], None]) -> None:
        self._coroutine = coroutine
        self._on_end = on_end
        self.is_over = False
        self._is_cancelled = False
        self._error: Exception | None = None
        self._is_running = False
        self._when_over: list[Callable[[Task], None]] = []
        self._step()

    def add_done_callback(self, call: Callable[[Task], None]) -> None:
        """Stand in for asyncio.Task's: who calls this keeps what has not ended."""
        if self.is_over:
            call(self)
        else:
            self._when_over.append(call)

    def cancelled(self) -> bool:
        """Stand in for asyncio.Task's."""
        return self._is_cancelled

    def exception(self) -> Exception | None:
        """Stand in for asyncio.Task's."""
        return self._error

    def get_coro(self) -> Coroutine[Any, None, Any]:
        """Stand in for asyncio.Task's."""
        return self._coroutine

    def cancel(self) -> None:
        """Run it no further, and tell nobody of an outcome."""
        self._is_cancelled |= not self.is_over
        self._is_now_over()
        if not self._is_running:  # else it is closed when it next waits
            self._coroutine.close()

    def _step(self) -> None:
        if self.is_over:
            return
        self._is_running = True
        try:
            waits_for = self._coroutine.send(None)
        except StopIteration as stop:
            self._end(stop.value)
        except Exception as error:  # the caller's to judge
            self._error = error
            self._end(error)
        else:
            waits_for.on_done = self._step
            if self.is_over:
                self._coroutine.close()
        finally:
            self._is_running = False

    def _end(self, outcome: Any) -> None:
        if self.is_over:
            return
        self._is_now_over()
        self._on_end(outcome)

    def _is_now_over(self) -> None:
        self.is_over = True
        calls, self._when_over = self._when_over, []
        for call in calls:
            call(self)


def running_loop(world: World) -> Any:
    """Stand in for asyncio.get_running_loop."""
    process = world.current
    assert process is not None
    return SimpleNamespace(
        create_future=lambda: SimFuture(process),
        time=world.clock,
        call_later=process.call_later,
    )


async def wait_for(future: SimFuture, _timeout_s: float) -> Any:
    """Stand in for asyncio.wait_for: nothing here takes too long."""
    return await future


async def yield_turn(_seconds: float) -> None:
    """Stand in for asyncio.sleep: go on at once, for others get their turn anyway."""
