"""Settings: their defaults, and what is refused with which words."""

from enum import StrEnum

import pytest

from greenroom.core import errors
from greenroom.core.config import ActorOptions, BackendConfig, HTTPOptions, LoggingConfig
from greenroom.core.validation import validated


def test_settings_have_the_contracts_defaults() -> None:
    contract = {
        "num_replicas": 1,
        "autoscaling_config": None,
        "user_config": None,
        "max_ongoing_requests": 100,
        "max_queued_requests": -1,
        "max_queue_wait_s": None,
        "request_timeout_s": None,
        "retryable": None,
        "health_check_period_s": 10,
        "health_check_timeout_s": 30,
        "graceful_shutdown_timeout_s": 20,
        "graceful_shutdown_wait_loop_s": 2,
        "max_constructor_retry_count": 20,
        "max_surge_percent": 20,
        "constructor_timeout_s": 1800,
        "max_replicas_per_host": None,
        "logging_config": None,
        "http_call_methods": (),
        "session_affinity": None,
        "request_router_config": None,
        "outlier_ejection": True,
        "retry_failures": False,
        "slow_start_s": 10.0,
        "learn_weights": True,
    }
    assert contract.items() <= BackendConfig().model_dump().items()
    assert ActorOptions().model_dump() == {
        "num_cpus": 0,
        "num_gpus": 0,
        "memory": 0,
        "resources": {},
        "label_selector": {},
        "runtime_env": {
            "env_vars": {},
            "working_dir": None,
            "py_modules": (),
            "pip": (),
            "uv": (),
        },
    }
    assert (HTTPOptions().host, HTTPOptions().port) == ("127.0.0.1", 8000)


def test_every_problem_is_named_in_one_error() -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        validated(HTTPOptions, {"port": 70000, "workers": 0, "hots": "x"})
    assert str(caught.value) == (
        "invalid HTTPOptions: port=70000: must be less than or equal to 65535; "
        "workers=0: must be greater than or equal to 1; "
        "hots='x': no such setting; did you mean host?"
    )


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (BackendConfig, {"num_cpus": 2}, "num_cpus=2: no such setting; it is one of ray_actor_o"),
        (HTTPOptions, {"num_cpus": 2}, "num_cpus=2: no such setting; leave it out: fronts"),
        (BackendConfig, {"root_url": "/"}, "root_url='/': no such setting; there are: num_repl"),
        (
            BackendConfig,
            {"autoscaling_config": {"min_replica": 2}},
            "autoscaling_config.min_replica=2: no such setting; did you mean min_replicas?",
        ),
    ],
)
def test_advice_is_that_of_the_class_that_lacks_the_setting(model, values, message):
    with pytest.raises(errors.InvalidRequestError) as caught:
        validated(model, values)
    assert message in str(caught.value)


def test_names_of_settings_are_strings() -> None:
    with pytest.raises(errors.InvalidRequestError, match="must be a string"):
        validated(BackendConfig, {1: 2})


def test_a_setting_may_be_given_by_another_name_but_not_by_two() -> None:
    config = validated(BackendConfig, {"max_concurrent_queries": 3, "max_replicas_per_node": 2})
    assert (config.max_ongoing_requests, config.max_replicas_per_host) == (3, 2)
    assert config.updated({"max_concurrent_queries": 4}).max_ongoing_requests == 4
    for values in ({"max_concurrent_queries": 3, "max_ongoing_requests": 3},):
        with pytest.raises(errors.InvalidRequestError, match="are two names for one thing"):
            validated(BackendConfig, values)
        with pytest.raises(errors.InvalidRequestError, match="are two names for one thing"):
            config.updated(values)


def test_an_update_keeps_the_rest_and_does_not_touch_the_original() -> None:
    config = BackendConfig(num_replicas=3)
    assert config.updated({"max_ongoing_requests": 5}) == BackendConfig(
        num_replicas=3, max_ongoing_requests=5
    )
    assert config == BackendConfig(num_replicas=3)
    with pytest.raises(errors.InvalidRequestError, match="num_replicas=0"):
        config.updated({"num_replicas": 0})


@pytest.mark.parametrize("given", ["json", "Json", StrEnum("Encoding", ["JSON"]).JSON])
def test_a_choice_may_be_given_in_another_case_or_as_a_member_of_an_enum(given: str) -> None:
    assert LoggingConfig(encoding=given).encoding == "JSON"
    with pytest.raises(errors.InvalidRequestError, match="encoding='xml': must be 'TEXT'"):
        validated(LoggingConfig, {"encoding": "xml"})
