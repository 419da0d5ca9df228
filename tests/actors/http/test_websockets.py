"""WebSockets through real HTTP: openings, messages, closes of every kind, back-pressure, deaths."""
# No postponed annotations: FastAPI resolves them in the replica, where this module's code is by
# value.

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from starlette.responses import JSONResponse
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from greenroom import serve
from tests.actors.noting import DEADLINE_S, Noting
from tests.support.metrics import ongoing
from tests.support.systems import running_system, wait_until

pytestmark = pytest.mark.anyio
api = FastAPI()


@serve.deployment(max_ongoing_requests=600)
@serve.ingress(api)
class Talk(Noting):
    """Whatever the tests below need."""

    @api.get("/pid")
    async def pid(self) -> int:
        return os.getpid()

    @api.websocket("/echo")
    async def echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        while (event := await websocket.receive())["type"] != "websocket.disconnect":
            await websocket.send({**event, "type": "websocket.send"})
        self.note(f"{event['code']} {event['reason']}")

    @api.websocket("/rooms/{room}")
    async def about(self, websocket: WebSocket, room: str, who: str = "?") -> None:
        subprotocols = websocket.scope["subprotocols"]
        chosen = subprotocols[-1] if subprotocols else None
        await websocket.accept(subprotocol=chosen, headers=[(b"x-own", b"1"), (b"X-B", b"2")])
        context = serve.get_request_context()
        await websocket.send_json(
            {
                "room": room,
                "who": who,
                "path": websocket.scope["path"],
                "root_path": websocket.scope["root_path"],
                "scheme": websocket.scope["scheme"],
                "subprotocols": subprotocols,
                "request_id": context.request_id,
                "model": serve.get_multiplexed_model_id(),
                "user": websocket.headers.get("x-user"),
            }
        )

    @api.websocket("/close/{code}")
    async def close(self, websocket: WebSocket, code: int, reason: str = "") -> None:
        await websocket.accept()
        await websocket.close(code, reason)
        self.note("closed")

    @api.websocket("/raise")
    async def fail(self, websocket: WebSocket) -> None:
        await websocket.accept()
        raise ValueError("broken on purpose")

    @api.websocket("/raise-first")
    async def fail_first(self, websocket: WebSocket) -> None:
        raise ValueError("broken on purpose")

    @api.websocket("/refuse")
    async def refuse(self, websocket: WebSocket) -> None:
        await websocket.close(4000)

    @api.websocket("/deny")
    async def deny(self, websocket: WebSocket) -> None:
        body = {"error": "no ticket"}
        await websocket.send_denial_response(JSONResponse(body, 401, {"www-authenticate": "x"}))

    @api.websocket("/receive")
    async def receive(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.receive_text()
        except WebSocketDisconnect as error:
            self.note(f"left {error.code}")
            raise

    @api.websocket("/flood")
    async def flood(self, websocket: WebSocket, size: int = 100_000, pause_s: float = 0) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.send_bytes(b"x" * size)
                with (self.folder / "sent").open("ab") as sent:
                    sent.write(b".")
                await asyncio.sleep(pause_s)
        finally:
            self.note("flood over")

    @api.websocket("/gated")
    async def gated(self, websocket: WebSocket) -> None:
        await websocket.accept()
        while not (self.folder / "gate").exists():
            await asyncio.sleep(0.01)
        total = 0
        while (event := await websocket.receive()).get("text") != "end":
            total += len(event["bytes"])
        await websocket.send_text(str(total))


@pytest.fixture
def url(running, name):
    return f"ws://127.0.0.1:{running.settings.http.port}/{name}"


@pytest.fixture(scope="module")
def talk(running, deployed_once, tmp_path_factory):
    """One for all who need to know nothing of what it did, and leave it as it was."""
    route = deployed_once(Talk.bind(str(tmp_path_factory.mktemp("talk"))))
    return f"ws://127.0.0.1:{running.settings.http.port}{route}"


@pytest.fixture
def own_talk(url, deployed, tmp_path):
    deployed(Talk.bind(str(tmp_path)))
    return url


async def end_of(client: ClientConnection) -> tuple[int, str]:
    """Read to the end; return the close code and reason."""
    with contextlib.suppress(ConnectionClosed):
        async for _ in client:
            pass
    return client.close_code or 1006, client.close_reason or ""


async def refusal(url: str, **options: Any) -> Any:
    with pytest.raises(InvalidStatus) as caught:
        await connect(url, **options)
    return caught.value.response


# --- openings ---------------------------------------------------------------------------------


async def test_a_route_sees_its_class_and_all_of_the_opening(talk):
    name = talk.rpartition("/")[2]
    async with connect(
        f"{talk}/rooms/a%20b?who=Ada",
        subprotocols=["v1", "v2"],
        additional_headers={
            "X-Request-ID": "mine",
            "X-User": "ada",
            "serve_multiplexed_model_id": "m7",
            "X-Serve-Shard-Key": "k",
        },
    ) as client:
        assert client.subprotocol == "v2"
        assert client.response is not None
        head = client.response.headers
        assert (head["x-own"], head["x-b"], head["x-request-id"]) == ("1", "2", "mine")
        assert await client.recv() == (
            '{"room":"a b","who":"Ada",'
            f'"path":"/{name}/rooms/a b","root_path":"/{name}","scheme":"ws",'
            '"subprotocols":["v1","v2"],"request_id":"mine","model":"m7","user":"ada"}'
        )


async def test_refusals_have_the_status_and_the_body_that_the_app_gives(talk):
    assert (await refusal(f"{talk}/refuse")).status_code == 403
    denied = await refusal(f"{talk}/deny", additional_headers={"X-Request-ID": "mine"})
    assert (denied.status_code, denied.body) == (401, b'{"error":"no ticket"}')
    assert (denied.headers["www-authenticate"], denied.headers["x-request-id"]) == ("x", "mine")
    assert (await refusal(f"{talk}/raise-first")).status_code == 500


async def test_what_is_no_asgi_app_says_that_it_takes_none(url, deployed):
    async def hello(request: Any) -> str:
        return "hello"

    deployed(serve.deployment(hello).bind())
    refused = await refusal(url)
    assert refused.status_code == 400
    assert b"takes no WebSockets" in refused.body
    assert b"serve.ingress" in refused.body


async def test_refusals_of_our_own_are_those_of_the_http_table(talk, running):
    port = running.settings.http.port
    assert (await refusal(f"ws://127.0.0.1:{port}/nowhere/at-all")).status_code == 404
    named = await refusal(f"{talk}/echo", additional_headers={"X-Serve-Call-Method": "pid"})
    assert (named.status_code, b"takes no WebSockets" in named.body) == (400, True)


# --- messages ---------------------------------------------------------------------------------


async def test_text_and_binary_of_any_size_come_back_whole(talk):
    async with connect(f"{talk}/echo", max_size=None) as client:
        for message in ("hello", "", "ä" * 100_000, b"", b"\0\xff", os.urandom(3_000_000)):
            await client.send(message)
            assert await client.recv() == message
        await client.send(["in ", "three ", "frames"])
        assert await client.recv() == "in three frames"


async def test_an_app_that_does_not_read_holds_its_client_back(own_talk, tmp_path):
    message = b"x" * 100_000
    async with connect(f"{own_talk}/gated", ping_interval=None) as client:
        sent = 0
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(client.send(message), 1)
                sent += 1
                assert sent < 500, "50 MB are somewhere"
        (tmp_path / "gate").touch()
        # What was given up was in the client's buffer already, whole.
        await client.send("end")
        assert int(await client.recv()) - sent * len(message) in {0, len(message)}


async def test_a_client_that_does_not_read_holds_the_app_back(own_talk, tmp_path):
    def sent() -> int:
        path = tmp_path / "sent"  # noted after the message has left
        return path.stat().st_size if path.exists() else 0

    async with connect(f"{own_talk}/flood", max_queue=1, ping_interval=None) as client:
        await client.recv()
        while not sent():
            await asyncio.sleep(0.01)
        before = -1
        while (now := sent()) != before:
            before = now
            await asyncio.sleep(0.5)
        assert now < 300, "30 MB are somewhere"
        for _ in range(now):
            await client.recv()
        while sent() <= now:  # until it goes on
            await asyncio.sleep(0.01)
        client.transport.abort()  # its close would wait behind what is not read


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("close/1000", 1000, ""),
        ("close/3003?reason=enough", 3003, "enough"),
        ("close/4999?reason=" + "%C3%A4" * 100, 4999, "ä" * 61),
        ("close/1006", 1011, "the deployment raised an exception"),
        ("close/99999", 1011, "the deployment raised an exception"),
        ("rooms/1", 1000, ""),
        ("raise", 1011, "the deployment raised an exception"),
    ],
)
async def test_user_code_ends_it(talk, path, code, reason):
    async with connect(f"{talk}/{path}") as client:
        assert await end_of(client) == (code, reason)


