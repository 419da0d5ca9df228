"""The hosts of a cluster: joined, lost, back, emptied, gone.

    expected --seen--> running <--> draining
       |                ^  |           |
       `--missed-----> lost <--missed--'

A host is *expected* when the controller knows it only from its record: a new controller has not
heard from it yet. A host drains because it is to stop, which ends with its process, or because it
was asked to, which its record says until that is taken back: so it drains again each time that it
is seen. A host is forgotten when it has left, with no replicas on it, or is evicted. The
controller's own host is not judged: it runs, or drains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from greenroom.core.cluster.host_report import HostReport
from greenroom.core.errors import ConflictError
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.health import host_gone
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.lifecycle.replicas import LIVE, Replica
from greenroom.core.lifecycle.state import State
from greenroom.core.records import BACKEND, HostRecord, Records
from greenroom.core.transitions import follow
from greenroom.core.validation import unknown_name

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
CHECK_S = 0.2  # how often to judge
PAUSE_S = 1.5  # between two checks: the judge itself was away, and not only late


class Beats:
    """The beats of one host. ``now`` is always monotonic seconds."""

    def __init__(self, now: float, patience_s: float = LOST_AFTER_S) -> None:
        """Begin with ``patience_s`` to hear of it before it is lost."""
        self.is_lost = False
        self._at = now + patience_s - LOST_AFTER_S
        self._since = now  # the beginning of the present run of beats
        self._checked_at = now

    def heard(self, now: float) -> None:
        """Take a beat."""
        if now - self._at > GAP_S:
            self._since = now
        self._at = now

    def check(self, now: float) -> bool:
        """Return whether the host is lost, or back, since the last check."""
        away_s = now - self._checked_at
        self._checked_at = now
        if away_s > PAUSE_S:
            self._at = max(self._at, min(self._at + away_s, now))
        is_steady = now - self._at <= GAP_S and self._at - self._since >= STEADY_S
        was_lost = self.is_lost
        self.is_lost = not is_steady if was_lost else now - self._at > LOST_AFTER_S
        return self.is_lost is not was_lost

    def abandon(self) -> bool:
        """Count the host as lost at once; False when it is already."""
        was_lost, self.is_lost = self.is_lost, True
        self._at = self._since = float("-inf")
        return not was_lost


HOST = "host"
STABLE_S = 5.0  # a host that ran this long, and is started again, counts again at once
HOST_EXPECTED_S = 8.0  # within which a host has found a new controller, if it can be reached


class HostState(StrEnum):
    """Whether a host can be counted on."""

    EXPECTED = "EXPECTED"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    LOST = "LOST"


S = HostState

NEXT: dict[HostState, tuple[HostState, ...]] = {
    S.EXPECTED: (S.RUNNING, S.LOST),
    S.RUNNING: (S.DRAINING, S.LOST),
    S.DRAINING: (S.RUNNING, S.LOST),
    S.LOST: (S.RUNNING,),
}
_EXPECTED = "it has not been heard of since the controller began"
_LOST = "it is lost"
_STOPPING = "it is stopping"


@dataclass(slots=True, eq=False)
class Host:
    """One host: its record, and what this controller has heard of it."""

    name: str
    record: HostRecord | None  # the controller's own may not have reported yet
    beats: Beats
    state: HostState = S.EXPECTED
    said: HostReport | None = None  # the last report
    at: Any = None  # the address of the host process that has sent it
    has_process: bool = False  # which lives, as far as is known
    since: float = float("inf")  # when that was heard of first
    was_stable: bool = False  # when it was lost
    is_stopping: bool = False
    is_kept: bool = True  # its record, whether it drains or not

    @property
    def is_drained(self) -> bool:
        """Whether it was asked to drain, and not to stop."""
        return self.record is not None and self.record.draining

    @property
    def may_lead(self) -> bool:
        """Whether it shares the store from which hosts lead."""
        return self.said is not None and self.said.may_lead

    @property
    def report(self) -> Mapping[str, Any]:
        """What it says of itself for status."""
        return {} if self.said is None else self.said.report

    def hear(self, report: HostReport, at: Any) -> None:
        """Take a report of its host process, which is ``at``."""
        self.said, self.at, self.has_process = report, at, True

    def become(self, state: HostState) -> None:
        """Take a transition; raise IllegalTransitionError where the table has none."""
        self.state = follow(NEXT, self.state, state)


def prepare(placement: Placement, records: Mapping[str, HostRecord], own: str) -> None:
    """Tell the placement of recorded hosts, before there are backends with replicas there."""
    for name, record in records.items():
        if name != own:
            placement.set_host(name, record.capacity, record.labels)
            placement.close_host(name, _EXPECTED)


class Hosts:
    """All hosts. ``now`` is always monotonic seconds."""

    def __init__(
        self,
        state: State,
        records: Mapping[str, HostRecord],
        own: str,
        now: float,
    ) -> None:
        self._backends = state.backends
        self._placement = state.placement
        self._saved = Records(HOST, records, state.changes)
        self._agenda = state.agenda
        self._on_gone = state.gone.host
        self._long_poll = state.long_poll
        self.own = Host(own, records.get(own), Beats(now), S.RUNNING, is_kept=False)
        self.all = {own: self.own}  # by name
        self.has_seen = False  # any other host, since the controller began
        for name, record in records.items():
            if name != own:
                self.all[name] = Host(name, record, Beats(now, HOST_EXPECTED_S))
                self._agenda.touch(HOST, "")
        if self._placement.is_gateway(own):
            self._empty(own, now)
        if self.own.is_drained:
            self._close(self.own)

    @property
    def records(self) -> dict[str, HostRecord]:
        """The records of all hosts but the controller's own, by name."""
        others = (each for each in self.all.values() if each is not self.own)
        return {each.name: each.record for each in others if each.record is not None}

    def state(self, name: str) -> HostState:
        """Return a host's state; the controller's own runs or drains."""
        return self.all[name].state if name in self.all else S.LOST

    def own_reported(self, report: HostReport, at: Any, now: float, *, keeps: bool) -> None:
        """Take the report of the controller's own host.

        With ``keeps`` it is recorded, for one that will lead from elsewhere.
        """
        self.own.is_kept = keeps
        self._forget_other_names(report, now)
        self.own.hear(report, at)
        self._put(self.own, _record_of(report, self.own.record))

    def _put(self, host: Host, record: HostRecord) -> None:
        host.record = record
        if not (host.is_kept or host.is_drained):
            self._saved.pop(host.name, None)
        elif self._saved.get(host.name) != record:
            self._saved[host.name] = record

    def suspect(self, name: str, now: float) -> None:
        """Wait no longer for a host than for one that ran: a new controller leads because of it."""
        if self.state(name) is S.EXPECTED:
            self.all[name].beats = Beats(now)

    # --- What is observed -----------------------------------------------------------------------

    def reported(self, report: HostReport, at: Any, now: float) -> None:
        """Take the report of another host's process, which is ``at``; the first one joins it.

        ConflictError when another host that is not lost has its name; one of the same address is
        gone.
        """
        name = report.host
        self._check_name(report)
        self._forget_other_names(report, now)
        if (present := self.records.get(name)) is not None and present.id != report.id:
            self.forget(name, now)  # a new one, in place of one that was lost
            present = None
        record = _record_of(report, present)
        if present != record:
            self._placement.set_host(name, record.capacity, record.labels)
        if name not in self.all:
            self.all[name] = Host(name, None, Beats(now))
            self._placement.close_host(name, _EXPECTED)
            self._agenda.touch(HOST, "")
        host = self.all[name]
        is_new = host.said is None or host.said.process != report.process
        host.hear(report, at)
        self._put(host, record)
        if present != record and not record.capacity:
            self._empty(name, now)
        if is_new:
            host.since = now
            if host.was_stable:  # it is not a link that comes and goes
                host.beats = Beats(now)
                self._seen(host, now)
        if host.state is S.EXPECTED:
            self._seen(host, now)

    def process_ended(self, name: str, process: Any) -> None:
        """Record that the host process that reported last is gone; what it said is still shown."""
        host = self.all.get(name)
        if host is not None and host.said is not None and host.said.process == process:
            host.has_process = False

    def _forget_other_names(self, report: HostReport, now: float) -> None:
        """Forget the same host by another name."""
        for name, other in self.records.items():
            if other.id == report.id and name != report.host:
                self.forget(name, now)

    def _check_name(self, report: HostReport) -> None:
        present = self.records.get(report.host)
        is_another = present is not None and (
            present.id != report.id and present.address != report.address
        )
        if report.host == self.own.name or (is_another and self.state(report.host) is not S.LOST):
            at = "the controller is on" if present is None else f"is at {present.address}"
            raise ConflictError(
                f"host name {report.host!r} is taken by the host that {at}; give this one "
                "another with --host-name"
            )

    def beat(self, name: str, now: float) -> None:
        """Record that a host lives and can be reached."""
        if name in self.all:
            self.all[name].beats.heard(now)

    def gone(self, name: str, now: float) -> None:
        """Record that nothing of a host's system runs any more: it need not be waited for."""
        host = self.all.get(name, self.own)
        if host is not self.own and host.beats.abandon():
            self._missed(host, now)

    def reconcile(self, now: float) -> None:
        """Judge all hosts by their beats."""
        for host in self.all.values():
            if host is not self.own and host.beats.check(now):
                change = self._missed if host.beats.is_lost else self._seen
                change(host, now)
        if len(self.all) > 1:
            self._agenda.at(HOST, "", now + CHECK_S)

    def _seen(self, host: Host, now: float) -> None:
        was_lost = host.state is S.LOST
        host.was_stable = host.is_stopping = False
        host.become(S.RUNNING)
        self.has_seen = True
        self._placement.open_host(host.name)
        running = {} if host.said is None else dict(host.said.replicas)
        for _, replica in self._at(host.name) if was_lost else ():
            replica.host_back(now, is_running=replica.tag in running)
        if host.is_drained:
            self._close(host)

    def _missed(self, host: Host, now: float) -> None:
        name = host.name
        host.become(S.LOST)
        host.was_stable = now - host.since >= STABLE_S
        self._placement.close_host(name, _LOST)
        self._long_poll.host_gone(name)
        for tag, backend in self._backends.items():
            if backend.failures.host_gone(name, now):
                self._agenda.touch(BACKEND, tag)
        for backend, replica in self._at(name):
            host_gone(backend, replica, now)

    # --- What is asked for ----------------------------------------------------------------------

    def drain(self, name: str, *, force: bool = False) -> None:
        """Replace elsewhere what is on a host, as far as there is room, until :meth:`undrain`.

        UnknownNameError; ConflictError for the last host that takes replicas, unless with
        ``force``. May be repeated.
        """
        host, record = self._known(name)
        if record.draining:
            return
        placement = self._placement
        if not force and placement.is_open(name) and not placement.can_take_over(name):
            raise ConflictError(
                f"host {name!r} is the last that takes replicas: those on it would stay, and what "
                "is deployed next would wait. Start or undrain another host first, or give force"
            )
        self._put(host, replace(record, draining=True))
        self._close(host)

    def undrain(self, name: str) -> None:
        """Take a :meth:`drain` back; may be repeated. UnknownNameError, ConflictError.

        Replicas that have moved stay where they are.
        """
        host, record = self._known(name)
        if host.is_stopping:
            raise ConflictError(f"host {name!r} is stopping; start it again when it has stopped")
        if not record.draining:
            return
        self._put(host, replace(record, draining=False))
        if host.state is not S.DRAINING:
            return  # it takes replicas when it is seen
        host.become(S.RUNNING)
        self._placement.open_host(name)
        for _, replica in self._at(name):
            replica.moving = False

    def _known(self, name: str) -> tuple[Host, HostRecord]:
        host = self.all.get(name)
        if host is not None and host.record is not None:
            return host, host.record
        if host is not None:
            raise ConflictError(f"host {name!r} has not reported yet; ask again in a second")
        raise unknown_name("host", name, self.all)

    def stop(self, name: str, now: float, *, leaves: bool = False) -> None:
        """Replace elsewhere what is on a host that is to stop; harmless for one that has left.

        If it ``leaves``, what is left there stops, finishing what it has, replaced or not.
        """
        if name in self.all:
            self.all[name].is_stopping = True
            self._close(self.all[name])
        if leaves:
            self._empty(name, now)

    def _close(self, host: Host) -> None:
        """Place nothing on a host that drains, and replace elsewhere what is there."""
        if host.state is S.RUNNING:
            host.become(S.DRAINING)
        if host.state is S.DRAINING:
            until = f"it is drained, until `greenroom undrain {host.name}`"
            self._placement.close_host(host.name, _STOPPING if host.is_stopping else until)
        for _, replica in self._at(host.name):
            replica.moving = replica.state in LIVE

    def _empty(self, name: str, now: float) -> None:
        """Have what is on a host stop."""
        for _, replica in self._at(name):
            if replica.state in LIVE:
                replica.retire(now)

    def _at(self, name: str) -> Iterator[tuple[Backend, Replica]]:
        """Yield the replicas on a host; their backends are reconciled in the next step."""
        for tag, backend in self._backends.items():
            for replica in backend.replicas.values():
                if replica.host == name:
                    self._agenda.touch(BACKEND, tag)
                    yield backend, replica

    def is_empty(self, name: str) -> bool:
        """Return whether no replica is on a host any more."""
        backends = self._backends.values()
        return not any(each.host == name for b in backends for each in b.replicas.values())

    def evict(self, name: str, now: float) -> None:
        """Forget a host that is lost and does not come back; UnknownNameError, ConflictError."""
        if name == self.own.name:
            raise ConflictError(f"host {name!r} is RUNNING, and leads; stop it first")
        host, _ = self._known(name)
        if host.state is not S.LOST:
            raise ConflictError(f"host {name!r} is {host.state.value}; stop it first")
        self.forget(name, now)

    def forget(self, name: str, now: float) -> None:
        """Forget a host, and what was on it; harmless when it is forgotten."""
        if name not in self.records:
            return
        for backend, replica in self._at(name):
            host_gone(backend, replica, now)
            replica.host_back(now, is_running=False)
        del self.all[name]
        self._long_poll.host_gone(name)
        self._placement.drop_host(name)
        self._saved.pop(name, None)
        self._on_gone(name)


