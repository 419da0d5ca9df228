"""What a user imports: ``from greenroom import serve``.

The names below are loaded when they are first used, so that ``greenroom --help`` and a replica
that only unpickles a handle do not pay for the rest. No module here may bear the name of a function
that users call as ``serve.<name>``: importing it would put the module in the function's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.core.jobs import TaskProcessorConfig
    from greenroom.serve.admin.client import Client
    from greenroom.serve.api import (
        RunTarget,
        delete,
        get_app_handle,
        get_deployment_handle,
        run,
        run_many,
        shutdown,
        shutdown_async,
        start,
        status,
    )
    from greenroom.serve.config import HTTPOptions
    from greenroom.serve.context import (
        get_batch_request_context,
        get_replica_context,
        get_request_context,
        get_trace_context,
    )
    from greenroom.serve.decorators.batching import batch
    from greenroom.serve.decorators.continuous import continuous_batch
    from greenroom.serve.decorators.ingress import ingress
    from greenroom.serve.decorators.multiplex import get_multiplexed_model_id, multiplexed
    from greenroom.serve.deployments import Application, Deployment, deployment
    from greenroom.serve.engines.engine import Engine
    from greenroom.serve.protocols.inference import inference
    from greenroom.serve.protocols.openai import openai
    from greenroom.serve.tasks.consumers import task_consumer, task_handler

    __version__: str

__all__ = [
    "Application",
    "Client",
    "Deployment",
    "Engine",
    "HTTPOptions",
    "RunTarget",
    "TaskProcessorConfig",
    "batch",
    "continuous_batch",
    "delete",
    "deployment",
    "get_app_handle",
    "get_batch_request_context",
    "get_deployment_handle",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_request_context",
    "get_trace_context",
    "inference",
    "ingress",
    "multiplexed",
    "openai",
    "run",
    "run_many",
    "shutdown",
    "shutdown_async",
    "start",
    "status",
    "task_consumer",
    "task_handler",
]

_MODULES = {
    "Application": "deployments",
    "Client": "admin.client",
    "Deployment": "deployments",
    "Engine": "engines.engine",
    "HTTPOptions": "config",
    "batch": "decorators.batching",
    "continuous_batch": "decorators.continuous",
    "deployment": "deployments",
    "get_batch_request_context": "context",
    "get_multiplexed_model_id": "decorators.multiplex",
    "get_replica_context": "context",
    "get_request_context": "context",
    "get_trace_context": "context",
    "inference": "protocols.inference",
    "ingress": "decorators.ingress",
    "multiplexed": "decorators.multiplex",
    "openai": "protocols.openai",
    "TaskProcessorConfig": "tasks.consumers",
    "task_consumer": "tasks.consumers",
    "task_handler": "tasks.consumers",
} | dict.fromkeys(
    (
        *("RunTarget", "delete", "get_app_handle", "get_deployment_handle"),
        *("run", "run_many", "shutdown", "shutdown_async", "start", "status"),
    ),
    "api",
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("greenroom")
    if name == "metrics":  # a module, and users write serve.metrics.Counter
        return importlib.import_module("greenroom.serve.metrics")
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; what replaces a name of Ray Serve is "
            "in docs/migrating-from-ray-serve.md"
        )
    # User code says ``import starlette`` and then starlette.requests.Request: Ray has imported it.
    importlib.import_module("starlette.requests")
    importlib.import_module("starlette.responses")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
