"""Bad values of settings, and the words that refuse them."""

import math
from functools import partial
from typing import Any

import pytest
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from greenroom.core import operations as ops
from greenroom.core.comparing.comparing import check_compare
from greenroom.core.config import ActorOptions, AutoscalingConfig, BackendConfig, HTTPOptions
from greenroom.core.errors import InvalidRequestError
from greenroom.core.jobs import TaskProcessorConfig
from greenroom.core.tokens import digest_of
from greenroom.core.validation import validated

ROLLOUT = partial(ops.StartRollout, endpoint="e", to="v2")
SERIES = partial(ops.GetSeries)
TRAFFIC = partial(ops.SetTraffic, endpoint="e")
SHADOW = partial(ops.ShadowTraffic, endpoint="e", backend="v2")
TOKEN = partial(ops.CreateToken, name="n", digest=digest_of("t"), holder_role="admin")


def comparing(*, compare: Any) -> Any:
    return check_compare(compare)


BAD: dict[tuple[Any, str], list[tuple[Any, str]]] = {
    (BackendConfig, "autoscaling_config"): [
        ({"min_replicas": -1}, "min_replicas=-1: must be greater than or equal to 0"),
        ({"max_replicas": 0}, "max_replicas=0: must be greater than or equal to 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas=2: must not be below min_replicas"),
        ({"min_replicas": 2}, "max_replicas=1: must not be below min_replicas, which is 2"),
        ({"max_replicas": 1e9}, "max_replicas=1000000000.0: "),
        ({"initial_replicas": 5}, "initial_replicas=5: must be from min_replicas to max_replicas"),
        ({"initial_replicas": 0}, "initial_replicas=0: must be from min_replicas to max_replicas"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests=0: must be greater"),
        ({"target_ongoing_requests": float("nan")}, "target_ongoing_requests=nan: "),
        ({"look_back_period_s": 0}, "look_back_period_s=0: must be greater than 0"),
        ({"upscaling_factor": 0}, "upscaling_factor=0: must be greater than 0"),
        ({"downscaling_factor": -1}, "downscaling_factor=-1: must be greater than 0"),
        ({"upscale_delay_s": -1}, "upscale_delay_s=-1: must be greater than or equal"),
        ({"downscale_delay_s": float("inf")}, "downscale_delay_s=inf: "),
        ({"downscale_to_zero_delay_s": -0.1}, "downscale_to_zero_delay_s=-0.1: "),
        ({"metrics_interval_s": 0}, "metrics_interval_s=0: must be greater than 0"),
        ({"aggregation_function": "sum"}, "aggregation_function='sum': must be 'mean', 'max'"),
        ({"smoothing_factor": 1}, "smoothing_factor=1: no such setting; give upscaling_factor"),
        (
            {"upscale_smoothing_factor": 1, "upscaling_factor": 1},
            "upscale_smoothing_factor and upscaling_factor are two names for one thing",
        ),
        ({"min_replica": 1}, "min_replica=1: no such setting"),
        ({"policy": "fastest"}, "policy.policy_function='fastest': must be 'ongoing_requests'"),
        ({"policy": 3}, "policy.policy_function=3: must be"),
        ({"policy": {"name": "fastest"}}, "policy.policy_function='fastest': must be"),
        ({"policy": {"policy_function": "a.b", "timeout_s": 0}}, "policy.timeout_s=0: "),
        (
            {"policy": {"policy_function": "a.b", "policy_kwargs": {"x": {1}}}},
            "policy.policy_kwargs={'x': {1}}: must be JSON-able",
        ),
        (
            {"policy": {"policy_kwargs": {"least": 1}}},
            "policy.policy_kwargs={'least': 1}: 'ongoing_requests' takes none",
        ),
    ],
    (HTTPOptions, "middlewares"): [
        (["no path"], "middlewares[0].path='no path': expected an import path"),
        (["__main__:Mine"], "put it in a module"),
        ([("a:B", {"x": {1}})], "must be JSON-able"),
        ([{"path": "a:B", "option": 1}], "middlewares[0].option=1: "),
        ([Middleware(GZipMiddleware, 9)], "give its options by name"),
        ("[not json", "is no JSON"),
        (3, "middlewares=3"),
    ],
    (HTTPOptions, "cors"): [
        ({"allow_methods": ["GET"]}, "cors allows no origin"),
        ({"allow_origins": ["*"], "max_age": -1}, "cors.max_age=-1"),
        ({"allow_origin_regex": "("}, "is no regular expression"),
        ("{", "is no JSON"),
        ("https://a.example,shop.example", "'shop.example' is no origin"),
        (["https://shop.example/"], "'https://shop.example/' is no origin"),
        (["https://Shop.example"], "'https://Shop.example' is no origin"),
        (3, "cors=3"),
    ],
    (BackendConfig, "logging_config"): [
        ({"encoding": "XML"}, "logging_config.encoding='XML'"),
        ({"log_level": "LOUD"}, "logging_config.log_level='LOUD': expected one of CRITICAL"),
        ({"log_level": 99}, "logging_config.log_level=99"),
        ({"logs_dir": "here"}, "logging_config.logs_dir='here': must be an absolute path"),
        ({"additional_log_standard_attrs": ["nme"]}, "'nme': expected some of created"),
        ({"colour": True}, "logging_config.colour=True"),
        ("JSON", "logging_config='JSON'"),
    ],
    (ActorOptions, "num_gpus"): [
        (1.5, "num_gpus=1.5: must be a whole number, or less than 1"),
        (-1, "num_gpus=-1: must be greater than or equal to 0"),
    ],
    (ActorOptions, "resources"): [
        ({"TPU": 2.5}, "TPU=2.5: must be a whole number"),
    ],
    (HTTPOptions, "trusted_proxies"): [
        (["10.0.0.1", "proxy.example"], "proxy.example"),
        (["10.0.0.1", "10.0.0.1/8"], "10.0.0.1/8"),
        (["10.0.0.1", "10.0.0.0/33"], "10.0.0.0/33"),
        (["10.0.0.1", "10.0.0.1:80"], "10.0.0.1:80"),
    ],
    (HTTPOptions, "ssl_keyfile"): [
        ("x.pem", "ssl_keyfile='x.pem': ssl_certfile must be given, too"),
    ],
    (HTTPOptions, "ssl_certfile"): [
        ("x.pem", "ssl_certfile='x.pem': ssl_keyfile must be given, too"),
    ],
    (BackendConfig, "health_check_period_s"): [
        (math.inf, "health_check_period_s="),
        (math.nan, "health_check_period_s="),
        (0, "health_check_period_s="),
        ("soon", "health_check_period_s="),
    ],
    (BackendConfig, "user_config"): [
        ({"k": {1, 2}}, "must be JSON-able"),
    ],
    (BackendConfig, "http_call_methods"): [
        (["predict", "_private"], "'_private': expected"),
        (["predict", "__call__"], "'__call__': expected"),
        (["predict", "a-b"], "'a-b': expected"),
        (["predict", "reconfigure"], "'reconfigure': expected"),
    ],
    (BackendConfig, "max_queries"): [
        (0, "max_queries=0"),
    ],
    (BackendConfig, "max_age_s"): [
        (-1, "max_age_s=-1"),
    ],
    (BackendConfig, "max_gpu_memory_bytes"): [
        ("8 GB", "max_gpu_memory_bytes='8 GB'"),
        (0, "max_gpu_memory_bytes=0"),
    ],
    (BackendConfig, "max_memory_bytes"): [
        (1000, "max_memory_bytes=1000"),
    ],
    (BackendConfig, "retryable"): [
        ("yes", "retryable='yes': must be a valid boolean"),
        (1, "retryable=1"),
    ],
    (BackendConfig, "request_router_config"): [
        ({}, "must be given"),
        ({"request_router_class": "a:B", "timeout_s": 60}, "timeout_s=60: must be less"),
        ({"request_router_class": "a:B", "request_router_kwargs": {"x": {1}}}, "JSON-able"),
        ({"request_router_class": "a:B", "request_routing_stats_period_s": 1}, "leave it out"),
        ({"request_router_class": "Router"}, "must be a class, or its import path"),
    ],
    (ROLLOUT, "to"): [("", "to='': must have at least 1 character")],
    (ROLLOUT, "steps"): [
        ((), "steps=(): must be at most 50 numbers above 0 that grow and end with 1"),
        ((0.1, 0.1, 1.0), "that grow and end with 1"),
        ((0.1, 0.5), "that grow and end with 1"),
        ((0, 1), "numbers above 0"),
        (1, "steps=1: must be"),
    ],
    (ROLLOUT, "hold_s"): [
        (0, "hold_s=0: must be greater than 0"),
        ("1", "hold_s='1'"),
        (math.nan, "hold_s=nan"),
    ],
    (ROLLOUT, "ready_timeout_s"): [(-1, "ready_timeout_s=-1")],
    (ROLLOUT, "alpha"): [
        (0, "alpha=0: must be greater than 0"),
        (1, "alpha=1: must be less than or equal to 0.5"),
    ],
    (ROLLOUT, "min_samples"): [
        (0, "min_samples=0: must be greater than or equal to 1"),
        (1.5, "min_samples=1.5: must be a valid integer"),
    ],
    (ROLLOUT, "abort_if"): [
        ({}, "abort_if={}: must be a dict with at least one of error_rate"),
        ([1], "1: expected RULE=NUMBER, with a rule of error_rate"),
        ([], "abort_if=[]: must be a dict with at least one of error_rate"),
        ({"p99": 1}, "abort_if['p99']: no such rule; there are: error_rate, error_"),
        ({"error_rate": 0}, "abort_if['error_rate']=0: must be a number above 0 and"),
        ({"error_rate": True}, "abort_if['error_rate']=True"),
        ({"difference_rate": 1}, "abort_if['difference_rate']=1: must be a number from"),
        ({"p95_latency_ratio": 0.9}, "must be a number from 1 and below 100"),
    ],
    (TOKEN, "name"): [("a#b", "name='a#b'")],
    (TOKEN, "digest"): [("secret", "digest='secret'")],
    (TOKEN, "holder_role"): [("root", "holder_role='root'")],
    (TOKEN, "expires_at"): [(0.0, "expires_at=0.0")],
    (TRAFFIC, "weights"): [
        ({}, "weights={}: must name at least one backend and its weight"),
        (["v1"], "weights=['v1']: must be a valid dictionary"),
        ({"v1": 0.5}, "the weights sum to 0.5: must be 1 within 1e-06"),
        ({"v1": 0.5, "v2": 0.6}, "the weights sum to 1.1: must be 1 within 1e-06"),
        ({"v1": 0.0, "v2": 0.0}, "the weights sum to 0: must be 1 within 1e-06"),
        ({"v1": 1 - 2e-6}, "the weights sum to 0.999998: must be 1 within 1e-06"),
        ({"v1": 1.5, "v2": -0.5}, "weights.v1=1.5: must be less than or equal to 1; "),
        ({"v1": 1.5, "v2": -0.5}, "weights.v2=-0.5: must be greater than or equal to 0"),
        ({"v1": True}, "weights.v1=True: must be a valid number"),
        ({"v1": "1"}, "weights.v1='1': must be a valid number"),
        ({"v1": math.nan}, "weights.v1=nan: must be a finite number"),
        ({"v1": math.inf}, "weights.v1=inf: must be a finite number"),
    ],
    (SHADOW, "proportion"): [
        (bad, f"shadow traffic 'e': proportion={bad!r}: must be ")
        for bad in (-0.1, 1.1, True, None, "0.5", math.nan)
    ],
    (SERIES, "last"): [(0, "last=0: "), (361, "last=361: ")],
    (SERIES, "span"): [("day", "span='day'")],
    (TaskProcessorConfig, "max_running"): [(0, "max_running=0")],
    (TaskProcessorConfig, "queue_name"): [("a", "queue_name='a'")],
    (TaskProcessorConfig, "adapter_config"): [({}, "adapter_config={}")],
    (TaskProcessorConfig, "result_ttl_s"): [(0, "result_ttl_s=0")],
    (comparing, "compare"): [
        (3, "compare=3: must be 'status', 'json', a dict of settings or a function"),
        ("yaml", "how='yaml'"),
        ({"how": "json", "relative_tolerance": -1}, "relative_tolerance=-1"),
        ({"tolerance": 1}, "tolerance=1: no such setting; say relative_tolerance"),
        ({"ignore": ["id"]}, "'id' is no JSON pointer; for example '/items/*/id'"),
        ({"how": "function"}, "give the function itself"),
        ({"how": "json", "code": b"x"}, "give the function itself"),
    ],
}


@pytest.mark.parametrize(
    ("model", "field", "value", "message"),
    [(model, field, *row) for (model, field), rows in BAD.items() for row in rows],
)
def test_a_bad_value_is_refused_by_its_name(
    model: Any, field: str, value: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        model(**{field: value})
    assert field in str(caught.value)
    assert message in str(caught.value)


def test_what_a_device_is_assigned_by_is_not_set_otherwise() -> None:
    options = {"num_gpus": 1, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": "3"}}}
    message = r"runtime_env.env_vars.CUDA_VISIBLE_DEVICES: is set by num_gpus; drop one"
    with pytest.raises(InvalidRequestError, match=message):
        validated(ActorOptions, options)


def test_settings_of_a_class_of_the_users_are_checked_as_ours_are() -> None:
    class Fixed(AutoscalingConfig):
        def __init__(self, most: int, **more: Any) -> None:
            super().__init__(max_replicas=most, **more)

    assert Fixed(3, min_replicas=2).max_replicas == 3
    with pytest.raises(InvalidRequestError, match="invalid Fixed: max_replicas=0: must be greater"):
        Fixed(0)
