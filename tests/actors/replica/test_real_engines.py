"""Engines of other makers: llama.cpp's server with models of random weights, and Mosec's."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from greenroom import serve
from greenroom.serve.engines.engine import Engine
from greenroom.serve.llm import LLMConfig, LLMServer, ModelLoadingConfig, build_openai_app
from tests.support import llama, mosec_app
from tests.support.systems import RunningSystem, wait_until

TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    options = {"max_ongoing_requests": 8, **more.pop("deployment_config", {})}
    return LLMConfig(
        model_loading_config=ModelLoadingConfig(
            model_id=name, model_source=str(models / f"{name}.gguf")
        ),
        llm_engine="llama.cpp",
        runtime_env={"env_vars": {"PATH": f"{models}:{os.environ['PATH']}"}},
        deployment_config=options,
        **more,
    )


@pytest.fixture
def client_of(running: RunningSystem, deployed: Any, name: str) -> Iterator[Any]:
    """Return what deploys an application under a name of the test's own and returns its client."""
    with contextlib.ExitStack() as clients:

        def deploy(app: serve.Application) -> openai.OpenAI:
            deployed(app)
            base = f"{running.url}/{name}/v1"
            return clients.enter_context(
                openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=30)
            )

        yield deploy


def say(client: openai.OpenAI, model: str, text: str = "hello", **more: Any) -> Any:
    asked: Any = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    return client.chat.completions.create(model=model, temperature=0, seed=1, **{**asked, **more})


def test_openais_client_gets_what_llama_cpp_says(models: Path, client_of: Any) -> None:
    embedding = {"embeddings": True, "pooling": "mean"}
    client = client_of(
        build_openai_app(
            {
                "llm_configs": [
                    config(models, "whole"),
                    config(models, "quantized", engine_kwargs=embedding),
                ]
            }
        )
    )
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


def test_a_client_that_leaves_frees_its_slot(
    models: Path, client_of: Any, running: RunningSystem, name: str
) -> None:
    app = serve.deployment(**LLMServer.get_deployment_options(config(models, "whole")))(LLMServer)
    client = client_of(app.bind(config(models, "whole", engine_kwargs={"parallel": 1})))
    with say(client, "whole", stream=True, max_tokens=llama.CONTEXT * 2) as stream:
        next(iter(stream))
    assert say(client, "whole").usage.completion_tokens == TOKENS

    def load() -> dict[str, float]:
        lines = running.get("/-/metrics")[1].decode().splitlines()
        return {
            line.partition("{")[0]: float(line.split()[-1])
            for line in lines
            if line.startswith("llamacpp:") and f'application="{name}"' in line
        }

    wait_until(
        lambda: load() == {"llamacpp:requests_processing": 0, "llamacpp:requests_deferred": 0},
        30,
        "the engine's load is told, and nothing runs",
    )


APP = """
import json, sys
from greenroom.serve.llm import build_openai_app
app = build_openai_app(json.loads({args!r}))
"""


@pytest.mark.slow
def test_a_canary_of_a_quantization_that_says_something_else_goes_back(
    models: Path, client_of: Any, running: RunningSystem, name: str, tmp_path: Path
) -> None:
    whole = config(models, "whole")
    client = client_of(build_openai_app({"llm_configs": [whole]}))
    given = whole.model_dump(mode="json")
    given["model_loading_config"]["model_source"] = str(models / "quantized.gguf")
    module = f"canary_of_{name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(APP.format(args=json.dumps({"llm_configs": [given]})))
    is_over = threading.Event()

    def keep_asking() -> set[str]:
        said = set()
        while not is_over.is_set():
            said.add(say(client, "whole").choices[0].message.content)
        return said

    with ThreadPoolExecutor(1) as asking:
        said = asking.submit(keep_asking)
        try:
            ignored = ("/id", "/created", "/timings", "/usage/prompt_tokens_details")
            result = running.greenroom(
                *("deploy", f"{module}:app", "--name", name, "--route-prefix", f"/{name}"),
                *("--canary", "0.2", "--compare", "json", "--abort-if", "difference_rate=0.05"),
                *("--hold-s", "1", "--min-samples", "20"),
                *(word for pointer in ignored for word in ("--ignore", pointer)),
                cwd=tmp_path,
            )
        finally:
            is_over.set()
        texts = said.result()
    assert result.returncode == 1, result.stdout + result.stderr
    assert "compared answers were different" in result.stdout + result.stderr
    assert say(client, "whole").choices[0].message.content in texts


def test_mosec_answers_as_an_engine(running: RunningSystem, deployed: Any, name: str) -> None:
    command = shlex.join([sys.executable, mosec_app.__file__, "--port", "{port}"])
    deployed(Engine(command, health="/").bind())
    status, body = running.get(f"/{name}/inference", data=json.dumps({"text": "stressed"}).encode())
    assert (status, json.loads(body)) == (200, {"reversed": "desserts"})
    status, metrics = running.get(f"/{name}/metrics")
    assert (status, b"mosec_service" in metrics) == (200, True)
