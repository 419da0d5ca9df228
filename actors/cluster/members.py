"""The controller's end of the cluster's hosts: their reports, and what is asked of them.

core/cluster/hosts.py decides which hosts count. The controller asks another host's admin for a
replica's actor by name, so that asking again yields the same process. To kill a replica there, it
asks the host process, because a pid means nothing on another host.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from greenroom.actors.cluster.heartbeats import HostWatch
from greenroom.actors.cluster.key_rotation import KeyRotation
from greenroom.actors.messages import control as cm
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.cluster import status
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import may_lead
from greenroom.core.cluster.leader_lease import Lease
from greenroom.core.effects import StopReplica
from greenroom.core.errors import ConflictError

logger = logging.getLogger(__name__)

REPLICA = "greenroom.actors.replica.actor.Replica"  # for any release's admin
END_DESCRIBED_WITHIN_S = 0.5
ORPHAN_DRAIN_S = 20.0  # what is left of a replica that was replaced may finish


class Members:
    """All hosts, the controller's own among them; on the controller's loop."""

    def __init__(
        self,
        loop: Loop,
        cluster: Cluster,
        settings: HostSettings,
        process: Process,
        changed: Callback,
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch  # that orders carry: 0 where no other host could lead
        self._loop = loop
        self._cluster = cluster
        self._hosts = cluster.hosts
        self._settings = settings
        self._process = process
        self._port: Port | None = None  # to ask admins and host processes; made at first need
        self.keys = KeyRotation(loop, cluster.hosts, settings, epoch)
        self.processes = HostWatch(loop, cluster.hosts, process, changed)
        cluster.state.gone.host.append(self.processes.forget)

    def close(self) -> None:
        """Stop listening to hosts."""
        self.processes.close()
        if self._port is not None:
            self._port.detach()

    # --- What hosts report ----------------------------------------------------------------------

    def reported(self, message: cm.HostReported, sender: Address) -> bool:
        """Take a host's report; return whether what status shows has changed."""
        name, now = message.host, time.monotonic()
        host = self._hosts.all.get(name)
        before = None if host is None else host.said
        try:
            if self.is_here(name) and message.address == self._settings.own_address:
                keeps = bool(self.epoch)  # for who may lead after it
                self._hosts.own_reported(message, sender, now, keeps=keeps)
            else:
                self._hosts.reported(message, sender, now)
        except ConflictError as error:
            self._answer(sender, str(error))
            return False
        ended = lambda: self._hosts.process_ended(name, message.process)  # noqa: E731
        self.processes.watch(message.process, name, message.address, sender, ended)
        self._answer(sender, hosts=self.addresses(message))
        self._stop_orphans(message)
        self.keys.reported(name)
        return before is None or before.report != message.report

    def _answer(self, sender: Address, refusal: str = "", hosts: tuple[str, ...] = ()) -> None:
        drain_s = self._cluster.state.longest_drain_s()
        answer = cm.HostAnswered(refusal=refusal, epoch=self.epoch, hosts=hosts, drain_s=drain_s)
        self._loop.send(sender, answer)

    def addresses(self, told: cm.HostReported | None = None) -> tuple[str, ...]:
        """Return where all hosts are: the controller's own, those that may lead, the others.

        A host that is ``told`` so, and may not lead, needs none of the last.
        """
        records = self._hosts.records
        names = [*may_lead(self._hosts), *(records if told is None or told.may_lead else ())]
        others = dict.fromkeys(records[name].address for name in names)
        return (self._settings.own_address, *others)

    def _stop_orphans(self, message: cm.HostReported) -> None:
        """Tell replicas to go that the cluster does not know: they were replaced as lost.

        This host may have been the lost one, to an earlier leader.
        """
        if self.is_here(message.host) and not self.epoch:
            return
        for tag, address in message.replicas:
            if address and self._cluster.backend_of(tag) is None:
                logger.info("telling replica %s on host %s to go", tag, message.host)
                stop = StopReplica(replica=tag, drain_s=ORPHAN_DRAIN_S, epoch=self.epoch)
                self._loop.send(self._loop.machine.address_of(address), stop)

    def shown(self) -> list[dict[str, Any]]:
        """Return all hosts for status, without pids of the dead of this one."""
        hosts = status.hosts(self._cluster)
        return [_living(each) if self.is_here(each["name"]) else each for each in hosts]

    # --- What is asked of hosts -----------------------------------------------------------------

    def succeed(self, former: Lease) -> None:
        """Forget the former leader's host if it left, else suspect it."""
        succeed = self._hosts.forget if former.leaves else self._hosts.suspect
        succeed(former.holder, time.monotonic())

    def stop_all(self) -> None:
        """Tell every host to stop and delete its state, the controller's own last."""
        for host in sorted(self._hosts.all.values(), key=lambda host: host is self._hosts.own):
            if host.said is not None:
                self._loop.send(host.at, cm.StopHost(forget=True, epoch=self.epoch))

    def is_here(self, host: str) -> bool:
        """Return whether this is the controller's own host."""
        return host == self._hosts.own.name

    async def locate(self, tag: str, host: str) -> Address | None:
        """Return a replica's actor on another host, made where there is none; None if it is not.

        Then the core asks again.
        """
        record = self._hosts.records.get(host)
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
        known = self._hosts.all.get(host)
        if known is not None and known.said is not None:
            self._loop.send(known.at, cm.KillReplica(process=process, epoch=self.epoch))

    async def cause_of_end(self, replica: str, address: Address, host: str) -> str:
        """Ask a host how a replica's process ended there; return "" where it does not say."""
        known = self._hosts.all.get(host)
        if known is None or known.said is None:
            return ""
        request = cm.DescribeEnd(request_id=secrets.token_hex(8), replica=replica, address=address)
        described = await self._questions().ask(known.at, request, END_DESCRIBED_WITHIN_S)
        return "" if described is None else str(described.cause)


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
