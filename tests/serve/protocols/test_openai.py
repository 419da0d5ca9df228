"""serve.openai, through the official client."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import AsyncIterator

import openai
import pytest
from hypothesis import given, strategies as st

from greenroom import serve
from greenroom.serve.exceptions import BackPressureError
from greenroom.serve.protocols.openai import (
    ChatRequest,
    Delta,
    Embeddings,
    EmbeddingsRequest,
    OpenAIError,
    StopCutter,
)
from tests.support.asking import ask
from tests.support.systems import RunningSystem, wait_until

WORDS = ["The ", "quick ", "brown ", "fox ", "EN", "D", " is ", "left ", "out"]
HI = [{"role": "user", "content": "hi"}]
KEY = "sk-of-the-test"


ERRORS = {
    "busy": BackPressureError("all places are taken"),
    "own error": OpenAIError(400, "too rude", param="messages", code="rude"),
    "breaks at once": LookupError("secret"),
}


@serve.deployment
@serve.openai(models=["tiny", "org/other"], api_keys=[KEY])
class Model:
    def __init__(self) -> None:
        self.closed = 0

    async def chat(self, request: ChatRequest) -> AsyncIterator[str | Delta]:
        asked = str(request.messages[-1].content)
        if asked == "calls":
            assert request.tools
            function = {"name": request.tools[0]["function"]["name"], "arguments": ""}
            yield Delta(tool_calls=[{"id": "call_1", "type": "function", "function": function}])
            for part in ['{"city":', ' "Ulm"}']:
                yield Delta(tool_calls=[{"index": 0, "function": {"arguments": part}}])
            return
        if asked == "forever":
            try:
                while True:
                    yield "on and "
                    await asyncio.sleep(0.005)
            finally:
                self.closed += 1
        if asked == "closed":
            yield str(self.closed)
            return
        if asked == "messages":
            asked_for = request.model_dump(include={"messages", "tools", "tool_choice"})
            yield json.dumps({**asked_for, "others": request.model_extra})
            return
        if asked in ERRORS:
            raise ERRORS[asked]
        for word in WORDS[: request.token_limit]:
            yield word
        if asked == "breaks":
            raise LookupError("secret")
        yield Delta(finish_reason="length" if request.token_limit else None, prompt_tokens=7)

    async def embeddings(self, request: EmbeddingsRequest) -> Embeddings:
        return Embeddings([[float(len(each)), 0.5] for each in request.inputs], prompt_tokens=3)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    system = RunningSystem(tmp_path_factory.mktemp("openai") / "state")
    system.start()
    try:
        system.deploy(Model.bind(), route_prefix="/llm")
        yield f"{system.url}/llm/v1"
    finally:
        system.stop()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def chat(client, text="hi", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_a_whole_answer_has_text_usage_and_reason(client):
    answer = chat(client)
    assert answer.choices[0].message.content == "".join(WORDS)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == len(WORDS)
    assert answer.usage.total_tokens == 7 + len(WORDS)
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")


def test_a_stream_has_the_same_parts(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-1]] == WORDS
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_ends_a_stream_that_asks_for_it(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == len(WORDS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_across_chunks_ends_the_text_before_it(client, stream):
    answer = chat(client, stream=stream, stop=["END", "never"])
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    assert text == "The quick brown fox "


def test_token_limits_reach_the_method_by_both_names(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = chat(client, **{name: 2})
        assert answer.choices[0].message.content == "The quick "
        assert answer.choices[0].finish_reason == "length"


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_tool_calls_pass_through(client):
    choice = chat(client, "calls", tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.id, call.function.name) == ("call_1", "weather")
    assert json.loads(call.function.arguments) == {"city": "Ulm"}


def test_tool_calls_are_streamed_in_fragments(client):
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "calls"}], tools=TOOLS
    ) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')


def respond(client, text="hi", **options):
    return client.responses.create(model="tiny", input=text, **options)


def test_a_response_has_text_usage_and_status(client):
    answer = respond(client)
    assert answer.output_text == "".join(WORDS)
    assert (answer.status, answer.model, answer.incomplete_details) == ("completed", "tiny", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, len(WORDS))
    assert answer.id.startswith("resp_")
    short = respond(client, max_output_tokens=2)
    assert (short.status, short.output_text) == ("incomplete", "The quick ")
    assert short.incomplete_details.reason == "max_output_tokens"


def test_a_response_is_streamed_as_the_client_puts_it_together(client):
    with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_response()
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert kinds.count("response.output_text.delta") == len(WORDS)
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert whole.output_text == "".join(WORDS)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_functions(client, stream):
    tools = [{"type": "function", "name": "weather", "parameters": {}, "strict": False}]
    if stream:
        with client.responses.stream(model="tiny", input="calls", tools=tools) as events:
            answer = events.get_final_response()
    else:
        answer = respond(client, "calls", tools=tools)
    [call] = answer.output
    assert (call.type, call.call_id, call.name) == ("function_call", "call_1", "weather")
    assert json.loads(call.arguments) == {"city": "Ulm"}


def test_a_response_is_asked_of_chat_with_the_whole_conversation(client):
    answer = respond(
        client,
        [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"role": "user", "content": "messages"},
        ],
        instructions="be brief",
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        tool_choice={"type": "function", "name": "f"},
        extra_body={"top_k": 3},
    )
    asked = json.loads(answer.output_text)
    assert asked["others"] == {"top_k": 3}
    assert asked["tools"][0]["function"]["name"] == "f"
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    system, user, called, result, last = asked["messages"]
    assert (system["role"], system["content"], last["content"]) == (
        *("system", "be brief", "messages"),
    )
    assert user["content"] == [{"type": "text", "text": "hello"}]
    assert called["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c", "5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1': must be null"),
        ({"tools": [{"type": "web_search"}]}, "only functions are taken here"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "no such kind of item"),
        ({"input": [{"role": "", "content": "x"}]}, "role"),
        ({"temperature": 9}, "temperature=9"),
    ],
)
def test_what_a_response_cannot_be_is_refused(client, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": "tiny", "input": "hi", **options})


def test_a_response_that_fails_is_an_error_before_and_amid_its_stream(client):
    with pytest.raises(openai.InternalServerError, match="raised an exception") as caught:
        respond(client, "breaks at once", stream=True)
    assert "secret" not in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="too rude"):
        respond(client, "own error")
    *_, last = respond(client, "breaks", stream=True)
    assert (last.type, last.message) == ("error", "the deployment raised an exception")


def test_embeddings_in_both_encodings(client):
    for encoding in ("float", "base64", None):
        options = {} if encoding is None else {"encoding_format": encoding}
        answer = client.embeddings.create(model="tiny", input=["a", "abc"], **options)
        vectors = [each.embedding for each in answer.data]
        if encoding == "base64":
            assert vectors[0] == "AACAPwAAAD8="
        else:
            assert vectors == [[1.0, 0.5], [3.0, 0.5]]
        assert answer.usage.total_tokens == 3
    tokens = client.embeddings.create(model="tiny", input=[1, 2, 3, 4])
    assert tokens.data[0].embedding == [4.0, 0.5]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "org/other"]
    assert client.models.retrieve("org/other").id == "org/other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


BAD = {
    "n": {"n": 2},
    "temperature": {"temperature": 9},
    "max_tokens": {"max_tokens": 0},
    "stop": {"stop": [""]},
    "messages": {"messages": []},
}


@pytest.mark.parametrize("param", BAD)
def test_bad_values_are_named(client, param):
    values = {"model": "tiny", "messages": HI, **BAD[param]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**values)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert f"{param}" in caught.value.message
    assert "must" in caught.value.message or "at least" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_openais_form(client, stream):
    with pytest.raises(openai.RateLimitError, match="all places are taken") as busy:
        chat(client, "busy", stream=stream)
    assert busy.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.BadRequestError, match="too rude") as rude:
        chat(client, "own error", stream=stream)
    assert (rude.value.param, rude.value.code) == ("messages", "rude")
    with pytest.raises(openai.InternalServerError) as broken:
        chat(client, "breaks at once", stream=stream)
    assert "secret" not in str(broken.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="huge", messages=HI, stream=stream)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")


def test_an_error_in_a_stream_ends_it_as_an_error(client):
    chunks = chat(client, "breaks", stream=True)
    with pytest.raises(openai.APIError, match="raised an exception"):
        list(chunks)


def test_a_key_is_needed(url, client):
    with (
        openai.OpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"
    assert "sk-wrong" not in caught.value.message
    for credentials in ("Bearer \xe9", f"Basic {KEY}"):
        assert ask(f"{url}/models", authorization=credentials).status == 401


def test_a_client_that_leaves_closes_the_generator(client):
    before = int(chat(client, "closed").choices[0].message.content)
    for _ in range(2):
        stream = chat(client, "forever", stream=True)
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
        stream.close()
    wait_until(
        lambda: int(chat(client, "closed").choices[0].message.content) == before + 2,
        5,
        "the generators are closed",
    )
    chat(client, "forever", stop="on and on and on")
    assert int(chat(client, "closed").choices[0].message.content) == before + 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'{"model": "tiny", "messages": ' + b"[" * 5000,
        b'{"model": "tiny", "messages": [' + b"1," * 500_000 + b"1]}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    ],
)
def test_hostile_bodies_are_refused_in_short(url, body):
    began = time.monotonic()
    answer = post(url, body)
    assert answer.status == 400
    assert len(answer.body) < 2000
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert time.monotonic() - began < 20


def test_large_bodies_and_unknown_paths_are_refused_in_openais_form(url):
    large = post(url, b" " * ((16 << 20) + 1))
    assert large.status == 413
    assert "16777216 bytes" in large.json["error"]["message"]
    unknown = ask(f"{url}/none")
    assert unknown.status == 404
    error = unknown.json["error"]
    assert error["type"] == "invalid_request_error"
    assert "there are: POST /v1/chat/completions, POST /v1/responses" in error["message"]


@pytest.mark.parametrize("path", ["", "/"])
def test_the_address_that_clients_are_given_answers_with_what_there_is(url, path):
    assert "GET /v1/models" in ask(url + path, authorization=f"Bearer {KEY}").json["data"]
    assert ask(url + path).status == 401


def post(url, body):
    key = {"authorization": f"Bearer {KEY}", "content_type": "application/json"}
    return ask(f"{url}/chat/completions", body, **key)


# --- Without a system -----------------------------------------------------------------------------


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_text_stops_alike_however_it_is_cut(text, stops):
    def cut(parts):
        cutter, out = StopCutter(stops), ""
        for part in parts:
            out += cutter.feed(part)
            if cutter.is_stopped:
                return out
        return out + cutter.rest()

    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert cut(text) == expected
    assert cut([text]) == expected
    assert cut([text[:3], text[3:5], text[5:]]) == expected


def test_errors_travel_between_deployments():
    error = pickle.loads(pickle.dumps(ERRORS["own error"]))
    assert (error.status, error.body) == (400, ERRORS["own error"].body)
    assert str(error) == "too rude"
