import os
import threading

import pytest

from greenroom import serve
from greenroom.core.errors import UnauthorizedError
from greenroom.serve.admin import session
from greenroom.serve.config import HTTPOptions, gRPCOptions
from greenroom.serve.exceptions import (
    DeployFailedError,
    InvalidRequestError,
    NotRunningError,
    RayServeException,
    StartError,
    UnknownNameError,
)
from greenroom.serve.schema import ApplicationStatus, DeploymentStatus


@serve.deployment
class Adder:
    def __init__(self, amount=1):
        self.amount = amount

    def __call__(self, x):
        return x + self.amount


@serve.deployment
class Sum:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self): ...


@serve.deployment
class Broken:
    def __init__(self):
        raise LookupError("no weights")

    def __call__(self): ...


def test_run_starts_a_system_deploys_and_returns_the_ingress(system):
    handle = serve.run(Adder.bind(5), name="a", route_prefix="/add")
    assert system.calls == ["start"]
    assert handle.remote(1).result() == 6
    (request,) = system.controller.of("DeployApplications")[0].applications
    assert (request.name, request.ingress, request.route_prefix) == ("a", "Adder", "/add")


def test_the_same_run_again_changes_nothing_and_changed_code_is_deployed(controller):
    serve.run(Adder.bind(1))
    serve.run(Adder.bind(1))
    assert len(controller.of("WaitForGoal")) == 1
    assert serve.run(Adder.bind(2)).remote(1).result() == 3
    assert len(controller.of("WaitForGoal")) == 2


def test_a_failing_constructors_exception_is_raised_with_its_traceback(running):
    with pytest.raises(LookupError, match="no weights") as caught:
        serve.run(Broken.bind())
    assert 'raise LookupError("no weights")' in caught.value.__notes__[0]
    application = serve.status().applications["default"]
    assert application.status == "DEPLOY_FAILED"
    assert "LookupError: no weights" in application.message
    assert "no weights" in application.deployments["Broken"].message


def test_a_failed_deployment_without_an_exception_is_an_error_of_ours(controller):
    controller.failing["WaitForGoal"] = DeployFailedError("it died")
    with pytest.raises(RayServeException, match="it died"):
        serve.run(Adder.bind())


@pytest.mark.parametrize("prefix", ["add", "/add/", "//", "/{x}", "", 3])
def test_a_bad_route_prefix_is_refused_before_anything_starts(system, prefix):
    with pytest.raises(InvalidRequestError, match="route_prefix="):
        serve.run(Adder.bind(), route_prefix=prefix)
    assert system.calls == []


def test_an_application_without_a_route_can_be_run(controller):
    serve.run(Adder.bind(), route_prefix=None)
    assert controller.of("DeployApplications")[0].applications[0].route_prefix is None


def test_all_that_is_wrong_with_a_run_is_reported_at_once(system):
    with pytest.raises(InvalidRequestError, match=r"name='a#b'.*route_prefix='x'"):
        serve.run(Adder.bind(), name="a#b", route_prefix="x")
    with pytest.raises(InvalidRequestError, match=r"forget \.bind\(\)"):
        serve.run(Adder)
    with pytest.raises(InvalidRequestError, match="argument 1 is <unlocked"):
        serve.run(Adder.bind(threading.Lock()))
    assert system.calls == []


def test_a_system_that_does_not_start_is_an_error(system):
    system.start_error = StartError("port 8000 is taken")
    with pytest.raises(StartError, match="8000"):
        serve.run(Adder.bind())


def test_a_system_at_an_address_is_never_started(system, monkeypatch):
    monkeypatch.setenv("GREENROOM_ADDRESS", "127.0.0.1:1911")
    with pytest.raises(NotRunningError):
        serve.run(Adder.bind())
    assert system.calls == []


def test_a_script_undoes_what_it_started(system):
    serve.run(Adder.bind(), name="a")
    session.current().undo()
    session.current().undo()
    assert system.controller.applications["a"]["status"] == "DELETING", "as it stopped"
    assert system.calls == ["start", "stop"]


def test_a_script_leaves_a_system_that_ran_before_alone(running):
    serve.run(Adder.bind(), name="a")
    session.current().undo()
    assert running.calls == []
    assert "a" in running.controller.applications


def test_undoing_stops_the_system_even_when_the_controller_is_gone(system):
    serve.run(Adder.bind())
    system.controller.failing["DeleteApplication"] = TimeoutError()
    session.current().undo()
    assert system.calls == ["start", "stop"]
    system.calls.clear()
    serve.start()
    session.current().disconnect()
    session.current().undo()
    assert system.calls == ["start", "stop"]


def test_a_system_that_was_stopped_is_started_again(system):
    serve.run(Adder.bind())
    system.running = False
    serve.run(Adder.bind(2))
    assert system.calls == ["start", "start"]


def test_a_forked_child_has_a_session_of_its_own(system, monkeypatch):
    serve.start()
    parents = session.current()
    monkeypatch.setattr(parents, "_pid", -1)
    assert session.current() is not parents
    parents.undo()
    assert system.running


