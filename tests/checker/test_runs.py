"""Short runs against real systems; and three defects, each planted and each found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checker.runs import Plan, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MOST_ROUNDS = 4  # of ten seconds, within which a defect must show


@pytest.mark.parametrize("hosts", [1, 3])
def test_kills_stops_and_cuts_leave_a_history_that_a_correct_system_could_have(
    tmp_path: Path, hosts: int
) -> None:
    with running(Plan(folder=tmp_path, hosts=hosts, round_s=15, fault_pause_s=0.7)) as run:
        verdict = run.round()
    print(verdict.counts(), *verdict.faults, sep="\n")
    assert not verdict.violations, "\n".join([*verdict.faults, *verdict.violations[:20]])
    assert sum(each.outcome == "ok" for each in verdict.history.operations) > 50
    assert sum(each.status == 200 for each in verdict.history.requests) > 200


def test_a_controller_that_dies_around_its_saves_leaves_such_a_history_too(tmp_path: Path) -> None:
    plan = Plan(folder=tmp_path, planted="crash_around_saves", round_s=15, faults=("stop",))
    with running(plan) as run:
        verdict = run.round()
    assert not verdict.violations, "\n".join([*verdict.faults, *verdict.violations[:20]])
    assert sum(each.outcome == "ok" for each in verdict.history.operations) > 10
    log = (tmp_path / "a" / "logs" / "controller.log").read_text(encoding="utf-8")
    assert log.count("recovered") > 5


def until_found(plan: Plan, *rules: str) -> list[str]:
    """Return the violations of the first round in which one of these rules finds any."""
    found = []
    with running(plan) as run:
        for _ in range(MOST_ROUNDS):
            found = run.round().violations
            if any(rule in each for each in found for rule in rules):
                return found
    raise AssertionError(f"{plan.planted} was not found by {' or '.join(rules)}: {found[:5]}")


def test_a_change_that_is_acknowledged_before_it_is_saved_is_found(tmp_path: Path) -> None:
    plan = Plan(
        folder=tmp_path,
        planted="ack_before_fsync",
        round_s=10,
        faults=("kill",),
        roles=("controller",),
    )
    until_found(plan, "are not linearizable")


def test_a_lease_that_outlives_the_acknowledgement_is_found(tmp_path: Path) -> None:
    plan = Plan(
        folder=tmp_path,
        planted="lease_not_revoked",
        round_s=10,
        faults=("stop",),
        roles=("http worker",),
    )
    found = until_found(plan, "was not in force")
    assert all("was not in force" in each for each in found), found[:5]


def test_a_stale_controller_that_still_publishes_is_found(tmp_path: Path) -> None:
    plan = Plan(
        folder=tmp_path,
        hosts=3,
        planted="stale_controller",
        round_s=10,
        faults=("freeze",),
        healed_s=5,
    )
    until_found(plan, "are not linearizable", "was not in force")
