"""The admin API over HTTP: who may, what is asked of the controller, and what is answered."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from greenroom.core import operations as ops
from greenroom.core.errors import (
    DeployFailedError,
    GreenroomError,
    NotRunningError,
    StateNotSavedError,
)
from greenroom.http_front.admin import applications
from greenroom.http_front.admin.api import SMALL_BYTES
from tests.http.admin import Api
from tests.http.wire import turn_over
from tests.support.systems import alive, wait_until

pytestmark = pytest.mark.anyio

APPLICATIONS = "/api/serve/applications/"
ADMIN = ((b"host", b"localhost"), (b"authorization", b"Bearer admin"))
CODE = {"code": base64.b64encode(b"+/\xff?").decode(), "code_hash": "hash"}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    yield made
    made.front.front.access_log.flush()


def test_an_operation_that_reads_takes_its_fields_from_the_query_or_the_body(api: Api) -> None:
    by_query = api.ask("GET", "/v1/get_series?span=hour&last=3")
    by_body = api.ask("POST", "/v1/get_series", {"span": "hour", "last": 3})
    assert by_query.status == by_body.status == 200
    assert by_query.json == by_body.json
    assert by_query.json["step_s"] == 10
    assert by_query["cache-control"] == "no-store"
    assert [each.fields["last"] for each in api.link.requests] == [3, 3]


def test_a_change_is_carried_out_and_its_author_is_the_token(api: Api) -> None:
    answer = api.ask("POST", "/v1/create_backend", {"tag": "m", **CODE}, token="deployer")
    assert answer.status == 202
    goal = answer.json["goal"]
    assert goal
    assert answer.json["reached"] is False
    (request,) = api.link.requests
    assert request.fields["code"] == b"+/\xff?"
    *_, entry = api.ask("GET", "/v1/list_history").json  # after those of the tokens
    assert (entry["user"], entry["what"]) == ("token deployer", "create backend 'm'")
    made = {"name": "e", "backend": "m", "route": "/e", "methods": ["get", "post"]}
    assert api.ask("POST", "/v1/create_endpoint", made).json is None
    assert api.ask("GET", "/v1/list_endpoints").json["e"]["methods"] == ["GET", "POST"]


def test_a_change_of_nothing_has_no_goal_to_wait_for(api: Api) -> None:
    api.ask("POST", "/v1/create_backend", {"tag": "m", **CODE})
    api.ask("POST", "/v1/delete_backend", {"tag": "m"})
    again = api.ask("POST", "/v1/delete_deployment", {"name": "none"})
    assert (again.status, again.json) == (200, {"goal": None, "reached": True})


def test_wait_waits_for_the_goal(api: Api) -> None:
    goal = api.ask("POST", "/v1/create_backend", {"tag": "m", **CODE}).json["goal"]
    repeat = ("POST", "/v1/create_backend?wait=2", {"tag": "m", **CODE})
    assert api.ask(*repeat).status == 202
    assert api.ask("GET", f"/v1/wait_for_goal?goal_id={goal}").json["reached"] is False
    api.link.reached[goal] = True
    assert (api.ask(*repeat).status, api.ask(*repeat).json["reached"]) == (200, True)
    assert api.ask("GET", f"/v1/wait_for_goal?goal_id={goal}&wait=9").status == 200
    api.link.reached[goal] = DeployFailedError("the constructor raised")
    assert api.problem(*repeat) == (422, "the constructor raised")
    assert api.problem("GET", f"/v1/wait_for_goal?goal_id={goal}&wait=1e9")[0] == 400
    assert api.problem("GET", f"/v1/wait_for_goal?goal_id={goal}&wait=nan")[0] == 400
    assert api.problem("GET", f"/v1/wait_for_goal?goal_id={goal}&wait=")[0] == 400


def test_the_same_request_with_the_same_key_is_carried_out_once(api: Api) -> None:
    api.ask("POST", "/v1/create_backend", {"tag": "a", **CODE})
    api.ask("POST", "/v1/create_backend", {"tag": "b", **CODE})
    first = api.ask("POST", "/v1/undo_change", {}, idempotency_key="k")
    second = api.ask("POST", "/v1/undo_change", {}, idempotency_key="k")
    assert first.json == second.json
    assert [each["id"] for each in api.ask("GET", "/v1/list_history").json][-1] == 6  # 3 tokens
    ids = {each.request_id for each in api.link.requests if each.operation == "undo_change"}
    assert len(ids) == 1
    api.ask("POST", "/v1/undo_change", {}, token="deployer", idempotency_key="k")
    assert len({each.request_id for each in api.link.requests}) == len(api.link.requests) - 1


ROLLOUT = {"endpoint": "e", "to": "m"}
WITH_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\n"


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (("GET", "/v1/nothing"), 404, "no operation is named 'nothing'"),
        (("GET", "/v1/create_backend"), 405, ""),
        (("DELETE", "/v1/list_backends"), 405, ""),
        (("POST", "/v1"), 405, ""),
        (("GET", "/v2/list_backends"), 404, "GET /-/api/v1 has all of them"),
        (("GET", "/v1/get_series?last=x"), 400, "get_series: last='x': must be a valid integer"),
        (("GET", "/v1/get_series?a=1"), 400, "get_series: a='1': no such setting"),
        (("GET", "/v1/get_series?last=1&last=2"), 400, "give each field once"),
        (("GET", "/v1/get_backend_config?tag=none"), 404, "no backend is named 'none'"),
        (("POST", "/v1/set_traffic"), 400, "set_traffic: endpoint: must be given"),
        (("POST", "/v1/set_traffic?endpoint=e", {}), 400, "go into the body, as JSON"),
        (("POST", "/v1/set_traffic", [1]), 400, "set_traffic: "),
        (("POST", "/v1/set_traffic", {"endpoint": "e", "weights": {"m": 2}}), 400, "weights.m=2"),
        (("POST", "/v1/start_rollout", {**ROLLOUT, "abort_if": [[]]}), 400, "[]: expected RULE="),
        (("POST", "/v1/create_backend", {**CODE, "tag": "m", "code": "!"}), 400, "code='!'"),
        (("POST", "/v1/create_backend", {**CODE, "tag": "a#b"}), 400, "a name without '#'"),
        (("POST", "/v1/create_token", {}), 404, "no operation is named 'create_token'"),
    ],
)
def test_what_is_wrong_is_reported_as_a_problem(
    api: Api, call: tuple[Any, ...], status: int, message: str
) -> None:
    answered, detail = api.problem(*call)
    assert answered == status
    assert message in detail
    assert not api.link.cluster.state.backends


def test_json_that_is_none_is_reported(api: Api) -> None:
    answer = api.front.ask("POST", "/-/api/v1/set_traffic", headers=ADMIN, body=b"{'a': 1}")
    assert answer.status == 400
    assert "Invalid JSON" in answer.json["detail"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (NotRunningError("no controller was found"), 503),
        (TimeoutError("not answered within 30 s"), 504),
        (StateNotSavedError("the disk is full"), 507),
    ],
)
def test_a_controller_that_cannot_is_reported(api: Api, failure: Exception, status: int) -> None:
    assert api.ask("GET", "/v1/list_backends").status == 200
    api.link.failure = failure
    answer = api.ask("GET", "/v1/list_backends")
    assert answer.status == status
    assert str(failure) in answer.json["detail"]
    assert answer.all("retry-after") == (["1"] if status == 503 else [])


# --- Ray Serve's resource -------------------------------------------------------------------------


REPLICA = {"tag": "a#A#1", "state": "RUNNING", "pid": 7, "host": "one"}
PART = {"status": "HEALTHY", "message": "", "target_replicas": 1, "replicas": [REPLICA]}
WHOLE = {"status": "RUNNING", "message": "", "route_prefix": "/a", "deployments": {"A": PART}}
HOST = {"name": "one", "address": "10.0.0.1:1900", "state": "RUNNING"}
STATUS = {"controller": {"host": "one"}, "hosts": [HOST], "applications": {"a": WHOLE}}


def test_all_applications_are_answered_in_rays_shape(api: Api) -> None:
    api.link.status = STATUS
    answer = api.ask("GET", "/serve/applications/", token="viewer").json
    assert answer == api.ask("GET", "/serve/applications").json
    (replica,) = answer["applications"]["a"]["deployments"]["A"]["replicas"]
    assert replica == {
        "replica_id": "a#A#1",
        "state": "RUNNING",
        "pid": 7,
        "node_id": "one",
        "node_ip": "10.0.0.1",
    }
    assert answer["applications"]["a"]["status"] == "RUNNING"
    assert answer["proxies"]["one"]["status"] == "HEALTHY"


def test_deleting_all_applications_is_one_change(api: Api) -> None:
    answer = api.ask("DELETE", "/serve/applications/", token="deployer")
    assert (answer.status, answer.json["goals"]) == (200, {})
    assert api.ask("DELETE", "/serve/applications/", token="viewer").status == 403


def test_a_document_that_is_none_starts_no_process(api: Api) -> None:
    answer = api.problem("PUT", "/serve/applications/", token="viewer")
    assert answer[0] == 403
    status, found = api.problem("PUT", "/serve/applications/", token="deployer")
    assert (status, found[:26]) == (400, "the body is no JSON docume")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "timeout_s", "message", "may_fork"),
    [
        ("import time\ntime.sleep(60)\n", 10, "took longer than 10 s", True),
        ("import os\nos._exit(7)\n", 60, "deploying ended with exit code 7: see front.log", True),
        ("raise SystemExit(7)\n", 60, "importing 'rude_shop' failed: SystemExit: 7", True),
        (WITH_THREAD, 60, "module 'rude_shop' has no attribute 'app'", True),
        ("import time\ntime.sleep(60)\n", 10, "took longer than 10 s", False),
        (WITH_THREAD, 60, "module 'rude_shop' has no attribute 'app'", False),
    ],
)
def test_an_import_that_takes_too_long_or_dies_is_reported_and_ends_with_what_it_started(
    tmp_path: Path, source: str, timeout_s: float, message: str, may_fork: bool
) -> None:
    pid = tmp_path / "pid"
    starts = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\n"
    starts += f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
    (tmp_path / "rude_shop.py").write_text(starts + source)
    application = {"import_path": "rude_shop:app", "runtime_env": {"working_dir": str(tmp_path)}}
    text = json.dumps({"applications": [application]})
    asked = {"text": text, "kind": "json", "user": "token ci", "flags": {}}
    with pytest.raises(GreenroomError, match=message):
        asyncio.run(applications.applied(asked, timeout_s, may_fork=may_fork))
    wait_until(lambda: not alive(int(pid.read_text())), 10, "what it started has ended")


# --- Who may --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer nobody's"]
)
def test_without_a_token_in_force_nothing_is_answered(api: Api, authorization: str) -> None:
    head = {"authorization": authorization} if authorization else {}
    answer = api.ask("GET", "/v1/get_backend_config?tag=x", token="", **head)
    assert (answer.status, answer["www-authenticate"]) == (401, 'Bearer realm="greenroom"')
    assert not api.link.requests


def test_a_token_ends_and_can_be_revoked(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.create_token("viewer", "short", expires_at=time.time() + 1000)
    assert api.ask("GET", "/v1/list_backends", token="short").status == 200
    with monkeypatch.context() as patch:
        later = time.time() + 1001
        patch.setattr("greenroom.http_front.admin.access.time.time", lambda: later)
        assert api.ask("GET", "/v1/list_backends", token="short").status == 401
    assert api.ask("GET", "/v1/list_backends", token="short").status == 200
    del api.link.cluster.tokens["short"]
    monkeypatch.setattr("greenroom.http_front.admin.access.REVOKED_WITHIN_S", 0)
    assert api.ask("GET", "/v1/list_backends", token="short").status == 401


def test_a_role_allows_what_the_table_says_and_all_below_it(api: Api) -> None:
    calls = {
        "viewer": ("GET", "/v1/list_backends"),
        "deployer": ("POST", "/v1/delete_application", {"application": "none"}),
        "admin": ("POST", "/v1/rebalance_hosts", {}),
    }
    for role, call in calls.items():
        allowed = [each for each in calls if api.ask(*call, token=each).status != 403]
        assert allowed == list(calls)[list(calls).index(role) :]
    assert api.problem("POST", "/v1/evict_host", {"host": "h"}, token="deployer") == (
        403,
        "token 'deployer' has the role deployer; this takes the role admin",
    )


def test_every_operation_over_http_has_a_role_and_none_makes_tokens() -> None:
    without = {key for key, kind in ops.OPERATIONS.items() if kind.role is None}
    assert without == {"create_token", "revoke_token", "list_tokens"}


def test_a_body_is_not_read_before_the_token_is_known(api: Api) -> None:
    head = ((b"host", b"localhost"), (b"content-length", b"99999999"))
    answer = api.front.ask("POST", "/-/api/v1/deploy", headers=head)  # no byte of it comes
    assert answer.status == 401


def test_a_body_over_the_limit_is_refused_and_a_large_one_is_read(api: Api) -> None:
    code = base64.b64encode(b"x" * 3_000_000).decode()
    assert api.ask("POST", "/v1/create_backend", {"tag": "m", **CODE, "code": code}).status == 202
    assert len(api.link.requests[0].fields["code"]) == 3_000_000
    api.rebuild(max_body_bytes=1000)
    refused = api.ask("POST", "/v1/create_backend", {"tag": "n", **CODE, "code": code})
    assert (refused.status, refused["content-type"]) == (413, "application/problem+json")


def test_a_large_body_is_parsed_on_a_thread_so_that_no_request_waits(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: list[threading.Thread] = []

    def noted(*arguments: Any) -> Any:
        on.append(threading.current_thread())
        return ops.read_given(*arguments)

    monkeypatch.setattr("greenroom.http_front.admin.api.read_given", noted)
    for size in (SMALL_BYTES // 2, SMALL_BYTES):
        code = base64.b64encode(b"x" * size).decode()
        deployed = api.ask("POST", "/v1/create_backend", {"tag": "m", **CODE, "code": code})
        assert deployed.status == 202
    assert [each is threading.current_thread() for each in on] == [True, False]


def test_an_operation_that_reads_takes_a_small_body(api: Api) -> None:
    padding = {"span": "hour", "last": 3, "none": "x" * 100_000}
    assert api.problem("POST", "/v1/get_series", padding, token="viewer")[0] == 413
    assert api.problem("PUT", "/serve/applications/", {"none": "x" * 2_000_000})[0] == 413


async def test_requests_without_a_controller_wait_at_the_same_time(api: Api) -> None:
    asked, until_given_up = [], asyncio.Event()

    async def slowly(operation: ops.Operation, _timeout_s: float) -> Any:
        asked.append(operation)
        await until_given_up.wait()
        raise NotRunningError("no controller answers")

    api.link.request = slowly  # type: ignore[method-assign]
    path = "/-/api/v1/list_backends"
    calls = asyncio.gather(*(api.front.call("GET", path, headers=ADMIN) for _ in range(10)))
    await turn_over()
    until_given_up.set()
    assert {answer.status for answer in await calls} == {503}
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),  # a name that a page has made lead here
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://localhost"}, 200),
        ({"origin": "http://localhost:9", "host": "localhost:8000"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "same-origin", "origin": "http://localhost"}, 200),
        ({"sec_fetch_site": "none"}, 200),
    ],
)
def test_pages_of_other_sites_are_refused(api: Api, headers: dict[str, str], status: int) -> None:
    assert api.ask("GET", "/v1/list_backends", **headers).status == status


@pytest.mark.parametrize("name", ["x-forwarded-for", "X-Forwarded-Host", "forwarded", "Via"])
def test_what_a_proxy_passed_on_is_refused_at_the_port_of_requests(api: Api, name: str) -> None:
    status, found = api.problem("GET", "/v1/list_backends", **{name: "for=10.0.0.1"})
    assert status == 403
    assert name.lower() in found
    assert "--http-pages-port" in found
    head = ((b"host", b"localhost"), (name.encode(), b"10.0.0.1"))
    assert api.front.ask("GET", "/-/dashboard", headers=head).status == 403
    assert api.front.ask("GET", "/shop", headers=head).text == "ok"


def test_scripts_of_service_workers_are_refused_at_the_port_of_the_dashboard(api: Api) -> None:
    head = ((b"host", b"localhost"), (b"service-worker", b"script"))
    refused = api.front.ask("GET", "/shop/sw.js", headers=head)
    assert refused.status == 403
    assert "--http-pages-port" in refused.text
    for http in ({"pages_port": 8001}, {"host": "0.0.0.0"}):
        api.rebuild(**http)
        assert api.front.ask("GET", "/shop/sw.js", headers=head).text == "ok"


def test_no_token_is_in_the_access_log(api: Api) -> None:
    api.ask("GET", "/v1/list_backends", token="deployer")
    api.ask("GET", "/v1/list_backends?token=deployer", token="")
    assert "deployer" not in json.dumps(api.front.log())


# --- The token itself, and logs -------------------------------------------------------------------


def test_a_token_says_what_it_is(api: Api) -> None:
    answer = api.ask("GET", "/token", token="viewer").json
    assert answer == {"name": "viewer", "role": "viewer", "expires_at": None}
    assert api.ask("GET", "/token", token="").status == 401


def test_logs_are_listed_read_and_followed(api: Api) -> None:
    folder = api.front.settings.logs_dir
    folder.mkdir(exist_ok=True)
    log = folder / "replica-a.log"
    log.write_text("one\ntwo\nthr")
    assert [each["log"] for each in api.ask("GET", "/logs").json["logs"]] == ["replica-a"]
    first = api.ask("GET", "/logs?log=replica-a").json
    assert (first["lines"], first["skipped"]) == (["one", "two"], False)
    log.write_text("one\ntwo\nthree\n")
    after = f"/logs?log=replica-a&after={first['next']}"
    assert api.ask("GET", after).json["lines"] == ["three"]
    log.write_text("new\n")  # rotated
    assert api.ask("GET", after).json["lines"] == ["new"]


def test_logs_of_another_host_are_asked_of_it(api: Api) -> None:
    link = api.link
    link.status = STATUS
    link.of_hosts["10.0.0.1:1900", "logs", None, None] = {"logs": []}
    assert api.ask("GET", "/logs?host=one").json == {"host": "one", "logs": []}
    read = {"log": "a", "lines": ["b"], "next": 9, "skipped": False}
    link.of_hosts["10.0.0.1:1900", "logs", "a", 7] = read
    assert api.ask("GET", "/logs?host=one&log=a&after=7").json == {"host": "one", **read}
    link.of_hosts["10.0.0.1:1900", "logs", "b", None] = {}
    assert api.problem("GET", "/logs?host=one&log=b") == (404, "no log is named 'b'")
    assert api.problem("GET", "/logs?host=one&log=c")[0] == 503, "it does not answer"
    assert api.problem("GET", "/logs?host=two")[0] == 404
    assert api.ask("GET", "/logs?host=one", token="").status == 401


def test_of_a_long_log_the_end_is_read(api: Api) -> None:
    folder = api.front.settings.logs_dir
    folder.mkdir(exist_ok=True)
    (folder / "a.log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    answer = api.ask("GET", "/logs?log=a").json
    assert answer["skipped"]
    assert answer["lines"][0].startswith("line ")
    assert answer["lines"][-1] == "line 99999"
    assert len(answer["lines"]) < 20_000
    assert api.ask("GET", "/logs?log=a&after=5").json["skipped"]


@pytest.mark.parametrize(
    ("query", "status"),
    [("log=../store/x", 404), ("log=nothing", 404), ("log=a&after=-1", 400), ("lines=3", 400)],
)
def test_no_other_file_is_read(api: Api, query: str, status: int) -> None:
    assert api.problem("GET", f"/logs?{query}")[0] == status
    assert api.ask("GET", "/logs", token="").status == 401


# --- Where it is ----------------------------------------------------------------------------------


def test_it_is_not_at_the_port_of_requests_of_other_hosts(api: Api) -> None:
    for http in ({}, {"pages_port": 8001}):
        api.rebuild(host="0.0.0.0", **http)  # a front with pages of its own, at the other port
        assert api.ask("GET", "/v1/list_backends").status == 404
        assert not api.link.asked


def test_below_api_are_the_users_own_endpoints_at_the_port_of_requests(api: Api) -> None:
    assert api.front.ask("GET", "/api/v1/list_backends", headers=ADMIN).text == "ok"
    assert api.front.ask("GET", "/%2D/api/v1/list_backends", headers=ADMIN).text == "ok"


def test_it_is_below_the_root_path(api: Api) -> None:
    api.rebuild(root_path="/gate")
    for prefix in ("/gate", ""):
        answer = api.front.ask("GET", f"{prefix}/-/api/v1/list_backends", headers=ADMIN)
        assert (answer.status, answer.json) == (200, {})


def test_the_openapi_document_is_valid_and_names_every_operation(api: Api) -> None:
    document = api.ask("GET", "/openapi.json", token="").json
    OpenAPIV31SpecValidator(document).validate()
    paths = set(document["paths"]) - {"/api/token", "/api/logs", APPLICATIONS}
    assert {path.removeprefix("/api/v1/") for path in paths} == {
        key for key, kind in ops.OPERATIONS.items() if kind.role is not None
    }
    assert "get" in document["paths"]["/api/v1/get_series"]
    assert "get" not in document["paths"]["/api/v1/set_traffic"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/"])
def test_the_api_answers_with_what_there_is(api: Api, path: str) -> None:
    answer = api.ask("GET", path)
    assert answer.status == 200
    there = answer.json
    assert there["/-/api/v1/list_backends"] == ["GET", "POST"]
    assert there["/-/api/v1/create_backend"] == ["POST"]
    assert "/-/api/v1/create_token" not in there  # an operation of no role
    assert there["/-/api/openapi.json"] == ["GET"]