def _record_of(report: HostReport, present: HostRecord | None) -> HostRecord:
    return HostRecord(
        name=report.host,
        id=report.id,
        address=report.address,
        capacity=report.capacity,
        labels=report.labels,
        draining=present is not None and present.draining,
    )


# --- Who may lead ---------------------------------------------------------------------------------


def may_lead(hosts: Hosts) -> list[str]:
    """Return the names of the others that may lead, of those that are lost last: may be back."""
    names = (name for name in hosts.records if hosts.all[name].may_lead)
    return sorted(names, key=lambda name: hosts.state(name) is S.LOST)


def heir(hosts: Hosts) -> str:
    """Return the first other host of those that may lead that can; "" when none can."""
    return next((name for name in may_lead(hosts) if hosts.state(name) is S.RUNNING), "")


def away(hosts: Hosts) -> str:
    """Return a host to lead instead where none of several others is heard any more; else "".

    It is the next one by name. One that never heard another, since it leads, leads on: it may have
    the lease of one that is as alone, or the others may be dead.
    """
    others, able = hosts.records, may_lead(hosts)
    if not hosts.has_seen or len(others) < 2 or {*map(hosts.state, others)} != {S.LOST}:
        return ""
    return min(others, key=lambda name: (name not in able, name < hosts.own.name, name))
