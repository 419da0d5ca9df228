"""FastAPI's own features behind a route prefix, a root path and middlewares, over HTTP."""

import asyncio
import gzip
import http.client
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Depends,
    FastAPI,
    HTTPException,
    Request,
    Response,
    WebSocket,
)
from fastapi.responses import JSONResponse, StreamingResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from greenroom import serve
from tests.support.asking import Got, ask as ask_url
from tests.support.systems import running_system, wait_until

ROOT, ROUTE = "/gateway", "/shop"
MIDDLEWARES = [
    ("tests.support.middlewares:Tag", {"word": "seen"}),
    "tests.support.middlewares:Stamp",
    ("starlette.middleware.gzip:GZipMiddleware", {"minimum_size": 100}),
]
PARTS = [f"{number}\n" * 500 for number in range(20)]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class Item(pydantic.BaseModel):
    name: str
    price: float = 1.0
    secret: str = "hidden"


class Shown(pydantic.BaseModel):
    name: str
    price: float


class SoldOutError(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def make_app(folder: str) -> FastAPI:  # noqa: C901 - a list of routes
    notes = Path(folder)
    app = FastAPI(title="Shop")

    @app.middleware("http")
    async def stamped(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["x-own"] = request.headers.get("x-said", request.method)
        return response

    @app.middleware("http")
    async def passed_on(request: Request, call_next: Any) -> Response:
        return await call_next(request)  # type: ignore[no-any-return]

    @app.exception_handler(SoldOutError)
    async def sold_out(request: Request, error: SoldOutError) -> JSONResponse:
        return JSONResponse({"sold_out": error.what}, 410)

    async def session() -> AsyncIterator[str]:
        yield "a session"
        (notes / "session-closed").touch()

    @app.get("/items/{item}")
    async def item(item: str, using: Annotated[str, Depends(session)]) -> dict[str, str]:
        if item == "gone":
            raise SoldOutError(item)
        if item == "teapot":
            raise HTTPException(418, {"why": "short and stout"}, headers={"X-Kind": "pot"})
        return {"item": item, "using": using}

    @app.post("/items", response_model=Shown, status_code=201)
    async def add(item: Item, response: Response, later: BackgroundTasks) -> Item:
        response.set_cookie("last", item.name)
        later.add_task((notes / "added").write_text, item.name)
        return item

    @app.get("/breaks")
    async def breaks() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "begun"
            raise ValueError("midway")

        return StreamingResponse(parts())

    @app.get("/parts")
    async def parts() -> StreamingResponse:
        return StreamingResponse(iter(PARTS))

    @app.websocket("/tags")
    async def tags(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(websocket.headers["x-tags"])
        await websocket.close(4001)

    @app.get("/works-on")
    async def works_on(later: BackgroundTasks) -> StreamingResponse:
        async def work() -> None:
            while not (notes / "read").exists():
                await asyncio.sleep(0.01)
            (notes / "worked").touch()

        later.add_task(work)
        return StreamingResponse(iter(["all", " of it"]), background=later)

    @app.get("/urls")
    async def urls(request: Request) -> dict[str, str]:
        named = request.url_for("item", item="x").path
        return {"path": request.url.path, "named": named, "root": request.scope["root_path"]}

    @app.get("/here")
    async def here(request: Request) -> bool:
        return not await request.is_disconnected()

    @app.api_route("/any", methods=[*METHODS, "HEAD"])
    async def any_method(request: Request) -> str:
        return request.method

    router = APIRouter(prefix="/routed", tags=["routed"])

    @router.get("/slash/")
    async def slash() -> str:
        return "with a slash"

    app.include_router(router)
    inner = FastAPI(title="Inner")

    @inner.get("/root")
    async def root(request: Request) -> str:
        return str(request.scope["root_path"])

    app.mount("/inner", inner)
    return app


Ask = Callable[..., Got]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def shop(tmp_path_factory, folder):
    """Give the URL of the app, below the root path of a server with middlewares and a prefix."""
    notes = str(folder)
    app = serve.deployment(serve.ingress(lambda: make_app(notes))())
    environ = {
        "GREENROOM_HTTP_ROOT_PATH": ROOT,
        "GREENROOM_HTTP_MIDDLEWARES": json.dumps(MIDDLEWARES),
        "GREENROOM_HTTP_MIDDLEWARES_DIR": str(Path(__file__).parents[3]),
    }
    with running_system(tmp_path_factory.mktemp("shop"), **environ) as running:
        running.deploy(app.options(name="Shop").bind(), name="shop", route_prefix=ROUTE)
        yield f"{running.url}{ROOT}{ROUTE}"


@pytest.fixture(scope="module")
def ask(shop):
    return lambda path, *args, **head: ask_url(f"{shop}{path}", *args, **head)


URLS = {
    "path": f"{ROOT}{ROUTE}/urls",
    "named": f"{ROOT}{ROUTE}/items/x",
    "root": ROOT + ROUTE,
}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/items/a%20b", 200, {"item": "a b", "using": "a session"}),
        ("/items/gone", 410, {"sold_out": "gone"}),
        ("/items/teapot", 418, {"detail": {"why": "short and stout"}}),
        ("/items/%C3%A4", 200, {"item": "ä", "using": "a session"}),
        ("/items/%ff", 200, {"item": "\ufffd", "using": "a session"}),
        ("/items/%00", 200, {"item": "\0", "using": "a session"}),
        ("/items/x?q=%ff", 200, {"item": "x", "using": "a session"}),
        ("/items/a%2Fb", 404, {"detail": "Not Found"}),  # decoded before it is routed, as in ASGI
        ("/urls", 200, URLS),
        ("/routed/slash/", 200, "with a slash"),
        ("/inner/root", 200, f"{ROOT}{ROUTE}/inner"),
        ("/here", 200, True),  # a client that waits is not gone
    ],
)
def test_each_request_reaches_its_route_below_the_prefix(ask, path, status, message):
    got = ask(path)
    assert (got.status, got.json) == (status, message)


def test_dependencies_are_closed_and_exceptions_keep_their_headers(ask, folder):
    assert ask("/items/teapot").headers["x-kind"] == "pot"
    wait_until((folder / "session-closed").exists, 10, "the dependency is closed")


def test_models_are_validated_and_filtered(ask, folder):
    added = ask("/items", {"name": "tea", "price": 2})
    assert (added.status, added.json) == (201, {"name": "tea", "price": 2.0})
    assert added.headers["set-cookie"].startswith("last=tea;")
    wait_until((folder / "added").exists, 10, "the background task runs")
    refused = ask("/items", {"price": "much"})
    assert refused.status == 422
    assert [each["loc"] for each in refused.json["detail"]] == [["body", "name"], ["body", "price"]]


def test_redirects_schemas_and_their_pages_link_to_the_right_place(ask):
    redirect = ask("/routed/slash")
    assert redirect.status == 307
    assert redirect.headers["location"].endswith(f"{ROOT}{ROUTE}/routed/slash/")
    schema = ask("/openapi.json").json
    assert schema["servers"] == [{"url": ROOT + ROUTE}]
    assert "/items/{item}" in schema["paths"]
    for page in ("/docs", "/redoc"):
        assert f"{ROOT}{ROUTE}/openapi.json".encode() in ask(page).body
    assert ask("/inner/openapi.json").json["servers"] == [{"url": f"{ROOT}{ROUTE}/inner"}]


def test_all_methods_and_its_own_middlewares_reach_the_app(ask):
    for method in METHODS:
        got = ask("/any", method=method)
        assert got.json == got.headers["x-own"] == method
    assert ask("/any", X_Said="hello").headers["x-own"] == "hello"
    head = ask("/any", method="HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "6")
    refused = ask("/items/x", method="PURGE")
    assert (refused.status, refused.headers["allow"]) == (405, "GET")


def test_a_stream_that_breaks_off_behind_its_middlewares_is_cut(ask):
    with pytest.raises(http.client.IncompleteRead):
        ask("/breaks")


def test_a_stream_ends_before_the_background_tasks_behind_it(ask, folder):
    assert ask("/works-on").body == b"all of it"
    (folder / "read").touch()
    wait_until((folder / "worked").exists, 20, "the task's end")


def test_middlewares_of_the_server_see_requests_streams_and_websockets(shop, ask):
    assert ask("/items", {"name": "tea", "secret": "x" * 3_000_000}).status == 201
    whole = "".join(PARTS).encode()
    zipped = ask("/parts", Accept_Encoding="gzip")
    assert (zipped.headers["content-encoding"], zipped.headers["x-tags"]) == ("gzip", "seen")
    assert gzip.decompress(zipped.body) == whole
    assert ask("/parts").body == whole, "nothing of the first one is in the second"
    with connect(f"{shop.replace('http', 'ws')}/tags") as opened:
        assert opened.response is not None
        assert (opened.response.headers["x-tags"], opened.recv(20)) == ("seen", "seen")
        with pytest.raises(ConnectionClosed):
            opened.recv(20)
        assert opened.close_code == 4001
