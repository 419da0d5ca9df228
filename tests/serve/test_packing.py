import importlib
import pickle
import pickletools
import re
import shutil
import sys
import threading

import cloudpickle
import fastapi
import pytest

from greenroom.serve.code.fingerprint import fingerprint
from greenroom.serve.code.packing import pack_arguments, pack_by_value, pack_code, packed
from greenroom.serve.config import BackendConfig
from greenroom.serve.exceptions import InvalidRequestError
from tests.support.programs import python

LOCK = threading.Lock()

MODULE = """
import enum, helpers
from greenroom import serve

class Color(enum.Enum):
    RED = 1

class AppError(Exception):
    pass

@serve.deployment
class Model:
    KINDS = {"alpha", "beta", "gamma", "delta"}
    def __init__(self, *args):
        self.args = args
    def __call__(self, x):
        if x in {"one", "two", "three"}:
            raise AppError(x, Color.RED)
        return helpers.double(x), sorted(self.KINDS), self.args

app = Model.bind({"a", "b", "c"}, frozenset({("x", 1), ("y", 2)}))
"""
BUILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
import app, cloudpickle
if os.environ.get("BY_VALUE"):
    cloudpickle.register_pickle_by_value(app)
from greenroom.serve.build import build
spec, = build(app.app, "a").deployments
"""
REPLICA = """
import pickle, sys, cloudpickle
target, args, kwargs = pickle.load(open(sys.argv[1], "rb"))
model = target(*args)
print(model(4)[0], "app" in sys.modules, "helpers" in sys.modules)
try:
    model("two")
except Exception as error:
    open(sys.argv[2], "wb").write(cloudpickle.dumps(error))
"""


@pytest.fixture
def project(app_dir):
    (app_dir / "app.py").write_text(MODULE)
    (app_dir / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    return app_dir


@pytest.mark.slow
@pytest.mark.parametrize("by_value", ["", "yes"])
def test_another_checkout_of_the_same_code_has_the_same_hash(project, tmp_path, by_value):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project, elsewhere)
    if by_value:  # of what travels by value, lines and comments do not count
        (elsewhere / "app.py").write_text(f"# moved down\n{MODULE}")
    source, environ = BUILD + "print(spec.code_hash)", {"BY_VALUE": by_value}
    assert python("-c", source, elsewhere, **environ) == python("-c", source, project, **environ)
    for folder in (project, elsewhere):  # where the code reads its place it is other code
        (folder / "helpers.py").write_text("def double(x):\n    return __file__\n")
    assert python("-c", source, elsewhere) != python("-c", source, project)


@pytest.mark.parametrize(("by_value", "imports"), [("", "True True"), ("yes", "False True")])
def test_a_replica_imports_what_it_has_no_files_of_and_its_exceptions_come_home(
    project, tmp_path, by_value, imports
):
    code, error = tmp_path / "code", tmp_path / "error"
    save = BUILD + "open(sys.argv[2], 'wb').write(spec.code)"
    python("-c", save, project, code, BY_VALUE=by_value)
    assert python("-c", REPLICA, code, error) == f"8 {imports}"
    # A process that deployed nothing but equal code knows the class again.
    load = BUILD + "import pickle; e = pickle.load(open(sys.argv[2], 'rb'))\n"
    load += "print(type(e) is app.AppError, e.args[1] is app.Color.RED)"
    environ = {"PYTHONHASHSEED": "5", "BY_VALUE": by_value}
    assert python("-c", load, project, error, **environ) == "True True"


def test_an_app_with_routers_and_state_travels():
    app, router = fastapi.FastAPI(), fastapi.APIRouter(prefix="/inside")
    router.get("/{number}")(lambda number: 2 * number)
    app.include_router(router)
    app.state.said = "before"
    copied = pickle.loads(pack_code("it", dict, (app,), {}, None).pickled)[1][0]
    assert copied.state.said == "before"
    assert copied.openapi()["paths"] == app.openapi()["paths"]


def test_the_version_is_part_of_the_hash():
    def code():
        return 1

    hashes = {pack_code("it", code, (), {}, version).hash for version in (None, "v1", "v2")}
    assert len(hashes) == 3


def test_sets_with_themselves_inside_have_a_fingerprint():
    class Registered:
        known = frozenset()

    Registered.known = {Registered}
    assert len(fingerprint(Registered)) == 64


def test_equal_classes_that_live_side_by_side_stay_two():
    def make():
        class Made:
            pass

        return Made

    first, second = make(), make()
    assert fingerprint(first) == fingerprint(second)
    copies = pickle.loads(cloudpickle.dumps((first, second)))
    assert copies == (first, second)


BY_VALUE = """
import asyncio, functools, sys
from typing import Callable, NewType, ParamSpec
from greenroom import serve

