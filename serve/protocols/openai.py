"""``serve.openai``: a class with ``chat`` or ``embeddings``, say, speaks OpenAI's protocol.

Theory of operation. Requests are pydantic models with the fields that mean something here; all
others pass through to the method. What a method yields goes through a :class:`_Generation`, which
counts tokens and ends the text at a stop sequence. It is sent as server-sent events, or collected.
The first part is awaited before an answer begins, so that what fails before it has a status.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import json
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from greenroom.actors.replica import context as user_context
from greenroom.core.errors import PASSED_ON, BackPressureError
from greenroom.core.validation import problems_in
from greenroom.serve.protocols import responses
from greenroom.serve.protocols.apps import ClosingStream, give_app, instance, log_failure, read_body

__all__ = [
    "ChatRequest",
    "Delta",
    "Embeddings",
    "EmbeddingsRequest",
    "OpenAIError",
    "openai",
]

MAX_BODY_BYTES = 16 << 20  # JSON takes many times its size in memory, and images are in it
METHODS = ("chat", "embeddings")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
T = TypeVar("T", bound=type)
R = TypeVar("R", "ChatRequest", "EmbeddingsRequest", responses.ResponsesRequest)
StopSequence = Annotated[str, Field(min_length=1, max_length=1000)]
StopSequences = Annotated[list[StopSequence], Field(max_length=4, fail_fast=True)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


# --- Requests, as methods get them ----------------------------------------------------------------


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=256)
    user: str | None = None


class _StreamOptions(BaseModel):
    include_usage: bool = False


class Message(BaseModel):
    """A message of a chat; ``content`` is text, or a list of parts as the protocol has them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | list[Any] | None = None


