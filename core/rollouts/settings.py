"""A rollout's settings: what is allowed, and the traffic that they make of each step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from greenroom.core.errors import InvalidRequestError
from greenroom.core.records import RolloutRecord
from greenroom.core.rollouts.judging import check_rules
from greenroom.core.validation import is_number

MAX_STEPS = 50
DEFAULT_STEPS = (0.01, 0.1, 0.5, 1.0)
DEFAULT_HOLD_S = 300.0
DEFAULT_ALPHA = 0.01
DEFAULT_MIN_SAMPLES = 100
DEFAULT_READY_TIMEOUT_S = 60.0


def check_settings(
    *,
    to: object,
    steps: Any,
    hold_s: Any,
    abort_if: object,
    alpha: Any,
    min_samples: Any,
    ready_timeout_s: Any,
) -> dict[str, Any]:
    """Return settings as they are kept; one InvalidRequestError naming all that is wrong."""
    problems = [] if isinstance(to, str) and to else [f"to={to!r}: must be a backend's name"]
    checked = _checked_steps(steps)
    if checked is None:
        problems.append(
            f"steps={steps!r}: must be at most {MAX_STEPS} numbers above 0 that grow and end with 1"
        )
    limits = (("hold_s", hold_s, 86400 * 30), ("ready_timeout_s", ready_timeout_s, 86400))
    problems += [
        f"{name}={value!r}: must be a number of seconds above 0 and at most {most}"
        for name, value, most in limits
        if not is_number(value) or not 0 < value <= most
    ]
    if not is_number(alpha) or not 0 < alpha <= 0.5:
        problems.append(f"alpha={alpha!r}: must be a number above 0 and at most 0.5")
    if not isinstance(min_samples, int) or isinstance(min_samples, bool) or min_samples < 1:
        problems.append(f"min_samples={min_samples!r}: must be a whole number above 0")
    try:
        rules = check_rules(abort_if)
    except InvalidRequestError as error:
        problems.append(str(error))
    if problems:
        raise InvalidRequestError("rollout: " + "; ".join(problems))
    return {
        "to": to,
        "steps": checked,
        "hold_s": float(hold_s),
        "abort_if": rules,
        "alpha": float(alpha),
        "min_samples": min_samples,
        "ready_timeout_s": float(ready_timeout_s),
    }


def _checked_steps(steps: Any) -> tuple[float, ...] | None:
    if not isinstance(steps, list | tuple) or not 0 < len(steps) <= MAX_STEPS:
        return None
    if not all(is_number(step) and 0 < step <= 1 for step in steps):
        return None
    grows = all(a < b for a, b in itertools.pairwise(steps))
    return tuple(float(step) for step in steps) if grows and steps[-1] == 1 else None


def weights_at(record: RolloutRecord) -> dict[str, float]:
    """Return the traffic of a rollout under way: the old backends share what the new one leaves."""
    if record.step < 0:
        return {record.to: 0.0} | dict(record.before)
    share = record.steps[record.step]
    others = others_of(record.before, record.to)
    of_all = sum(others.values())
    return {tag: weight / of_all * (1 - share) for tag, weight in others.items()} | {
        record.to: share
    }


def others_of(traffic: Mapping[str, float], to: str) -> dict[str, float]:
    """Return the weights of the backends that a rollout takes traffic from."""
    return {tag: weight for tag, weight in traffic.items() if tag != to and weight > 0}
