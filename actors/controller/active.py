"""The controller at work, which has the store: it decides, saves, and only then acts and answers.

Theory of operation. Each turn: take messages in, advance, save, and only then send anything. A
request is answered after its checkpoint is durable, so a controller that dies before that has done
nothing visible. If the store turns out to be a different one than before, this controller ends and
leaves its place to a :class:`~greenroom.actors.controller.read_only.ReadOnlyController`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from thespian.actors import ChildActorExited

from greenroom.actors.cluster.leader_lease import LeaderLease
from greenroom.actors.cluster.members import Members
from greenroom.actors.controller.policies import Policies
from greenroom.actors.controller.read_only import STORE_PATIENCE_S, saving
from greenroom.actors.controller.requests import Requests
from greenroom.actors.controller.status_file import StatusFile
from greenroom.actors.controller.supervisor import Supervisor
from greenroom.actors.messages import admin as am, control as cm, queries as m
from greenroom.actors.runtime.capacity import capacity_of
from greenroom.actors.runtime.liveness import Pulse
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
from greenroom.core.lifecycle.state import KINDS, SOFT
from greenroom.core.long_poll import epoch_of
from greenroom.core.records import Changes
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import (
    Claim,
    LeasedStore,
    OtherStoreError,
    StaleWriterError,
    StoreError,
)
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

STOPPING_S = 0.5  # between two checks of what is left, beside those at each end of a replica
_ROUTINE = (fx.CheckReplica, fx.AskPolicy)  # effects that are of no interest outside


class ActiveController:
    """Owns the cluster's state, and everything that acts on it; on the loop's thread.

    ``find`` returns the address of a replica on this host by its tag. ``wait_for_store`` is called
    with what is wrong with the store, and with what raises a StoreError until it is right again.
    """

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        process: m.Process,
        records: RunRecords,
        pulse: Pulse,
        store: LeasedStore,
        lease: LeaderLease | None,
        *,
        find: Callable[[str], m.Address],
        wait_for_store: Callable[[StoreError, Callable[[], object]], None],
    ) -> None:
        """Recover: load every record, and ask every recorded replica."""
        self._loop = loop
        self._settings = settings
        self._process = process
        self._records = records
        self._pulse = pulse
        self._store = store
        self._lease = lease
        self._wait_for_store = wait_for_store
        self._shown = {"pid": process.pid, "host": settings.host_name}
        self._checkpoints = Checkpoints(store)
        self.cluster = self._load()
        self.epoch = store.epoch if lease is not None else 0  # 0 where no other host may lead
        self._members = Members(
            loop,
            self.cluster,
            settings,
            process,
            self._changed,
            epoch=self.epoch,
        )
        self._supervisor = Supervisor(
            loop,
            self.cluster,
            self._checkpoints,
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
        self._handlers: dict[type, Callable[[Any, m.Address], None]] = {
            am.Request: self._request,
            cm.Superseded: self._superseded,
            cm.HostReported: self._host_reported,
            cm.DescribeEnd: self._supervisor.describe_end,
            cm.Listen: self._listen,
            cm.LoadReported: self._load_reported,
            cm.ReplicaEjected: self._replica_ejected,
            cm.TalliesReported: self._tallies_reported,
            cm.TrafficReported: self._traffic_reported,
            cm.ComparisonsReported: self._comparisons_reported,
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

        if lease is not None:
            self._members.succeed(lease.former)
            lease.away = lambda: away(self.cluster.hosts)
        for expected in self.cluster.state.long_poll.expected():
            if self._members.is_here(expected.host):
                self._watch_proxy(m.Process(*expected.process), expected.host)
        logger.info(
            "recovered %d backends, epoch %d", len(self.cluster.state.backends), store.epoch
        )
        self._changed()

    def _load(self) -> Cluster:
        records = {kind: self._checkpoints.load(kind) for kind in KINDS}
        for kind, name in self._checkpoints.lost:
            if kind in SOFT:
                self._checkpoints.discard(kind, name)
        own_host = self._settings.host_name
        placement = Placement()
        placement.set_host(own_host, capacity_of(self._settings), self._settings.labels)
        return Cluster(
            records,
            self._store.epoch,
            time.monotonic(),
            placement,
            own_host=own_host,
            lost=self._checkpoints.lost,
        )

    def take(self, message: Any, sender: m.Address) -> None:
        """Handle a message, unless another host's controller may lead by now: it is sent again."""
        if not self._may_act():
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.warning("the controller ignored an unknown message %s", type(message).__name__)
        else:
            handler(message, sender)

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
        if not isinstance(error, _NotSavedError):
            yield from self._requests.unfinished(error)
        elif not isinstance(error.error, StaleWriterError):  # else the newer controller answers
            self._store.close()
            yield from self._requests.not_saved(error.changes, error.error)

    # --- Requests -------------------------------------------------------------------------------

    def _request(self, message: am.Request, sender: m.Address) -> None:
        self._requests.take(message, sender)
        self._changed()

    def _may_act(self) -> bool:
        return self._lease is None or self._lease.may_act()

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
        next_one = heir(self.cluster.hosts)
        if self._lease is not None and next_one:
            self._lease.release(next_one, leaves=True)
        return True

    # --- Hosts ----------------------------------------------------------------------------------

    def _host_reported(self, message: cm.HostReported, sender: m.Address) -> None:
        if self._members.reported(message, sender):
            self._status_file.changed()
        self._changed()

    def _superseded(self, message: cm.Superseded, _sender: m.Address) -> None:
        """Look whether there is a later controller, and step down if so.

        Where this one is the last that the store knows of, the store is not what it was.
        """
        if (
            self._lease is not None
            and message.epoch > self._store.epoch
            and self._lease.is_confirmed()
        ):
            self._refuse_store(f"it is obeyed from epoch {message.epoch} on", Claim(message.epoch))

    def _refuse_store(self, known: str, claim: Claim) -> None:
        """Leave a store alone that is not the one that was used; proxies keep their tables."""
        location = location_at(self._settings.store_name)

        def check() -> None:
            there = location.read_claim()
            if there.epoch < claim.epoch or claim.store_id not in {"", there.store_id}:
                raise OtherStoreError(
                    f"{location} is not the store that was used: it is "
                    f"{_described(there)}, and {known}. Is a volume not mounted? Bring that store "
                    "back; or stop all of the cluster and start it again, to go on with this one"
                )

        try:
            check()
        except StoreError as error:
            trouble = error
        else:
            os._exit(1)  # it is back: the next controller begins with it
        self.close()
        if self._lease is not None:
            self._lease.abandon()
        self._wait_for_store(trouble, check)

    def _status(self) -> dict[str, Any]:
        self.cluster.now = time.monotonic()
        return {
            "controller": self._shown,
            "version": self.cluster.state.history.last_id,
            "saving": saving(self._settings),
            "damaged": self._damaged(),
            "format": status.format_of(self.cluster),
            "longest_drain_s": status.longest_drain_s(self.cluster),
            "hosts": self._members.shown(),
            "applications": status.applications(self.cluster),
            "backends": status.backends(self.cluster),
            "endpoints": status.endpoints(self.cluster),
            "goals": status.goals(self.cluster),
            "pending_goals": len(self.cluster.state.goals.pending()),
            "rollouts": self.cluster.rollouts.status(time.monotonic()),
            "resources": self.cluster.state.placement.shown(),
        }

    def _damaged(self) -> list[dict[str, str]]:
        """Return what the store has lost, a kind of "" for what it has no name of."""
        lost = self._checkpoints.lost.items()
        return [{"kind": kind, "name": name, "reason": why} for (kind, name), why in lost]

    # --- Proxies --------------------------------------------------------------------------------

    def _listen(self, message: cm.Listen, sender: m.Address) -> None:
        """Answer a proxy with what it lacks, or keep its call until there is an update."""
        listener = message.listener
        if self._is_of_other_store(message):
            claim = Claim(epoch_of(message.seen), store_id=message.store)
            self._refuse_store(f"host {message.host} has tables of {_described(claim)}", claim)
            return
        self._watch_proxy(listener, message.host, sender, message.at)
        self.cluster.autoscaler.expect(listener.incarnation, time.monotonic())
        plain = listener[:]  # records do without the class
        self.cluster.state.long_poll.listen(
            listener.incarnation, plain, message.seen, sender, message.host
        )
        self._changed()

    def _is_of_other_store(self, message: cm.Listen) -> bool:
        """Return whether a proxy's tables are of another store, or of a later state of this one.

        A host that was away while a cluster was begun anew is not to be believed, but for an empty
        store there is nothing that speaks against it.
        """
        if not message.store:
            return False
        if message.store == self._store.store_id:
            return epoch_of(message.seen) > self._store.epoch
        return self._members.is_here(message.host) or self.cluster.state.is_empty

    def _watch_proxy(
        self, process: m.Process, host: str, sender: m.Address | None = None, at: str = ""
    ) -> None:
        """Have a proxy counted until it ends; one that cannot be reached goes with its host."""
        ended = lambda: self.cluster.state.long_poll.gone(process.incarnation)  # noqa: E731
        self._members.processes.watch(process, host, at, sender, ended)

    def _load_reported(self, message: cm.LoadReported, _sender: m.Address) -> None:
        """Take a proxy's load; one that is not known as a listener may be dead already."""
        if self.cluster.state.long_poll.is_heard(message.proxy.incarnation):
            now = time.monotonic()
            proxy = message.proxy.incarnation
            self.cluster.autoscaler.load_reported(proxy, message.load, now)
            self._changed()

    def _replica_ejected(self, message: cm.ReplicaEjected, _sender: m.Address) -> None:
        """Note that a replica gets no queries from a proxy, or gets them again."""
        if self.cluster.state.long_poll.is_heard(message.proxy.incarnation):
            proxy = message.proxy.incarnation
            self.cluster.replica_ejected(message.replica, proxy, message.times)
            self._changed()

    def _tallies_reported(self, message: cm.TalliesReported, _sender: m.Address) -> None:
        """Take what a proxy has counted for rollouts."""
        for endpoint, (token, tallies) in message.tallies.items():
            proxy = message.proxy.incarnation
            self.cluster.rollouts.reported(endpoint, token, proxy, tallies)
        self._changed()

    def _traffic_reported(self, message: cm.TrafficReported, _sender: m.Address) -> None:
        """Add what a proxy has counted to the time series."""
        self.cluster.series.reported(message.traffic, time.time())

    def _comparisons_reported(self, message: cm.ComparisonsReported, _sender: m.Address) -> None:
        """Keep what a shadow's replica has found by comparing."""
        self.cluster.compared(message.process.incarnation, message.found)

    # --- The turn: advance, save, perform, answer -----------------------------------------------

    def _changed(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.at_turn_end(self._turn)

    def _turn(self) -> None:
        self._turning = False
        if self._has_ended:
            return
        if not self._may_act():
            self._loop.call_later(RENEW_S, self._changed)
            return
        self._advance()
        self._arm()

    def _advance(self) -> None:
        effects = [] if self._stopping else self.cluster.advance(time.monotonic(), time.time())
        changes = self.cluster.take_changes()
        if changes:
            self._save(changes)
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
                store=self._store.store_id,
                **update._asdict(),
            )
            self._loop.send(proxy, changed)
        for sender, reply in self._requests.take_answers():
            self._loop.send(sender, reply)

    def _save(self, changes: Changes) -> None:
        try:
            with self._pulse.patience(STORE_PATIENCE_S):
                self._checkpoints.save(changes.puts, changes.deletes, code=changes.code.values())
        except (StoreError, OSError) as error:
            # What is in memory is not what is on disk: start again from the disk. Nothing was sent,
            # so the change has not been seen.
            raise _NotSavedError(changes, error) from error
        log_changes(changes)

    def _arm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        if self._stopping:
            self._wake = self._loop.call_later(STOPPING_S, self._changed)
        elif (due_at := self.cluster.next_due_at()) is not None:
            delay_s = max(due_at - time.monotonic(), 0.0)
            self._wake = self._loop.call_later(delay_s, self._changed)


class _NotSavedError(Exception):
    """The store did not take these changes."""

    def __init__(self, changes: Changes, error: Exception) -> None:
        super().__init__(str(error))
        self.changes = changes
        self.error = error


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


def _described(claim: Claim) -> str:
    return f"store {claim.store_id or '?'} at epoch {claim.epoch}"