class ChatRequest(_Request):
    """What ``chat`` gets: the fields below, and all others that the client sent, as attributes."""

    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: Literal[1] | None = None  # one choice: ask again for another
    stop: StopSequence | StopSequences | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Annotated[list[dict[str, Any]], Field(max_length=1000, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_limit(self) -> int | None:
        """The most tokens to make, by either of its names."""
        return self.max_completion_tokens or self.max_tokens


class EmbeddingsRequest(_Request):
    """What ``embeddings`` gets; ``inputs`` is a list of texts, or of lists of tokens."""

    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=2048, fail_fast=True)]
        | Annotated[list[int], Field(min_length=1, fail_fast=True)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=2048, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """All inputs, of which each has a vector."""
        given = self.input
        if isinstance(given, str):
            return [given]
        return [given] if isinstance(given[0], int) else given


# --- Answers, as methods give them ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer; a str stands for one with that content.

    ``tool_calls`` are fragments in OpenAI's form: those of one call share an ``index``, and their
    arguments are strung together. Each content counts as one token, unless the last
    ``completion_tokens`` says how many there were in all. ``finish_reason`` is "stop", or
    "tool_calls" where there are any, unless the last one says otherwise.
    """

    content: str | None = None
    tool_calls: Sequence[dict[str, Any]] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors, one per input and in their order, and how many tokens the inputs had."""

    vectors: Sequence[Sequence[float]]
    prompt_tokens: int = 0


class OpenAIError(Exception):
    """What a method raises to answer with an error of its own, as OpenAI's clients read it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)  # what pickle makes it of again; the rest is in __dict__
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.status = status
        self.headers = headers
        self.body = {
            "message": message,
            "type": kind or _TYPES.get(status, default),
            "param": param,
            "code": code,
        }

    def __str__(self) -> str:
        return str(self.body["message"])


def openai(cls: Any = None, /, *, models: Iterable[str] = (), api_keys: Iterable[str] = ()) -> Any:
    """Serve a class's async methods as OpenAI's API: below ``@serve.deployment``.

    ``chat(request)`` yields, or returns, ``str | Delta``, for /v1/chat/completions and
    /v1/responses; ``embeddings(request)`` returns vectors, for /v1/embeddings. /v1/models has
    ``models``. Requests for other models are refused, and
    without ``models`` none is. With ``api_keys`` a request needs one of them, as bearer token; only
    their hashes are kept. TypeError or ValueError for what cannot be decorated.
    """
    if isinstance(api_keys, str) or isinstance(models, str):
        raise TypeError("api_keys and models are lists of strings")
    keys, names = list(api_keys), tuple(models)
    if not all(isinstance(key, str) and key for key in (*keys, *names)):
        raise ValueError("an API key or a model's name is empty or no string")
    hashes = tuple(_hash(key) for key in keys)

    def decorate(cls: T) -> T:
        for name in METHODS:
            method = getattr(cls, name, None)
            if method is not None and not (
                inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
            ):
                raise TypeError(f"@serve.openai: {name} must be made by 'async def'")
        return give_app(cls, "serve.openai", METHODS, partial(_make_app, names, hashes))

    return decorate if cls is None else decorate(cls)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# --- The app --------------------------------------------------------------------------------------


def _make_app(models: tuple[str, ...], hashes: tuple[bytes, ...]) -> Starlette:
    api = _Api(models, hashes)
    routes = [
        Route("/v1/chat/completions", api.handles(api.chat), methods=["POST"]),
        Route("/v1/responses", api.handles(api.responses), methods=["POST"]),
        Route("/v1/embeddings", api.handles(api.embeddings), methods=["POST"]),
        Route("/v1/models", api.handles(api.list_models)),
        Route("/v1/models/{model:path}", api.handles(api.get_model)),
    ]
    there = [f"{min(route.methods or ())} {route.path}" for route in routes]  # GET, not HEAD
    index = api.handles(partial(_answer_index, there))
    routes += [Route("/v1", index), Route("/v1/", index)]
    return Starlette(routes=routes, exception_handlers={HTTPException: partial(_refused, there)})


async def _answer_index(there: list[str], _request: Request) -> Response:
    return JSONResponse({"object": "list", "data": there})


async def _refused(there: list[str], _request: Request, error: Exception) -> Response:
    shown = _described(error)
    if shown.status == HTTPStatus.NOT_FOUND:
        shown = OpenAIError(shown.status, f"there is no such path; there are: {', '.join(there)}")
    return _error_response(shown)


class _Api:
    """What the routes do."""

    def __init__(self, models: tuple[str, ...], hashes: tuple[bytes, ...]) -> None:
        self._models = models
        self._hashes = hashes
        self._since = int(time.time())

    def handles(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                self._authorize(request)
                return await answer(request)
            except Exception as error:
                return _error_response(_described(error))

        return handle

    def _authorize(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _hash(key.strip())
        known = [hmac.compare_digest(given, each) for each in self._hashes]  # all of them, always
        if self._hashes and not (any(known) and scheme.lower() == "bearer"):
            raise OpenAIError(
                401,
                "the API key is missing or wrong; send it as bearer token",
                code="invalid_api_key",
            )

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        asked = await self._read(request, "chat", ChatRequest)
        return await _answer(asked, _Generation(instance().chat(asked), asked.stops))

    async def responses(self, request: Request) -> Response:
        """Answer what is asked in the form of the newer API."""
        given = await self._read(request, "chat", responses.ResponsesRequest)
        try:
            asked = ChatRequest.model_validate(given.for_chat())
        except ValidationError as error:
            raise OpenAIError(400, "; ".join(problems_in(error)), param="input") from None
        except ValueError as error:
            raise OpenAIError(400, str(error), param=str(error).partition(":")[0]) from None
        generation = _Generation(instance().chat(asked), asked.stops)
        parts = generation.parts()
        response = responses.Response(given, user_context.request_context().request_id)
        if given.stream:
            first = await anext(parts, None)
            events = responses.events(
                response,
                first,
                parts,
                _merged,
                lambda: (generation.usage, generation.finish_reason),
                lambda error: _described(error).body,
            )
            return ClosingStream(events, "text/event-stream")
        collected = [part async for part in parts]
        calls = _merged(call for part in collected for call in part.tool_calls)
        output = response.output(_text_of(collected), calls)
        return JSONResponse(response.ended(output, generation.usage, generation.finish_reason))

    async def embeddings(self, request: Request) -> Response:
        """Embed texts."""
        asked = await self._read(request, "embeddings", EmbeddingsRequest)
        made = await instance().embeddings(asked)
        made = made if isinstance(made, Embeddings) else Embeddings(made)
        vectors = [array("f", each) for each in made.vectors]
        if len(vectors) != len(asked.inputs):
            raise TypeError(f"embeddings made {len(vectors)} vectors of {len(asked.inputs)} inputs")
        encoded = _base64 if asked.encoding_format == "base64" else array.tolist
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
        return JSONResponse({"object": "list", "data": data, "model": asked.model, "usage": usage})

    async def list_models(self, _request: Request) -> Response:
        """List all models."""
        return JSONResponse({"object": "list", "data": list(map(self._described, self._models))})

    async def get_model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["model"]
        if name not in self._models:
            raise _no_model(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "greenroom"}

    async def _read(self, request: Request, method: str, kind: type[R]) -> R:
        """Return what is asked for; OpenAIError where a method or a model is not here."""
        if not hasattr(instance(), method):
            raise OpenAIError(404, f"this deployment has no {method}")
        try:
            asked = kind.model_validate_json(await read_body(request, MAX_BODY_BYTES))
        except ValidationError as error:
            where = error.errors()[0]["loc"]
            param = str(where[0]) if where else None
            raise OpenAIError(400, "; ".join(problems_in(error)), param=param) from None
        if self._models and asked.model not in self._models:
            raise _no_model(asked.model)
        return asked


def _no_model(name: str) -> OpenAIError:
    text = f"model={name[:100]!r}: no such model; /v1/models has all"
    return OpenAIError(404, text, param="model", code="model_not_found")


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _described(error: Exception) -> OpenAIError:
    """Return what a client gets of an error; one of user code's is logged."""
    if isinstance(error, OpenAIError):
        return error
    if isinstance(error, HTTPException):
        return OpenAIError(error.status_code, error.detail, headers=dict(error.headers or {}))
    if isinstance(error, PASSED_ON):
        status = 429 if isinstance(error, BackPressureError) else error.http_status
        after = error.retry_after_s
        return OpenAIError(
            status, str(error), headers=None if after is None else {"retry-after": f"{after:.0f}"}
        )
    log_failure(error)
    return OpenAIError(500, "the deployment raised an exception")


def _error_response(error: OpenAIError) -> Response:
    return JSONResponse({"error": error.body}, error.status, error.headers)


# --- Text, whole and in parts ---------------------------------------------------------------------


class StopCutter:
    """Ends a text before the stop sequence that is complete first, however the text is cut up.

    It holds back no more than what may be the beginning of one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_stopped = False
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """Take the text's next part; return what is certain to come before a stop sequence."""
        text = self._held + text
        places = [(text.find(stop), stop) for stop in self._stops]
        found = [(at + len(stop), at) for at, stop in places if at >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back, at the text's end."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of ``text`` are the first ones of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


class _Generation:
    """One answer on its way, and what is known of it."""

    def __init__(self, made: Any, stops: Sequence[str]) -> None:
        self.finish_reason: FinishReason | None = None
        self._made = made
        self._cutter = StopCutter(stops)
        self._counted = 0
        self._prompt_tokens = 0
        self._completion_tokens: int | None = None

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens, so far."""
        completion = self._counted if self._completion_tokens is None else self._completion_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }

    async def parts(self) -> AsyncGenerator[Delta, None]:
        """Yield what a client gets; the method's generator is closed at the end, whichever."""
        reason: FinishReason = "stop"
        async with AsyncExitStack() as stack:
            made = await self._made if inspect.isawaitable(self._made) else self._made
            values = made if hasattr(made, "__aiter__") else _single(made)
            if hasattr(values, "aclose"):
                await stack.enter_async_context(aclosing(values))
            async for value in values:
                delta = Delta(value) if isinstance(value, str) else value
                if not isinstance(delta, Delta):
                    raise TypeError(f"a method made a {type(delta).__name__}, not str or Delta")
                self._count(delta)
                reason = "tool_calls" if delta.tool_calls else reason
                text = self._cutter.feed(delta.content or "")
                if text or delta.tool_calls:
                    yield Delta(text or None, delta.tool_calls)
                if self._cutter.is_stopped:
                    self.finish_reason = "stop"
                    return
        if rest := self._cutter.rest():
            yield Delta(rest)
        self.finish_reason = self.finish_reason or reason

    def _count(self, delta: Delta) -> None:
        self._counted += bool(delta.content)
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        if delta.completion_tokens is not None:
            self._completion_tokens = delta.completion_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason


async def _single(value: Any) -> AsyncGenerator[Any, None]:
    yield value


def _text_of(parts: Sequence[Delta]) -> str:
    return "".join(part.content or "" for part in parts)


def _message(parts: Sequence[Delta]) -> dict[str, Any]:
    calls = _merged(call for part in parts for call in part.tool_calls)
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(parts), "refusal": None}
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"message": message, "logprobs": None}


