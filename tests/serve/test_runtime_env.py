"""A folder as a zip: the same for the same files, and nothing in it that must not be."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.actors.environments import folders
from greenroom.core.config import ActorOptions, RuntimeEnv, options_shown
from greenroom.core.errors import InvalidRequestError
from greenroom.core.operations import CreateBackend
from greenroom.core.records import BackendDefinition, differences
from greenroom.serve.build import build
from greenroom.serve.code import runtime_env
from greenroom.serve.code.runtime_env import pack, pack_env, pack_module


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "project"
    (made / "package").mkdir(parents=True)
    (made / "main.py").write_text("WORD = 'one'\n")
    (made / "package" / "data.bin").write_bytes(bytes(range(256)) * 10)
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    return made


def plain() -> None:
    """Do nothing."""


def names(content: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.namelist()


def test_the_same_files_are_the_same_zip_whenever_and_wherever(folder):
    first = pack(folder)
    os.utime(folder / "main.py", (1, 1))
    (folder / "package" / "data.bin").chmod(0o600)
    copy = folder.with_name("copy")
    os.rename(folder, copy)
    assert pack(copy) == first
    (copy / "main.py").write_text("WORD = 'two'\n")
    assert pack(copy).digest != first.digest


def test_what_is_made_by_tools_is_left_out(folder):
    for name in ("__pycache__", ".git", "env"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "old.pyc").write_text("")
    os.mkfifo(folder / "pipe")
    assert names(pack(folder).content) == ["main.py", "package/data.bin", "run.sh"]


def test_links_that_stay_inside_are_what_they_stand_for_and_others_are_refused(folder):
    (folder / "again.py").symlink_to("main.py")
    assert "again.py" in names(pack(folder).content)
    (folder / "secret").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequestError, match=r"secret leads out of it \(/etc/passwd\)"):
        pack(folder)
    (folder / "secret").unlink()
    (folder / "other").symlink_to("package")
    with pytest.raises(InvalidRequestError, match="other is a link to a folder"):
        pack(folder)


def test_a_folder_that_is_missing_or_too_large_is_refused_naming_the_largest_files(
    folder, monkeypatch
):
    with pytest.raises(InvalidRequestError, match="nowhere': no such folder"):
        pack(folder / "nowhere")
    monkeypatch.setattr(runtime_env, "MAX_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match=r"its files have .*largest are package/data.bin"):
        pack(folder)
    monkeypatch.undo()
    monkeypatch.setattr(runtime_env, "MAX_ZIP_BYTES", 100)
    with pytest.raises(InvalidRequestError, match=r"its packed files have .* over the limit"):
        pack(folder)


def test_it_is_unpacked_as_it_was(folder, tmp_path):
    packed = pack(folder)
    store = tmp_path / "folders"
    store.mkdir()
    path = folders.unpack(packed.content, packed.digest, store)
    assert path == store / packed.digest
    assert pack(path) == packed
    assert os.access(path / "run.sh", os.X_OK)
    assert [each.name for each in store.iterdir()] == [packed.digest]


def zipped(name: str, *, mode: int = 0, content: str = "x") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped("../evil.py"), "would lie outside"),
        (zipped("a/../../evil.py"), "would lie outside"),
        (zipped("/etc/evil"), "would lie outside"),
        (zipped("a\\..\\evil"), "would lie outside"),
        (zipped("link", mode=0o120777, content="/etc/passwd"), "is no plain file"),
        (b"no zip at all", "not a zip file"),
    ],
)
def test_no_zip_writes_elsewhere_or_leaves_anything(content, message, tmp_path):
    store = tmp_path / "folders"
    store.mkdir()
    with pytest.raises((ValueError, zipfile.BadZipFile), match=message):
        folders.unpack(content, hashlib.sha256(content).hexdigest(), store)
    assert list(store.iterdir()) == []
    assert [each.name for each in tmp_path.iterdir()] == ["folders"]


def test_what_is_not_the_zip_that_was_asked_for_or_too_much_is_refused(
    folder, tmp_path, monkeypatch
):
    packed = pack(folder)
    with pytest.raises(ValueError, match="is not the zip"):
        folders.unpack(packed.content + b"x", packed.digest, tmp_path)
    monkeypatch.setattr(folders, "MAX_BYTES", 1000)  # whatever it says of itself
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        folders.unpack(packed.content, packed.digest, tmp_path)


def test_folders_that_nobody_uses_are_removed_after_a_while(tmp_path):
    for name in ("used", "unused", "new"):
        (tmp_path / name).mkdir()
    for name in ("used", "unused"):
        os.utime(tmp_path / name, (1, 1))
    folders.prune(tmp_path, lambda: {"used"})
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["new", "used"]
    folders.prune(tmp_path / "nothing", set)


def test_an_environment_is_packed_and_names_what_it_sends(folder, tmp_path):
    module = tmp_path / "alone.py"
    module.write_text("WORD = 'alone'\n")
    given = RuntimeEnv(working_dir=folder, py_modules=[folder / "package", module])  # type: ignore[arg-type]
    packed = pack_env(given)
    assert packed.env.unpacked == []
    assert packed.env.folders == tuple(packed.folders)
    assert [names(content) for content in packed.folders.values()] == [
        ["main.py", "package/data.bin", "run.sh"],
        ["package/data.bin"],
        ["alone.py"],
    ]
    assert pack_env(RuntimeEnv(env_vars={"A": "1"})).env == RuntimeEnv(env_vars={"A": "1"})


def test_a_zip_or_a_wheel_is_what_its_folder_is(folder, tmp_path):
    made = shutil.make_archive(str(tmp_path / "made"), "zip", folder)  # has entries for folders
    assert pack(Path(made)) == pack(folder)
    wheel = Path(made).rename(tmp_path / "made-1.0-py3-none-any.whl")
    assert pack_module(wheel) == pack(folder)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"working_dir": "nowhere"}, "working_dir='nowhere': no such folder"),
        ({"py_modules": ["nowhere"]}, "py_modules='nowhere': no such folder or file"),
        ({"working_dir": __file__}, "no such folder"),
        ({"pip": "nowhere.txt"}, "pip='nowhere.txt': no requirements file can be read"),
        ({"uv": "/etc/passwd"}, "uv='/etc/passwd': 'root:.* is no requirement"),
        ({"py_modules": ["/etc/passwd"]}, "py_modules='/etc/passwd': File is not a zip file"),
    ],
)
def test_paths_that_cannot_be_packed_are_refused(env, message):
    with pytest.raises(InvalidRequestError, match=message):
        pack_env(RuntimeEnv(**env))


def test_requirements_are_lines_whatever_form_they_are_given_in(tmp_path):
    written = [
        "--index-url https://example.org/simple",
        "numpy",
        "scipy[extra] >= 1.0, < 2 ; python_version > '3'",
        "wheel @ https://example.org/wheel.whl",
        "exact===1.0 --hash=sha256:00",
        "any!=1.*",
        "a~=1.0",
    ]
    file = tmp_path / "requirements.txt"
    file.write_text("# all\n\n" + "\n".join(f"{line}  # why" for line in written))
    assert RuntimeEnv(pip=written).pip == tuple(written)  # type: ignore[arg-type]
    assert RuntimeEnv(pip={"packages": written}).pip == tuple(written)  # type: ignore[arg-type]
    assert pack_env(RuntimeEnv(pip=str(file))).env.requirements == ("pip", tuple(written))
    assert RuntimeEnv(pip=str(file)).unpacked == [str(file)]
    assert RuntimeEnv(uv=["b"]).over(RuntimeEnv(pip=["a"])).requirements == ("uv", ("b",))  # type: ignore[arg-type]


def test_an_application_s_environment_is_that_of_deployments_that_give_none():
    base = RuntimeEnv(env_vars={"A": "1", "B": "1"}, working_dir="here")
    assert RuntimeEnv().over(base) == base
    own = RuntimeEnv(env_vars={"B": "2"}, py_modules=("there",)).over(base)
    assert own == RuntimeEnv(
        env_vars={"A": "1", "B": "2"}, working_dir="here", py_modules=("there",)
    )
    env = {"env_vars": {"B": "2"}}
    target = serve.deployment(ray_actor_options={"runtime_env": env})(plain).bind()
    default = RuntimeEnv(env_vars={"A": "1", "B": "1"})
    (spec,) = build(target, "app", runtime_env=default).deployments
    assert spec.actor_options.runtime_env.env_vars == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"env_var": {}}, "ray_actor_options.runtime_env.env_var={}: no such setting"),
        ({"conda": ["x"]}, "no such setting; give pip or uv a list"),
        ({"env_vars": {"A": 1}}, "env_vars.A=1: must be a valid string"),
        ({"env_vars": {"A=": "1"}}, "'A=': no variable can have this name"),
        ({"env_vars": {"GREENROOM_HTTP_PORT": "1"}}, "settings of the host"),
        ({"working_dir": "s3://bucket/x.zip"}, "expected a folder or a zip on this host"),
        ({"py_modules": "package"}, "py_modules='package': must be a valid list"),
        ([], "must be a valid dictionary"),
        ({"pip": ["a"], "uv": ["b"]}, "pip and uv: give one of them"),
        ({"pip": ["not a name"]}, "'not a name' is no requirement: expected a name, perhaps with"),
        ({"pip": ["numpy=2"]}, "'numpy=2' is no requirement"),
        ({"pip": ["./local.whl"]}, "'./local.whl' is no requirement"),
        ({"pip": ["-r other.txt"]}, "'-r other.txt': of options, lines may have --index-url"),
        ({"uv": [3]}, "3: expected a requirement"),
        ({"pip": 3}, "pip=3: expected a list of requirements, the path of a requirements file"),
        ({"pip": {"packages": ["a"], "pip_check": True}}, "or a dict with packages alone"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_field_and_value(env, message):
    with pytest.raises(InvalidRequestError) as caught:
        serve.deployment(ray_actor_options={"runtime_env": env})(plain)
    assert message in str(caught.value), caught.value


def test_a_working_dir_outside_of_the_environment_is_reported_where_it_belongs():
    with pytest.raises(InvalidRequestError, match=r"working_dir=.*it is part of runtime_env"):
        serve.deployment(ray_actor_options={"working_dir": "."})(plain)


def test_what_no_client_has_packed_is_refused_by_the_controller_too():
    options = {"runtime_env": {"working_dir": "/srv/app"}}
    with pytest.raises(InvalidRequestError, match=r"runtime_env names '/srv/app', on the client's"):
        CreateBackend.of(tag="t", code=b"", code_hash="", actor_options=options)


def test_values_of_variables_are_in_no_report():
    def definition(value: str) -> BackendDefinition:
        options = ActorOptions(runtime_env=RuntimeEnv(env_vars={"TOKEN": value})).model_dump()
        return BackendDefinition(code_hash="", code_digest="", config={}, actor_options=options)

    name = "actor_options.runtime_env.env_vars.TOKEN"
    assert differences(definition("old"), definition("new")) == {name: ["***", "***"]}
    shown = differences(None, definition("new"))
    assert shown[name] == [None, "***"]
    assert "new" not in str(shown)
    assert "new" not in str(options_shown(definition("new").actor_options))


def test_users_and_passwords_of_urls_are_in_no_report():
    def definition(password: str) -> BackendDefinition:
        lines = (f"--index-url https://me:{password}@pypi.example/simple", "numpy>=2")
        options = ActorOptions(runtime_env=RuntimeEnv(pip=lines)).model_dump()
        config = {"user_config": {"database": f"postgres://me:{password}@db.example/x?y=a@b"}}
        return BackendDefinition(code_hash="", code_digest="", config=config, actor_options=options)

    changed = differences(definition("old@1"), definition("new"))
    assert len(changed) == 2
    assert "https://***@pypi.example/simple" in str(changed)
    assert "postgres://***@db.example/x?y=a@b" in str(changed)
    for found in (changed, options_shown(definition("old").actor_options)):
        for secret in ("old", "new@", "me:"):
            assert secret not in str(found)
