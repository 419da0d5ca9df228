"""How many replicas one backend should have, by its load: windows, delays, bounds, and why.

Theory of operation. Each step records the *load*: all queries of the backend that routers queue or
replicas run. A *policy* turns its average over the look-back window into what is *wanted*, a number
that need not be whole. The config's factors, bounds and delays turn that into the *target*:

    wanted    what the policy says; "ongoing_requests" says average / target_ongoing_requests
    scaled    target + factor * (wanted - target), rounded up; a step down is at least one replica
    bounded   within min_replicas and max_replicas; zero only from one, and without any load
    target    takes over ``bounded`` once it has been on the same side of the target for the delay

Only the target is hard state, in the backend's record: a new controller begins with an empty window
and new delays. Two rules keep it from shrinking a backend before it knows the load: every router
must have reported, and the window must be full.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from greenroom.core.agenda import NEVER, Agenda
from greenroom.core.autoscaling.settings import AutoscalingConfig
from greenroom.core.validation import is_number

LOADS = "loads"  # the kind of the keys of proxies that are to report, and of the events
EXPIRE_S = 10.0  # without a report, of a proxy that has queries or has not reported yet
FOUND_AFTER_S = 5.0  # after which proxies have found a new controller


class Load(NamedTuple):
    """One backend's queries: how many wait for a replica, and how many replicas have."""

    queued: int = 0
    ongoing: int = 0

    @property
    def total(self) -> int:
        """All queries, wherever they are."""
        return self.queued + self.ongoing


IDLE = Load()


class Loads:
    """How much each backend has to do: the sum over all proxies' newest reports.

    A report states the whole load of a proxy. So the next report makes up for a lost one, and a new
    controller is up to date after one report from each proxy. A proxy without load need not report
    again, and counts until it is gone. A proxy with load must; once it falls silent, its load no
    longer counts. That a backend's load has changed is an event: ``(LOADS, tag)``.
    """

    def __init__(self, now: float, agenda: Agenda) -> None:
        self._agenda = agenda
        self._complete_at = now + FOUND_AFTER_S
        # By proxy; None of one whose first report is awaited.
        self._reports: dict[str, Mapping[str, Load] | None] = {}
        self._sums: dict[str, Load] = {}

    def expect(self, proxy: str, now: float) -> None:
        """Expect a report of a proxy; ``now`` is always monotonic seconds."""
        if proxy not in self._reports:
            self._take(proxy, None, now + EXPIRE_S)

    def report(self, proxy: str, load: Mapping[str, tuple[int, int]], now: float) -> None:
        """Take a proxy's report, backend -> (queued, ongoing)."""
        report = {backend: Load(*each) for backend, each in load.items()}
        self._take(proxy, report, now + EXPIRE_S if report else NEVER)

    def forget(self, proxy: str) -> None:
        """Stop counting a proxy that is gone."""
        self._take(proxy, {}, NEVER)
        del self._reports[proxy]

    def reconcile(self, proxy: str) -> None:
        """Stop counting a proxy that should have reported long ago.

        One that has never reported has no load: it was counted as idle, and lost, and is back. One
        that is due may have gone since, in the same step.
        """
        if proxy in self._reports and self._reports[proxy] is None:
            self._take(proxy, {}, NEVER)
        else:
            self.forget(proxy)

    def _take(self, proxy: str, load: Mapping[str, Load] | None, expires_at: float) -> None:
        before, after = self._reports.get(proxy) or {}, load or {}
        self._reports[proxy] = load
        self._agenda.at(LOADS, proxy, expires_at)
        for backend in {*before, *after}:
            old, new = before.get(backend, IDLE), after.get(backend, IDLE)
            if old != new:
                present = self.of(backend)
                self._sums[backend] = total = Load(
                    present.queued + new.queued - old.queued,
                    present.ongoing + new.ongoing - old.ongoing,
                )
                if total == IDLE:
                    del self._sums[backend]
                self._agenda.happened((LOADS, backend))

    def of(self, backend: str) -> Load:
        """Return what a backend has to do on all hosts."""
        return self._sums.get(backend, IDLE)

    def queues(self, backend: str) -> tuple[int, ...]:
        """Return how many queries of a backend each proxy has waiting."""
        loads = self._reports.values()
        return tuple(load.get(backend, IDLE).queued for load in loads if load is not None)

    def is_complete(self, now: float) -> bool:
        """Return whether every proxy has reported; a new controller waits for that first."""
        return now >= self._complete_at and None not in self._reports.values()


