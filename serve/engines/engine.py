"""``serve.Engine``: a server of another maker, such as vLLM, as a deployment.

Theory of operation. Each replica starts the engine's command, waits until it is healthy, and passes
HTTP requests and WebSockets on to it as they are. The engine is part of the replica: where it ends
by itself the replica ends at once, with its exit code, so that all that is done about replicas that
die is done about engines: what was under way is retried where that may be, another one starts, and
the status shows the end of the log, in which is what the engine prints. A keeper (keeper.py) sees
to it that no engine outlives its replica.

Each request has a connection of its own. On one that was kept, a request might cross the engine's
closing of it, and nobody could tell whether it had run; within a host it would save 0.1 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Unpack
from urllib.parse import quote

import httptools
from pydantic import BeforeValidator, Field, field_validator
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI
from websockets.http11 import Response

from greenroom.actors.replica.asgi import AppSource
from greenroom.actors.replica.servable import ASGI_APP
from greenroom.actors.replica.user_code import MAX_STATS
from greenroom.core.config import LOOPBACK, MAX_WEBSOCKET_MESSAGE_BYTES, RuntimeEnv
from greenroom.core.errors import InvalidRequestError, NotBegunError
from greenroom.core.metrics import name_problem
from greenroom.core.validation import Settings, validated
from greenroom.serve.deployments import Application, Deployment, GivenOptions, deployment
from greenroom.serve.metrics import Gauge
from greenroom.serve.protocols.apps import instance

logger = logging.getLogger(__name__)

PORT = "{port}"
TEXTS = frozenset({"command", "health", "name", "version"})
GRACE_S = 5.0  # from SIGTERM to SIGKILL
PROBE_S, PROBE_TIMEOUT_S = 0.1, 10.0  # of its health, until it is ready
METRICS_TIMEOUT_S = 1.0
KILLED = 128 + signal.SIGKILL  # what a keeper that was killed has not said
ENDING_S = 1.0  # within which an engine that breaks connections is seen to have ended
CONNECT_S = 0.1  # on a host it takes less than a millisecond, or there is no room
READ_BYTES = 64 * 1024
# What is said of a connection, and not of a request; and what the client's own handshake has.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade expect".split()
)
HANDSHAKE = b"sec-websocket-"
SAFE = "/:@!$&'()*+,;=-._~"  # in a path, by RFC 3986
Headers = list[tuple[bytes, bytes]]


def _split(command: object) -> object:
    if not isinstance(command, str):
        return command
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise ValueError(f"cannot be split into words as a shell would: {error}") from None


class EngineSettings(Settings):
    """An engine's command, where ``{port}`` is the port to listen at, and the path of its health.

    ``ready_timeout_s`` is how long it may take from its start until it is healthy. ``load_metrics``
    are names of metrics at ``metrics_path`` that tell its load.
    """

    command: Annotated[tuple[str, ...], BeforeValidator(_split)]
    health: str
    ready_timeout_s: float = Field(gt=0)
    load_metrics: tuple[str, ...] = Field(max_length=MAX_STATS)
    metrics_path: str

    @property
    def constructor_timeout_s(self) -> float:
        """That of the replica, which says itself why its engine was not healthy in time."""
        return self.ready_timeout_s + 2 * PROBE_TIMEOUT_S

    @field_validator("command")
    @classmethod
    def _has_a_port(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any(PORT in part for part in command):
            raise ValueError(f"must have {PORT} where the engine is told its port")
        return command

    @field_validator("load_metrics")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if problem := name_problem(name):
                raise ValueError(f"{name!r} {problem}")
        return names

    @field_validator("health", "metrics_path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if not path.startswith("/") or any(character.isspace() for character in path):
            raise ValueError("expected a path, as /health")
        return path


def Engine(  # noqa: N802  # as its users know classes that deploy
    command: str | Iterable[str],
    *,
    health: str = "/health",
    ready_timeout_s: float = 600.0,
    load_metrics: Iterable[str] = (),
    metrics_path: str = "/metrics",
    env: Mapping[str, str] | None = None,
    **options: Unpack[GivenOptions],
) -> Deployment:
    """Make a server of another maker a deployment, to be bound without arguments.

        app = serve.Engine("vllm serve M --port {port}", max_ongoing_requests=64).bind()

    ``command`` is run without a shell; a string is split as a shell would. It has to listen on
    127.0.0.1 at ``{port}``, which each replica draws. A replica is started once ``health``, a path,
    answers with a status below 400, within ``ready_timeout_s`` seconds, and as healthy while it
    goes on to. The application's route prefix is taken off paths. ``load_metrics`` are names of
    at most 10 metrics that it has at ``metrics_path``; ``/-/metrics`` and policies of autoscaling
    get them, as of its last health check. ``env`` is the same as ``env_vars`` of the
    ``runtime_env`` in ``actor_options``, by which it gets its devices, too. ``options`` are a
    deployment's, of which ``name`` is "Engine" unless given. InvalidRequestError names what is
    wrong.
    """
    given = {
        "command": command,
        "health": health,
        "ready_timeout_s": ready_timeout_s,
        "load_metrics": load_metrics,
        "metrics_path": metrics_path,
    }
    settings = validated(EngineSettings, given)
    served = type("Engine", (EngineReplica,), {"settings": settings, "__module__": __name__})
    options.setdefault("constructor_timeout_s", settings.constructor_timeout_s)
    made: Deployment[Any] = deployment(**options)(served)
    if env is None:
        return made
    resources = made.actor_options.model_dump(exclude_unset=True, exclude={"runtime_env"})
    variables = validated(RuntimeEnv, {"env_vars": env})
    surrounds = variables.over(made.actor_options.runtime_env)
    return made.options(actor_options={**resources, "runtime_env": surrounds})


def build(arguments: dict[str, Any]) -> Application:
    """Make an engine an application, of a file's ``args`` or a command's KEY=VALUE words.

    Words are read as the values of a file are; InvalidRequestError where that fails.
    """
    import yaml  # noqa: PLC0415  # replicas do not need it

    given: dict[str, Any] = {}
    for name, value in arguments.items():
        is_scalar = isinstance(value, str) and name not in TEXTS
        try:
            given[name] = yaml.safe_load(value) if is_scalar else value
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or error  # without the lines around it
            raise InvalidRequestError(f"{name}={value!r}: is no YAML: {reason}") from None
    return Engine(**given).bind()


class EngineReplica:
    """One engine and its keeper."""

    settings: EngineSettings
    _is_stopping = False

    async def __init__(self) -> None:  # type: ignore[misc]  # a replica awaits it
        """Start the engine; return once it is healthy."""
        self._gauges = {name: Gauge(name, "Of an engine") for name in self.settings.load_metrics}
        self._load: dict[str, float] = {}
        self._load_failure = ""
        with socket.create_server((LOOPBACK, 0)) as drawn:
            self.port = drawn.getsockname()[1]
        command = [part.replace(PORT, str(self.port)) for part in self.settings.command]
        logger.info("starting the engine: %s", shlex.join(command))
        keeper = str(Path(__file__).with_name("keeper.py"))
        program = [sys.executable, "-I", "-S", keeper, str(GRACE_S)]
        # What runtime_env has installed is found first, such as the engine itself.
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        environ = {**os.environ, "PATH": path}
        ours, theirs = socket.socketpair()
        with theirs:  # it only forks
            subprocess.run([*program, *command], stdin=theirs.fileno(), env=environ, check=True)
        reader, self._keeper = await asyncio.open_connection(sock=ours)
        self._watching = asyncio.create_task(self._watch(reader))
        began_at = time.monotonic()
        while problem := await self._problem():
            if time.monotonic() - began_at > self.settings.ready_timeout_s:
                limit = f"ready_timeout_s={self.settings.ready_timeout_s:g}"
                raise RuntimeError(f"the engine is not healthy within {limit}: {problem}")
            await asyncio.sleep(PROBE_S)
        logger.info("the engine was ready after %.1f s", time.monotonic() - began_at)

    async def __del__(self) -> None:
        """End the engine, after its last request."""
        self._is_stopping = True
        self._keeper.write_eof()
        await self._watching

    async def check_health(self) -> None:
        """Raise where the engine says that it is not well."""
        if problem := _unwell(self.settings.health, await self._status()):
            raise RuntimeError(problem)
        if self._gauges:
            await self._read_load()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return its load, as it reported it at the last health check."""
        return self._load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request or a WebSocket on."""
        async with _errors():
            if scope["type"] == "websocket":
                await self._converse(scope, receive, send)
            elif scope["type"] == "http":
                async with contextlib.aclosing(self._ask(scope, receive)) as events:
                    async for event in events:
                        await send(event)

    async def _watch(self, keeper: asyncio.StreamReader) -> None:
        """Return when the engine has ended; if it was not asked to, end as it did."""
        code = int(await keeper.read() or KILLED)
        if self._is_stopping:
            return
        logger.error("the engine has ended by itself, with exit code %d", code)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code or 1)

    async def _problem(self) -> str:
        """Return why the engine is not healthy yet; "" where it is."""
        try:
            status = await asyncio.wait_for(self._status(), PROBE_TIMEOUT_S)
        except TimeoutError:
            return f"it has not answered {self.settings.health} for {PROBE_TIMEOUT_S:g} s"
        except OSError as error:
            return f"port {self.port} of {LOOPBACK}: {error}"
        return _unwell(self.settings.health, status)

    async def _status(self) -> int:
        async with contextlib.aclosing(self._get(self.settings.health)) as events:
            return int((await anext(events))["status"])

    async def _read_load(self) -> None:
        """Note the engine's load; one whose metrics cannot be had serves all the same."""
        text, failure = b"", ""
        try:
            async with (
                asyncio.timeout(METRICS_TIMEOUT_S),
                contextlib.aclosing(self._get(self.settings.metrics_path)) as events,
            ):
                status = (await anext(events))["status"]
                async for event in events:
                    text += event["body"]
            if status >= 400:
                failure = f"status {status}"
        except (OSError, TimeoutError) as error:
            failure = repr(error)
        self._load = {} if failure else metrics_in(text, self.settings.load_metrics)
        if not failure and (lacking := self._gauges.keys() - self._load.keys()):
            failure = f"no {', '.join(sorted(lacking))}"
        if failure not in {"", self._load_failure}:
            logger.warning("the engine's %s has %s", self.settings.metrics_path, failure)
        self._load_failure = failure
        for name, value in self._load.items():
            self._gauges[name].set(value)

    def _get(self, path: str) -> AsyncGenerator[Message]:
        target = {"raw_path": path.encode(), "query_string": b"", "root_path": ""}
        return self._ask({"method": "GET", "headers": [], **target}, _whole(b""))

    async def _connect(self) -> socket.socket:
        """Connect, again and again: many engines queue no more than five connections.

        What comes beyond that the kernel drops, and tries again after a second, or lets through,
        and resets when it is used.
        """
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError), contextlib.ExitStack() as unless_it_is:
                connection = unless_it_is.enter_context(socket.socket())
                connection.setblocking(False)
                async with asyncio.timeout(CONNECT_S):
                    await loop.sock_connect(connection, (LOOPBACK, self.port))
                unless_it_is.pop_all()
                return connection

    # --- HTTP -----------------------------------------------------------------------------------

    async def pass_on(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Pass a call's request on; yield status and headers, then the parts of the body."""
        target = {"raw_path": quote(path, safe=SAFE).encode(), "query_string": b"", "root_path": ""}
        scope = {"method": method, "headers": headers, **target}
        async with _errors(), contextlib.aclosing(self._ask(scope, _whole(body))) as events:
            async for event in events:
                if event["type"] == "http.response.start":
                    yield event["status"], event["headers"]
                elif event["body"]:
                    yield event["body"]

    async def _ask(self, scope: Scope, receive: Receive) -> AsyncGenerator[Message]:
        """Pass a request on; yield its answer's events."""
        reader, writer = await asyncio.open_connection(sock=await self._connect())
        sending = asyncio.create_task(_send_request(scope, receive, writer))
        sending.add_done_callback(lambda _: writer.transport.abort() if _failure(sending) else None)
        try:
            async for event in _answer(reader, is_head=scope["method"] == "HEAD"):
                yield event
        except ConnectionError as error:
            raise _failure(sending) or error from None
        finally:
            sending.cancel()
            writer.transport.abort()
            await asyncio.wait([sending])

    # --- WebSockets -----------------------------------------------------------------------------

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # that somebody connects
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in _of_handshake(scope["headers"])
        ]
        host = dict(headers).get("host", LOOPBACK)  # with which engines compare the origin
        connection = await self._connect()
        try:
            engine = await connect(
                f"ws://{host}{_target(scope).decode('latin-1')}",
                sock=connection,
                subprotocols=scope["subprotocols"] or None,
                additional_headers=[each for each in headers if each[0] != "host"],
                user_agent_header=None,
                compression=None,
                open_timeout=None,  # it is the application's to limit
                max_size=MAX_WEBSOCKET_MESSAGE_BYTES,
                ping_interval=None,
                proxy=None,
            )
        except InvalidStatus as refusal:
            answer = refusal.response
            await _refuse(
                send, answer.status_code, _of_handshake(_raw(answer)), bytes(answer.body or b"")
            )
            return
        except (InvalidURI, ValueError):
            connection.close()
            await _refuse(send, 400, [], b"the Host header names no host")
            return
        assert engine.response is not None, "it has answered"
        headers_back = _of_handshake(_raw(engine.response))
        async with engine:
            accepted = {"subprotocol": engine.subprotocol, "headers": headers_back}
            await send({"type": "websocket.accept", **accepted})
            tasks = [
                asyncio.create_task(_from_client(receive, engine)),
                asyncio.create_task(_to_client(engine, send)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.wait(tasks)


setattr(EngineReplica, ASGI_APP, AppSource(instance))


def _unwell(health: str, status: int) -> str:
    return f"the engine answers {health} with status {status}" if status >= 400 else ""


@contextlib.asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    """Tell of a broken connection to an engine as of an error; it may be near its end.

    With that end this process ends, which says more.
    """
    try:
        yield
    except ConnectionRefusedError:
        raise NotBegunError("the engine takes no connection") from None
    except OSError as error:
        await asyncio.sleep(ENDING_S)
        raise RuntimeError(f"the engine broke off: {error}") from error


def metrics_in(text: bytes, names: Collection[str]) -> dict[str, float]:
    """Return these metrics of a text in Prometheus's format, each the sum of its samples."""
    found: dict[str, float] = {}
    for line in text.decode(errors="replace").splitlines():
        name, labels, values = line.partition("{")
        if labels:  # a value of theirs may have spaces and braces, and no line has two sets
            values = values.rpartition("}")[2]
        else:
            name, _, values = line.partition(" ")
        with contextlib.suppress(ValueError, IndexError):
            value = float(values.split()[0])  # a time may follow
            if name in names and math.isfinite(value):
                found[name] = found.get(name, 0.0) + value
    return found


def _whole(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _target(scope: Scope) -> bytes:
    """Return path and query as the engine knows them: below the application's route."""
    path, prefix = scope["raw_path"], scope["root_path"]
    if path.startswith(prefix.encode()):
        path = path[len(prefix.encode()) :]
    else:  # it is written in another way, as with %61 for a letter
        path = quote(scope["path"].removeprefix(prefix), safe=SAFE).encode()
    path = path or b"/"
    return path + b"?" + scope["query_string"] if scope["query_string"] else path


def _without_hops(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    headers = [(name.lower(), value) for name, value in headers]
    named = b",".join(value for name, value in headers if name == b"connection").lower()
    dropped = HOP_BY_HOP | {word.strip() for word in named.split(b",")}
    return [each for each in headers if each[0] not in dropped]


def _of_handshake(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [each for each in _without_hops(headers) if not each[0].startswith(HANDSHAKE)]


def _raw(answer: Response) -> Headers:
    return [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.raw_items()]


async def _refuse(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Answer a WebSocket's handshake as a request."""
    start = {"status": status, "headers": headers}
    await send({"type": "websocket.http.response.start", **start})
    await send({"type": "websocket.http.response.body", "body": body})


async def _send_request(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
    """Send a request; where it breaks off, the answer, or its end, says why."""
    headers = _without_hops(scope["headers"])
    if not any(name == b"host" for name, _ in headers):  # of HTTP/1.0
        headers.append((b"host", LOOPBACK.encode()))
    event = await receive()
    has_length = any(name == b"content-length" for name, _ in headers)
    is_chunked = event.get("more_body", False) and not has_length
    if is_chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    headers.append((b"connection", b"close"))
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), _target(scope))]
    lines += [b"%s: %s" % each for each in headers]
    writer.write(b"\r\n".join([*lines, b"", b""]))
    with contextlib.suppress(OSError):
        while event["type"] == "http.request":
            body = event.get("body", b"")
            if body:
                writer.write(b"%x\r\n%s\r\n" % (len(body), body) if is_chunked else body)
            if not event.get("more_body", False):
                break
            await writer.drain()
            event = await receive()
        if is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _answer(reader: asyncio.StreamReader, *, is_head: bool) -> AsyncIterator[Message]:
    """Yield an answer's events as they come; ConnectionError where it breaks off."""
    answer = _Answer()
    parser = answer.parser = httptools.HttpResponseParser(answer)
    while not answer.is_complete:
        received = await reader.read(READ_BYTES)
        if not received:
            if not (answer.start and answer.ends_with_connection):
                raise ConnectionResetError("it closed the connection amid an answer")
            answer.is_complete = True
        else:
            parser.feed_data(received)
        if answer.start and not answer.has_begun:
            answer.has_begun, answer.is_complete = True, answer.is_complete or is_head
            yield answer.start
        if answer.has_begun and (answer.body or answer.is_complete):
            body, answer.body = b"".join(answer.body), []
            yield {"type": "http.response.body", "body": body, "more_body": not answer.is_complete}


class _Answer:
    """What a parser calls."""

    parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self._headers: Headers = []
        self.start: Message | None = None
        self.body: list[bytes] = []
        self.has_begun = self.is_complete = False
        self.ends_with_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status, headers = self.parser.get_status_code(), self._headers
        self._headers = []
        if status >= 200:  # else another head follows
            names = {name for name, _ in headers}
            self.ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
            headers = _without_hops(headers)
            self.start = {"type": "http.response.start", "status": status, "headers": headers}

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.start is not None


async def _from_client(receive: Receive, socket: ClientConnection) -> None:
    """Pass on what a client says, and that it closes."""
    with contextlib.suppress(ConnectionClosed):
        while (event := await receive())["type"] == "websocket.receive":
            text = event.get("text")
            await socket.send(event["bytes"] if text is None else text)
        code = event.get("code") or 1000
        await socket.close(
            code if code not in {1005, 1006, 1015} else 1000, event.get("reason") or ""
        )


async def _to_client(socket: ClientConnection, send: Send) -> None:
    """Pass on what the engine says, and that it closes."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = await socket.recv()
            part = {"text": message} if isinstance(message, str) else {"bytes": message}
            await send({"type": "websocket.send", **part})
    code = socket.close_code
    ours = code is not None and code not in {1005, 1006, 1015}
    await send(
        {
            "type": "websocket.close",
            "code": code if ours else (1000 if code == 1005 else 1011),
            "reason": socket.close_reason or "",
        }
    )
