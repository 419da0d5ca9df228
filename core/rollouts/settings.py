"""A rollout's settings: their allowed values, and the traffic of each step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from greenroom.core.comparing.comparing import Compare, check_compare
from greenroom.core.records import RolloutRecord
from greenroom.core.rollouts.judging import DEFAULT_RULES, DIFFERENCE_RATE, check_rules
from greenroom.core.validation import is_number

MAX_STEPS = 50
DEFAULT_STEPS = (0.01, 0.1, 0.5, 1.0)
DEFAULT_HOLD_S = 300.0
DEFAULT_ALPHA = 0.01
DEFAULT_MIN_SAMPLES = 100
DEFAULT_READY_TIMEOUT_S = 60.0
CANARY_READY_TIMEOUT_S = 600.0  # a new version has to start first


def _checked_steps(steps: Any) -> tuple[float, ...]:
    if (
        isinstance(steps, list | tuple)
        and 0 < len(steps) <= MAX_STEPS
        and all(is_number(step) and 0 < step <= 1 for step in steps)
        and all(a < b for a, b in itertools.pairwise(steps))
        and steps[-1] == 1
    ):
        return tuple(float(step) for step in steps)
    raise ValueError(f"must be at most {MAX_STEPS} numbers above 0 that grow and end with 1")


def _checked_rules(rules: object) -> dict[str, float]:
    return dict(DEFAULT_RULES) if rules is None else check_rules(rules)


def _checked_compare(compare: object) -> object:
    return None if compare is None else check_compare(compare)


Steps = Annotated[tuple[float, ...], BeforeValidator(_checked_steps)]
Rules = Annotated[dict[str, float], BeforeValidator(_checked_rules)]
HoldS = Annotated[float, Field(gt=0, le=86400 * 30)]
Alpha = Annotated[float, Field(gt=0, le=0.5)]
MinSamples = Annotated[int, Field(ge=1)]
ReadyTimeoutS = Annotated[float, Field(gt=0, le=86400)]
MaybeCompare = Annotated[Compare | None, BeforeValidator(_checked_compare)]


class Canary(BaseModel):
    """How an application's new version takes over from the running one.

    With ``compare`` as many queries as the first step gives it are mirrored to it, too.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    steps: Steps = DEFAULT_STEPS
    hold_s: HoldS = DEFAULT_HOLD_S
    abort_if: Rules = Field(default_factory=lambda: dict(DEFAULT_RULES))
    alpha: Alpha = DEFAULT_ALPHA
    min_samples: MinSamples = DEFAULT_MIN_SAMPLES
    ready_timeout_s: ReadyTimeoutS = CANARY_READY_TIMEOUT_S
    compare: MaybeCompare = None

    @model_validator(mode="after")
    def _compares_what_it_judges(self) -> Self:
        if DIFFERENCE_RATE in self.abort_if and self.compare is None:
            raise ValueError(f"abort_if[{DIFFERENCE_RATE!r}]: must come with compare")
        return self


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
