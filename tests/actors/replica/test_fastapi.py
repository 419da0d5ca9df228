"""FastAPI's own features behind a route prefix and a root path, over HTTP."""

import asyncio
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Cookie,
    Depends,
    FastAPI,
    Form,
    Header,
    HTTPException,
    Request,
    Response,
    UploadFile,
)
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse

from greenroom import serve
from tests.support.systems import RunningSystem, running_system, wait_until

ROOT, ROUTE = "/gateway", "/shop"


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

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        app.state.opened = "by the lifespan"
        yield {"shared": "for requests"}

    app = FastAPI(title="Shop", lifespan=lifespan)
    app.add_middleware(CORSMiddleware, allow_origins=["https://a.example"])

    @app.middleware("http")
    async def stamped(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["x-stamp"] = request.method
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

    @app.get("/works-on")
    async def works_on(later: BackgroundTasks) -> StreamingResponse:
        async def work() -> None:
            while not (notes / "read").exists():
                await asyncio.sleep(0.01)
            (notes / "worked").touch()

        later.add_task(work)
        return StreamingResponse(iter(["all", " of it"]), background=later)

    @app.get("/headers")
    async def headers(
        x_token: Annotated[str, Header()], last: Annotated[str | None, Cookie()] = None
    ) -> list[Any]:
        return [x_token, last]

    @app.post("/form")
    async def form(name: Annotated[str, Form()], files: list[UploadFile]) -> dict[str, Any]:
        return {"name": name, "sizes": [len(await each.read()) for each in files]}

    @app.get("/state")
    async def state(request: Request) -> list[str]:
        return [request.app.state.opened, request.state.shared]

    @app.get("/urls")
    async def urls(request: Request) -> dict[str, str]:
        named = request.url_for("item", item="x").path
        return {"path": request.url.path, "named": named, "root": request.scope["root_path"]}

    @app.get("/here")
    async def here(request: Request) -> bool:
        return not await request.is_disconnected()

    @app.api_route("/any", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
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


class Got(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


Ask = Callable[..., Got]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[RunningSystem]:
    """Give a system below a root path, with the app below a route prefix."""
    notes = str(folder)
    app = serve.deployment(serve.ingress(lambda: make_app(notes))())
    state = tmp_path_factory.mktemp("shop")
    with running_system(state, GREENROOM_HTTP_ROOT_PATH=ROOT) as running:
        running.deploy(app.options(name="Shop").bind(), name="shop", route_prefix=ROUTE)
        yield running


@pytest.fixture(scope="module")
def ask(shop: RunningSystem) -> Ask:
    opener = urllib.request.build_opener(_NoRedirects)

    def ask(path: str, data: Any = None, method: str | None = None, **head: str) -> Got:
        if isinstance(data, dict):
            data, head["Content-Type"] = json.dumps(data).encode(), "application/json"
        head = {name.replace("_", "-"): value for name, value in head.items()}
        request = urllib.request.Request(
            f"{shop.url}{ROOT}{ROUTE}{path}", data=data, method=method, headers=head
        )
        try:
            with opener.open(request, timeout=20) as response:
                return Got(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Got(error.code, error.headers, error.read())

    return ask


def test_dependencies_are_opened_and_closed(ask: Ask, folder: Path) -> None:
    assert ask("/items/a%20b").json == {"item": "a b", "using": "a session"}
    wait_until((folder / "session-closed").exists, 10, "the dependency is closed")


def test_exceptions_reach_their_handlers(ask: Ask) -> None:
    gone = ask("/items/gone")
    assert (gone.status, gone.json) == (410, {"sold_out": "gone"})
    teapot = ask("/items/teapot")
    assert (teapot.status, teapot.headers["x-kind"]) == (418, "pot")
    assert teapot.json == {"detail": {"why": "short and stout"}}


def test_models_are_validated_and_filtered(ask: Ask, folder: Path) -> None:
    added = ask("/items", {"name": "tea", "price": 2})
    assert (added.status, added.json) == (201, {"name": "tea", "price": 2.0})
    assert added.headers["set-cookie"].startswith("last=tea;")
    wait_until((folder / "added").exists, 10, "the background task runs")
    refused = ask("/items", {"price": "much"})
    assert refused.status == 422
    assert [each["loc"] for each in refused.json["detail"]] == [["body", "name"], ["body", "price"]]


def test_headers_and_cookies_are_parameters(ask: Ask) -> None:
    assert ask("/headers", X_Token="t", Cookie="last=tea").json == ["t", "tea"]
    assert ask("/headers").status == 422


def test_forms_and_several_files_arrive(ask: Ask) -> None:
    parts = [b'name="name"\r\n\r\nAda']
    parts += [b'name="files"; filename="f"\r\n\r\n' + b"x" * size for size in (0, 10, 70_000)]
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    got = ask("/form", body + b"--b--\r\n", Content_Type="multipart/form-data; boundary=b")
    assert got.json == {"name": "Ada", "sizes": [0, 10, 70_000]}


def test_the_lifespan_leaves_state_for_app_and_requests(ask: Ask) -> None:
    assert ask("/state").json == ["by the lifespan", "for requests"]


def test_urls_have_the_root_path_and_the_prefix(ask: Ask) -> None:
    assert ask("/urls").json == {
        "path": f"{ROOT}{ROUTE}/urls",
        "named": f"{ROOT}{ROUTE}/items/x",
        "root": ROOT + ROUTE,
    }
    redirect = ask("/routed/slash")
    assert redirect.status == 307
    assert redirect.headers["location"].endswith(f"{ROOT}{ROUTE}/routed/slash/")
    assert ask("/routed/slash/").json == "with a slash"


def test_a_mounted_app_is_below_all_of_them(ask: Ask) -> None:
    assert ask("/inner/root").json == f"{ROOT}{ROUTE}/inner"
    assert ask("/inner/openapi.json").json["servers"] == [{"url": f"{ROOT}{ROUTE}/inner"}]


def test_the_schema_and_both_its_pages_link_to_the_right_place(ask: Ask) -> None:
    schema = ask("/openapi.json").json
    assert schema["servers"] == [{"url": ROOT + ROUTE}]
    assert "/items/{item}" in schema["paths"]
    for page in ("/docs", "/redoc"):
        assert f"{ROOT}{ROUTE}/openapi.json".encode() in ask(page).body


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_all_methods_reach_the_app(ask: Ask, method: str) -> None:
    assert ask("/any", method=method).json == method


def test_head_has_no_body_and_unknown_methods_are_the_apps_405(ask: Ask) -> None:
    head = ask("/any", method="HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "6")
    refused = ask("/items/x", method="PURGE")
    assert (refused.status, refused.headers["allow"]) == (405, "GET")


def test_its_own_middlewares_run(ask: Ask) -> None:
    got = ask("/any", Origin="https://a.example")
    assert got.headers["x-stamp"] == "GET"
    assert got.headers["access-control-allow-origin"] == "https://a.example"
    preflight = ask(
        "/any",
        method="OPTIONS",
        Origin="https://a.example",
        Access_Control_Request_Method="GET",
    )
    assert preflight.status == 200
    assert "GET" in preflight.headers["access-control-allow-methods"]


def test_a_stream_that_breaks_off_behind_its_middlewares_is_cut(ask: Ask) -> None:
    with pytest.raises(http.client.IncompleteRead):
        ask("/breaks")


def test_a_stream_ends_before_the_background_tasks_behind_it(ask: Ask, folder: Path) -> None:
    assert ask("/works-on").body == b"all of it"
    (folder / "read").touch()
    wait_until((folder / "worked").exists, 20, "the task's end")


def test_a_client_that_waits_is_not_gone(ask: Ask) -> None:
    assert ask("/here").json is True


@pytest.mark.parametrize(
    ("path", "status", "item"),
    [
        ("/items/%C3%A4", 200, "ä"),
        ("/items/%ff", 200, "\ufffd"),
        ("/items/%00", 200, "\0"),
        ("/items/x?q=%ff", 200, "x"),
        ("/items/a%2Fb", 404, None),  # decoded before it is routed, as ASGI has it
    ],
)
def test_odd_paths_and_queries_reach_the_app(
    ask: Ask, path: str, status: int, item: str | None
) -> None:
    got = ask(path)
    assert (got.status, got.json.get("item")) == (status, item)