def _merged(fragments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the fragments of tool calls together."""
    calls: dict[int, dict[str, Any]] = {}
    for fragment in fragments:
        index = fragment.get("index", 0)
        call = calls.setdefault(index, {"type": "function", "function": {"arguments": ""}})
        function, given = call["function"], fragment.get("function") or {}
        call |= {k: v for k, v in fragment.items() if k not in {"index", "function"}}
        arguments = function["arguments"] + (given.get("arguments") or "")
        call["function"] = {**function, **given, "arguments": arguments}
    return [calls[index] for index in sorted(calls)]


def _chat_chunk(part: Delta) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if part.content is not None:
        delta["content"] = part.content
    if part.tool_calls:
        delta["tool_calls"] = [{"index": 0, **call} for call in part.tool_calls]
    return {"delta": delta}


async def _answer(asked: ChatRequest, generation: _Generation) -> Response:
    parts = generation.parts()
    head = {
        "id": f"chatcmpl-{user_context.request_context().request_id}",
        "created": int(time.time()),
        "model": asked.model,
    }
    if asked.stream:
        first = await anext(parts, None)
        events = _events(asked, head, generation, first, parts)
        return ClosingStream(events, "text/event-stream")
    collected = [part async for part in parts]
    choice = {"index": 0, **_message(collected), "finish_reason": generation.finish_reason}
    whole = {"object": "chat.completion", "choices": [choice], "usage": generation.usage}
    return JSONResponse(head | whole)


async def _events(
    asked: ChatRequest,
    head: dict[str, Any],
    generation: _Generation,
    first: Delta | None,
    others: AsyncGenerator[Delta, None],
) -> AsyncGenerator[str, None]:
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        chunk = head | {"object": "chat.completion.chunk", "choices": choices}
        return f"data: {json.dumps(chunk | {'usage': usage} if wants_usage else chunk)}\n\n"

    def choice(content: dict[str, Any], reason: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]

    async with aclosing(others):
        try:
            yield event(choice({"delta": {"role": "assistant", "content": ""}}))
            if first is not None:
                yield event(choice(_chat_chunk(first)))
            async for part in others:
                yield event(choice(_chat_chunk(part)))
            yield event(choice(_chat_chunk(Delta()), generation.finish_reason))
            if wants_usage:
                yield event([], generation.usage)
        except Exception as error:
            yield f"data: {json.dumps({'error': _described(error).body})}\n\n"
        else:
            yield "data: [DONE]\n\n"
