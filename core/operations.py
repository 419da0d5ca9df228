"""The table of admin operations: what can be asked of the controller.

Theory of operation. Each operation is one class: its fields, their allowed values, its text in the
history, and what its answer waits for. The client makes an instance, which checks the values, and
sends its key and fields. The controller makes an instance from those again, because it does not
trust the client's checks. :mod:`greenroom.core.cluster.admin` carries the operations out. The
Python client, the commands and the HTTP API are thin layers over this table. Over HTTP each takes a
token with its ``role`` or a higher one; see :mod:`greenroom.core.tokens`.

Every operation is idempotent: repeating it changes nothing. Operations that take time return the id
of a goal, or None when nothing changed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from greenroom.core.comparing.comparing import Compare, check_compare
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.core.records import CANDIDATE, served_as
from greenroom.core.rollouts.judging import DEFAULT_RULES, DIFFERENCE_RATE, RULES, check_rules
from greenroom.core.series import MAX_STEPS
from greenroom.core.tokens import Role
from greenroom.core.validation import (
    MAX_NAME_BYTES,
    MAX_TAG_BYTES,
    Checked,
    Settings,
    is_number,
    problems_in,
    unknown_name,
    validated,
    wrong_with,
)

HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
RESERVED_PREFIX = "/-"
_NEVER_ASKED_FOR = {"", ".", ".."}  # segments that clients take out of a path
SUM_TOLERANCE = 1e-6

_EXACT = ConfigDict(
    frozen=True,
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    val_json_bytes="base64",
    ser_json_bytes="base64",
)

# --- What fields may be ---------------------------------------------------------------------------


def route_problem(route: object) -> str | None:
    """Return what is wrong with a route, or None; no route at all is right."""
    if route is None or route == "/":
        return None
    wrong = None
    if not isinstance(route, str) or not route.startswith("/"):
        wrong = "must start with '/', or be None for no route"
    elif route.endswith("/"):
        wrong = "must not end with '/'"
    elif re.search(r"[{}?#%\s]", route):
        wrong = "must not contain braces, '?', '#', '%' or white space; paths are matched decoded"
    elif not _NEVER_ASKED_FOR.isdisjoint(route[1:].split("/")):
        wrong = "must not contain '//', nor '.' or '..' between slashes: no client asks for such"
    elif (route + "/").startswith(RESERVED_PREFIX + "/"):
        wrong = "is reserved for Greenroom's own pages"
    return f"{wrong}; for example '/predict'" if wrong else None


def _checked_route(route: str | None) -> str | None:
    if problem := route_problem(route):
        raise ValueError(problem)
    return route


def _checked_name(most_bytes: int, name: str) -> str:
    if wrong := wrong_with(name, most_bytes):
        raise ValueError(wrong)
    return name


def _checked_methods(methods: object) -> object:
    """Return the methods in upper case, each once."""
    if isinstance(methods, str | Mapping) or not isinstance(methods, Iterable):
        example = [methods] if isinstance(methods, str) else ["GET"]
        raise ValueError(f"must be a list, such as {example!r}")  # noqa: TRY004  # as pydantic wants
    upper = tuple(dict.fromkeys(str(method).upper() for method in methods))
    if not upper or not set(upper) <= set(HTTP_METHODS):
        raise ValueError(f"expected some of {', '.join(HTTP_METHODS)}")
    return upper


def _as_dict(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _sum_to_one(weights: dict[str, float]) -> dict[str, float]:
    if not weights:
        raise ValueError("must name at least one backend and its weight")
    total = math.fsum(weights.values())
    if round(abs(total - 1), 12) > SUM_TOLERANCE:  # 1.000001 - 1 is a little more than 1e-6
        raise ValueError(f"the weights sum to {total:.9g}: must be 1 within {SUM_TOLERANCE:g}")
    return weights


def _as_in_2021(config: BackendConfig) -> BackendConfig:
    """Let HTTP requests name any public method, unless ``config`` says which."""
    if "http_call_methods" in config.model_fields_set:
        return config
    return config.model_copy(update={"http_call_methods": None})


def _packed(options: ActorOptions) -> ActorOptions:
    if paths := options.runtime_env.unpacked:
        raise ValueError(
            f"runtime_env names {', '.join(map(repr, paths))}, on the client's host; expected the "
            "sha256 of a zip, as greenroom.serve packs it"
        )
    return options


PackedOptions = Annotated[ActorOptions, AfterValidator(_packed)]


def _not_reserved(name: str) -> str:
    if name != served_as(name):
        raise ValueError(f"must not end with {CANDIDATE!r}, as new versions of applications do")
    return name


NewName = Annotated[str, AfterValidator(partial(_checked_name, MAX_NAME_BYTES))]
ApplicationName = Annotated[NewName, AfterValidator(_not_reserved)]
NewTag = Annotated[str, AfterValidator(partial(_checked_name, MAX_TAG_BYTES))]
Route = Annotated[str | None, AfterValidator(_checked_route)]
Methods = Annotated[tuple[str, ...], BeforeValidator(_checked_methods)]
Share = Annotated[float, Field(ge=0, le=1)]
Weights = Annotated[dict[str, Share], BeforeValidator(_as_dict), AfterValidator(_sum_to_one)]
Digests = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class DeploymentSpec(Checked):
    """One deployment: its name within its application, its code and its settings."""

    model_config = _EXACT

    name: NewName
    code: bytes = Field(repr=False)  # what a replica loads
    code_hash: str  # what makes two backends equal: code and version
    version: str | None = None
    config: BackendConfig = Field(default_factory=BackendConfig)
    actor_options: PackedOptions = Field(default_factory=ActorOptions)


class ApplicationSpec(Checked):
    """One application: its deployments, of which the one named ``ingress`` gets the route."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: ApplicationName
    ingress: str
    route_prefix: Route
    deployments: tuple[DeploymentSpec, ...]

    @classmethod
    def described(cls, _fields: Mapping[str, Any]) -> str:
        """Say what could not be made."""
        return "bad application"


