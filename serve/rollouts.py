"""The command about rollouts, and what ``greenroom status`` shows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from greenroom.actors.admin_messages import AbortRollout, PromoteRollout, StartRollout
from greenroom.actors.connection import Connection
from greenroom.core.errors import InvalidRequestError
from greenroom.core.judging import DEFAULT_RULES, RULES
from greenroom.core.rollout_settings import check_settings
from greenroom.serve import operations
from greenroom.serve.display import Progress
from greenroom.serve.operations import new


def settings_from(to: str, steps: str, abort_if: Sequence[str], **numbers: float) -> dict[str, Any]:
    """Read a rollout's settings from flags; InvalidRequestError naming what is wrong."""
    try:
        shares = [float(step) for step in steps.split(",")]
    except ValueError:
        raise InvalidRequestError(
            f"--steps {steps!r}: expected shares with commas between, such as 0.01,0.1,1"
        ) from None
    rules = dict(_rule(text) for text in abort_if) or DEFAULT_RULES
    return check_settings(to=to, steps=shares, abort_if=rules, **numbers)


def _rule(text: str) -> tuple[str, float]:
    name, _, limit = text.partition("=")
    try:
        return name, float(limit)
    except ValueError:
        raise InvalidRequestError(
            f"--abort-if {text!r}: expected RULE=NUMBER, with a rule of {', '.join(RULES)}"
        ) from None


def start(
    connection: Connection, endpoint: str, settings: Mapping[str, Any], *, wait: bool
) -> None:
    """Begin a rollout; with ``wait`` also see it through, and fail when it goes back."""
    goal = connection.request(new(StartRollout, endpoint=endpoint, **settings))
    if goal is None:
        click.echo(f"{settings['to']!r} has all traffic of {endpoint!r} already")
        return
    if not wait:
        click.echo(f"began, with goal {goal}; see it with: greenroom status")
        return
    with Progress(f"rolling out {settings['to']!r} at {endpoint!r}"):
        operations.wait_for_goal(connection, goal)
    click.echo(f"{settings['to']!r} has all traffic of {endpoint!r}")


def end(connection: Connection, endpoint: str, *, promote: bool) -> None:
    """End a rollout now."""
    kind = PromoteRollout if promote else AbortRollout
    connection.request(new(kind, endpoint=endpoint))
    click.echo(f"{'promoted' if promote else 'went back'} at {endpoint!r}")


def lines_of(rollouts: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of each rollout, a headline and what it knows."""
    return [line for name, rollout in rollouts.items() for line in _lines(name, rollout)]


def _lines(endpoint: str, rollout: Mapping[str, Any]) -> list[str]:
    under_way = rollout["state"] == "under way"
    where = rollout["state"]
    if under_way:
        step, steps = rollout["step"], rollout["steps"]
        share = f", {steps[step - 1] * 100:.4g} %" if step else ""
        where = f"step {step} of {len(steps)}{share}"
    lines = [f"rollout of {endpoint} to {rollout['to']}: {where}: {rollout['why']}"]
    if rollout["step"]:
        lines += [f"  {side}: {_side(rollout[side])}" for side in ("new", "old")]
        needed = f"{rollout['evidence_to_go_back']:.4g} needed to go back"
        lines.append(f"  evidence {rollout['evidence']:.3g} of {needed}")
        lines += [
            f"    {name} {rule['limit']:.4g}: evidence {rule['evidence']:.3g}"
            for name, rule in rollout["rules"].items()
        ]
    return lines


def _side(side: Mapping[str, Any]) -> str:
    rate = "-" if side["error_rate"] is None else f"{side['error_rate'] * 100:.3g} %"
    p95 = "-" if side["p95_latency_s"] is None else f"{side['p95_latency_s'] * 1000:.3g} ms"
    overdue = f", {side['overdue']} open for long" if side["overdue"] else ""
    return f"{side['queries']} queries, {side['errors']} bad ({rate}), p95 {p95}{overdue}"
