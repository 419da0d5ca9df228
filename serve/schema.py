"""What :func:`greenroom.serve.status` returns, and what Ray Serve's users look for beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from greenroom.core.config import LoggingConfig

__all__ = [
    "ApplicationStatus",
    "ApplicationStatusOverview",
    "DeploymentStatus",
    "DeploymentStatusOverview",
    "LoggingConfig",
    "ReplicaStatusOverview",
    "ServeStatus",
]


class ApplicationStatus(str, Enum):
    """The state of an application."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"


class DeploymentStatus(str, Enum):
    """The state of a deployment."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"


class _Status(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer controller may say more


class ReplicaStatusOverview(_Status):
    """One replica: where it runs and how many queries it has under way."""

    tag: str
    pid: int | None = None
    host: str | None = None
    state: str
    ongoing: int = 0


class DeploymentStatusOverview(_Status):
    """One deployment and its replicas."""

    # A word that is not known here, a newer controller's, stays a string.
    status: DeploymentStatus | str = Field(union_mode="left_to_right")
    message: str = ""
    version: str | None = None
    target_replicas: int = 0
    replicas: list[ReplicaStatusOverview] = Field(default_factory=list)

    @property
    def replica_states(self) -> dict[str, int]:
        """How many replicas are in each state."""
        return dict(Counter(replica.state for replica in self.replicas))


class ApplicationStatusOverview(_Status):
    """One application and its deployments."""

    status: ApplicationStatus | str = Field(union_mode="left_to_right")
    message: str = ""
    route_prefix: str | None = None
    ingress: str | None = None
    deployments: dict[str, DeploymentStatusOverview] = Field(default_factory=dict)


class ServeStatus(_Status):
    """All applications, by name; none when no system runs."""

    applications: dict[str, ApplicationStatusOverview] = Field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> ServeStatus:
        """Read what the controller answered to GetStatus."""
        return cls.model_validate({"applications": report.get("applications") or {}})
