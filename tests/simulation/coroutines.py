"""Coroutines of the shells, run by a simulated process in place of asyncio."""

from __future__ import annotations

import asyncio
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
        self.on_done: Step = lambda: None

    def __await__(self) -> Generator[SimFuture, None, None]:
        if not self._done:
            yield self

    def done(self) -> bool:
        return self._done

    def set_result(self, _result: None) -> None:
        self._done = True
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
        self._is_running = False
        self._step()

    def cancel(self) -> None:
        """Run it no further, and tell nobody."""
        self.is_over = True
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
        self.is_over = True
        self._on_end(outcome)


class Asyncio:
    """The module, for code whose loop is the running process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def get_running_loop(self) -> Any:
        process = self._world.current
        assert process is not None
        return SimpleNamespace(
            create_future=lambda: SimFuture(process),
            time=self._world.clock,
            call_later=process.call_later,
        )

    async def sleep(self, _seconds: float) -> None:
        """Go on at once: what is slept for is that others get their turn."""
