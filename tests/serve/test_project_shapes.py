"""Projects of every shape deploy: their code runs where none of their files are.

Each shape has an entry that uses a helper module. It is packed as a user would start it, and loaded
by a process that has what replicas get, and nothing else.
"""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.programs import python

pytestmark = pytest.mark.slow

HELPER = "class Helper:\n    def word(self):\n        return 'first'\n"
APP = """
from greenroom import serve
from {helper} import Helper

@serve.deployment
class Model:
    def __init__(self):
        self.helper = Helper()

    def __call__(self):
        return self.helper.word()

app = Model.bind()
"""
PACK = """
import os, sys
from pathlib import Path
from greenroom.serve.build import build
built = build(app, "a")
out = Path(os.environ["OUT"])
(out / "code").write_bytes(built.deployments[0].code)
for digest, content in built.folders.items():
    (out / f"{digest}.zip").write_bytes(content)
print(built.deployments[0].code_hash, sorted(built.folders))
"""
LOAD = """
import pickle, sys
target, args, kwargs = pickle.load(open(sys.argv[1], "rb"))
print(target(*args, **kwargs)())
"""


class Shape(NamedTuple):
    files: dict[str, str]
    arguments: tuple[str, ...]  # of Python
    helper: str  # the file that changes
    cwd: str = "."
    path: str | None = None  # on sys.path: where an editable install points to


def imported(module):
    return f"from {module} import app\n{PACK}"


MAIN = APP.format(helper="helper") + PACK
SHAPES = {
    "one folder of scripts": Shape(
        {"helper.py": HELPER, "main.py": MAIN}, ("main.py",), "helper.py"
    ),
    "a script beside its modules": Shape(
        {
            "helper.py": HELPER,
            "shop.py": APP.format(helper="helper"),
            "main.py": imported("shop"),
        },
        ("main.py",),
        "helper.py",
    ),
    "a script run from elsewhere": Shape(
        {"helper.py": HELPER, "main.py": MAIN}, ("../main.py",), "helper.py", cwd="away"
    ),
    "relative imports, with -m": Shape(
        {
            "shop/__init__.py": "",
            "shop/helper.py": HELPER,
            "shop/main.py": APP.format(helper=".helper") + PACK,
        },
        ("-m", "shop.main"),
        "shop/helper.py",
    ),
    "a package's __main__": Shape(
        {
            "shop/__init__.py": "",
            "shop/helper.py": HELPER,
            "shop/models.py": APP.format(helper=".helper"),
            "shop/__main__.py": imported(".models"),
        },
        ("-m", "shop"),
        "shop/helper.py",
    ),
    "a namespace package": Shape(
        {
            "corp/shop/helper.py": HELPER,
            "corp/shop/models.py": APP.format(helper="corp.shop.helper"),
            "main.py": imported("corp.shop.models"),
        },
        ("main.py",),
        "corp/shop/helper.py",
    ),
    "src layout, installed as editable": Shape(
        {
            "src/shop/__init__.py": "",
            "src/shop/helper.py": HELPER,
            "src/shop/models.py": APP.format(helper="shop.helper"),
            "scripts/main.py": imported("shop.models"),
        },
        ("scripts/main.py",),
        "src/shop/helper.py",
        path="src",
    ),
    "a module with a lock": Shape(
        {
            "helper.py": HELPER,
            "shop.py": "import threading\nlock = threading.Lock()\n"
            + APP.format(helper="helper").replace("return self", "with lock: return self"),
            "main.py": imported("shop"),
        },
        ("main.py",),
        "helper.py",
    ),
}


def packed(project: Path, shape: Shape, out: Path) -> str:
    """Pack a project's code as its user would; return the version."""
    out.mkdir()
    path = {} if shape.path is None else {"PYTHONPATH": str(project / shape.path)}
    return python(*shape.arguments, cwd=project / shape.cwd, OUT=str(out), **path)


def said(project: Path, out: Path) -> str:
    """Return what packed code says where the project's files are not."""
    hidden = project.rename(project.with_name("hidden"))
    zips = os.pathsep.join(map(str, out.glob("*.zip")))
    output = python("-c", LOAD, out / "code", PYTHONPATH=zips)
    hidden.rename(project)
    return output


@pytest.mark.parametrize("name", SHAPES)
def test_a_project_runs_where_its_files_are_not(tmp_path, name):
    shape, project = SHAPES[name], tmp_path / "project"
    (project / shape.cwd).mkdir(parents=True)
    for file, text in shape.files.items():
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text(text)
    first = packed(project, shape, tmp_path / "1")
    assert said(project, tmp_path / "1") == "first"
    again = packed(project, shape, tmp_path / "2")
    assert again == first, "equal code is no new version"
    helper = project / shape.helper
    helper.write_text(helper.read_text().replace("'first'", "'second'"))
    second = packed(project, shape, tmp_path / "3")
    assert said(project, tmp_path / "3") == "second"
    assert second != first, "a changed helper is a new version"
