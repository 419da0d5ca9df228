"""The controller's end of the cluster's hosts: their reports, beats and processes.

core/cluster/hosts.py decides which hosts count. The controller asks another host's admin for a
replica's actor by name, so that asking again yields the same process. To kill a replica there, it
asks the host process, because a pid means nothing on another host.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from greenroom.actors.cluster.heartbeats import Heard, answer
from greenroom.actors.cluster.key_rotation import KeyRotation
from greenroom.actors.messages import control as cm
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.draining import DEFAULT_S
from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core import formats
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import HostState
from greenroom.core.cluster.leader_lease import Lease
from greenroom.core.effects import StopReplica
from greenroom.core.errors import ConflictError
from greenroom.core.operations import DrainHost
from greenroom.core.records import HostRecord

logger = logging.getLogger(__name__)

REPLICA = "greenroom.actors.replica.actor.Replica"
END_DESCRIBED_WITHIN_S = 0.5
ORPHAN_DRAIN_S = 20.0  # what is left of a replica that was replaced may finish


@dataclass(slots=True)
class _Host:
    """What a host has reported of itself."""

    report: dict[str, Any]  # what status shows
    process: Process  # its host process
    at: Address  # of that process
    leads_from: str = ""  # its address, where it may lead


@dataclass(slots=True)
class _Watched:
    """A process of a host whose end is watched for."""

    host: str
    unwatch: Callback
    beats: Heard | None = None  # where they count as the host's


class Members:
    """All hosts, the controller's own among them; on the controller's loop."""

    def __init__(
        self,
        loop: Loop,
        cluster: Cluster,
        settings: HostSettings,
        process: Process,
        changed: Callable[[], None],
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch  # that orders carry: 0 where no other host could lead
        self._loop = loop
        self._cluster = cluster
        self._settings = settings
        self._own = settings.host_name
        self._process = process
        self._changed = changed
        self._hosts: dict[str, _Host] = {}  # by name, the controller's own among them
        self._watched: dict[str, _Watched] = {}  # by incarnation: host processes and proxies
        self._port: Port | None = None  # to ask admins and host processes; made at first need
        self._has_heard = False  # of any other host
        self.keys = KeyRotation(loop, cluster, settings)
        loop.answer_beats(self._answer_beat)
        cluster.state.gone.host.append(self._forget)

    def close(self) -> None:
        """Stop listening to hosts."""
        self._loop.answer_beats(lambda _beat: b"")
        if self._port is not None:
            self._port.detach()

    # --- What hosts report ----------------------------------------------------------------------

    def reported(self, message: cm.HostReported, sender: Address) -> bool:
        """Take a host's report; return whether what status shows has changed."""
        name = message.host
        record = HostRecord(
            name=name,
            id=message.id,
            address=message.address,
            capacity=message.capacity,
            labels=message.labels,
        )
        if name == self._own and not self._is_of_another_host(message):
            keeps = bool(self.epoch)  # for who may lead after it
            self._cluster.hosts.record_own(record, time.monotonic(), keeps=keeps)
        else:
            running = [tag for tag, _ in message.replicas]
            try:
                incarnation = message.process.incarnation
                self._cluster.hosts.reported(record, running, time.monotonic(), incarnation)
            except ConflictError as error:
                self._answer(sender, str(error))
                return False
        before = self._hosts.get(name)
        leads_from = message.address if message.may_lead and name != self._own else ""
        self._hosts[name] = _Host(message.report, message.process, sender, leads_from)
        ended = lambda: self._host_process_ended(name, message.process)  # noqa: E731
        self.watch(message.process, name, message.address, sender, ended)
        self._answer(sender, hosts=self.addresses() if message.may_lead else self._may_lead())
        self._stop_orphans(message)
        self.keys.reported(name, message.keys, sender)
        return before is None or before.report != message.report

    def _answer(self, sender: Address, refusal: str = "", hosts: tuple[str, ...] = ()) -> None:
        answer = cm.HostAnswered(
            refusal=refusal, epoch=self.epoch, hosts=hosts, drain_s=self.longest_drain_s()
        )
        self._loop.send(sender, answer)

    def longest_drain_s(self) -> float:
        """Return the longest ``graceful_shutdown_timeout_s`` of all deployments; 20 without any.

        Any host's front may have calls at any replica.
        """
        configs = (backend.config for backend in self._cluster.state.backends.values())
        return max((each.graceful_shutdown_timeout_s for each in configs), default=DEFAULT_S)

    def addresses(self) -> tuple[str, ...]:
        """Return where all hosts are: the controller's own, those that may lead, the others."""
        may_lead = self._may_lead()
        others = [record.address for record in self._cluster.hosts.records.values()]
        others.sort(key=lambda address: address not in may_lead)
        return (self._settings.own_address, *others)

    def _may_lead(self) -> tuple[str, ...]:
        """Return where hosts may lead from, those that are lost last: they may be back."""
        state = self._cluster.hosts.state
        names = sorted(self._hosts, key=lambda name: state(name) is HostState.LOST)
        others = (self._hosts[name].leads_from for name in names)
        return (self._settings.own_address, *filter(None, others))

    def _is_of_another_host(self, message: cm.HostReported) -> bool:
        return message.address != self._settings.own_address

    def _host_process_ended(self, name: str, process: Process) -> None:
        """Go on showing what was last reported, but not the process that reported it."""
        host = self._hosts.get(name)
        if host is not None and host.process == process:
            host.report = {**host.report, "host_pid": None}
            self._changed()

    def _forget(self, name: str) -> None:
        """Forget a host that is no more on record, and what ran there."""
        self._hosts.pop(name, None)
        self.keys.forget(name)
        for incarnation, watched in list(self._watched.items()):
            if watched.host == name:
                watched.unwatch()
                del self._watched[incarnation]

    def _stop_orphans(self, message: cm.HostReported) -> None:
        """Tell replicas to go that the cluster does not know: they were replaced as lost.

        This host may have been the lost one, to an earlier leader.
        """
        if message.host == self._own and not self.epoch:
            return
        for tag, address in message.replicas:
            if address and self._cluster.backend_of(tag) is None:
                logger.info("telling replica %s on host %s to go", tag, message.host)
                stop = StopReplica(replica=tag, drain_s=ORPHAN_DRAIN_S, epoch=self.epoch)
                self._loop.send(self._loop.machine.address_of(address), stop)

    def watch(
        self, process: Process, host: str, at: str, sender: Address | None, on_end: Callback
    ) -> None:
        """Run ``on_end`` when a process of a host ends, and take its beats as the host's.

        Those count unless another host has that name, as ``at`` shows; "" is not known. With the
        last process that beats ends the host. One that cannot be reached is not gone: whether its
        host is lost is judged by its beats.
        """
        incarnation = process.incarnation
        if incarnation not in self._watched:

            def ended() -> None:
                self._ended(incarnation)
                on_end()

            self._watched[incarnation] = watched = _Watched(host, lambda: None)
            watched.unwatch = self._loop.watch_process(
                process, ended, sender, on_unreachable=lambda: None
            )
        watched = self._watched[incarnation]
        record = self._cluster.hosts.record(host)
        is_its = record is None or at in ("", record.address)
        if host != self._own and is_its and not watched.beats:
            watched.beats = Heard()

    def _ended(self, incarnation: str) -> None:
        watched = self._watched.pop(incarnation, None)
        if watched is None or watched.beats is None:
            return
        if not any(each.beats and each.host == watched.host for each in self._watched.values()):
            self._cluster.hosts.gone(watched.host, time.monotonic())
            self._changed()

    def _answer_beat(self, beat: bytes) -> bytes:
        def heard_of(incarnation: str) -> Heard | None:
            watched = self._watched.get(incarnation)
            return None if watched is None else watched.beats

        now = time.monotonic()
        answered, incarnation = answer(beat, self._process.incarnation, heard_of, now)
        if incarnation:
            host = self._watched[incarnation].host
            self._loop.guarded(self._cluster.hosts.beat, host, now)
        return answered

    # --- What is asked for ----------------------------------------------------------------------

    def drain(self, request: DrainHost) -> None:
        """Begin to empty a host."""
        hosts, name = self._cluster.hosts, request.host
        if request.leave or self._is_stopping(name):  # it asks itself, which ends with its process
            hosts.stop(name, time.monotonic(), leaves=request.leave)
        else:
            hosts.drain(name, force=request.force)

    def _is_stopping(self, name: str) -> bool:
        report = self._report(name)
        return report.get("state") == HostState.DRAINING and report.get("host_pid") is not None

    def is_drained(self, request: DrainHost) -> bool:
        """Return whether nothing is left on a host, or no other host can take it.

        ConflictError when the drain was taken back.
        """
        hosts, name = self._cluster.hosts, request.host
        if hosts.state(name) is HostState.RUNNING:
            raise ConflictError(f"host {name!r} was told meanwhile to take replicas again")
        may_stay = not request.leave and not self._cluster.state.placement.can_take_over(name)
        if not (may_stay or hosts.is_empty(name)):
            return False
        if request.leave:
            hosts.forget(name, time.monotonic())
        return True

    def succeed(self, former: Lease) -> None:
        """Forget the former leader's host if it left, else suspect it."""
        if former.leaves:
            self._cluster.hosts.forget(former.holder, time.monotonic())
        else:
            self._cluster.hosts.suspect(former.holder, time.monotonic())

    def away(self) -> str:
        """Return a host to lead instead where none of several others is heard any more; else "".

        It is the next one by name. One that never heard another, since it leads, leads on: it may
        have the lease of one that is as alone, or the others may be dead.
        """
        hosts = self._cluster.hosts
        states = {hosts.state(name) for name in hosts.records}
        self._has_heard |= not states <= {HostState.EXPECTED, HostState.LOST}
        if len(hosts.records) < 2 or states != {HostState.LOST} or not self._has_heard:
            return ""
        may_lead = {name for name, host in self._hosts.items() if host.leads_from}
        return min(hosts.records, key=lambda name: (name not in may_lead, name < self._own, name))

    def heir(self) -> str:
        """Return the first other host of those that may lead that can; "" when none can."""
        hosts = self._cluster.hosts
        at = {
            record.address: name
            for name, record in hosts.records.items()
            if hosts.state(name) is HostState.RUNNING
        }
        may_lead = self._may_lead()
        return next((at[address] for address in may_lead if address in at), "")

    def stop_all(self) -> None:
        """Tell every host to stop and delete its state, the controller's own last."""
        for name in sorted(self._hosts, key=lambda name: name == self._own):
            self._loop.send(self._hosts[name].at, cm.StopHost(forget=True, epoch=self.epoch))

    def is_here(self, host: str) -> bool:
        """Return whether this is the controller's own host."""
        return host == self._own

    async def locate(self, tag: str, host: str) -> Address | None:
        """Return a replica's actor on another host, made where there is none; None if it is not.

        Then the core asks again.
        """
        record = self._cluster.hosts.record(host)
        if record is None:
            return None
        gate = self._loop.machine.address_of(record.address)
        return await self._questions().locate(REPLICA, f"replica {tag}", lambda: gate)

    def _questions(self) -> Port:
        if self._port is None:
            self._port = Port(
                self._settings.admin_port,
                self._process,
                self._loop.asyncio,
                on_error=self._loop.on_error,
                machine=self._loop.machine,
            )
        return self._port

    def kill(self, process: Process, host: str) -> None:
        """Tell another host to kill a replica's process."""
        known = self._hosts.get(host)
        if known is not None:
            self._loop.send(known.at, cm.KillReplica(process=process, epoch=self.epoch))

    async def cause_of_end(self, replica: str, address: Address, host: str) -> str:
        """Ask a host how a replica's process ended there; return "" where it does not say."""
        known = self._hosts.get(host)
        if known is None or self.format() < 2:
            return ""
        request = cm.DescribeEnd(request_id=secrets.token_hex(8), replica=replica, address=address)
        described = await self._questions().ask(known.at, request, END_DESCRIBED_WITHIN_S)
        return "" if described is None else str(described.cause)

    # --- Status ---------------------------------------------------------------------------------

    def format(self) -> int:
        """Return the lowest format of all hosts: what only a later one has must not be used yet.

        That of a host which has not reported yet counts as the oldest.
        """
        names = {self._own, *self._cluster.hosts.records}
        releases = (self._report(name).get("release", "") for name in names)
        return max(min(map(formats.named_in, releases)), formats.OLDEST)

    def shown(self) -> list[dict[str, Any]]:
        """Return all hosts for status, the controller's own first.

        Another one is RUNNING once it has reported, and its proxy, which gets what it lacks then,
        has called, too.
        """
        hosts, heard = self._cluster.hosts, self._cluster.state.long_poll.heard_hosts()
        names = [name for name in self._hosts if name == self._own]
        names += sorted({*self._hosts, *hosts.records} - {self._own})
        known = [name for name in names if name == self._own or name in hosts.records]
        return [self._shown(name, heard) for name in known]

    def _report(self, name: str) -> dict[str, Any]:
        known = self._hosts.get(name)
        return {} if known is None else known.report

    def _shown(self, name: str, heard: Collection[str]) -> dict[str, Any]:
        hosts = self._cluster.hosts
        record = hosts.record(name)
        known = {} if record is None else {"name": name, "address": record.address}
        report = self._report(name)
        shown = {**known, **report}
        if name == self._own:
            shown = _living(shown)
        state = hosts.state(name)
        if state is HostState.RUNNING and not (report and name in {self._own, *heard}):
            state = HostState.EXPECTED  # its front has the routes of before, or none
        if state is not HostState.RUNNING:
            shown["state"] = state.value
        labels = self._settings.labels if record is None else record.labels
        return {
            **shown,
            "labels": dict(labels),
            "resources": self._cluster.state.placement.shown(name),
        }


def _living(shown: dict[str, Any]) -> dict[str, Any]:
    """Return what is shown of this host without pids of the dead: a report may be of before."""

    def lives(pid: int | None) -> int | None:
        return pid if pid is not None and identify(pid) is not None else None

    for name in ("admin_pid", "host_pid"):
        if name in shown:
            shown = {**shown, name: lives(shown[name])}
    proxy, front = shown.get("proxy"), shown.get("front")
    if proxy and lives(proxy["pid"]) is None:
        shown = {**shown, "proxy": {**proxy, "pid": None, "state": "STARTING"}}
    if front:
        workers = [pid for pid in front["workers"] if lives(pid) is not None]
        shown = {**shown, "front": {**front, "pid": lives(front["pid"]), "workers": workers}}
    return shown
