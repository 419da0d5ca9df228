"""The settings of a backend and of the HTTP front, validated when made.

Partial updates go through :meth:`BackendConfig.updated`, which changes only the fields that were
given, so a client can change one setting without knowing the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    Field,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)

from greenroom.core.autoscaling.settings import AUTO, MAX_REPLICAS, AutoscalingConfig
from greenroom.core.devices import VARIABLES, amount_problem
from greenroom.core.validation import (
    HOOKS,
    IN_ANY_CASE,
    Settings,
    UserCode,
    jsonable,
    names_code,
    validated,
)

# --- Logging of replicas, under the names of Ray Serve --------------------------------------------

LEVELS = {"CRITICAL": 50, "ERROR": 40, "WARNING": 30, "INFO": 20, "DEBUG": 10, "NOTSET": 0}

# Attributes that every log record of Python has, and that a line can be asked to show.
STANDARD_ATTRIBUTES = frozenset(
    {
        *("created", "filename", "funcName", "levelno", "lineno", "module", "msecs", "name"),
        *("pathname", "process", "processName", "relativeCreated", "taskName", "thread"),
        "threadName",
    }
)


class LoggingConfig(Settings):
    """How a deployment's replicas log; all of it can be changed while they serve.

    ``encoding``: lines of text, or of JSON. ``log_level``: a name, or Python's number for it.
    ``logs_dir``: where log records go instead of the state dir's logs; what is printed stays there.
    ``enable_access_log``: whether each query is logged when it has ended.
    """

    encoding: Annotated[Literal["TEXT", "JSON"], IN_ANY_CASE] = "TEXT"
    log_level: str | int = "INFO"
    logs_dir: str | None = None
    enable_access_log: bool = True
    additional_log_standard_attrs: tuple[str, ...] = ()

    @field_validator("log_level")
    @classmethod
    def _is_level(cls, level: str | int) -> str | int:
        if isinstance(level, int):
            if not 0 <= level <= 50:
                raise ValueError("expected a number from 0 to 50")
            return level
        if level.upper() not in LEVELS:
            raise ValueError(f"expected one of {', '.join(LEVELS)}, or a number")
        return level.upper()

    @field_validator("logs_dir")
    @classmethod
    def _is_absolute(cls, folder: str | None) -> str | None:
        if folder is not None and not folder.startswith("/"):
            raise ValueError("must be an absolute path: replicas do not run where you are")
        return folder

    @field_validator("additional_log_standard_attrs")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in STANDARD_ATTRIBUTES]:
            known = ", ".join(sorted(STANDARD_ATTRIBUTES))
            raise ValueError(f"{', '.join(map(repr, unknown))}: expected some of {known}")
        return names

    @property
    def level(self) -> int:
        """Python's number for ``log_level``."""
        return self.log_level if isinstance(self.log_level, int) else LEVELS[self.log_level]


# --- ASGI middlewares and CORS, around every HTTP request -----------------------------------------
#
# These settings travel between processes in environment variables, so they are plain values: a
# middleware is named by its import path, and its options can be written as JSON. The front checks
# whether the middleware can be imported.

_is_path = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*").fullmatch

_is_origin = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+").fullmatch

ANYTHING = ("*",)


class MiddlewareOptions(Settings):
    """One middleware: called with the app inside it and ``options``, once in each HTTP worker."""

    path: str
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("path")
    @classmethod
    def _is_import_path(cls, path: str) -> str:
        if not _is_path(path):
            raise ValueError(
                "expected an import path MODULE:NAME, as starlette.middleware.gzip:GZipMiddleware"
            )
        if path.startswith("__main__:"):
            raise ValueError("other processes cannot import it from a script; put it in a module")
        return path

    _are_jsonable = field_validator("options")(jsonable)


