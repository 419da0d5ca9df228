"""Chats of OpenAI's protocol: what ``chat`` gets, what it makes, and that as /v1/chat/completions.

Theory of operation. What ``chat`` yields goes through a :class:`Generation`, which counts tokens
and ends the text at a stop sequence. A *form* makes an answer of it, whole or as server-sent
events; :class:`Completion` is one, responses.py has the other.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

StopSequence = Annotated[str, Field(min_length=1, max_length=1000)]
StopSequences = Annotated[list[StopSequence], Field(max_length=4, fail_fast=True)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Item = dict[str, Any]


# --- What a client sends, as methods get it -------------------------------------------------------


class OpenAIRequest(BaseModel):
    """What a client sends: the fields that mean something here, and all others as they are."""

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


class ChatRequest(OpenAIRequest):
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


# --- What a method makes of it --------------------------------------------------------------------


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


class Generation:
    """One answer on its way, and what is known of it."""

    def __init__(self, made: Any, stops: Sequence[str]) -> None:
        self.finish_reason: FinishReason | None = None
        self._made = made
        self._cutter = StopCutter(stops)
        self._texts: list[str] = []
        self._fragments: list[Item] = []
        self._counted = 0
        self._prompt_tokens = 0
        self._completion_tokens: int | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def calls(self) -> list[Item]:
        """The tool calls so far, each put together of its fragments."""
        return _merged(self._fragments)

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
                text = self._cutter.feed(delta.content or "")
                if text or delta.tool_calls:
                    yield self._part(text, delta.tool_calls)
                if self._cutter.is_stopped:
                    self.finish_reason = "stop"
                    return
        if rest := self._cutter.rest():
            yield self._part(rest)
        self.finish_reason = self.finish_reason or ("tool_calls" if self._fragments else "stop")

    def _part(self, text: str, fragments: Sequence[Item] = ()) -> Delta:
        self._texts.append(text)
        self._fragments += fragments
        return Delta(text or None, fragments)

    def _count(self, delta: Delta) -> None:
        self._counted += bool(delta.content)
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        if delta.completion_tokens is not None:
            self._completion_tokens = delta.completion_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason


async def _single(value: Any) -> AsyncGenerator[Any, None]:
    yield value


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


# --- Answers --------------------------------------------------------------------------------------


class Completion:
    """A chat's answer as /v1/chat/completions has it: whole, or in server-sent events."""

    def __init__(self, asked: ChatRequest, request_id: str) -> None:
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": asked.model,
        }
        self._wants_usage = asked.stream_options is not None and asked.stream_options.include_usage

    def whole(self, generation: Generation) -> Item:
        """Return the answer, of a generation that has ended."""
        text, calls = generation.text, generation.calls
        message: Item = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"tool_calls": calls, "content": text or None}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [_choice(generation.finish_reason, message=message)],
            "usage": generation.usage,
        }

    def begun(self) -> Iterator[str]:
        """Give the events before the first part."""
        yield self._event([_choice(None, delta={"role": "assistant", "content": ""})])

    def part(self, delta: Delta) -> Iterator[str]:
        """Give those of a part."""
        shown: Item = {} if delta.content is None else {"content": delta.content}
        if delta.tool_calls:
            shown["tool_calls"] = [{"index": 0, **call} for call in delta.tool_calls]
        yield self._event([_choice(None, delta=shown)])

    def ended(self, generation: Generation) -> Iterator[str]:
        """Give those after the last part."""
        yield self._event([_choice(generation.finish_reason, delta={})])
        if self._wants_usage:
            yield self._event([], generation.usage)
        yield "data: [DONE]\n\n"

    def failed(self, error: Item) -> str:
        """Return the last event, in place of what is missing."""
        return f"data: {json.dumps({'error': error})}\n\n"

    def _event(self, choices: list[Item], usage: dict[str, int] | None = None) -> str:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return f"data: {json.dumps(chunk | {'usage': usage} if self._wants_usage else chunk)}\n\n"


def _choice(reason: str | None, **content: Item) -> Item:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}
