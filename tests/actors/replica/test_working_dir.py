"""A folder of the user's reaches replicas as it is: modules, those imported late, and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.serve.exceptions import ConflictError, InvalidRequestError
from tests.support.systems import RunningSystem, running_system


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("working") / "state") as running:
        yield running


MAIN = """
from pathlib import Path
import helper
from greenroom import serve

@serve.deployment
class Reader:
    def __call__(self, request):
        import late
        assert late.helper is helper  # one module, not a copy by value
        return helper.WORD + late.WORD + Path("data.txt").read_text()

app = Reader.bind()
"""


def read(_request: object) -> str:
    import helper  # type: ignore[import-not-found]  # noqa: PLC0415 - the folder's

    return str(helper.WORD) + " " + Path("data.txt").read_text()


def write(folder: Path, word: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "main.py").write_text(MAIN)
    (folder / "helper.py").write_text(f"WORD = {word!r}\n")
    (folder / "late.py").write_text("import helper\nWORD = ' late '\n")
    (folder / "data.txt").write_text("data")


def deploy(system: RunningSystem, *args: str) -> tuple[int, str]:
    done = system.greenroom(*args, cwd=system.settings.state_dir.parent)
    return done.returncode, done.stdout + done.stderr


def test_replicas_work_in_a_copy_of_the_folder_and_a_changed_file_is_a_new_release(
    own_system, tmp_path
):
    folder = tmp_path / "project"
    write(folder, "one")
    args = ("deploy", "main:app", "--working-dir", str(folder))
    code, output = deploy(own_system, *args)
    assert code == 0, output
    assert own_system.get("/") == (200, b"one late data")
    write(folder, "two")
    code, output = deploy(own_system, *args, "--plan")
    assert (code, "actor_options.runtime_env.working_dir" in output) == (3, True), output
    assert own_system.get("/")[1] == b"one late data"
    assert deploy(own_system, *args)[0] == 0
    assert own_system.get("/") == (200, b"two late data")
    unpacked = [each for each in own_system.settings.folders_dir.iterdir() if each.is_dir()]
    assert len(unpacked) == 2
    code, output = deploy(own_system, "undo")
    assert code == 0, output
    assert own_system.get("/") == (200, b"one late data")
    sent = (own_system.settings.logs_dir / "controller.log").read_text().count("sending folder")
    assert sent == 2  # what is here is not fetched again


def test_what_a_client_deploys_works_in_a_copy_of_a_folder_too(system, tmp_path):
    folder = tmp_path / "project"
    write(folder, "one")
    options = {"runtime_env": {"working_dir": str(folder)}}
    with system.as_default(), serve.Client.connect() as client:
        client.wait_for_goal(client.create_backend("alone", read, actor_options=options), 20)
        client.create_endpoint("alone", backend="alone", route="/alone")
        assert system.get("/alone") == (200, b"one data")
        assert client.create_backend("alone", read, actor_options=options) is None
        client.wait_for_goal(client.deploy("named", read, version="1", actor_options=options), 20)
        write(folder, "two")
        with pytest.raises(ConflictError, match="other code or settings"):
            client.create_backend("alone", read, actor_options=options)
        client.wait_for_goal(client.deploy("named", read, version="2", actor_options=options), 20)
        assert system.get("/named") == (200, b"two data")
        assert system.get("/alone") == (200, b"one data"), "as it was created"
        client.wait_for_goal(client.undo()["goal"], 20)
        assert system.get("/named") == (200, b"one data")
        options = {"runtime_env": {"working_dir": f"{folder}-2"}}
        for make in (client.create_backend, client.deploy):
            with pytest.raises(InvalidRequestError, match="no such folder"):
                make("other", read, actor_options=options)


MODULE = """
import os
from greenroom import serve

AT_IMPORT = os.environ.get("WORD", "not set")

@serve.deployment(ray_actor_options={"runtime_env": {
    "env_vars": {"WORD": "deployment", "SECRET": "s3cret"}, "working_dir": "project"}})
class Words:
    def __call__(self, request):
        import helper
        import parcel
        return {
            "at import": AT_IMPORT,
            "now": os.environ["WORD"],
            "of the application": os.environ["OTHER"],
            "helper": helper.WORD,
            "parcel": parcel.WORD,
        }

app = Words.bind()
"""


def test_a_runtime_env_is_there_before_user_code_and_of_each_deployment_by_itself(
    system, tmp_path, monkeypatch
):
    write(tmp_path / "project", "one")
    package = tmp_path / "parcel"
    package.mkdir()
    (package / "__init__.py").write_text("WORD = 'a parcel'\n")
    (tmp_path / "words.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import words  # type: ignore[import-not-found]  # noqa: PLC0415  # it was just written

    env = {"env_vars": {"WORD": "application", "OTHER": "too"}, "py_modules": ["parcel"]}
    with system.as_default():
        serve.run(words.app, runtime_env=env)
        status, body = system.get("/")
        assert (status, json.loads(body)) == (
            200,
            {
                "at import": "deployment",
                "now": "deployment",
                "of the application": "too",
                "helper": "one",
                "parcel": "a parcel",
            },
        )
        with pytest.raises(InvalidRequestError, match="runtime_env=3: must be"):
            serve.run(words.app, runtime_env=3)  # type: ignore[arg-type]
    code, output = deploy(system, "history")
    assert code == 0
    assert "s3cret" not in output
    code, output = deploy(system, "status", "--json")
    assert "s3cret" not in output
