"""OpenAI's newer API of text, ``/v1/responses``: the same ``chat``, asked and answered otherwise.

Theory of operation. A request becomes a ChatRequest, and what ``chat`` makes becomes output items:
a message, then the calls of functions. Nothing is kept between requests, so a client that goes on
with a conversation sends all of it. In a stream, text is sent as it comes, and a call of a function
when it is whole.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

CONTENTS = {"input_text": "text", "output_text": "text"}  # parts of a message, as chats call them
Item = dict[str, Any]


class ResponsesRequest(BaseModel):
    """What a client sends; other fields pass through to ``chat``."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=256)
    input: str | Annotated[list[Item], Field(min_length=1, max_length=10_000, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Annotated[list[Item], Field(max_length=1000, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: str | Item = "auto"
    stream: bool = False
    previous_response_id: None = Field(
        default=None, description="no response is kept: send the whole conversation"
    )

    def for_chat(self) -> Item:
        """Return the fields of the same request as a chat; ValueError for what that has not."""
        others = dict(self.model_extra or {})
        asked = {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.tools:
            others["tools"] = [_chat_tool(tool) for tool in self.tools]
            others["tool_choice"] = _chat_choice(self.tool_choice)
        return {**others, "model": self.model, "stream": self.stream, **asked}

    def _messages(self) -> Iterator[Item]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        for item in self.input:
            kind = item.get("type", "message")
            if kind == "message":
                yield {"role": item.get("role", "user"), "content": _content(item.get("content"))}
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                yield {"role": "assistant", "content": None, "tool_calls": [call]}
            elif kind == "function_call_output":
                content = _content(item.get("output"))
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            elif kind != "reasoning":  # which is of no use to another model
                raise ValueError(f"input: {kind!r:.100}: no such kind of item is taken here")


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": CONTENTS.get(str(part.get("type")), part.get("type"))}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _chat_tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        raise ValueError(f"tools: type={tool.get('type')!r:.100}: only functions are taken here")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _chat_choice(choice: str | Item) -> str | Item:
    if isinstance(choice, str) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


class Response:
    """One response: what of it is known before the answer, and its output."""

    def __init__(self, asked: ResponsesRequest, request_id: str) -> None:
        self._id = request_id
        self._head: Item = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "tools": asked.tools,
            "tool_choice": asked.tool_choice,
            "parallel_tool_calls": True,
            "temperature": getattr(asked, "temperature", None),
            "top_p": getattr(asked, "top_p", None),
            "metadata": getattr(asked, "metadata", None) or {},
            "previous_response_id": None,
            "error": None,
        }

    def begun(self) -> Item:
        """Return it while nothing is known of the answer."""
        unknown: Item = {"output": [], "usage": None, "incomplete_details": None}
        return {**self._head, "status": "in_progress", **unknown}

    def ended(self, output: list[Item], usage: dict[str, int], reason: str | None) -> Item:
        """Return it with its answer; ``reason`` is that of a chat's end."""
        why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason or "")
        return {
            **self._head,
            "status": "incomplete" if why else "completed",
            "incomplete_details": {"reason": why} if why else None,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def message(self, text: str, status: str = "completed") -> Item:
        """Return the output item with the text."""
        content = [_text_part(text)] if status == "completed" else []
        item = {"id": f"msg_{self._id}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def calls(self, calls: Iterable[Item]) -> list[Item]:
        """Return the output items of a chat's tool calls."""
        return [
            {
                "id": f"fc_{self._id}_{number}",
                "type": "function_call",
                "call_id": call.get("id") or f"call_{self._id}_{number}",
                "name": call["function"].get("name", ""),
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for number, call in enumerate(calls)
        ]

    def output(self, text: str, calls: Iterable[Item]) -> list[Item]:
        """Return all output items."""
        items = self.calls(calls)
        return [self.message(text), *items] if text or not items else items


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def events(
    response: Response,
    first: Any,
    others: AsyncGenerator[Any, None],
    merged: Callable[[Iterable[Item]], list[Item]],
    end: Callable[[], tuple[dict[str, int], str | None]],
    described: Callable[[Exception], Item],
) -> AsyncGenerator[str, None]:
    """Give a response as server-sent events, of Deltas: the first, None for none, and others.

    ``end`` returns usage and reason, once it is over.
    """
    numbers = itertools.count()
    texts: list[str] = []
    fragments: list[Item] = []

    def event(kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    message = response.message("", "in_progress")
    of_message = {"output_index": 0, "item_id": message["id"], "content_index": 0}
    async with aclosing(others):
        try:
            yield event("response.created", response=response.begun())
            yield event("response.in_progress", response=response.begun())
            part = first
            while part is not None:
                fragments += part.tool_calls
                if part.content:
                    if not texts:
                        yield event("response.output_item.added", output_index=0, item=message)
                        yield event(
                            "response.content_part.added", **of_message, part=_text_part("")
                        )
                    texts.append(part.content)
                    yield event(
                        "response.output_text.delta", **of_message, delta=part.content, logprobs=[]
                    )
                part = await anext(others, None)
            usage, reason = end()
            text = "".join(texts)
            output = response.output(text, merged(fragments))
            for index, item in enumerate(output):
                if item["type"] == "message":
                    if not texts:
                        yield event("response.output_item.added", output_index=0, item=message)
                    else:
                        yield event(
                            "response.output_text.done", **of_message, text=text, logprobs=[]
                        )
                        yield event(
                            "response.content_part.done", **of_message, part=_text_part(text)
                        )
                else:
                    of_call = {"output_index": index, "item_id": item["id"]}
                    begun = {**item, "arguments": "", "status": "in_progress"}
                    arguments = item["arguments"]
                    yield event("response.output_item.added", output_index=index, item=begun)
                    yield event(
                        "response.function_call_arguments.delta", **of_call, delta=arguments
                    )
                    yield event(
                        "response.function_call_arguments.done",
                        **of_call,
                        name=item["name"],
                        arguments=arguments,
                    )
                yield event("response.output_item.done", output_index=index, item=item)
            ended = response.ended(output, usage, reason)
            yield event(f"response.{ended['status']}", response=ended)
        except Exception as error:
            yield event("error", **{k: v for k, v in described(error).items() if k != "type"})