KEPT_DECISIONS = 20
PERIOD_S = 1.0  # between two steps of a backend that may have to change
STEPS_PER_WINDOW = 10  # at least, where the window is short
MAX_WANTED = 1_000_000  # what a policy wants beyond this is taken for a mistake
CLOCK_S = 0.002  # a window's ends are rounded to milliseconds
ROUNDING = 1e-9  # 6 queries over 0.1 per replica are 60 replicas, whatever floats make of it
_WORDS = {"mean": "average", "max": "highest", "min": "lowest"}


class Outcome(StrEnum):
    """The result of a step."""

    STEADY = "STEADY"  # the target is as wanted
    UPSCALED = "UPSCALED"
    DOWNSCALED = "DOWNSCALED"
    FROM_ZERO = "FROM_ZERO"  # the first query at zero replicas
    UPSCALE_DELAYED = "UPSCALE_DELAYED"
    DOWNSCALE_DELAYED = "DOWNSCALE_DELAYED"
    WAITING = "WAITING"  # something is not known yet
    POLICY_FAILED = "POLICY_FAILED"


@dataclass(slots=True, kw_only=True)
class Inputs:
    """The inputs of a decision: numbers of queries and of replicas, and durations in seconds."""

    queued: int = 0
    ongoing: int = 0
    average: float = 0.0  # or what else aggregation_function gives
    aggregated: str = "average"
    window_s: float = 0.0  # what the average covers, up to look_back_period_s
    running: int = 0
    policy: str = ""
    target_ongoing_requests: float = 0.0
    wanted: float | None = None
    factor: float = 1.0
    scaled: int | None = None
    min_replicas: int = 0
    max_replicas: int = 0
    delay: str = ""  # the setting that holds the change back
    delay_s: float = 0.0
    left_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step decided. ``at`` is monotonic; ``why`` is for people."""

    at: float
    before: int
    target: int
    outcome: Outcome
    why: str
    inputs: Inputs

    def made(self, outcome: Outcome, why: str, target: int | None = None) -> Decision:
        """Return it with what was decided; without a target, that stays."""
        target = self.before if target is None else target
        return replace(self, target=target, outcome=outcome, why=why)

    def __str__(self) -> str:
        inputs = self.inputs
        return (
            f"{self.before} -> {self.target} {self.outcome.value}: {self.why} "
            f"[queued {inputs.queued}, ongoing {inputs.ongoing}, {inputs.aggregated} "
            f"{inputs.average:.4g} over {inputs.window_s:.3g} s, running {inputs.running}, policy "
            f"{inputs.policy}, factor {inputs.factor:g}, bounds "
            f"{inputs.min_replicas}..{inputs.max_replicas}]"
        )


class Window:
    """A load that is known at times, and its average over the last ``length_s`` seconds.

    A value holds until the next one. Times are whole milliseconds, so that the integral is a whole
    number and the average of a constant load is exactly that load.
    """

    def __init__(self, length_s: float) -> None:
        self._length = _milliseconds(length_s)
        self._values: deque[tuple[int, int]] = deque()
        self._integral = 0  # from the first to the last of them
        self._now = 0

    def resize(self, length_s: float) -> None:
        """Average over another length from now on, as far as the past is still known."""
        self._length = _milliseconds(length_s)

    def add(self, now: float, value: int) -> None:
        """Note that the load is ``value`` from ``now`` on."""
        self._now = at = _milliseconds(now)
        if not self._values:
            self._values.append((at, value))
            return
        last_at, last = self._values[-1]
        if at <= last_at:  # the clock has not moved by a millisecond
            self._values[-1] = (last_at, value)
        elif value != last:
            self._integral += last * (at - last_at)
            self._values.append((at, value))
        while len(self._values) > 1 and self._values[1][0] <= at - self._length:
            first_at, first = self._values.popleft()
            self._integral -= first * (self._values[0][0] - first_at)

    @property
    def average(self) -> float:
        """The average by time, as of the last :meth:`add`; that one's value where none passed."""
        last_at, last = self._values[-1]
        first_at, first = self._values[0]
        begin = max(first_at, self._now - self._length)
        if self._now <= begin:
            return float(last)
        integral = self._integral + last * (self._now - last_at) - first * (begin - first_at)
        return integral / (self._now - begin)

    def aggregated(self, function: str) -> float:
        """Return the ``mean``, which is the average, the ``max`` or the ``min`` in this time."""
        if function == "mean":
            return self.average
        values = [value for _, value in self._values]
        return float(max(values) if function == "max" else min(values))

    @property
    def covers_s(self) -> float:
        """How much of its length is known, in seconds, as of the last :meth:`add`."""
        return min(self._now - self._values[0][0], self._length) / 1000

    @property
    def is_even(self) -> bool:
        """Whether the average cannot change unless the load does."""
        return len(self._values) <= 1


