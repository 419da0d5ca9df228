"""What a user imports: ``from greenroom import serve``.

The names below are loaded when they are first used, so that ``greenroom --help`` and a replica
that only unpickles a handle do not pay for the rest. No module here may bear the name of a function
that users call as ``serve.<name>``: importing it would put the module in the function's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.core.jobs import TaskProcessorConfig as TaskProcessorConfig
    from greenroom.serve.admin.client import Client as Client
    from greenroom.serve.api import (
        RunTarget as RunTarget,
        delete as delete,
        get_app_handle as get_app_handle,
        get_deployment_handle as get_deployment_handle,
        run as run,
        run_many as run_many,
        shutdown as shutdown,
        shutdown_async as shutdown_async,
        start as start,
        status as status,
    )
    from greenroom.serve.config import HTTPOptions as HTTPOptions
    from greenroom.serve.context import (
        get_batch_request_context as get_batch_request_context,
        get_replica_context as get_replica_context,
        get_request_context as get_request_context,
        get_trace_context as get_trace_context,
    )
    from greenroom.serve.decorators.batching import batch as batch
    from greenroom.serve.decorators.continuous import continuous_batch as continuous_batch
    from greenroom.serve.decorators.ingress import ingress as ingress
    from greenroom.serve.decorators.multiplex import (
        get_multiplexed_model_id as get_multiplexed_model_id,
        multiplexed as multiplexed,
    )
    from greenroom.serve.deployments import (
        Application as Application,
        Deployment as Deployment,
        deployment as deployment,
    )
    from greenroom.serve.engines.engine import Engine as Engine
    from greenroom.serve.protocols.inference import inference as inference
    from greenroom.serve.protocols.openai import openai as openai
    from greenroom.serve.tasks.consumers import (
        task_consumer as task_consumer,
        task_handler as task_handler,
    )

    __version__: str

_NAMES = {
    "admin.client": ("Client",),
    "api": (
        *("RunTarget", "delete", "get_app_handle", "get_deployment_handle"),
        *("run", "run_many", "shutdown", "shutdown_async", "start", "status"),
    ),
    "config": ("HTTPOptions",),
    "context": (
        *("get_batch_request_context", "get_replica_context"),
        *("get_request_context", "get_trace_context"),
    ),
    "decorators.batching": ("batch",),
    "decorators.continuous": ("continuous_batch",),
    "decorators.ingress": ("ingress",),
    "decorators.multiplex": ("get_multiplexed_model_id", "multiplexed"),
    "deployments": ("Application", "Deployment", "deployment"),
    "engines.engine": ("Engine",),
    "protocols.inference": ("inference",),
    "protocols.openai": ("openai",),
    "tasks.consumers": ("TaskProcessorConfig", "task_consumer", "task_handler"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_MODULES]  # noqa: PLE0604  # names, as a type checker sees above


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
