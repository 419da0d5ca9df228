"""What decorators, options and calls refuse: the error names the value and what is right."""

from functools import partial

import pytest

from greenroom import serve
from greenroom.core.errors import InvalidRequestError
from greenroom.serve import metrics
from greenroom.serve.handle import DeploymentHandle

NESTED: list = []  # deeper than Python recurses
for _ in range(100_000):
    NESTED = [NESTED]
TENSOR = {"x": ("FP32", [1])}


class Plain:
    def __init__(self, value=1):
        self.value = value

    def method(self): ...


def function(items):
    return items


def yielding(items):
    yield items


async def nothing(): ...


async def only_self(self): ...


async def two(one, other): ...


async def any_number(*items): ...


async def any_names(items, **names): ...


class Sync:
    def chat(self, request): ...


class Twice:
    @serve.task_handler
    def same(self): ...

    @serve.task_handler(name="same")
    def other(self): ...


@serve.batch
async def batched(items): ...


deployed = serve.deployment(Plain)

# --- Decorators -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("take", "name", "value", "kind"),
    [
        *((serve.batch, "max_batch_size", value, ValueError) for value in (0, -1)),
        *((serve.batch, "max_batch_size", value, TypeError) for value in (2.5, True)),
        (serve.batch, "batch_wait_timeout_s", -0.1, ValueError),
        (serve.batch, "batch_wait_timeout_s", float("inf"), ValueError),
        (serve.batch, "batch_wait_timeout_s", float("nan"), ValueError),
        (serve.batch, "batch_wait_timeout_s", "1", TypeError),
        (serve.batch, "max_concurrent_batches", 0, ValueError),
        (serve.batch, "max_concurrent_batches", None, TypeError),
        (serve.batch, "batch_size_fn", 3, TypeError),
        *((batched.set_max_batch_size, "max_batch_size", value, ValueError) for value in (0, -1)),
        (batched.set_max_batch_size, "max_batch_size", 2.5, TypeError),
        (batched.set_batch_wait_timeout_s, "batch_wait_timeout_s", -0.1, ValueError),
        (batched.set_batch_wait_timeout_s, "batch_wait_timeout_s", "1", TypeError),
        (serve.continuous_batch, "max_size", 0, ValueError),
        (serve.continuous_batch, "max_waiting", -1, ValueError),
        (serve.continuous_batch, "max_waiting", True, TypeError),
        *((serve.multiplexed, "max_num_models_per_replica", n, ValueError) for n in (0, -2)),
        *((serve.multiplexed, "max_num_models_per_replica", n, TypeError) for n in (1.5, True)),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(take, name, value, kind):
    with pytest.raises(kind, match=f"{name}={value!r}: must be"):
        take(**{name: value})


@pytest.mark.parametrize(
    ("decorators", "given", "message"),
    [
        (decorators, given, message)
        for decorators, refused in {
            (serve.batch, serve.batch(max_batch_size=2)): [
                (function, "made by 'async def', not for <function"),
                (10, "made by 'async def', not for 10"),
                (Plain, "made by 'async def', not for <class"),
                (nothing, "nothing: a batch function needs a parameter for the list"),
                (only_self, "only_self: a batch function needs a parameter for the list"),
                (any_number, r"any_number: a batch function cannot take \*items"),
                (any_names, r"any_names: a batch function cannot take \*\*names"),
            ],
            (serve.multiplexed, serve.multiplexed(max_num_models_per_replica=1)): [
                (function, "made by 'async def', not <function"),
                (3, "made by 'async def', not 3"),
                (only_self, "only_self: a model loader takes one argument"),
                (two, "two: a model loader takes one argument"),
            ],
            (serve.continuous_batch, serve.continuous_batch(max_size=1)): [
                (two, "takes one argument, the streams"),
                (Plain, "functions and methods"),
                (yielding, "yields none"),
            ],
            (serve.inference(inputs=TENSOR, outputs=TENSOR),): [
                (Plain, "none of the methods infer"),
            ],
            (serve.openai, serve.openai(models=["m"])): [
                (Plain, "Plain has none of the methods chat, embeddings"),
                (Sync, "chat must be made by 'async def'"),
            ],
            (serve.ingress(lambda: None), serve.openai, serve.task_consumer): [
                (deployed, r"is for classes, below @serve\.deployment; not for Deployment"),
                (function, r"is for classes, below @serve\.deployment; not for <function"),
            ],
            (serve.task_consumer,): [(Plain, "Plain has no task")],
            (serve.task_handler,): [(Plain, "for methods")],
            (serve.deployment,): [
                (deployed, "'Plain' is a deployment already"),
                (3, "for functions and classes"),
                (Plain(), "for functions and classes"),
            ],
        }.items()
        for given, message in refused
    ],
)
def test_what_cannot_be_decorated_is_refused(decorators, given, message):
    for decorator in decorators:
        with pytest.raises(TypeError, match=message):
            decorator(given)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            partial(serve.inference, inputs={"x": ("FP8", [1])}, outputs=TENSOR),
            ValueError,
            "datatype='FP8': must be one of BOOL",
        ),
        (
            partial(serve.inference, inputs={"x": ("FP32", [-2])}, outputs=TENSOR),
            ValueError,
            r"shape=\[-2\]",
        ),
        (partial(serve.inference, inputs={}, outputs=TENSOR), ValueError, "at least one"),
        (partial(serve.openai, api_keys="sk-1"), TypeError, "lists of strings"),
        (partial(serve.openai, api_keys=[""]), ValueError, "empty"),
        (partial(serve.task_consumer, task_processor_config={}), TypeError, "TaskProcessorConfig"),
        (partial(serve.task_consumer, Twice), ValueError, "two task handlers named 'same'"),
        (partial(serve.task_handler(name="a b"), Plain.method), ValueError, "Python name"),
        (deployed, RuntimeError, "'Plain' cannot be called directly.*func_or_class"),
        (partial(serve.deployment(function).bind, 1), InvalidRequestError, "'function' is a func"),
        (partial(metrics.Counter, "a-b"), ValueError, "name='a-b': must be letters"),
        (partial(metrics.Counter, "greenroom_x"), ValueError, "'greenroom_x': must not begin"),
        (partial(metrics.Counter, 7), TypeError, "name=7: must be a string"),
        (partial(metrics.Gauge, "x", tag_keys="kind"), TypeError, "tag_keys='kind': must be a tu"),
        (partial(metrics.Gauge, "x", tag_keys=("a b",)), ValueError, "'a b' must be letters"),
        (partial(metrics.Gauge, "x", tag_keys=("replica",)), ValueError, "'replica' is reserved"),
        (partial(metrics.Histogram, "x", boundaries=[2, 1]), ValueError, r"s=\[2, 1\]: must"),
        (partial(metrics.Histogram, "x", boundaries="12"), TypeError, "boundaries='12': must be"),
    ],
)
def test_misuse_is_reported_with_what_to_do_instead(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        (deployed, "remote", r"Deployment has no 'remote'; serve.run\(.*\) returns a handle"),
        (deployed.bind(), "remote", "Application has no 'remote'; serve.run returns a handle"),
        (deployed.bind(), "options", "Application has no 'options'; give them before"),
        (deployed.bind(), "other", "Application has no 'other'$"),
    ],
)
def test_what_a_handle_has_is_not_asked_of_what_is_deployed(value, name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(value, name)


def test_a_class_cannot_inherit_from_a_deployment():
    with pytest.raises(TypeError, match=r"inherit from Plain.func_or_class"):

        class Child(deployed): ...


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas=0: must be at least 1"),
        ({"num_replicas": "all"}, "num_replicas='all': "),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas=2: cannot be given with"),
        ({"autoscaling_config": 3}, "autoscaling_config=3: "),
        ({"name": "a#b"}, "name='a#b': expected a name without '#'"),
        ({"name": ""}, "name='': expected a name of one character or more"),
        ({"name": "a\n"}, "expected printable characters"),
        ({"name": "a" * 76}, "expected at most 75 bytes in UTF-8; it has 76"),
        ({"version": 3}, "version=3: must be a valid string"),
        ({"route_prefix": "/x"}, "route_prefix='/x': no such setting; it is an application's"),
        ({"num_replica": 2}, "num_replica=2: no such setting; did you mean num_replicas?"),
        *(
            ({name: 1}, f"{name}=1: no such setting; there are: num_replicas, ")
            for name in ("runtime_config", "config", "max_concurrency")  # none of which is close
        ),
        ({"max_concurrent_queries": 0}, "max_concurrent_queries=0: must be greater than or equal"),
        ({"max_replicas_per_node": 3, "max_replicas_per_host": 3}, "two names for one thing"),
        ({"user_config": {"a": float("nan")}}, "must be JSON-able"),
        ({"user_config": NESTED}, "must be JSON-able"),
        ({"actor_options": {"resources": {"disk": -1}}}, "actor_options.resources.disk=-1"),
        ({"actor_options": {"resources": {"num_cpus": 1}}}, "are options beside resources"),
        ({"actor_options": {"resources": {"": 1}}}, "expected names of your own"),
        ({"ray_actor_options": {"num_cpu": 1}}, "ray_actor_options.num_cpu=1: no such setti"),
        ({"actor_options": 3}, "actor_options=3: must be a valid dict"),
        ({"num_cpus": 1}, "num_cpus=1: no such setting; it is one of ray_actor_options"),
        ({"actor_options": {}, "ray_actor_options": {}}, "two names for one thing"),
    ],
)
def test_a_bad_option_of_a_deployment_is_refused(options, message):
    for given in (serve.deployment, deployed.options):
        with pytest.raises(InvalidRequestError) as caught:
            given(**options)(Plain)
        assert message in str(caught.value)


