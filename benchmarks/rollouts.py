"""How rollouts decide, by simulation: false alarms, and bad answers until a bad version is known.

``python -m benchmarks.rollouts`` prints the figures of docs/rollouts.md. Each run is a rollout with
the default settings under a steady load; queries come as a Poisson process, proxies report every
second, and after each report the rollout's own rules decide. No system is started.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

from greenroom.core.operations import DEFAULT_ALPHA, DEFAULT_HOLD_S, DEFAULT_MIN_SAMPLES
from greenroom.core.rollouts import judging
from greenroom.core.rollouts.judging import Tally
from tests.support.judged import STEPS, Version, count

LONGEST_S = 100_000
SLACK_S = judging.SLACK_S


@dataclass(frozen=True)
class Outcome:
    went_back: bool
    step: int  # at which it ended
    bad: int  # answers of the new version that were bad
    seconds: float


def rollout(
    new: Version,
    old: Version,
    rng: random.Random,
    *,
    rate: float,
    rules: dict[str, float],
    steps: tuple[float, ...] = STEPS,
    trouble: Callable[[int], float] = lambda _: 1.0,
) -> Outcome:
    """Roll out; ``rate`` is queries per second, ``trouble`` multiplies both versions' errors."""
    bad = seconds = 0
    for step, share in enumerate(steps):
        sides, slowness = (Tally(), Tally()), None
        for held_s in range(1, LONGEST_S):
            seconds += 1
            factor = trouble(seconds)
            for tally, version, part in zip(sides, (new, old), (share, 1 - share), strict=True):
                count(tally, rate * part, version.troubled(factor), rng)
            ratio = rules.get("p95_latency_ratio")
            if ratio is not None and slowness is None:
                slowness = judging.calibrate(sides[1], sides[0], ratio)
            sample = judging.Sample(*sides, share, slowness)
            by_rule = judging.evidence_by_rule(rules, sample)
            if sum(by_rule.values()) / (len(rules) * len(steps)) >= 1 / DEFAULT_ALPHA:
                return Outcome(True, step, bad + sides[0].errors, seconds)
            undecided = max(by_rule.values()) > judging.NO_EVIDENCE
            if held_s < DEFAULT_HOLD_S or undecided:
                continue
            if not judging.too_few(rules, sample, DEFAULT_MIN_SAMPLES):
                break
        bad += sides[0].errors
    return Outcome(False, len(steps), bad, seconds)


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    tenths = quantiles(values, n=10)
    return f"{tenths[0]:.0f} / {tenths[4]:.0f} / {tenths[8]:.0f}"


def common_trouble(second: int) -> float:
    """Errors that come and go with something both versions depend on."""
    return 20.0 if second % 200 < 20 else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    hardest = {"error_rate_increase": 0.0, "p95_latency_ratio": 1.0}
    default = dict(judging.DEFAULT_RULES)
    print(f"A/A, {arguments.runs} runs each: went back, seconds until promoted (10/50/90 %)")
    for found, rules, rate, trouble in (
        ("default rules, 100/s", default, 100, lambda _: 1.0),
        ("no margins, 100/s", hardest, 100, lambda _: 1.0),
        ("no margins, 100/s, common trouble", hardest, 100, common_trouble),
        ("no margins, 1000/s", hardest, 1000, lambda _: 1.0),
    ):
        judging.SLACK_S = 0.0 if rules is hardest else SLACK_S
        same = Version(0.01)
        outcomes = [
            rollout(same, same, rng, rate=rate, rules=rules, trouble=trouble)
            for _ in range(arguments.runs)
        ]
        gone = sum(outcome.went_back for outcome in outcomes)
        took = [outcome.seconds for outcome in outcomes if not outcome.went_back]
        print(f"  {found}: {gone} ({gone / len(outcomes):.2%}), {spread(took)}", flush=True)
    judging.SLACK_S = SLACK_S
    runs = max(arguments.runs // 5, 2)
    print(f"v2 fails 5 %, {runs} runs each: went back, bad answers, seconds (10/50/90 %)")
    for steps in ((0.01, 0.1, 0.5), (0.1, 0.5)):
        for old in (0.0, 0.001, 0.01):
            for rules in ({**default}, {**default, "error_rate_increase": 0.0}):
                outcomes = [
                    rollout(Version(0.05), Version(old), rng, rate=100, rules=rules, steps=steps)
                    for _ in range(runs)
                ]
                gone_at = [outcome.step for outcome in outcomes if outcome.went_back]
                first = sum(step == 0 for step in gone_at)
                bad = spread([outcome.bad for outcome in outcomes])
                took = spread([outcome.seconds for outcome in outcomes])
                margin = rules["error_rate_increase"]
                print(
                    f"  first step {steps[0]:.0%}, v1 {old:.1%}, margin {margin}: {len(gone_at)} "
                    f"({first} in the first step), bad {bad}, {took} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
