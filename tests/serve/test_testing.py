"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.systems import alive

# Only this plugin, so that a run here is the same whatever else is installed.
ONLY = ("-p", "greenroom.serve.testing", "-p", "no:cacheprovider", "-W", "error", "-q")
APP = """
from greenroom import serve

@serve.deployment
class Greeter:
    def __init__(self, word="hello"):
        self.word = word

    def __call__(self, request=None):
        return self.word
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run pytest on these files; the system's folders are below ``tmp_path``."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(test: str, *arguments: str, **modules: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "suite"
        folder.mkdir()
        for name, text in {"test_it": test, **modules}.items():
            (folder / f"{name}.py").write_text(text)
        return subprocess.run(
            [sys.executable, "-m", "pytest", *ONLY, f"--basetemp={tmp_path / 'base'}", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


def passed(done: subprocess.CompletedProcess[str], number: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{number} passed" in done.stdout


def test_an_app_answers_http_and_handles_and_is_gone_with_its_test(run):
    test = (
        APP
        + """
import urllib.error
import urllib.request

import pytest

urls = []

def test_it(greenroom_run):
    app = greenroom_run(Greeter.bind())
    urls.append(app.url)
    assert urllib.request.urlopen(app.url).read() == b"hello"
    assert app.handle.remote().result(timeout_s=20) == "hello"

def test_another(greenroom_run, greenroom_system):
    assert greenroom_system.url == urls[0], "one system for all"
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(urls[0])
    missing.value.close()
    assert missing.value.code == 404
    app = greenroom_run(Greeter.bind("hi"), name="other", route_prefix="/there")
    assert urllib.request.urlopen(app.url + "/x").read() == b"hi"
    assert serve.get_app_handle("other").remote().result(timeout_s=20) == "hi"
    headless = greenroom_run(Greeter.bind("ho"), name="third", route_prefix=None)
    assert (headless.url, headless.handle.remote().result(timeout_s=20)) == ("", "ho")

@serve.deployment(max_constructor_retry_count=1)
class Broken:
    def __init__(self):
        raise ValueError("no model")

    def __call__(self): ...

def test_one_that_cannot_start(greenroom_run):
    with pytest.raises(ValueError, match="no model"):
        greenroom_run(Broken.bind())

def test_settings_are_those_that_were_given(greenroom_run):
    app = greenroom_run(Greeter.bind())
    request = urllib.request.Request(app.url, headers={"Origin": "https://a.example"})
    with urllib.request.urlopen(request) as response:
        assert response.headers["access-control-allow-origin"] == "*"

def test_nothing_is_left(greenroom_system):
    assert list(serve.status().applications) == []
"""
    )
    conftest = """
import pytest

@pytest.fixture(scope="session")
def greenroom_settings():
    return {"http_cors": "*", "num_cpus": 3}
"""
    passed(run(test, conftest=conftest), 5)


@pytest.mark.slow
def test_nothing_of_it_runs_when_the_session_is_over(run, tmp_path):
    test = (
        APP
        + """
import pathlib
from greenroom.actors.runtime.records import RunRecords

def test_it(greenroom_run, greenroom_system):
    greenroom_run(Greeter.bind())
    pids = [process.pid for process in RunRecords(greenroom_system.state_dir / "run").alive()]
    pathlib.Path("pids").write_text(" ".join(map(str, pids)))
    assert False, "on purpose"
"""
    )
    done = run(test)
    assert "1 failed" in done.stdout
    pids = (tmp_path / "suite" / "pids").read_text().split()
    assert len(pids) > 4
    assert [pid for pid in pids if alive(int(pid))] == []


def test_a_run_that_does_not_use_it_imports_next_to_nothing(run):
    test = """
import sys

def test_it():
    loaded = {name for name in sys.modules if name.startswith("greenroom.")}
    assert loaded == {"greenroom.serve", "greenroom.serve.testing"}
    assert not {"thespian", "pydantic", "cloudpickle", "starlette"} & set(sys.modules)
"""
    passed(run(test), 1)


@pytest.mark.slow
def test_bad_settings_are_an_error_that_names_them(run):
    conftest = """
import pytest

@pytest.fixture(scope="session")
def greenroom_settings():
    return {"http_workers": 0}
"""
    done = run("def test_it(greenroom_system): pass\n", conftest=conftest)
    assert "1 error" in done.stdout
    assert "workers=0" in done.stdout


def test_pytest_finds_it_where_greenroom_is_installed():
    (found,) = importlib.metadata.entry_points(group="pytest11", name="greenroom")
    assert found.value == "greenroom.serve.testing"