UserId = NewType("UserId", int)
PS = ParamSpec("PS")

@functools.lru_cache(maxsize=7)
def settings():
    "What there is to set."
    return object()

@functools.cache
def factorial(n):
    return n * factorial(n - 1) if n else 1

def typed(f: Callable[PS, UserId]) -> Callable[PS, UserId]:
    return f

def twice(method):
    @functools.wraps(method)
    async def wrapper(*args):
        return 2 * await method(*args)
    return wrapper

@serve.batch(max_batch_size=2)
async def tripled(items):
    return [3 * item for item in items]

@serve.task_consumer
class Model:
    @twice
    @serve.batch(max_batch_size=7)
    async def doubled(self, items: list[int], *, more=()):
        "Twice as much."
        return [super(Model, self).__sizeof__() and item for item in items]
    @serve.batch
    async def streamed(self, items):
        yield items
    @serve.continuous_batch(max_size=3)
    def steps(self, streams):
        for each in streams:
            each.put(each.item)
            each.end()
    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, name):
        return name
    @serve.task_handler
    async def handle(self, x: int):
        return x + 1
    @functools.cached_property
    def facts(self):
        return [factorial(number) for number in range(5)]

    def cached(self):
        assert settings() is settings()
        assert settings.cache_info()[:3] == (1, 1, 7), settings.cache_info()
        assert settings.__name__ == "settings" and settings.__doc__ == "What there is to set."
        assert self.facts is self.facts
        return self.facts, typed(UserId)(3), factorial.cache_info().currsize

    async def __call__(self):
        self.doubled.set_max_batch_size(9)
        job = self.run_task_handle(b"[[1], {}]")
        calls = self.doubled(1), self.doubled(2), self.model("m"), job
        streams = [[each async for each in made] for made in (self.streamed(4), self.steps(5))]
        return await asyncio.gather(*calls, tripled(1), tripled(2)), streams, self.doubled.__doc__

