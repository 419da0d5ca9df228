"""Names of Ray Serve that are not here: using one says what to use instead.

One table has modules, names in modules, arguments of functions, and members of classes. The table
in docs/migrating-from-ray-serve.md is made of it, by tests/docs/ray_names.py. Names of settings are
in the ``hints`` of the settings' classes.
"""

from __future__ import annotations

import importlib.abc
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_GRAPHS = "an ingress deployment that calls the handles it is bound with: docs/composition.md"
_QUEUES = "from greenroom.serve import TaskProcessorConfig, task_consumer: docs/jobs.md"
_GRPC = "async iterators, and exceptions.GrpcStatusError: docs/grpc.md"
_STATUS = "serve.status(), or greenroom status --json"
_FILE = "http_options and grpc_options of a configuration file are plain mappings"
_GANGS = "num_replicas, with the rank and world_size of serve.get_replica_context()"
_ACTORS = "a deployment with one replica, given to the others by bind"
_PROMETHEUS = "a policy of your own that asks Prometheus: it runs in a process of its own"
_TRACING = "the settings of traces: docs/monitoring.md"
_CLIENT = "serve.Client.connect()"

MODULES = {
    "_private": "nothing: it has what no application should need",
    "air_integrations": "a class of your own that loads the model in its constructor",
    "async_inference_autoscaling_policy": "a policy of your own: docs/autoscaling.md",
    "autoscaling_policy": "a function of yours as policy_function: docs/autoscaling.md",
    "batching": "from greenroom.serve import batch",
    "dag": _GRAPHS,
    "deployment": "from greenroom.serve import Application, Deployment",
    "deployment_graph": _GRAPHS,
    "drivers": _GRAPHS,
    "experimental": "docs/migrating-from-ray-serve.md lists what there is",
    "gang": _GANGS,
    "generated": _GRPC,
    "gradio_integrations": "serve.ingress with Gradio's ASGI app (gradio.mount_gradio_app)",
    "grpc_util": _GRPC,
    "http_adapters": "a handler that reads its request, or FastAPI with serve.ingress",
    "llm": "a class that loads the model's engine (vLLM, say), streams, and uses serve.batch",
    "model_wrappers": "a class of your own that loads the model in its constructor",
    "multiplex": "from greenroom.serve import multiplexed",
    "pipeline": _GRAPHS,
    "task_consumer": _QUEUES,
    "task_processor": _QUEUES,
    "taskiq_task_processor": _QUEUES,
    "utils": "from greenroom.serve import get_trace_context",
}

