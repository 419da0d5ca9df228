"""The hard state of a cluster: its records, and the one way to change them.

Theory of operation. An operation works out a :class:`Change` from the state, which may fail and
writes nothing. :meth:`State.apply` alone makes it: it compares what is wanted with what there is,
changes the records in memory, which records what must be saved, publishes the tables for proxies,
makes the goals, and adds the entry with the definitions before and after to the history. The shell
saves the :class:`Changes` before it performs an effect, pushes updates or answers, so that all that
is seen outside is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from greenroom.core.agenda import Agenda
from greenroom.core.config import BackendConfig
from greenroom.core.errors import InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle import releases
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.endpoints import Endpoints, Overlay, table_of
from greenroom.core.lifecycle.goals import Goals
from greenroom.core.lifecycle.history import CODE_KEPT, HISTORY, Author, History
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.long_poll import LISTENER, LongPoll
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    CODE,
    DEPLOYMENT,
    ENDPOINT,
    ROLLOUT,
    ApplicationRecord,
    BackendDefinition,
    BackendRecord,
    Changes,
    Definition,
    Definitions,
    EndpointRecord,
    GoalRecord,
    HistoryRecord,
    Key,
    Records,
    Release,
    backend_definition,
    is_passing,
    lasting,
)
from greenroom.core.routing.tables import (
    BACKEND_PREFIX,
    ENDPOINT_PREFIX,
    BackendTable,
    EndpointTable,
)
from greenroom.core.validation import unknown_name

DEPLOYED = (BACKEND, ENDPOINT, APPLICATION)
"""Kinds of records that a deploy brings again; without others the cluster can do."""
KINDS = (*DEPLOYED, "goal", "history", "rollout", "canary", "listener", "host", "token")
DAMAGED = "its record in the store is damaged; deploy it again"


class Forgetting(list[Callable[[str], None]]):
    """Who forgets a thing of one kind by its name: called when it is gone."""

    def __call__(self, name: str) -> None:
        """Have it forgotten everywhere."""
        for forget in self:
            forget(name)


class Gone:
    """What is called when something is gone; whatever has an entry by its name enters here how."""

    def __init__(self) -> None:
        self.proxy, self.host = Forgetting(), Forgetting()
        self.replica, self.endpoint = Forgetting(), Forgetting()


class Made(NamedTuple):
    """What came of a change: the goal for each subject, None for none, and the last entry's id."""

    goals: Mapping[Any, str | None]
    version: int


def _first_goal(made: Made) -> str | None:
    return next(iter(made.goals.values()), None)


class Change(NamedTuple):
    """What an operation changes, worked out and not made yet.

    ``wanted`` are the definitions that there are to be, None for what is to go, and ``code`` has by
    its digest what may not be stored yet. ``then`` writes the records that are no definitions.
    """

    wanted: Definitions = MappingProxyType({})
    code: Mapping[str, bytes] = MappingProxyType({})
    force: bool = False  # what is deleted does not drain
    then: Callable[[], object] | None = None
    subject: Key | None = None  # of the goal
    what: str = ""  # does the goal
    joins: bool = False  # a goal under way is reached with this, and only so
    is_entered: bool = False  # in the history, also where no definition changes
    parts: tuple[Change, ...] = ()  # that follow
    answer: Callable[[Made], Any] = _first_goal


