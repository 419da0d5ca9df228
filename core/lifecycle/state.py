"""The hard state of a cluster: its records, and the one way to change them.

Theory of operation. Every write goes through :class:`State`, which keeps the records in memory,
notes what must be saved, publishes the tables for proxies, and remembers the definitions before the
change, for the history. The shell saves the :class:`Changes` before it performs an effect, pushes
news or answers, so that everything seen outside is on disk. A change validates first and writes
only then, so a refused change writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from typing import Any, TypeVar

from greenroom.core.agenda import Agenda
from greenroom.core.errors import InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle import releases
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.endpoints import Endpoints, Overlay, table_of
from greenroom.core.lifecycle.goals import Goals, Subject
from greenroom.core.lifecycle.history import HISTORY, Author, History, digests
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.long_poll import LongPoll
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    DEPLOYMENT,
    ENDPOINT,
    ROLLOUT,
    ApplicationRecord,
    BackendRecord,
    Changes,
    Definition,
    EndpointRecord,
    GoalRecord,
    Key,
    Records,
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

SOFT = ("goal", "history", "rollout", "canary", "listener", "host", "token")
"""Kinds of records that the cluster can do without when they are damaged; the status says so."""
T = TypeVar("T")
KINDS = (BACKEND, ENDPOINT, APPLICATION, *SOFT)
DAMAGED = "its record in the store is damaged; deploy it again"


class Gone(list[Callable[[str], None]]):
    """Who forgets a proxy, host, replica or endpoint by its name: told when it is gone."""

    def __call__(self, name: str) -> None:
        """Have it forgotten everywhere."""
        for forget in self:
            forget(name)


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
        self.changes = Changes()
        self.agenda = agenda = Agenda()
        self.endpoints = Endpoints(records.get(ENDPOINT, {}), self.changes)
        self.applications: Records[ApplicationRecord] = Records(
            APPLICATION, records.get(APPLICATION, {}), self.changes
        )
        self.goals = Goals(records.get("goal", {}), self.changes, agenda)
        self.history = History(records.get(HISTORY, {}), self.changes)
        self.backends = {
            tag: Backend(record, now, placement)
            for tag, record in records.get("backend", {}).items()
        }
        self.lost = set(lost)
        # Whatever has an entry by one of these enters here how it is forgotten.
        self.proxy_gone, self.host_gone, self.replica_gone = Gone(), Gone(), Gone()
        self.endpoint_gone = Gone()
        self.code_use = releases.CodeUse()
        is_recovering = any(not backend.recovered for backend in self.backends.values())
        self.long_poll = LongPoll(epoch, closed=is_recovering)
        agenda.touch(BACKEND, *self.backends)
        agenda.touch(APPLICATION, *self.applications)
        self.is_torn = False  # a change failed when a part of it was made
        self._of_application: dict[str, set[str]] = {}
        self._before: dict[Key, Definition | None] | None = None  # in a change: what it found
        self._wall_now = 0.0  # of the change
        self._is_entered = False  # in the history, whatever it changes

        self._entries_with_code: list[int] = []
        self._hold_code_of_history()
        self.code_use.lost.update(name for kind, name in self.lost if kind == "code")
        for tag, backend in self.backends.items():
            self._count(backend.record)
            # A change that is not under way has succeeded, or was taken back.
            subjects = (BACKEND, tag), (DEPLOYMENT, tag), (APPLICATION, backend.names[1])
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
        backend = self.backends.get(name)
        return None if backend is None else backend_definition(backend.record)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is deployed, or lost."""
        return not (self.backends or self.endpoints or self.applications or self.lost)

    # --- Changes --------------------------------------------------------------------------------

    def change(self, author: Author, what: str, make: Callable[[], Any], wall_now: float) -> Any:
        """Make a change and its entry in the history; a repeat of the request makes none.

        One that raises after it has written something leaves the state torn: nothing of it may be
        saved, and the last state that was is to be loaded again.
        """
        if self._before is not None:
            return make()  # a part of the change that is being made
        repeated = self.history.answered(author.request_id)
        if repeated is not None:
            return repeated.answer
        before = self._before = {}
        self._wall_now, self._is_entered = wall_now, False
        changes = self.changes.size
        try:
            answer = make()
        except Exception:
            is_changed = any(lasting(self.definition(key)) != each for key, each in before.items())
            self.is_torn = is_changed or self.changes.size != changes
            raise
        finally:
            self._before = None
        after = {key: lasting(self.definition(key)) for key in before}
        if after != before or self._is_entered:
            self.history.add(author, what, answer, before, after, wall_now)
            self._hold_code_of_history()
        return answer

    def _hold_code_of_history(self) -> None:
        """Hold the code of the newest entries; the cost is that of those that came and went."""
        entries = {entry.id: entry for entry in self.history.with_code()}
        for entry_id in entries.keys() - self._entries_with_code:
            self.code_use.hold(("history", entry_id), digests(entries[entry_id]))
        for entry_id in self._entries_with_code:
            if entry_id not in entries:
                self.code_use.hold(("history", entry_id), ())
        self._entries_with_code = list(entries)

    def enter(self) -> None:
        """Enter the change that is being made in the history, even if no definition changes.

        Nothing of it can be undone then, but who made it is known.
        """
        self._is_entered = True

    @property
    def is_changing(self) -> bool:
        """Whether a change is being made."""
        return self._before is not None

    def note(self, key: Key) -> None:
        """Keep for the history what is about to be changed; call it before each write.

        What belongs to a candidate is part of a rollout, and nothing that a user has defined, as
        little as what records.
        """
        if self._before is not None and key not in self._before and not is_passing(key[1]):
            self._before[key] = lasting(self.definition(key))

    def new_goal(self, subject: Subject, what: str) -> str:
        """Add a goal of the change that is being made; return its id."""
        return self.goals.create(subject, what, self._wall_now)

    def take_changes(self) -> Changes:
        """Return what to save before anything else is done."""
        for digest in sorted(self.code_use.take_freed()):
            self.changes.delete_code(digest)
        changes = self.changes.take()
        self.lost -= changes.puts.keys() | changes.deletes | {("code", d) for d in changes.code}
        return changes

    # --- Writing --------------------------------------------------------------------------------

    def touch(self, backend: str) -> None:
        """Look at a changed backend in the next step."""
        self.agenda.touch(BACKEND, backend)
        self._count(self.backends[backend].record)

    def add_backend(self, record: BackendRecord, code: bytes | None) -> None:
        """Add a backend and its code, None where that is stored already."""
        self.note((BACKEND, record.tag))
        self.backends[record.tag] = Backend(record, 0.0, self.placement)
        self.changes.put("backend", record.tag, record)
        if code is not None:
            self.keep_code(record.newest.code_digest, code)
        self.touch(record.tag)

    def redefine(self, tag: str, change: Callable[[], T]) -> T:
        """Make a change of a backend's definition; return what it returns."""
        self.note((BACKEND, tag))
        changed = change()
        self.touch(tag)
        return changed

    def save_backend(self, backend: Backend) -> None:
        """Save a backend's record, if it has changed."""
        if backend.changed:
            backend.changed = False
            self.changes.put("backend", backend.record.tag, backend.record)
            self._count(backend.record)

    def remove_backend(self, tag: str) -> None:
        """Forget a backend that has no replicas any more."""
        removed = self.backends.pop(tag).record
        self.long_poll.publish(BACKEND_PREFIX + tag, None)
        self.changes.delete("backend", tag)
        self.code_use.hold(("backend", tag), ())
        self._of_application[removed.application].discard(tag)
        if not self._of_application[removed.application]:
            del self._of_application[removed.application]

    def keep_code(self, digest: str, code: bytes) -> None:
        """Save code, unless it is stored already and not lost."""
        if not self.code_use.is_stored(digest):
            self.changes.put_code(digest, code)
            self.code_use.lost.discard(digest)

    def put_endpoint(self, record: EndpointRecord) -> None:
        """Add or replace an endpoint."""
        self.note((ENDPOINT, record.name))
        self.endpoints[record.name] = record
        self.agenda.touch(ROLLOUT, record.name)
        self._publish_endpoint(record.name)

    def lay(self, endpoint: str, overlay: Overlay | None) -> None:
        """Lay this over an endpoint, None for nothing more; whoever does has it in its record."""
        if endpoint in self.endpoints and self.endpoints.overlay(endpoint) != overlay:
            self.endpoints.lay(endpoint, overlay)
            self._publish_endpoint(endpoint)

    def _publish_endpoint(self, name: str) -> None:
        self.long_poll.publish(ENDPOINT_PREFIX + name, table_of(self.endpoints.served(name)))

    def drop_endpoint(self, name: str) -> None:
        """Remove an endpoint, and what follows it; harmless when there is none."""
        self.note((ENDPOINT, name))
        if self.endpoints.pop(name, None) is not None:
            self.long_poll.publish(ENDPOINT_PREFIX + name, None)
        self.endpoint_gone(name)

    def put_application(self, record: ApplicationRecord) -> None:
        """Add or replace an application."""
        self.agenda.touch(APPLICATION, record.name)
        self.note((APPLICATION, record.name))
        if self.applications.get(record.name) != record:
            self.applications[record.name] = record

    def forget_lost(self, keys: AbstractSet[Key]) -> None:
        """Delete those of the records that are damaged beyond repair."""
        for kind, name in sorted(self.lost & keys):
            self.changes.delete(kind, name)
            if kind in {BACKEND, ENDPOINT}:
                self.long_poll.publish(f"{kind}/{name}", None)

    def _count(self, record: BackendRecord) -> None:
        self._of_application.setdefault(record.application, set()).add(record.tag)
        self.code_use.hold(("backend", record.tag), releases.digests(record))
