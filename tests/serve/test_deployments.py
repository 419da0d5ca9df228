import pickle

import pytest

from greenroom import serve
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.serve import config, exceptions, handle
from greenroom.serve.deployments import GivenOptions
from greenroom.serve.exceptions import InvalidRequestError


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


def test_options_are_set_and_a_changed_copy_keeps_the_rest():
    first = serve.deployment(name="m", version="v1", num_replicas=3, user_config={"a": 1})(Plain)
    second = first.options(name="other", max_ongoing_requests=7)
    assert (second.name, second.version, second.num_replicas) == ("other", "v1", 3)
    assert (second.user_config, second.max_ongoing_requests) == ({"a": 1}, 7)
    assert (first.name, first.config.max_ongoing_requests) == ("m", 100)
    assert first.options(num_replicas=None).num_replicas == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"actor_options": {"num_cpus": 2}}, ActorOptions(num_cpus=2)),
        ({"ray_actor_options": {"num_cpus": 2}}, ActorOptions(num_cpus=2)),
        ({"actor_options": None}, ActorOptions()),
        ({"actor_options": ActorOptions(memory=5)}, ActorOptions(memory=5)),
    ],
)
def test_actor_options_have_two_names_and_several_forms(options, wanted):
    made = serve.deployment(**options)(Plain)
    assert made.actor_options == made.ray_actor_options == wanted


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


def test_type_checkers_know_all_options_and_no_others():
    known = {*BackendConfig.model_fields, "name", "version", "actor_options", "ray_actor_options"}
    assert set(GivenOptions.__annotations__) == known | set(BackendConfig.aliases)


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
