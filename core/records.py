"""The hard state: what is checkpointed, as plain frozen values, one record per thing.

A record never changes; a change replaces it by a new one. Code is stored apart from the records,
once, under its hash. The :class:`Changes` of one step of the controller are saved all at once.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Mapping, ValuesView
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from greenroom.core.config import HIDDEN, config_shown, without_credentials
from greenroom.core.formats import travels

T = TypeVar("T")


@travels
@dataclass(frozen=True, kw_only=True)
class Release:
    """Code, settings and options that replicas of a backend run."""

    number: int = 1
    code_hash: str  # what makes two releases equal: code and version
    code_digest: str  # the name of the stored code
    config: Mapping[str, Any]  # fields of core.config.BackendConfig
    config_id: int = 1  # grows with each change of config
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None
    ran: bool = False  # all wanted replicas of it ran at once, at some time
    served: bool = False  # at least one of them ran, at some time


@travels
@dataclass(frozen=True, kw_only=True)
class ReplicaRecord:
    """A replica that may have a process."""

    release: int = 1  # the number of the release that it runs
    host: str = ""
    rank: int = 0
    devices: Mapping[str, tuple[int, ...]] | None = None  # see core.devices


@travels
@dataclass(frozen=True, kw_only=True)
class BackendRecord:
    """A backend, its releases, and its replicas.

    The last release is the newest, which the backend should run. The others are there while
    replicas of them are left, or while the backend may go back to one of them.
    """

    tag: str
    releases: tuple[Release, ...]  # oldest first
    application: str = ""
    deployment: str = ""
    deleting: bool = False
    force: bool = False  # deleting without draining
    was_running: bool = False  # its application, or it by itself, was RUNNING at some time
    failure: str = ""  # why it failed
    update_failure: str = ""  # why the last update was rolled back
    fallback_config: Mapping[str, Any] | None = None  # the last but this that all replicas took
    exception: bytes | None = None  # of either failure
    replicas: Mapping[str, ReplicaRecord] = field(default_factory=dict)  # by tag
    capacity: int = 0  # in an update: how many replicas were wanted before
    target: int | None = None  # how many replicas autoscaling wants; None without it

    @property
    def newest(self) -> Release:
        """The release that the backend should run."""
        return self.releases[-1]


@travels
@dataclass(frozen=True, kw_only=True)
class CompareRecord:
    """How a shadow's answers are compared; ``settings`` are fields of core.comparing.Compare."""

    id: str  # of these settings; what was found belongs to it
    settings: Mapping[str, Any] = field(repr=False)

    def __str__(self) -> str:
        how = self.settings.get("how")  # "function" is the name of its own setting, too
        shown = [] if how == "function" else [str(how)]
        for name, value in self.settings.items():
            if value and name not in ("how", "code"):
                shown.append(f"{name} {value}")
        return ", ".join(shown)


@travels
@dataclass(frozen=True, kw_only=True)
class EndpointRecord:
    """An endpoint and its traffic policy."""

    name: str
    route: str | None = None
    methods: tuple[str, ...] = ()
    retryable: bool | None = None  # whether queries may be run again; None leaves it to backends
    traffic: Mapping[str, float] = field(default_factory=dict)  # backend -> weight
    shadows: Mapping[str, float] = field(default_factory=dict)  # backend -> proportion
    compares: Mapping[str, CompareRecord] = field(default_factory=dict)  # by the shadow
    made_with: str = ""  # the backend it was created with, whatever its traffic is now
    application: str = ""
    deployment: str = ""  # whose endpoint it is, so that it goes with that


@travels
@dataclass(frozen=True, kw_only=True)
class ApplicationRecord:
    """Deployments deployed together."""

    name: str
    ingress: str
    route_prefix: str | None
    deployments: tuple[str, ...]  # names; the backend and the endpoint of each bear both names
    deleting: bool = False
    from_file: bool = False  # which owns it: a later file without it deletes it


@travels
@dataclass(frozen=True, kw_only=True)
class GoalRecord:
    """A change under way, or lately ended. ``subject`` is (kind, name) of what is changed."""

    id: str
    subject: tuple[str, str]
    what: str
    created_at: float  # seconds since the epoch
    state: str = "pending"  # or succeeded, failed
    error: str = ""
    exception: bytes | None = None


