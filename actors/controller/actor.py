"""The controller: one actor per cluster; the shell around the core's Cluster.

Each turn: take messages in, advance, save, and only then send anything. A request is answered after
its checkpoint is durable; a controller that dies before has done nothing that anybody saw.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Hashable, Iterable
from typing import Any

from thespian.actors import ActorExitRequest

from greenroom.actors.cluster.leader_lease import NAMESPACE, LeaderLease, store_id
from greenroom.actors.cluster.members import Members
from greenroom.actors.controller.policies import Policies
from greenroom.actors.controller.read_only import ReadOnlyController, saving
from greenroom.actors.controller.requests import PENDING, Later, Requests, failure
from greenroom.actors.controller.status_file import StatusFile
from greenroom.actors.controller.supervisor import Supervisor
from greenroom.actors.host.capacity import capacity_of
from greenroom.actors.messages import admin as am
from greenroom.actors.messages import control as cm
from greenroom.actors.messages import queries as m
from greenroom.actors.messages.queries import Address
from greenroom.actors.replica.actor import Replica
from greenroom.actors.runtime.actor import LoopActor
from greenroom.actors.runtime.loop import Timer
from greenroom.actors.runtime.settings import LEADS, MAY_LEAD
from greenroom.core import effects as fx
from greenroom.core import operations as ops
from greenroom.core.cluster import status
from greenroom.core.cluster.changes import Changes
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.leader_lease import RENEW_S
from greenroom.core.cluster.long_poll import News, epoch_of
from greenroom.core.cluster.placement import Placement
from greenroom.core.cluster.state import SOFT
from greenroom.core.effects import AskPolicy
from greenroom.core.errors import StateNotSavedError
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import (
    OtherStoreError,
    StaleWriterError,
    StoreError,
    StoreLockedError,
    StoreNotWritableError,
)
from greenroom.persistence.writer import Claim

logger = logging.getLogger(__name__)

# Operations that change more than records, so that nothing shows whether a failed one did.
_OF_MORE = (ops.StopCluster, ops.DrainHost, ops.RotateKey, ops.EvictHost, ops.RebalanceHosts)
_OF_MORE_KEYS = frozenset(kind.key for kind in _OF_MORE)
_ROUTINE = (fx.Check, AskPolicy)  # effects that nobody outside needs to hear of
KINDS = ("backend", "endpoint", "application", "goal", "history", "rollout", "listener", "host")
SETTLE_S = 0.1  # between two pieces of the store's work that no change waits for
SAVE_PATIENCE_S = 60.0  # a disk, or a lock on a shared one, may be slow; nothing was sent meanwhile
LOCK_TIMEOUT_S = 5.0  # a dead predecessor's lock is free at once; a stopping one needs a moment


class Controller(LoopActor):
    """Owns all hard state. Every request is idempotent: a client repeats it until answered."""

    role = "controller"

    @staticmethod
    def actorSystemCapabilityCheck(capabilities: Any, _requirements: Any) -> bool:
        """Tell Thespian where it may be: on the leader, so that any host's admin leads to it."""
        return bool(capabilities.get(LEADS))

    def started(self) -> None:
        """Recover: take the store's lock, load every record, ask every recorded replica."""
        self._reign = LeaderLease(self.settings, self.loop) if self.settings.leaders else None
        self._unsaved: ReadOnlyController | None = None
        try:
            self._store = self._open_store()
        except StoreNotWritableError as error:
            self._unsaved = ReadOnlyController(self.loop, self.settings, self._shown(), error)
        else:
            self._recover()

    def _recover(self) -> None:
        self._checkpoints = Checkpoints(self._store)
        records = {kind: self._checkpoints.load(kind) for kind in KINDS}
        for kind, name in self._checkpoints.lost:
            if kind in SOFT:
                self._checkpoints.give_up(kind, name)
        own_host = self.settings.host_name
        placement = Placement()
        placement.set_host(own_host, capacity_of(self.settings), self.settings.labels)
        self._cluster = Cluster(
            records,
            self._store.epoch,
            time.monotonic(),
            placement,
            own_host=own_host,
            lost=self._checkpoints.lost,
        )
        self.epoch = self._epoch if self._reign is not None else 0
        self._members = Members(
            self.loop,
            self._cluster,
            self.settings,
            self.process,
            self._changed,
            epoch=self.epoch,
            store_id=store_id(self.settings),
        )
        if self._reign is not None:
            self._members.succeed(self._reign.former)
            self._reign.reach = self._members.reach
        self._supervisor = Supervisor(
            self.loop,
            self._cluster,
            self._checkpoints,
            self.records,
            members=self._members,
            find=self._find_replica,
            changed=self._changed,
        )
        self._policies = Policies(
            self.loop, self._cluster, self.settings, self.records, self._changed
        )
        self._requests = Requests(
            self._cluster,
            {
                ops.GetStatus: lambda _asked, _id: self._status(),
                ops.ListHosts: lambda _asked, _id: self._members.addresses(),
                ops.DrainHost: self._drain_host,
                ops.RotateKey: self._rotate_key,
                ops.StopCluster: self._stop_cluster,
            },
        )
        self._status_file = StatusFile(self.loop, self.settings.status_file, self._status)
        self._proxies: dict[Hashable, Address] = {}  # by the incarnation of each
        self._watched: set[str] = set()  # proxies
        self._news: dict[Hashable, News] = {}  # by proxy: sent to it once all is saved
        self._wake: Timer | None = None
        self._settling: Timer | None = None
        self._turning = False
        self._stopping = False
        for expected in self._cluster.listeners.expected():
            if self._members.is_here(expected.host):
                self._watch_proxy(m.Process(*expected.process))
        logger.info("recovered %d backends, epoch %d", len(self._cluster.backends), self._epoch)
        self._changed()

    @property
    def _epoch(self) -> int:
        return self._store.epoch

    def _open_store(self) -> FileStore:
        if self._reign is not None:
            return self._reign.open()
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return FileStore.open(self.settings.store_dir, namespace=NAMESPACE)
            except StoreLockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # nothing else can be done before the lock is had

    def survives(self, message: Any, sender: Address, error: Exception) -> bool:
        """Answer a request that failed before it had changed anything."""
        if not isinstance(message, am.Request) or message.operation in _OF_MORE_KEYS:
            return False
        if self._unsaved is None and self._cluster.state.is_torn:
            return False
        self.loop.send(sender, failure(message.request_id, error))
        return True

    def owed(self, message: Any, sender: Address, error: Exception) -> Iterable[Any]:
        """Return what to answer those whose requests are not saved; all others repeat them."""
        if isinstance(message, am.Request):
            yield sender, failure(message.request_id, error)
        elif isinstance(error, _NotSavedError):
            if isinstance(error.error, StaleWriterError):
                return  # they repeat it to the controller that there is now
            self._store.close()
            yield from self._requests.not_saved(error.changes, error.error)
        elif self._unsaved is None:
            yield from self._requests.lost(error)

    def exiting(self) -> None:
        """Leave the store to the next controller."""
        super().exiting()
        if self._unsaved is not None:
            return
        self._policies.close()
        self._members.close()
        self._status_file.close()
        self._store.close()

    # --- Requests -------------------------------------------------------------------------------

    def _dispatch(self, message: Any, sender: Address) -> None:
        if self._unsaved is not None:
            self._dispatch_unsaved(self._unsaved, message, sender)
            return
        if not self._may_act() and not isinstance(message, cm.Identify):
            self._refuse(message, sender)
            return
        if isinstance(message, am.Request):
            self._requests.take(message, sender)
            self._changed()
        else:
            super()._dispatch(message, sender)

    def _refuse(self, message: Any, sender: Address) -> None:
        """Say why nothing is done; by default whoever asks does so again, of who leads then."""
        trouble = "" if self._reign is None else self._reign.trouble()
        if trouble and isinstance(message, am.Request):
            self.loop.send(sender, failure(message.request_id, StateNotSavedError(trouble)))

    def _dispatch_unsaved(self, unsaved: ReadOnlyController, message: Any, sender: Address) -> None:
        """Answer requests and who asks for the controller; senders of all else send it again."""
        if isinstance(message, am.Request):
            unsaved.take(message, sender)
        elif isinstance(message, cm.Identify | ActorExitRequest):
            super()._dispatch(message, sender)

    def _shown(self) -> dict[str, Any]:
        return {"pid": self.process.pid, "host": self.settings.host_name}

    def _may_act(self) -> bool:
        return self._reign is None or self._reign.may_act()

    def receiveMsg_Superseded(self, message: cm.Superseded, _sender: Address) -> None:
        """Look whether there is a later controller, and step down if so.

        Where this one is the last that the store knows of, the store is not what it was.
        """
        if self._reign is not None and message.epoch > self._epoch and self._reign.renew():
            self._refuse_store(f"it is obeyed from epoch {message.epoch} on", Claim(message.epoch))

    def _refuse_store(self, known: str, claim: Claim) -> None:
        """Leave a store alone that is not the one that was used; proxies keep their tables."""

        def look() -> None:
            there = FileStore.claimed(self.settings.store_dir, namespace=NAMESPACE)
            if there.epoch < claim.epoch or claim.store_id not in {"", there.store_id}:
                raise OtherStoreError(
                    f"{self.settings.store_dir / NAMESPACE} is not the store that was used: it is "
                    f"{_described(there)}, and {known}. Is a volume not mounted? Bring that store "
                    "back; or stop all of the cluster and start it again, to go on with this one"
                )

        try:
            look()
        except StoreError as error:
            trouble = error
        else:
            os._exit(1)  # it is back: the next controller begins with it
        for each in (self._policies, self._members, self._status_file, self._store):
            each.close()
        if self._reign is not None:
            self._reign.abandon()
        self._unsaved = ReadOnlyController(self.loop, self.settings, self._shown(), trouble, look)

    def _status(self) -> dict[str, Any]:
        self._cluster.now = time.monotonic()
        return {
            "controller": self._shown(),
            "saving": saving(self.settings),
            "damaged": self._damaged(),
            "hosts": self._members.shown(),
            "applications": status.applications(self._cluster),
            "backends": status.backends(self._cluster),
            "endpoints": status.endpoints(self._cluster),
            "goals": status.goals(self._cluster),
            "pending_goals": len(self._cluster.goals.pending()),
            "rollouts": self._cluster.rollouts.status(time.monotonic()),
            "resources": self._cluster.placement.shown(),
        }

    def _damaged(self) -> list[dict[str, str]]:
        """Return what the store has lost, a kind of "" for what it has no name of."""
        lost = self._checkpoints.lost.items()
        return [{"kind": kind, "name": name, "reason": why} for (kind, name), why in lost]

    def receiveMsg_HostReported(self, message: cm.HostReported, sender: Address) -> None:
        """See :meth:`Members.reported`."""
        if self._members.reported(message, sender):
            self._status_file.changed()
        self._changed()

    def receiveMsg_NeedKey(self, message: cm.NeedKey, sender: Address) -> None:
        """See :meth:`KeyRotation.asked`."""
        self._members.keys.asked(message, sender)

    def _drain_host(self, asked: ops.DrainHost, _request_id: str) -> Later:
        self._members.drain(asked)
        return Later(lambda: True if self._members.is_drained(asked) else PENDING)

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
        heir = self._members.heir()
        if self._reign is not None and heir:
            self._reign.give_up(heir, leaves=True)
        return True

    # --- Proxies --------------------------------------------------------------------------------

    def receiveMsg_Listen(self, message: cm.Listen, sender: Address) -> None:
        """Answer a proxy with what it lacks, or keep its call until there is news."""
        listener = message.listener
        if self._is_of_other_store(message):
            claim = Claim(epoch_of(message.seen), store_id=message.store)
            self._refuse_store(f"host {message.host} has tables of {_described(claim)}", claim)
            return
        self._watch_proxy(listener, sender)
        self._members.listen_to(listener.incarnation, message.host)
        self._proxies[listener.incarnation] = sender
        self._cluster.loads.expect(listener, time.monotonic())
        plain = listener[:]  # records do without the class
        news = self._cluster.listeners.listen(
            listener.incarnation, plain, message.seen, message.host
        )
        if news is not None:
            self._news[listener.incarnation] = news
        self._changed()

    def _is_of_other_store(self, message: cm.Listen) -> bool:
        """Tell whether a proxy's tables are of another store than ours, or of a later state of it.

        A host that was away while a cluster was begun anew is not to be believed, but for an empty
        store there is nothing that speaks against it.
        """
        if not message.store:
            return False
        if message.store == self._store.store_id:
            return epoch_of(message.seen) > self._epoch
        return self._members.is_here(message.host) or self._cluster.state.is_empty

    def _watch_proxy(self, process: m.Process, at: Address | None = None) -> None:
        if process.incarnation not in self._watched:
            self._watched.add(process.incarnation)
            gone = lambda: self._proxy_gone(process)  # noqa: E731
            # One that cannot be reached goes with its host, when that is judged to be lost.
            self.loop.watch_process(process, gone, at, on_unreachable=lambda: None)

    def _proxy_gone(self, process: m.Process) -> None:
        self._watched.discard(process.incarnation)
        self._members.listen_no_more(process.incarnation)
        self._proxies.pop(process.incarnation, None)
        self._cluster.listeners.gone(process.incarnation)
        self._cluster.autoscaler.proxy_gone(process, time.monotonic())
        self._changed()

    def receiveMsg_LoadReported(self, message: cm.LoadReported, _sender: Address) -> None:
        """Take a proxy's load; one that is not known as a listener may be dead already."""
        if message.proxy.incarnation in self._proxies:
            now = time.monotonic()
            self._cluster.autoscaler.load_reported(message.proxy, message.load, now)
            self._changed()

    def receiveMsg_TalliesReported(self, message: cm.TalliesReported, _sender: Address) -> None:
        """Take what a proxy has counted for rollouts."""
        for endpoint, (token, tallies) in message.tallies.items():
            proxy = message.proxy.incarnation
            self._cluster.rollouts.reported(endpoint, token, proxy, tallies)
        self._changed()

    # --- Replicas -------------------------------------------------------------------------------

    def receiveMsg_ReplicaReported(self, message: cm.ReplicaReported, sender: Address) -> None:
        """See :meth:`Supervisor.reported`."""
        self._supervisor.reported(message, sender)

    def receiveMsg_FetchFolder(self, message: cm.FetchFolder, sender: Address) -> None:
        """See :meth:`Supervisor.fetch`."""
        self._supervisor.fetch(message, sender)

    def receiveMsg_ComparisonsReported(
        self, message: cm.ComparisonsReported, _sender: Address
    ) -> None:
        """Keep what a shadow's replica has found by comparing."""
        self._cluster.differences.reported(message.process.incarnation, message.found)

    def receiveMsg_ChildActorExited(self, message: Any, _sender: Address) -> None:
        """See :meth:`Supervisor.child_exited`."""
        self._supervisor.child_exited(message.childAddress)

    def receiveMsg_ReplicaLost(self, message: cm.ReplicaLost, _sender: Address) -> None:
        """See :meth:`Supervisor.lost`."""
        self._supervisor.lost(message)

    def _find_replica(self, tag: str) -> Address:
        """Return where a replica is, by global name, for one that has not been heard of yet.

        The admin makes the process, so that it outlives this controller, and whoever asks for the
        name again gets the same process: nothing that a crash left behind can be missed.
        """
        return self.createActor(Replica, globalName=f"replica {tag}")

    # --- The turn: advance, save, perform, answer -----------------------------------------------

    def _changed(self) -> None:
        if not self._turning:
            self._turning = True
            self.loop.at_turn_end(self._turn)

    def _turn(self) -> None:
        self._turning = False
        if self._unsaved is not None:
            return
        if not self._may_act():
            self.loop.call_later(RENEW_S, self._changed)
            return
        self._advance()
        self._arm()

    def _advance(self) -> None:
        effects = [] if self._stopping else self._cluster.advance(time.monotonic(), time.time())
        changes = self._cluster.take_changes()
        if changes:
            self._save(changes)
        self._requests.saved()
        for effect in effects:
            if isinstance(effect, AskPolicy):
                self._policies.ask(effect)
            else:
                self._supervisor.perform(effect)
        self._policies.tidy()
        for tag, decision in self._cluster.autoscaler.take_log():
            logger.info("autoscaling %s: %s", tag, decision)
        news_by_listener = self._cluster.long_poll.take_news()
        if changes or news_by_listener or any(not isinstance(e, _ROUTINE) for e in effects):
            self._status_file.changed()
        self._news.update(news_by_listener)
        owed, self._news = self._news, {}
        for listener, news in owed.items():
            proxy = self._proxies.get(listener)
            if proxy is not None:
                epoch = self._members.epoch
                changed = cm.Changed(
                    controller=self.process,
                    epoch=epoch,
                    store=self._store.store_id,
                    **news._asdict(),
                )
                self.loop.send(proxy, changed)
        for sender, reply in self._requests.take_answers():
            self.loop.send(sender, reply)

    def _save(self, changes: Changes) -> None:
        _crash_for_a_test("BEFORE")
        try:
            with self.pulse.patience(SAVE_PATIENCE_S):
                self._checkpoints.save(changes.puts, changes.deletes, code=changes.code.values())
        except (StoreError, OSError) as error:
            # What is in memory is not what is on disk: start again from the disk. Nothing was sent,
            # so nobody has seen the change.
            raise _NotSavedError(changes, error) from error
        _crash_for_a_test("AFTER")
        log_changes(changes)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._settling is None:
            self._settling = self.loop.call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        """Have the store do a piece of what it left for later; nothing depends on when."""
        self._settling = None
        if self._unsaved is not None or not self._may_act():
            return  # the next save begins it again
        try:
            with self.pulse.patience(SAVE_PATIENCE_S):
                has_more = self._checkpoints.settle()
        except StoreError as error:
            logger.warning("the store's values do not follow: %s", error)
            return
        if has_more:
            self._settle_soon()

    def _arm(self) -> None:
        times = [self._requests.due_at()]
        due_at = self._cluster.next_due_at()
        if due_at is not None and not self._stopping:
            times.append(due_at)
        if self._wake is not None:
            self._wake.cancel()
        if min(times) < float("inf"):
            delay_s = max(min(times) - time.monotonic(), 0.0)
            self._wake = self.loop.call_later(delay_s, self._changed)