async def test_user_code_hears_how_its_client_left(own_talk, noted):
    async with connect(f"{own_talk}/echo") as client:
        await client.close(4321, "lunch")
    client = await connect(f"{own_talk}/receive")
    client.transport.abort()
    await client.wait_closed()
    noted("4321 lunch")
    noted("left 1006")


@pytest.mark.parametrize("unread", [0, 20])
async def test_a_client_that_leaves_ends_what_is_sent_to_it_and_frees_the_slot(
    own_talk, noted, running, name, unread
):
    slowly = "?size=10&pause_s=0.05" if unread else ""  # or the client's part would not be read
    client = await connect(f"{own_talk}/flood{slowly}", ping_interval=None)
    await client.recv()
    for _ in range(unread):
        with contextlib.suppress(TimeoutError):  # user code reads nothing, so little is taken
            await asyncio.wait_for(client.send(b"x" * 100_000), 0.2)
    client.transport.abort()
    await client.wait_closed()
    noted("flood over")
    wait_until(lambda: ongoing(running, name) == 0, DEADLINE_S, "the slot is free")


# --- deaths and stops -------------------------------------------------------------------------


async def test_a_replica_that_drains_closes_with_1012_at_once_and_its_code_hears_it(
    own_talk, deployed, tmp_path, noted
):
    async with connect(f"{own_talk}/echo") as client:
        loop = asyncio.get_running_loop()
        newer = Talk.options(version="2").bind(str(tmp_path))
        deploying = loop.run_in_executor(None, deployed, newer)
        assert await end_of(client) == (1012, "the replica stops")
        await deploying
    async with connect(f"{own_talk}/echo") as client:
        await client.send("again")
        assert await client.recv() == "again"
    noted("1012 the replica stops")


