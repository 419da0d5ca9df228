"""The dashboard in a real browser, on a real system: what it shows, and what it changes."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest

from greenroom import serve
from tests.support.browser import Browser
from tests.support.systems import patched_environ, running_system

pytestmark = pytest.mark.slow

NASTY = "<img src=x onerror=document.title='run'>"
VIEWS = ("overview", "deploy", "rollouts", "autoscaling", "history", "logs")


def old() -> dict[str, str]:
    return {"answer": NASTY}


def new() -> dict[str, int]:
    return {"answer": 42}


@serve.deployment(autoscaling_config={"min_replicas": 1, "max_replicas": 2})
def scaled() -> str:
    print(NASTY)
    return "ok"


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """A system with an application, a rollout under way, and a mirrored endpoint."""
    with running_system(tmp_path_factory.mktemp("system")) as running:
        running.deploy(scaled.bind(), name="shop", route_prefix="/shop")
        with patched_environ(running.environ), serve.Client.connect() as client:
            client.wait_for_goal(client.create_backend("old", old))
            client.wait_for_goal(client.create_backend("new", new))
            client.create_endpoint("mirrored", backend="old", route="/mirrored")
            client.shadow_traffic("mirrored", "new", 1.0, compare="json")
            client.create_endpoint("moving", backend="old", route="/moving")
            client.rollout("moving", to="new", steps=[0.25, 1])
        for path in ("/shop", "/mirrored", "/moving") * 5:
            assert running.get(path)[0] == 200
        yield running


@pytest.fixture(scope="module")
def tokens(system):
    roles = ("viewer", "deployer")
    made = {role: system.greenroom("token", "create", role, "--role", role) for role in roles}
    return {role: each.stdout.strip() for role, each in made.items()}


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page(window, system):
    """The dashboard in a new tab's state: without a token."""
    window.show(1280, 900)
    window.open(f"{system.url}/-/dashboard")
    window.run("location.hash = ''; location.reload()")
    yield window
    assert window.errors() == []


def sign_in(page: Browser, token: str, name: str) -> None:
    page.wait("Every application that has run can serve", "#public")
    page.click("#sign")
    page.type("#token", token)
    page.click("#token-ok")
    page.wait(name, "#who")


def go(page: Browser, view: str) -> None:
    page.click(f"nav a[href='#{view}']")


def test_without_a_token_it_shows_what_the_pages_do(page):
    page.wait("Every application that has run can serve")
    page.wait("/mirrored", "#public")
    assert "greenroom token create" in page.text("#locked")
    assert not page.run("return document.querySelector('nav').checkVisibility()")


def test_a_token_that_is_none_is_reported_and_not_kept(page):
    page.click("#sign")
    page.type("#token", "nonsense")
    page.click("#token-ok")
    page.wait("the token is unknown", "#token-problem")
    page.click("#token-cancel")


def test_a_viewer_sees_all_and_changes_nothing(page, tokens):
    sign_in(page, tokens["viewer"], "viewer")
    page.wait("shop", "#overview")
    for found in ("scaled", "/shop", "mirrored to new 100 %", "Hosts", "controller"):
        page.wait(found, "#overview")
    page.click("[data-key='deployment shop#scaled']")
    page.wait("shop#scaled#", "#overview")  # its replica
    page.wait("Queries and replicas", "#overview")
    go(page, "rollouts")
    page.wait("to new", "#rollouts")
    page.wait("error rate increase", "#rollouts")
    page.wait("/answer", "#rollouts")
    go(page, "autoscaling")
    page.wait("1 run, 1 wanted, 1 to 2", "#autoscaling")
    go(page, "history")
    page.wait("start rollout 'moving'", "#history")
    buttons = page.run(
        "return [...document.querySelectorAll('#history td.num button')].map(b => b.disabled)"
    )
    assert buttons
    assert all(buttons)
    go(page, "logs")
    page.wait("autoscaling", "#lines")


def test_what_users_write_is_text(page, tokens):
    sign_in(page, tokens["viewer"], "viewer")
    go(page, "rollouts")
    page.click("#rollouts [aria-expanded='false']")
    page.wait(NASTY, "#rollouts")
    assert page.run("return document.title") == "Rollouts · Greenroom"
    assert page.run("return document.querySelectorAll('main img').length") == 0


