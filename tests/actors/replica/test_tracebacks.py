"""Tracebacks show the user's frames and those of the libraries that user code called."""

import asyncio
import builtins
import importlib
import json
from types import SimpleNamespace

import pytest

from greenroom import serve
from greenroom.actors.replica.modules import users_traceback
from greenroom.actors.replica.replica import Replica
from greenroom.core.errors import DeployFailedError
from greenroom.serve.exceptions import InvalidRequestError
from tests.actors.one_process import load


class FailsInALibrary:
    def __init__(self):
        self.config = json.loads("{")


class FailsInOurs:
    def __init__(self):
        serve.get_deployment_handle("")


class Chained:
    def __init__(self):
        try:
            json.loads("{")
        except ValueError as error:
            raise LookupError("no weights") from error


class Imports:
    def __init__(self):
        importlib.import_module("nothing_of_that_name")


class Grouped:
    def __init__(self):
        try:
            serve.get_deployment_handle("")
        except ValueError as error:
            kind = getattr(builtins, "ExceptionGroup", None)  # from Python 3.11 on
            raise kind("several", [error]) if kind else LookupError("several") from None


@pytest.mark.parametrize("target", [FailsInALibrary, FailsInOurs, Chained, Imports, Grouped])
def test_the_error_of_a_constructor_shows_no_frames_of_ours(target):
    trace = load(target).traceback
    assert f"in {target.__name__}.__init__" in trace or "in __init__" in trace
    assert __file__ in trace
    files = [line for line in trace.splitlines() if line.lstrip(" |+-").startswith("File ")]
    assert not [line for line in files if "/serve/" in line.replace("/tests/serve/", "")]
    assert not [line for line in files if "user_code.py" in line or "<frozen importlib" in line]
    assert __file__ in files[0], trace  # nothing before the user's own


def test_frames_of_libraries_that_user_code_called_are_shown():
    assert "json/decoder.py" in load(FailsInALibrary).traceback
    assert load(Chained).traceback.count("Traceback (most recent call last)") == 2


class LacksPackages(Replica):
    """A replica whose packages cannot be installed, without an actor system."""

    tag, state = "r1", "starting"
    queries = None
    _applied_id = 0
    found = None

    def _configure_logging(self, _config):
        return None

    async def _load_code(self, *_):
        error = DeployFailedError("pip failed: no such package")
        raise DeployFailedError(str(error)) from error  # as from the thread that installs

    def _report(self):
        self.found = self._failure


def test_what_keeps_a_replica_from_loading_is_reported_in_one_line():
    replica = LacksPackages()
    asyncio.run(replica._load(SimpleNamespace(config={}, config_id=1), None))
    expected = "greenroom.core.errors.DeployFailedError: pip failed: no such package"
    assert replica.found.traceback.strip() == expected


def test_an_error_of_ours_alone_has_its_text():
    with pytest.raises(InvalidRequestError) as caught:
        serve.get_app_handle("")
    found = users_traceback(caught.value)
    assert "name=''" in found
    assert "serve/api.py" not in found
