"""What a replica finds out about its own health and load."""

import asyncio
import threading
import time

import pytest

from greenroom.actors.replica.health import Health
from tests.support.timing import until

TIMEOUT_S = 0.3


class Gate:
    def __init__(self):
        self.lock, self.gate, self.inside = threading.Lock(), threading.Event(), 0

    def __call__(self):
        with self.lock:
            self.inside += 1
        self.gate.wait(20)


class Watched:
    """A replica of a Gate, and its health."""

    def __init__(self, one, limit):
        self.one, self.gate = one, one.user_code.servable.instance
        self.health = Health(one.user_code, "r1")
        self.config = {"max_ongoing_requests": limit, "health_check_timeout_s": TIMEOUT_S}

    async def calls(self, count, inside):
        """Make calls, and wait until so many are inside."""
        calls = [self.one.handle.remote() for _ in range(count)]
        await until(lambda: self.gate.inside == inside)
        return calls

    async def check(self):
        """Return the failure of a check, and what trouble it has found."""
        failure = await self.health.check(self.config)
        return failure and failure.text, self.health.trouble

    async def until_found(self, which):
        deadline = time.monotonic() + 20
        while not (found := (await self.check())[which]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return found


@pytest.fixture
def watched(one_process):
    made = []

    def make(limit):
        made.append(Watched(one_process(Gate, limit=limit), limit))
        return made[-1]

    yield make
    for each in made:
        each.gate.gate.set()


def test_threads_that_are_all_busy_while_calls_wait_are_reported(watched):
    it = watched(100)

    async def ask():
        calls = await it.calls(40, inside=32)
        found = await it.until_found(1)
        assert "all 32 threads have been busy" in found
        assert "8 calls wait" in found
        await asyncio.sleep(TIMEOUT_S)
        assert (await it.check())[0] is None, "somebody waits for these"
        it.gate.gate.set()
        for call in calls:
            await call
        assert await it.check() == (None, "")

    it.one.run(ask())


def test_calls_that_hang_and_that_nobody_waits_for_make_a_replica_unhealthy(watched):
    it = watched(3)

    async def ask():
        calls = await it.calls(3, inside=3)
        for call in calls[:2]:
            call.cancel()
        await asyncio.sleep(2 * TIMEOUT_S)  # longer than the limit: one of them is still wanted
        assert (await it.check())[0] is None
        calls[2].cancel()
        assert "no caller waits for any more" in await it.until_found(0)
        it.gate.gate.set()
        await until(lambda: it.one.queries.running == 0)
        assert (await it.check())[0] is None, "it is well again"

    it.one.run(ask())


class Unwell:
    """Its check raises, or takes ``sleep_s``."""

    sleep_s = 0.0

    def check_health(self):
        if not self.sleep_s:
            raise LookupError("the index is empty")
        time.sleep(self.sleep_s)

    def __call__(self): ...


class UnwellAwaited(Unwell):
    async def check_health(self):
        super().check_health()


class UnwellForLong(Unwell):
    sleep_s = 0.5


@pytest.mark.parametrize(
    ("target", "limit", "within_s", "message"),
    [
        (Unwell, 9, 20.0, "LookupError: the index is empty"),
        (UnwellAwaited, 9, 20.0, "LookupError: the index is empty"),
        (Unwell, 1, 20.0, "LookupError: the index is empty"),  # on the thread of its calls
        (UnwellForLong, 9, 0.3, "check_health has not returned within 0.3 s, health_check_timeout"),
    ],
)
def test_a_first_check_fails_by_what_it_raises_or_in_time(
    one_process, target, limit, within_s, message
):
    one = one_process(target, limit=limit)
    assert message in one.run(Health(one.user_code, "r1").first_check(within_s)).text


class Measured:
    """Records what the test says."""

    stats: object = None

    async def record_autoscaling_stats(self):
        return eval(self.stats)


def test_what_it_records_for_autoscaling_is_kept_and_failures_change_nothing_else(one_process):
    one = one_process(Measured)
    health, measured = Health(one.user_code, "r1"), one.user_code.servable.instance

    def record(stats):
        measured.stats = stats
        return one.run(health.record()), health.stats

    assert record("{'gpu': 0.5, 'n': 3}") == (True, {"gpu": 0.5, "n": 3.0})
    assert record("{'gpu': 0.5, 'n': 3}")[0] is False, "it is the same as before"
    for bad in ("[1]", "{'gpu': float('nan')}", "{i: i for i in range(99)}", "1 / 0"):
        assert record(bad) == (True, {})
        assert record("{'gpu': 1}") == (True, {"gpu": 1.0})


class Elusive:
    """Has any attribute, unless it is told to fail."""

    error: BaseException | None = None

    def __call__(self):
        return "well"

    def __getattr__(self, name):
        if self.error is not None:
            raise self.error
        raise AttributeError(name)


@pytest.mark.parametrize("error", [KeyError("check_health"), SystemExit(3)])
def test_what_the_search_for_a_hook_raises_is_a_failed_check(one_process, error):
    one = one_process(Elusive)
    health = Health(one.user_code, "r1")

    async def ask():
        config = {"max_ongoing_requests": 5, "health_check_timeout_s": TIMEOUT_S}
        assert await health.check(config) is None
        one.user_code.servable.instance.error = error
        failure = await health.check(config)
        assert type(error).__name__ in failure.text
        assert not await health.record()
        one.user_code.servable.instance.error = None
        assert await health.check(config) is None

    one.run(ask())
