"""What a configuration file may say, and what :func:`greenroom.serve.status` returns.

The classes have the names that Ray Serve's users know. Every option is defined once, in
:mod:`greenroom.core.config`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from greenroom.actors.replica.context import ReplicaRank as ReplicaRank
from greenroom.core.config import (
    ActorOptions,
    BackendConfig,
    GrpcOptions,
    HTTPOptions,
    LoggingConfig as LoggingConfig,
    RuntimeEnv,
)
from greenroom.core.errors import InvalidRequestError
from greenroom.core.jobs import TaskProcessorConfig as TaskProcessorConfig
from greenroom.core.operations import ApplicationName, NewName, Route
from greenroom.core.validation import (
    Place,
    Settings,
    explain_missing,
    jsonable,
    problem_of,
    with_place,
)
from greenroom.serve.admin.checks import HINTS

# --- What is to be: the document of greenroom deploy FILE -----------------------------------------


class InvalidDocumentError(InvalidRequestError):
    """A document is not as the schema says; ``problems`` are all places, each with a text."""

    def __init__(self, problems: Iterable[tuple[Place, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(with_place(place, text) for place, text in self.problems))

    @classmethod
    def of(cls, error: ValidationError, model: type[Settings]) -> Self:
        """Return the error for a document that is no ``model``."""
        return cls(problem_of(item, model, shows_all=False) for item in error.errors())


def _each_named_once(parts: Any) -> Any:
    counted = Counter(part.name for part in parts)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise ValueError(f"two of them have the name {twice[0]!r}")
    return parts


class EncodingType(StrEnum):
    """How log lines are written: ``encoding`` of LoggingConfig."""

    TEXT = "TEXT"
    JSON = "JSON"


class DeploymentSchema(BackendConfig):
    """Options of one of an application's deployments; those that are not given are the code's."""

    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        "runtime_env": "it is an application's, or one of ray_actor_options",
    }

    name: NewName
    version: str | None = None
    ray_actor_options: ActorOptions | None = None
    actor_options: ActorOptions | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The options as ``Deployment.options`` takes them."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"name"}}


class ServeApplicationSchema(Settings):
    """One application: what to import, its route, and options of its deployments."""

    hints: ClassVar[Mapping[str, str]] = {
        "host": "it is one of http_options",
        "port": "it is one of http_options",
        "external_scaler_enabled": "set num_replicas with Client.update_backend_config",
        "autoscaling_policy": "give each deployment's autoscaling_config a policy",
    }

    name: ApplicationName = "default"
    route_prefix: Route = "/"
    import_path: str = Field(
        description="module:attribute or module.attribute, of an application or its builder"
    )
    args: Annotated[dict[str, Any], BeforeValidator(jsonable)] = Field(
        default_factory=dict, description="for the builder function"
    )
    runtime_env: RuntimeEnv | None = None
    deployments: Annotated[list[DeploymentSchema], AfterValidator(_each_named_once)] = Field(
        default_factory=list
    )
    logging_config: LoggingConfig | None = None

    @field_validator("import_path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if not re.fullmatch(r"[^\W\d][\w.]*([:.][^\W\d][\w.]*)?", path):
            raise ValueError("must be MODULE:ATTRIBUTE, such as mine:app")
        module, dot, attribute = path.rpartition(".")
        return path if ":" in path or not dot else f"{module}:{attribute}"  # as Ray Serve reads it


class ServeDeploySchema(Settings):
    """All that is to be served; applications that are not named are removed."""

    hints: ClassVar[Mapping[str, str]] = {
        "target_capacity": "set num_replicas of each deployment",
        "controller_options": "give settings to greenroom start",
        "tracing_config": "set the OTEL_ variables of traces: docs/monitoring.md",
        "import_path": "it is an application's: applications: [{import_path: ...}]",
        "deployments": "they are an application's: applications: [{deployments: ...}]",
    }

    applications: Annotated[list[ServeApplicationSchema], AfterValidator(_each_named_once)]
    http_options: HTTPOptions | None = Field(
        default=None, description="of the system; they count when it starts"
    )
    logging_config: LoggingConfig | None = None
    proxy_location: Literal["EveryNode"] = "EveryNode"
    grpc_options: GrpcOptions | None = Field(
        default=None, description="of the system; they count when it starts"
    )


def read_document(document: object) -> ServeDeploySchema:
    """Validate a document; InvalidDocumentError names every problem."""
    if not isinstance(document, Mapping):
        raise InvalidDocumentError([((), f"{document!r:.80}: must be a mapping with applications")])
    try:
        return ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise InvalidDocumentError.of(error, ServeDeploySchema) from None


# --- What is: the status --------------------------------------------------------------------------


class ApplicationStatus(StrEnum):
    """The state of an application."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"


class DeploymentStatus(StrEnum):
    """The state of a deployment."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"


class _Status(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer controller may say more
    hints: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:
        __getattr__ = explain_missing


class ReplicaStatusOverview(_Status):
    """One replica: where it runs and how many queries it has under way."""

    tag: str
    pid: int | None = None
    host: str | None = None
    state: str
    ongoing: int = 0


class DeploymentStatusOverview(_Status):
    """One deployment and its replicas."""

    hints: ClassVar[Mapping[str, str]] = {"status_trigger": "message says why the status is so"}

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

    hints: ClassVar[Mapping[str, str]] = {
        "last_deployed_time_s": "greenroom history and Client.history have all changes",
    }

    status: ApplicationStatus | str = Field(union_mode="left_to_right")
    message: str = ""
    route_prefix: str | None = None
    ingress: str | None = None
    deployments: dict[str, DeploymentStatusOverview] = Field(default_factory=dict)


class ServeStatus(_Status):
    """All applications, by name; none when no system runs."""

    hints: ClassVar[Mapping[str, str]] = {
        "proxies": "greenroom status --json has the hosts, each with its front",
        "target_capacity": "set num_replicas of each deployment",
    }

    applications: dict[str, ApplicationStatusOverview] = Field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> ServeStatus:
        """Read what the controller answered to GetStatus."""
        return cls.model_validate({"applications": report.get("applications") or {}})
