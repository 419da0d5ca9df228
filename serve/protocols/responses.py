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
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from greenroom.serve.protocols.chats import ChatRequest, Delta, Generation, Item, OpenAIRequest

CONTENTS = {"input_text": "text", "output_text": "text"}  # parts of a message, as chats call them


class ResponsesRequest(OpenAIRequest):
    """What a client sends; other fields pass through to ``chat``."""

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

    def for_chat(self) -> ChatRequest:
        """Return the same request as a chat; ValueError for what that has not."""
        others = dict(self.model_extra or {})
        asked = {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.tools:
            others["tools"] = [_chat_tool(tool) for tool in self.tools]
            others["tool_choice"] = _chat_choice(self.tool_choice)
        return ChatRequest(**{**others, "model": self.model, "stream": self.stream, **asked})

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
    """A chat's answer as /v1/responses has it, with the methods of a Completion."""

    def __init__(self, asked: ResponsesRequest, request_id: str) -> None:
        self._id = request_id
        self._numbers = itertools.count()  # of events
        self._message: Item = {}  # the item of the text, once it has begun
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

    def whole(self, generation: Generation) -> Item:
        """Return the answer, of a generation that has ended."""
        usage, reason = generation.usage, generation.finish_reason or ""
        why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason)
        return {
            **self._head,
            "status": "incomplete" if why else "completed",
            "incomplete_details": {"reason": why} if why else None,
            "output": self._output(generation),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def begun(self) -> Iterator[str]:
        """Give the events before the first part."""
        unknown: Item = {"output": [], "usage": None, "incomplete_details": None}
        begun = {**self._head, "status": "in_progress", **unknown}
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)

    def part(self, delta: Delta) -> Iterator[str]:
        """Give those of a part; a call is given when it is whole."""
        if not delta.content:
            return
        if not self._message:
            yield self._message_added()
            yield self._of_message("content_part.added", part=_text_part(""))
        yield self._of_message("output_text.delta", delta=delta.content, logprobs=[])

    def ended(self, generation: Generation) -> Iterator[str]:
        """Give those after the last part."""
        whole = self.whole(generation)
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                yield from self._call(index, item)
            elif not self._message:
                yield self._message_added()
            else:
                text = generation.text
                yield self._of_message("output_text.done", text=text, logprobs=[])
                yield self._of_message("content_part.done", part=_text_part(text))
            yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(whole["status"], response=whole)

    def failed(self, error: Item) -> str:
        """Return the last event, in place of what is missing."""
        return self._event("", **{k: v for k, v in error.items() if k != "type"})

    def _output(self, generation: Generation) -> list[Item]:
        """Return the message, then the calls of functions."""
        text = generation.text
        calls = [
            {
                "id": f"fc_{self._id}_{number}",
                "type": "function_call",
                "call_id": call.get("id") or f"call_{self._id}_{number}",
                "name": call["function"].get("name", ""),
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for number, call in enumerate(generation.calls)
        ]
        return [self._said("completed", _text_part(text)), *calls] if text or not calls else calls

    def _said(self, status: str, *content: Item) -> Item:
        item = {"id": f"msg_{self._id}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": list(content)}

    def _message_added(self) -> str:
        self._message = self._said("in_progress")
        return self._event("output_item.added", output_index=0, item=self._message)

    def _of_message(self, kind: str, **fields: Any) -> str:
        place = {"output_index": 0, "item_id": self._message["id"], "content_index": 0}
        return self._event(kind, **place, **fields)

    def _call(self, index: int, item: Item) -> Iterator[str]:
        place = {"output_index": index, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        kind, arguments = "function_call_arguments", item["arguments"]
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event(f"{kind}.delta", **place, delta=arguments)
        yield self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments)

    def _event(self, kind: str, **fields: Any) -> str:
        name = f"response.{kind}" if kind else "error"
        data = {"type": name, "sequence_number": next(self._numbers), **fields}
        return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
