"""What a user imports: ``from understudy import serve``.

The names below are loaded when they are first used, so that ``understudy --help`` and a replica
that only unpickles a handle do not pay for the rest. No module here may bear the name of a function
that users call as ``serve.<name>``: importing it would put the module in the function's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.serve.api import (
        delete,
        get_app_handle,
        get_deployment_handle,
        run,
        shutdown,
        start,
        status,
    )
    from understudy.serve.client import Client
    from understudy.serve.config import HTTPOptions
    from understudy.serve.deployments import Application, Deployment, deployment

__all__ = [
    "Application",
    "Client",
    "Deployment",
    "HTTPOptions",
    "delete",
    "deployment",
    "get_app_handle",
    "get_deployment_handle",
    "run",
    "shutdown",
    "start",
    "status",
]

_MODULES = {
    "Application": "deployments",
    "Client": "client",
    "Deployment": "deployments",
    "HTTPOptions": "config",
    "deployment": "deployments",
} | dict.fromkeys(
    ("delete", "get_app_handle", "get_deployment_handle", "run", "shutdown", "start", "status"),
    "api",
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