# --- What fields of rollouts may be ---------------------------------------------------------------

MAX_ROLLOUT_STEPS = 50
DEFAULT_STEPS = (0.01, 0.1, 0.5, 1.0)
DEFAULT_HOLD_S = 300.0
DEFAULT_ALPHA = 0.01
DEFAULT_MIN_SAMPLES = 100
DEFAULT_READY_TIMEOUT_S = 60.0
CANARY_READY_TIMEOUT_S = 600.0  # a new version has to start first


def _split(value: object) -> object:
    """Return what is written with commas between, as a flag or a query has it."""
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _checked_steps(steps: Any) -> tuple[float, ...]:
    if isinstance(steps, str):
        try:
            steps = [float(step) for step in steps.split(",")]
        except ValueError:
            text = "expected shares with commas between, such as 0.01,0.1,1"
            raise ValueError(text) from None
    if (
        isinstance(steps, list | tuple)
        and 0 < len(steps) <= MAX_ROLLOUT_STEPS
        and all(is_number(step) and 0 < step <= 1 for step in steps)
        and all(a < b for a, b in itertools.pairwise(steps))
        and steps[-1] == 1
    ):
        return tuple(float(step) for step in steps)
    raise ValueError(
        f"must be at most {MAX_ROLLOUT_STEPS} numbers above 0 that grow and end with 1"
    )


def _first_steps(steps: Any) -> tuple[float, ...]:
    """Return steps, of which the first one alone is enough; those of every rollout follow."""
    try:
        first = float(steps)
    except (TypeError, ValueError):
        return _checked_steps(steps)
    return _checked_steps([first, *(step for step in DEFAULT_STEPS if step > first)])


def _checked_rules(rules: object) -> dict[str, float]:
    pairs = _split(rules)
    if isinstance(pairs, list | tuple) and pairs:
        rules = dict(map(_rule, pairs))
    return dict(DEFAULT_RULES) if rules is None else check_rules(rules)


def _rule(text: object) -> tuple[str, float]:
    try:
        name, limit = str(text).split("=", 1)
        return name, float(limit)
    except ValueError:
        known = ", ".join(RULES)
        raise ValueError(f"{text!r}: expected RULE=NUMBER, with a rule of {known}") from None


def _checked_compare(compare: object) -> object:
    return None if compare is None else check_compare(compare)


