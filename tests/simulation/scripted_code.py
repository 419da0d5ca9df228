"""User code by script, in place of the threads and the event loop of actors/replica/user_code.py.

Code is bytes such as ``b"plain 1"``: its first word says how it behaves.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenroom.actors.messages.queries import FailedAnswer, StreamEnded, ValueAnswer
from greenroom.actors.replica.user_code import Failure, Stuck
from greenroom.core.config import MIB
from tests.simulation.coroutines import SimFuture, Task, pause
from tests.simulation.world import Killed, Timer

if TYPE_CHECKING:
    from tests.simulation.applications import Composer
    from tests.simulation.simulation import Simulation

MEMORY = 50 * MIB  # of a replica that does not leak
PLAIN, SLOW, BROKEN, FLAKY, DEADLY = b"plain", b"slow", b"broken", b"flaky", b"deadly"
COMPOSED = b"composed"  # calls another deployment
DEPENDENT = b"dependent"  # on what an outage breaks
FAILING = b"failing"  # starts, and fails every query
PICKLED = b"\x80"
BOOM = Failure("RuntimeError: boom", "Traceback: boom", None)


class _Running:
    """A query that runs."""

    __slots__ = ("cancelled", "is_sync", "reply", "stream", "timer")

    def __init__(self, reply: Any, timer: Timer, *, is_sync: bool) -> None:
        self.reply = reply
        self.timer = timer
        self.is_sync = is_sync
        self.stream: Task | None = None  # once its answer has begun to come in parts
        self.cancelled = False


class ScriptedCode:
    """What a replica sees of :class:`greenroom.actors.replica.user_code.UserCode`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._changes: deque[tuple[float, Callable[[], Failure | None], SimFuture]] = deque()
        self._running: dict[Any, _Running] = {}  # by the reply's key
        self.process = simulation.world.current
        self.loop = self.process
        self.digest = ""
        self.kind = b""
        self.user_config: Any = None
        self.composer: Composer | None = None  # of code that calls another deployment
        self._rate = simulation.world.rng.choice([20.0, 300.0])  # queries per second

    def configure(self, config: Any) -> None:
        """Nothing is needed: no code here has threads."""

    def start(self) -> None:
        """Nothing is needed."""

    def load(self, code: bytes, user_config: Any) -> SimFuture:
        self.digest = hashlib.sha256(code).hexdigest()
        self.kind = code.split()[0]
        rng = self._simulation.world.rng
        fails = self.kind == BROKEN or (self.kind == FLAKY and rng.random() < 0.4)
        broken = self._simulation.broken if self.kind == DEPENDENT else ""
        self._simulation.tries += bool(broken)
        is_lost = self.kind.startswith(PICKLED)  # what stands for code that is not on disk
        fails = fails or is_lost or broken == "start"
        if broken == "life":
            self.loop.call_later(0.4, self._die)

        def loaded() -> Failure | None:
            if self.kind in {FLAKY, DEADLY} and rng.random() < 0.2:
                self._die()
            self.user_config = user_config
            if self.kind == COMPOSED:
                applications = self._simulation.checks.applications
                self.composer = applications.composer(self.process, self.digest)
            return BOOM if fails else None

        return self._change(rng.uniform(0.01, 3.0 if self.kind == SLOW else 0.3), loaded)

    def reconfigure(self, user_config: Any) -> SimFuture:
        def reconfigured() -> None:
            self.user_config = user_config

        return self._change(self._simulation.world.rng.uniform(0.0, 0.3), reconfigured)

    def check_health(self) -> SimFuture:
        rng = self._simulation.world.rng
        sick = self.kind == FLAKY and not self._simulation.quiet and rng.random() < 0.2
        if self.kind == DEPENDENT and self._simulation.broken == "health":
            self._simulation.tries += 1
            sick = True
        checked = SimFuture(self.process)
        self.loop.call_later(rng.random() * 0.2, checked.set_result, BOOM if sick else None)
        return checked

    def stuck(self, _slots: int, _now: float) -> Stuck:
        """Return that nothing is: here are no threads."""
        return Stuck()

    def close(self) -> SimFuture:
        return self._change(0.01, lambda: None)

    def _change(self, seconds: float, make: Callable[[], Any]) -> SimFuture:
        done = SimFuture(self.process)
        self._changes.append((seconds, make, done))
        if len(self._changes) == 1:
            self._next_change()
        return done

    def _next_change(self) -> None:
        seconds, make, done = self._changes[0]

        def made() -> None:
            failure = make()
            self._changes.popleft()
            if self._changes:
                self._next_change()
            done.set_result(failure)

        self.loop.call_later(seconds, made)

    # --- Queries ----------------------------------------------------------------------------------

    def run(self, reply: Any) -> None:
        rng = self._simulation.world.rng
        queries = self._simulation.checks.queries
        queries.began(self, reply.assignment, len(self._running) + 1)
        if reply.key[0] == reply.assignment.caller_incarnation:
            self._simulation.checks.counts["run under a lease"] += 1
        if self.composer is not None:
            self._running[reply.key] = _Running(reply, Timer(None), is_sync=True)
            self.composer.call(lambda is_answered: self._ended(reply, fails=not is_answered))
            return
        self._simulation.checks.applications.ran(reply.assignment.query.call.decode(), self.digest)
        long = self.kind == SLOW or rng.random() < 0.1
        seconds = rng.uniform(0.2, 4.0) if long else rng.expovariate(self._rate)
        how = self._simulation.bad_replicas.get(self.process)
        if how is not None:
            seconds *= 10.0 if how == "slow" else 0.0
        if self._simulation.quiet:
            seconds *= 0.02  # or long queues would be there for minutes
        if self.kind == DEADLY and rng.random() < 0.1:
            self.loop.call_later(seconds * rng.random(), self._die)
        streams = reply.assignment.query.http_method and rng.random() < 0.5
        then = self._stream if streams else self._ended
        timer = self.loop.call_later(seconds, lambda: then(reply))
        self._running[reply.key] = _Running(
            reply, timer, is_sync=not streams and rng.random() < 0.5
        )

    def _stream(self, reply: Any) -> None:
        running = self._running[reply.key]
        if running.cancelled:
            self._ended(reply)
            return
        stream = Task(self._parts(reply), lambda error: self._streamed(reply, error))
        running.stream = stream
        if running.cancelled and not stream.is_over:  # as it began
            stream.cancel()
            del self._running[reply.key]
            self.loop.call_later(0.0, reply.end)

    async def _parts(self, reply: Any) -> None:
        rng, query = self._simulation.world.rng, reply.assignment.query
        count, fails = rng.choice([0, 2, 5, 9]), self._fails(query)
        run = self._simulation.checks.queries.begins_stream(query.call.decode())
        reply.begin(200, ())
        for number in range(count):
            await reply.send(pickle.dumps((query.call, run, number, count)))
            await pause(self.process, 0.0 if rng.random() < 0.5 else rng.expovariate(20.0))
        if fails:
            reply.answer(FailedAnswer(query.id, "UserCodeError", query.call.decode()))
        else:
            reply.answer(StreamEnded(query.id, 200))

    def _streamed(self, reply: Any, error: Exception | None) -> None:
        if error is not None:
            raise error
        del self._running[reply.key]
        reply.end()

    def _fails(self, query: Any) -> bool:
        how = self._simulation.bad_replicas.get(self.process)
        is_key = how == "fails for a key" and zlib.crc32(query.call) % 3 == 0
        chance = 0.5 if how == "fails by chance" else 0.05
        is_sure = self.kind == FAILING or how == "fails" or is_key
        return is_sure or self._simulation.world.rng.random() < chance

    def _ended(self, reply: Any, *, fails: bool = False) -> None:
        running = self._running.pop(reply.key)
        query = reply.assignment.query
        if not running.cancelled:
            uid = query.call.decode()
            if fails or self._fails(query):
                reply.answer(FailedAnswer(query.id, "UserCodeError", uid))
            elif reply.assignment.caller is None and self._simulation.world.rng.random() < 0.2:
                reply.answer(ValueAnswer(query.id, pickle.dumps(b"another")))
            else:
                reply.answer(ValueAnswer(query.id, pickle.dumps(query.call)))
        reply.end()

    def cancel(self, reply: Any) -> None:
        running = self._running.get(reply.key)
        if running is None or running.cancelled:
            return
        running.cancelled = True
        if running.stream is not None:
            running.stream.cancel()
            del self._running[reply.key]
            self.loop.call_later(0.0, reply.end)
        elif not running.is_sync and (ended := running.timer.call) is not None:
            running.timer.cancel()  # what runs on a thread runs on, unheard
            self.loop.call_later(0.0, ended)

    def _die(self) -> None:
        self._simulation.world.log(self.process, "is killed by its user code")
        raise Killed
