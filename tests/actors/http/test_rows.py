"""The table of what HTTP clients see, row by row, on the wire of a whole system."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException

from greenroom import serve
from tests.actors.conftest import deploy
from tests.support.asking import Got, ask
from tests.support.systems import RunningSystem, running_system, wait_until


class Row:
    """Does what a row of the table needs; ``folder`` is where it and the test meet."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __call__(self, request: Any) -> Any:
        what = request.url.path.rpartition("/")[2]
        if what == "pid":
            return str(os.getpid())
        return {"id": serve.get_request_context().request_id, "size": len(await request.body())}

    def other(self, request: Any) -> str:
        return "the other method"


guarded_app = FastAPI()


def knows_the_password(authorization: str = Header("")) -> None:
    if authorization != "Basic c2VjcmV0":
        raise HTTPException(401)


@serve.ingress(guarded_app)
class Guarded:
    @guarded_app.post("/admin/wipe", dependencies=[Depends(knows_the_password)])
    def wipe(self) -> str:
        return "wiped"

    def wipe_all(self) -> str:
        return "wiped"


class Dict(dict):  # type: ignore[type-arg]
    """Has what requests may not name: of a base that is not the user's, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.secret_tool = os.getpid

    def __call__(self) -> str:
        return "called"

    def größe(self) -> str:  # noqa: PLC2401
        return "the size"


class Wire:
    """Sends requests to a system, with any headers."""

    def __init__(self, system: RunningSystem) -> None:
        self.system = system

    def ask(self, target: str, *headers: str, method: str = "GET", body: bytes = b"") -> Got:
        pairs = [(name, value) for name, _, value in (each.partition(": ") for each in headers)]
        return ask(f"{self.system.url}{target}", body or None, method, pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def wire(tmp_path_factory, folder):
    """Give a system with deployments of every kind."""
    with running_system(tmp_path_factory.mktemp("state")) as running:
        every = serve.deployment(http_call_methods=None)
        deploy(running, every(Row).bind(str(folder)), "row", "/row")
        client = serve.Client(running.connection, running.settings)
        client.wait_for_goal(client.create_backend("plain", Row, str(folder)))
        client.create_endpoint("plain", backend="plain", route="/plain", methods=["GET", "PUT"])
        deploy(running, every(Guarded).bind(), "guarded", "/guarded")
        deploy(running, every(Dict).bind(), "dict", "/dict")
        yield Wire(running)


def test_a_method_that_is_not_the_endpoints_is_405_with_those_that_are(wire):
    reply = wire.ask("/plain", method="POST", body=b"x")
    assert reply.status == 405
    assert {each.strip() for each in reply.headers["allow"].split(",")} >= {"GET", "PUT"}
    assert wire.ask("/plain", method="PUT").status == 200


@pytest.mark.parametrize("name", ["wipe", "wipe_all", "__call__", "nothing"])
def test_no_header_goes_past_an_app_and_what_guards_it(wire, name):
    assert wire.ask("/guarded/admin/wipe", method="POST").status == 401
    reply = wire.ask("/guarded/admin/wipe", f"x-SERVE-call-METHOD: {name}", method="POST")
    assert (reply.status, b"ASGI app" in reply.body) == (400, True)
    allowed = "Authorization: Basic c2VjcmV0"
    assert wire.ask("/guarded/admin/wipe", allowed, method="POST").body == b'"wiped"'


@pytest.mark.parametrize(
    "name", ["keys", "clear", "fromkeys", "secret_tool", "__class__", "größe\xad", "gr", "x" * 4000]
)
def test_a_request_reaches_no_inherited_method_or_attribute_and_hears_of_none(wire, name):
    reply = wire.ask("/dict", f"X-Serve-Call-Method: {name}")
    assert reply.status == 400
    assert not any(each in reply.body for each in (b"the size", b"tool,", b"keys,", b"other"))
    assert len(reply.body) < 300


def test_a_method_is_named_as_user_code_writes_it_and_only_once(wire):
    utf_8 = "größe".encode().decode("latin-1")
    assert wire.ask("/dict", f"X-Serve-Call-Method: {utf_8}").body == b"the size"
    assert wire.ask("/dict", "X-Serve-Call-Method: größe").body == b"the size"
    assert wire.ask("/dict", "X-Serve-Call-Method: __call__").body == b"called"
    assert wire.ask("/dict").body == b"called"
    twice = ("X-Serve-Call-Method: __call__", f"x-serve-call-method: {utf_8}")
    assert wire.ask("/dict", *twice).status == 400


def test_only_the_methods_that_an_option_names_are_open_and_it_changes_while_serving(wire):
    switch = serve.deployment(name="Switch")(Row)
    deploy(wire.system, switch.bind("."), "switch", "/switch")
    for name in ("other", "__call__"):
        reply = wire.ask("/switch/x", f"X-Serve-Call-Method: {name}")
        assert (reply.status, b"takes no header" in reply.body) == (400, True)
    pid = wire.ask("/switch/pid").body
    deploy(wire.system, switch.options(http_call_methods=["other"]).bind("."), "switch", "/switch")
    assert wire.ask("/switch/x", "X-Serve-Call-Method: other").body == b"the other method"
    assert wire.ask("/switch/pid", "X-Serve-Call-Method: __call__").body == pid
    assert wire.ask("/switch/x", "X-Serve-Call-Method: another").status == 400


def test_any_public_method_of_a_backend_of_the_first_api_is_open(wire):
    assert wire.ask("/plain/x", "X-Serve-Call-Method: other").body == b"the other method"
    assert wire.ask("/plain/x", "X-Serve-Call-Method: _private").status == 400


@serve.deployment
class ForHandles:
    def double(self, value: int) -> int:
        return 2 * value


def test_a_class_without_a_call_answers_handles_and_names_to_requests_what_it_lacks(wire):
    handle = deploy(wire.system, ForHandles.bind(), "handles", "/handles")
    assert handle.double.remote(2).result(timeout_s=20) == 4
    reply = wire.ask("/handles/x")
    assert (reply.status, b"see the option http_call_methods" in reply.body) == (400, True)


class Frail:
    """Cannot be made while there is a file."""

    def __init__(self, folder: str) -> None:
        if (Path(folder) / "broken").exists():
            raise RuntimeError("broken on purpose")

    def __call__(self) -> str:
        return str(os.getpid())


def test_what_has_never_run_is_refused_at_once_and_readiness_says_why(wire, folder):
    (folder / "broken").touch()
    patient = serve.deployment(max_constructor_retry_count=1000)(Frail).bind(str(folder))
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(deploy, wire.system, patient, "never", "/never")
        readiness = "/-/readyz?application=never"
        message = b"RuntimeError: broken on purpose"
        wait_until(lambda: message in wire.ask(readiness).body, 10, "it is told why")
        refused = wire.ask("/never")
        (folder / "broken").unlink()
        deployed.result()
    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert b"none of its replicas has run yet" in refused.body
    assert b"broken on purpose" not in refused.body, "that is for operators"
    assert wire.ask("/never").status == wire.ask(readiness).status == 200
