"""The hosts of a cluster: joined, lost, back, emptied, gone.

    expected --SEEN--> running --DRAIN--> draining --UNDRAIN--> running
       |                 |  ^                |
       `-----MISSED----> lost <---MISSED-----'      (lost --SEEN--> running)

A host is *expected* when the controller knows it only from its record: a new controller has not
heard from it yet. A host drains because it is to stop, which ends with its process, or because it
was asked to, which its record says until that is taken back: so it drains again each time that it
is seen. A host is forgotten when it has left, with no replicas on it, or is evicted. The
controller's own host is not judged: it runs, or drains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from greenroom.core.errors import ConflictError, UnknownNameError
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.lifecycle.state import State
from greenroom.core.long_poll import Listeners
from greenroom.core.records import BACKEND, HostRecord
from greenroom.core.validation import suggestion

# --- Liveness -------------------------------------------------------------------------------------
#
# A host sends several heartbeats a second. It is *lost* when none has arrived for
# :data:`LOST_AFTER_S`; at 30% packet loss, that happens to a live host once in days. It is *back*
# when heartbeats have arrived for :data:`STEADY_S` without a gap of :data:`GAP_S`. So a host is
# lost quickly and is back slowly: a link that comes and goes leaves it lost, instead of starting
# and stopping replicas each time.
#
# The controller may itself have been stopped or busy. Time in which it did not listen does not
# count as silence of a host.

BEAT_S = 0.2
LOST_AFTER_S = 2.4
STEADY_S, GAP_S = 1.0, 0.8
LOOK_S = 0.2  # how often to judge
PAUSE_S = 1.5  # between two looks: the judge itself was away, and not only late


@dataclass(slots=True)
class _Beats:
    at: float
    since: float  # the beginning of the present run of beats
    is_lost: bool = False


class Liveness:
    """All hosts that send heartbeats. ``now`` is always monotonic seconds."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Beats] = {}
        self._looked_at = 0.0

    def expect(self, host: str, now: float, patience_s: float = LOST_AFTER_S) -> None:
        """Judge a host, which is lost when it is not heard of for ``patience_s`` from now on.

        Harmless when it is judged already.
        """
        self._hosts.setdefault(host, _Beats(now + patience_s - LOST_AFTER_S, now))

    def forget(self, host: str) -> None:
        """Judge a host no more."""
        self._hosts.pop(host, None)

    def heard(self, host: str, now: float) -> None:
        """Take a host's beat; one of a host that is not judged means nothing."""
        heard = self._hosts.get(host)
        if heard is not None:
            if now - heard.at > GAP_S:
                heard.since = now
            heard.at = now

    def look(self, now: float) -> tuple[list[str], list[str]]:
        """Return the hosts that are lost, and those that are back, since the last look."""
        away_s = now - self._looked_at
        if away_s > PAUSE_S:
            for heard in self._hosts.values():
                heard.at = max(heard.at, min(heard.at + away_s, now))
        self._looked_at = now
        lost, back = [], []
        for host, heard in self._hosts.items():
            if not heard.is_lost and now - heard.at > LOST_AFTER_S:
                heard.is_lost = True
                lost.append(host)
            elif heard.is_lost and _is_steady(heard, now):
                heard.is_lost = False
                back.append(host)
        return lost, back

    def give_up(self, host: str) -> bool:
        """Count a host as lost at once; False when it is already, or is not judged."""
        heard = self._hosts.get(host)
        if heard is None or heard.is_lost:
            return False
        heard.is_lost = True
        heard.at = heard.since = float("-inf")
        return True


def _is_steady(heard: _Beats, now: float) -> bool:
    return now - heard.at <= GAP_S and heard.at - heard.since >= STEADY_S


HOST = "host"
SUSPECT_S = 1.2  # the same for that of the controller before, which was silent for long
STABLE_S = 5.0  # a host that ran this long, and is started again, counts again at once
EXPECTED_S = 8.0  # within which a host has found a new controller, if it can be reached


class HostState(StrEnum):
    """Whether a host can be counted on."""

    EXPECTED = "EXPECTED"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    LOST = "LOST"


