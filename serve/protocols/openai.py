"""``serve.openai``: a class with ``chat`` or ``embeddings``, say, speaks OpenAI's protocol.

Theory of operation. Requests are pydantic models with the fields that mean something here; all
others pass through to the method. What ``chat`` makes is sent as server-sent events, or collected,
in the form of the path: see chats.py and responses.py. The first part is awaited before an answer
begins, so that what fails before it has a status.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from greenroom.actors.replica import context as user_context
from greenroom.core.errors import BackPressureError
from greenroom.core.validation import problems_in, unknown_name
from greenroom.serve.protocols import responses
from greenroom.serve.protocols.apps import (
    Answerer,
    ClosingStream,
    describe_failure,
    give_app,
    instance,
    make_app,
    read_body,
)
from greenroom.serve.protocols.chats import (
    ChatRequest as ChatRequest,
    Completion,
    Delta as Delta,
    Generation,
    OpenAIRequest,
    StopCutter as StopCutter,
)

MAX_BODY_BYTES = 16 << 20  # JSON takes many times its size in memory, and images are in it
METHODS = ("chat", "embeddings")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
T = TypeVar("T", bound=type)
R = TypeVar("R", bound=OpenAIRequest)
Form = Completion | responses.Response


class EmbeddingsRequest(OpenAIRequest):
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
    answers: dict[str, Answerer] = {
        "POST /v1/chat/completions": api.chat,
        "POST /v1/responses": api.responses,
        "POST /v1/embeddings": api.embeddings,
        "GET /v1/models": api.list_models,
        "GET /v1/models/{model:path}": api.get_model,
    }
    there = list(answers)

    async def index(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": there})

    answers |= {"GET /v1": index, "GET /v1/": index}
    allowed = {path: partial(api.authorize, answer) for path, answer in answers.items()}
    text = f"there is no such path; there are: {', '.join(there)}"
    return make_app(allowed, error_response, text)


class _Api:
    """What the routes do."""

    def __init__(self, models: tuple[str, ...], hashes: tuple[bytes, ...]) -> None:
        self._models = models
        self._hashes = hashes
        self._since = int(time.time())

    async def authorize(self, answer: Answerer, request: Request) -> Response:
        """Answer a request that has a key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _hash(key.strip())
        known = [hmac.compare_digest(given, each) for each in self._hashes]  # all of them, always
        if self._hashes and not (any(known) and scheme.lower() == "bearer"):
            raise OpenAIError(
                401,
                "the API key is missing or wrong; send it as bearer token",
                code="invalid_api_key",
            )
        return await answer(request)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        asked = await self._read(request, "chat", ChatRequest)
        return await _answer(asked, Completion(asked, _request_id()))

    async def responses(self, request: Request) -> Response:
        """Answer what is asked in the form of the newer API."""
        given = await self._read(request, "chat", responses.ResponsesRequest)
        try:
            asked = given.for_chat()
        except ValueError as error:
            raise _invalid(error) from None
        return await _answer(asked, responses.Response(given, _request_id()))

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
        return list_of(self._models, self._since)

    async def get_model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["model"]
        if name not in self._models:
            raise no_model(name, self._models)
        return JSONResponse(described(name, self._since))

    async def _read(self, request: Request, method: str, kind: type[R]) -> R:
        """Return what is asked for; OpenAIError where a method or a model is not here."""
        if not hasattr(instance(), method):
            raise OpenAIError(404, f"this deployment has no {method}")
        try:
            asked = kind.model_validate_json(await read_body(request, MAX_BODY_BYTES))
        except ValidationError as error:
            raise _invalid(error) from None
        if self._models and asked.model not in self._models:
            raise no_model(asked.model, self._models)
        return asked


def _invalid(error: ValueError) -> OpenAIError:
    if not isinstance(error, ValidationError):
        return OpenAIError(400, str(error), param=str(error).partition(":")[0])
    where = error.errors()[0]["loc"]
    param = str(where[0]) if where else None
    return OpenAIError(400, "; ".join(problems_in(error)), param=param)


def no_model(name: object, models: Iterable[str]) -> OpenAIError:
    """Return the error for a model that is not among those there are."""
    text = str(unknown_name("model", str(name)[:100], models))
    return OpenAIError(404, text, param="model", code="model_not_found")


def described(name: str, since: int = 0) -> dict[str, Any]:
    """Return what the protocol says of a model."""
    return {"id": name, "object": "model", "created": since, "owned_by": "greenroom"}


def list_of(models: Iterable[str], since: int = 0) -> Response:
    """Return the answer that lists the models."""
    data = [described(name, since) for name in models]
    return JSONResponse({"object": "list", "data": data})


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _described(error: Exception) -> OpenAIError:
    """Return what a client gets of an error."""
    if isinstance(error, OpenAIError):
        return error
    status, text, headers = describe_failure(error)
    if isinstance(error, BackPressureError):
        status = 429
    return OpenAIError(status, text, headers=headers)


def error_response(error: Exception) -> Response:
    """Answer for an error, in the protocol's form."""
    shown = _described(error)
    return JSONResponse({"error": shown.body}, shown.status, shown.headers)


# --- Answers, whole and in parts ------------------------------------------------------------------


def _request_id() -> str:
    return user_context.request_context().request_id


async def _answer(asked: ChatRequest, form: Form) -> Response:
    generation = Generation(instance().chat(asked), asked.stops)
    parts = generation.parts()
    if asked.stream:
        first = await anext(parts, None)  # what fails before it has a status
        return ClosingStream(_events(form, generation, first, parts), "text/event-stream")
    async for _ in parts:
        pass  # the generation keeps them
    return JSONResponse(form.whole(generation))


async def _events(
    form: Form, generation: Generation, part: Delta | None, others: AsyncGenerator[Delta, None]
) -> AsyncGenerator[str, None]:
    async with aclosing(others):
        try:
            for event in form.begun():
                yield event
            while part is not None:
                for event in form.part(part):
                    yield event
                part = await anext(others, None)
            for event in form.ended(generation):
                yield event
        except Exception as error:
            yield form.failed(_described(error).body)
