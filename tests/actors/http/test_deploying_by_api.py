"""Documents that are put to the API: what is deployed, what is refused, and how that is told.

The same document by file, by API and by page gives the same state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import Got, ask
from tests.support.browser import Browser
from tests.support.systems import RunningSystem, running_system, wait_until

MODULE = """
from greenroom import serve


@serve.deployment
def hello():
    return "hello"


app = hello.bind()
"""
NOTHING = '{"applications": []}'


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "hello.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture(scope="module")
def token(system):
    return system.greenroom("token", "create", "ci", "--role", "deployer").stdout.strip()


def put(
    system: RunningSystem, token: str, body: bytes | str, query: str = "", kind: str = ""
) -> Got:
    return ask(
        f"{system.url}/-/api/serve/applications/{query}",
        body if isinstance(body, bytes) else body.encode(),
        "PUT",
        authorization=f"Bearer {token}",
        content_type=kind or "application/json",
    )


def document(code: Path) -> str:
    """One application, as YAML."""
    return f"""applications:
- name: hello
  route_prefix: /hello
  import_path: hello:app
  runtime_env: {{working_dir: {code}}}
  deployments:
  - name: hello
    max_ongoing_requests: 7
"""


def state(system: RunningSystem) -> Any:
    """What is served, without what differs between two deploys of the same."""
    status = system.status()
    for backend in status["backends"].values():
        for varying in ("replicas", "goals"):
            backend.pop(varying, None)
    for application in status["applications"].values():
        for deployment in application["deployments"].values():
            deployment.pop("replicas")
    return {name: status[name] for name in ("applications", "backends", "endpoints")}


def is_empty(system: RunningSystem) -> bool:
    status = system.status()
    return not (status["applications"] or status["backends"])


def deployed(system: RunningSystem) -> Any:
    """Return the state when the application runs."""
    wait_until(
        lambda: system.status()["applications"].get("hello", {}).get("status") == "RUNNING",
        60,
        "the application runs",
    )
    return state(system)


def refuse_deletion(page: Browser) -> None:
    page.click("#deploy-run")
    page.wait("does not name hello: deleted with it", "#confirm")
    assert page.run("return document.querySelector('#confirm-yes').matches('.danger')")
    page.click("#confirm-no")


@pytest.mark.slow
def test_by_file_by_api_and_by_page_it_is_the_same(system, token, code, tmp_path):
    file = tmp_path / "app.yaml"
    file.write_text(document(code))
    system.greenroom("deploy", str(file))
    by_file = deployed(system)
    assert by_file["applications"]["hello"]["route_prefix"] == "/hello"
    put(system, token, NOTHING)
    wait_until(lambda: is_empty(system), 60, "it is gone, and its replicas")

    planned = put(system, token, document(code), "?plan=true", "application/yaml").json
    assert planned["changes"]
    assert not system.status()["applications"], "a plan changes nothing"
    answer = put(
        system, token, document(code), f"?if_version={planned['version']}", "application/yaml"
    )
    assert answer.status == 202
    assert answer.json["changed"] == ["hello"]
    assert deployed(system) == by_file
    again = put(system, token, document(code), kind="application/yaml")
    assert (again.status, again.json["changed"]) == (200, [])
    old = put(system, token, NOTHING, f"?if_version={planned['version']}")
    assert (old.status, old.json["title"]) == (409, "ConflictError")
    put(system, token, NOTHING)
    wait_until(lambda: is_empty(system), 60, "it is gone, and its replicas")

    page = Browser(tmp_path / "profile")
    try:
        page.open(f"{system.url}/-/dashboard#deploy")
        page.click("#sign")
        page.type("#token", token)
        page.click("#token-ok")
        page.wait("ci", "#who")
        page.run("document.querySelector('#deploy-text').value = arguments[0]", document(code))
        page.click("#deploy-plan")
        page.wait("nothing has changed yet", "#deploy-told", within_s=60)
        page.wait("hello", "#deploy-changes")
        assert not system.status()["applications"], "it has asked for nothing but the plan"
        page.click("#deploy-run")
        page.wait("Deploy this file?", "#confirm")
        page.click("#confirm-yes")
        page.wait("Done: hello", "#deploy-told", within_s=60)
        assert deployed(system) == by_file
        page.run("document.querySelector('#deploy-text').value = arguments[0]", NOTHING)
        page.click("#deploy-plan")
        page.wait("application hello", "#deploy-changes", within_s=60)
        refuse_deletion(page)
        page.run("document.querySelector('#deploy-text').value = 'applications: 3'")
        page.click("#deploy-plan")
        page.wait("body.yaml:1:1: applications=3: must be", "#deploy-told", within_s=60)
        assert page.errors() == []
    finally:
        page.close()


@pytest.mark.parametrize(
    ("body", "query", "kind", "status", "message"),
    [
        ("{", "", "", 400, "the body is no JSON document"),
        (b"\xff", "", "", 400, "the body is no JSON document"),
        ("a: [", "", "application/yaml", 400, "body.yaml:1:5: not YAML"),
        ("[]", "", "", 400, "must be"),
        ('{"applications": 3}', "", "", 400, "body.json:1:2: applications=3: must be"),
        ("applications:\n- nam: x\n", "", "text/yaml", 400, "body.yaml:2:3: "),
        ('{"aplications": []}', "", "", 400, "did you mean applications?"),
        ('{"applications": [], "applications": []}', "", "", 400, "stands twice"),
        ("{}", "?plam=true", "", 400, "plam"),
        ("{}", "?plan=perhaps", "", 400, "plan='perhaps': must be"),
        ("{}", "?canary=much", "", 400, "'much': expected shares"),
        ("{}", "?canary=2", "", 400, "must be at most"),
        ("{}", "?abort_if=difference_rate=0", "", 400, "abort_if: must come with canary"),
        ("{}", "?canary=0.1&abort_if=p99=1", "", 400, "['p99']: no such rule; there are: error_r"),
        ("{}", "?canary=0.1&abort_if=difference_rate=0", "", 400, "must come with compare"),
        ("{}", "?canary=0.1&ignore=id", "", 400, "'id' is no JSON pointer"),
        ("{}", "?canary=0.1&min_samples=0", "", 400, "min_samples=0: must be greater"),
        (NOTHING, "?if_version=999", "", 409, "999"),
        ("{}", "", "text/html", 415, "text/html"),
        ('{"applications": [{"import_path": "no_such:app"}]}', "", "", 400, "no_such"),
        ('{"applications": [{"import_path": "${SECRET}"}]}', "", "", 400, "SECRET is not set"),
    ],
)
def test_a_bad_document_is_refused_by_name(system, token, body, query, kind, status, message):
    before = state(system)
    answer = put(system, token, body, query, kind)
    problem = answer.json
    assert (answer.status, problem["status"]) == (status, status), problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"urn:greenroom:problem:{problem['title']}"
    assert message in problem["detail"]
    assert state(system) == before


def test_who_made_a_token_is_in_the_history(system, token):
    system.greenroom("token", "create", "brief", "--role", "viewer", "--expires", "1h")
    system.greenroom("token", "revoke", "brief")
    output = [line for line in system.greenroom("history").stdout.splitlines() if "'brief'" in line]
    assert "create token 'brief' with the role viewer" in output[0]
    assert "revoke token 'brief'" in output[1]
    undone = system.greenroom("undo")
    assert undone.returncode == 1
    assert "changed no definition" in undone.stderr
