"""``greenroom deploy FILE``, ``build`` and ``schema``, over a controller in this process."""

import json
from types import SimpleNamespace

import pytest

from greenroom.serve.admin import applications
from greenroom.serve.cli import deploying
from tests.serve.conftest import SOURCE

TWO = """
applications:
- {name: a, route_prefix: /a, import_path: "filed:build", args: {pw: "${PW}"}}
- {name: b, route_prefix: /b, import_path: "filed:app"}
"""


@pytest.fixture(autouse=True)
def _filed(running, app_dir, monkeypatch):
    (app_dir / "filed.py").write_text(SOURCE)
    (app_dir / "two.yaml").write_text(TWO)
    monkeypatch.setenv("PW", "secret")


def test_options_that_the_system_runs_without_are_reported(invoke, system, app_dir):
    with (app_dir / "two.yaml").open("a") as file:
        file.write("http_options: {port: 8001, root_path: /x y, keep_alive_timeout_s: 5}\n")
        file.write("grpc_options: {port: 9001, grpc_servicer_functions: [m.add]}\n")
    system.environ = {"GREENROOM_HTTP_PORT": "8000", "GREENROOM_HTTP_KEEP_ALIVE_TIMEOUT_S": "5.0"}
    result = invoke("deploy", "two.yaml")
    found = (
        'grpc_port is not set, not 9001; grpc_servicer_functions is not set, not ["m.add"]; '
        "http_port is 8000, not 8001; http_root_path is not set, not /x y. To change them, stop"
    )
    taken = "options of the file are not taken, for the system runs already: "
    assert taken + found in result.stderr
    system.environ = {"GREENROOM_HTTP_PORT": "8001", "GREENROOM_HTTP_KEEP_ALIVE_TIMEOUT_S": "5.0"}
    with (app_dir / "two.yaml").open("w") as file:
        file.write(TWO + "http_options: {port: 8001, keep_alive_timeout_s: 5}\n")
    assert "options" not in invoke("deploy", "two.yaml").output


def test_a_file_leaves_what_a_command_deployed(invoke, running):
    invoke("deploy", "filed:app", "--name", "old")
    invoke("deploy", "two.yaml")
    assert set(running.controller.applications) == {"old", "a", "b"}


def test_a_file_that_prunes_is_what_there_is(invoke, running):
    invoke("deploy", "filed:app", "--name", "old")
    assert invoke("deploy", "two.yaml", "--prune").stdout.splitlines() == [
        "deleted 'old'",
        "deployed 'a' at /a",
        "deployed 'b' at /b",
    ]
    assert running.controller.instances["a#Model"]() == {"pw": "secret"}
    assert set(running.controller.applications) == {"a", "b"}


def test_the_same_file_again_changes_nothing(invoke):
    invoke("deploy", "two.yaml")
    assert invoke("deploy", "two.yaml", "--timeout", "5").stdout == "no change (version 1)\n"


@pytest.mark.parametrize("silent", ["ListMissing", "DeployApplications", "PlanApplications"])
def test_the_time_limit_holds_where_no_controller_takes_the_change(invoke, running, silent):
    running.controller.silent = {silent}
    what = (
        ["two.yaml", "--plan"] if silent.startswith("Plan") else ["filed:app", "--working-dir", "."]
    )
    assert "within 5 s" in invoke("deploy", *what, "--timeout", "5", code=1).stderr


