"""Modules of Ray Serve that are not here: importing one says what to use instead."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_GRAPHS = "an ingress deployment that calls the handles it is bound with: docs/composition.md"
_QUEUES = "the queue's own client in a deployment, which takes tasks in a thread or task of its own"
_INSTEAD = {
    "_private": "nothing: it has what no application should need",
    "air_integrations": "a class of your own that loads the model in its constructor",
    "autoscaling_policy": "a function of yours as policy_function: docs/autoscaling.md",
    "dag": _GRAPHS,
    "deployment": "from greenroom.serve import Application, Deployment",
    "deployment_graph": _GRAPHS,
    "drivers": _GRAPHS,
    "experimental": "docs/migrating-from-ray-serve.md lists what there is",
    "generated": "HTTP: there is no gRPC",
    "gradio_integrations": "serve.ingress with Gradio's ASGI app (gradio.mount_gradio_app)",
    "grpc_util": "HTTP: there is no gRPC",
    "http_adapters": "a handler that reads its request, or FastAPI with serve.ingress",
    "llm": "a class that loads the model's engine (vLLM, say), streams, and uses serve.batch",
    "model_wrappers": "a class of your own that loads the model in its constructor",
    "pipeline": _GRAPHS,
    "request_router": "nothing: queries go to the replica with the fewest, or by shard_key",
    "task_consumer": _QUEUES,
    "task_processor": _QUEUES,
}


class _Instead(importlib.abc.MetaPathFinder):
    """Explains a missing module: it is asked last, so only where no other finder has one."""

    def find_spec(
        self,
        fullname: str,
        _path: Sequence[str] | None = None,
        _target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package == "greenroom.serve" and name in _INSTEAD:
            raise ImportError(
                f"there is no {fullname}; in place of ray.serve.{name}, use {_INSTEAD[name]}",
                name=fullname,
            )
        return None


def install() -> None:
    """Make imports of these modules say what to use instead."""
    if not any(isinstance(finder, _Instead) for finder in sys.meta_path):
        sys.meta_path.append(_Instead())
