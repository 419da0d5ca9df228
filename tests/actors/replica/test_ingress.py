"""ASGI apps as deployments, through real HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from greenroom import serve
from greenroom.core import errors as exceptions
from tests.actors.one_process import load
from tests.support.asking import Got, ask as ask_url

Ask = Callable[..., Got]


@pytest.fixture
def ask(running, name):
    """Ask this test's deployment for a path below its route."""
    return lambda path, *args: ask_url(f"{running.url}/{name}{path}", *args)


def greeting() -> str:
    return "hello"


def make_app() -> FastAPI:
    app = FastAPI(title="Models")

    @app.get("/plain/{number}")
    async def plain(number: int, said: str = Depends(greeting)) -> dict[str, Any]:
        return {"number": number, "said": said}

    @app.get("/broken")
    def broken() -> None:
        raise ValueError("broken on purpose")

    return app


class_app = make_app()


@serve.deployment
class Doubler:
    def __call__(self, number: int) -> int:
        return 2 * number


@serve.deployment
@serve.ingress(class_app)
class Model:
    def __init__(self, factor: int, doubler: Any) -> None:
        self.factor = factor
        self.doubler = doubler

    @class_app.get("/scaled/{number}")
    async def scaled(self, number: int, plus: int = 0) -> dict[str, int]:
        return {"result": self.factor * number + plus}

    @class_app.get("/doubled/{number}")
    async def doubled(self, number: int) -> int:
        return int(await self.doubler.remote(number))

    @class_app.get("/in-a-thread")
    def in_a_thread(self) -> int:
        return self.factor

    @class_app.get("/named-alike")
    def named_alike(self) -> int:
        return self.factor

    @class_app.post("/named-alike")
    def named_alike(self, number: int) -> int:  # noqa: F811  # each is its route's, as in Ray Serve
        return self.factor + number

    @staticmethod
    @class_app.get("/static/{number}")
    def without_self(number: int) -> int:
        return number

    def by_handle(self, number: int) -> int:
        return self.factor + number


def test_routes_of_a_class_see_self_and_other_handles(deployed, ask):
    handle = deployed(Model.bind(3, Doubler.bind()))
    assert ask("/scaled/5").json == {"result": 15}
    assert ask("/scaled/5?plus=1").json == {"result": 16}
    assert ask("/doubled/21").json == 42
    assert ask("/in-a-thread").json == 3
    assert ask("/named-alike").json == 3
    assert ask("/named-alike?number=4", None, "POST").json == 7
    assert ask("/static/8").json == 8
    assert ask("/plain/7").json == {"number": 7, "said": "hello"}
    shown = ask("/openapi.json").json["paths"]["/scaled/{number}"]["get"]["parameters"]
    assert [each["name"] for each in shown] == ["number", "plus"]
    broken = ask("/broken")
    assert broken.status == 500
    assert b"broken on purpose" not in broken.body
    assert handle.by_handle.remote(4).result(timeout_s=20) == 7


shared_app = FastAPI()
inner_app = FastAPI()


@shared_app.get("/function")
def function() -> str:
    return "the app's"


class Base:
    @shared_app.get("/inherited")
    def inherited(self) -> str:
        return type(self).__name__


@serve.ingress(shared_app)
class One(Base):
    @shared_app.get("/")
    def root(self) -> str:
        return f"one {type(self).__name__}"

    @shared_app.get("/only-one")
    def only_one(self) -> int:
        return 1


@serve.ingress(shared_app)
class Two(Base):
    @shared_app.get("/")
    def root(self) -> str:
        return f"two {type(self).__name__}"

    @shared_app.get("/only-two")
    def only_two(self) -> int:
        return 2


