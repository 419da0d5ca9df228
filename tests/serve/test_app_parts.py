"""Apps of web frameworks as bytes and back."""

from __future__ import annotations

import pickle

import fastapi

from greenroom.serve.code.packing import pack_code


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