class HostEvent(StrEnum):
    """What can happen to a host."""

    SEEN = "SEEN"
    MISSED = "MISSED"
    DRAIN = "DRAIN"
    UNDRAIN = "UNDRAIN"


S, E = HostState, HostEvent

TRANSITIONS: dict[tuple[HostState, HostEvent], HostState] = {
    (S.EXPECTED, E.SEEN): S.RUNNING,
    (S.EXPECTED, E.MISSED): S.LOST,
    (S.RUNNING, E.MISSED): S.LOST,
    (S.RUNNING, E.DRAIN): S.DRAINING,
    (S.DRAINING, E.UNDRAIN): S.RUNNING,
    (S.DRAINING, E.MISSED): S.LOST,
    (S.LOST, E.SEEN): S.RUNNING,
}
_EXPECTED = "it has not been heard of since the controller began"
_LOST = "it is lost"
_STOPPING = "it is stopping"


@dataclass(slots=True)
class _Heard:
    """What this controller has heard of a host."""

    incarnation: str = ""  # of its host process
    running: frozenset[str] = frozenset()  # replicas that have a process there
    since: float = float("inf")  # when that was heard of first
    was_stable: bool = False  # when it was lost
    is_stopping: bool = False


def prepare(placement: Placement, records: Mapping[str, HostRecord], own: str) -> None:
    """Tell the placement of recorded hosts, before there are backends with replicas there."""
    for name, record in records.items():
        if name != own:
            placement.set_host(name, record.capacity, record.labels)
            placement.close_host(name, _EXPECTED)


