"""``serve.llm``: large language models by Ray's names, over engines (:mod:`.engines.engine`).

One model with one replica is its engine, whose answers pass as they are. What has several of either
stands behind a deployment that reads requests: the field ``model`` says which engine is asked,
through a handle, and those of a conversation go to one replica.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from greenroom.core.config import ActorOptions
from greenroom.core.validation import Settings, validated
from greenroom.serve.admin.checks import settings_of
from greenroom.serve.decorators.ingress import ingress
from greenroom.serve.deployments import Application, Deployment, deployment
from greenroom.serve.engines.engine import PORT, EngineReplica, EngineSettings
from greenroom.serve.handle import DeploymentHandle
from greenroom.serve.protocols.apps import Answerer, instance, make_app, read_body
from greenroom.serve.protocols.openai import (
    OpenAIError,
    described,
    error_response,
    list_of,
    no_model,
)

MAX_BODY_BYTES = 16 << 20
_COMMANDS = {
    "vLLM": ("vllm", "serve", "SOURCE", "--served-model-name", "ID", "--host", "127.0.0.1"),
    "SGLang": (
        *("python3", "-m", "sglang.launch_server", "--model-path", "SOURCE"),
        *("--served-model-name", "ID"),
    ),
    "llama.cpp": ("llama-server", "--model", "SOURCE", "--alias", "ID"),
}
_LOAD = {
    "vLLM": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "SGLang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    "llama.cpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
}
_WITH_METRICS = {"vLLM": {}, "SGLang": {"enable_metrics": True}, "llama.cpp": {"metrics": True}}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "tp_size", "pp_size")


class ModelLoadingConfig(Settings):
    """The name that clients call a model by, and where the engine finds it: by default so, too."""

    model_id: str = Field(min_length=1)
    model_source: str | None = None


class LLMConfig(Settings):
    """One model and its engine.

    ``engine_kwargs`` become flags of the engine's command: ``max_model_len=4096`` is
    ``--max-model-len 4096``, True a flag alone, False and None none, a list several words, a dict
    JSON. ``deployment_config`` has the options of a deployment; unless its ``ray_actor_options``
    say otherwise, a replica of vLLM or SGLang gets as many GPUs as its parallel sizes multiply to.
    ``accelerator_type`` is the label ``accelerator`` of the hosts that it may run on. Unless
    ``log_engine_metrics`` is False, the engine's metrics of its load are read.
    """

    model_loading_config: ModelLoadingConfig
    llm_engine: Literal["vLLM", "SGLang", "llama.cpp"] = "vLLM"
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    deployment_config: dict[str, Any] = Field(default_factory=dict)
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    ready_timeout_s: float = Field(default=600.0, gt=0)
    log_engine_metrics: bool = True

    hints: ClassVar[Mapping[str, str]] = {
        "lora_config": "give engine_kwargs enable_lora and lora_modules, each 'MODEL:ADAPTER=PATH'",
        "placement_group_config": "a replica is on one host; give engine_kwargs the parallel sizes",
    }

    @field_validator("engine_kwargs")
    @classmethod
    def _have_sizes(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in _PARALLEL:
            size = given.get(name)
            if size is not None and not _is_size(size):
                raise ValueError(f"{name}={size!r}: must be a whole number, 1 or more")
        return given

    @property
    def command(self) -> tuple[str, ...]:
        """What is run, with ``{port}`` for its port."""
        loading = self.model_loading_config
        names = {"ID": loading.model_id, "SOURCE": loading.model_source or loading.model_id}
        arguments = [names.get(argument, argument) for argument in _COMMANDS[self.llm_engine]]
        has_metrics = _WITH_METRICS[self.llm_engine] if self.log_engine_metrics else {}
        for name, value in {**has_metrics, **self.engine_kwargs}.items():
            if value is not None and value is not False:
                arguments += [f"--{name.replace('_', '-')}", *_arguments(value)]
        return (*arguments, "--port", PORT)

    @property
    def engine(self) -> EngineSettings:
        """What each replica runs."""
        return EngineSettings(
            command=self.command,
            health="/health",
            ready_timeout_s=self.ready_timeout_s,
            load_metrics=_LOAD[self.llm_engine] if self.log_engine_metrics else (),
            metrics_path="/metrics",
        )

    @property
    def has_replicas(self) -> bool:
        """Whether it may have more than one."""
        given = self.deployment_config
        return given.get("num_replicas", 1) != 1 or given.get("autoscaling_config") is not None

    @property
    def options(self) -> dict[str, Any]:
        """Those of its deployment."""
        given = dict(self.deployment_config)
        resources = given.pop("ray_actor_options", None) or given.pop("actor_options", None)
        asked = settings_of(ActorOptions, resources, "ray_actor_options")
        gpus = 0 if self.llm_engine == "llama.cpp" else 1
        for size in _PARALLEL:
            gpus *= int(self.engine_kwargs.get(size) or 1)
        actor = {
            "num_gpus": gpus,
            **{each: getattr(asked, each) for each in asked.model_fields_set},
        }
        if self.accelerator_type is not None:
            actor["label_selector"] = {"accelerator": self.accelerator_type, **asked.label_selector}
        if self.runtime_env is not None:
            actor["runtime_env"] = self.runtime_env
        return {
            "name": _deployment_of(self.model_loading_config.model_id),
            "constructor_timeout_s": self.engine.constructor_timeout_s,
            **given,
            "actor_options": actor,
        }


class LLMServingArgs(Settings):
    """The models that one application has."""

    llm_configs: tuple[LLMConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _differ(self) -> LLMServingArgs:
        names = [each.model_loading_config.model_id for each in self.llm_configs]
        if len({_deployment_of(name) for name in names}) < len(names):
            raise ValueError(f"two models have one model_id: {', '.join(names)}")
        return self


class LLMServer(EngineReplica):
    """A replica of one model: its engine."""

    async def __init__(self, llm_config: LLMConfig) -> None:  # type: ignore[misc]  # see there
        """Start the engine; return once it is healthy."""
        self.settings = llm_config.engine
        await super().__init__()

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Return the options of a deployment of this class: those that the model asks for."""
        return llm_config.options


