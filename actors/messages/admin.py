"""The messages of clients to the controller, and its answer; see :mod:`.messages`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from types import NoneType
from typing import Any, NamedTuple

from greenroom.actors.messages.queries import Message, message
from greenroom.core.errors import InvalidRequestError

_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {  # annotation -> what a value of it may be
    "str": ((str,), "a string"),
    "str | None": ((str, NoneType), "a string or None"),
    "bool": ((bool,), "True or False"),
    "int | None": ((int, NoneType), "a whole number or None"),
}


@message
class Request(Message):
    """Base of all admin requests. Each is idempotent; a client repeats it with the same id.

    ``user`` is who asks, as the client's system names them; nobody vouches for it.
    """

    request_id: str
    user: str = ""

    def check(self) -> None:
        """Raise InvalidRequestError naming each field that is not of the plain type it should be.

        What is no string, bool or number is checked by who takes it.
        """
        if problems := list(self._problems()):
            raise InvalidRequestError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        for each in fields(self):
            kinds, told = _PLAIN.get(each.type, ((), ""))
            value = getattr(self, each.name)
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if kinds and not fits:
                yield f"{each.name}={value!r}: must be {told}"


@message
class RequestReply(Message):
    """The controller's answer; ``error_kind`` is a class in core.errors, "" for success.

    ``exception`` is the user code's own, cloudpickled, for a deployment that failed.
    """

    request_id: str
    value: Any = None
    error_kind: str = ""
    error: str = ""
    exception: bytes | None = None


@message
class CreateBackend(Request):
    """Run code; answers the goal's id, or None when nothing changed.

    ``folders`` are zips that ListMissing has named.
    """

    tag: str
    code: bytes
    code_hash: str
    config: dict[str, Any]
    actor_options: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    folders: tuple[bytes, ...] = ()


@message
class UpdateBackendConfig(Request):
    """Change the fields given in ``changes``; answers the goal's id or None."""

    tag: str
    changes: dict[str, Any]


@message
class DeleteBackend(Request):
    """Stop a backend's replicas and forget it; refused while an endpoint names it."""

    tag: str
    force: bool = False


@message
class CreateEndpoint(Request):
    """Name a backend, with a route or without; answered when every proxy knows it."""

    name: str
    backend: str
    route: str | None
    methods: tuple[str, ...]
    retryable: bool | None = None


@message
class DeleteEndpoint(Request):
    """Forget an endpoint; answered when no proxy routes to it any more."""

    name: str


@message
class SetTraffic(Request):
    """Give an endpoint's traffic to backends by weight; answered when every proxy knows it."""

    endpoint: str
    weights: dict[str, float]


@message
class ShadowTraffic(Request):
    """Have a proportion of an endpoint's queries copied to a backend; 0 ends it.

    Answered when every proxy knows it.
    """

    endpoint: str
    backend: str
    proportion: float
    compare: dict[str, Any] | None = None  # fields of core.comparing.Compare


@message
class GetDifferences(Request):
    """Answers shadow -> what comparing its answers has found."""

    endpoint: str


@message
class StartRollout(Request):
    """Move an endpoint's traffic to a backend step by step; answers the goal's id or None.

    The goal fails when the traffic goes back.
    """

    endpoint: str
    to: str
    steps: tuple[float, ...]
    hold_s: float
    abort_if: dict[str, float]
    alpha: float
    min_samples: int
    ready_timeout_s: float


@message
class AbortRollout(Request):
    """Go back to the traffic before a rollout; answered when every proxy knows it."""

    endpoint: str


@message
class PromoteRollout(Request):
    """End a rollout with all traffic at its new backend; answered when every proxy knows it."""

    endpoint: str


@message
class ListRollouts(Request):
    """Answers endpoint -> where its last rollout stands, and why."""


class DeploymentSpec(NamedTuple):
    """One deployment of an application, as DeployApplication carries it."""

    name: str
    code: bytes
    code_hash: str
    version: str | None
    config: dict[str, Any]
    actor_options: dict[str, Any]


@message
class DeployApplication(Request):
    """Bring up these deployments together; the last one named ``ingress`` gets the route.

    Deployments of the application that are not in ``deployments`` are deleted. Answers the goal's
    id, or None when nothing changed. ``folders`` are zips that ListMissing has named.
    """

    application: str
    ingress: str
    route_prefix: str | None
    deployments: tuple[DeploymentSpec, ...]
    folders: tuple[bytes, ...] = ()


@message
class ListMissing(Request):
    """Answers which of these, code or folders by sha256, are not stored."""

    digests: tuple[str, ...]


@message
class PlanApplication(DeployApplication):
    """Change nothing; answers what DeployApplication would change, as core.history tells it."""


@message
class DeployDeployment(Request):
    """Bring up a deployment of its own, with the endpoint of its name.

    Refused unless ``prev_version`` is None or the version that is deployed. Answers the goal's id,
    or None when nothing changed. ``folders`` are zips that ListMissing has named.
    """

    spec: DeploymentSpec
    route_prefix: str | None
    prev_version: str | None = None
    folders: tuple[bytes, ...] = ()


@message
class DeleteDeployment(Request):
    """Delete a deployment of its own; answers the goal's id or None."""

    name: str


@message
class DeleteEverything(Request):
    """Delete all applications, deployments, endpoints and backends; answers the goals' ids."""


@message
class GetDeployment(Request):
    """Answers the settings and the state of a deployment of its own."""

    name: str


@message
class ListDeployments(Request):
    """Answers name -> what GetDeployment answers."""


@message
class ListHistory(Request):
    """Answers the changes that are kept, oldest first."""


@message
class UndoChange(Request):
    """Restore what was before a change, by default the last; answers what it undid, and the goal.

    Refused with the reason where that cannot be.
    """

    change_id: int | None = None


@message
class DeleteApplication(Request):
    """Delete an application's deployments; answers the goal's id or None."""

    application: str


@message
class WaitForGoal(Request):
    """Answered when the goal completes (value True) or fails (DeployFailedError)."""

    goal_id: str


@message
class ListBackends(Request):
    """Answers tag -> settings and state."""


@message
class GetBackendConfig(Request):
    """Answers the backend's config as a dict."""

    tag: str


@message
class ListEndpoints(Request):
    """Answers name -> {route, methods, traffic, shadows}."""


@message
class GetStatus(Request):
    """Answers the object that ``greenroom status --json`` prints."""


@message
class GetAutoscaling(Request):
    """Answers tag -> bounds, load and latest decisions of each autoscaled backend."""


@message
class DrainHost(Request):
    """Have what is on a host replaced elsewhere; answers True when nothing is left there.

    At once where there is no other host to take it. With ``leave`` the host is forgotten then.
    """

    host: str
    leave: bool = False


@message
class EvictHost(Request):
    """Forget a host that is lost, and all that was there."""

    host: str


@message
class RotateKey(Request):
    """Give the cluster a new key, or go on with that; answered when all hosts that run have it.

    Answers {"hosts": [names of those], "away": [names of hosts that are lost and do not]}.
    """


@message
class ListHosts(Request):
    """Answers HOST:PORT of the actor system of each host, also of those that are lost."""


@message
class RebalanceHosts(Request):
    """Move replicas from hosts that have more of a backend; answers how many are to move."""


@message
class StopCluster(Request):
    """Stop all replicas of the controller's host; answers True when they have drained.

    With ``forget`` instead have every host stop and delete its state; answers True at once.
    """

    forget: bool = False
