"""Values of wrong types in calls of serve's functions: each refusal names parameter and value."""

import math
import re
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.admin.checks import check_path, check_timeout

TIMEOUT = "must be a number of seconds, 0 or more, or None for no limit"
NAME = "must be a non-empty string"
PATH = "must be a path, as str or pathlib.Path"


@serve.deployment
class Adder:
    def __call__(self, number: int) -> int:
        return number + 1


def refused(message, call, *args, **kwargs):
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}$"):
        call(*args, **kwargs)


@pytest.mark.parametrize("value", ["5", [], True, -1, -0.001, math.nan, math.inf, 1e300])
def test_a_timeout_that_is_none_is_refused_wherever_one_waits(running, value):
    response = serve.run(Adder.bind()).remote(1)
    message = f"timeout_s={value!r}: {TIMEOUT}"
    refused(message, response.result, timeout_s=value)
    with serve.Client.connect() as client:
        refused(message, client.wait_for_goal, "goal", timeout_s=value)
    assert response.result(timeout_s=5) == 2


@pytest.mark.parametrize("value", [None, 0, 0.5, 10**9])
def test_a_timeout_is_a_number_or_none(value):
    check_timeout("timeout_s", value)


@pytest.mark.parametrize("name", [5, b"x", "", ["a"], {}, math.nan])
def test_a_name_that_is_none_is_refused_where_something_is_looked_up(running, name):
    refused(f"name={name!r}: {NAME}", serve.get_app_handle, name)
    refused(f"name={name!r}: {NAME}", serve.delete, name)
    refused(f"deployment_name={name!r}: {NAME}", serve.get_deployment_handle, name)
    refused(f"app_name={name!r}: {NAME}", serve.get_deployment_handle, "Adder", name)
    with serve.Client.connect() as client:
        for missing_ok in (False, True):
            refused(f"endpoint={name!r}: {NAME}", client.get_handle, name, missing_ok)


@pytest.mark.parametrize("path", [5, b"x", "", ["a"], math.nan])
def test_a_path_that_is_none_is_refused(running, path):
    refused(f"key_file={path!r}: {PATH}", serve.Client.connect, key_file=path)
    assert running.controller.requests == []


@pytest.mark.parametrize("name", ["x" * 500, "nul\0"])
def test_a_folder_that_cannot_be_there_is_refused_like_one_that_is_not(running, name):
    env = {"working_dir": name}
    refused(f"working_dir={name!r}: no such folder", serve.run, Adder.bind(), runtime_env=env)


def test_a_path_is_a_string_or_a_path():
    assert check_path("working_dir", "a/b") == check_path("working_dir", Path("a/b"))


class NoMethods:
    def __init__(self) -> None:
        self._secret = 1

    def _private(self) -> None: ...

    def reconfigure(self, _user_config: object) -> None: ...


class Named(NoMethods):
    def predict(self) -> int:
        return 1


class Anything(NoMethods):
    predict = print

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


@serve.ingress(lambda: None)
class Ingress: ...


@pytest.mark.parametrize("cls", [NoMethods, Anything])
def test_a_class_that_no_request_could_ever_call_is_not_given_a_route(running, cls):
    message = (
        f"deployment 'd': {cls!r} has no __call__ and no other method for HTTP "
        "requests, and would answer none; give it one, or None in place of the route"
    )
    app = serve.deployment(name="d")(cls).bind()
    refused(message, serve.run, app)
    with serve.Client.connect() as client:
        refused(message, client.deploy, "d", cls)
        assert running.controller.requests == []
        client.create_backend("b", cls)
    serve.run(app, route_prefix=None)


@pytest.mark.parametrize(
    ("cls", "can"), [(Named, "they can: predict"), (Ingress, "they can: none")]
)
def test_a_method_that_no_request_can_call_is_not_opened_to_requests(running, cls, can):
    opened = serve.deployment(name="d", http_call_methods=["predict", "predcit"])(cls)
    wrong = [name for name in ("predict", "predcit") if name not in can]
    message = (
        "deployment 'd': http_call_methods=['predict', 'predcit']: HTTP requests cannot call "
        f"{', '.join(wrong)} of {cls!r}; {can}"
    )
    refused(message, serve.run, opened.bind())
    with serve.Client.connect() as client:
        refused(
            message, client.deploy, "d", cls, config={"http_call_methods": ["predict", "predcit"]}
        )
        assert running.controller.requests == []


@pytest.mark.parametrize("cls", [Named, Ingress])
def test_a_class_that_requests_may_call_by_any_method_has_a_route(running, cls):
    serve.run(serve.deployment(name="d")(cls).bind())
    assert "d" in running.controller.applications["default"]["deployments"]
