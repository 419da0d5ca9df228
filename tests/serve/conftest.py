"""A system in the test's own process: a controller that deploys by unpickling and calling."""

import importlib
import itertools
import pickle
import sys
import traceback
from functools import partial

import cloudpickle
import pytest

from greenroom.actors.caller import connection as connections
from greenroom.actors.caller.client import QueryClient
from greenroom.actors.host import launcher as systems
from greenroom.actors.messages.queries import FailedAnswer, ValueAnswer, arguments_of
from greenroom.core import errors
from greenroom.serve.admin import session


class FakeQueries(QueryClient):
    """Runs queries at once, or keeps them in ``held`` while ``hold`` is set."""

    def __init__(self, controller):
        super().__init__(itertools.count(1).__next__)
        self.controller = controller
        self.hold = False
        self.held = []
        self.submitted = []
        self.cancelled = []

    def send(self, query, pending):
        self.submitted.append(query)
        if self.hold:
            self.held.append((pending, query))
        else:
            self.answer(pending, query)

    def release(self):
        self.hold = False
        held, self.held = self.held, []
        for pending, query in held:
            self.answer(pending, query)

    def answer(self, pending, query):
        pending.answered(self._run(pending.id, query))

    def cancel(self, pending):
        self.cancelled.append(pending.id)

    def _run(self, query_id, query):
        call = pickle.loads(query.call)
        try:
            args, kwargs = arguments_of(call)
            method = getattr(self.controller.instances[query.endpoint], call.method)
            return ValueAnswer(query_id, cloudpickle.dumps(method(*args, **kwargs)))
        except Exception as error:
            return FailedAnswer(
                query_id,
                "UserCodeError",
                str(error),
                exception=_pickled(error),
                traceback=traceback.format_exc(),
            )


def _pickled(error):
    try:
        return cloudpickle.dumps(error)
    except Exception:
        return None


class FakeController:
    """Answers requests as the controller does, as far as clients can tell."""

    def __init__(self):
        self.requests = []
        self.instances = {}
        self.applications = {}
        self.filed = set()
        self.backends = {}
        self.endpoints = {}
        self.failures = {}
        self.tokens = {}
        self.version = 0
        self.hashes = {}
        self.report = {"controller": {"pid": 1, "host": "a"}, "hosts": [], "goals": []}
        self.queries = FakeQueries(self)

    def of(self, kind):
        return [request for request in self.requests if type(request).__name__ == kind]

    def answer(self, request):
        self.requests.append(request)
        return getattr(self, type(request).__name__)(request)

    def CreateToken(self, request):
        self.tokens[request.name] = {
            "name": request.name,
            "role": request.holder_role,
            "digest": request.digest,
            "created_at": 0.0,
            "expires_at": request.expires_at,
        }

    def ListTokens(self, _request):
        return list(self.tokens.values())

    def RevokeToken(self, request):
        if self.tokens.pop(request.name, None) is None:
            raise errors.UnknownNameError(f"no token is named {request.name!r}; there are: none")

    def DeployApplications(self, request):
        names = [spec.name for spec in request.applications]
        goals = {spec.name: self._deploy(spec) for spec in request.applications}
        self.filed = (self.filed - set(names)) | (set(names) if request.from_file else set())
        for name in list(self.applications) if not request.keep_others else ():
            if name not in names and (request.prune or name in self.filed):
                del self.applications[name], self.hashes[name]
                goals[name] = "goal-delete"
        goals = {name: goal for name, goal in goals.items() if goal is not None}
        self.version += bool(goals)
        return {"goals": goals, "version": self.version, "changed": list(goals)}

    def _deploy(self, request):
        hashes = {spec.name: spec.code_hash for spec in request.deployments}
        if self.hashes.get(request.name) == hashes:
            return None
        goal = f"goal-{len(self.requests)}-{request.name}"
        states = {}
        for spec in request.deployments:
            states[spec.name] = {"status": "HEALTHY", "message": "", "target_replicas": 1}
            states[spec.name]["replicas"] = [{"tag": "r", "pid": 7, "state": "RUNNING"}]
            try:
                target, args, kwargs = cloudpickle.loads(spec.code)
                made = target(*args, **kwargs) if isinstance(target, type) else target
            except Exception as error:
                text = traceback.format_exc()
                self.failures[goal] = (error, text)
                return goal
            self.instances[f"{request.name}#{spec.name}"] = made
        self.hashes[request.name] = hashes
        self.applications[request.name] = {
            "status": "RUNNING",
            "message": "",
            "route_prefix": request.route_prefix,
            "deployments": states,
        }
        return goal

    def PlanApplications(self, request):
        changed = [
            {"kind": "application", "name": spec.name, "change": "added", "fields": {}}
            for spec in request.applications
            if spec.name not in self.applications
        ]
        return {"version": self.version, "changes": changed}

    def ListMissing(self, request):
        return list(request.digests)

    def DeleteApplication(self, request):
        self.hashes.pop(request.application, None)
        found = self.applications.pop(request.application, None)
        return "goal-delete" if found else None

    def WaitForGoal(self, request):
        if request.goal_id in self.failures:
            error, text = self.failures[request.goal_id]
            raise errors.DeployFailedError(text) from error
        return True

    def GetStatus(self, _request):
        return {**self.report, "applications": self.applications, "endpoints": self.endpoints}

    def CreateBackend(self, request):
        self.backends[request.tag] = request.config.model_dump()
        return "goal-1"

    def UpdateBackendConfig(self, request):
        self.backends[request.tag] |= request.changes
        return "goal-2"

    def DeleteBackend(self, request):
        return "goal-3" if self.backends.pop(request.tag, None) else None

    def GetBackendConfig(self, request):
        return self.backends[request.tag]

    def ListBackends(self, _request):
        return self.backends

    def CreateEndpoint(self, request):
        self.endpoints[request.name] = {
            "route": request.route,
            "methods": list(request.methods),
            "traffic": {request.backend: 1.0},
            "shadows": {},
        }

    def DeleteEndpoint(self, request):
        self.endpoints.pop(request.name, None)

    def ListEndpoints(self, _request):
        return self.endpoints

    def SetTraffic(self, request):
        self.endpoints[request.endpoint]["traffic"] = request.weights

    def DeleteEverything(self, _request):
        return ["goal-delete"]

    def StopCluster(self, _request):
        return True


