import contextlib
import errno
import importlib.metadata
import json
import logging
import os
import shlex
import sys
import threading
import time
import types

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from greenroom import serve
from greenroom.actors.runtime.settings import FIELDS
from greenroom.core.errors import ConflictError
from greenroom.persistence.locations import location_at
from greenroom.serve.cli import commands, deploying, display, starting
from greenroom.serve.cli.main import main
from greenroom.serve.exceptions import StartError
from tests.serve.conftest import SOURCE
from tests.support.programs import python


@pytest.fixture(autouse=True)
def _demo(app_dir):
    (app_dir / "demo.py").write_text(SOURCE)


@pytest.fixture
def logs(tmp_path):
    """Return the folder of the system's logs."""
    folder = tmp_path / "state" / "logs"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def interrupted(monkeypatch):
    """Have a run that would last until Ctrl-C get one at once."""

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(deploying, "_wait_for_interrupt", interrupt)


IMPORTED = """
import os, sys
from greenroom.serve.cli.main import main

def run(*words):
    try:
        main(words, prog_name="greenroom")
    except SystemExit as end:
        assert not end.code

for word in ("--help", "-h", "--version"):
    run(word)
os.environ |= {"COMP_WORDS": "greenroom s", "COMP_CWORD": "1"}
os.environ["_GREENROOM_COMPLETE"] = "bash_complete"
run()
heavy = ("pydantic", "rich", "thespian", "cloudpickle", "asyncio", "starlette", "psutil")
print([name for name in heavy if name in sys.modules])
"""


def test_help_and_completion_import_nothing_heavy():
    shown = python("-c", IMPORTED)
    assert shown.splitlines()[-1] == "[]"
    assert "start its system" in shown
    assert "plain,status" in shown


def test_commands_that_deploy_import_what_reads_yaml_for_files_alone():
    code = "import sys, greenroom.serve.cli.deploying; print('yaml' in sys.modules)"
    assert python("-c", code).split() == ["False"]


def test_names_of_commands_complete_by_tab():
    complete = ShellComplete(main, {}, "greenroom", "_GREENROOM_COMPLETE").get_completions
    found = {each.value: each.help for each in complete([], "st")}
    assert sorted(found) == ["start", "status", "stop", "store"]
    assert found["start"] == "start its system"
    assert [each.value for each in complete([], "--ver")] == ["--version"]
    assert complete([], "shutd") == []


def test_the_version_is_the_installed_one_everywhere():
    installed = importlib.metadata.version("greenroom")
    assert serve.__version__ == installed
    assert CliRunner().invoke(main, ["--version"]).output.split()[-1] == installed


def test_start_starts_once(invoke, system):
    first = invoke("start", "--http-port", "9000", "--admin-port", "1901", "--state-dir", "here")
    assert "started: HTTP at 127.0.0.1:9000, state in " in first.output
    assert (system.settings.http.port, system.settings.admin_port) == (9000, 1901)
    assert system.settings.state_dir.name == "here"
    assert invoke("start").output == "already running\n"


@pytest.mark.parametrize(
    ("flag", "same", "other"),
    [
        ("--http-port", "9000", "9001"),
        ("--http-middlewares-dir", ".", "/"),
        ("--http-max-body-bytes", "none", "6"),
        ("--http-keep-alive-timeout-s", "5.0", "6"),
        ("--bind", "10.0.0.2", "10.0.0.3"),
        ("--resources", "a=1,zone=x", "a=1,zone=y"),
    ],
)
def test_start_with_other_flags_than_those_of_a_system_that_runs_fails(
    invoke, system, flag, same, other
):
    invoke("start", flag, same)
    for arguments in (["start"], ["start", flag, same]):
        assert invoke(*arguments).output == "already running\n"
    for arguments in (["start", flag, other], ["run", "demo", "--non-blocking", flag, other]):
        result = invoke(*arguments, code=1)
        name = flag[2:].replace("-", "_")
        assert f"already running with other settings: {name} is " in result.stderr
        assert "stop it first with `greenroom stop`" in result.stderr
    assert system.running


