"""Language models by Ray's names: what an engine is told, and what OpenAI's own client gets."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

import openai
import pytest

from greenroom import serve
from greenroom.core.config import ActorOptions
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.llm import (
    LLMConfig,
    ModelLoadingConfig,
    build_llm_deployment,
    build_openai_app,
)
from tests.support import fake_vllm
from tests.support.metrics import scraped
from tests.support.systems import wait_until

ROUTE = "/llm"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """The settings of a model whose engine is the fake one."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_vllm.__file__} "$@"\n')
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    actor = {"ray_actor_options": {"num_gpus": 0}}
    options = {**actor, "num_replicas": 2, "health_check_period_s": 0.5}
    return {"runtime_env": {"env_vars": {"PATH": path}}, "deployment_config": options}


@pytest.fixture(scope="module")
def client(running, vllm):
    """OpenAI's client of two models."""
    configs = [
        {
            "model_loading_config": {"model_id": f"org/{name}", "model_source": f"/models/{name}"},
            "engine_kwargs": {"max_model_len": 10, "enable_prefix_caching": True},
            **vllm,
        }
        for name in ("small", "large")
    ]
    running.deploy(build_openai_app({"llm_configs": configs}), name="llm", route_prefix=ROUTE)
    base = f"{running.url}{ROUTE}/v1"
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as client:
        yield client
    with running.as_default():
        serve.delete("llm")


def say(client: openai.OpenAI, model: str, **more: Any) -> Any:
    message: Any = {"role": "user", "content": "hello"}
    return client.chat.completions.create(model=model, messages=[message], **more)


# --- What an engine is told -----------------------------------------------------------------------


VLLM = "vllm serve m --served-model-name m --host 127.0.0.1 "
SGLANG = "python3 -m sglang.launch_server --model-path m --served-model-name m "
LISTS = {"lora_modules": ["a=b", "c=d e"], "limits": {"image": 1}}
FLAGS = {"max_model_len": 9, "enable_lora": True, "seed": None, "quiet": False}


@pytest.mark.parametrize(
    ("engine", "kwargs", "command"),
    [
        ("vLLM", {}, f"{VLLM}--port {{port}}"),
        ("vLLM", FLAGS, f"{VLLM}--max-model-len 9 --enable-lora --port {{port}}"),
        (
            "vLLM",
            LISTS,
            f"{VLLM}--lora-modules a=b 'c=d e' --limits '{{\"image\": 1}}' --port {{port}}",
        ),
        ("SGLang", {"tp_size": 2}, f"{SGLANG}--enable-metrics --tp-size 2 --port {{port}}"),
        ("llama.cpp", {}, "llama-server --model m --alias m --metrics --port {port}"),
        ("llama.cpp", {"metrics": False}, "llama-server --model m --alias m --port {port}"),
    ],
)
def test_arguments_of_an_engine_are_flags_of_its_command(engine, kwargs, command):
    loading = ModelLoadingConfig(model_id="m")
    config = LLMConfig(model_loading_config=loading, llm_engine=engine, engine_kwargs=kwargs)
    assert shlex.join(config.command).replace("'{port}'", "{port}") == command


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"num_gpus": 1}),
        ({"llm_engine": "llama.cpp"}, {"num_gpus": 0}),
        (
            {"engine_kwargs": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            {"num_gpus": 4},
        ),
        ({"engine_kwargs": {"tensor_parallel_size": None, "pp_size": 2}}, {"num_gpus": 2}),
        ({"engine_kwargs": {"tp_size": "2", "pp_size": "02"}}, {"num_gpus": 4}),
        ({"deployment_config": {"ray_actor_options": {"num_gpus": 0.5}}}, {"num_gpus": 0.5}),
        (
            {"deployment_config": {"ray_actor_options": ActorOptions(num_gpus=2, memory=1)}},
            {"num_gpus": 2, "memory": 1},
        ),
        (
            {"accelerator_type": "A100"},
            {"num_gpus": 1, "label_selector": {"accelerator": "A100"}},
        ),
    ],
)
def test_a_replica_asks_for_the_gpus_that_its_engine_takes(given, options):
    config = LLMConfig(model_loading_config=ModelLoadingConfig(model_id="org/m"), **given)
    assert config.options["actor_options"] == options
    assert config.options["name"] == "org-m"


def models(*names: str, **more: Any) -> dict[str, Any]:
    """Return the arguments for models of these names."""
    return {"llm_configs": [{"model_loading_config": {"model_id": name}, **more} for name in names]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "llm_configs"),
        (models(), "llm_configs"),
        ({"llm_configs": [{"model_loading_config": {}}]}, "model_id"),
        (models(""), "model_id"),
        (models("m", llm_engine="GPT"), "llm_engine"),
        (models("m", lora_config={}), "enable_lora"),
        (models("a/b", "a/b"), "two models have one model_id: a/b, a/b"),
        (models("m", deployment_config={"replicas": 2}), "replicas"),
        (models("m", ready_timeout_s=0), "ready_timeout_s"),
        *(
            (models("m", engine_kwargs={"tp_size": size}), f"tp_size={size!r}: must be a whole")
            for size in ("many", "", "0", "2.0", "-1", "\u0663", "2\n", True, 0, -1, 2.0)
        ),
        (models("m", deployment_config={"ray_actor_options": 3}), "ray_actor_options=3: must be"),
        (
            models("m", deployment_config={"actor_options": {"label_selector": 3}}),
            "label_selector=3: must be a valid dictionary",
        ),
    ],
)
def test_what_is_wrong_is_reported(given, message):
    with pytest.raises(InvalidRequestError) as refused:
        build_openai_app(given)
    assert message in str(refused.value)


