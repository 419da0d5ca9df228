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
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from understudy.actors import messages as m
from understudy.actors.base import LoopActor
from understudy.actors.loop import Timer
from understudy.actors.messages import Address
from understudy.actors.processes import is_alive, send_signal
from understudy.actors.replica import Replica
from understudy.actors.user_code import lost_code
from understudy.core import effects as fx
from understudy.core import status
from understudy.core.changes import Changes
from understudy.core.cluster import Cluster
from understudy.core.errors import InvalidRequestError, UnderstudyError
from understudy.core.tables import ENDPOINT_PREFIX
from understudy.persistence.checkpoints import Checkpoints
from understudy.persistence.errors import StoreError, StoreLockedError
from understudy.persistence.filesystem import FileStore

logger = logging.getLogger(__name__)

KINDS = ("backend", "endpoint", "application", "goal")
LOCK_TIMEOUT_S = 5.0  # a dead predecessor's lock is free at once; a stopping one needs a moment
HELD_TIMEOUT_S = 5.0  # how long an answer waits for proxies to hold a changed endpoint


class _Parked(NamedTuple):
    """A request whose answer waits for something."""

    request_id: str
    sender: Address
    answer: Callable[[], m.RequestReply | None]
    give_up_at: float


class Controller(LoopActor):
    """Owns all hard state. Every request is idempotent: a client repeats it until answered."""

    role = "controller"

    def started(self) -> None:
        """Recover: take the store's lock, load every record, ask every recorded replica."""
        self._store = self._open_store()
        self._checkpoints = Checkpoints(self._store)
        records = {kind: self._checkpoints.load(kind) for kind in KINDS}
        self._cluster = Cluster(records, self._store.epoch, time.monotonic())
        self._replicas: dict[str, Address] = {}  # where to send to, also before the first report
        self._processes: dict[str, m.Process] = {}
        self._unwatch: dict[str, Callable[[], None]] = {}
        self._proxies: dict[Hashable, Address] = {}  # by the Process of each
        self._parked: list[_Parked] = []
        self._answers: list[tuple[Address, m.RequestReply]] = []
        self._hosts: dict[str, dict[str, Any]] = {}
        self._host_addresses: dict[str, Address] = {}
        self._wake: Timer | None = None
        self._turning = False
        self._stopping: m.StopCluster | None = None
        self._code: tuple[str, bytes] = ("", b"")  # the code last read
        self._requests: dict[type[m.Request], Callable[[Any], Any]] = {
            m.CreateBackend: self._create_backend,
            m.UpdateBackendConfig: self._update_backend_config,
            m.DeleteBackend: self._delete_backend,
            m.GetBackendConfig: lambda r: self._cluster.backend_config(r.tag),
            m.ListBackends: lambda _: status.backends(self._cluster),
            m.ListEndpoints: lambda _: status.endpoints(self._cluster),
            m.DeployApplication: self._deploy_application,
            m.DeleteApplication: lambda r: self._cluster.delete_application(
                r.application, time.time()
            ),
            m.GetStatus: lambda _: self._status(),
        }
        self._held_requests: dict[type[m.Request], Callable[[Any], None]] = {
            m.CreateEndpoint: self._create_endpoint,
            m.DeleteEndpoint: lambda r: self._cluster.delete_endpoint(r.name),
            m.SetTraffic: lambda r: self._cluster.set_traffic(r.endpoint, r.weights),
        }
        self._perform: dict[type[fx.Effect], Callable[[Any], None]] = {
            fx.Start: self._start,
            fx.Reconfigure: self._reconfigure,
            fx.Check: self._check,
            fx.Stop: self._stop,
            fx.Kill: self._kill,
        }
        logger.info("recovered %d backends, epoch %d", len(self._cluster.backends), self._epoch)
        self._changed()

    @property
    def _epoch(self) -> int:
        return self._store.epoch

    def _open_store(self) -> FileStore:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return FileStore.open(self.settings.store_dir, namespace="controller")
            except StoreLockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # nothing else can be done before the lock is had

    def handler_failed(self, message: Any, sender: Address, error: Exception) -> None:
        """Tell a client whose request failed."""
        if isinstance(message, m.Request):
            kind = type(error).__name__ if isinstance(error, UnderstudyError) else "UnderstudyError"
            text = str(error) if kind != "UnderstudyError" else f"{type(error).__name__}: {error}"
            reply = m.RequestReply(request_id=message.request_id, error_kind=kind, error=text)
            self.loop.send(sender, reply)

    def exiting(self) -> None:
        """Leave the store to the next controller."""
        super().exiting()
        self._store.close()

    # --- Requests -------------------------------------------------------------------------------

    def _dispatch(self, message: Any, sender: Address) -> None:
        if isinstance(message, m.Request):
            self._request(message, sender)
        else:
            super()._dispatch(message, sender)

    def _request(self, message: m.Request, sender: Address) -> None:
        try:
            self._answer_request(message, sender)
        except UnderstudyError as error:
            self.handler_failed(message, sender, error)
        self._changed()

    def _answer_request(self, message: m.Request, sender: Address) -> None:
        kind: Any = type(message)
        if isinstance(message, m.WaitForGoal):
            self._cluster.goal(message.goal_id)
            self._park(message, sender, lambda: self._goal_reply(message))
        elif isinstance(message, m.StopCluster):
            self._stop_cluster(message, sender)
        elif kind in self._held_requests:
            self._held_requests[kind](message)
            name: str = getattr(message, "name", "") or getattr(message, "endpoint", "")
            self._park(message, sender, lambda: self._held_reply(message, name), HELD_TIMEOUT_S)
        elif kind in self._requests:
            value = self._requests[kind](message)
            self._reply(message, sender, value)
        else:
            raise InvalidRequestError(f"the controller does not know a request {kind.__name__}")

    def _reply(self, message: m.Request, sender: Address, value: Any) -> None:
        self._answers.append((sender, m.RequestReply(request_id=message.request_id, value=value)))

    def _park(
        self,
        message: m.Request,
        sender: Address,
        answer: Callable[[], m.RequestReply | None],
        timeout_s: float = float("inf"),
    ) -> None:
        self._parked = [p for p in self._parked if p.request_id != message.request_id]
        give_up_at = time.monotonic() + timeout_s
        self._parked.append(_Parked(message.request_id, sender, answer, give_up_at))

    def _goal_reply(self, message: m.WaitForGoal) -> m.RequestReply | None:
        goal = self._cluster.goals.get(message.goal_id)
        if goal is None:
            return m.RequestReply(
                request_id=message.request_id,
                error_kind="UnknownNameError",
                error=f"goal {message.goal_id!r} has ended, too many others ago to tell how",
            )
        if goal.state == "pending":
            return None
        if goal.state == "succeeded":
            return m.RequestReply(request_id=message.request_id, value=True)
        return m.RequestReply(
            request_id=message.request_id,
            error_kind="DeployFailedError",
            error=goal.error,
            exception=goal.exception,
        )

    def _held_reply(self, message: m.Request, endpoint: str) -> m.RequestReply | None:
        if not self._cluster.long_poll.held_by_all(ENDPOINT_PREFIX + endpoint):
            return None
        return m.RequestReply(request_id=message.request_id)

    def _create_backend(self, r: m.CreateBackend) -> str | None:
        return self._cluster.create_backend(
            r.tag,
            code=r.code,
            code_hash=r.code_hash,
            config=r.config,
            actor_options=r.actor_options,
            version=r.version,
            wall_now=time.time(),
        )

    def _update_backend_config(self, r: m.UpdateBackendConfig) -> str | None:
        return self._cluster.update_backend_config(r.tag, r.changes, time.time())

    def _delete_backend(self, r: m.DeleteBackend) -> str | None:
        return self._cluster.delete_backend(r.tag, force=r.force, wall_now=time.time())

    def _create_endpoint(self, r: m.CreateEndpoint) -> None:
        self._cluster.create_endpoint(
            r.name, backend=r.backend, route=r.route, methods=tuple(r.methods)
        )

    def _deploy_application(self, r: m.DeployApplication) -> str | None:
        return self._cluster.deploy_application(
            r.application,
            ingress=r.ingress,
            route_prefix=r.route_prefix,
            deployments=r.deployments,
            wall_now=time.time(),
        )

    def _status(self) -> dict[str, Any]:
        host = next(iter(self._hosts), "")
        return {
            "controller": {"pid": self.process.pid, "host": host},
            "hosts": list(self._hosts.values()),
            "applications": status.applications(self._cluster, host),
            "backends": status.backends(self._cluster),
            "endpoints": status.endpoints(self._cluster),
            "goals": status.goals(self._cluster),
        }

    def receiveMsg_HostReported(self, message: m.HostReported, sender: Address) -> None:
        """Keep what a host tells of itself, for status."""
        self._hosts[message.host] = message.report
        self._host_addresses[message.host] = sender

    # --- Stopping -------------------------------------------------------------------------------

    def _stop_cluster(self, message: m.StopCluster, sender: Address) -> None:
        """Stop all replicas without a change of the hard state, which a next start brings back."""
        if message.forget:
            for address in self._host_addresses.values():
                self.loop.send(address, m.StopHost(forget=True))
            self._reply(message, sender, value=True)
            return
        self._stopping = message
        for tag, address in self._replicas.items():
            backend = self._cluster.backend_of(tag)
            drain_s = backend.config.graceful_shutdown_timeout_s if backend else 0.0
            self.loop.send(address, m.StopReplica(replica=tag, drain_s=drain_s))
        self._park(message, sender, lambda: self._stopped_reply(message))

    def _stopped_reply(self, message: m.StopCluster) -> m.RequestReply | None:
        if any(is_alive(process) for process in self._processes.values()):
            return None
        return m.RequestReply(request_id=message.request_id, value=True)

    # --- Proxies --------------------------------------------------------------------------------

    def receiveMsg_Listen(self, message: m.Listen, sender: Address) -> None:
        """Answer a proxy with what it lacks, or keep its call until there is news."""
        listener = message.listener
        if listener not in self._proxies:
            self.loop.watch_process(listener, lambda: self._proxy_gone(listener))
        self._proxies[listener] = sender
        news = self._cluster.long_poll.listen(listener, message.known)
        if not self._cluster.long_poll.is_parked(listener):
            self.loop.send(sender, m.Changed(controller=self.process, snapshots=news))
        self._cluster.listener_changed()
        self._changed()

    def _proxy_gone(self, listener: m.Process) -> None:
        self._proxies.pop(listener, None)
        self._cluster.long_poll.forget(listener)
        self._cluster.listener_changed()
        self._changed()

    # --- Replicas -------------------------------------------------------------------------------

    def receiveMsg_ReplicaReported(self, message: m.ReplicaReported, sender: Address) -> None:
        """Take a replica's report; tell one that nobody wants to go."""
        tag, process = message.replica, message.process
        if tag and self._processes.get(tag) != process:
            self._replicas[tag] = sender
            self._processes[tag] = process
            self._unwatch.pop(tag, lambda: None)()
            self._unwatch[tag] = self.loop.watch_process(
                process, lambda: self._replica_exited(tag, process)
            )
        known = self._cluster.replica_reported(
            tag,
            time.monotonic(),
            state=message.state,
            address=sender,
            process=process,
            config_id=message.config_id,
            check_id=message.check_id,
            ongoing=message.ongoing,
            error=message.error,
            exception=message.exception,
        )
        if not known and message.state != "draining":
            self.loop.send(sender, m.StopReplica(replica=tag, drain_s=0.0))
        self._changed()

    def receiveMsg_ChildActorExited(self, message: Any, _sender: Address) -> None:
        """Take note of a replica that ended before it reported; the others are watched by pid."""
        for tag, address in list(self._replicas.items()):
            if address == message.childAddress and tag not in self._processes:
                del self._replicas[tag]
                self._cluster.replica_exited(tag, time.monotonic())
                self._changed()

    def receiveMsg_ReplicaLost(self, message: m.ReplicaLost, _sender: Address) -> None:
        """Kill a replica that a proxy gave up: gone, or so stuck that it takes no message."""
        process = self._processes.get(message.replica)
        if process is not None and process.incarnation == message.incarnation:
            send_signal(process, signal.SIGKILL)  # its exit is what counts

    def _replica_exited(self, tag: str, process: m.Process) -> None:
        if self._processes.get(tag) != process:
            return
        logger.info("replica %s (pid %d) is gone", tag, process.pid)
        self._unwatch.pop(tag, lambda: None)()
        del self._processes[tag], self._replicas[tag]
        self.records.remove(process)
        if self._stopping is None:
            self._cluster.replica_exited(tag, time.monotonic())
        self._changed()

    # --- The turn: advance, save, perform, answer -----------------------------------------------

    def _changed(self) -> None:
        if not self._turning:
            self._turning = True
            self.loop.at_turn_end(self._turn)

    def _turn(self) -> None:
        self._turning = False
        try:
            self._advance()
        except Exception:
            # Half a step was taken in memory, and none on disk: start again from the disk.
            logger.exception("the controller failed in a turn; it starts again")
            os._exit(1)
        self._arm()

    def _advance(self) -> None:
        effects = [] if self._stopping else self._cluster.advance(time.monotonic())
        changes = self._cluster.take_changes()
        if changes:
            self._save(changes)
        for effect in effects:
            self._perform[type(effect)](effect)
        for listener, news in self._cluster.long_poll.take_news().items():
            proxy = self._proxies.get(listener)
            if proxy is not None:
                self.loop.send(proxy, m.Changed(controller=self.process, snapshots=news))
        self._answer_parked()
        answers, self._answers = self._answers, []
        for sender, reply in answers:
            self.loop.send(sender, reply)

    def _save(self, changes: Changes) -> None:
        self._crash_for_a_test(self.settings.crash_before_checkpoint)
        try:
            self._checkpoints.save(changes.puts, changes.deletes, code=changes.code.values())
        except (StoreError, OSError):
            # What is in memory is not what is on disk: start again from the disk. Nothing was sent,
            # so nobody has seen the change; clients repeat their requests.
            logger.exception("the state could not be saved; the controller starts again")
            os._exit(1)
        self._crash_for_a_test(self.settings.crash_after_checkpoint)

    def _crash_for_a_test(self, probability: float) -> None:
        if probability and random.random() < probability:
            os.kill(os.getpid(), signal.SIGKILL)

    def _answer_parked(self) -> None:
        now = time.monotonic()
        waiting = []
        for parked in self._parked:
            reply = parked.answer()
            if reply is None and now > parked.give_up_at:
                text = "saved, but not every proxy has taken it yet; it will when it answers again"
                reply = m.RequestReply(
                    request_id=parked.request_id, error_kind="UnderstudyError", error=text
                )
            if reply is None:
                waiting.append(parked)
            else:
                self._answers.append((parked.sender, reply))
        self._parked = waiting

    def _arm(self) -> None:
        times = [p.give_up_at for p in self._parked if p.give_up_at < float("inf")]
        due_at = self._cluster.next_due_at()
        if due_at is not None and self._stopping is None:
            times.append(due_at)
        if self._wake is not None:
            self._wake.cancel()
        if times:
            delay_s = max(min(times) - time.monotonic(), 0.0)
            self._wake = self.loop.call_later(delay_s, self._changed)

    # --- Effects --------------------------------------------------------------------------------

    def _start(self, effect: fx.Start) -> None:
        record = self._cluster.backends[effect.backend].record
        self._send_replica(
            effect.replica,
            m.StartReplica(
                replica=effect.replica,
                backend=record.tag,
                deployment=record.deployment or record.tag,
                application=record.application,
                version=record.version,
                code=self._code_or_reason(record.code_digest),
                code_hash=record.code_hash,
                config=dict(record.config),
                config_id=record.config_id,
            ),
        )

    def _address_of(self, tag: str) -> Address:
        """Return where a replica is; by global name, when this controller has not heard of it yet.

        The admin makes the process, so that it outlives this controller, and whoever asks for the
        name again gets the same process: nothing that a crash left behind can be missed.
        """
        if tag not in self._replicas:
            self._replicas[tag] = self.createActor(Replica, globalName=f"replica {tag}")
        return self._replicas[tag]

    def _code_or_reason(self, digest: str) -> bytes:
        """Return the code, or where it is lost what makes a replica fail with that as the reason.

        One that runs already has no need of it.
        """
        try:
            return self._load_code(digest)
        except StoreError as error:
            logger.exception("code is lost")
            self._cluster.lost_code.add(digest)
            return lost_code(str(error))

    def _load_code(self, digest: str) -> bytes:
        if self._code[0] != digest:
            self._code = (digest, self._checkpoints.load_code(digest))
        return self._code[1]

    def _reconfigure(self, effect: fx.Reconfigure) -> None:
        record = self._cluster.backends[effect.backend].record
        order = m.ReconfigureReplica(
            replica=effect.replica, config=dict(record.config), config_id=record.config_id
        )
        self._send_replica(effect.replica, order)

    def _check(self, effect: fx.Check) -> None:
        self._send_replica(effect.replica, m.CheckReplica(**effect._asdict()))

    def _stop(self, effect: fx.Stop) -> None:
        self._send_replica(effect.replica, m.StopReplica(**effect._asdict()))

    def _kill(self, effect: fx.Kill) -> None:
        process = self._processes.get(effect.replica)
        if process is not None:
            logger.warning("killing replica %s (pid %d)", effect.replica, process.pid)
            send_signal(process, signal.SIGKILL)
        else:  # it has not reported to this controller; it will when it hears this
            self._stop(fx.Stop(effect.replica, 0.0))

    def _send_replica(self, tag: str, message: m.Message) -> None:
        address = self._address_of(tag)
        self.loop.send(address, message, on_failed=lambda: self._unreachable(tag, address))

    def _unreachable(self, tag: str, address: Address) -> None:
        """Look for the replica anew next time: the admin may have named one that just died."""
        if tag not in self._processes and self._replicas.get(tag) == address:
            del self._replicas[tag]