class _NotSavedError(Exception):
    """The store did not take these changes."""

    def __init__(self, changes: Changes, error: Exception) -> None:
        super().__init__(str(error))
        self.changes = changes
        self.error = error


class LeadingController(Controller):
    """The controller on a host that may lead, made by its host process when it is to."""

    @staticmethod
    def actorSystemCapabilityCheck(capabilities: Any, _requirements: Any) -> bool:
        """Tell Thespian where it may be."""
        return bool(capabilities.get(MAY_LEAD))


def log_changes(changes: Changes) -> None:
    """Log what was asked for and by whom, and how it ended."""
    for (kind, name), record in changes.puts.items():
        if kind == "history":
            who = f"{record.user or 'somebody'} at {record.address}"
            logger.info("change %d by %s: %s", record.id, who, record.what)
        elif kind == "goal" and record.state != "pending":
            told = f"goal {name} ({record.what} {record.subject[1]!r}) {record.state}"
            reason = record.error.strip().rpartition("\n")[2]
            logger.log(
                logging.ERROR if reason else logging.INFO,
                "%s",
                f"{told}: {reason}" if reason else told,
            )


def _described(claim: Claim) -> str:
    return f"store {claim.store_id or '?'} at epoch {claim.epoch}"


def _crash_for_a_test(when: str) -> None:
    """Kill this process, with the chance that a test has set in its environment."""
    chance = os.environ.get(f"GREENROOM_TEST_CRASH_{when}_CHECKPOINT")
    if chance and random.random() < float(chance):
        os.kill(os.getpid(), signal.SIGKILL)
