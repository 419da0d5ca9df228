import json
import time
from functools import partial

import pytest

from greenroom import serve
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.config import ActorOptions, BackendConfig
from greenroom.serve.exceptions import InvalidRequestError, NotRunningError, UnknownNameError


class Model:
    def __init__(self, *args):
        self.args = args


def hello():
    return "hello"


@pytest.fixture
def client(running):
    with serve.Client.connect() as connected:
        yield connected


def test_connecting_needs_a_system_that_runs(system):
    with pytest.raises(NotRunningError):
        serve.Client.connect()


def test_a_bad_address_is_refused(running):
    with pytest.raises(InvalidRequestError, match="address='a:1,b': 'b' is not HOST:PORT"):
        serve.Client.connect("a:1,b")


def test_an_address_of_another_host_needs_the_clusters_key(tmp_path, monkeypatch):
    monkeypatch.setenv("GREENROOM_STATE_DIR", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"10\.0\.0\.7:1900.*cluster file; name a copy with --key-file"
    ):
        serve.Client.connect("10.0.0.7:1900")


def test_an_address_is_used(running):
    with serve.Client.connect("127.0.0.1:1911"):
        assert running.settings.address == "127.0.0.1:1911"


def test_a_backend_is_created_with_its_config_and_code(client, controller):
    goal = client.create_backend(
        "m:v1", Model, 1, 2, config={"num_replicas": 2}, actor_options={"num_cpus": 1}, version="v1"
    )
    client.wait_for_goal(goal)
    client.wait_for_goal(None)
    (request,) = controller.of("CreateBackend")
    assert (request.config.num_replicas, request.config.http_call_methods) == (2, None)
    assert request.actor_options.num_cpus == 1
    assert (request.tag, request.version) == ("m:v1", "v1")
    assert len(controller.of("WaitForGoal")) == 1


def test_a_backend_may_be_made_of_a_class_a_function_and_settings(client, controller):
    client.create_backend("a", Model, config=BackendConfig(num_replicas=3))
    closed = BackendConfig(http_call_methods=())
    client.create_backend("b", hello, actor_options=ActorOptions(memory=1), config=closed)
    assert client.get_backend_config("a").num_replicas == 3
    assert client.get_backend_config("b").http_call_methods == ()
    assert set(client.list_backends()) == {"a", "b"}


def test_only_the_settings_given_are_changed(client, controller):
    client.create_backend("a", Model)
    client.wait_for_goal(client.update_backend_config("a", {"num_replicas": "2"}))
    assert len(controller.running("a")) == 2
    client.update_backend_config("a", BackendConfig(max_ongoing_requests=5))
    changes = [request.changes for request in controller.of("UpdateBackendConfig")]
    assert changes == [{"num_replicas": 2}, {"max_ongoing_requests": 5}]


def test_a_backend_is_deleted(client, controller):
    client.create_backend("a", Model)
    client.wait_for_goal(client.delete_backend("a", force=True))
    assert client.list_backends() == {}
    assert client.delete_backend("a") is None
    assert [request.force for request in controller.of("DeleteBackend")] == [True, False]


def test_an_endpoint_is_created_and_deleted(client):
    client.create_backend("a", hello)
    client.create_endpoint("e", backend="a", route="/e", methods=["get", "POST"])
    client.create_endpoint("headless", backend="a", retryable=True)
    endpoints = client.list_endpoints()
    assert endpoints["e"]["methods"] == ["GET", "POST"]
    assert "retryable" not in endpoints["e"]
    assert (endpoints["headless"]["route"], endpoints["headless"]["retryable"]) == (None, True)
    client.delete_endpoint("e")
    assert set(client.list_endpoints()) == {"headless"}


def test_traffic_is_set(client):
    for tag in "ab":
        client.create_backend(tag, hello)
    client.create_endpoint("e", backend="a")
    client.set_traffic("e", {"b": 1})
    assert client.list_endpoints()["e"]["traffic"] == {"b": 1.0}


def test_any_operation_can_be_asked_for_by_its_name(client, invoke):
    client.wait_for_goal(client.create_backend("a", hello))
    assert client.ask("list_backends") == client.list_backends()
    client.ask("create_endpoint", name="e", backend="a", methods=["get"])
    with pytest.raises(UnknownNameError, match=r"no operation is named 'evict'.*evict_host"):
        client.ask("evict", host="a")
    with pytest.raises(InvalidRequestError, match="host=5: must be a valid string"):
        client.ask("evict_host", host=5)
    assert json.loads(invoke("ask", "list_endpoints").stdout) == client.list_endpoints()
    shown = invoke("ask", "delete_endpoint", '{"name": "e"}').stdout
    assert (shown, client.list_endpoints()) == ("null\n", {})