class State:
    """Backends, endpoints, applications, goals and history.

    ``lost`` are the keys of records that are damaged beyond repair. What such an endpoint or
    backend would have served is refused, and never served by another.
    """

    def __init__(
        self,
        records: Mapping[str, Mapping[str, Any]],
        epoch: int,
        now: float,
        placement: Placement,
        lost: Iterable[Key] = (),
    ) -> None:
        self.placement = placement
        self.lost = set(lost)
        self.changes = Changes()
        self.agenda = agenda = Agenda()
        self.endpoints = Endpoints(records.get(ENDPOINT, {}), self.changes)
        self.applications: Records[ApplicationRecord] = Records(
            APPLICATION, records.get(APPLICATION, {}), self.changes
        )
        self.goals = Goals(records.get("goal", {}), self.changes, agenda)
        self.history = History(records.get(HISTORY, {}), self.changes, self.lost)
        self._backends: Records[BackendRecord] = Records(
            BACKEND, records.get(BACKEND, {}), self.changes
        )
        self.backends = {
            tag: Backend(record, now, placement) for tag, record in self._backends.items()
        }
        self.gone = Gone()
        self.code_use = releases.CodeUse(self.lost)
        is_recovering = any(not backend.recovered for backend in self.backends.values())
        self.long_poll = LongPoll(
            epoch,
            records.get(LISTENER, {}),
            self.changes,
            agenda,
            closed=is_recovering,
            on_gone=self.gone.proxy,
        )
        agenda.touch(BACKEND, *self.backends)
        agenda.touch(APPLICATION, *self.applications)
        self.is_torn = False  # a change failed when a part of it may have been made
        self._longest_drain_s: float | None = None  # until a backend changes
        self._of_application: dict[str, set[str]] = {}
        for entry in self.history:
            if entry.id > self.history.last_id - CODE_KEPT:
                self._hold_code_of(entry)
        for tag, backend in self.backends.items():
            self._count(backend.record)
            # A change that is not under way has succeeded, or was taken back.
            subjects = (BACKEND, tag), (DEPLOYMENT, tag), (APPLICATION, backend.record.application)
            backend.proven = not any(map(self.goals.pending_for, subjects))
        for name, record in self.endpoints.items():
            self.long_poll.publish(ENDPOINT_PREFIX + name, table_of(record))
        self._publish_lost()

    def _publish_lost(self) -> None:
        """Tell proxies to refuse what lost endpoints and backends would have served."""
        for kind, name in sorted(self.lost):
            if kind == BACKEND:
                table = BackendTable(
                    tag=name, unavailable=DAMAGED, is_wanted=True, is_expected=True
                )
                self.long_poll.publish(BACKEND_PREFIX + name, table)
            elif kind == ENDPOINT:
                lost = EndpointTable(name=name, route=self._lost_route(name), unavailable=DAMAGED)
                self.long_poll.publish(ENDPOINT_PREFIX + name, lost)

    def _lost_route(self, name: str) -> str | None:
        """Return a lost endpoint's route: its application's, or that of the last change of it."""
        for application in self.applications.values():
            if name == f"{application.name}#{application.ingress}":
                return application.route_prefix
        for entry in reversed(tuple(self.history)):
            for side in (entry.after, entry.before):
                record = side.get((ENDPOINT, name))
                if isinstance(record, EndpointRecord):
                    return record.route
        return None

    # --- Reading --------------------------------------------------------------------------------

    def backend(self, tag: str) -> Backend:
        """Return a backend that is not being deleted, or raise UnknownNameError."""
        backend = self.backends.get(tag)
        if backend is None or backend.record.deleting:
            raise unknown_name("backend", tag, self.backends)
        return backend

    def endpoint(self, name: str) -> EndpointRecord:
        """Return an endpoint, or raise UnknownNameError."""
        if name not in self.endpoints:
            raise unknown_name("endpoint", name, self.endpoints)
        return self.endpoints[name]

    def goal(self, goal_id: str) -> GoalRecord:
        """Return a goal, or raise UnknownNameError."""
        if (goal := self.goals.get(goal_id)) is None:
            raise UnknownNameError(
                f"no goal has the id {goal_id!r}; those that ended long ago are forgotten"
            )
        return goal

    def backends_of(self, application: str) -> set[str]:
        """Return the tags of an application's backends, those that are being deleted too."""
        return self._of_application.get(application, set())

    def check_usable(self, what: str, tags: Iterable[str], application: str = "") -> None:
        """Raise InvalidRequestError unless an application's endpoint may name these backends.

        It may name those of its application. ``what`` is said first.
        """
        own = self.backends_of(application)

        def usable(tag: str) -> bool:
            return tag in own and not self.backends[tag].record.deleting

        if unknown := sorted(repr(tag) for tag in set(tags) if not usable(tag)):
            raise InvalidRequestError(
                f"{what}: no backend is named {', '.join(unknown)}; it could be: "
                f"{', '.join(sorted(filter(usable, own))) or 'none'}"
            )

    def definition(self, key: Key) -> Definition | None:
        """Return what the last change has made of something; None where there is none."""
        kind, name = key
        if kind == ENDPOINT:
            return self.endpoints.get(name)
        if kind == APPLICATION:
            application = self.applications.get(name)
            return None if application is None or application.deleting else application
        backend = self.backends.get(name) if kind == BACKEND else None
        return None if backend is None else backend_definition(backend.record)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is deployed, or lost."""
        return not (self.backends or self.endpoints or self.applications or self.lost)

    def longest_drain_s(self) -> float:
        """Return the longest ``graceful_shutdown_timeout_s`` of all backends; 20 without any.

        Any host's front may have calls at any replica. Each host asks for it once a second, so it
        is sought only after a change.
        """
        if self._longest_drain_s is None:
            configs = [each.config for each in self.backends.values()] or [BackendConfig()]
            self._longest_drain_s = max(each.graceful_shutdown_timeout_s for each in configs)
        return self._longest_drain_s

    # --- Changes --------------------------------------------------------------------------------

    def apply(self, author: Author, what: str, change: Change, wall_now: float) -> Any:
        """Make a change, with its entry in the history; return its answer.

        Where this raises the state is torn: nothing of it may be saved, and the last state that was
        is to be loaded again. What belongs to a candidate, or records, is not in the history.
        """
        parts = (change, *change.parts)
        keys = [key for part in parts for key in part.wanted if not is_passing(key[1])]
        found = {key: lasting(self.definition(key)) for key in keys}
        self.is_torn = True
        goals = {part.subject: self._make(part, wall_now) for part in parts}
        goals.pop(None, None)
        before: dict[Key, Definition | None] = {}
        after: dict[Key, Definition | None] = {}
        for key, old in found.items():
            new = lasting(self.definition(key))
            if new is not old and new != old:
                before[key], after[key] = old, new
        is_new = bool(after) or any(part.is_entered for part in parts)
        answer = change.answer(Made(goals, self.history.last_id + is_new))
        if is_new:
            self._hold_code_of(self.history.add(author, what, answer, before, after, wall_now))
        self.is_torn = False
        return answer

    def _make(self, part: Change, wall_now: float) -> str | None:
        changed = [self.define(key, wanted, part) for key, wanted in part.wanted.items()]
        if part.then is not None:
            part.then()
        if part.subject is None:
            return None
        pending = self.goals.pending_for(part.subject)
        if not (any(changed) or part.then) or (part.joins and pending is not None):
            return pending
        return self.goals.create(part.subject, part.what, wall_now)

    def define(self, key: Key, wanted: Definition | None, change: Change) -> bool:
        """Make something be as it is defined; return whether it was not, or is to be tried again.

        Only :meth:`apply` calls this.
        """
        kind, name = key
        if wanted is None and key in self.lost and key not in self.changes.puts:
            self.changes.delete(kind, name)
            if kind in {BACKEND, ENDPOINT}:
                self.long_poll.publish(f"{kind}/{name}", None)
        if isinstance(wanted, BackendDefinition):
            return self._deploy(name, wanted, change.code)
        if kind == BACKEND:
            backend = self.backends.get(name)
            if backend is None or not backend.delete(force=change.force):
                return False
            self.agenda.touch(BACKEND, name)
            return True
        if self.definition(key) == wanted:
            return False
        if isinstance(wanted, EndpointRecord):
            self.endpoints[name] = wanted
            self.agenda.touch(ROLLOUT, name)
            self._publish_endpoint(name)
        elif kind == ENDPOINT:
            del self.endpoints[name]
            self.long_poll.publish(ENDPOINT_PREFIX + name, None)
            self.gone.endpoint(name)
        else:
            self.applications[name] = wanted or replace(self.applications[name], deleting=True)
            self.agenda.touch(APPLICATION, name)
        return True

    def _deploy(self, tag: str, wanted: BackendDefinition, code: Mapping[str, bytes]) -> bool:
        backend = self.backends.get(tag)
        if backend is None:
            record = BackendRecord(
                tag=tag,
                releases=(Release(**wanted.release),),
                application=wanted.application,
                deployment=wanted.deployment,
            )
            backend = self.backends[tag] = Backend(record, 0.0, self.placement)
            self._backends[tag] = record
            changed = True
        else:
            changed = backend.deploy(**wanted.release)
            if backend.record.deployment != wanted.deployment:  # that of one being deleted
                backend.update(deployment=wanted.deployment)
        # Equal code may have come as other bytes; then what is stored already is kept.
        used = {*releases.folders_of(wanted), backend.record.newest.code_digest}
        for digest in used & code.keys():
            if not self.code_use.is_stored(digest):
                self.changes.put(CODE, digest, code[digest])
                self.lost.discard((CODE, digest))
        self._count(backend.record)
        self.agenda.touch(BACKEND, tag)
        return changed

    def _hold_code_of(self, entry: HistoryRecord) -> None:
        """Keep the code of an entry of the history, in place of that of one long before."""
        self.code_use.hold((HISTORY, entry.id - CODE_KEPT), ())
        held = *entry.before.values(), *entry.after.values()
        self.code_use.hold((HISTORY, entry.id), releases.digests_of(*held))

    def take_changes(self) -> Changes:
        """Return what to save before anything else is done."""
        for digest in sorted(self.code_use.take_freed()):
            self.changes.delete(CODE, digest)
        changes = self.changes.take()
        deletes, is_needed = changes.deletes & self.lost, self.code_use.is_needed
        # Code that something still needs, as the history may, stays lost.
        needed = {(kind, name) for kind, name in deletes if kind == CODE and is_needed(name)}
        self.lost -= changes.puts.keys() | (deletes - needed)
        return changes

    # --- Writing --------------------------------------------------------------------------------

    def save_backend(self, backend: Backend) -> None:
        """Save a backend's record, if it has changed."""
        record = backend.record
        if record is not self._backends[record.tag]:
            self._backends[record.tag] = record
            self._count(record)

    def record_running(self, tag: str) -> None:
        """Record that a backend, or its application as a whole, runs: routers are to know."""
        if not self.backends[tag].record.was_running:
            self.backends[tag].update(was_running=True)
            self.agenda.touch(BACKEND, tag)

    def remove_backend(self, tag: str) -> None:
        """Forget a backend that has no replicas any more."""
        removed, self._longest_drain_s = self.backends.pop(tag).record, None
        self.long_poll.publish(BACKEND_PREFIX + tag, None)
        del self._backends[tag]
        self.code_use.hold((BACKEND, tag), ())
        self._of_application[removed.application].discard(tag)
        if not self._of_application[removed.application]:
            del self._of_application[removed.application]

    def lay(self, endpoint: str, overlay: Overlay | None) -> None:
        """Lay this over an endpoint, None for nothing more; whoever does has it in its record."""
        if endpoint in self.endpoints and self.endpoints.overlay(endpoint) != overlay:
            self.endpoints.lay(endpoint, overlay)
            self._publish_endpoint(endpoint)

    def _publish_endpoint(self, name: str) -> None:
        self.long_poll.publish(ENDPOINT_PREFIX + name, table_of(self.endpoints.served(name)))

    def _count(self, record: BackendRecord) -> None:
        self._longest_drain_s = None
        self._of_application.setdefault(record.application, set()).add(record.tag)
        self.code_use.hold((BACKEND, record.tag), releases.digests_of(*record.releases))
