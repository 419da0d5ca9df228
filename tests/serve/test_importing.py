import sys
import textwrap

import pytest

from greenroom.serve.code.importing import (
    ImportFailedError,
    forget_modules,
    load_application,
    read_arguments,
)
from greenroom.serve.exceptions import InvalidRequestError

SOURCE = """
from pydantic import BaseModel
from greenroom import serve

@serve.deployment
class Model:
    def __init__(self, *args):
        pass

app = Model.bind(1)

def build(args):
    return Model.bind(args)

class Settings(BaseModel):
    size: int

def typed(settings: Settings):
    return Model.bind(settings.size)

def odd(settings: "Missing"):
    return Model.bind()

def empty():
    return Model.bind()

def wrong(args):
    return Model

def two(a, b):
    pass

def broken(args):
    raise LookupError("no key")

number = 3
"""


@pytest.fixture
def load(app_dir):
    (app_dir / "demo.py").write_text(SOURCE)
    return lambda target, **arguments: load_application(target, app_dir, arguments)


def test_the_attribute_is_app_unless_it_is_named(load):
    assert load("demo").args == (1,)
    assert load("demo:app") is load("demo")


def test_a_module_in_a_package_is_found(load, app_dir):
    (app_dir / "package").mkdir()
    (app_dir / "package" / "inner.py").write_text("from demo import app\n")
    assert load("package.inner") is load("demo")


def test_a_builder_function_gets_the_arguments(load):
    assert load("demo:build", a="1", b="x=y").args == ({"a": "1", "b": "x=y"},)
    assert load("demo:typed", size="4").args == (4,)
    assert load("demo:empty").args == ()
    assert load("demo:odd").args == ()


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("dmeo", {}, "no module named 'dmeo' in .*did you mean demo?"),
        ("zzz", {}, r"no module named 'zzz' in .* \(see --app-dir\) or on sys.path; it has: demo"),
        ("demo.inner", {}, "no module named 'demo.inner' in .*; it has: demo"),
        ("demo.app", {}, "'demo.app' in .*; it is an attribute of demo: try 'demo:app'"),
        ("__doc__", {}, r"no module named '__doc__' in .* on sys.path; it has: demo"),
        ("demo.__class__", {}, "no module named 'demo.__class__' in .*; it has: demo"),
        ("demo.py", {}, "'demo.py': expected MODULE.*not a file; try 'demo'"),
        ("./src/demo.py:app", {}, "try 'src.demo'"),
        ("a b", {}, "expected MODULE or MODULE:ATTRIBUTE"),
        (":app", {}, "expected MODULE or MODULE:ATTRIBUTE"),
        ("demo:ap", {}, "no attribute 'ap'; its applications: app"),
        ("demo:Model", {}, r"demo:Model: Deployment.* forget \.bind\(\)"),
        ("demo:number", {}, "expected an Application.*not 3 of type int"),
        ("demo:app", {"a": "1"}, r"demo:app is built already.*\(got a\)"),
        ("demo:wrong", {}, r"what demo:wrong\(\) returned: .*forget \.bind\(\)"),
        ("demo:two", {}, "takes one parameter.*this one takes 2"),
        ("demo:empty", {"a": "1"}, "takes one parameter.*this one takes 0"),
        ("demo:typed", {"size": "x"}, "invalid Settings: size='x'"),
        ("demo:typed", {"sise": "1"}, "invalid Settings: size: must be given"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_with_a_hint(load, target, arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        load(target, **arguments)


@pytest.mark.parametrize("place", ["src", ".."])
def test_of_a_module_in_src_or_one_level_up_it_is_said_how_it_is_found(load, app_dir, place):
    (app_dir / place).mkdir(exist_ok=True)
    (app_dir / place / "elsewhere.py").write_text("")
    with pytest.raises(InvalidRequestError, match=f"'elsewhere' .* with --app-dir {place}$"):
        load("elsewhere")


@pytest.mark.parametrize("place", ["src", ".."])
def test_the_same_of_a_package_without_an_init(load, app_dir, place):
    (app_dir / place / "parts").mkdir(parents=True)
    (app_dir / place / "parts" / "inner.py").write_text("")
    with pytest.raises(InvalidRequestError, match=f"'parts' .* with --app-dir {place}$"):
        load("parts.inner")
    with pytest.raises(InvalidRequestError, match=r"'parts' in .*\(see --app-dir\)"):
        load("parts.nothing")


def test_packages_are_among_what_there_is(load, app_dir):
    (app_dir / "parts").mkdir()
    (app_dir / "parts" / "inner.py").write_text("")
    with pytest.raises(InvalidRequestError, match="it has: demo, parts"):
        load("zzz")


def test_a_module_without_an_application_lists_what_it_has(load, app_dir):
    (app_dir / "unbound.py").write_text("from demo import Model\n")
    with pytest.raises(InvalidRequestError, match=r"are not bound: Model; add app = X.bind"):
        load("unbound")
    (app_dir / "functions.py").write_text("def build(args): pass\n")
    with pytest.raises(InvalidRequestError, match=r"its functions: build"):
        load("functions")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            "from greenroom import serve\n@serve.deployment(num_replicas=0)\ndef f(): pass",
            "num_re",
        ),
    ],
)
def test_a_module_that_fails_shows_its_own_traceback_only(app_dir, source, message):
    (app_dir / "bad.py").write_text(source)
    with pytest.raises(ImportFailedError, match=r"importing 'bad' failed: .*" + message) as caught:
        load_application("bad", app_dir, {})
    assert "bad.py" in caught.value.traceback
    assert "importlib" not in caught.value.traceback
    assert "importing.py" not in caught.value.traceback


def test_a_builder_that_fails_shows_its_traceback(load):
    with pytest.raises(
        ImportFailedError, match=r"calling demo:broken failed: LookupError"
    ) as caught:
        load("demo:broken")
    assert 'raise LookupError("no key")' in caught.value.traceback
    assert "importing.py" not in caught.value.traceback


def test_forgotten_modules_are_read_again(load, app_dir):
    first = load("demo")
    (app_dir / "demo.py").write_text(textwrap.dedent(SOURCE).replace("bind(1)", "bind(22)"))
    assert load("demo") is first
    forget_modules(app_dir)
    assert "demo" not in sys.modules
    assert load("demo").args == (22,)


def test_key_value_arguments_are_read():
    assert read_arguments(["a=1", "b=", "c=d=e"]) == {"a": "1", "b": "", "c": "d=e"}
    for bad in ("a", "=1"):
        with pytest.raises(InvalidRequestError, match="expected key=value"):
            read_arguments([bad])


@pytest.mark.parametrize("own", ["greenroom/__init__.py", "greenroom.py", "greenroom/models.py"])
def test_code_of_the_users_that_bears_our_name_is_refused(app_dir, own):
    (app_dir / own).parent.mkdir(exist_ok=True)
    (app_dir / own).write_text("")
    (app_dir / "mine.py").write_text("app = 1")
    with pytest.raises(
        InvalidRequestError, match=r"greenroom.* has the name of the installed .* rename"
    ):
        load_application("mine", app_dir, {})


def test_a_folder_of_our_name_without_code_is_nobodys_matter(app_dir):
    (app_dir / "greenroom").mkdir()
    (app_dir / "greenroom" / "notes.txt").write_text("")
    (app_dir / "mine.py").write_text("app = 1")
    with pytest.raises(InvalidRequestError, match="mine:app"):
        load_application("mine", app_dir, {})
