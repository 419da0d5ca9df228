"""Ray Serve's public names work, or say on use what to do instead; the docs list all of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from greenroom import serve
from tests.docs import ray_names


def test_each_name_works_or_the_docs_say_what_to_use() -> None:
    names = ray_names.kept()
    assert len(names) > 200
    same, others = ray_names.compared()
    for name in names:
        owner = name.partition("(")[0].rpartition(".")[0]
        if ray_names.works(name):
            assert name not in others, name
            assert name in same or name.count(".") > 1 or "(" in name, name
        else:
            assert name in others or owner in others, name


def test_what_the_docs_say_is_the_same_is() -> None:
    same, _ = ray_names.compared()
    assert [name for name in same if not ray_names.works(name)] == []


def test_an_unknown_name_is_an_error_as_ever() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        _ = serve.nonesuch
    with pytest.raises(ImportError, match="cannot import name 'Nonesuch'"):
        from greenroom.serve.config import Nonesuch  # noqa: F401, PLC0415
    with pytest.raises(TypeError, match=r"start\(\) got an unexpected .*'nonesuch'"):
        serve.start(nonesuch=1)


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        ("serve.start(logging_config={})", TypeError, "argument 'logging_config'"),
        ("serve.connect", AttributeError, "is in docs/migrating-from-ray-serve.md"),
        ("handle.broadcast('reset')", TypeError, r"App.broadcast with .remote\(...\), not"),
        ("handle.options(_prefer_local_routing=True)", ValueError, "no such setting; there are: m"),
        ("App.init_args", AttributeError, "Deployment has no attribute 'init_args'"),
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