class Kept(NamedTuple):
    """A decision in the history, as last made; ``times`` counts how often it was made in a row."""

    decision: Decision
    since: float
    times: int


class Scaling:
    """The window, the delays, the policy's state and the decisions of one backend."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self.config = config
        self.history: deque[Kept] = deque(maxlen=KEPT_DECISIONS)
        self.asked = 0  # how often the user's policy was
        self.asked_at: float | None = None  # while its answer is awaited
        self.due_at = 0.0
        self.average = 0.0
        self.policy_state: Any = {}
        self.policy_failures = 0
        self.policy_failure = ""  # why the last answer of the user's policy could not be used
        self._window = Window(config.look_back_period_s)
        self._pending: tuple[bool, float] | None = None  # a change up or not, and since when

    def reconfigure(self, config: AutoscalingConfig) -> None:
        """Go by another config from now on; what is known of the load stays."""
        if config.policy != self.config.policy:
            self._pending = None
        self.config = config
        self.due_at = 0.0
        self.policy_failure = ""
        self._window.resize(config.look_back_period_s)

    def step(
        self,
        now: float,
        load: Load,
        running: int,
        target: int,
        *,
        complete: bool = True,
        answer: Mapping[str, Any] | None = None,
    ) -> Decision | None:
        """Note the load, and decide; return None where a policy of the user's has to be asked.

        ``complete`` is whether every router has reported. ``answer`` is the policy's: ``replicas``
        and perhaps ``state``, or ``error``.
        """
        config = self.config
        self._window.add(now, load.total)
        self.average = self._window.aggregated(config.aggregation_function)
        inputs = Inputs(
            queued=load.queued,
            ongoing=load.ongoing,
            average=self.average,
            aggregated=_WORDS[config.aggregation_function],
            window_s=self._window.covers_s,
            running=running,
            policy=str(config.policy),
            target_ongoing_requests=config.target_ongoing_requests,
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
        )
        step = Decision(
            at=now, before=target, target=target, outcome=Outcome.STEADY, why="", inputs=inputs
        )
        self.due_at = now + self.period_s
        if target == 0 and (load.total or not config.policy.is_custom):
            return self._at_zero(step, load)
        if running == 0 and target > 0:
            return step.made(Outcome.WAITING, f"none of {target} replicas runs yet")
        if not config.policy.is_custom:
            wanted = self.average / config.target_ongoing_requests
            known = f"{inputs.aggregated} load {self.average:.4g}"
            why = f"{known} at {config.target_ongoing_requests:g} per replica wants {wanted:.4g}"
            return self._decided(step, wanted, why, complete=complete)
        return None if answer is None else self._answered(step, answer, complete=complete)

    def keep(self, decision: Decision) -> bool:
        """Keep a decision; return whether it is unlike the last one."""
        if self.history:
            last, since, times = self.history[-1]
            is_same = decision.target == decision.before == last.target
            if is_same and decision.outcome is last.outcome:
                self.history[-1] = Kept(decision, since, times + 1)
                return False
        self.history.append(Kept(decision, decision.at, 1))
        return True

    @property
    def period_s(self) -> float:
        """The time between two steps."""
        return min(PERIOD_S, self.config.look_back_period_s / STEPS_PER_WINDOW)

    def _answered(self, step: Decision, answer: Mapping[str, Any], *, complete: bool) -> Decision:
        """Decide by the answer of the user's policy; if it cannot be used, the target stays."""
        try:
            replicas = number_from(answer)
        except ValueError as error:
            self.policy_failures += 1
            self.policy_failure = str(error)
            why = f"the policy failed: {error}; the target stays"
            return step.made(Outcome.POLICY_FAILED, why)
        self.policy_failure = ""
        self.policy_state = answer.get("state", self.policy_state)
        why = f"the policy wants {replicas:g}"
        return self._decided(step, replicas, why, complete=complete)

    def _at_zero(self, step: Decision, load: Load) -> Decision:
        self._pending = None
        if load.total == 0:
            self.due_at = NEVER  # a query is reported at once
            return step.made(Outcome.STEADY, "no query and no replica")
        factor = self.config.upscaling_factor or 1.0
        target = self.config.bounded(max(1, math.ceil(factor - ROUNDING)))
        step.inputs.factor = factor
        why = f"{load.total} waiting at zero replicas; no delay applies"
        return step.made(Outcome.FROM_ZERO, why, target)

    def _decided(self, step: Decision, wanted: float, why: str, *, complete: bool) -> Decision:
        scaled = self._scaled(step, wanted)
        replicas = self._bounded(step, scaled)
        why += f", within bounds {replicas}" if scaled != replicas else ""
        if replicas != step.before:
            return self._delayed(step, replicas, why, complete=complete)
        self._pending = None
        if self._window.is_even and not self.config.policy.is_custom:
            self.due_at = NEVER  # until the load changes
        return step.made(Outcome.STEADY, why)

    def _scaled(self, step: Decision, wanted: float) -> int:
        config, target = self.config, step.before
        up = wanted > target
        factor = (config.upscaling_factor if up else config.downscaling_factor) or 1.0
        scaled = math.ceil(target + factor * (wanted - target) - ROUNDING)
        if scaled == target and math.ceil(wanted - ROUNDING) < target:
            scaled -= 1  # a small factor must not keep it from ever shrinking
        inputs = step.inputs
        inputs.wanted, inputs.factor, inputs.scaled = wanted, factor, scaled
        return scaled

    def _bounded(self, step: Decision, scaled: int) -> int:
        replicas = self.config.bounded(scaled)
        if step.before == 0:
            return replicas  # with nothing to do but what the user's own policy knows of
        idle = self.average == 0 and step.inputs.queued + step.inputs.ongoing == 0
        if replicas == 0 and (step.before > 1 or not idle):
            return 1  # zero is for what had one, and for a while nothing to do
        return replicas

    def _delayed(self, step: Decision, replicas: int, why: str, *, complete: bool) -> Decision:
        up, inputs = replicas > step.before, step.inputs
        name, delay_s = _delay(self.config, step.before, replicas)
        if self._pending is None or self._pending[0] != up:
            self._pending = (up, step.at)
        left_s = self._pending[1] + delay_s - step.at
        missing_s = self.config.look_back_period_s - inputs.window_s
        if not up and not complete:
            return step.made(Outcome.WAITING, f"{why}; not every proxy has told its load yet")
        if not up and missing_s > max(left_s, CLOCK_S):
            name, delay_s, left_s = "look_back_period_s", self.config.look_back_period_s, missing_s
        inputs.delay, inputs.delay_s = name, delay_s
        if left_s > ROUNDING:
            self.due_at = min(self.due_at, step.at + left_s)
            inputs.left_s = left_s
            why = f"{why}; held back by {name}={delay_s:g} for {left_s:.3g} s more"
            outcome = Outcome.UPSCALE_DELAYED if up else Outcome.DOWNSCALE_DELAYED
            return step.made(outcome, why)
        self._pending = None
        why = f"{why}; {name}={delay_s:g} is over" if delay_s else why
        return step.made(Outcome.UPSCALED if up else Outcome.DOWNSCALED, why, replicas)


def _delay(config: AutoscalingConfig, before: int, replicas: int) -> tuple[str, float]:
    """Return the setting that holds back a change, and its seconds."""
    if replicas > before:
        return "upscale_delay_s", config.upscale_delay_s
    if replicas == 0 and config.downscale_to_zero_delay_s is not None:
        return "downscale_to_zero_delay_s", config.downscale_to_zero_delay_s
    return "downscale_delay_s", config.downscale_delay_s


def number_from(answer: Mapping[str, Any]) -> float:
    """Return what a policy of the user's wants; raise ValueError saying why that is unknown."""
    if answer.get("error"):
        raise ValueError(answer["error"])
    value = answer.get("replicas")
    if not is_number(value):
        raise ValueError(f"it returned {value!r}, which is no number")
    if not math.isfinite(value) or not 0 <= value <= MAX_WANTED:
        raise ValueError(f"it returned {value!r}, which is no number of replicas")
    return float(value)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