def test_a_log_follows_and_is_filtered(page, tokens, system):
    sign_in(page, tokens["viewer"], "viewer")
    go(page, "logs")
    page.wait("change 1 ", "#lines")
    system.greenroom("token", "create", "other", "--role", "viewer")
    with patched_environ(system.environ), serve.Client.connect() as client:
        client.create_endpoint("appears", backend="old")
    page.wait("create endpoint 'appears'", "#lines")
    page.type("#filter", "APPEARS")
    page.wait_for(
        lambda: all("appears" in line for line in page.text("#lines").splitlines()),
        "only lines with it are shown",
    )


def test_a_change_asks_first_and_names_its_author(page, tokens, system):
    sign_in(page, tokens["deployer"], "deployer")
    go(page, "rollouts")
    page.click("[data-key='abort moving']")
    page.wait("End the rollout of moving?", "#confirm")
    page.click("#confirm-no")
    assert system.status()["rollouts"]["moving"]["state"] == "under way"
    page.click("[data-key='abort moving']")
    page.click("#confirm-yes")
    page.wait("went back", "#rollouts")
    assert system.status()["rollouts"]["moving"]["state"] == "went back"
    go(page, "overview")
    page.click("[data-key='delete shop']")
    page.click("#confirm-yes")
    page.wait_for(lambda: "shop" not in system.status()["applications"], "it is deleted")
    go(page, "history")
    page.wait("delete application 'shop'", "#history")
    page.wait("token deployer", "#history")
    undo = page.run("return document.querySelector('#history td.num button').dataset.key")
    page.click(f"[data-key='{undo}']")
    page.click("#confirm-yes")
    page.wait("undo change", "#history")
    page.wait_for(lambda: system.get("/shop")[0] == 200, "it serves again")


def test_a_rollout_is_started_promoted_and_undone(page, tokens, system):
    with patched_environ(system.environ), serve.Client.connect() as client:
        client.create_endpoint("formed", backend="old", route="/formed")
    sign_in(page, tokens["deployer"], "deployer")
    go(page, "rollouts")
    page.wait("formed", "#start-endpoint")

    def start(steps: str) -> None:
        for name, value in (("endpoint", "formed"), ("to", "new"), ("steps", steps)):
            page.run(f"document.querySelector('#start-{name}').value = arguments[0]", value)
        page.click("#start-run")

    start("0.5, 0.2, 1")
    page.wait("It gets 50 %, then 20 %, then 100 %", "#confirm")
    page.click("#confirm-yes")
    page.wait("that grow and end with 1", "#notice")
    start("0.5, 1")
    page.click("#confirm-no")
    assert "formed" not in system.status()["rollouts"]
    start("0.5, 1")
    page.click("#confirm-yes")
    page.wait_for(lambda: "formed" in system.status()["rollouts"], "it is under way")
    page.wait_for(lambda: page.run("return document.querySelector('#notice').hidden"), "no notice")
    page.click("[data-key='promote formed']")
    page.wait("Give new all traffic of formed?", "#confirm")
    page.click("#confirm-yes")
    # Not by an answer of the new one, which gets half of the traffic before that, too.
    state = lambda: system.status()["rollouts"]["formed"]["state"]  # noqa: E731
    page.wait_for(lambda: state() == "promoted", "it is promoted")
    page.wait_for(lambda: system.get("/formed") == (200, b'{"answer":42}'), "its answer")
    go(page, "history")
    page.wait("promote rollout 'formed'", "#history")
    undo = page.run("return document.querySelector('#history td.num button').dataset.key")
    page.click(f"[data-key='{undo}']")
    page.wait("promote rollout 'formed'", "#confirm")
    page.click("#confirm-yes")
    page.wait_for(lambda: system.get("/formed")[1] != b'{"answer":42}', "it is undone")


