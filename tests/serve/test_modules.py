"""Which modules travel with code: what it imports, and nothing else of the user's."""

import importlib
import pickle
import sys
from typing import NamedTuple

import pytest

from greenroom.actors.replica.modules import Module, loaded
from greenroom.core.config import RuntimeEnv
from greenroom.serve.code.modules import hash_of, modules_of
from greenroom.serve.code.runtime_env import pack_env
from tests.support.programs import python

FILES = {
    "entry.py": "import json, middle\ndef run():\n    import lazy\n    from shop import late\n",
    "middle.py": "from shop.parts import *\nimport numpy.linalg\n",
    "lazy.py": "",
    "unused.py": "",
    "plugins/one.py": "",
    "by_name.py": "import importlib\nimportlib.import_module('plugins.' + 'one')\n",
    "shop/__init__.py": "",
    "shop/late.py": "from . import sibling\nfrom .deep.er import inner\n",
    "shop/sibling.py": "from missing import nothing\n",
    "shop/unused.py": "",
    "shop/parts/__init__.py": "from ..deep import er\n",
    "shop/parts/more.py": "",
    "shop/deep/er.py": "inner = 1\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in {name.partition(".")[0].partition("/")[0].removesuffix(".py") for name in FILES}:
        for each in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
            del sys.modules[each]


CLOSURE = {
    *("entry", "middle", "lazy", "shop", "shop.late", "shop.sibling", "shop.parts"),
    "shop.deep.er",
}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_a_module_imports_goes_along_at_any_depth_and_nothing_else(project, is_loaded):
    if is_loaded:
        importlib.import_module("entry")
    assert modules_of({"entry", "json", "pytest"}, ()).keys() == CLOSURE
    assert modules_of((), [compile("import entry", "", "exec")]).keys() == CLOSURE


def test_an_import_of_all_of_a_package_takes_what_is_loaded_of_it(project):
    importlib.import_module("shop.parts.more")
    assert modules_of({"entry"}, ()).keys() == {*CLOSURE, "shop.parts.more"}


def test_who_imports_by_names_of_its_own_takes_what_is_loaded(project):
    importlib.import_module("by_name")
    assert "plugins.one" in modules_of({"by_name"}, ())


def test_what_a_runtime_env_brings_stays(project):
    assert modules_of({"entry"}, (), frozenset({"shop", "lazy"})).keys() == {"entry", "middle"}


def test_what_is_in_a_runtime_env_is_known_by_name(project):
    env = RuntimeEnv(working_dir=str(project), py_modules=[str(project / "shop")])
    assert pack_env(env).names == {name.partition("/")[0].removesuffix(".py") for name in FILES}


def test_the_hash_is_of_names_and_text_and_of_the_place_where_that_is_read():
    def hashed(name="a", file="/x/a.py", source=b"1"):
        return hash_of({name: Module(name, file, False, source)})

    assert hashed() == hashed(file="/y/a.py")
    others = [hashed(), hashed(name="b"), hashed(source=b"2"), hashed(source=b"__file__")]
    assert len({*others, hashed(file="/y/a.py", source=b"__file__")}) == 5


RUN = """
import inspect, pickle, sys, traceback
function = pickle.load(open(sys.argv[1], "rb"))
try:
    function()
except ZeroDivisionError:
    print(traceback.format_exc())
print(inspect.getsource(function))
import corp.installed, corp.thing
print(corp.installed.__name__, corp.thing.__file__)
try:
    import corp.absent
except ModuleNotFoundError as error:
    print(error)
"""


def test_modules_are_imported_from_their_text_whatever_the_files_have(tmp_path):
    installed = tmp_path / "installed" / "corp"
    installed.mkdir(parents=True)
    (installed / "installed.py").touch()
    file = tmp_path / "away" / "thing.py"
    source = b"def fails():\n    return 1 / 0  # as it was\n"
    alone = b"ccorp.thing\nfails\n."
    module = Module("corp.thing", str(file), False, source)
    code = pickle.dumps(_Loaded((module,), alone))
    (tmp_path / "code").write_bytes(code)
    file.parent.mkdir()
    file.write_text("# edited\n" * 9)
    done = python("-c", RUN, tmp_path / "code", PYTHONPATH=str(installed.parent))
    assert done.count("return 1 / 0  # as it was") == 2
    assert f'File "{file}", line 2' in done
    assert f"corp.installed {file}" in done
    assert "No module named 'corp.absent'" in done
    assert [path.name for path in file.parent.iterdir()] == ["thing.py"], (
        "nothing is compiled there"
    )


class _Loaded(NamedTuple):
    modules: tuple[Module, ...]
    alone: bytes

    def __reduce__(self):
        return loaded, tuple(self)


def test_what_is_in_a_files_folder_can_be_read_on_its_host(tmp_path):
    (tmp_path / "words.txt").write_text("hello")
    source = b"from pathlib import Path\nsaid = Path(__file__).with_name('words.txt').read_text()\n"
    module = Module("beside_words", str(tmp_path / "beside_words.py"), False, source)
    try:
        assert loaded((module,), b"cbeside_words\nsaid\n.") == "hello"
    finally:
        del sys.modules["beside_words"]
        sys.meta_path.pop(0)