def test_the_environment_counts_as_what_start_was_asked_for(invoke, system, monkeypatch):
    invoke("start", "--http-port", "9000")
    monkeypatch.setenv("GREENROOM_HTTP_PORT", "9001")
    assert "http_port is 9000, not 9001 as asked for" in invoke("start", code=1).stderr
    invoke("start", "--http-port", "9000")


def test_start_says_what_stood_in_the_way(invoke, system):
    system.start_error = StartError("port 8000 is taken by process 7")
    assert invoke("start", code=1).stderr == "Error: port 8000 is taken by process 7\n"


def test_what_belongs_to_another_user_is_an_error_that_says_so(invoke, monkeypatch, tmp_path):
    theirs = tmp_path / "status.json"

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(theirs))

    monkeypatch.setattr(starting.system, "stop", refuse)
    assert f"{str(theirs)!r}; user {os.geteuid()} may not do that" in invoke("stop", code=1).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "no such command: 'nonsense'\n"),
        ("stauts", "no such command: 'stauts'; did you mean status?"),
        ("logs -n -1", "-1 is not in the range"),
        ("status demo --autoscaling", "--autoscaling shows all backends, once"),
        ("rollout shop --to ''", "to=''"),
        (
            "deploy --working-dir /nowhere mine",
            "'--working-dir': Directory '/nowhere' does not exist",
        ),
        ("start --http-port x", "port='x'"),
        ("start --http-port 99999", "port='99999'"),
        ("start --http-request-timeout-s 0", "request_timeout_s='0'"),
        ("start --http-max-body-bytes much", "max_body_bytes='much'"),
        ("start --http-workers 65", "workers='65'"),
        ("start --bind 0.0.0.0", "bind='0.0.0.0'"),
        ("start --bind 10.0.0.1 --advertise 0.0.0.0", "advertise='0.0.0.0'"),
        ("start --advertise 192.0.2.1", "with --bind"),
        ("start --no-replicas --num-cpus 2", "no_replicas=True: a host without replicas has no"),
        ("start --join leader:1900", "--bind"),
        ("run demo size", "'size': expected key=value"),
        ("run demo --route-prefix x", "route_prefix='x': must start with '/'"),
        ("run demo --name ''", "name='': expected a name of one character or more"),
        ("run demo --name a#b", "name='a#b': expected a name without '#'"),
        ("run config.yaml", "config.yaml: cannot be read: No such file"),
        ("run demo --reload --non-blocking", "--reload watches until Ctrl-C"),
        ("ask evict_hots", "no operation is named 'evict_hots'; there are: abort_rollout, "),
        ("ask evict_host", "evict_host: host: must be given"),
        ("ask evict_host '{'", "evict_host: Invalid JSON"),
        ("deploy demo --canary", "'--canary' requires an argument"),
        ("deploy demo --if-version", "'--if-version' requires an argument"),
        ("deploy demo --canary 0.1 --hold-s -1", "hold_s=-1"),
        ("deploy demo --timeout nan", "'--timeout': 'nan' is not a finite number"),
        ("rollout shop --to v2 --hold-s -1", "hold_s=-1"),
        ("rollout shop --to v2 --max-different 1", "'--max-different': 1.0 is not in the range"),
        ("record shop --sample 1.5", "'--sample': 1.5 is not in the range 0<x<=1"),
        ("record shop --sample nan", "'--sample': 'nan' is not a finite number"),
        ("record shop --max-mb nan", "'--max-mb': 'nan' is not a finite number"),
        ("record shop --max-mb 0", "'--max-mb': 0.0 is not in the range x>=0.001"),
        ("record shop --seconds -1", "'--seconds': -1.0 is not in the range x>0"),
        ("record shop no/shop.jsonl", "'no/shop.jsonl': there is no folder no; make it"),
        ("replay demo.py --to v2 --compare no", "compare='no': must be 'status' or 'json'"),
        ("replay demo.py --to v2 --ignore id", "JSON pointer"),
        ("replay demo.py --to v2 --speed 0", "'--speed': 0.0 is not in the range x>0"),
        ("backup no/state", "'no/state': there is no folder no; make it"),
        ("keygen no/cluster.key", "'no/cluster.key': there is no folder no; make it"),
        ("undo soon", "'soon' is not a valid integer"),
        ("history -n 0", "0 is not in the range"),
        ("token create --role root", "'viewer', 'deployer', 'admin'"),
        *(
            (f"token create --role viewer --expires '{time}'", "hours, days or weeks, such as 12h")
            for time in ("", "30", "0d", "-1d", "1y", "99999d", "nan")
        ),
        ("up hosts.yaml", "Error: wheels: there is no folder"),
        ("up no.yaml", "File 'no.yaml' does not exist"),
        ("up hosts.yaml --timeout 0", "0.0 is not in the range x>0"),
        ("down hosts.yaml --delete", "all that one, two have is deleted"),
    ],
)
def test_bad_usage_is_reported_with_the_value_before_anything_starts(
    invoke, system, app_dir, arguments, message
):
    hosts = "wheels: wheels\nhosts: {one: {address: 10.0.0.1}, two: {address: 10.0.0.2}}\n"
    (app_dir / "hosts.yaml").write_text(hosts)
    assert message in invoke(*shlex.split(arguments), code=2).stderr
    assert system.calls == []