OF_1 = (  # names of serve in Ray 1.x that no later Ray has
    *("connect", "init", "get_handle", "get_deployment_statuses"),
    *("get_serve_client", "accept_batch", "delete_deployments"),
)
_CLIENTS = (  # what was a function of serve, and is a method of the client
    *("create_backend", "update_backend_config", "get_backend_config", "list_backends"),
    *("delete_backend", "create_endpoint", "delete_endpoint", "list_endpoints", "set_traffic"),
    *("shadow_traffic", "delete_deployment"),
)
# By module ("" is serve itself), by function with "()", or by class.
NAMES: dict[str, dict[str, str]] = {
    "": {
        "_run": "serve.run",
        "_run_many": "serve.run_many",
        "ControllerOptions": "settings of the host: greenroom start --help",
        "TracingConfig": _TRACING,
        "get_deployment_actor": _ACTORS,
        "get_deployment_actor_context": _ACTORS,
        # Of Ray Serve 1.x
        "connect": _CLIENT,
        "init": "serve.start()",
        "get_handle": f"{_CLIENT}.get_handle, or serve.get_app_handle",
        "get_deployment_statuses": "serve.status()",
        "get_serve_client": _CLIENT,
        "accept_batch": "serve.batch on an async method",
        "delete_deployments": "serve.delete",
        **{name: f"{_CLIENT}.{name}" for name in _CLIENTS},
    },
    "config": {
        "AggregationFunction": "the text 'mean', 'max' or 'min' as aggregation_function",
        "BackpressureConfig": "max_queued_requests; more get 503 with Retry-After",
        "ControllerOptions": "settings of the host: greenroom start --help",
        "DeploymentActorConfig": _ACTORS,
        "DeploymentMode": "nothing: every host has a front",
        "GangPlacementStrategy": _GANGS,
        "GangRuntimeFailurePolicy": _GANGS,
        "GangSchedulingConfig": _GANGS,
        "ProxyLocation": "nothing: every host has a front",
    },
    "context": {"DeploymentActorContext": _ACTORS},
    "handle": {
        "DeploymentBroadcastResponse": "reconfigure by user_config: every replica hears of it",
        "RayServeHandle": "DeploymentHandle",
        "RayServeSyncHandle": "DeploymentHandle, and result() of what it returns",
        "RayServeDeploymentHandle": "DeploymentHandle",
    },
    "schema": {
        "APIType": _STATUS,
        "ApplicationDetails": _STATUS,
        "AutoscalingMetricsHealth": "greenroom status --autoscaling",
        "AutoscalingStatus": "greenroom status --autoscaling",
        "CeleryAdapterConfig": _QUEUES,
        "ControllerHealthMetrics": "/-/metrics: docs/monitoring.md",
        "DeploymentAutoscalingDetail": "greenroom status --autoscaling",
        "DeploymentDetails": _STATUS,
        "DeploymentNode": _STATUS,
        "DeploymentTopology": _STATUS,
        "DurationStats": "/-/metrics: docs/monitoring.md",
        "HTTPOptionsSchema": _FILE,
        "ProxyDetails": _STATUS,
        "ProxyStatus": _STATUS,
        "RayActorOptionsSchema": "from greenroom.serve.config import ActorOptions",
        "ReplicaDetails": _STATUS,
        "ScaleDeploymentRequest": f"{_CLIENT}.update_backend_config",
        "ScalingDecision": "greenroom status --autoscaling",
        "ServeActorDetails": _STATUS,
        "ServeInstanceDetails": _STATUS,
        "Target": _STATUS,
        "TargetGroup": _STATUS,
        "TaskProcessorAdapter": _QUEUES,
        "TaskResult": _QUEUES,
        "TracingConfig": _TRACING,
        "gRPCOptionsSchema": _FILE,
    },
    "start()": {
        "controller_options": "give settings to greenroom start",
        "dedicated_cpu": "leave it out",
        "detached": "leave it out; greenroom start runs a system that outlives this process",
        "http_host": "give http_options={'host': ...}",
        "http_middlewares": "give http_options={'middlewares': ...}",
        "http_port": "give http_options={'port': ...}",
        "logging_config": "give it to serve.run, or to a deployment",
        "proxy_location": "leave it out: every host has a front",
        "tracing_config": f"see {_TRACING}",
    },
    "run()": {
        "_blocking": "leave it out: serve.run returns when the application serves",
        "controller_options": "give settings to greenroom start",
        "external_scaler_enabled": "scale with Client.update_backend_config",
        "host": "give serve.start http_options={'host': ...}",
        "port": "give serve.start http_options={'port': ...}",
        "working_dir": "give runtime_env={'working_dir': ...}",
    },
    "run_many()": {
        "_local_testing_mode": "call serve.run for each",
        "controller_options": "give settings to greenroom start",
        "wait_for_applications_running": "leave it out: they are waited for",
        "wait_for_ingress_deployment_creation": "leave it out: they are waited for",
    },
    "delete()": {"_blocking": "leave it out: serve.delete returns when it is gone"},
    "Deployment": {
        "backpressure_config": "max_queued_requests; more get 503 with Retry-After",
        "init_args": "the args of the Application that bind returns",
        "init_kwargs": "the kwargs of the Application that bind returns",
        "set_logging_config": "options(logging_config=...)",
        "set_options": "options(), which returns a changed copy",
        "placement_group_bundles": "actor_options",
        "route_prefix": "serve.run(app, route_prefix=...)",
        "url": "serve.run(app, route_prefix=...)",
    },
    "RunTarget": {"external_scaler_enabled": "scale with Client.update_backend_config"},
    "ApplicationStatus": {"to_numeric": "the status by its name"},
    "gRPCStatusError": dict.fromkeys(
        ("grpc_code", "grpc_details", "original_exception"),
        "message: the name of the code and the text",
    ),
    "DeploymentHandle": {
        "broadcast": "user_config, whose change every replica's reconfigure hears of",
        "choose_replica": "options(session_id=...), which keeps calls at one replica",
        "dispatch": "remote()",
        "is_initialized": "nothing: a handle need not be initialized",
        "running_replicas_populated": _STATUS,
        "shutdown": "nothing: a handle holds nothing",
        "shutdown_async": "nothing: a handle holds nothing",
    },
    "DeploymentHandle.options()": {
        "_by_reference": "leave it out: results travel by value",
        "_prefer_local_routing": "leave it out: replicas on the caller's host are taken first",
        "request_serialization": "leave it out: arguments are pickled",
        "response_serialization": "leave it out: results are pickled",
        "use_new_handle_api": "leave it out",
    },
    "DeploymentResponse": {
        "_to_object_ref": "await it: a result travels by value",
        "_to_object_ref_sync": "result(): a result travels by value",
        "by_reference": "nothing: a result travels by value",
    },
    "DeploymentResponseGenerator": {
        "_to_object_ref_gen": "async for: values travel by value",
        "_to_object_ref_gen_sync": "a for loop: values travel by value",
        "by_reference": "nothing: values travel by value",
        "result": "a for loop: a stream has many results",
    },
}