def test_all_bad_options_are_named_in_one_error():
    with pytest.raises(InvalidRequestError) as caught:
        serve.deployment(num_replicas=0, nam="x", max_ongoing_requests=0, version=1)(Plain)
    for name in ("num_replicas=0", "nam='x'", "max_ongoing_requests=0", "version=1"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": None}, "stream=None: must be a valid boolean"),
        ({"stream": 1}, "stream=1: must be a valid boolean"),
        ({"multiplexed_model_id": None}, "multiplexed_model_id=None: must be a valid string"),
        ({"session_id": 3}, "session_id=3: must be a valid string"),
        ({"method": "m"}, "method='m': no such setting; there are: method_name, shard_key, retr"),
        ({"method_name": ""}, "must be the name of a public method"),
        ({"method_name": "_private"}, "_private': must be the name of a public"),
        ({"retryable": 1}, "retryable=1: must be a valid boolean"),
        ({"shard_key": 1}, "shard_key=1: must be a valid string"),
    ],
)
def test_a_bad_option_of_a_handle_is_refused(options, message):
    with pytest.raises(InvalidRequestError) as caught:
        DeploymentHandle("d").options(**options)
    assert message in str(caught.value)


# --- The admin client -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args", "options", "message"),
    [
        ("create_backend", ("", Plain), {}, "tag=''"),
        ("create_backend", ("a", 3), {}, "is no function or class"),
        ("create_backend", ("a", deployed), {}, "Deployment(name='Plain') is no function or class"),
        ("create_backend", ("a", Plain), {"config": {"num_replica": 1}}, "num_replica=1"),
        ("create_backend", ("a", Plain), {"config": 3}, "BackendConfig=3: must be BackendConfig"),
        ("create_backend", ("a", Plain), {"actor_options": {"num_cpus": -1}}, "num_cpus=-1"),
        *(
            ("deploy", ("d", dict), options, message)
            for options, message in [
                ({"init_args": "abc"}, "init_args='abc': must be a list"),
                ({"init_args": 5}, "init_args=5: must be a list"),
                ({"init_kwargs": [1]}, "init_kwargs=[1]: must be a dict"),
                ({"version": 1, "route_prefix": None}, "version=1: must be a valid string"),
                ({"prev_version": 2.0, "route_prefix": None}, "prev_version=2.0: must be a valid"),
                ({"config": {"num_replicas": 0}}, "num_replicas=0"),
            ]
        ),
        *(
            ("create_endpoint", ("e",), {"backend": "a", **options}, message)
            for options, message in [
                ({"route": "e"}, "route='e': must start with '/'"),
                ({"methods": None}, "methods=None: must be a list, such as ['GET']"),
                ({"retryable": "yes"}, "retryable='yes': must be a valid boolean"),
                ({"backend": None}, "backend=None: must be a valid string"),
            ]
        ),
        ("update_backend_config", ("a", {"num_replicas": 0}), {}, "num_replicas=0: must be at"),
        ("update_backend_config", ("a", {"x": 1}), {}, "x=1: no such setting"),
        ("update_backend_config", ("a", 3), {}, "config=3: must be a dict"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    controller, method, args, options, message
):
    with serve.Client.connect() as client:
        with pytest.raises(InvalidRequestError) as caught:
            getattr(client, method)(*args, **options)
        assert message in str(caught.value)
        assert controller.requests == []
