import pickle
import types

import pytest

from greenroom import serve
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.serve import config, exceptions, handle
from greenroom.serve.deployments import GivenOptions
from greenroom.serve.exceptions import InvalidRequestError

NESTED: list = []  # deeper than Python recurses
for _ in range(100_000):
    NESTED = [NESTED]


class Plain:
    def __init__(self, value=1):
        self.value = value


def hello():
    return "hello"


def test_a_bare_decorator_names_the_deployment_after_what_it_decorates():
    made = serve.deployment(Plain)
    assert (made.name, made.num_replicas, made.func_or_class) == ("Plain", 1, Plain)
    assert made.config.max_ongoing_requests == 100
    assert serve.deployment(hello).name == "hello"


def test_a_decorator_with_options_sets_them():
    made = serve.deployment(
        name="m", version="v1", num_replicas=3, user_config={"a": 1}, max_queued_requests=5
    )(Plain)
    assert (made.name, made.version, made.num_replicas) == ("m", "v1", 3)
    assert made.user_config == {"a": 1}
    assert made.config.max_queued_requests == 5


@pytest.mark.parametrize("name", ["actor_options", "ray_actor_options"])
def test_actor_options_have_two_names(name):
    made = serve.deployment(**{name: {"num_cpus": 2}})(Plain)
    assert made.actor_options == ActorOptions(num_cpus=2)


def test_actor_options_may_be_none_or_made():
    assert serve.deployment(actor_options=None)(Plain).actor_options == ActorOptions()
    made = serve.deployment(actor_options=ActorOptions(memory=5))(Plain)
    assert made.actor_options.memory == 5


def test_options_returns_a_changed_copy_and_keeps_the_rest():
    first = serve.deployment(num_replicas=2, version="v1")(Plain)
    second = first.options(name="other", max_ongoing_requests=7)
    assert (second.name, second.version, second.num_replicas) == ("other", "v1", 2)
    assert (first.name, first.config.max_ongoing_requests) == ("Plain", 100)


class Needs:
    def __init__(self, path, *, size=3):
        self.path, self.size = path, size


def test_arguments_that_a_constructor_does_not_take_are_refused_at_bind():
    made = serve.deployment(Needs)
    assert made.bind("p", size=1).args == ("p",)
    for args, kwargs, problem in [
        ((), {}, "missing a required argument: 'path'"),
        ((1, 2), {}, "too many positional arguments"),
        (("p",), {"sise": 1}, "got an unexpected keyword argument 'sise'"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            made.bind(*args, **kwargs)
        assert f"deployment 'Needs': {problem}" in str(caught.value)
        assert "Needs(path, *, size=3)" in str(caught.value)
    assert serve.deployment(dict).bind(a=1).kwargs == {"a": 1}, "which has no signature"


def test_num_replicas_none_means_one():
    assert serve.deployment(num_replicas=3)(Plain).options(num_replicas=None).num_replicas == 1


def test_type_checkers_know_all_options_and_no_others():
    known = {*BackendConfig.model_fields, "name", "version", "actor_options", "ray_actor_options"}
    assert set(GivenOptions.__annotations__) == known | set(BackendConfig.aliases)


@pytest.mark.parametrize("name", ["runtime_config", "config", "max_concurrency"])
def test_only_an_option_that_is_close_is_suggested_for_an_unknown_one(name):
    with pytest.raises(InvalidRequestError) as caught:
        serve.deployment(**{name: 1})(Plain)
    assert f"{name}=1: no such setting; there are: num_replicas, " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas=0: must be at least 1"),
        ({"num_replicas": "all"}, "num_replicas='all': "),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas=2: cannot be given with"),
        ({"autoscaling_config": 3}, "autoscaling_config=3: "),
        ({"name": "a#b"}, "name='a#b': expected a name without '#'"),
        ({"name": ""}, "name='': expected a name without '#'"),
        ({"name": "a\n"}, "expected printable characters"),
        ({"name": "a" * 76}, "expected at most 75 bytes in UTF-8; it has 76"),
        ({"version": 3}, "version=3: must be a valid string"),
        ({"num_replica": 2}, "num_replica=2: no such setting; did you mean num_replicas?"),
        ({"max_concurrent_queries": 0}, "max_concurrent_queries=0: must be greater than or equal"),
        ({"max_replicas_per_node": 3, "max_replicas_per_host": 3}, "two names for one thing"),
        ({"user_config": {"a": float("nan")}}, "must be JSON-able"),
        ({"user_config": NESTED}, "must be JSON-able"),
        ({"actor_options": {"resources": {"disk": -1}}}, "actor_options.resources.disk=-1"),
        ({"actor_options": {"resources": {"num_cpus": 1}}}, "are options beside resources"),
        ({"actor_options": {"resources": {"": 1}}}, "expected names of your own"),
        (
            {"ray_actor_options": {"num_cpu": 1}},
            "actor_options.num_cpu=1: no such setting; did you mean num_cpus?",
        ),
        ({"actor_options": 3}, "actor_options=3: must be a valid dict"),
        ({"num_cpus": 1}, "num_cpus=1: no such setting; it is one of ray_actor_options"),
        ({"actor_options": {}, "ray_actor_options": {}}, "two names for one thing"),
    ],
)
def test_a_bad_option_is_refused_by_name_and_value(options, message):
    with pytest.raises(InvalidRequestError) as caught:
        serve.deployment(**options)(Plain)
    assert message in str(caught.value)
    with pytest.raises(InvalidRequestError):
        serve.deployment(Plain).options(**options)


def test_all_bad_options_are_named_in_one_error():
    with pytest.raises(InvalidRequestError) as caught:
        serve.deployment(num_replicas=0, nam="x", max_ongoing_requests=0, version=1)(Plain)
    for name in ("num_replicas=0", "nam='x'", "max_ongoing_requests=0", "version=1"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda of: of(), RuntimeError, "'Plain' cannot be called directly.*func_or_class"),
        (lambda of: types.new_class("Child", (of,)), TypeError, "inherit from Plain.func_or_class"),
        (serve.deployment, TypeError, "is a deployment already"),
        (lambda _: serve.deployment(hello).bind(1), InvalidRequestError, "'hello' is a function"),
        (lambda _: serve.deployment(3), TypeError, "for functions and classes"),
        (lambda _: serve.deployment(Plain()), TypeError, "for functions and classes"),
    ],
)
def test_misuse_is_reported_with_what_to_do_instead(misuse, error, message):
    with pytest.raises(error, match=message):
        misuse(serve.deployment(Plain))


def test_deployments_can_be_pickled_because_classes_may_refer_to_them():
    made = pickle.loads(pickle.dumps(serve.deployment(hello).options(num_replicas=2)))
    assert made.num_replicas == 2


def test_the_package_offers_its_names_and_no_others():
    assert set(serve.__all__) <= set(dir(serve))
    for name in serve.__all__:
        assert getattr(serve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = serve.nothing


def test_no_module_hides_a_function_that_users_call():
    assert callable(serve.deployment)
    assert callable(serve.run)
    assert exceptions.RayServeException is exceptions.GreenroomError
    assert config.HTTPOptions().port == 8000
    assert handle.DeploymentResponse
