"""The controller at work, which has the store: it decides, saves, and only then acts and answers.

Theory of operation. Each turn: take messages in, advance, save, and only then send anything. Each
message leads to a turn, and so does whatever else was observed. A
request is answered after its checkpoint is durable, so a controller that dies before that has done
nothing visible. If the store turns out to be a different one than before, this controller ends and
leaves its place to a :class:`~greenroom.actors.controller.read_only.ReadOnlyController`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from thespian.actors import ChildActorExited

from greenroom.actors.cluster.members import Members
from greenroom.actors.controller.held_store import HeldStore, NotSavedError
from greenroom.actors.controller.policies import Policies
from greenroom.actors.controller.requests import Requests
from greenroom.actors.controller.status_file import StatusFile
from greenroom.actors.controller.supervisor import Supervisor
from greenroom.actors.messages import admin as am, control as cm, queries as m
from greenroom.actors.runtime.capacity import capacity_of
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core import effects as fx, operations as ops
from greenroom.core.cluster import status
from greenroom.core.cluster.admin import PENDING, Later
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import away, heir
from greenroom.core.cluster.leader_lease import RENEW_S
from greenroom.core.errors import last_line
from greenroom.core.lifecycle.placement import Placement
from greenroom.core.records import Changes
from greenroom.persistence.kv import StaleWriterError

logger = logging.getLogger(__name__)

STOPPING_S = 0.5  # between two checks of what is left, beside those at each end of a replica
_OF_LISTENERS = (cm.LoadReported, cm.ReplicaEjected)
_ROUTINE = (fx.CheckReplica, fx.AskPolicy)  # effects that are of no interest outside


class ActiveController:
    """Owns the cluster's state, and everything that acts on it; on the loop's thread.

    ``find`` returns the address of a replica on this host by its tag.
    """

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        process: m.Process,
        records: RunRecords,
        store: HeldStore,
        *,
        find: Callable[[str], m.Address],
    ) -> None:
        """Recover: load every record, and ask every recorded replica."""
        self._loop = loop
        self._process = process
        self._store = store
        self.epoch = store.epoch if store.lease is not None else 0  # 0: no other host may lead
        own = settings.host_name
        placement = Placement()
        placement.set_host(own, capacity_of(settings), settings.labels)
        recorded, lost, now = store.load(), store.checkpoints.lost, time.monotonic()
        cluster = Cluster(recorded, store.epoch, now, placement, own_host=own, lost=lost)
        self.cluster = cluster
        self._members = Members(loop, cluster, settings, process, self._changed, epoch=self.epoch)
        self._supervisor = Supervisor(
            loop,
            cluster,
            store.checkpoints,
            records,
            members=self._members,
            find=find,
            changed=self._changed,
        )
        self._policies = Policies(loop, self.cluster, settings, records, self._changed)
        self._requests = Requests(
            self.cluster,
            {
                ops.GetStatus: lambda _asked, _id: self._status(),
                ops.ListHosts: lambda _asked, _id: self._members.addresses(),
                ops.RotateKey: self._rotate_key,
                ops.StopCluster: self._stop_cluster,
            },
        )
        self._status_file = StatusFile(loop, settings.status_file, self._status)
        self._handlers: dict[type, Callable[[Any, m.Address], object]] = {
            am.Request: self._requests.take,
            cm.Superseded: lambda message, _: store.superseded(message),
            cm.HostReported: self._host_reported,
            cm.DescribeEnd: self._supervisor.describe_end,
            cm.Listen: self._listen,
            cm.LoadReported: lambda each, _: cluster.loads.report(
                each.proxy.incarnation, each.load, time.monotonic()
            ),
            cm.ReplicaEjected: lambda each, _: cluster.replica_ejected(
                each.replica, each.proxy.incarnation, each.times
            ),
            cm.TalliesReported: lambda each, _: cluster.tallied(
                each.proxy.incarnation, each.tallies
            ),
            cm.TrafficReported: lambda each, _: cluster.series.reported(each.traffic, time.time()),
            cm.ComparisonsReported: lambda each, _: cluster.compared(
                each.process.incarnation, each.found
            ),
            cm.ReplicaReported: self._supervisor.reported,
            cm.FetchFolder: self._supervisor.fetch,
            cm.ReplicaLost: lambda message, _: self._supervisor.replica_gone(message),
            ChildActorExited: lambda message, _: self._supervisor.child_exited(
                message.childAddress
            ),
        }
        self._wake: Timer | None = None
        self._turning = False
        self._stopping = False
        self._has_ended = False

        if store.lease is not None:
            self._members.succeed(store.lease.former)
            store.lease.away = lambda: away(cluster.hosts)
        for expected in cluster.state.long_poll.expected():
            if self._members.is_here(expected.host):
                self._watch_proxy(m.Process(*expected.process), expected.host)
        logger.info("recovered %d backends, epoch %d", len(cluster.state.backends), store.epoch)
        self._changed()

    def take(self, message: Any, sender: m.Address) -> None:
        """Handle a message, unless another host's controller may lead by now: it is sent again."""
        if not self._store.may_act():
            return
        handler = self._handlers.get(type(message))
        if isinstance(message, _OF_LISTENERS) and not self.cluster.state.long_poll.is_heard(
            message.proxy.incarnation
        ):
            return  # it is dead by now
        if handler is None:
            logger.warning("the controller ignored an unknown message %s", type(message).__name__)
        else:
            handler(message, sender)
            self._changed()

    def close(self) -> None:
        """Leave the store to the next controller."""
        self._has_ended = True
        for each in (self._policies, self._members, self._status_file, self._store):
            each.close()

    # --- A turn that fails ----------------------------------------------------------------------

    def has_changed_nothing(self, message: Any) -> bool:
        """Return whether a message whose handling failed was a request that changed nothing."""
        if not isinstance(message, am.Request) or self.cluster.state.is_torn:
            return False
        return ops.OPERATIONS.get(message.operation, ops.Operation).is_of_records

    def owed(self, error: Exception) -> Iterable[Any]:
        """Return what to answer those whose requests are not saved; all others repeat them."""
        if not isinstance(error, NotSavedError):
            yield from self._requests.unfinished(error)
        elif not isinstance(error.error, StaleWriterError):  # else the newer controller answers
            self._store.close()
            yield from self._requests.not_saved(error.changes, error.error)

    # --- Requests -------------------------------------------------------------------------------

    def _rotate_key(self, _asked: ops.RotateKey, request_id: str) -> Later:
        keys = self._members.keys
        keys.begin(request_id)
        return Later(lambda: keys.rotated() or PENDING)

    def _stop_cluster(self, asked: ops.StopCluster, _request_id: str) -> Any:
        """Stop all replicas without a change of the hard state, which a next start brings back."""
        if asked.forget:
            self._members.stop_all()
            return True
        self._stopping = True
        self._supervisor.stop_all()
        return Later(lambda: PENDING if self._supervisor.any_alive() else self._ended())

    def _ended(self) -> bool:
        """Make another host lead, where one can: nothing is done from here any more."""
        lease, next_one = self._store.lease, heir(self.cluster.hosts)
        if lease is not None and next_one:
            lease.release(next_one, leaves=True)
        return True

    # --- Hosts ----------------------------------------------------------------------------------

    def _host_reported(self, message: cm.HostReported, sender: m.Address) -> None:
        if self._members.reported(message, sender):
            self._status_file.changed()

    def _status(self) -> dict[str, Any]:
        self.cluster.now = time.monotonic()
        return {
            "controller": {"pid": self._process.pid, "host": self.cluster.hosts.own.name},
            **self._store.shown(),
            **status.overview(self.cluster),
            "hosts": self._members.shown(),
        }

    # --- Proxies --------------------------------------------------------------------------------

    def _listen(self, message: cm.Listen, sender: m.Address) -> None:
        """Answer a proxy with what it lacks, or keep its call until there is an update."""
        # A host that was away while a cluster was begun anew is not to be believed. For an empty
        # store nothing speaks against it.
        is_believed = self._members.is_here(message.host) or self.cluster.state.is_empty
        if not self._store.has_given(message, is_believed=is_believed):
            return
        listener = message.listener
        self._watch_proxy(listener, message.host, sender, message.at)
        self.cluster.loads.expect(listener.incarnation, time.monotonic())
        plain = listener[:]  # records do without the class
        self.cluster.state.long_poll.listen(
            listener.incarnation, plain, message.seen, sender, message.host
        )

    def _watch_proxy(
        self, process: m.Process, host: str, sender: m.Address | None = None, at: str = ""
    ) -> None:
        """Have a proxy counted until it ends; one that cannot be reached goes with its host."""
        ended = lambda: self.cluster.state.long_poll.gone(process.incarnation)  # noqa: E731
        self._members.processes.watch(process, host, at, sender, ended)

    # --- The turn: advance, save, perform, answer -----------------------------------------------

    def _changed(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.at_turn_end(self._turn)

    def _turn(self) -> None:
        self._turning = False
        if self._has_ended:
            return
        if not self._store.may_act():
            self._loop.call_later(RENEW_S, self._changed)
            return
        self._advance()
        self._arm()

    def _advance(self) -> None:
        effects = [] if self._stopping else self.cluster.advance(time.monotonic(), time.time())
        changes = self.cluster.take_changes()
        if changes:
            self._store.save(changes)
            log_changes(changes)
            if self.cluster.found_lost(self._store.checkpoints.lost):
                self._changed()
        self._requests.saved()
        for effect in effects:
            if isinstance(effect, fx.AskPolicy):
                self._policies.ask(effect)
            else:
                self._supervisor.perform(effect)
        self._policies.tidy()
        for tag, decision in self.cluster.autoscaler.take_log():
            logger.info("autoscaling %s: %s", tag, decision)
        owed = self.cluster.state.long_poll.take_updates()
        if changes or owed or any(not isinstance(e, _ROUTINE) for e in effects):
            self._status_file.changed()
        for proxy, update in owed:
            changed = cm.Changed(
                controller=self._process,
                epoch=self._members.epoch,
                store=self._store.id,
                **update._asdict(),
            )
            self._loop.send(proxy, changed)
        for sender, reply in self._requests.take_answers():
            self._loop.send(sender, reply)

    def _arm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        if self._stopping:
            self._wake = self._loop.call_later(STOPPING_S, self._changed)
        elif (due_at := self.cluster.next_due_at()) is not None:
            delay_s = max(due_at - time.monotonic(), 0.0)
            self._wake = self._loop.call_later(delay_s, self._changed)


def log_changes(changes: Changes) -> None:
    """Log the request, its user, and how it ended."""
    for (kind, name), record in changes.puts.items():
        if kind == "history":
            where = f" at {record.address}" if record.address else ""
            who = f"{record.user or 'a user'}{where}"
            logger.info("change %d by %s: %s", record.id, who, record.what)
        elif kind == "goal" and record.state != "pending":
            text = f"goal {name} ({record.what} {record.subject[1]!r}) {record.state}"
            reason = last_line(record.error)
            logger.log(
                logging.ERROR if reason else logging.INFO,
                "%s",
                f"{text}: {reason}" if reason else text,
            )
