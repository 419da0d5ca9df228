"""A pytest plugin: a system for tests, on free ports and in a temporary folder.

pytest loads this in every run, so all else is imported by the first test that asks for a fixture.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from greenroom.serve.deployments import Application
    from greenroom.serve.handle import DeploymentHandle

START_ATTEMPTS = 3


class RunningApp(NamedTuple):
    """An application that a test runs: where it answers HTTP, and its ingress's handle."""

    url: str  # without a slash at its end; "" for one without a route
    handle: DeploymentHandle


class GreenroomSystem:
    """The system of a test session; ``serve``'s functions in the tests talk to it."""

    def __init__(self, url: str, state_dir: Path) -> None:
        self.url = url  # without a slash at its end
        self.state_dir = state_dir  # with the folder of its logs

    def run(
        self,
        app: Application,
        *,
        name: str = "default",
        route_prefix: str | None = "/",
        **options: Any,
    ) -> RunningApp:
        """Bring an application up as ``serve.run`` does; it stays until it is deleted."""
        from greenroom import serve  # noqa: PLC0415  # see the module

        handle = serve.run(app, name=name, route_prefix=route_prefix, **options)
        url = "" if route_prefix is None else (self.url + route_prefix).rstrip("/")
        return RunningApp(url, handle)


@pytest.fixture(scope="session")
def greenroom_settings() -> dict[str, Any]:
    """Give settings of the test session's system, such as ``{"num_cpus": 8}``; to be overridden.

    Their names are those of the environment variables, in small letters and without GREENROOM_.
    """
    return {}


@pytest.fixture(scope="session")
def greenroom_system(
    tmp_path_factory: pytest.TempPathFactory, greenroom_settings: dict[str, Any]
) -> Iterator[GreenroomSystem]:
    """Start a system on free ports and in a temporary folder; it is stopped with the session."""
    from greenroom.actors.runtime.settings import read_settings  # noqa: PLC0415
    from greenroom.serve.admin import session  # noqa: PLC0415

    state_dir = tmp_path_factory.mktemp("greenroom")
    try:
        settings = _start(state_dir, greenroom_settings)
        yield GreenroomSystem(f"http://127.0.0.1:{settings.http.port}", state_dir)
    finally:
        session.current().shutdown()
        session.use(read_settings())


@pytest.fixture
def greenroom_run(greenroom_system: GreenroomSystem) -> Iterator[Callable[..., RunningApp]]:
    """Give what runs an application for one test, by ``greenroom_run(Model.bind())``."""
    from greenroom import serve  # noqa: PLC0415

    names: list[str] = []

    def run(app: Application, *, name: str = "default", **options: Any) -> RunningApp:
        names.append(name)
        return greenroom_system.run(app, name=name, **options)

    yield run
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.callback(serve.delete, name)


def _start(state_dir: Path, given: dict[str, Any]) -> Any:
    """Start a system; another one's ports are taken between our check and its start, at times."""
    from greenroom.actors.runtime.settings import read_settings  # noqa: PLC0415
    from greenroom.serve.admin import session  # noqa: PLC0415
    from greenroom.serve.exceptions import StartError  # noqa: PLC0415

    for attempt in range(1, START_ATTEMPTS + 1):
        ports = {"http_port": _free_port(), "admin_port": _free_port()}
        settings = read_settings({}, **{"state_dir": str(state_dir), **ports, **given})
        try:
            session.use(settings).ensure_running()
        except StartError as error:
            if attempt == START_ATTEMPTS or " in use " not in str(error):
                raise
        else:
            return settings
    raise AssertionError("it started, or the last attempt has raised")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
