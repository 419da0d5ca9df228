"""The settings of a backend and of the HTTP front, validated when made.

Partial updates go through :meth:`BackendConfig.updated`, which looks only at the fields that were
given, so a client can change one setting without knowing the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from understudy.core.errors import InvalidRequestError

MAX_BODY_BYTES = 100 * 1024 * 1024

M = TypeVar("M", bound=BaseModel)


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown names are refused rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ActorOptions(Settings):
    """What one replica takes of its host: 0 unless asked for."""

    num_cpus: float = Field(default=0, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    memory: float = Field(default=0, ge=0, description="bytes")
    resources: dict[str, float] = Field(default_factory=dict)


class BackendConfig(Settings):
    """How a backend is run; every field can be changed while it serves."""

    num_replicas: int = Field(default=1, ge=1, le=10_000)
    user_config: Any = None
    max_ongoing_requests: int = Field(default=100, ge=1)
    max_queued_requests: int = Field(default=-1, ge=-1, description="-1 is unlimited")
    request_timeout_s: float | None = Field(default=None, gt=0)
    health_check_period_s: float = Field(default=10, gt=0)
    health_check_timeout_s: float = Field(default=30, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=20, ge=0)
    graceful_shutdown_wait_loop_s: float = Field(default=2, ge=0)
    max_constructor_retry_count: int = Field(default=20, ge=1)
    logging_config: dict[str, Any] | None = None

    @field_validator("user_config")
    @classmethod
    def _is_jsonable(cls, value: Any) -> Any:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"must be JSON-able: {error}") from error
        return value

    def updated(self, changes: Mapping[str, Any]) -> BackendConfig:
        """Return a copy with ``changes`` applied; all bad fields are named in one error."""
        return validated(BackendConfig, {**self.model_dump(), **changes})


class HTTPOptions(Settings):
    """Where and how a host's HTTP front listens; durations in seconds."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    root_path: str = ""
    request_timeout_s: float | None = Field(default=None, gt=0)
    keep_alive_timeout_s: float = Field(default=90, gt=0)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    workers: int = Field(default=1, ge=1, le=64)
    max_body_bytes: int = Field(default=MAX_BODY_BYTES, ge=1)


def validated(model: type[M], values: Mapping[str, Any]) -> M:
    """Make ``model`` from ``values``; raise one InvalidRequestError that names every bad field."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidRequestError(describe(model.__name__, error)) from None


def describe(what: str, error: ValidationError) -> str:
    """Put every problem of a ValidationError into one line: field, value, expectation."""
    problems = (
        f"{'.'.join(map(str, item['loc'])) or what}={item['input']!r}: {item['msg']}"
        for item in error.errors()
    )
    return f"invalid {what}: " + "; ".join(problems)