def test_blocking_ends_with_ctrl_c_and_deletes_the_application(controller, monkeypatch):
    def interrupted(_event, _timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(SystemExit) as caught:
        serve.run(Adder.bind(), blocking=True)
    assert caught.value.code == 0
    assert controller.applications == {}


def test_blocking_ends_with_ctrl_c_though_the_system_has_ended_before(controller, monkeypatch):
    def interrupted(_event, _timeout=None):
        controller.failing["DeleteApplication"] = NotRunningError("nothing answers")
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(SystemExit) as caught:
        serve.run(Adder.bind(), blocking=True)
    assert caught.value.code == 0


@pytest.mark.parametrize("error", [UnauthorizedError("no such token"), TimeoutError("no answer")])
def test_an_application_that_cannot_be_deleted_at_ctrl_c_is_named_and_the_others_go(
    controller, monkeypatch, caplog, error
):
    answer = controller.answer

    def interrupted(_event, _timeout=None):
        raise KeyboardInterrupt

    def failing(operation):
        if getattr(operation, "application", None) == "a":
            raise error
        return answer(operation)

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    monkeypatch.setattr(controller, "answer", failing)
    targets = [serve.RunTarget(Adder.bind(), name=name, route_prefix=None) for name in "ab"]
    with pytest.raises(SystemExit) as caught:
        serve.run_many(targets, blocking=True)
    assert caught.value.code == 1
    assert set(controller.applications) == {"a"}
    assert f"'a' could not be deleted: {type(error).__name__}: {error}" in caplog.text


def test_start_takes_http_options(system):
    serve.start(http_options={"port": 9000})
    assert system.settings.http.port == 9000
    serve.shutdown()
    serve.start(http_options=HTTPOptions(port=9001))
    assert system.settings.http.port == 9001


def test_a_system_that_runs_keeps_its_http_options_and_what_is_dropped_is_named(system):
    serve.start(http_options={"port": 9000})
    serve.run(Adder.bind(), name="a")
    serve.start(http_options={"port": 9000})
    serve.start()
    with pytest.warns(UserWarning, match=r"workers is 1, not 2\. To change any, stop it") as caught:
        serve.start(http_options={"port": 9000, "workers": 2})
    assert caught[0].filename == __file__
    assert system.calls == ["start"]
    assert "a" in system.controller.applications


GRPC = {"port": 9001, "grpc_servicer_functions": ["shop_pb2_grpc.add_shop"]}
NO_GRPC = r"not taken: grpc_port=9001; grpc_servicer_functions=.*shop_pb2_grpc.add_shop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"http_options": {"port": 9000}}, r"not taken: port=9000\."),
        ({"http_options": HTTPOptions(port=9000)}, r"not taken: port=9000\."),
        ({"grpc_options": GRPC}, NO_GRPC),
        ({"grpc_options": gRPCOptions(**GRPC)}, NO_GRPC),
    ],
)
def test_options_for_a_system_that_somebody_else_started_are_named(running, options, message):
    with pytest.warns(UserWarning, match=message):
        serve.start(**options)
    assert running.calls == []


def test_grpc_options_are_those_of_the_system_that_is_started(system):
    serve.start(grpc_options=GRPC)
    settings = session.current().settings
    assert (settings.grpc_port, settings.grpc_dir) == (9001, os.getcwd())
    assert settings.grpc_servicer_functions == ("shop_pb2_grpc.add_shop",)
    assert settings.with_options(grpc=gRPCOptions())[0].grpc_port is None, "without a servicer"


@pytest.mark.parametrize(
    "options",
    [
        *({"http_options": each} for each in ({"prt": 1}, {"port": -1}, 8000)),
        *({"grpc_options": each} for each in ({"prt": 1}, {"port": 0}, 9000)),
        {"grpc_options": {"request_timeout_s": 0}},
    ],
)
def test_start_refuses_bad_options(system, options):
    with pytest.raises(InvalidRequestError):
        serve.start(**options)
    assert system.calls == []


def test_shutdown_forgets_everything(system):
    serve.run(Adder.bind())
    assert len(serve.shutdown()) == 1
    serve.shutdown()
    session.current().undo()
    assert system.calls == ["start", "forget", "forget"]


def test_delete_waits_until_the_application_is_gone(controller):
    serve.run(Adder.bind(), name="a")
    serve.delete("a")
    serve.delete("a")
    assert controller.applications == {}
    assert len(controller.of("WaitForGoal")) == 2, "of the deployment, and of the first delete"


def test_status_has_typed_applications_and_deployments(running):
    serve.run(Adder.bind())
    application = serve.status().applications["default"]
    assert application.status == ApplicationStatus.RUNNING == "RUNNING"
    deployment = application.deployments["Adder"]
    assert deployment.status == DeploymentStatus.HEALTHY
    assert deployment.replica_states == {"RUNNING": 1}
    (process,) = running.controller.processes.values()
    assert deployment.replicas[0].pid == process.pid
    newer = running.controller.shown["applications"] = running.controller.applications
    newer["default"]["deployments"]["Adder"]["status"] = "LATER"
    assert serve.status().applications["default"].deployments["Adder"].status == "LATER"


def test_status_is_empty_when_nothing_runs(system):
    assert serve.status().applications == {}
    serve.run(Adder.bind())
    system.running = False
    assert serve.status().applications == {}


def test_handles_are_found_by_name(running):
    serve.run(Sum.bind(Adder.bind(3), Adder.bind(4)), name="a")
    assert serve.get_app_handle("a").deployment_name == "Sum"
    assert serve.get_deployment_handle("Adder_1", "a").remote(1).result() == 5
    serve.run(Adder.bind(), route_prefix="/add")
    assert serve.get_deployment_handle("Adder").remote(1).result() == 2


def test_handles_of_unknown_names_are_refused_naming_the_known(running):
    serve.run(Adder.bind(), name="a")
    with pytest.raises(UnknownNameError, match="no application is named 'b'; there are: a"):
        serve.get_app_handle("b")
    with pytest.raises(KeyError, match=r"no deployment of application 'a' is named 'X'.*: Adder"):
        serve.get_deployment_handle("X", "a")
