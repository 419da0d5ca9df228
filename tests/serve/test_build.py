import logging
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import pytest

from greenroom import serve
from greenroom.serve.build import Built, build
from greenroom.serve.exceptions import InvalidRequestError
from greenroom.serve.handle import DeploymentHandle


class Pair(NamedTuple):
    left: Any
    right: Any


@serve.deployment
class Leaf:
    pass


@serve.deployment
class Node:
    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs


def arguments(spec):
    _, args, kwargs = cloudpickle.loads(spec.code)
    return args, kwargs


def names(built):
    return [spec.name for spec in built.deployments]


def test_one_deployment_is_its_own_ingress():
    built = build(Leaf.options(version="v1", num_replicas=2).bind(), "a")
    (application,), (spec,) = built.applications, built.deployments
    assert (application.name, application.ingress) == ("a", "Leaf")
    assert (spec.name, spec.version) == ("Leaf", "v1")
    assert spec.config.num_replicas == 2
    assert spec.actor_options.num_cpus == 0
    assert len(spec.code_hash) == 64


def test_a_bound_argument_becomes_a_handle_and_comes_first():
    built = build(Node.bind(Leaf.bind(), key=Leaf.options(name="other").bind()), "a")
    assert names(built) == ["Leaf", "other", "Node"]
    args, kwargs = arguments(built.deployments[-1])
    assert args == (DeploymentHandle("Leaf", "a"),)
    assert kwargs == {"key": DeploymentHandle("other", "a")}


def test_bound_arguments_are_found_in_nested_lists_tuples_and_dicts():
    leaf = Leaf.bind()
    built = build(Node.bind([{"x": (leaf, 1)}], Pair(leaf, 2), other=[3]), "a")
    handle = DeploymentHandle("Leaf", "a")
    args, kwargs = arguments(built.deployments[-1])
    assert args == ([{"x": (handle, 1)}], Pair(handle, 2))
    assert type(args[1]).__name__ == "Pair"
    assert kwargs == {"other": [3]}


@dataclass(frozen=True)
class Config:
    model: Any
    size: int = 1


class Slotted:
    __slots__ = ("model", "unset")


def test_bound_arguments_are_found_in_objects_sets_and_dataclasses():
    leaf = Leaf.bind()
    slotted = Slotted()
    slotted.model = [leaf]
    config = Config(SimpleNamespace(inner={leaf}), 2)
    built = build(Node.bind(config, slotted), "a")
    handle = DeploymentHandle("Leaf", "a")
    assert names(built) == ["Leaf", "Node"]
    (made, copied), _ = arguments(built.deployments[-1])
    assert (made.model.inner, made.size, copied.model) == ({handle}, 2, [handle])
    assert config.model.inner == {leaf}, "what was bound is as it was"


def test_bound_arguments_are_found_wherever_pickle_goes():
    leaf, itself = Leaf.bind(), []
    itself += [leaf, itself]
    hidden = [{leaf: 1}, partial(print, end=leaf), itself, SimpleNamespace(model=leaf)]
    ((key, call, again, copied),), _ = arguments(build(Node.bind(hidden), "a").deployments[-1])
    handle = DeploymentHandle("Leaf", "a")
    assert (key, call.keywords, again[0], copied.model) == (
        {handle: 1},
        {"end": handle},
        handle,
        handle,
    )
    assert again[1] is again


def _hidden_in_a_closure(leaf):
    return lambda: leaf


@pytest.mark.parametrize(
    ("hide", "place"),
    [
        (_hidden_in_a_closure, "argument 1, which uses leaf, is Application("),
        (
            lambda leaf: SimpleNamespace(make=_hidden_in_a_closure(leaf)),
            "argument 1.make, which uses leaf, is Application(",
        ),
    ],
)
def test_an_application_where_no_handle_can_replace_it_is_refused_with_its_place(hide, place):
    with pytest.raises(InvalidRequestError) as caught:
        build(Node.bind(hide(Leaf.bind())), "a")
    assert f"deployment 'Node' cannot be pickled: {place}" in str(caught.value)
    assert "no handle can replace an application there; give it as an argu" in str(caught.value)