def test_the_time_limit_is_one_for_all_requests_of_a_change(invoke, running, monkeypatch):
    now, answer = 100.0, running.controller.answer

    def take_2_s(operation):
        nonlocal now
        now += 2
        return answer(operation)

    monkeypatch.setattr(applications, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(running.controller, "answer", take_2_s)
    running.controller.silent = {"DeployApplications"}
    what = ["filed:app", "--working-dir", "."]  # its folder may be there, which is asked before
    assert "within 3 s" in invoke("deploy", *what, "--timeout", "5", code=1).stderr
    assert "within 0.1 s" in invoke("deploy", *what, "--timeout", "1", code=1).stderr


def test_others_can_be_kept_and_the_version_is_asked_for(invoke, running):
    invoke("deploy", "filed:app", "--name", "old")
    invoke("deploy", "two.yaml", "--keep-others", "--if-version", "1")
    (asked,) = running.controller.of("DeployApplications")[1:]
    assert (asked.keep_others, asked.if_version) == (True, 1)
    assert set(running.controller.applications) == {"old", "a", "b"}


def test_a_plan_changes_nothing_and_its_exit_code_is_2_for_changes(invoke, running):
    assert invoke("deploy", "two.yaml", "--plan", code=3).stdout.splitlines() == [
        "+ application a: route_prefix /a",
        "+ backend a#Model: num_replicas 1",
        '+ endpoint a#Model: route /a; traffic {"a#Model": 1.0}',
        "+ application b: route_prefix /b",
        "+ backend b#Model: num_replicas 1",
        '+ endpoint b#Model: route /b; traffic {"b#Model": 1.0}',
        "deploying two.yaml; nothing was changed yet (version 0)",
    ]
    assert running.controller.applications == {}
    invoke("deploy", "two.yaml")
    shown = invoke("deploy", "two.yaml", "--plan").stdout
    assert shown == "deploying two.yaml would change nothing (version 1)\n"


def test_every_application_that_fails_is_reported_and_the_others_come_up(invoke, running, app_dir):
    text = TWO + '- {name: c, route_prefix: /c, import_path: "filed:broken"}\n'
    (app_dir / "three.yaml").write_text(text)
    result = invoke("deploy", "three.yaml", code=1)
    assert "deployed 'b' at /b" in result.stdout
    assert 'raise LookupError("no weights")' in result.stderr
    assert result.stderr.endswith("Error: 'c' could not be deployed: LookupError: no weights\n")


@pytest.mark.parametrize("kind", ["FileNotFoundError", "PermissionError", "TimeoutError"])
def test_a_constructors_own_oserror_is_reported_as_any_other(invoke, running, app_dir, kind):
    (app_dir / "rude.py").write_text(
        "from greenroom import serve\n\n@serve.deployment\nclass Rude:\n    def __init__(self):\n"
        f"        raise {kind}(2, 'not mine')\n\n    def __call__(self):\n        return 1\n\n"
        "app = Rude.bind()\n"
    )
    rude = 'import_path: "rude:app"}\n'
    text = f"applications:\n- {{name: r, route_prefix: /r, {rude}- {{name: s, {rude}"
    (app_dir / "three.yaml").write_text(
        text + '- {name: b, route_prefix: /b, import_path: "filed:app"}\n'
    )
    result = invoke("deploy", "three.yaml", code=1)
    assert "deployed 'b' at /b" in result.stdout
    assert result.stderr.count(f"raise {kind}(2, 'not mine')") == 2
    message = f"could not be deployed: {kind}: [Errno 2] not mine\n"
    assert result.stderr.endswith(f"Error: 'r' {message}'s' {message}")
    assert "run this as" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["two.yaml", "--name", "x"], "--name: a configuration file says that itself"),
        (["two.yaml", "--working-dir", "."], "--working-dir: a configuration file says that"),
        (["two.yaml", "a=b"], "KEY=VALUE: a configuration file says that itself"),
        (["bad.json"], "bad.json:1:2: not JSON"),
        (["two.yaml", "--timeout", "0"], "'--timeout': 0.0 is not in the range x>0"),
        (["two.yaml", "--prune", "--keep-others"], "so it excludes prune"),
        (["two.yaml", "--canary", "x"], "canary='x': expected shares with commas between"),
        (["two.yaml", "--hold-s", "3"], "hold_s: must come with canary"),
    ],
)
def test_bad_usage_is_reported_and_deploys_nothing(invoke, running, app_dir, arguments, message):
    (app_dir / "bad.json").write_text("{")
    shown = invoke("deploy", *arguments, code=2).stderr
    assert message in shown.replace("Invalid value for ", "")
    assert running.controller.applications == {}


def test_where_the_users_module_fails_its_traceback_is_shown(invoke, app_dir):
    (app_dir / "filed.py").write_text("raise LookupError('no file')\n")
    result = invoke("deploy", "two.yaml", code=1)
    assert "raise LookupError('no file')" in result.stderr
    assert "two.yaml:3:31: applications[0].import_path: importing 'filed' failed" in result.stderr


