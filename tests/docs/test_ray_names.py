"""Ray Serve's public names work, or say on use what to do instead; the docs list all of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.serve import absent
from tests.docs import ray_names


def test_each_name_works_or_says_what_to_do_instead() -> None:
    names = ray_names.kept()
    assert len(names) > 200
    for name in names:
        ray_names.told(name)  # LookupError for one of which nothing is known


def test_the_table_in_the_docs_is_the_one_of_the_program() -> None:
    _, _, rest = ray_names.PAGE.read_text().partition(ray_names.BEGIN)
    stale = "run python -m tests.docs.ray_names"
    assert rest.partition(ray_names.END)[0] == ray_names.table(), stale


@pytest.mark.parametrize("name", absent.OF_1)
def test_names_of_ray_serve_1_say_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"there is no {name}; instead: "):
        getattr(serve, name)
    with pytest.raises(ImportError, match=f"there is no {name}; instead: "):
        exec(f"from greenroom.serve import {name}")


def test_what_is_said_of_a_name_that_is_there_by_now_is_removed() -> None:
    for where, names in absent.NAMES.items():
        if "(" in where or where != where.lower():  # of a function, or of a class
            continue
        for name in names:
            assert ray_names.told(f"{where}.{name}" if where else name), (where, name)


def test_an_unknown_name_is_an_error_as_ever() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        _ = serve.nonesuch
    with pytest.raises(ImportError, match="cannot import name 'Nonesuch'"):
        from greenroom.serve.config import Nonesuch  # noqa: F401, PLC0415
    with pytest.raises(TypeError, match=r"serve\.start: unexpected argument 'nonesuch'$"):
        serve.start(nonesuch=1)
    with pytest.raises(TypeError, match=r"unexpected argument 'nmae'; did you mean name\?"):
        serve.run(None, nmae="x")


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        ("serve.start(logging_config={})", TypeError, "give it to serve.run"),
        ("serve.run(None, controller_options={})", TypeError, "settings to greenroom start"),
        ("serve.run(None, working_dir='x')", TypeError, "give runtime_env={'working_dir'"),
        ("handle.broadcast('reset')", TypeError, "no broadcast; instead: user_config"),
        ("handle.choose_replica()", TypeError, "no choose_replica; instead: options"),
        ("handle.options(_prefer_local_routing=True)", ValueError, "are taken first"),
        ("App.init_args", AttributeError, "no init_args; instead: the args of the App"),
        ("App.options(rolling_update_percentage=1)", ValueError, "it is called max_surge_percent"),
        ("App.options(max_surge_percent=0)", ValueError, "max_surge_percent=0: must be greater"),
        ("serve.HTTPOptions(location='HeadOnly')", ValueError, "location: no such setting|forbid"),
    ],
)
def test_a_use_is_refused_with_what_to_do(use: str, kind: type[Exception], text: str) -> None:
    app = serve.deployment(lambda: None)
    from greenroom.serve.handle import DeploymentHandle  # noqa: PLC0415

    with pytest.raises(kind, match=text):
        eval(use, {"serve": serve, "App": app, "handle": DeploymentHandle("App")})


def test_a_wheel_is_read_without_running_it(tmp_path: Path) -> None:
    wheel = tmp_path / "ray-9.9.9-py3-none-any.whl"
    sources = {
        "__init__": "from x import run\n__all__ = ['run']\nraise SystemExit",
        "api": "@PublicAPI(stability='beta')\ndef run(target, _blocking, _own): ...\ndef no(): ...",
        "handle": (
            "class _Base:\n def __private(self): ...\n def shutdown(self): ...\n"
            "@PublicAPI\nclass DeploymentHandle(_Base):\n def options(self, *, stream): ...\n"
        ),
    }
    with zipfile.ZipFile(wheel, "w") as files:
        for module, source in sources.items():
            files.writestr(f"ray/serve/{module}.py", source)
    assert ray_names.names_in(wheel) == [
        "# ray 9.9.9",
        "handle.DeploymentHandle",
        "handle.DeploymentHandle.options",
        "handle.DeploymentHandle.options(stream)",
        "handle.DeploymentHandle.shutdown",
        "run",
        "run(_blocking)",
        "run(target)",
    ]