@pytest.mark.parametrize(("cls", "other"), [(One, "two"), (Two, "one")])
def test_two_classes_share_an_app_and_each_serves_its_own_routes(deployed, ask, cls, other):
    deployed(serve.deployment(cls).bind())
    own = cls.__name__.lower()
    assert ask("/").json == f"{own} {cls.__name__}"
    assert ask(f"/only-{own}").status == 200
    assert ask(f"/only-{other}").status == 404
    assert ask("/inherited").json == cls.__name__
    assert ask("/function").json == "the app's"
    paths = ask("/openapi.json").json["paths"]
    assert set(paths) == {"/function", "/inherited", "/", f"/only-{own}"}
    assert ask("/docs").status == 200


@serve.deployment(graceful_shutdown_timeout_s=0.1)  # one task would hold it up for a minute
@serve.ingress(shared_app)
class Caller:
    def __init__(self) -> None:
        shared_app.mount("/inner", inner_app)

    @shared_app.get("/raises/{kind}")
    async def raises(self, kind: str) -> None:
        raise getattr(exceptions, kind)("of a call")

    @staticmethod
    @inner_app.get("/raises/{kind}")
    async def raises_below(kind: str) -> None:
        raise getattr(exceptions, kind)("of a call")

    @shared_app.get("/answers")
    async def answers(self) -> Response:
        return PlainTextResponse("the app's own", 500, background=BackgroundTask(asyncio.sleep, 60))


def test_what_a_call_of_a_handler_raises_keeps_its_status(deployed, ask):
    deployed(Caller.bind())
    for kind in ["BackPressureError", "DeploymentUnavailableError", "ReplicaUnavailableError"]:
        for place in ["", "/inner"]:
            got = ask(f"{place}/raises/{kind}")
            assert (got.status, got.headers["Retry-After"] is not None) == (503, True), got
    assert ask("/raises/QueryTimeoutError").status == 408
    broken = ask("/raises/GreenroomError")
    assert (broken.status, broken.body) == (500, b"Internal Server Error")
    assert ask("/answers").body == b"the app's own"


def test_a_lifespan_runs_around_it_and_leaves_state(one_process, tmp_path):
    @contextlib.asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[dict[str, str]]:
        await asyncio.sleep(0)
        yield {"model": "loaded"}
        (tmp_path / "closed").touch()

    async def state(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.state.model)

    def factory() -> Starlette:
        return Starlette(routes=[Route("/state", state)], lifespan=lifespan)

    one = one_process(serve.ingress(factory)())
    assert one.run(one.http(path="/state")).body == b"loaded"
    assert not (tmp_path / "closed").exists()
    one.finalize()
    assert (tmp_path / "closed").exists()


def test_a_shutdown_that_fails_does_not_keep_the_instance_from_ending(one_process, tmp_path):
    @contextlib.asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        yield
        raise RuntimeError("no way out")

    @serve.ingress(lambda: Starlette(lifespan=lifespan))
    class Ends:
        def __del__(self) -> None:
            (tmp_path / "ended").touch()

    one = one_process(Ends)
    one.finalize()
    assert (tmp_path / "ended").exists()


@contextlib.asynccontextmanager
async def fails_to_start(_app: Any) -> AsyncIterator[None]:
    raise RuntimeError("no model here")
    yield


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: Starlette(lifespan=fails_to_start), "no model here"),
        (lambda: 42, "returned a int, which is no ASGI app"),
    ],
)
def test_an_app_that_cannot_begin_is_a_failed_start(factory, message):
    assert message in load(serve.ingress(factory)()).text


def test_an_app_without_a_class_finds_what_is_bound_to_it(deployed, ask, name):
    def make() -> FastAPI:
        app = FastAPI()

        @app.get("/doubled/{number}")
        async def doubled(number: int) -> int:
            return int(await serve.get_deployment_handle("Doubler").remote(number))

        return app

    deployed(serve.deployment(serve.ingress(make)()).bind(Doubler.bind(), size=3))
    assert ask("/doubled/4").json == 8


@pytest.mark.parametrize("nonsense", [42, None, "fastapi:app", lambda one, two: None])
def test_what_is_no_app_is_refused_naming_it(nonsense):
    with pytest.raises(TypeError, match=r"serve.ingress takes an ASGI app.*not "):
        serve.ingress(nonsense)
