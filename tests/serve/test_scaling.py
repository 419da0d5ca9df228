"""Autoscaling settings on their way from users' hands to the controller."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.build import build
from greenroom.serve.cli.tables import show_autoscaling
from greenroom.serve.code.packing import packed, packed_changes
from greenroom.serve.config import AutoscalingPolicy, BackendConfig
from greenroom.serve.exceptions import InvalidRequestError


def policy(_context: Any, least: int = 1) -> int:
    return least


def config_of(**options: Any) -> dict[str, Any]:
    def plain() -> str:
        return ""

    (spec,) = build(serve.deployment(**options)(plain).bind(), "app").deployments
    return spec.config


@pytest.mark.parametrize(
    "given",
    [
        policy,
        {"policy_function": policy, "policy_kwargs": {"least": 2}},
        AutoscalingPolicy(policy_function=policy),
    ],
)
def test_a_function_travels_by_value_under_its_name(given):
    packed_policy = config_of(autoscaling_config={"policy": given}).autoscaling_config.policy
    assert packed_policy.policy_function.endswith("test_scaling.policy")
    function, *_ = pickle.loads(packed_policy.code)
    assert function(None, least=3) == 3
    again = config_of(autoscaling_config={"policy": given}).autoscaling_config.policy
    assert again.code_hash == packed_policy.code_hash


@pytest.mark.parametrize("path", ["math:floor", "math.floor"])
def test_an_import_path_is_resolved_where_it_is_given(path):
    config = packed("backend 'b'", BackendConfig().updated(scaled_by(path)))
    assert pickle.loads(config.autoscaling_config.policy.code)[0] is math.floor


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:policy", "policy_function='no_such_module:policy' cannot be imported: No"),
        ("math:no_such_name", "cannot be imported: module 'math' has no attribute"),
        ("math:pi", "policy_function='math:pi' is no function"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_refused(path, message):
    with pytest.raises(InvalidRequestError, match="autoscaling policy of backend 'b'") as caught:
        packed_changes("backend 'b'", scaled_by(path))
    assert message in str(caught.value)


def test_a_policy_that_cannot_be_pickled_is_refused_by_name():
    generator = (number for number in ())

    def stuck(_context: Any) -> Any:
        return generator

    with pytest.raises(InvalidRequestError, match="the autoscaling policy of backend 'b' cannot"):
        packed_changes("backend 'b'", scaled_by(stuck))


def test_only_what_is_given_is_changed():
    assert packed_changes("b", {"user_config": 1}) == {"user_config": 1}
    assert packed_changes("b", BackendConfig(user_config=1)) == {"user_config": 1}
    auto = packed_changes("b", {"num_replicas": "auto", "user_config": 1})
    assert set(auto) == {"autoscaling_config", "user_config"}
    assert auto["autoscaling_config"]["max_replicas"] == 100
    assert packed_changes("b", {"num_replicas": 2}) == {"num_replicas": 2}
    with pytest.raises(InvalidRequestError, match="num_replicas='all'"):
        packed_changes("b", {"num_replicas": "all"})


def scaled_by(policy_function: Any) -> dict[str, Any]:
    return {"autoscaling_config": {"policy": {"policy_function": policy_function}}}


def test_decisions_are_shown_with_their_reasons(capsys):
    show_autoscaling({})
    assert "no backend has an autoscaling_config" in capsys.readouterr().out
    decision = {
        "since": 0.0,
        "at": 60.0,
        "times": 60,
        "from": 1,
        "to": 1,
        "outcome": "UPSCALE_DELAYED",
        "why": "[wants] 4",
    }
    config = {"min_replicas": 1, "max_replicas": 9, "policy": {"policy_function": "a.b"}}
    backend = {"running_replicas": 1, "target_replicas": 1, "config": config, "policy_failures": 3}
    up = {**decision, "times": 1, "to": 4, "outcome": "UPSCALED"}
    show_autoscaling({"b": {**backend, "decisions": [decision, up]}})
    shown = capsys.readouterr().out
    for part in ("UPSCALE_DELAYED", "[wants] 4", "1 -> 4", "1..9", " to "):
        assert part in shown
    assert "b, by a.b, which failed 3 times\n" in "".join(
        line.rstrip() + "\n" for line in shown.splitlines()
    )
    assert any(line.split()[-1:] == ["average"] for line in shown.splitlines()), "on one line"