@pytest.mark.slow
async def test_a_stop_of_the_system_closes_with_1012(tmp_path):
    with running_system(tmp_path / "state") as own:
        own.deploy(Talk.bind(str(tmp_path)))
        url = f"ws://127.0.0.1:{own.settings.http.port}/echo"
        async with connect(url) as client:
            loop = asyncio.get_running_loop()
            stopping = loop.run_in_executor(None, own.greenroom, "stop")
            code, _ = await end_of(client)
            assert code == 1012
            assert (await stopping).returncode == 0


async def test_a_killed_replica_closes_with_1011(own_talk, running, name):
    async with connect(f"{own_talk}/echo") as client:
        os.kill(running.replica_pids(name)[0], signal.SIGKILL)
        code, reason = await end_of(client)
        assert (code, "died" in reason) == (1011, True)


@pytest.mark.slow
async def test_it_outlives_the_proxy_and_all_ends_are_noticed_all_the_same(tmp_path, noted):
    """The proxy that follows it knows nothing of it."""
    with running_system(tmp_path / "state") as own:
        own.deploy(Talk.bind(str(tmp_path)))
        url = f"ws://127.0.0.1:{own.settings.http.port}"
        async with connect(f"{url}/echo") as client, connect(f"{url}/receive") as other:
            old = own.pid_of("proxy")
            os.kill(old, signal.SIGKILL)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                None,
                wait_until,
                lambda: [p for r, p in own.pids() if r == "proxy" and p != old],
                DEADLINE_S,
                "another proxy",
            )
            await client.send("still here")
            assert await client.recv() == "still here"
            await client.close(1000, "bye")
            # The client has the answer to its close before the replica has heard of it.
            await loop.run_in_executor(None, noted, "1000 bye")
            os.kill(own.pid_of("http worker"), signal.SIGKILL)
            assert (await end_of(other))[0] == 1006
        wait_until(lambda: ongoing(own, "default") == 0, DEADLINE_S, "the slots are free")
