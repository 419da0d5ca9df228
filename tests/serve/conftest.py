"""A system in the test's own process: the controller's core, and replicas that are called."""

import importlib
import itertools
import pickle
import sys
import traceback
from functools import partial

import cloudpickle
import pytest
from click.testing import CliRunner
from thespian.actors import ActorAddress

from greenroom.actors.caller import connection as connections
from greenroom.actors.caller.client import QueryClient
from greenroom.actors.caller.connection import result_of
from greenroom.actors.controller.requests import Requests
from greenroom.actors.host import launcher as systems
from greenroom.actors.messages.admin import request_of
from greenroom.actors.messages.queries import FailedAnswer, ValueAnswer, arguments_of
from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.core import errors
from greenroom.core.cluster import status
from greenroom.core.operations import GetStatus, StopCluster
from greenroom.serve.admin import session
from greenroom.serve.cli import deploying, starting
from greenroom.serve.cli.main import main
from tests.core.worlds import World

SOURCE = """
from greenroom import serve

@serve.deployment
class Model:
    def __init__(self, args=None):
        self.args = args
    def __call__(self):
        return self.args

@serve.deployment
class Broken:
    def __init__(self):
        raise LookupError("no weights")

    def __call__(self): ...

app = Model.bind(1)
broken = Broken.bind()
build = lambda args: Model.bind(args)
"""


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
            endpoint = self.controller.cluster.state.endpoints.get(query.endpoint)
            backend = query.endpoint if endpoint is None else next(iter(endpoint.traffic))
            method = getattr(self.controller.instances[backend], call.method)
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


class Controller(World):
    """The controller's core, and replicas that run here; it answers as the real one does.

    ``shown`` is what its status tells of hosts, or anything else in place of the core's.
    """

    def __init__(self):
        super().__init__()
        self.requests = []
        self.silent = set()  # names of operations that are never answered
        self.failing = {}  # what is raised in place of an answer, by the operation's name
        self.instances = {}  # what calls run, by backend
        self.shown = {"controller": {"pid": 1, "host": "a"}, "hosts": []}
        self.queries = FakeQueries(self)
        own = {GetStatus: lambda *_: self.status(), StopCluster: lambda *_: True}
        self._asked = Requests(self.cluster, own)

    def of(self, kind):
        return [request for request in self.requests if type(request).__name__ == kind]

    def answer(self, operation):
        self.requests.append(operation)
        if error := self.failing.get(type(operation).__name__):
            raise error
        sender = ActorAddress(ProcessAddress("127.0.0.1", 1900))
        self._asked.take(request_of(operation, f"request {len(self.requests)}"), sender)
        for _ in range(1000):
            self.go_on(1, seconds=1.0)
            for _, reply in self._asked.take_answers():
                return result_of(reply)
        raise AssertionError(f"{operation} is never answered: {self.describe()}")

    def construct(self, process):
        try:
            target, args, kwargs = cloudpickle.loads(process.code)
            made = target(*args, **kwargs) if isinstance(target, type) else target
        except Exception as error:
            process.failure = traceback.format_exc(), _pickled(error)
            return False
        self.instances[process.tag.rpartition("#")[0]] = made
        return True

    def status(self):
        return {
            "applications": self.applications,
            "backends": status.backends(self.cluster),
            "endpoints": status.endpoints(self.cluster),
            "goals": status.goals(self.cluster),
            "rollouts": self.cluster.rollouts.status(self.now),
            **self.shown,
        }

    @property
    def applications(self):
        return status.applications(self.cluster)


class FakeConnection:
    """A connection to the controller of a FakeSystem."""

    def __init__(self, system):
        self.system = system
        self.queries = system.controller.queries
        self.closed = False

    def request(self, request, *, timeout_s=None):
        assert not self.closed
        if timeout_s is not None and timeout_s <= 0:
            raise TimeoutError
        if not self.system.running:
            raise errors.NotRunningError("no system answers")
        if type(request).__name__ in self.system.controller.silent:
            assert timeout_s is not None, f"{request} is waited for without end"
            raise TimeoutError(f"not answered within {timeout_s:g} s")
        return self.system.controller.answer(request)

    def wait_gone(self, timeout_s):
        return True

    def close(self):
        self.closed = True


class FakeSystem:
    """Stands in for the processes of a host."""

    def __init__(self):
        self.running = False
        self.controller = Controller()
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


@pytest.fixture
def invoke(system, app_dir, monkeypatch):
    """Return what runs a command in this process, in the folder of applications.

    It ends with the exit code ``code``.
    """
    monkeypatch.chdir(app_dir)
    for module in (starting, deploying):
        monkeypatch.setattr(module, "interrupt_on_terminate", lambda: None)

    def invoke(*words, code=0, **how):
        result = CliRunner().invoke(main, words, **how)
        assert result.exit_code == code, result.output
        return result

    return invoke