def test_an_application_in_the_closure_of_what_is_deployed_is_refused():
    leaf = Leaf.bind()

    @serve.deployment
    class Caller:
        def __call__(self):
            return leaf

    with pytest.raises(InvalidRequestError, match=r"Caller.__call__, which uses leaf, is Appl"):
        build(Caller.bind(), "a")


def test_objects_without_applications_are_passed_on_as_they_are():
    chain = None
    for _ in range(50_000):
        chain = SimpleNamespace(next=chain)
    resolved = build(Node.bind(SimpleNamespace(lock=None), [Config]), "a").deployments[-1]
    assert arguments(resolved)[0][0] == SimpleNamespace(lock=None)
    with pytest.raises(InvalidRequestError, match="cannot be pickled"):
        build(Node.bind(chain), "a")  # too deep for pickle, not for us


def test_a_shared_application_is_deployed_once():
    leaf = Leaf.bind()
    built = build(Node.bind(Node.options(name="inner").bind(leaf), leaf), "a")
    assert names(built) == ["Leaf", "inner", "Node"]


def test_two_deployments_of_one_name_get_suffixes_as_in_ray_serve(caplog):
    with caplog.at_level(logging.WARNING):
        built = build(Node.bind(Leaf.bind(), Leaf.bind()), "a")
    assert names(built) == ["Leaf", "Leaf_1", "Node"]
    assert "renamed 'Leaf_1'" in caplog.text
    built = build(Node.bind(Node.bind(Node.bind())), "a")
    assert names(built) == ["Node", "Node_1", "Node_2"]
    assert built.applications[0].ingress == "Node_2"
    long = Leaf.options(name="n" * 75)
    with pytest.raises(InvalidRequestError, match=r"name='n+_1': expected at most 75 bytes"):
        build(Node.bind(long.bind(), long.bind()), "a")


@pytest.mark.parametrize(
    ("app", "name", "message"),
    [
        (Leaf, "a", r"forget \.bind\(\)"),
        (Node.bind([Leaf]), "a", r"bad argument of deployment 'Node'.*\.bind\(\)"),
        *((value, "a", "expected an Application") for value in (3, None, "app")),
        (Leaf.bind(), "a#b", "name='a#b': expected a name without '#'"),
    ],
)
def test_what_is_no_application_is_refused_with_what_to_do(app, name, message):
    with pytest.raises(InvalidRequestError, match=message):
        build(app, name)


def test_a_circle_of_deployments_is_refused_naming_its_way():
    others = []
    first = Node.options(name="first").bind(others)
    second = Node.options(name="second").bind(key={"of": first})
    others.append(second)
    with pytest.raises(InvalidRequestError, match="in a circle: first -> second -> first; have"):
        build(Node.bind(first), "a")
    itself = []
    others = Node.bind(itself)
    itself.append(others)
    with pytest.raises(InvalidRequestError, match="in a circle: Node -> Node"):
        build(others, "a")


def test_a_handle_of_a_deployment_that_the_application_lacks_is_refused():
    with pytest.raises(InvalidRequestError, match=r"'Node'.*no deployment is named 'Leef'"):
        build(Node.bind(Leaf.bind(), [DeploymentHandle("Leef", "a").double]), "a")
    assert build(Node.bind(Leaf.bind(), DeploymentHandle("Leaf", "a")), "a").needs == ()


def test_what_is_deployed_together_need_not_be_there_for_one_another():
    a = build(Node.bind([DeploymentHandle("Leaf", "b"), DeploymentHandle("Leaf", "c")]), "a")
    assert Built.of_all([a, build(Leaf.bind(), "b")]).needs == (("c", "Leaf"),)


def test_handles_of_other_applications_are_what_it_needs():
    given = (DeploymentHandle("Leaf", "b"), DeploymentHandle("plain", None))
    assert build(Node.bind(list(given)), "a").needs == (("b", "Leaf"), (None, "plain"))