Steps = Annotated[tuple[float, ...], BeforeValidator(_checked_steps)]
Rules = Annotated[dict[str, float], BeforeValidator(_checked_rules)]
_AS_TEXT = WithJsonSchema({"type": "string"})
HoldS = Annotated[float, Field(gt=0, le=86400 * 30)]
Alpha = Annotated[float, Field(gt=0, le=0.5)]
MinSamples = Annotated[int, Field(ge=1)]
ReadyTimeoutS = Annotated[float, Field(gt=0, le=86400)]
MaybeCompare = Annotated[Compare | None, BeforeValidator(_checked_compare)]


class Canary(Checked):
    """How an application's new version takes over from the running one.

    With ``compare`` as many queries as the first step gives it are mirrored to it, too.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    steps: Steps = DEFAULT_STEPS
    hold_s: HoldS = DEFAULT_HOLD_S
    abort_if: Rules = Field(default_factory=lambda: dict(DEFAULT_RULES))
    alpha: Alpha = DEFAULT_ALPHA
    min_samples: MinSamples = DEFAULT_MIN_SAMPLES
    ready_timeout_s: ReadyTimeoutS = CANARY_READY_TIMEOUT_S
    compare: MaybeCompare = None

    @model_validator(mode="after")
    def _compares_what_it_judges(self) -> Self:
        if DIFFERENCE_RATE in self.abort_if and self.compare is None:
            raise ValueError(f"abort_if[{DIFFERENCE_RATE!r}]: must come with compare")
        return self


EXIT_CHANGES = 3  # of a plan, a comparison or a replay with differences


class CompareFlags(Settings):
    """How answers are compared, as flags and queries say it."""

    compare: Literal["status", "json"] | None = Field(
        default=None, description="How answers are compared: status, or json."
    )
    tolerance: float | None = Field(
        default=None, description="Relative difference of equal numbers in JSON [0]."
    )
    ignore: Annotated[tuple[str, ...], BeforeValidator(_split), _AS_TEXT] = Field(
        default=(), description="What of JSON is not compared, such as /id or /items/*/at."
    )

    @property
    def how(self) -> Compare | None:
        """What to compare by; None where nothing is said of it."""
        if self.tolerance is None and not self.ignore:
            return None if self.compare is None else check_compare(self.compare)
        # Which only answers in JSON have.
        json = {"relative_tolerance": self.tolerance or 0.0, "ignore": self.ignore}
        return check_compare({"how": self.compare or "json", **json})


class DeployFlags(CompareFlags):
    """How to deploy applications: the flags of ``greenroom deploy``, and the query of a PUT."""

    plan: bool = Field(default=False, description="Show what would change, and change nothing.")
    keep_others: bool = Field(default=False, description="Keep what earlier files have named, too.")
    prune: bool = Field(
        default=False, description="Delete what scripts and commands deployed, too."
    )
    if_version: int | None = Field(
        default=None, description="Fail unless this is the id of the last change."
    )
    canary: Annotated[tuple[float, ...] | None, BeforeValidator(_first_steps), _AS_TEXT] = Field(
        default=None,
        description="New versions take over step by step, from this share; or all: 0.05,0.5,1.",
    )
    compare: Literal["status", "json"] | None = Field(
        default=None, description="Also mirror queries, and compare answers: status or json."
    )
    hold_s: float | None = Field(
        default=None, description=f"Seconds that a step stands at least [{DEFAULT_HOLD_S:g}]."
    )
    abort_if: Annotated[dict[str, float], BeforeValidator(_checked_rules), _AS_TEXT] = Field(
        default={}, description="When to go back, as of a rollout: error_rate=0.02."
    )
    min_samples: int | None = Field(
        default=None, description=f"Queries that a step needs [{DEFAULT_MIN_SAMPLES}]."
    )

    @property
    def rollout(self) -> Canary | None:
        """How new versions take over; None for at once."""
        if self.canary is None:
            return None
        numbers = {"hold_s": self.hold_s, "min_samples": self.min_samples}
        given = {name: value for name, value in numbers.items() if value is not None}
        how = {"compare": self.how, "abort_if": self.abort_if or None}
        return validated(Canary, {"steps": self.canary, **how, **given})

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.keep_others and self.prune:
            raise ValueError("keep_others deletes nothing, so it excludes prune")
        of_canary = ("compare", "tolerance", "ignore", "hold_s", "abort_if", "min_samples")
        given = [name for name in of_canary if getattr(self, name)]
        if given and self.canary is None:
            raise ValueError(f"{', '.join(given)}: must come with canary")
        _ = self.rollout  # or what is wrong with it
        return self


# --- The operations -------------------------------------------------------------------------------


class Operation(Checked):
    """Base of all operations. The first field is the name of what the operation is about."""

    model_config = _EXACT

    key: ClassVar[str] = ""  # its name in the table, as create_backend
    is_read: ClassVar[bool] = False  # whether it changes nothing
    is_held_by_proxies: ClassVar[bool] = False  # whether its answer waits until every proxy knows
    answers_goal: ClassVar[bool] = False  # whether its answer is a goal's id, or None for no change
    is_of_records: ClassVar[bool] = True  # it changes nothing else, so whether it did shows
    role: ClassVar[Role | None] = "deployer"  # that asks for it over HTTP; None for no one

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Make one of values as users give them, lists in place of tuples for example."""
        return cls(**fields)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.key = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def description(self) -> str:
        """What it does, for the history."""
        return self.described(dict(self))

    @classmethod
    def described(cls, fields: Mapping[str, Any]) -> str:
        """Say what one with these fields does."""
        text = cls.key.replace("_", " ")
        target = fields.get(next(iter(cls.model_fields), ""))
        target = getattr(target, "name", target)  # of a DeploymentSpec
        return f"{text} {target!r}" if isinstance(target, str) else text

    @property
    def fields(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return self.model_dump()


def named(key: str) -> type[Operation]:
    """Return an operation by its name; UnknownNameError for one of nothing."""
    if key not in OPERATIONS:
        raise unknown_name("operation", key, OPERATIONS)
    return OPERATIONS[key]


def read_operation(key: object, fields: object) -> Operation:
    """Make the operation that a client asks for; InvalidRequestError if it is none."""
    kind = OPERATIONS.get(key) if isinstance(key, str) else None
    if kind is None:
        raise InvalidRequestError(f"the controller does not know an operation {key!r}")
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise InvalidRequestError(f"{key}: expected its fields as a dict, not {fields!r}")
    return kind(**fields)


def read_given(kind: type[Operation], given: bytes | str | dict[str, str]) -> Operation:
    """Make an operation of JSON, or of texts by name; InvalidRequestError names all bad ones."""
    try:
        if isinstance(given, dict):
            return kind.model_validate_strings(given, strict=False)
        return kind.model_validate_json(given or b"{}")
    except ValidationError as error:
        raise InvalidRequestError(f"{kind.key}: {'; '.join(problems_in(error))}") from None


class Read(Operation):
    """Base of the operations that change nothing."""

    is_read: ClassVar[bool] = True
    role: ClassVar[Role | None] = "viewer"


class GoalChange(Operation):
    """Base of the operations that take time; answers the goal's id, None where nothing changed."""

    answers_goal: ClassVar[bool] = True


class EndpointChange(Operation):
    """Base of the operations that are answered when every proxy knows the changed endpoint."""

    is_held_by_proxies: ClassVar[bool] = True


class HostChange(Operation):
    """Base of the operations on hosts."""

    is_of_records: ClassVar[bool] = False
    role: ClassVar[Role | None] = "admin"


class CreateBackend(GoalChange):
    """Run code under a tag; answers the goal's id."""

    tag: NewTag
    code: bytes = Field(repr=False)
    code_hash: str
    config: Annotated[BackendConfig, AfterValidator(_as_in_2021)] = Field(
        default_factory=BackendConfig, validate_default=True
    )
    actor_options: PackedOptions = Field(default_factory=ActorOptions)
    version: str | None = None
    folders: tuple[bytes, ...] = Field(default=(), repr=False)  # zips that list_missing has named


class UpdateBackendConfig(GoalChange):
    """Change the given settings and no others; answers the goal's id."""

    tag: str
    changes: Annotated[dict[str, Any], BeforeValidator(_as_dict)]


class DeleteBackend(GoalChange):
    """Stop a backend's replicas and forget it; refused while an endpoint names it."""

    tag: str
    force: bool = False  # without draining


class GetBackendConfig(Read):
    """Answers a backend's settings."""

    tag: str


class ListBackends(Read):
    """Answers tag -> settings and state."""


class GetAutoscaling(Read):
    """Answers tag -> bounds, load and latest decisions of each autoscaled backend."""


class GetSeries(Read):
    """Answers the traffic over time: requests/s, errors, latencies, queue, replicas; see series.

    Of all endpoints or of one; ``last`` is how many of the newest steps.
    """

    endpoint: str | None = None
    span: Literal["live", "hour"] = "live"
    last: Annotated[int | None, Field(ge=1, le=MAX_STEPS)] = None


class CreateEndpoint(EndpointChange):
    """Name a backend, with a route or without."""

    name: NewTag
    backend: str
    route: Route = None
    methods: Methods = ("GET",)
    retryable: bool | None = None


class DeleteEndpoint(EndpointChange):
    """Forget an endpoint."""

    name: str


class SetTraffic(EndpointChange):
    """Give an endpoint's traffic to backends by weight."""

    endpoint: str
    weights: Weights


class ShadowTraffic(EndpointChange):
    """Copy a proportion of an endpoint's queries to a backend; 0 ends it."""

    endpoint: str
    backend: str
    proportion: Share
    compare: MaybeCompare = None


class ListEndpoints(Read):
    """Answers name -> route, methods, traffic and shadows."""


class GetDifferences(Read):
    """Answers shadow -> what comparing its answers has found."""

    endpoint: str


class StartRollout(GoalChange):
    """Move an endpoint's traffic to a backend step by step; answers the goal's id.

    The goal fails when the traffic goes back.
    """

    endpoint: str
    to: Annotated[str, Field(min_length=1)] = Field(
        description="The backend that is to get the traffic."
    )
    steps: Steps = Field(default=DEFAULT_STEPS, description="Its shares.")
    hold_s: HoldS = Field(
        default=DEFAULT_HOLD_S, description="Seconds that a step stands at least."
    )
    abort_if: Rules = Field(
        default_factory=lambda: dict(DEFAULT_RULES),
        description="error_rate, error_rate_increase, p95_latency_s, p95_latency_ratio or "
        "difference_rate; more than once for several "
        "[error_rate_increase=0.005 p95_latency_ratio=1.5].",
    )
    alpha: Alpha = Field(default=DEFAULT_ALPHA, description="Chance of going back without cause.")
    min_samples: MinSamples = Field(
        default=DEFAULT_MIN_SAMPLES, description="Queries that a step needs."
    )
    ready_timeout_s: ReadyTimeoutS = Field(
        default=DEFAULT_READY_TIMEOUT_S, description="Seconds without a replica."
    )


class AbortRollout(EndpointChange):
    """Go back to the traffic before a rollout."""

    endpoint: str


class PromoteRollout(EndpointChange):
    """End a rollout with all traffic at its new backend."""

    endpoint: str


class ListRollouts(Read):
    """Answers endpoint -> where its last rollout stands, and why."""


class DeployApplications(Operation):
    """Bring up these applications, and delete others, in one change.

    Those that are ``from_file`` are a document's: the next one deletes those that it does not name,
    unless with ``keep_others``; and with ``prune`` all others, whoever deployed them. With
    ``canary`` the new version of an application that runs takes over step by step, and its goal
    fails where it goes back. Deployments of an application that are not among these are deleted.
    Refused where ``if_version`` is not the id of the last change. Answers {"goals": {application:
    id}, "version": the id of the last change, "changed": names of applications}.
    """

    applications: tuple[ApplicationSpec, ...]
    keep_others: bool = False
    if_version: int | None = None
    canary: Canary | None = None
    folders: tuple[bytes, ...] = Field(default=(), repr=False)  # zips that list_missing has named
    from_file: bool = False
    prune: bool = False

    @property
    def description(self) -> str:
        """What it does, for the history."""
        names = [repr(each.name) for each in self.applications]
        what = f"deploy application{'s' * (len(names) != 1)} {', '.join(names) or 'none'}"
        what += ", step by step" * (self.canary is not None)
        if self.keep_others:
            return what
        return f"{what}, and no others" + " of files" * (not self.prune)


class PlanApplications(Read):
    """Answers what deploy_applications would change, as the history tells it, and the version."""

    role: ClassVar[Role | None] = "deployer"  # it comes with code

    applications: tuple[ApplicationSpec, ...]
    keep_others: bool = False
    from_file: bool = False
    prune: bool = False


class DeleteApplication(GoalChange):
    """Delete an application's deployments; answers the goal's id."""

    application: str


class ListMissing(Read):
    """Answers which of these, code or folders by sha256, are not stored."""

    role: ClassVar[Role | None] = "deployer"  # it comes with code

    digests: Digests


class Deploy(GoalChange):
    """Bring up a deployment of its own, with the endpoint of its name; answers the goal's id.

    Refused unless ``prev_version`` is None or the version that is deployed.
    """

    spec: DeploymentSpec
    route_prefix: Route
    prev_version: str | None = None
    folders: tuple[bytes, ...] = Field(default=(), repr=False)  # zips that list_missing has named


class DeleteDeployment(GoalChange):
    """Delete a deployment of its own; answers the goal's id."""

    name: str


class GetDeployment(Read):
    """Answers the settings and the state of a deployment of its own."""

    name: str


class ListDeployments(Read):
    """Answers name -> what get_deployment answers."""


class DeleteEverything(Operation):
    """Delete all applications, deployments, endpoints and backends; answers the goals' ids."""

    role: ClassVar[Role | None] = "admin"


class ForgetLost(Operation):
    """Forget what the store has lost and no deploy can bring again; answers [kind, name] of each.

    Until then the status names it. What is deployed is deployed again, or deleted.
    """

    role: ClassVar[Role | None] = "admin"


class ListHistory(Read):
    """Answers the changes that are kept, oldest first."""


class UndoChange(Operation):
    """Restore what was before a change, by default the last; answers what it undid, and the goal.

    Refused with the reason where that cannot be.
    """

    change_id: int | None = None


class WaitForGoal(Read):
    """Answered True when the goal is reached; fails with DeployFailedError when it is not."""

    goal_id: str


class GetStatus(Read):
    """Answers the object that ``greenroom status --json`` prints."""


class DrainHost(HostChange):
    """Replace elsewhere what is on a host; answered True when nothing is left there.

    It takes no replicas until ``undrain_host``. The last host that takes any is drained only with
    ``force``; then what is there stays, and it is answered at once. A host that stops asks for this
    itself, and then with ``leave``, to be forgotten.
    """

    host: str
    leave: bool = False
    force: bool = False


class UndrainHost(HostChange):
    """Let replicas be placed again on a host that was drained; those that have moved stay."""

    host: str


class EvictHost(HostChange):
    """Forget a host that is lost, and all that was there."""

    host: str


class RebalanceHosts(HostChange):
    """Move replicas from hosts that have more of a backend; answers how many are to move."""


class ListHosts(Read):
    """Answers HOST:PORT of the actor system of each host, also of those that are lost."""


class RotateKey(HostChange):
    """Give the cluster a new key, or go on with that; answered when all hosts that run have it.

    Answers {"hosts": [names of those], "away": [names of hosts that are lost and do not]}.
    """


class StopCluster(HostChange):
    """Stop all replicas of the controller's host; answered True when they have drained.

    With ``forget`` instead have every host stop and delete its state; answered True at once.
    """

    forget: bool = False


# Tokens are made and revoked by commands of the system's user, and not over HTTP: one that leaks
# must not make others.


class CreateToken(Operation):
    """Let requests over HTTP in that bear the token with this sha256.

    ConflictError where the name is another token's.
    """

    role: ClassVar[Role | None] = None

    name: NewName
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$", repr=False)]
    holder_role: Role
    expires_at: Annotated[float | None, Field(gt=0)] = None  # seconds since the epoch; None: never

    @property
    def description(self) -> str:
        """What it does, for the history."""
        return f"create token {self.name!r} with the role {self.holder_role}"


class RevokeToken(Operation):
    """Forget a token; UnknownNameError where there is none of that name."""

    role: ClassVar[Role | None] = None

    name: str


class ListTokens(Read):
    """Answers the tokens, expired ones too, as dicts of core.records.TokenRecord's fields."""

    role: ClassVar[Role | None] = None


_BASES = (Operation, Read, GoalChange, EndpointChange, HostChange)
OPERATIONS: dict[str, type[Operation]] = {
    kind.key: kind for base in _BASES for kind in base.__subclasses__() if kind not in _BASES
}