def test_a_replica_leads_to_its_log(page, tokens, system):
    sign_in(page, tokens["viewer"], "viewer")
    page.click("[data-key='deployment shop#scaled']")
    page.click("[data-key^='log shop#scaled#']")
    page.wait(NASTY, "#lines")
    chosen = page.run("return document.querySelector('#log').selectedOptions[0].text")
    assert chosen.startswith("shop#scaled#")
    (host,) = system.status()["hosts"]
    assert page.run("return document.querySelector('#log-host').value") == host["name"]


def test_a_token_is_in_memory_alone(page, tokens):
    sign_in(page, tokens["viewer"], "viewer")
    kept = "return sessionStorage.length + localStorage.length + document.cookie.length"
    assert page.run(kept) == 0


def test_a_page_of_an_application_cannot_have_a_service_worker(window, system):
    window.open(f"{system.url}/shop")
    found = window.run(
        "return navigator.serviceWorker.register('/shop/sw.js').then(() => 'taken', String)"
    )
    assert "403" in found
    window.errors()  # the browser's own of that


def test_a_revoked_token_is_forgotten(page, tokens, system):
    made = system.greenroom("token", "create", "brief", "--role", "viewer").stdout.strip()
    sign_in(page, made, "brief")
    system.greenroom("token", "revoke", "brief")
    page.wait("unknown, expired or revoked", "#notice")
    assert page.text("#overview") == ""


def test_a_server_that_does_not_answer_greys_it_out_until_it_answers_or_the_token_is_forgotten(
    page, tokens
):
    def is_grey() -> bool:
        return bool(page.run("return document.body.matches('.stale')"))

    sign_in(page, tokens["viewer"], "viewer")
    page.wait("shop", "#overview")
    page.run("window.fetched = window.fetch")
    for forgets in (False, True):
        page.run("window.fetch = () => Promise.reject(new TypeError())")
        page.wait("Cannot read the state since ", "#notice")
        assert is_grey()
        page.run("window.fetch = window.fetched")
        if forgets:
            page.click("#sign")
            page.wait("Every application that has run can serve", "#public")
        else:
            page.wait("healthy", "#health")
        page.wait_for(lambda: not is_grey(), "it is grey no more")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_no_view_is_wider_than_the_window(page, tokens, width, scheme):
    page.show(width, 900, scheme)
    sign_in(page, tokens["viewer"], "viewer")
    page.wait("Hosts", "#overview")
    for view in VIEWS:
        go(page, view)
        page.wait_for(lambda view=view: page.text(f"#{view}"), f"{view} is there")
        assert page.run("return document.documentElement.scrollWidth") <= width
    dark = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(13, 17, 16)") == (scheme == "dark")


def test_it_is_operated_by_keys_and_named_for_readers(page, tokens):
    sign_in(page, tokens["viewer"], "viewer")
    page.wait("Hosts", "#overview")
    unnamed = page.run(
        "return [...document.querySelectorAll('button, select, input, svg:not([aria-hidden])')]"
        ".filter(e => e.closest('dialog') === null || e.closest('dialog').open)"
        ".filter(e => !(e.innerText || e.getAttribute('aria-label') || e.labels?.length))"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []
    key = "deployment shop#scaled"
    page.run(f"document.querySelector(\"[data-key='{key}']\").focus()")
    time.sleep(3)  # for a refresh, which makes the row anew
    assert page.run("return document.activeElement.dataset.key") == key


def test_its_policy_keeps_everything_else_out(system, page):
    with urllib.request.urlopen(f"{system.url}/-/dashboard", timeout=10) as answer:
        policy = answer.headers["content-security-policy"]
        html = answer.read().decode()
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http:" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in html
    page.wait("Every application that has run can serve")
    page.run(
        "try { const made = document.createElement('script');"
        "made.textContent = 'document.title = 1';"
        "document.head.append(made); } catch {}"
    )
    assert page.run("return document.title") == "Greenroom"
    assert any("TrustedScript" in each for each in page.errors())


def test_it_is_a_file_of_the_package():
    folder = Path(serve.__file__).parent.parent / "http_front" / "admin"
    html = (folder / "dashboard.html").read_text()
    assert html.count("<script>") == html.count("<style>") == 1
    assert "innerHTML" not in html
    assert json.dumps(html).count("eval(") == 0
