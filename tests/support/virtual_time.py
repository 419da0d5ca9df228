"""An event loop whose clock stands still while anything can run, and jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing can ever happen any more on this loop")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code without I/O and threads; ``time()`` begins with 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def advance(self, seconds: float) -> None:
        """Let time pass without a turn of the loop, as while it is stopped."""
        self._virtual.now += seconds


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Do what asyncio.run does, in no time."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
