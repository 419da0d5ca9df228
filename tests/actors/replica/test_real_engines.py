"""Engines of other makers: llama.cpp's server with models of random weights, and Mosec's."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from greenroom.serve.engines.engine import Engine
from greenroom.serve.llm import LLMConfig, ModelLoadingConfig, build_openai_app
from tests.support import llama, mosec_app

TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with two models, and with llama.cpp's server as a program."""
    folder = tmp_path_factory.mktemp("models")
    llama.write_model(folder / "whole.gguf")
    llama.write_model(folder / "quantized.gguf", quantized=True)
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {llama.__file__} "$@"\n')
    program.chmod(0o755)
    return folder


def config(models: Path, name: str, **more: Any) -> LLMConfig:
    """Return what makes llama.cpp serve a model."""
    return LLMConfig(
        model_loading_config=ModelLoadingConfig(
            model_id=name, model_source=str(models / f"{name}.gguf")
        ),
        llm_engine="llama.cpp",
        runtime_env={"env_vars": {"PATH": f"{models}:{os.environ['PATH']}"}},
        deployment_config={"max_ongoing_requests": 8},
        **more,
    )


def say(client: openai.OpenAI, model: str, text: str = "hello", **more: Any) -> Any:
    asked: Any = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    return client.chat.completions.create(model=model, temperature=0, seed=1, **{**asked, **more})


def test_openais_client_gets_what_llama_cpp_says(models, running, deployed, name):
    embedding = {"embeddings": True, "pooling": "mean"}
    configs = [config(models, "whole"), config(models, "quantized", engine_kwargs=embedding)]
    deployed(build_openai_app({"llm_configs": configs}))
    base = f"{running.url}/{name}/v1"
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=30) as client:
        says_what_llama_cpp_says(client)


def says_what_llama_cpp_says(client: openai.OpenAI) -> None:
    assert {each.id for each in client.models.list()} == {"whole", "quantized"}
    answer = say(client, "whole")
    text = answer.choices[0].message.content
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (TOKENS, "length")
    parts = list(say(client, "whole", stream=True, stream_options={"include_usage": True}))
    deltas = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(deltas) == text
    assert len(deltas) > TOKENS // 2
    assert parts[-1].usage.completion_tokens == TOKENS
    response = client.responses.create(model="whole", input="hello", max_output_tokens=TOKENS)
    assert response.usage.output_tokens == TOKENS
    (embedded,) = client.embeddings.create(model="quantized", input="hello").data
    assert len(embedded.embedding) == llama.WIDTH
    with pytest.raises(openai.BadRequestError) as refused:
        say(client, "whole", "word " * llama.CONTEXT)
    assert refused.value.type == "exceed_context_size_error"


def test_mosec_answers_as_an_engine(running, deployed, name):
    command = shlex.join([sys.executable, mosec_app.__file__, "--port", "{port}"])
    deployed(Engine(command, health="/").bind())
    status, body = running.get(f"/{name}/inference", data=json.dumps({"text": "stressed"}).encode())
    assert (status, json.loads(body)) == (200, {"reversed": "desserts"})
    status, metrics = running.get(f"/{name}/metrics")
    assert (status, b"mosec_service" in metrics) == (200, True)