class FakeConnection:
    """A connection to a FakeController."""

    def __init__(self, system):
        self.system = system
        self.queries = system.controller.queries
        self.closed = False

    def request(self, request, *, timeout_s=None):
        assert not self.closed
        if not self.system.running:
            raise errors.NotRunningError("no system answers")
        return self.system.controller.answer(request)

    def wait_gone(self, timeout_s):
        return True

    def close(self):
        self.closed = True


class FakeSystem:
    """Stands in for the processes of a host."""

    def __init__(self):
        self.running = False
        self.controller = FakeController()
        self.calls = []
        self.start_error = None
        self.settings = None
        self.environ = None  # of its start, where that is known

    def start(self, settings, *, on_progress=lambda _: None, is_command=False):
        self.calls.append("start")
        self.settings = settings
        if self.start_error is not None:
            raise self.start_error
        on_progress("starting the controller")
        started, self.running = not self.running, True
        if started:
            self.environ = settings.to_environ()
        return started

    def begin(self, settings, **how):
        return partial(self.start, settings, **how)

    def stop(self, settings, *, forget=False):
        self.calls.append("forget" if forget else "stop")
        self.settings = settings
        stopped, self.running = self.running, False
        return stopped

    def is_running(self, settings):
        return self.running

    def running_environ(self, settings):
        return self.environ if self.running else None

    def open(self, settings, *, timeout_s=5.0):
        self.settings = settings
        if not self.running:
            raise errors.NotRunningError("no system answers; start one with greenroom start")
        return FakeConnection(self)


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Return a FakeSystem, in place of the real one for this test."""
    fake = FakeSystem()
    for name in ("begin", "start", "stop", "is_running", "running_environ"):
        monkeypatch.setattr(systems, name, getattr(fake, name))
    monkeypatch.setattr(connections.Connection, "open", fake.open)
    monkeypatch.setattr(session, "_current", None)
    monkeypatch.setattr(session.atexit, "register", lambda function: None)
    monkeypatch.setenv("GREENROOM_STATE_DIR", str(tmp_path / "state"))
    for name in ("GREENROOM_ADDRESS", "GREENROOM_HTTP_PORT", "GREENROOM_ADMIN_PORT"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def running(system):
    """Return a FakeSystem that runs."""
    system.running = True
    return system


@pytest.fixture
def controller(running):
    """Return the controller of a system that runs."""
    return running.controller


@pytest.fixture
def app_dir(tmp_path, monkeypatch):
    """Return an empty folder whose modules are forgotten after the test."""
    folder = tmp_path / "app"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()