def told(where: str, name: str) -> str | None:
    """Return what to say of a name that is not there; None of one that Ray Serve has not either."""
    instead = NAMES.get(where, {}).get(name)
    return None if instead is None else f"there is no {name}; instead: {instead}"


def names_of(module: str) -> Callable[[str], NoReturn]:
    """Make a module's ``__getattr__``.

    It raises ImportError, because ``from ... import`` drops the text of an AttributeError.
    """
    where = module.rpartition(".")[2]

    def get(name: str) -> NoReturn:
        if text := told(where, name):
            raise ImportError(f"{module}: {text}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def member(self: object, name: str) -> Any:
    """Be a class's ``__getattr__``."""
    kind = type(self).__name__
    text = told(kind, name) or f"has no attribute {name!r}"
    raise AttributeError(f"{kind}: {text}", name=name, obj=self)


def refuse_arguments(function: Any, names: Iterable[str]) -> None:
    """Raise TypeError if a function of serve was given arguments that it does not take."""
    here, texts = function.__name__, []
    for name in names:
        # This imports pydantic, and greenroom --help imports this module.
        from greenroom.core.validation import suggestion  # noqa: PLC0415

        meant = suggestion(name, inspect.signature(function).parameters)
        texts.append(told(f"{here}()", name) or f"unexpected argument {name!r}{meant}")
    if texts:
        raise TypeError(f"serve.{here}: {'; '.join(texts)}")


class _Instead(importlib.abc.MetaPathFinder):
    """Explains a missing module: it is asked last, so only where no other finder has one."""

    def find_spec(
        self,
        fullname: str,
        _path: Sequence[str] | None = None,
        _target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "greenroom.serve":
            return None
        if name in MODULES:
            raise ImportError(
                f"there is no {fullname}; in place of ray.serve.{name}, use {MODULES[name]}",
                name=fullname,
            )
        if text := told("", name):
            raise ImportError(f"{package}: {text}", name=fullname)
        return None


def install() -> None:
    """Make imports of these modules say what to use instead."""
    if not any(isinstance(finder, _Instead) for finder in sys.meta_path):
        sys.meta_path.append(_Instead())