@travels
@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """A move of an endpoint's traffic to a backend, step by step; the last one of its endpoint.

    While it is under way it lies over the endpoint, whose definition does not change. ``step`` is
    the one whose weights routers have, -1 before the first. What a step has shown
    is kept coarsely: the proxies that live have the rest.
    """

    id: str
    endpoint: str
    to: str
    before: Mapping[str, float]  # the traffic that the endpoint's definition has
    steps: tuple[float, ...]  # the new backend's weights
    hold_s: float
    abort_if: Mapping[str, float]
    alpha: float
    min_samples: int
    ready_timeout_s: float
    release: int  # of the new backend
    started_at: float  # seconds since the epoch
    state: str = "under way"  # or promoted, went back, interrupted
    reason: str = ""  # of its end
    step: int = -1
    held_s: float = 0.0  # in this step
    counted: Mapping[str, Any] = field(default_factory=dict)  # proxy -> backend -> tally
    slowness: Any = None  # core.judging.Slowness, once it is decided
    answers: tuple[int, ...] = ()  # at its end: compared, different, not compared
    shadows: Mapping[str, float] = field(default_factory=dict)  # laid over the endpoint's
    compares: Mapping[str, CompareRecord] = field(default_factory=dict)  # likewise


@travels
@dataclass(frozen=True, kw_only=True)
class CanaryRecord:
    """A new version of an application beside the running one; the last one of its application.

    ``wanted`` are the definitions that there are to be after it, ``before`` those that it found.
    """

    application: str
    wanted: Mapping[tuple[str, str], Any]
    before: Mapping[tuple[str, str], Any]
    settings: Mapping[str, Any]  # fields of core.operations.Canary
    endpoint: str  # the ingress', whose traffic is moved
    to: str  # the new version's ingress
    state: str = "rolling out"  # or taking over, promoted, went back
    reason: str = ""  # of its end


@travels
@dataclass(frozen=True, kw_only=True)
class ListenerRecord:
    """A proxy that may route by tables of this controller or an earlier one."""

    name: str  # its incarnation
    process: tuple[int, int, str]  # fields of actors.messages.Process
    host: str = ""


@travels
@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """A host that has joined and not left, so that replicas may be there."""

    name: str
    id: str  # of its state dir, so that no other host takes its name
    address: str  # HOST:PORT of its actor system
    capacity: Mapping[str, float]
    labels: Mapping[str, str]
    draining: bool = False  # it was asked to, and has not been asked to take replicas again


@travels
@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """A token of the HTTP API, of which only the hash is kept."""

    name: str
    digest: str = field(repr=False)  # sha256, in hexadecimal digits
    role: str
    created_at: float  # seconds since the epoch
    expires_at: float | None


@travels
@dataclass(frozen=True, kw_only=True)
class HistoryRecord:
    """An acknowledged change. ``before`` and ``after`` are what it found and what it left.

    They are definitions by kind and name; see :mod:`greenroom.core.records`.
    """

    id: int
    at: float  # seconds since the epoch
    user: str
    address: str
    what: str
    request_id: str  # a repeat of the request is answered with ``answer``
    answer: Any
    before: Mapping[tuple[str, str], Any]
    after: Mapping[tuple[str, str], Any]


# --- Definitions ----------------------------------------------------------------------------------
#
# A *definition* is the part of the state that clients ask for, as opposed to how far it has come.
# The definition of a backend, an endpoint or an application is what the last change made it; None
# means that there is none. A deploy says which definitions there should be. A plan compares those
# with the current ones, the history keeps the definitions before and after each change, and an undo
# restores those from before.

BACKEND, ENDPOINT, APPLICATION = ("backend", "endpoint", "application")
ROLLOUT, CANARY = "rollout", "canary"  # by endpoint, and by application
CODE = "code"  # by the sha256 of what is stored
DEPLOYMENT = "deployment"  # a backend and the endpoint of its name; a goal may be about one

Key = tuple[str, str]
"""Kind and name."""

CANDIDATE = "~new"


def candidate_of(application: str) -> str:
    """Return the name of the application that a canary runs beside this one."""
    return application + CANDIDATE


def is_candidates(name: str) -> bool:
    """Return whether an application, or a backend or endpoint of it, is a canary's."""
    return name.partition("#")[0].endswith(CANDIDATE)


RECORDER, REPLAY = "recorder ", "replay "
"""How the names begin of what is made for the time of a recording, or of its replay."""


def is_passing(name: str) -> bool:
    """Return whether a backend or endpoint is of a canary, or made for a recording or a replay."""
    return is_candidates(name) or name.startswith((RECORDER, REPLAY))


def lasting(definition: Definition | None) -> Definition | None:
    """Return a definition as the history keeps it: an endpoint without its recorder."""
    if not isinstance(definition, EndpointRecord) or not any(map(is_passing, definition.shadows)):
        return definition
    return replace(
        definition,
        shadows={tag: p for tag, p in definition.shadows.items() if not is_passing(tag)},
        compares={tag: c for tag, c in definition.compares.items() if not is_passing(tag)},
    )