def test_a_bad_variable_is_an_error_of_usage(invoke, monkeypatch):
    monkeypatch.setenv("GREENROOM_ADMIN_PORT", "many")
    assert "admin_port='many'" in invoke("status", code=2).stderr


def test_every_setting_is_a_flag_of_start():
    shown = CliRunner().invoke(main, ["start", "--help"]).stdout
    for name in FIELDS.keys() - {"address"}:
        assert f"--{name.replace('_', '-')} " in shown


def test_start_in_the_foreground_prints_events_and_stops_what_it_started(
    invoke, system, monkeypatch
):
    def interrupt(settings, _notify):
        settings.logs_dir.mkdir(parents=True, exist_ok=True)
        with (settings.logs_dir / "host.log").open("a") as log:
            log.write("2026-01-31 14:00:00,393 77 INFO said\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(starting, "_wait_while_running", interrupt)
    monkeypatch.setenv("GREENROOM_LOG_FORMAT", "json")
    printed = invoke("start", "--block").stdout.splitlines()
    started, *between, stopped = [json.loads(line)["message"] for line in printed]
    assert started.startswith("started: HTTP at ")
    assert sorted(between) == ["said", "stopping"]
    assert stopped.startswith("stopped; ")
    assert system.calls == ["start", "stop"]
    system.running = True
    invoke("start", "--block")
    assert system.calls == ["start", "stop", "start"]


def test_start_in_the_foreground_stops_what_it_started_though_nothing_reads_its_events(
    invoke, system, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    kept = []  # older releases of click read it afterwards, and it closes when nothing holds it

    def end(*_, **__):
        kept.append(sys.stdout)
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")  # Ctrl-C has ended what it is piped to

    monkeypatch.setattr(starting, "_wait_while_running", interrupt)
    monkeypatch.setattr(click, "echo", end)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    invoke("start", "--block")
    assert system.calls == ["start", "stop"]


def test_start_says_that_traces_are_asked_for_and_cannot_be_made(invoke, system, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert "OTEL_TRACES_EXPORTER='zipkin': must be" in invoke("start").stderr


def test_start_in_the_foreground_ends_with_the_system(invoke, system, monkeypatch):
    monkeypatch.setattr(starting, "TICK_S", 0)
    start = system.start

    def dies(settings, **options):
        start(settings, **options)
        system.running = False
        return True

    monkeypatch.setattr(starting.system, "start", dies)
    assert "the system has ended" in invoke("start", "--block", code=1).stderr


def test_run_undoes_what_it_started_at_ctrl_c(invoke, system, interrupted):
    result = invoke("run", "demo", "--name", "a", "--route-prefix", "/x")
    assert "deployed 'a' at /x" in result.stdout
    assert system.calls == ["start", "stop"]
    assert system.controller.of("DeployApplications")[0].applications[0].route_prefix == "/x"
    assert system.controller.applications == {}


def test_run_leaves_a_system_and_an_application_that_were_there(invoke, running, interrupted):
    invoke("run", "demo")
    assert running.calls == ["start"]
    assert running.controller.applications == {}
    invoke("deploy", "demo")
    invoke("run", "demo")
    assert set(running.controller.applications) == {"default"}


def test_run_without_blocking_leaves_it_running(invoke, system):
    system.controller.shown["hosts"] = [{"front": {"url": "http://127.0.0.1:8000"}}]
    result = invoke("run", "demo:build", "size=3", "--non-blocking", "--route-prefix", "none")
    assert "deployed 'default' without a route" in result.stdout
    assert system.calls == ["start"]
    assert system.controller.instances["default#Model"]() == {"size": "3"}
    assert "at http://127.0.0.1:8000/" in invoke("run", "demo", "--non-blocking").stdout


def test_run_stops_what_it_started_when_the_import_fails(invoke, system, app_dir):
    (app_dir / "bad.py").write_text("raise LookupError('no file')\n")
    result = invoke("run", "bad", code=1)
    assert "raise LookupError('no file')" in result.stderr
    assert result.stderr.endswith("Error: importing 'bad' failed: LookupError: no file\n")
    assert system.calls == ["start", "stop"]


def test_run_of_a_module_that_is_not_there_starts_nothing(invoke, system):
    assert "did you mean demo?" in invoke("run", "dmeo", code=1).stderr
    assert system.calls == []


def test_run_reports_a_failed_start_and_a_failed_constructor(invoke, system):
    result = invoke("run", "demo:broken", code=1)
    assert 'raise LookupError("no weights")' in result.stderr
    assert "Error: 'default' could not be deployed: LookupError: no weights" in result.stderr
    assert system.calls == ["start", "stop"]
    system.start_error = StartError("port 8000 is taken")
    assert invoke("run", "demo", code=1).stderr == "Error: port 8000 is taken\n"


def test_run_never_starts_a_system_elsewhere(invoke, system):
    result = invoke("run", "demo", "--address", "127.0.0.1:1911", code=1)
    assert "no system answers" in result.stderr
    assert system.calls == []


def test_run_prints_the_logs_of_its_replicas(invoke, system, monkeypatch, logs):
    (logs / "replica-default#Model.log").write_text("before\n")

    def serve_for_a_while():
        (logs / "replica-default#Model.log").write_text("before\nanswered\n")
        (logs / "replica-other#Model.log").write_text("elsewhere\n")

    monkeypatch.setattr(deploying, "_wait_for_interrupt", serve_for_a_while)
    result = invoke("run", "demo")
    assert "default#Model | answered\n" in result.stdout
    assert "before" not in result.stdout
    assert "elsewhere" not in result.stdout


def test_reload_deploys_again_and_keeps_the_old_when_the_new_is_broken(
    invoke, system, app_dir, monkeypatch
):
    def edit_twice(self):
        (app_dir / "demo.py").write_text(SOURCE.replace("bind(1)", "bind(2)"))
        yield
        assert system.controller.instances["default#Model"]() == 2
        (app_dir / "demo.py").write_text("def broken(:")
        yield
        assert system.controller.instances["default#Model"]() == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(deploying.Watcher, "changes", edit_twice)
    result = invoke("run", "demo", "--reload")
    assert result.stdout.count("files have changed; deploying again") == 2
    assert "SyntaxError" in result.stderr
    assert "the earlier version serves on" in result.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_a_command_leaves_the_logging_of_its_process_as_it_was(invoke, request, caplog, is_there):
    request.getfixturevalue("running" if is_there else "system")
    name = "greenroom.actors.transport.admission"
    caplog.set_level(logging.INFO, logger=name)
    invoke("deploy", "demo", code=0 if is_there else 1)
    assert logging.getLogger(name).level == logging.INFO


def test_deploy_needs_a_system_that_runs(invoke, system):
    result = invoke("deploy", "demo", code=1)
    assert result.stderr.count("\n") == 1
    assert "start one with greenroom start" in result.stderr
    system.running = True
    assert (
        "deployed 'b' at /b"
        in invoke("deploy", "demo", "--name", "b", "--route-prefix", "/b", "--app-dir", ".").stdout
    )


def test_deploy_finds_modules_in_the_app_dir_only_when_asked(
    invoke, running, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert f"no module named 'demo' in {tmp_path}" in invoke("deploy", "demo", code=1).stderr
    invoke("deploy", "demo", "--app-dir", "app")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("deploy demo --name b --route-prefix /b", "deploying"),
        ("delete default", "deleting 'default'"),
        ("undo", "undoing change 1"),
        ("rollout e --to v2 --wait", "rolling out 'v2' at 'e'"),
    ],
)
def test_a_command_that_is_interrupted_says_that_the_change_goes_on(
    invoke, running, arguments, what
):
    invoke("deploy", "demo")
    if arguments.startswith("rollout"):
        with serve.Client.connect() as client:
            for tag in ("v1", "v2"):
                client.create_backend(tag, len)
            client.create_endpoint("e", backend="v1")
    running.controller.failing["WaitForGoal"] = KeyboardInterrupt()
    shown = invoke(*arguments.split(), code=1).stderr
    assert f"{what} goes on; `greenroom status` shows how far it is" in shown


def test_the_flags_of_a_rollout_are_its_settings(invoke, running):
    with serve.Client.connect() as client:
        for tag in ("v1", "v2"):
            client.create_backend(tag, len)
        client.create_endpoint("e", backend="v1")
    flags = "--to v2 --steps 0.2,1 --hold-s 9 --alpha 0.1 --min-samples 5 --ready-timeout-s 3"
    invoke("rollout", "e", *flags.split(), "--abort-if", "error_rate=0.1")
    (asked,) = running.controller.of("StartRollout")
    assert (asked.to, asked.steps, dict(asked.abort_if)) == ("v2", (0.2, 1.0), {"error_rate": 0.1})
    assert (asked.hold_s, asked.alpha, asked.min_samples, asked.ready_timeout_s) == (9, 0.1, 5, 3)


def test_delete_fails_where_there_is_no_such_application_and_names_those_there_are(invoke, running):
    invoke("deploy", "demo", "--name", "shop")
    missing = invoke("delete", "shpo", code=1)
    assert "no application is named 'shpo'; there are: shop" in missing.stderr
    assert "did you mean shop?" in missing.stderr
    assert invoke("delete", "shop").output == "deleted 'shop'\n"
    invoke("delete", "shop", code=1)


def test_stop_and_destroy_say_what_they_did(invoke, running):
    assert "stopped; its state stays in" in invoke("stop").output
    assert invoke("stop").output == "nothing was running\n"
    running.running = True
    assert invoke("destroy", "--yes").output == "stopped; its state is deleted\n"
    assert running.calls == ["stop", "stop", "forget"]
    assert invoke("destroy", "--yes").output == "nothing was running; its state is deleted\n"
    shown = invoke("shutdown", "--yes")
    assert "is now `greenroom destroy`" in shown.stderr
    assert shown.stdout == "nothing was running; its state is deleted\n"


@pytest.mark.parametrize("name", ["destroy", "shutdown"])
def test_nothing_is_destroyed_without_a_word(invoke, running, name):
    assert "applications, code, history and logs. Give --yes" in invoke(name, code=2).stderr
    assert running.calls == []


def test_destroying_is_asked_for_on_a_terminal(invoke, running, monkeypatch):
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True)
    for answer in ("n\n", "\n"):
        invoke("destroy", input=answer, code=1)
    assert running.calls == []
    shown = invoke("destroy", input="y\n")
    assert "is deleted: applications, code, history and logs. Do it? [y/N]: y" in shown.output
    assert running.calls == ["forget"]


def healthy_host():
    return {
        "name": "a",
        "address": "127.0.0.1:1900",
        "state": "RUNNING",
        "host_pid": 10,
        "proxy": {"pid": 11, "state": "RUNNING"},
        "front": {"pid": 12, "url": "http://127.0.0.1:8000", "workers": [13]},
    }


def test_status_counts_the_replicas_that_were_replaced_and_is_0(invoke, running):
    running.controller.shown |= {"hosts": [healthy_host()]}
    invoke("deploy", "demo")
    restarts = {"crashed": 2, "out of memory": 1}
    running.controller.shown["backends"] = {
        "default#Model": {"application": "default", "status": "HEALTHY", "restarts": restarts}
    }
    assert "2 crashed, 1 out of memory" in invoke("status").output


def test_status_shows_tables_and_is_0_when_all_is_healthy(invoke, running):
    goals = [
        {"id": "g1", "subject": "backend a", "what": "deploy", "state": "pending"},
        {"id": "g2", "subject": "backend b", "what": "deploy", "state": "succeeded"},
    ]
    running.controller.shown |= {"hosts": [healthy_host()], "goals": goals}
    invoke("deploy", "demo")
    (process,) = running.controller.processes.values()
    process.pid = 4711
    running.controller.report(process)
    result = invoke("status")
    for text in ("http://127.0.0.1:8000", "default", "Model", "RUNNING", " 4711 ", "100%", "g1"):
        assert text in result.output
    assert "g2" not in result.output


def test_status_of_an_application_is_its_own(invoke, running):
    running.controller.shown |= {"hosts": [healthy_host()]}
    invoke("deploy", "demo", "--name", "good", "--route-prefix", "/good")
    invoke("deploy", "demo", "--name", "bad")
    shown = running.controller.shown["applications"] = running.controller.applications
    shown["bad"]["status"] = "DEPLOY_FAILED"
    assert "bad" not in invoke("status", "good").output
    assert list(json.loads(invoke("status", "good", "--json").output)["applications"]) == ["good"]
    invoke("status", "bad", code=1)
    missing = invoke("status", "ugly", code=1)
    assert "no application is named 'ugly'; there are: bad, good" in missing.stderr


def test_status_can_be_watched_until_ctrl_c(invoke, running, monkeypatch):
    shown = []

    def sleep(seconds):
        shown.append(seconds)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(commands, "time", types.SimpleNamespace(sleep=sleep))
    running.controller.shown |= {"hosts": [healthy_host()]}
    assert invoke("status", "--watch").output.count("no applications") == 3


def test_watching_ends_when_nothing_reads_it_any_more(invoke, running, monkeypatch):
    def refuse(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(commands, "print_json", refuse)
    monkeypatch.setattr(commands, "time", types.SimpleNamespace(sleep=pytest.fail))
    invoke("status", "--json", "--watch", code=1)


def test_names_of_applications_complete_by_tab(invoke, running, system, monkeypatch):
    invoke("deploy", "demo", "--name", "shop")
    invoke("deploy", "demo", "--name", "sales", "--route-prefix", "/sales")
    complete = ShellComplete(main, {}, "greenroom", "_GREENROOM_COMPLETE").get_completions
    assert complete(["ask"], "evi")[0].value == "evict_host"
    assert "status" in [each.value for each in complete(["stauts"], "")], "and no error"
    for arguments in (["delete"], ["status"], ["logs", "-f"]):
        assert [each.value for each in complete(arguments, "s")] == ["sales", "shop"]
    assert [each.value for each in complete(["delete"], "sh")] == ["shop"]
    invoke("stop")
    assert complete(["delete"], "") == [], "nothing runs"
    monkeypatch.setenv("GREENROOM_ADMIN_PORT", "many")
    assert complete(["delete"], "") == [], "and no traceback"


def test_status_is_1_when_something_is_not_healthy(invoke, running):
    invoke("deploy", "demo")
    shown = running.controller.shown["applications"] = running.controller.applications
    message = "x\nLookupError: [y]"
    shown["default"]["deployments"]["Model"] |= {"status": "UNHEALTHY", "message": message}
    result = invoke("status", code=1)
    assert "deployment 'Model' of 'default' is UNHEALTHY: LookupError: [y]" in result.output
    assert "no host has reported to the controller yet" in result.output
    invoke("status", "--json", code=1)


def test_status_of_an_empty_system_says_so_and_as_json_is_the_controllers_object(invoke, running):
    running.controller.shown["hosts"] = [healthy_host()]
    assert "no applications" in invoke("status").output
    assert json.loads(invoke("status", "--json").stdout) == running.controller.status()


def test_status_says_in_one_line_that_nothing_runs_or_answers(invoke, system):
    late = TimeoutError("GetStatus was not answered within 10 s")
    system.controller.failing["GetStatus"] = late
    for system.running in (False, True):
        for arguments in (["status"], ["status", "--json"]):
            result = invoke(*arguments, code=1)
            assert (result.stdout, result.stderr.count("\n")) == ("", 1)


def test_logs_are_shown_by_name(invoke, logs):
    assert f"Error: no log is in {logs}; there are: none" in invoke("logs", code=1).stderr
    (logs / "replica-default#Model.log").write_text("1\n2\n3\n")
    (logs / "controller.log").write_text("ready\n")
    assert invoke("logs", "model", "-n", "2").stdout == "default#Model | 2\ndefault#Model | 3\n"
    assert "controller | ready" in invoke("logs").stdout
    result = invoke("logs", "nothing", code=1)
    assert "no log matches 'nothing'" in result.stderr
    assert "that does not run are found by --state-dir" in result.stderr
    assert "controller, replica-default#Model" in result.stderr


def test_a_recording_that_cannot_begin_leaves_no_file(invoke, running, app_dir):
    with serve.Client.connect() as client:
        client.create_backend("v1", len)
        client.create_endpoint("e", backend="v1")
    running.controller.failing["ShadowTraffic"] = ConflictError("no shadow is taken")
    for _ in range(2):
        assert "no shadow is taken" in invoke("record", "e", code=1).stderr
    assert not (app_dir / "e.jsonl").exists()


def test_followed_logs_end_with_ctrl_c(invoke, logs, monkeypatch):
    (logs / "a.log").write_text("1\n")

    def interrupt(_event, _timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    assert invoke("logs", "-f").stdout == "a | 1\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_of_what_takes_long_alone(capsys, monkeypatch, is_terminal):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if is_terminal else "0")  # Rich asks it
    with display.Progress("quick"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(display, "QUIET_S", 0)
    shown = ""
    with display.Progress() as progress:
        assert "progress" not in {thread.name for thread in threading.enumerate()}
        for text in ("begun", "[other]"):
            progress.say(text)
            deadline = time.monotonic() + 20
            while text not in shown and time.monotonic() < deadline:
                time.sleep(0.01)
                shown += capsys.readouterr().err
    if is_terminal:
        assert "begun" in shown
        assert "[other]" in shown
    else:
        assert shown + capsys.readouterr().err == "begun ...\n[other] ...\n"


def test_a_copy_without_lost_jobs_says_what_it_left_out(tmp_path):
    source = location_at(tmp_path / "one" / "store")
    for place, values in (
        (source, {"backend/a": b"a"}),
        (source.in_namespace("jobs a"), {"call/1": b"a call", "job/1": b"1", "job/2": b"2"}),
    ):
        with contextlib.closing(place.open()) as store:
            store.apply(values)
    for path in (tmp_path / "one").glob("store/jobs*/log-*"):
        path.write_bytes(path.read_bytes().replace(b"a call", b"other?"))
    words = ["store", "copy", str(tmp_path / "one"), str(tmp_path / "two"), "--without-lost-jobs"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    call, job, copied = result.output.splitlines()
    assert call.startswith("left out call/1 of jobs a: ")
    assert job == "left out job/1 of jobs a: call/1 is lost"
    assert copied.startswith("copied 2 values from ")
