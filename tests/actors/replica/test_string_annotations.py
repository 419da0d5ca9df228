"""FastAPI apps in modules whose annotations are all strings, as this one's are."""

from __future__ import annotations

import datetime as dt
import functools
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header
from starlette.requests import Request

from greenroom import serve
from greenroom.actors.replica import fastapi_routes
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.code.packing import pack_code
from greenroom.serve.exceptions import DeployFailedError
from tests.support.asking import ask

if TYPE_CHECKING:
    from decimal import Decimal

api = FastAPI()
router = APIRouter(prefix="/routed")


class Item(pydantic.BaseModel):
    name: str
    at: dt.date | None = None


class Paging:
    def __init__(self, size: int, x_unit: Annotated[Unit, Header()]) -> None:
        self.size, self.unit = size, x_unit


def said(request: Request, x_said: Annotated[str, Header()] = "nothing") -> str:
    return f"{request.method} {x_said}"


@router.post("/item")
def routed(item: Item, by: Annotated[str, Depends(said)]) -> dict[str, Any]:
    return {"name": item.name, "by": by}


@serve.ingress(api)
class Shop:
    def __init__(self) -> None:
        self.sold: list[Item] = []

    @api.post("/item", dependencies=[Depends(said)])
    def sell(self, item: Item, request: Request, paging: Paging = Depends()) -> Item:  # noqa: B008
        self.sold.append(item)
        return Item(name=f"{item.name} {paging.size} {paging.unit} {request.method}", at=item.at)

    @api.get("/price")
    def price(self, in_cents: Decimal = Depends(said)) -> str:  # noqa: B008
        return str(in_cents)


@api.post("/alone")
def alone(item: Item, request: Request) -> str:
    return f"{item.name} {request.method}"


api.include_router(router)
Unit = dt.timedelta  # of what is above: known when the app travels, not when it was decorated


def factory() -> FastAPI:
    app = FastAPI()

    @app.post("/item")
    def take(item: Item, other: int = 0) -> str:
        return item.name

    return app


def factory_of_what_it_knows() -> FastAPI:
    app = FastAPI()

    @app.post("/item")
    def take(item: Item) -> str:
        return f"{item.name} is an {Item.__name__}"

    return app


@pytest.fixture
def post(running, name):
    def post(path: str, **headers: str) -> Any:
        data = None if path == "/price" else {"name": "x", "at": "2020-02-29"}
        return ask(f"{running.url}/{name}{path}", data, **headers).json

    return post


@pytest.mark.skipif(
    tuple(map(int, pydantic.VERSION.split(".")[:3])) < (2, 14, 4),
    reason="models that lack a name cannot be unpickled with a pydantic before 2.14.4",
)
def test_endpoints_and_dependencies_know_what_their_annotations_mean(deployed, post):
    deployed(serve.deployment(Shop).bind())
    sold = post("/item?size=3", **{"X-Unit": "PT1M"})
    assert sold == {"name": "x 3 0:01:00 POST", "at": "2020-02-29"}
    assert post("/routed/item", **{"X-Said": "me"}) == {"name": "x", "by": "POST me"}
    assert post("/alone") == "x POST"
    assert post("/price", **{"X-Said": "it"}) == "GET it", "no type is needed beside Depends"


def test_an_app_made_in_the_replica_is_refused_where_it_would_answer_422(deployed, post):
    made = serve.deployment(serve.ingress(factory)()).options(max_constructor_retry_count=1)
    with pytest.raises(DeployFailedError) as failed:
        deployed(made.bind())
    message = f"item: Item of {__name__}.factory.<locals>.take"
    assert f"would answer 422: {message}. They are strings" in str(failed.value)
    deployed(serve.deployment(serve.ingress(factory_of_what_it_knows)()).bind())
    assert post("/item") == "x is an Item"


def test_what_nobody_can_resolve_is_refused_before_it_travels():
    app = FastAPI()

    @app.get("/")
    def of_this_function_alone(local: Local, price: Decimal, x: int) -> None: ...

    class Local(pydantic.BaseModel): ...

    message = (
        r"deployment 'd': FastAPI could not .* local: Local of .*; price: Decimal of .*strings"
    )
    with pytest.raises(InvalidRequestError, match=message):
        pack_code("deployment 'd'", serve.ingress(app)(), (), {}, None)


def test_what_fastapi_does_not_read_may_have_any_annotations():
    """Nor are dependencies an obstacle that are no Python functions."""
    app = FastAPI()

    @functools.lru_cache
    def settings() -> dict[str, int]:
        return {"a": 1}

    class Called:
        def __call__(self, x: int = 1) -> int:
            return x

    made = [settings, Called(), functools.partial(said, x_said="partly")]

    @app.middleware("http")
    async def around(request: Nothing, call_next: Nothing) -> Nothing: ...  # type: ignore[name-defined]  # noqa: F821

    @app.exception_handler(ValueError)
    async def handle(request: Nothing, error: ValueError) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    @app.get("/", dependencies=[Depends(each) for each in made])
    async def get() -> Decimal: ...  # type: ignore[empty-body]

    app.mount("/below", FastAPI())
    fastapi_routes.evaluate_annotations(app)
    assert fastapi_routes.unresolved_annotations(app) == ""


def test_other_apps_are_left_alone():
    async def bare(scope: Nothing, receive: Nothing, send: Nothing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    fastapi_routes.evaluate_annotations(bare)
    assert fastapi_routes.unresolved_annotations(bare) == ""
    assert bare.__annotations__["scope"] == "Nothing"