def served_as(application: str) -> str:
    """Return the name of the application that this one is, or is a candidate for."""
    return application.removesuffix(CANDIDATE)


@travels
@dataclass(frozen=True, kw_only=True)
class BackendDefinition:
    """The code and settings that a backend should run."""

    code_hash: str
    code_digest: str = field(compare=False)  # equal code may come as other bytes
    config: Mapping[str, Any]
    actor_options: Mapping[str, Any]
    version: str | None = None
    application: str = ""
    deployment: str = ""

    @property
    def release(self) -> dict[str, Any]:
        """The part that replicas run, which a Release has, too."""
        return _release_of(self)


def _release_of(what: Release | BackendDefinition) -> dict[str, Any]:
    names = ("code_hash", "code_digest", "config", "actor_options", "version")
    return {name: getattr(what, name) for name in names}


_OPTIONS = "actor_options."
_ENV = f"{_OPTIONS}runtime_env."
_VARIABLE = f"{_ENV}env_vars."

Definition = BackendDefinition | EndpointRecord | ApplicationRecord
Definitions = Mapping[Key, Definition | None]


def backend_definition(record: BackendRecord) -> BackendDefinition | None:
    """Return what a backend should run; None for one that is being deleted."""
    if record.deleting:
        return None
    return BackendDefinition(
        **_release_of(record.newest),
        application=record.application,
        deployment=record.deployment,
    )


def differences(before: Definition | None, after: Definition | None) -> dict[str, Any]:
    """Return field -> [before, after] of what differs, as plain values for people and programs.

    Of settings (``config.num_replicas``) each one counts by itself. Values of environment variables
    may be secrets, and are hidden, as are users and passwords in URLs.
    """
    old, new = _plain(before), _plain(after)
    names = [*new, *(name for name in old if name not in new)]
    return {
        name: [_shown(name, old.get(name)), _shown(name, new.get(name))]
        for name in names
        if old.get(name) != new.get(name)
    }


def _shown(name: str, value: Any) -> Any:
    if name.startswith(_VARIABLE) and value is not None:
        return HIDDEN
    return without_credentials(value)


def _plain(definition: Definition | None) -> dict[str, Any]:
    if definition is None:
        return {}
    plain: dict[str, Any] = {}
    for one in dataclasses.fields(definition):
        value = getattr(definition, one.name)
        if one.name == "config":
            plain |= config_shown(value)
        elif one.name == "actor_options":
            plain |= _plain_options(value)
        elif one.name not in {"name", "code_digest", "deleting"}:
            plain[one.name] = list(value) if isinstance(value, tuple) else value
    return plain


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    env = options.get("runtime_env", {})
    plain = {f"{_OPTIONS}{name}": part for name, part in options.items() if name != "runtime_env"}
    plain |= {f"{_ENV}{name}": part for name, part in env.items() if name != "env_vars"}
    return plain | {f"{_VARIABLE}{name}": part for name, part in env.get("env_vars", {}).items()}


@dataclass
class Changes:
    """What to save, (kind, name) -> record, and what to delete. Code is bytes, by its digest."""

    puts: dict[Key, Any] = field(default_factory=dict)
    deletes: set[Key] = field(default_factory=set)
    records: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # all there are, by kind

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)

    def put(self, kind: str, name: str, record: Any) -> None:
        """Save a record; of several the last one."""
        self.deletes.discard((kind, name))
        self.puts[kind, name] = record

    def delete(self, kind: str, name: str) -> None:
        """Delete a record."""
        self.puts.pop((kind, name), None)
        self.deletes.add((kind, name))

    def take(self) -> Changes:
        """Return all of this as an object of its own; nothing is left here."""
        taken = Changes(self.puts, self.deletes)
        self.puts, self.deletes = {}, set()
        return taken


class Records(UserDict[str, T]):
    """The records of one kind by name; what is assigned here or deleted is saved with the step."""

    def __init__(self, kind: str, saved: Mapping[str, T], changes: Changes) -> None:
        super().__init__()
        self.data = dict(saved)  # not one by one, which would save them again
        self._kind, self._changes = kind, changes
        changes.records[kind] = self.data

    def __setitem__(self, name: str, record: T) -> None:
        super().__setitem__(name, record)
        self._changes.put(self._kind, name, record)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._changes.delete(self._kind, name)

    def values(self) -> ValuesView[T]:
        """Return the records; UserDict would look each one up by its name."""
        return self.data.values()