def test_a_handle_of_an_endpoint_calls_it(client):
    client.create_backend("a", hello)
    client.create_endpoint("e", backend="a")
    assert client.get_handle("e").remote().result() == "hello"
    assert client.get_handle("later", missing_ok=True).endpoint == "later"
    with pytest.raises(UnknownNameError, match="no endpoint is named 'x'; there are: e"):
        client.get_handle("x")


def test_a_goal_that_was_reached_while_others_took_all_the_time_is_no_failure(client, running):
    goal, connection = client.create_backend("a", hello), running.open(None)
    wait = partial(wait_for_goal, connection, goal, 10.0, began_at=time.monotonic() - 60.0)
    wait(on_wait=lambda _reason: None)
    running.controller.failing["WaitForGoal"] = TimeoutError()
    with pytest.raises(
        TimeoutError, match=rf"goal {goal} \(create backend, backend a\) was not reached"
    ):
        wait(on_wait=lambda _reason: None)


def test_status_and_shutdown(client, running):
    assert client.status().applications == {}
    client.create_backend("a", hello)
    assert len(client.shutdown()) == 1
    assert running.calls == ["forget"]


@pytest.mark.parametrize("error", [TimeoutError, NotRunningError])
def test_a_controller_that_does_not_answer_does_not_hold_up_a_shutdown(client, running, error):
    running.controller.failing["DeleteEverything"] = error("no answer")
    assert client.shutdown() == []
    assert running.calls == ["forget"]


def test_a_system_elsewhere_is_shut_down_by_its_controller(running):
    serve.Client.connect("127.0.0.1:1911").shutdown()
    (request,) = running.controller.of("StopCluster")
    assert request.forget
    assert running.calls == []


def test_unknown_names_are_key_errors_that_say_what_there_is(client):
    client.create_backend("a:v1", hello)
    with pytest.raises(KeyError, match="no backend is named 'nobody'; there are: a:v1"):
        client.get_backend_config("nobody")
    with pytest.raises(KeyError, match="nobody"):
        client.wait_for_goal("nobody")
    client.create_endpoint("e", backend="a:v1")
    with pytest.raises(ValueError, match="nobody"):
        client.set_traffic("e", {"nobody": 1})
    client.delete_endpoint("nobody")
    assert client.delete_backend("nobody") is None


def test_a_deployment_can_be_looked_up_and_changed(client):
    config = {"num_replicas": 2, "max_ongoing_requests": 3}
    client.wait_for_goal(client.deploy("d", hello, version="7", config=config))
    info = client.list_deployments()["d"]
    assert (info["version"], info["route_prefix"]) == ("7", "/d")
    assert info["config"]["num_replicas"] == 2
    assert [replica["version"] for replica in info["replicas"]] == ["7", "7"]
    goal = client.deploy("d", hello, version="8", config={"num_replicas": 1})
    client.wait_for_goal(goal)
    info = client.get_deployment_info("d")
    assert (info["version"], info["config"]["max_ongoing_requests"]) == ("8", 100)
    undone = client.undo()
    client.wait_for_goal(undone["goal"])
    assert undone["id"] == client.history()[-2]["id"]
    assert client.get_deployment_info("d")["version"] == "7"
    client.wait_for_goal(client.delete_deployment("d"))
    assert client.delete_deployment("d") is None
    with pytest.raises(KeyError, match="no deployment is named 'd'; there are"):
        client.get_deployment_info("d")


def test_the_command_line_begins_shows_and_ends_a_rollout(client, invoke):
    for tag in ("old", "new"):
        client.wait_for_goal(client.create_backend(tag, hello))
    client.create_endpoint("e", backend="old", route="/e")
    invoke("rollout", "e", "--to", "new", "--steps", "0.5,1", "--hold-s", "1000")
    shown = invoke("status", code=1).stdout
    assert "rollout of e to new: step 1 of 2, 50 %" in shown
    assert "of 100 needed to go back" in shown
    found = client.list_rollouts()["e"]
    assert found["rules"].keys() == {"error_rate_increase", "p95_latency_ratio"}
    invoke("rollout", "e", "--abort")
    assert client.list_endpoints()["e"]["traffic"] == {"old": 1.0}
    assert "no rollout of endpoint" in invoke("rollout", "e", "--promote", code=1).stderr
    for bad in (
        ["--to", "new", "--abort"],
        [],
        ["--to", "new", "--steps", "x"],
        ["--to", "new", "--abort-if", "p9=1"],
    ):
        invoke("rollout", "e", *bad, code=2)


def test_a_function_has_no_constructor_to_give_arguments_to(client):
    for call in (
        partial(client.create_backend, "a", hello, 1),
        partial(client.deploy, "a", hello, init_args=[1]),
        partial(client.deploy, "a", hello, init_kwargs={"x": 1}),
    ):
        with pytest.raises(InvalidRequestError, match="'a' is a function, which is constructed wi"):
            call()
    assert client.list_backends() == {}