def test_run_takes_a_file_and_starts_the_system_with_its_options(
    invoke, system, app_dir, monkeypatch
):
    system.running = False
    with (app_dir / "two.yaml").open("a") as file:
        file.write("http_options: {root_path: /x}\n")
    result = invoke("run", "two.yaml", "--non-blocking")
    assert result.stdout.splitlines() == ["deployed 'a' at /a", "deployed 'b' at /b"]
    assert system.environ["GREENROOM_HTTP_ROOT_PATH"] == "/x"
    (asked,) = system.controller.of("DeployApplications")
    assert (asked.keep_others, asked.from_file) == (True, False)
    refused = invoke("run", "two.yaml", "--name", "c", code=2)
    assert "a configuration file says that" in refused.stderr


def test_what_a_reload_adds_is_deleted_at_ctrl_c_too(invoke, running, app_dir, monkeypatch):
    def edit(_watcher):
        with (app_dir / "two.yaml").open("a") as file:
            file.write('- {name: c, route_prefix: /c, import_path: "filed:app"}\n')
        yield
        assert set(running.controller.applications) == {"a", "b", "c"}
        raise KeyboardInterrupt

    invoke("deploy", "filed:app", "--name", "b", "--route-prefix", "/b")
    monkeypatch.setattr(deploying.Watcher, "changes", edit)
    invoke("run", "two.yaml", "--reload")
    assert set(running.controller.applications) == {"b"}, "which was there before"


def test_run_of_a_file_deletes_at_ctrl_c_what_it_has_deployed(invoke, system, monkeypatch):
    def interrupt():
        assert set(system.controller.applications) == {"a", "b"}
        raise KeyboardInterrupt

    invoke("deploy", "filed:app", "--name", "b")
    monkeypatch.setattr(deploying, "_wait_for_interrupt", interrupt)
    invoke("run", "two.yaml")
    assert set(system.controller.applications) == {"b"}


def test_build_writes_a_file_that_deploys_to_the_same(invoke, running, app_dir):
    invoke("deploy", "filed:app")
    result = invoke("build", "filed:app", "-o", "made.yaml")
    assert result.stdout == "wrote made.yaml; deploy it with: greenroom deploy made.yaml\n"
    changed, _ = invoke("deploy", "made.yaml", "--plan", code=3).stdout.splitlines()
    assert changed == "~ application default: from_file false -> true", "and nothing else"
    for out, problem in (("made.yaml", "made.yaml: it exists"), ("no/x", "there is no folder no")):
        assert problem in invoke("build", "filed:app", "-o", out, code=2).stderr
    assert invoke("build", "filed:app").stdout == (app_dir / "made.yaml").read_text()


def test_the_schema_is_json(invoke):
    schema = json.loads(invoke("schema").stdout)
    assert schema["required"] == ["applications"]


def test_a_canary_is_asked_for_with_its_steps_and_rules(invoke, running):
    arguments = "--canary 0.05 --compare json --hold-s 9 --abort-if error_rate=0.1"
    invoke("deploy", "two.yaml", *arguments.split())
    canary = running.controller.of("DeployApplications")[0].canary
    assert (canary.steps, canary.hold_s) == ((0.05, 0.1, 0.5, 1.0), 9.0)
    assert (canary.abort_if, canary.compare.how) == ({"error_rate": 0.1}, "json")
    invoke("deploy", "filed:app", "--canary", "0.2,1", "--min-samples", "7")
    canary = running.controller.of("DeployApplications")[1].canary
    assert (canary.steps, canary.min_samples, canary.compare) == ((0.2, 1.0), 7, None)
    ignored = ("--ignore", "/id", "--ignore", "/items/*/at")
    invoke("deploy", "two.yaml", "--canary", "0.5", "--tolerance", "0.01", *ignored)
    compare = running.controller.of("DeployApplications")[2].canary.compare
    assert (compare.how, compare.relative_tolerance) == ("json", 0.01)
    assert compare.ignore == ("/id", "/items/*/at")