class Hosts:
    """All hosts but the controller's own. ``now`` is always monotonic seconds."""

    def __init__(
        self,
        state: State,
        listeners: Listeners,
        records: Mapping[str, HostRecord],
        own: str,
        now: float,
    ) -> None:
        self._backends = state.backends
        self._placement = state.placement
        self._changes = state.changes
        self._agenda = state.agenda
        self._told_gone = state.host_gone
        self._listeners = listeners
        self._own = own
        self.records = {name: record for name, record in records.items() if name != own}
        self._own_record = records.get(own)
        self._keeps_own = False  # its record, whether it drains or not
        self._states = dict.fromkeys(self.records, S.EXPECTED)
        self._heard: defaultdict[str, _Heard] = defaultdict(_Heard)
        self.liveness = Liveness()
        for name in self.records:
            self.liveness.expect(name, now, EXPECTED_S)
            self._agenda.touch(HOST, "")
        if self._placement.is_gateway(own):
            self._empty(own, now)
        if self._is_drained(own):
            self._close(own)

    def state(self, name: str) -> HostState:
        """Return a host's state; the controller's own runs or drains."""
        if name == self._own:
            drains = self._is_drained(name) or self._heard[name].is_stopping
            return S.DRAINING if drains else S.RUNNING
        return self._states.get(name, S.LOST)

    def _is_drained(self, name: str) -> bool:
        """Return whether a host was asked to drain, and not to stop."""
        record = self._own_record if name == self._own else self.records.get(name)
        return record is not None and record.draining

    def note_own(self, record: HostRecord, now: float, *, keeps: bool) -> None:
        """Take the report of the controller's own host.

        With ``keeps`` it is recorded, for one that will lead from elsewhere.
        """
        self._keeps_own = keeps
        self._forget_other_names(record, now)
        self._put_own(replace(record, draining=self._is_drained(self._own)))

    def _put_own(self, record: HostRecord) -> None:
        if self._own_record != record:
            was_kept = self._keeps_own or self._is_drained(self._own)
            self._own_record = record
            if self._keeps_own or record.draining:
                self._changes.put(HOST, record.name, record)
            elif was_kept:
                self._changes.put(HOST, record.name, None)

    def suspect(self, name: str, now: float) -> None:
        """Wait less long for a host than for others: a new controller leads because of it."""
        if self._states.get(name) is S.EXPECTED:
            self.liveness.forget(name)
            self.liveness.expect(name, now, SUSPECT_S)

    # --- What is observed -----------------------------------------------------------------------

    def reported(
        self, record: HostRecord, running: Collection[str], now: float, incarnation: str = ""
    ) -> None:
        """Take a host's report of itself; the first one joins it.

        ``running`` are the replicas that have a process there; ``incarnation`` is that of its host
        process. ConflictError when another host that is not lost has its name; one of the same
        address is gone.
        """
        name = record.name
        present = self.records.get(name)
        self._check_name(record, present)
        self._forget_other_names(record, now)
        if present is not None and present.id == record.id:
            record = replace(record, draining=present.draining)
        if present != record:
            if present is not None and present.id != record.id:
                self.forget(name, now)  # a new one, in place of one that was lost
            self.records[name] = record
            self._changes.put(HOST, name, record)
            self._placement.set_host(name, record.capacity, record.labels)
            if not record.capacity:
                self._empty(name, now)
        heard = self._heard[name]
        heard.running = frozenset(running)
        is_started_anew = heard.incarnation != incarnation
        if is_started_anew:
            heard.incarnation, heard.since = incarnation, now
        if name not in self._states:
            self._states[name] = S.EXPECTED
            self._placement.close_host(name, _EXPECTED)
            self.liveness.expect(name, now)
            self._agenda.touch(HOST, "")
        elif is_started_anew and heard.was_stable:  # it is not a link that comes and goes
            self.liveness.forget(name)
            self.liveness.expect(name, now)
            self._seen(name, now)
        if self._states[name] is S.EXPECTED:
            self._seen(name, now)

    def _forget_other_names(self, record: HostRecord, now: float) -> None:
        """Forget the same host by another name."""
        for other in [*self.records.values()]:
            if other.id == record.id and other.name != record.name:
                self.forget(other.name, now)

    def _check_name(self, record: HostRecord, present: HostRecord | None) -> None:
        is_another = present is not None and (
            present.id != record.id and present.address != record.address
        )
        if record.name == self._own or (is_another and self.state(record.name) is not S.LOST):
            at = "the controller is on" if present is None else f"is at {present.address}"
            raise ConflictError(
                f"host name {record.name!r} is taken by the host that {at}; give this one "
                "another with --host-name"
            )

    def beat(self, name: str, now: float) -> None:
        """Take note that a host lives and can be reached."""
        self.liveness.heard(name, now)

    def gone(self, name: str, now: float) -> None:
        """Take note that nothing of a host's system runs any more: it need not be waited for."""
        if name in self._states and self.liveness.give_up(name):
            self._missed(name, now)

    def look(self, now: float) -> None:
        """Judge all hosts by their beats."""
        lost, back = self.liveness.look(now)
        for name in lost:
            self._missed(name, now)
        for name in back:
            self._seen(name, now)
        if self._states:
            self._agenda.at(HOST, "", now + LOOK_S)

    def _seen(self, name: str, now: float) -> None:
        was_lost, heard = self._states[name] is S.LOST, self._heard[name]
        heard.was_stable = heard.is_stopping = False
        self._states[name] = TRANSITIONS[self._states[name], E.SEEN]
        self._placement.open_host(name)
        for backend in self._at(name) if was_lost else ():
            backend.host_back(name, heard.running, now)
        if self._is_drained(name):
            self._close(name)

    def _missed(self, name: str, now: float) -> None:
        self._states[name] = TRANSITIONS[self._states[name], E.MISSED]
        self._heard[name].was_stable = now - self._heard[name].since >= STABLE_S
        self._placement.close_host(name, _LOST)
        self._listeners.host_gone(name)
        for tag, backend in self._backends.items():
            if backend.retries.host_lost(name, now) or backend.is_at(name):
                backend.host_lost(name, now)
                self._agenda.touch(BACKEND, tag)

    # --- What is asked for ----------------------------------------------------------------------

    def drain(self, name: str, *, force: bool = False) -> None:
        """Replace elsewhere what is on a host, as far as there is room, until :meth:`undrain`.

        UnknownNameError; ConflictError for the last host that takes replicas, unless with
        ``force``. May be repeated.
        """
        if self._known(name).draining:
            return
        if not force and self._placement.is_open(name) and not self.can_take_over(name):
            raise ConflictError(
                f"host {name!r} is the last that takes replicas: those on it would stay, and what "
                "is deployed next would wait. Start or undrain another host first, or give force"
            )
        self._set_draining(name, True)
        self._close(name)

    def undrain(self, name: str) -> None:
        """Take a :meth:`drain` back; may be repeated. UnknownNameError, ConflictError.

        Replicas that have moved stay where they are.
        """
        is_draining = self._known(name).draining
        if self._heard[name].is_stopping:
            raise ConflictError(f"host {name!r} is stopping; start it again when it has stopped")
        if not is_draining:
            return
        self._set_draining(name, False)
        if name != self._own:
            if self._states[name] is not S.DRAINING:
                return  # it takes replicas when it is seen
            self._states[name] = TRANSITIONS[S.DRAINING, E.UNDRAIN]
        self._placement.open_host(name)
        for backend in self._at(name):
            backend.stay_at(name)

    def _known(self, name: str) -> HostRecord:
        record = self._own_record if name == self._own else self.records.get(name)
        if record is not None:
            return record
        if name == self._own:
            raise ConflictError(f"host {name!r} has not reported yet; ask again in a second")
        names = sorted({self._own, *self.records})
        raise UnknownNameError(
            f"no host is named {name!r}; there are: {', '.join(names)}{suggestion(name, names)}"
        )

    def _set_draining(self, name: str, draining: bool) -> None:
        record = replace(self._known(name), draining=draining)
        if name == self._own:
            self._put_own(record)
        else:
            self.records[name] = record
            self._changes.put(HOST, name, record)

    def stop(self, name: str) -> None:
        """Replace elsewhere what is on a host that is to stop; harmless for one that has left."""
        if name == self._own or name in self._states:
            self._heard[name].is_stopping = True
            self._close(name)

    def leave(self, name: str, now: float) -> None:
        """Have what is left on a host stop, finishing what it has, replaced or not."""
        self.stop(name)
        self._empty(name, now)

    def _close(self, name: str) -> None:
        """Place nothing on a host that drains, and replace elsewhere what is there."""
        if self._states.get(name) is S.RUNNING:
            self._states[name] = TRANSITIONS[S.RUNNING, E.DRAIN]
        if self.state(name) is S.DRAINING:
            is_stopping = self._heard[name].is_stopping
            until = f"it is drained, until `greenroom undrain {name}`"
            self._placement.close_host(name, _STOPPING if is_stopping else until)
        for backend in self._at(name):
            backend.move_from(name)

    def _empty(self, name: str, now: float) -> None:
        """Have what is on a host stop."""
        for backend in self._at(name):
            backend.retire_from(name, now)

    def _at(self, name: str) -> Iterator[Backend]:
        """Yield the backends with replicas on a host, which are looked at in the next step."""
        for tag, backend in self._backends.items():
            if backend.is_at(name):
                self._agenda.touch(BACKEND, tag)
                yield backend

    def rebalance(self, now: float) -> int:
        """Have replicas moved to where there are fewer of their backend, or fewer in all."""
        moved, held = 0, self._placement.held()
        for tag, backend in self._backends.items():
            moves = backend.rebalance(held, now)
            if moves:
                moved += moves
                self._agenda.touch(BACKEND, tag)
        return moved

    def is_empty(self, name: str) -> bool:
        """Return whether no replica is on a host any more."""
        return not any(backend.is_at(name) for backend in self._backends.values())

    def can_take_over(self, name: str) -> bool:
        """Return whether there is any other host on which replicas may be placed."""
        names = {self._own, *self._states} - {name}
        return any(self._placement.is_open(each) for each in names)

    def evict(self, name: str, now: float) -> None:
        """Forget a host that is lost and does not come back; UnknownNameError, ConflictError."""
        if name == self._own:
            raise ConflictError(f"host {name!r} is RUNNING, and leads; stop it first")
        self._known(name)
        if self.state(name) is not S.LOST:
            raise ConflictError(f"host {name!r} is {self.state(name).value}; stop it first")
        self.forget(name, now)

    def forget(self, name: str, now: float) -> None:
        """Forget a host, and what was on it; harmless when it is forgotten."""
        if name not in self._states:
            return
        for backend in self._at(name):
            backend.host_gone(name, now)
        del self._states[name], self.records[name]
        self._heard.pop(name, None)
        self.liveness.forget(name)
        self._listeners.host_gone(name)
        self._placement.drop_host(name)
        self._changes.put(HOST, name, None)
        self._told_gone(name)
