"""Threads of simulated processes: what runs there may wait, while its process goes on.

Theory of operation. A :class:`SimThread` is a thread of this interpreter that takes turns with the
one that runs the world: one of them always waits for the other, so all happens in one order. It
runs when an event of the world resumes it, and until it waits for something of the world.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tests.simulation.world import Killed

if TYPE_CHECKING:
    from tests.simulation.world import SimProcess, World

BEGINS_S = 0.0002
STOPPED_S = 0.2  # after which a thread of a stopped process looks again


class SimThread:
    """A thread of the running process, with the interface of ThreadPoolExecutor(1)."""

    def __init__(self, world: World, *_: Any) -> None:
        assert world.current is not None
        self._world = world
        self._owner = world.current
        self._jobs: deque[tuple[Awaited, Callable[[], Any]]] = deque()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wakes = 0
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        world.threads.append(self)

    def submit(self, call: Callable[..., Any], *args: Any) -> Awaited:
        """Run it after all that was given before."""
        future = Awaited(self._world, self._owner)
        self._jobs.append((future, lambda: call(*args)))
        if len(self._jobs) == 1:
            self._wake_in(BEGINS_S)
        return future

    def wait(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Let the world go on until then; :meth:`check` has to be called when it is over."""
        self._wake_in(deadline - self._world.now)
        while not is_over() and self._world.now < deadline:
            self._give_back()
        self._wakes += 1  # what was to wake it is of before

    def check(self) -> None:
        """Have the thread check whether what it waits for has come about."""
        self._wake_in(0.0)

    def end(self) -> None:
        """End it where it is."""
        if not self._is_ended:
            self._is_ended = True
            self._turn.release()
            self._thread.join()

    def _wake_in(self, delay_s: float) -> None:
        wakes = self._wakes
        self._world.after(
            max(delay_s, 0.0), lambda: self._resume() if wakes == self._wakes else None
        )

    def _resume(self) -> None:
        world, owner = self._world, self._owner
        if not owner.alive:
            self.end()
        elif owner.is_stopped():
            self._wake_in(STOPPED_S)
        elif not self._is_ended:
            world.current, world.thread = owner, self
            self._turn.release()
            self._back.acquire()
            world.current, world.thread = None, None

    def _give_back(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self._is_ended:
            raise Killed

    def _run(self) -> None:
        self._turn.acquire()
        while not self._is_ended:
            if not self._jobs:  # it was woken for what is over by now
                self._back.release()
                self._turn.acquire()
                continue
            future, call = self._jobs[0]
            try:
                outcome = call()
            except Killed:
                return
            except Exception as error:  # the one's who asked for it
                future.set_exception(error)
            else:
                future.set_result(outcome)
            self._jobs.popleft()
            if self._jobs:
                self._wake_in(BEGINS_S)
            self._back.release()
            self._turn.acquire()


class Awaited(Future[Any]):
    """What a thread will have come to."""

    def __init__(self, world: World, owner: SimProcess) -> None:
        super().__init__()
        self._world = world
        self._owner = owner

    def result(self, timeout: float | None = None) -> Any:
        """Return it; the process stands still until it is there."""
        if timeout is not None:
            self._world.stand_until(self._owner, self.done, self._world.clock() + timeout)
        return super().result(0.0)


class Event:
    """Stands in for threading.Event; a thread waits for it in the world's time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        assert self._world.thread is not None
        self._world.thread.wait(lambda: False, self._world.now + timeout)
        return self._is_set


class Thread:
    """Stands in for threading.Thread."""

    def __init__(self, world: World, *, target: Callable[[], None], **_: Any) -> None:
        self._world = world
        self._target = target

    def is_alive(self) -> bool:
        return False  # none that is waited for

    def start(self) -> None:
        SimThread(self._world).submit(self._target)
