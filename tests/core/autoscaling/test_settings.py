"""The settings of autoscaling: names, defaults, and what is refused with which words."""

from __future__ import annotations

import pytest

from greenroom.core.autoscaling.settings import AutoscalingConfig, AutoscalingPolicy
from greenroom.core.config import BackendConfig, config_shown
from greenroom.core.errors import InvalidRequestError


def test_the_defaults_are_ray_serves() -> None:
    made = AutoscalingConfig().model_dump(exclude={"policy"})
    assert made == {
        "min_replicas": 1,
        "initial_replicas": None,
        "max_replicas": 1,
        "target_ongoing_requests": 2,
        "look_back_period_s": 30,
        "upscaling_factor": None,
        "downscaling_factor": None,
        "upscale_delay_s": 30,
        "downscale_delay_s": 600,
        "downscale_to_zero_delay_s": None,
        "aggregation_function": "mean",
        "metrics_interval_s": 10,
    }


def test_other_names_that_ray_serve_has_or_had_are_taken() -> None:
    made = AutoscalingConfig(
        max_replicas=2,
        upscale_smoothing_factor=0.5,
        downscale_smoothing_factor=0.6,
        target_num_ongoing_requests_per_replica=3,
        aggregation_function="MAX",
        metrics_interval_s=0.5,
        policy={"name": "ongoing_requests"},
    )
    assert (made.upscaling_factor, made.downscaling_factor) == (0.5, 0.6)
    assert made.target_ongoing_requests == 3
    assert (made.aggregation_function, made.policy.policy_function) == ("max", "ongoing_requests")


def test_all_bad_settings_are_named_in_one_error() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BackendConfig().updated(
            {"autoscaling_config": {"upscale_delay_s": -1, "x": 1, "min_replicas": "many"}}
        )
    for name in ("upscale_delay_s=-1", "x=1", "min_replicas='many'"):
        assert name in str(caught.value)


def test_auto_is_one_to_a_hundred_at_two_each_and_takes_settings_with_it() -> None:
    auto = BackendConfig().updated({"num_replicas": "auto"})
    assert auto.num_replicas is None
    assert auto.autoscaling_config == AutoscalingConfig(max_replicas=100)
    given = {"max_replicas": 7, "upscale_delay_s": 1}
    for beside in (given, AutoscalingConfig(**given)):
        made = BackendConfig().updated({"num_replicas": "auto", "autoscaling_config": beside})
        assert made.autoscaling_config == AutoscalingConfig(**given)
    with pytest.raises(InvalidRequestError, match=r"autoscaling_config=\[\]|autoscaling_config=3"):
        BackendConfig().updated({"num_replicas": "auto", "autoscaling_config": 3})


def test_a_number_and_autoscaling_are_not_given_together_but_replace_each_other() -> None:
    scaled = BackendConfig().updated({"autoscaling_config": {"max_replicas": 3}})
    with pytest.raises(InvalidRequestError, match="num_replicas=2: cannot be given with autosca"):
        scaled.updated({"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}})
    fixed = scaled.updated({"num_replicas": 2})
    assert (fixed.num_replicas, fixed.autoscaling_config) == (2, None)
    again = fixed.updated({"autoscaling_config": {"max_replicas": 3}})
    assert again == scaled
    assert scaled.updated({"user_config": 1}).autoscaling_config == scaled.autoscaling_config
    assert scaled.updated({"autoscaling_config": None}).num_replicas == 1


def test_settings_survive_their_way_through_a_record() -> None:
    for given in ({}, {"num_replicas": 3}, {"num_replicas": "auto"}):
        made = BackendConfig().updated(given)
        assert BackendConfig(**made.model_dump()) == made
        assert made.updated({}) == made


def test_policies_are_equal_by_the_hash_of_their_code() -> None:
    one = AutoscalingPolicy(policy_function="a.b", code=b"x", code_hash="h")
    assert one == AutoscalingPolicy(policy_function="a.b", code=b"y", code_hash="h")
    assert one != AutoscalingPolicy(policy_function="a.b", code=b"x", code_hash="i")
    assert one != AutoscalingPolicy(policy_function="a.b", code=b"x", code_hash="h", timeout_s=2)
    assert len({one, AutoscalingPolicy(policy_function="a.b", code_hash="h")}) == 1


def test_people_do_not_see_code() -> None:
    policy = {"policy_function": "a.b", "code": b"x" * 1000, "code_hash": "h"}
    made = BackendConfig().updated({"autoscaling_config": {"policy": policy}})
    shown = config_shown(made.model_dump())["autoscaling_config"]["policy"]
    assert (shown["policy_function"], shown["code_hash"], "code" in shown) == ("a.b", "h", False)
    assert config_shown(BackendConfig().model_dump())["autoscaling_config"] is None