# --- What a client gets ---------------------------------------------------------------------------


def test_each_model_answers_by_its_name(client):
    assert [each.id for each in client.models.list()] == ["org/small", "org/large"]
    assert client.models.retrieve("org/large").id == "org/large"
    for name in ("small", "large"):
        answer = say(client, f"org/{name}")
        assert answer.choices[0].message.content.startswith(f"/models/{name} on ")
        assert (answer.model, answer.usage.total_tokens) == (f"org/{name}", 5)
    assert client.embeddings.create(model="org/small", input="x", encoding_format="float").data[
        0
    ].embedding == [1.0, 2.0]


def test_a_models_adapter_answers_by_both_names(client):
    answer = say(client, "org/small:poet")
    assert answer.choices[0].message.content.startswith("/models/small on ")
    assert answer.model == "org/small:poet", "the engine knows which adapter is meant"


def test_a_stream_comes_in_parts(client):
    parts = [part.choices[0].delta.content for part in say(client, "org/large", stream=True)]
    assert (parts[0], parts[-1]) == ("/models/large ", "hello ")


def test_an_engines_error_is_the_clients(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens is too large"):
        say(client, "org/small", max_tokens=11)


def test_a_model_that_is_not_there_is_reported_with_those_that_are(client):
    with pytest.raises(openai.NotFoundError, match="org/large, org/small") as refused:
        say(client, "org/medium")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/medium")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"{", b'{"model": 5}'])
def test_a_body_without_a_model_is_refused(client, running, body):
    status, found = running.get(f"{ROUTE}/v1/chat/completions", data=body)
    assert (status, b"model" in found) in {(400, True), (404, True)}


def test_a_conversation_stays_at_one_replica(client):
    for key in ("a", "b", "c", "d"):
        more = {"prompt_cache_key": key}
        answers = [say(client, "org/small", extra_body=more) for _ in range(4)]
        assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_the_engines_load_is_in_the_metrics(client, running):
    def load() -> set[tuple[str, float]]:
        samples = [each for family in scraped(running).values() for each in family.samples]
        return {
            (each.name, each.value)
            for each in samples
            if each.name.startswith("vllm:") and each.labels["deployment"] == "org-small"
        }

    there = {
        ("vllm:num_requests_running", 5.0),
        ("vllm:num_requests_waiting", 7.0),
        ("vllm:kv_cache_usage_perc", 0.25),
    }
    wait_until(lambda: load() == there, 20, "all three have been read")


@pytest.mark.slow
def test_a_policy_scales_by_the_engines_load(running, deployed, vllm, name):
    def by_waiting(context: Any) -> int:
        waiting = context.aggregated_metrics.get("vllm:num_requests_waiting", {}).values()
        return 2 if sum(waiting) > 5 else 1

    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "policy": by_waiting}
    options = {**vllm["deployment_config"], "autoscaling_config": scaling}
    del options["num_replicas"]
    given = {"model_loading_config": {"model_id": "m"}, **vllm, "deployment_config": options}
    deployed(build_llm_deployment(given))
    wait_until(lambda: len(running.replica_pids(name)) == 2, 20, "seven requests wait")


def test_a_conversation_with_one_model_alone_stays_at_one_replica(running, deployed, vllm, name):
    config = LLMConfig(model_loading_config=ModelLoadingConfig(model_id="m"), **vllm)
    deployed(build_openai_app({"llm_configs": [config]}))
    with openai.OpenAI(base_url=f"{running.url}/{name}/v1", api_key="any") as client:
        said = {
            key: {say(client, "m", user=key).choices[0].message.content for _ in range(2)}
            for key in map(str, range(40))  # of eight, one in 128 times all are at one replica
        }
        assert {len(texts) for texts in said.values()} == {1}
        assert len(set.union(*said.values())) == 2, "both replicas have conversations"
    assert running.get(f"/{name}/metrics") == (200, fake_vllm.METRICS.encode())
    assert running.get(f"/{name}/nothing")[0] == 404


def test_one_model_is_its_engine(running, deployed, vllm, name):
    alone = {**vllm, "deployment_config": vllm["deployment_config"] | {"num_replicas": 1}}
    config = LLMConfig(model_loading_config=ModelLoadingConfig(model_id="m"), **alone)
    deployed(build_openai_app({"llm_configs": [config]}))
    with openai.OpenAI(base_url=f"{running.url}/{name}/v1", api_key="any") as client:
        assert [each.owned_by for each in client.models.list()] == ["vllm"]
        assert say(client, "m").choices[0].message.content.startswith("m on ")
    (deployment,) = running.status()["applications"][name]["deployments"]
    assert deployment == "m"