def build_llm_deployment(llm_config: LLMConfig | Mapping[str, Any]) -> Application:
    """Make one model an application, or a part of one: its handle's ``pass_on`` asks the engine.

    InvalidRequestError names what is wrong.
    """
    given = llm_config if isinstance(llm_config, LLMConfig) else validated(LLMConfig, llm_config)
    return deployment(**LLMServer.get_deployment_options(given))(LLMServer).bind(given)


def build_openai_app(llm_serving_args: LLMServingArgs | Mapping[str, Any]) -> Application:
    """Make an application that answers OpenAI's clients with these models.

    Takes ``{"llm_configs": [...]}``, each an LLMConfig or its fields, as a file's ``args`` may be.
    InvalidRequestError names what is wrong.
    """
    given = llm_serving_args
    args = given if isinstance(given, LLMServingArgs) else validated(LLMServingArgs, given)
    engines = {
        each.model_loading_config.model_id: build_llm_deployment(each) for each in args.llm_configs
    }
    if len(engines) == 1 and not args.llm_configs[0].has_replicas:
        return next(iter(engines.values()))
    return _MODELS.bind(engines)


def _deployment_of(model_id: str) -> str:
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in model_id)


def _is_size(value: object) -> bool:
    """Return whether an engine's command takes it for a number of GPUs, as 2.0 it does not."""
    if isinstance(value, str):
        return re.fullmatch("0*[1-9][0-9]*", value) is not None
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _arguments(value: Any) -> Sequence[str]:
    if value is True:
        return ()
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]


# --- Several models -------------------------------------------------------------------------------


async def _list(_request: Request) -> Response:
    return list_of(instance().engines)


async def _get(request: Request) -> Response:
    name, engines = request.path_params["name"], instance().engines
    if name not in engines:
        raise no_model(name, engines)
    return JSONResponse(described(name))


def _engine_of(name: object) -> DeploymentHandle | None:
    """Return the engine of a model, or of an adapter, as ``model:adapter``; None if none has it."""
    engines: dict[str, DeploymentHandle] = instance().engines
    if not isinstance(name, str):
        return None
    return engines.get(name) or engines.get(name.rpartition(":")[0])


async def _ask(request: Request) -> Response:
    """Pass a request on to the engine of its model."""
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        fields = json.loads(body)
        name = fields["model"]
    except (ValueError, KeyError, TypeError):
        text = "the body has to be JSON with a field 'model'"
        raise OpenAIError(400, text, param="model") from None
    engine = _engine_of(name)
    if engine is None:
        raise no_model(name, instance().engines)
    session = fields.get("prompt_cache_key") or fields.get("user") or ""
    return await _pass_on(engine.options(session_id=str(session)[:256]), request, body)


async def _ask_any(request: Request) -> Response:
    """Pass on what names no model, where there is one alone."""
    if len(instance().engines) > 1:
        raise OpenAIError(404, f"of several models only /v1 is served, not {request.url.path}")
    (engine,) = instance().engines.values()
    return await _pass_on(engine, request, await read_body(request, MAX_BODY_BYTES))


async def _pass_on(engine: DeploymentHandle, request: Request, body: bytes) -> Response:
    """Pass a request on, and the answer back part by part."""
    path = request.url.path.removeprefix(request.scope["root_path"])
    asked = engine.options(stream=True).pass_on
    parts = asked.remote(request.method, path, list(request.scope["headers"]), body)
    status, headers = await anext(parts)
    response = StreamingResponse(parts, status)
    response.raw_headers = headers
    return response


class Models:
    """The models of an application by their names."""

    def __init__(self, engines: dict[str, DeploymentHandle]) -> None:
        self.engines = engines


def _make_app() -> Starlette:
    answers: dict[str, Answerer] = {
        "GET /v1/models": _list,
        "GET /v1/models/{name:path}": _get,
        "POST /v1/{operation:path}": _ask,
        "GET,POST /{path:path}": _ask_any,
    }
    return make_app(answers, error_response)


_MODELS: Deployment = deployment(name="OpenAiIngress")(ingress(_make_app)(Models))