Model.steps.of_the_users = "kept"
"""


def test_code_by_value_names_what_decorates_it_and_nothing_else_of_ours(
    app_dir, tmp_path, monkeypatch
):
    """So the next release can load what is stored."""
    (app_dir / "by_value.py").write_text(BY_VALUE)
    monkeypatch.syspath_prepend(str(app_dir))
    app = importlib.import_module("by_value")
    app.Model.streamed.set_max_batch_size(5)
    cloudpickle.register_pickle_by_value(app)
    try:
        code = pack_code("it", app.Model, (), {}, None)
    finally:
        cloudpickle.unregister_pickle_by_value(app)
    texts = [str(text) for _, text, _ in pickletools.genops(code.alone) if isinstance(text, str)]
    ours = {text for text in texts if re.fullmatch(r"greenroom\.[\w.]+", text)}
    assert ours == {
        "greenroom.actors.replica.pickling",
        "greenroom.core.jobs",
        "greenroom.serve.code.fingerprint",
        "greenroom.serve.decorators.per_instance",
        "greenroom.serve.tasks.consumers",
    }
    assert not [text for text in texts if "Theory of operation" in text]
    assert {"decorated_again", "run_async_handler"} <= set(texts)
    assert not {"_Batching", "_Multiplexed", "_Continuous"} & set(texts)
    load = (
        "import asyncio, pickle, sys; m = pickle.load(open(sys.argv[1], 'rb'))[0]\n"
        "print(asyncio.run(m()()), m.steps.of_the_users, m().cached())"
    )
    (tmp_path / "code").write_bytes(code.pickled)
    ran = "([2, 4, 'm', b'2', 3, 6], [[4], [5]], 'Twice as much.') kept ([1, 1, 2, 6, 24], 3, 5)"
    assert python("-c", load, tmp_path / "code") == ran


def test_code_that_cannot_be_pickled_is_named_down_to_the_culprit():
    class Holder:
        def method(self):
            return LOCK

    with pytest.raises(InvalidRequestError) as caught:
        pack_code("deployment 'Holder'", Holder, (), {}, None)
    text = str(caught.value)
    assert "deployment 'Holder' cannot be pickled: Holder.method, which uses LOCK, is " in text
    assert "constructor" not in text
    Holder.__module__ = "__main__"
    with pytest.raises(InvalidRequestError, match="; make it in the constructor, or deploy the"):
        pack_code("deployment 'Holder'", Holder, (), {}, None)


def test_plain_arguments_and_others_arrive_as_they_were():
    class Local:
        def __eq__(self, other):
            return isinstance(other, Local)

        __hash__ = None

    for args, kwargs in [((1, "a", None), {"x": b"b"}), ((Local(),), {"y": [Local()]})]:
        assert pickle.loads(pack_arguments("it", args, kwargs)) == (args, kwargs)


def test_arguments_that_cannot_be_pickled_are_named():
    with pytest.raises(InvalidRequestError, match=r"a call to a#b .* argument 2 is <unlocked"):
        pack_arguments("a#b", (1, LOCK), {})
    with pytest.raises(InvalidRequestError, match=r"argument 'key'\[0\] is <unlocked"):
        pack_arguments("a#b", (), {"key": [LOCK]})


def test_an_object_with_a_broken_reduce_is_blamed_itself():
    class Broken:
        def __reduce__(self):
            raise ValueError("not me")

    with pytest.raises(InvalidRequestError, match=r"argument 1 is .*ValueError: not me"):
        pack_arguments("a#b", (Broken(),), {})


APPS = """
import threading
from greenroom import serve

LOCK = threading.Lock()

@serve.deployment
class Locked:
    def __call__(self):
        with LOCK:
            return WORD

@serve.deployment
class Plain:
    def __call__(self):
        return 1

def word():
    return WORD

WORD = "one"
"""


@pytest.fixture
def apps(tmp_path, monkeypatch):
    folder = tmp_path / "apps"
    folder.mkdir()
    (folder / "locked_app.py").write_text(APPS)
    (folder / "data.txt").write_text("no module")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("locked_app")
    del sys.modules["locked_app"]


def test_code_whose_module_has_a_lock_is_imported_where_it_runs(apps, tmp_path):
    code = pack_code("it", apps.Locked.func_or_class, (), {}, None)
    assert pickle.loads(code.pickled)[0] is apps.Locked.func_or_class
    assert code.modules.keys() == {"locked_app"}
    load = "import pickle, sys; t = pickle.load(open(sys.argv[1], 'rb'))[0]; print(t()())"
    (tmp_path / "code").write_bytes(code.pickled)
    assert python("-c", load, tmp_path / "code") == "one"


def test_a_module_that_is_there_is_not_made_again(apps):
    code = pack_code("it", apps.Plain.func_or_class, (), {}, None)
    before = list(sys.meta_path)
    pickle.loads(code.pickled)
    assert sys.meta_path == before


def test_a_function_by_value_needs_no_module_of_the_users(apps, tmp_path):
    (tmp_path / "code").write_bytes(pack_by_value("it", apps.word))
    load = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))[0]())"
    assert python("-c", load, tmp_path / "code") == "one"
    assert not cloudpickle.list_registry_pickle_by_value() & {"locked_app"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:Router", "cannot be imported"),
        ("json:dumps", "is no serve.request_router.RequestRouter"),
    ],
)
def test_a_request_router_that_is_none_is_refused(path, message):
    config = BackendConfig().updated({"request_router_config": {"request_router_class": path}})
    with pytest.raises(InvalidRequestError, match=message):
        packed("backend 'b'", config)