class CorsOptions(Settings):
    """What browsers may let pages of other origins do; names and defaults are Starlette's."""

    allow_origins: tuple[str, ...] = ()
    allow_origin_regex: str | None = None
    allow_methods: tuple[str, ...] = ("GET",)
    allow_headers: tuple[str, ...] = ()
    allow_credentials: bool = False
    expose_headers: tuple[str, ...] = ()
    max_age: int = Field(default=600, ge=0, description="seconds")

    @field_validator("allow_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _is_origin(origin):
                raise ValueError(
                    f"{origin!r} is no origin as browsers name it: https://shop.example, in lower "
                    "case and without a path, or with a :port"
                )
        return origins

    @field_validator("allow_origin_regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _allows_an_origin(self) -> Self:
        if not (self.allow_origins or self.allow_origin_regex):
            raise ValueError("cors allows no origin: give allow_origins or allow_origin_regex")
        return self


def read_middlewares(value: Any) -> Any:
    """Return ``value`` as a list of dicts, as far as its form is one of those that are known.

    A list of import paths, pairs of a path and its options, dicts with ``path`` and ``options``, or
    Starlette's Middleware objects; or a string: JSON of such a list, or paths with commas between.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = _json(value) if value[:1] in {"[", "{"} else _split(value)
    if not isinstance(value, Sequence):
        return value
    return [_middleware(each) for each in value]


def read_cors(value: Any) -> Any:
    """Return ``value`` as a dict, or None for none.

    True and ``*`` let pages of every origin do everything, a list of origins (a string: with
    commas between) those, and a dict (a string: as JSON) is CorsOptions.
    """
    if isinstance(value, str):
        value = _json(value) if value[:1] in {"[", "{"} else _WORDS.get(value.lower(), value)
    if isinstance(value, str):
        value = _split(value)
    if value is None or value is False:
        return None
    origins = ANYTHING if value is True else value
    if isinstance(origins, list | tuple | set):
        every = {"allow_methods": ANYTHING, "allow_headers": ANYTHING}
        return {"allow_origins": list(origins), **every}
    return value


_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None


def _middleware(value: Any) -> Any:
    if isinstance(value, str):
        return {"path": value}
    if isinstance(value, tuple | list) and len(value) == 2:
        return {"path": value[0], "options": value[1]}
    cls = getattr(value, "cls", None)
    if cls is not None and not isinstance(value, Mapping):  # starlette.middleware.Middleware
        if getattr(value, "args", ()):
            raise ValueError(f"{cls.__qualname__}: give its options by name")
        return {"path": f"{cls.__module__}:{cls.__qualname__}", "options": dict(value.kwargs)}
    return value


MIB = 1024 * 1024
MAX_BODY_BYTES = 100 * MIB
MAX_WAITING_BODY_BYTES = 256 * MIB  # of all that a worker has not had answered
MIN_WAITING_BODY_BYTES = MIB
MAX_GRPC_MESSAGE_BYTES = 4 * MIB  # grpc's own limit
MAX_GRPC_RPCS = 1_000
MAX_WEBSOCKET_MESSAGE_BYTES = 16 * MIB  # of one from a client
_OF_THEIR_OWN = ("num_cpus", "num_gpus", "memory")
LOOPBACK = "127.0.0.1"
HIDDEN = "***"
_user_of_url = re.compile(r"(?<=://)[^/?#\s]*@")  # names and passwords


def without_credentials(value: Any) -> Any:
    """Return a JSON-like value, or a text, with what URLs in it have before their host hidden."""
    if isinstance(value, str):
        return _user_of_url.sub(f"{HIDDEN}@", value)
    if isinstance(value, Mapping):
        return {name: without_credentials(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_credentials(part) for part in value)
    return value


NO_LIMIT = "none"  # where None cannot be written: in the environment
CALLBACK_SECRET = "GREENROOM_CALLBACK_SECRET"  # of a job queue: a deployment's, or the system's


class RuntimeEnv(Settings):
    """What surrounds a replica's code, under Ray's names.

    ``env_vars`` are set before user code is imported. ``working_dir`` is a folder or a zip, and
    ``py_modules`` are packages, modules, zips or wheels. ``pip`` and ``uv`` are lines of a
    requirements file, for the one or the other to install. Users name folders and files by paths.
    On their way to the controller they are packed: the names of folders become the sha256 of their
    zips, and the name of a requirements file its lines.
    """

    env_vars: dict[str, str] = Field(default_factory=dict)
    working_dir: str | None = None
    py_modules: tuple[str, ...] = ()
    pip: tuple[str, ...] | str = ()
    uv: tuple[str, ...] | str = ()

    hints: ClassVar[Mapping[str, str]] = {
        "conda": "give pip or uv a list of requirements",
        "packages": "it is the one field of pip and uv as a dict",
        "excludes": "copy what replicas need into a folder of its own",
    }

    @field_validator("env_vars")
    @classmethod
    def _can_be_set(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r}: no variable can have this name and value")
            if name.startswith("GREENROOM_") and name != CALLBACK_SECRET:
                raise ValueError(f"{name}: settings of the host are given to greenroom start")
        return variables

    @field_validator("working_dir", mode="before")
    @classmethod
    def _is_no_address(cls, path: Any) -> Any:
        path = str(path) if isinstance(path, PurePath) else path
        if isinstance(path, str) and "://" in path:
            raise ValueError(
                "expected a folder or a zip on this host, which is sent to the others; fetch it "
                "first, and give its path"
            )
        return path

    @field_validator("py_modules", mode="before")
    @classmethod
    def _are_paths(cls, paths: Any) -> Any:
        if isinstance(paths, list | tuple):
            return tuple(cls._is_no_address(path) for path in paths)
        return paths

    @field_validator("pip", "uv", mode="before")
    @classmethod
    def _are_lines(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.keys() == {"packages"}:  # as Ray takes it
            given = given["packages"]
        given = str(given) if isinstance(given, PurePath) else given
        if not isinstance(given, str | list | tuple):
            raise ValueError(  # noqa: TRY004  # for pydantic
                "expected a list of requirements, the path of a requirements file, or a dict "
                "with packages alone; write options of the installer as lines of the list"
            )
        return given if isinstance(given, str) else requirement_lines(given)

    @model_validator(mode="after")
    def _has_one_installer(self) -> Self:
        if self.pip and self.uv:
            raise ValueError("pip and uv: give one of them")
        return self

    @property
    def requirements(self) -> tuple[str, tuple[str, ...]] | None:
        """What installs, and the lines that say what; None for nothing. Of a packed one."""
        installer, lines = ("uv", self.uv) if self.uv else ("pip", self.pip)
        return (installer, lines) if lines and isinstance(lines, tuple) else None

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders and zips among it: the working_dir first."""
        return (*filter(None, (self.working_dir,)), *self.py_modules)

    @property
    def unpacked(self) -> list[str]:
        """The paths that are still to be packed."""
        files = [lines for lines in (self.pip, self.uv) if isinstance(lines, str)]
        return [p for p in self.folders if not re.fullmatch("[0-9a-f]{64}", p)] + files

    def over(self, base: RuntimeEnv | None) -> RuntimeEnv:
        """Return a deployment's environment, where ``base`` is its application's.

        Variables are merged; of the rest, what is given here replaces what the application has.
        """
        if base is None:
            return self
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if self.pip or self.uv:
            given |= {"pip": self.pip, "uv": self.uv}  # instead of the application's, by either
        env_vars = {**base.env_vars, **self.env_vars}
        return base.model_copy(update={**given, "env_vars": env_vars})


# What a line of requirements may begin with, that names no package. Files and folders of the
# client are not there on other hosts.
_INSTALLER_OPTIONS = (
    *("--index-url", "-i", "--extra-index-url", "--no-index", "--find-links", "-f"),
    *("--no-binary", "--only-binary", "--prefer-binary", "--pre", "--trusted-host"),
)
# A name, perhaps extras, then versions, a URL or a condition, which the installer judges.
_is_requirement = re.compile(
    r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?\s*(\[[\w\s,.-]*\])?\s*"
    r"(@\s*\S+.*|\(?([<>=!~]=|[<>]|===)\s*[\w.*+!-].*)?\s*(;.+)?(\s--hash=.+)*"
).fullmatch


def requirement_lines(given: Sequence[Any]) -> tuple[str, ...]:
    """Return the lines of a requirements file without comments; ValueError names a bad one."""
    lines = []
    for each in given:
        if not isinstance(each, str) or "\n" in each:
            raise ValueError(f"{each!r}: expected a requirement, such as 'numpy>=2'")
        line = re.sub(r"(^|\s)#.*$", "", each).strip()
        if line.startswith("-"):
            if re.split(r"[\s=]", line)[0] not in _INSTALLER_OPTIONS:
                raise ValueError(
                    f"{line!r}: of options, lines may have {', '.join(_INSTALLER_OPTIONS)}; files "
                    "of this host are not there on others"
                )
        elif line and not _is_requirement(line):
            raise ValueError(
                f"{line!r} is no requirement: expected a name, perhaps with versions, such as "
                "'numpy>=2', or 'name @ URL'"
            )
        lines += [line] if line else []
    return tuple(lines)


class ActorOptions(Settings):
    """What one replica takes of its host, 0 unless asked for, and the environment it runs in.

    Of ``num_gpus``, and of the resources in core/devices.py, it gets certain devices, and
    variables that show it no others. All other amounts are counted only.
    """

    num_cpus: float = Field(default=0, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    memory: float = Field(default=0, ge=0, description="bytes")
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    label_selector: dict[str, str] = Field(default_factory=dict)
    runtime_env: RuntimeEnv = Field(default_factory=RuntimeEnv)

    hints: ClassVar[Mapping[str, str]] = {
        "working_dir": "it is part of runtime_env",
        "accelerator_type": (
            "start its hosts with a label, as --resources accelerator=A100, and give a "
            "label_selector {'accelerator': 'A100'}"
        ),
        "object_store_memory": "leave it out: there is no object store",
    }

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, value: dict[str, float]) -> dict[str, float]:
        if bad := [name for name in value if not name or name in _OF_THEIR_OWN]:
            raise ValueError(
                f"{bad}: expected names of your own; {', '.join(_OF_THEIR_OWN)} are "
                "options beside resources"
            )
        if wrong := [
            f"{n}={x!r}: {problem}" for n, x in value.items() if (problem := amount_problem(n, x))
        ]:
            raise ValueError("; ".join(wrong))
        return value

    @field_validator("num_gpus")
    @classmethod
    def _are_whole_or_a_share(cls, value: float) -> float:
        if wrong := amount_problem("num_gpus", value):
            raise ValueError(wrong)
        return value

    @model_validator(mode="after")
    def _assigns_devices_once(self) -> Self:
        amounts = {"num_gpus": self.num_gpus, **self.resources}
        for resource, names in VARIABLES.items():
            for name in names:
                if amounts.get(resource) and name in self.runtime_env.env_vars:
                    raise ValueError(f"runtime_env.env_vars.{name}: is set by {resource}; drop one")
        return self


class SessionAffinity(Settings):
    """How HTTP requests name the session that is to stay at one replica.

    ``header`` is a header's name, or ``cookie`` a cookie's. A cookie is made here for clients that
    have none, unless ``set_cookie`` is False: then it is the application's own.
    """

    header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9!#$%&'*+.^`|~-]+$")
    cookie: str | None = Field(default=None, pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
    set_cookie: bool = Field(default=True, strict=True)
    max_age_s: int | None = Field(default=None, ge=1, description="None: until the browser ends")
    same_site: Literal["lax", "strict", "none"] = "lax"
    secure: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _is_by_one(self) -> Self:
        if (self.header is None) == (self.cookie is None):
            raise ValueError("session_affinity: give a header, such as X-Session-ID, or a cookie")
        if self.same_site == "none" and not self.secure:
            raise ValueError("same_site='none': browsers take it only with secure=True")
        return self


class RequestRouterConfig(UserCode):
    """A class of yours that says which replica gets a query; see docs/routing.md.

    ``request_router_class`` is the class or its import path, and ``request_router_kwargs`` go to
    its ``initialize_state``. Where it has said nothing within ``timeout_s``, a query goes on.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "request_routing_stats_period_s": "leave it out: replicas report nothing to routers",
        "request_routing_stats_timeout_s": "leave it out: replicas report nothing to routers",
        **dict.fromkeys(
            ("initial_backoff_s", "backoff_multiplier", "max_backoff_s"),
            "leave it out: a query waits in the router's queue until a replica has room",
        ),
    }

    request_router_class: str | Callable[..., Any]
    request_router_kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(default=0.1, gt=0, le=5)

    @field_validator("request_router_class", mode="before")
    @classmethod
    def _names_a_class(cls, value: Any) -> Any:
        if not names_code(value):
            raise ValueError("must be a class, or its import path, such as 'my_module:MyRouter'")
        return value

    _are_jsonable = field_validator("request_router_kwargs")(jsonable)


class BackendConfig(Settings):
    """How a backend is run; every field can be changed while it serves.

    ``num_replicas`` is a number, or None where ``autoscaling_config`` decides on it; "auto" stands
    for an autoscaling_config from 1 to 100 replicas, whose other fields may be given beside it.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        "max_concurrent_queries": "max_ongoing_requests",  # in Ray Serve 1.x
        "max_replicas_per_node": "max_replicas_per_host",
    }
    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("num_cpus", "num_gpus", "memory", "resources", "runtime_env"),
        "it is one of ray_actor_options",
    )

    num_replicas: Annotated[
        int | None,
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, {"type": "null"}]}
        ),
    ] = Field(default=1, ge=1, le=MAX_REPLICAS)
    autoscaling_config: AutoscalingConfig | None = None
    user_config: Any = None
    max_ongoing_requests: int = Field(default=100, ge=1)
    max_queued_requests: int = Field(default=-1, ge=-1, description="-1 is unlimited")
    max_queue_wait_s: float | None = Field(default=None, gt=0)
    request_timeout_s: float | None = Field(default=None, gt=0)
    retryable: bool | None = Field(default=None, strict=True)
    health_check_period_s: float = Field(default=10, gt=0)
    health_check_timeout_s: float = Field(default=30, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=20, ge=0)
    graceful_shutdown_wait_loop_s: float = Field(default=2, ge=0)
    max_constructor_retry_count: int = Field(default=20, ge=1)
    constructor_timeout_s: float = Field(default=1800, gt=0)
    max_surge_percent: int = Field(default=20, ge=1, le=100)
    logging_config: LoggingConfig | None = None
    max_replicas_per_host: int | None = Field(default=None, ge=1)
    http_call_methods: tuple[str, ...] | None = Field(default=(), description="None: every public")
    session_affinity: SessionAffinity | None = None
    request_router_config: RequestRouterConfig | None = None
    outlier_ejection: bool = Field(default=True, strict=True)
    retry_failures: bool = Field(default=False, strict=True)
    slow_start_s: float = Field(default=10.0, ge=0, description="seconds; 0: at once")
    learn_weights: bool = Field(default=True, strict=True)
    max_age_s: float | None = Field(default=None, gt=0)
    max_queries: int | None = Field(default=None, ge=1)
    max_memory_bytes: int | None = Field(default=None, ge=MIB)
    max_gpu_memory_bytes: int | None = Field(default=None, ge=MIB)
    served_by_header: bool = Field(default=False, strict=True)

    _is_jsonable = field_validator("user_config")(jsonable)

    @field_validator("num_replicas", mode="before")
    @classmethod
    def _is_not_off(cls, number: Any) -> Any:
        if number == 0:
            raise ValueError(
                "must be at least 1; to have none when idle, set min_replicas=0 in "
                "autoscaling_config; else delete it"
            )
        return number

    @field_validator("http_call_methods")
    @classmethod
    def _are_public(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if not name.isidentifier() or name.startswith("_") or name in HOOKS:
                raise ValueError(f"{name!r}: expected the name of a public method")
        return names

    @model_validator(mode="before")
    @classmethod
    def _auto_is_autoscaling(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("num_replicas") != "auto":
            return values
        given = values.get("autoscaling_config") or {}
        if isinstance(given, AutoscalingConfig):
            given = given.model_dump(exclude_unset=True)
        others = {name: value for name, value in values.items() if name != "num_replicas"}
        scaling = {**AUTO, **given} if isinstance(given, Mapping) else given
        return {**others, "autoscaling_config": scaling}

    @model_validator(mode="after")
    def _one_decides_on_the_number(self) -> Self:
        scaled = self.autoscaling_config is not None
        if scaled and self.num_replicas is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                f"num_replicas={self.num_replicas}: cannot be given with autoscaling_config, which "
                "has min_replicas, initial_replicas and max_replicas instead"
            )
        number = None if scaled else self.num_replicas or 1
        self.__dict__["num_replicas"] = number  # not by name: it is frozen, and was not given
        return self

    def updated(self, changes: Mapping[str, Any]) -> BackendConfig:
        """Return a copy with ``changes`` applied; all bad fields are named in one error."""
        return validated(BackendConfig, self.merged(changes))

    def merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that were given with ``changes`` applied, not yet validated.

        Of a number of replicas and autoscaling, the one that is given replaces the other.
        """
        changes = self.renamed(changes)
        given = {name: value for name, value in self if name in self.model_fields_set}
        values = {**given, **changes}
        if changes.get("num_replicas") is not None:
            values["autoscaling_config"] = changes.get("autoscaling_config")
        elif changes.get("autoscaling_config") is not None:
            values["num_replicas"] = None
        return values


class GivenSettings(TypedDict, total=False):
    """What a user may give for a BackendConfig's fields and aliases, for type checkers."""

    num_replicas: int | Literal["auto"] | None
    autoscaling_config: AutoscalingConfig | Mapping[str, Any] | None
    user_config: Any
    max_ongoing_requests: int
    max_queued_requests: int
    max_queue_wait_s: float | None
    request_timeout_s: float | None
    retryable: bool | None
    outlier_ejection: bool
    retry_failures: bool
    slow_start_s: float
    learn_weights: bool
    max_age_s: float | None
    max_queries: int | None
    max_memory_bytes: int | None
    max_gpu_memory_bytes: int | None
    served_by_header: bool
    health_check_period_s: float
    health_check_timeout_s: float
    graceful_shutdown_timeout_s: float
    graceful_shutdown_wait_loop_s: float
    max_constructor_retry_count: int
    constructor_timeout_s: float
    max_surge_percent: int
    logging_config: LoggingConfig | Mapping[str, Any] | None
    max_replicas_per_host: int | None
    http_call_methods: Sequence[str] | None
    session_affinity: SessionAffinity | Mapping[str, Any] | None
    request_router_config: RequestRouterConfig | Mapping[str, Any] | None
    max_concurrent_queries: int  # max_ongoing_requests, in Ray Serve 1.x
    max_replicas_per_node: int | None  # max_replicas_per_host, in Ray Serve


def is_loopback(host: str) -> bool:
    """Return whether only this host can connect to an address."""
    return host in {"localhost", "::1"} or host.startswith("127.")


class HTTPOptions(Settings):
    """Where and how a host's HTTP front listens; durations in seconds.

    ``middlewares`` are ASGI middlewares around every request, the first one outermost, and ``cors``
    stands around them; both take the forms that core/config.py reads. Modules that are
    not installed are looked for in ``middlewares_dir``, by default where the system is started.
    With ``pages_host`` or ``pages_port``, the pages under ``/-/`` are served only there, except for
    the health page.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "location": "leave it out: every host has a front",
        "num_cpus": "leave it out: fronts reserve nothing",
        "root_url": "give root_path",
        "ssl_ca_certs": "ssl_certfile has the whole chain; clients have no certificates",
        "ssl_keyfile_password": "store the key without one, readable by its owner alone",
    }

    host: str = Field(default="127.0.0.1", description="Address for HTTP; 0.0.0.0 for all.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port for HTTP.")
    pages_host: str | None = Field(
        default=None,
        description="Address for the pages under /-/ alone [127.0.0.1, given their port].",
    )
    pages_port: int | None = Field(
        default=None, ge=1, le=65535, description="Port for those pages [that of all requests]."
    )
    root_path: str = Field(
        default="", description="Path prefix under which a reverse proxy shows this."
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds that an answer may take [no limit]."
    )
    keep_alive_timeout_s: float = Field(
        default=90, gt=0, description="Seconds that an idle connection is kept."
    )
    header_timeout_s: float = Field(
        default=30, gt=0, description="Seconds that a request's headers may take."
    )
    body_timeout_s: float = Field(
        default=30, gt=0, description="Seconds that a body may lag behind 500 bytes a second."
    )
    send_timeout_s: float = Field(
        default=30, gt=0, description="Seconds that a client may take nothing of what waits for it."
    )
    ssl_keyfile: str | None = Field(default=None, description="PEM: a private key, for HTTPS.")
    ssl_certfile: str | None = Field(default=None, description="PEM: its certificate.")
    workers: int = Field(default=1, ge=1, le=64, description="Processes that take requests.")
    max_connections_per_client: int | None = Field(
        default=None,
        ge=1,
        description="Connections of one address in each worker [a quarter of all].",
    )
    max_target_bytes: int = Field(
        default=4094, ge=64, le=MIB, description="Longer paths with their queries get 414."
    )
    max_header_bytes: int = Field(
        default=8190, ge=64, le=MIB, description="Larger headers, as those of cookies, get 431."
    )
    max_body_bytes: int | None = Field(
        default=MAX_BODY_BYTES, ge=1, description="Larger bodies get 413; none for no limit."
    )
    max_waiting_body_bytes: int = Field(
        default=MAX_WAITING_BODY_BYTES,
        ge=MIN_WAITING_BODY_BYTES,
        description="Bodies of unanswered requests in each worker; more get 503.",
    )
    max_websocket_message_bytes: int = Field(
        default=MAX_WEBSOCKET_MESSAGE_BYTES,
        ge=1,
        description="Larger messages are closed with 1009.",
    )
    middlewares: tuple[MiddlewareOptions, ...] = Field(
        default=(), description="ASGI middlewares: module:Name with commas, or JSON."
    )
    middlewares_dir: str | None = Field(
        default=None,
        description="Folder of middlewares that are not installed [where it is started].",
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=("127.0.0.1", "::1"),
        description="Addresses and networks whose X-Forwarded-... is believed; * for all, or none.",
    )
    cors: CorsOptions | None = Field(
        default=None, description="Origins whose pages may call: with commas, * for all, or JSON."
    )
    empty_path_segments: bool = Field(
        default=False, description="Take paths with //, which are refused otherwise."
    )
    short_way: bool = Field(
        default=True, description="Plain requests go past Falcon; off only to compare the two."
    )

    @field_validator("max_body_bytes", mode="before")
    @classmethod
    def _read_none(cls, value: Any) -> Any:
        return None if value == NO_LIMIT else value

    @field_serializer("max_body_bytes", when_used="json")
    def _write_none(self, value: int | None) -> int | str:
        return NO_LIMIT if value is None else value

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _read_proxies(cls, value: Any) -> Any:
        if value is None or value == NO_LIMIT:
            return ()
        return _split(value) if isinstance(value, str) else value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                if network not in ANYTHING:
                    ip_network(network)
            except ValueError as error:
                raise ValueError(
                    f"{error}; expected addresses and networks, as 10.0.0.0/8, * for all, or none"
                ) from None
        return networks

    @field_serializer("trusted_proxies", when_used="json")
    def _write_proxies(self, networks: tuple[str, ...]) -> str:
        return ",".join(networks) or NO_LIMIT

    @model_validator(mode="after")
    def _has_key_and_certificate(self) -> Self:
        for given, missing in (
            ("ssl_keyfile", "ssl_certfile"),
            ("ssl_certfile", "ssl_keyfile"),
        ):
            if getattr(self, given) is not None and getattr(self, missing) is None:
                raise ValueError(f"{given}={getattr(self, given)!r}: {missing} must be given, too")
        return self

    @model_validator(mode="after")
    def _has_pages_elsewhere(self) -> Self:
        if self.pages_address == (self.host, self.port):
            raise ValueError(
                f"pages_host={self.pages_host!r} and pages_port={self.pages_port}: expected an "
                f"address other than that of all requests, {self.host}:{self.port}"
            )
        if self.pages_address is not None and not self.pages_address[1]:
            raise ValueError("pages_port: must be given where port is 0")
        return self

    @property
    def pages_address(self) -> tuple[str, int] | None:
        """Where the pages under ``/-/`` are; None where requests are."""
        if self.pages_host is None and self.pages_port is None:
            return None
        return self.pages_host or LOOPBACK, self.pages_port or self.port

    @property
    def has_admin(self) -> bool:
        """Whether the admin API and the dashboard are served, where the pages are.

        Not beside requests that other hosts send: there they take a place of their own.
        """
        return self.pages_address is not None or is_loopback(self.host)

    _read_middlewares = field_validator("middlewares", mode="before")(read_middlewares)
    _read_cors = field_validator("cors", mode="before")(read_cors)


# --- gRPC -----------------------------------------------------------------------------------------


def _names_a_function(path: str) -> str:
    if "." not in path or not all(map(str.isidentifier, path.split("."))):
        raise ValueError("must be module.add_XServicer_to_server")
    return path


ServicerFunction = Annotated[str, AfterValidator(_names_a_function)]


class GrpcOptions(Settings):
    """Where gRPC is served, and what; nothing is without a function that adds a servicer.

    ``max_receive_message_length`` is in bytes. With ``ssl_ca_certs`` clients need a certificate
    of an authority in that PEM file.
    """

    aliases: ClassVar[Mapping[str, str]] = {"enable_reflection": "reflection"}

    port: int = Field(default=9000, ge=1, le=65535)
    grpc_servicer_functions: tuple[ServicerFunction, ...] = ()
    request_timeout_s: float | None = Field(default=None, gt=0)
    max_receive_message_length: int = Field(default=MAX_GRPC_MESSAGE_BYTES, ge=1, le=2**31 - 1)
    maximum_concurrent_rpcs: int = Field(default=MAX_GRPC_RPCS, ge=1)
    reflection: bool = True
    ssl_ca_certs: str | None = None


# --- What is shown of settings --------------------------------------------------------------------


class Expanded(str):
    """A string that was written with ``${NAME}``, perhaps of a secret; its repr is as written."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, value: str, written: str) -> Self:
        """Make it of the value and of the text that stands for it."""
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __reduce__(self) -> tuple[type[Expanded], tuple[str, str]]:
        return Expanded, (str(self), self.written)

    def __repr__(self) -> str:
        return repr(self.written)


def as_written(value: Any) -> Any:
    """Return a JSON-like value with what was written in place of each Expanded string."""
    if isinstance(value, Expanded):
        return value.written
    if isinstance(value, Mapping):
        return {name: as_written(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_written(part) for part in value)
    return value


def config_shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backend's settings as people see them: without code, and variables by name."""
    return as_written(config_of_replica(config))  # type: ignore[no-any-return]


def config_of_replica(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backend's settings without code that does not run in its replicas."""
    settings = dict(config)
    if (scaling := config.get("autoscaling_config")) is not None:
        settings["autoscaling_config"] = {**scaling, "policy": _without_code(scaling["policy"])}
    if (request_router := config.get("request_router_config")) is not None:
        settings["request_router_config"] = _without_code(request_router)
    return settings


def _without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "code"}


def options_shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backend's ActorOptions without secrets: values of variables, and users of URLs."""
    env = options.get("runtime_env")
    if not env:
        return dict(options)
    env = without_credentials(env)
    return {**options, "runtime_env": {**env, "env_vars": dict.fromkeys(env["env_vars"], HIDDEN)}}
