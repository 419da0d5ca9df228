"""Apps of web frameworks as bytes and back."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path

import fastapi
import pytest

from greenroom.serve.code.packing import pack_code
from tests.support.programs import python


def sample() -> fastapi.FastAPI:
    app = fastapi.FastAPI()
    router = fastapi.APIRouter(prefix="/inside")

    @router.get("/{number}")
    def double(number: int) -> int:
        return 2 * number

    app.include_router(router)
    app.state.said = "before"
    return app


class Holder:
    pass


def test_an_app_with_routers_and_state_travels() -> None:
    packed = pack_code("it", Holder, (sample(),), {}, None)
    app = pickle.loads(packed.pickled)[1][0]
    assert app.state.said == "before"
    assert app.openapi()["paths"] == sample().openapi()["paths"]


def test_equal_apps_have_one_hash_and_others_another() -> None:
    first, second = (pack_code("it", Holder, (sample(),), {}, None).hash for _ in range(2))
    assert first == second
    changed = sample()
    changed.state.said = "after"
    assert pack_code("it", Holder, (changed,), {}, None).hash != first


LATE = """
import functools
from typing import NewType, ParamSpec, Callable

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

class Model:
    @functools.cached_property
    def facts(self):
        return [factorial(number) for number in range(5)]

    def __call__(self):
        assert settings() is settings()
        assert settings.cache_info()[:3] == (1, 1, 7), settings.cache_info()
        assert settings.__name__ == "settings" and settings.__doc__ == "What there is to set."
        assert self.facts is self.facts
        return self.facts, typed(UserId)(3), factorial.cache_info().currsize
"""


def test_cached_functions_and_properties_and_new_types_travel_by_value(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (app_dir / "late.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(app_dir))
    stored = tmp_path / "code"
    model = importlib.import_module("late").Model
    stored.write_bytes(pack_code("it", model, (), {}, None).pickled)
    load = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))[0]()())"
    assert python("-c", load, stored) == "([1, 1, 2, 6, 24], 3, 5)"
