"""What the command line shows of a status."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.serve.admin.reports import problems_of
from greenroom.serve.cli.tables import show_status


def replica(tag: str, state: str, host: str) -> dict[str, Any]:
    return {"tag": tag, "pid": 1, "host": host, "state": state, "ongoing": 0}


def shown_of(capsys: pytest.CaptureFixture[str], name: str, *replicas: dict[str, Any]) -> list[str]:
    """Return the lines of a status with one deployment, whose target is one replica."""
    deployment = {
        "status": "HEALTHY",
        "message": "",
        "version": "1",
        "target_replicas": 1,
        "replicas": replicas,
    }
    shop = {
        "status": "RUNNING",
        "message": "",
        "route_prefix": "/",
        "deployments": {name: deployment},
    }
    show_status({"hosts": [], "applications": {"shop": shop}, "backends": {}, "endpoints": {}})
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_what_is_on_a_lost_host_does_not_count_as_one_of_those_that_run(capsys):
    lost = replica("shop#d#aaaaaa", "LOST", "a")
    lines = shown_of(capsys, "d", lost, replica("shop#d#bbbbbb", "RUNNING", "b"))
    assert "d: 1 of 1 HEALTHY" in lines
    assert any("aaaaaa LOST" in line for line in lines)


@pytest.mark.parametrize("columns", ["40", "80"])
def test_nothing_is_folded_or_cut_where_no_terminal_reads_it(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    name, tag = "a-deployment-" * 8, "b" * 60
    lines = shown_of(capsys, name, replica(f"shop#{name}#{tag}", "RUNNING", "a"))
    assert f"{name}: 1 of 1 HEALTHY" in lines
    assert f"{tag} RUNNING 1 0" in lines


def side(queries: int) -> dict[str, Any]:
    return {
        "queries": queries,
        "errors": 0,
        "error_rate": None,
        "p95_latency_s": None,
        "overdue": 0,
    }


@pytest.mark.parametrize(("state", "is_shown"), [("under way", True), ("went back", False)])
def test_the_evidence_of_a_rollout_is_shown_while_it_is_under_way(state, is_shown, capsys):
    rollout = {
        "state": state,
        "to": "v2",
        "step": 1,
        "steps": [0.1, 1],
        "why": "because",
        "new": side(3),
        "old": side(4),
        "evidence": 2.0,
        "evidence_to_go_back": 100.0,
        "rules": {"error_rate": {"limit": 0.1, "evidence": 2.0}},
    }
    show_status({"hosts": [], "rollouts": {"shop": rollout}})
    shown = capsys.readouterr().out
    assert "rollout of shop to v2: " in shown
    assert ("evidence" in shown, "queries" in shown) == (is_shown, is_shown)


HOST = {"name": "a", "state": "RUNNING", "proxy": {"pid": 1}, "front": {"pid": 2, "workers": [3]}}
FAILED = {"status": "HEALTHY", "message": "its policy failed: 'a'", "policy_failure": "'a'"}
TROUBLED = {"status": "HEALTHY", "replicas": [{"tag": "b#1", "trouble": "32 threads are busy"}]}


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"hosts": []}, "no host has reported to the controller yet"),
        ({"hosts": [{**HOST, "state": "DRAINING"}]}, "host a is DRAINING"),
        ({"hosts": [{**HOST, "proxy": None}]}, "host a: its proxy does not run"),
        (
            {"hosts": [{**HOST, "store_trouble": "no answer"}]},
            "host a cannot use the store, so it could not lead: no answer",
        ),
        ({"backends": {"b": FAILED}}, "backend 'b' is HEALTHY: its policy failed: 'a'"),
        (
            {"applications": {"shop": {"status": "RUNNING", "deployments": {"d": FAILED}}}},
            "deployment 'd' of 'shop' is HEALTHY: its policy failed: 'a'",
        ),
        ({"backends": {"b": TROUBLED}}, "replica b#1: 32 threads are busy"),
        (
            {"damaged": [{"kind": "endpoint", "name": "e", "reason": "log-1 is damaged"}]},
            "endpoint 'e' is lost from the store: log-1 is damaged; deploy it again, or delete it",
        ),
        (
            {"damaged": [{"kind": "unknown", "name": "changes", "reason": "log-1 is damaged"}]},
            (
                "unknown 'changes' is lost from the store: log-1 is damaged; deploy again what is "
                "not there, then: greenroom ask forget_lost"
            ),
        ),
    ],
)
def test_what_is_not_healthy_is_reported_in_a_line(report, message):
    assert problems_of({"hosts": [HOST], **report}) == [message]
    assert problems_of({"hosts": [HOST]}) == []
