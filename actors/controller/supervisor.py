"""The replicas of a cluster as processes: where they are, and the orders of the core for them."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from greenroom.actors.cluster.members import Members
from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.replica.user_code import lost_code
from greenroom.actors.runtime.loop import Callback, Loop, Repeats, nothing
from greenroom.actors.runtime.records import RunRecords
from greenroom.core import effects as fx
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.config import config_of_replica
from greenroom.core.errors import last_line
from greenroom.core.lifecycle.releases import numbered
from greenroom.core.lifecycle.replicas import LIVE, RestartReason
from greenroom.core.records import CODE
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import StoreError, StoreNotReadableError

logger = logging.getLogger(__name__)

READ_AGAIN_S = 1.0  # code that a file system does not give at present
MAX_ENDS = 100  # that are remembered for proxies which ask later


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica of the core's that was asked for, or has reported."""

    tag: str
    host: str
    address: m.Address | None = None  # where to send to, also before the first report
    process: m.Process | None = None  # that has reported
    unwatch: Callback = nothing
    shown: tuple[m.Process, str] | None = None  # what the log has of it
    # The last order of each kind, while its actor on another host is asked for.
    waiting: dict[type, cm.StartReplica | fx.Order] = field(default_factory=dict)
    # Proxies that wait for its end, and their questions.
    asked_by: dict[str, tuple[m.Address, cm.DescribeEnd]] = field(default_factory=dict)


class Supervisor:
    """Performs the core's effects, and reports to the core what becomes of the replicas.

    ``find`` returns the address of a replica by its tag, and makes the process where there is none;
    on other hosts ``members`` does that.
    ``changed`` is called after every observation, so that the controller takes a turn.
    """

    def __init__(
        self,
        loop: Loop,
        cluster: Cluster,
        checkpoints: Checkpoints,
        records: RunRecords,
        *,
        members: Members,
        find: Callable[[str], m.Address],
        changed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._records = records
        self._members = members
        self._epoch = members.epoch
        self._find = find
        self._changed = changed
        self._stopping = False
        self._replicas: dict[str, _Replica] = {}  # by tag
        self._ends: dict[str, str] = {}  # why the last replicas ended
        self._code: tuple[str, bytes | None, str] = ("", b"", "")  # last read: digest, see _read
        self._starts = Repeats(loop)
        cluster.state.gone.replica.append(self._forget)

    # --- What is observed -----------------------------------------------------------------------

    def _replica(self, tag: str) -> _Replica | None:
        """Return what is known of a replica; None for one that the core does not have."""
        if tag not in self._replicas and (backend := self._cluster.backend_of(tag)) is not None:
            self._replicas[tag] = _Replica(tag, backend.replicas[tag].host)
        return self._replicas.get(tag)

    def _is_here(self, replica: _Replica) -> bool:
        return self._members.is_here(replica.host)

    def _forget(self, tag: str) -> None:
        replica = self._replicas.pop(tag, None)
        if replica is not None:
            replica.unwatch()
            replica.waiting.clear()

    def reported(self, message: cm.ReplicaReported, sender: m.Address) -> None:
        """Take a replica's report; ask the replica to go if it is not wanted."""
        replica, process = self._replica(message.replica), message.process
        if replica is not None and replica.process != process:
            replica.process = process
            self._watch(replica, sender)
        if replica is not None and replica.shown != (process, message.state):  # they are repeated
            replica.shown = (process, message.state)
            log_report(message)
        is_wanted = self._cluster.replica_reported(message, time.monotonic())
        if not is_wanted and message.state != "draining":
            self._loop.send(sender, self._stop(message.replica, 0.0))

    def _watch(self, replica: _Replica, address: m.Address) -> None:
        """Watch a replica that has reported, or was made on another host."""
        process = replica.process
        replica.unwatch()
        replica.address = address
        replica.unwatch = self._loop.watch_process(
            process,
            lambda: self._exited(replica, process, address),
            address,
            on_unreachable=nothing,  # whether its host is lost is judged by other signs
        )

    def child_exited(self, address: m.Address) -> None:
        """Record a replica of this host that ended before it reported; others are watched."""
        for replica in list(self._replicas.values()):
            if replica.address == address and replica.process is None:
                replica.address = None
                self._loop.start(self._died(replica, None, address))

    def replica_gone(self, message: cm.ReplicaLost) -> None:
        """Kill a replica that a proxy calls gone: dead, or so stuck that it takes no message."""
        replica = self._replicas.get(message.replica)
        process = None if replica is None else replica.process
        if replica is not None and process and process.incarnation == message.incarnation:
            self._end(replica, process)  # its exit is what counts

    def describe_end(self, message: cm.DescribeEnd, sender: m.Address) -> None:
        """Tell a proxy why a replica ended, as soon as that is known."""
        tag = message.replica
        if tag in self._ends:
            cause = self._ends[tag]
            self._loop.send(sender, cm.EndDescribed(request_id=message.request_id, cause=cause))
        elif tag in self._replicas:
            self._replicas[tag].asked_by[str(sender)] = sender, message

    def _exited(self, replica: _Replica, process: m.Process | None, address: m.Address) -> None:
        """Ask how a replica ended that was to go on, or may have run out of memory in draining.

        Not where it has said itself that it does: proxies do not wait for long.
        """
        backend = self._cluster.backend_of(replica.tag)
        core = None if backend is None else backend.replicas[replica.tag]
        if core is not None and RestartReason.parse(core.worn) is RestartReason.OUT_OF_MEMORY:
            self._gone(replica, core.worn)
        elif self._stopping or core is None or not (core.state in LIVE or core.worn):
            self._gone(replica)
        else:
            self._loop.start(self._died(replica, process, address))

    async def _died(self, replica: _Replica, process: m.Process | None, at: m.Address) -> None:
        cause = await self._members.cause_of_end(replica.tag, at, replica.host)
        if self._replicas.get(replica.tag) is replica and replica.process == process:
            self._gone(replica, cause)

    def _gone(self, replica: _Replica, cause: str = "") -> None:
        tag, process = replica.tag, replica.process
        if process is not None:
            logger.info("replica %s (pid %d) is gone%s", tag, process.pid, cause and f": {cause}")
            if self._is_here(replica):
                self._records.remove(process)
        self._record_end(replica, cause)
        self._forget(tag)
        if not self._stopping:
            self._cluster.replica_exited(tag, time.monotonic(), cause)
        self._changed()

    def _record_end(self, replica: _Replica, cause: str) -> None:
        tag = replica.tag
        backend = self._cluster.backend_of(tag)
        self._ends.pop(tag, None)
        self._ends[tag] = cause if backend is None else backend.replicas[tag].why_ended(cause)
        if len(self._ends) > MAX_ENDS:
            del self._ends[next(iter(self._ends))]
        for proxy, question in replica.asked_by.values():
            self.describe_end(question, proxy)

    # --- The end of the system ------------------------------------------------------------------

    def stop_all(self) -> None:
        """Make all replicas drain and exit, without a word to the core: they are to come back."""
        self._stopping = True
        for replica in filter(self._is_here, self._replicas.values()):  # others go on
            backend = self._cluster.backend_of(replica.tag)
            drain_s = backend.config.graceful_shutdown_timeout_s if backend else 0.0
            if replica.address is not None:
                self._loop.send(replica.address, self._stop(replica.tag, drain_s))

    def _stop(self, tag: str, drain_s: float) -> fx.StopReplica:
        return fx.StopReplica(replica=tag, drain_s=drain_s, epoch=self._epoch)

    def any_alive(self) -> bool:
        """Return whether the process of any replica of this host is still there."""
        here = [replica.process for replica in self._replicas.values() if self._is_here(replica)]
        return any(self._loop.machine.is_alive(process) for process in here if process is not None)

    # --- Effects --------------------------------------------------------------------------------

    def perform(self, effect: fx.Effect) -> None:
        """Do what the core asks for; what it rests on is saved."""
        if isinstance(effect, fx.Start):
            self._start(effect)
        elif isinstance(effect, fx.Kill):
            self._kill(effect.replica)
        elif not isinstance(effect, fx.AskPolicy):
            self._send(replace(effect, epoch=self._epoch))

    def _start(self, effect: fx.Start) -> None:
        backend = self._cluster.state.backends.get(effect.backend)
        if backend is None or effect.replica not in backend.replicas:
            return  # it is not wanted any more, since its code could not be read
        record = backend.record
        release = numbered(record, backend.replicas[effect.replica].release)
        try:
            if self._code[0] != release.code_digest or self._code[1] is None:  # it may be back
                self._code = release.code_digest, *self._read(release.code_digest)
        except StoreNotReadableError as error:
            logger.warning("replica %s has to wait for its code: %s", effect.replica, error)
            self._loop.call_later(READ_AGAIN_S, lambda: self._start(effect))
            return
        _, code, lost = self._code  # one that runs already has no need of it
        order = cm.StartReplica(
            replica=effect.replica,
            backend=record.tag,
            deployment=record.deployment or record.tag,
            application=record.application,
            version=release.version,
            code=lost_code(lost) if code is None else code,
            code_hash=release.code_hash,
            config=config_of_replica(release.config),
            config_id=release.config_id,
            runtime_env=release.actor_options.get("runtime_env", {}),
            devices=dict(backend.replicas[effect.replica].devices),
            rank=backend.replicas[effect.replica].known_rank,
            epoch=self._epoch,
            num_cpus=release.actor_options.get("num_cpus", 0.0),
        )
        self._send(order)

    def fetch(self, message: cm.FetchFolder, sender: m.Address) -> None:
        """Send a replica the zip of the folder that it works in."""
        logger.info("sending folder %s to replica %s", message.digest, message.replica)
        try:
            content, lost = self._read(message.digest)
        except StoreNotReadableError as error:  # the replica asks again
            logger.warning("replica %s has to wait for its folder: %s", message.replica, error)
            return
        folder = None if content is None else m.LargeBytes(content)
        answer = cm.FolderFetched(digest=message.digest, content=folder, error=lost)
        self._loop.send(sender, answer)

    def _read(self, digest: str) -> tuple[bytes | None, str]:
        """Return what is stored by its digest, or None and why it is lost.

        What cannot be read now is not lost, and raises StoreNotReadableError.
        """
        try:
            return self._checkpoints.load_code(digest), ""
        except StoreNotReadableError:
            raise
        except StoreError as error:
            logger.exception("code is lost")
            self._cluster.state.lost.add((CODE, digest))
            return None, str(error)

    def _kill(self, tag: str) -> None:
        replica = self._replica(tag)
        if replica is None:
            return
        if replica.process is not None:
            logger.warning("killing replica %s (pid %d)", tag, replica.process.pid)
            self._end(replica, replica.process)
        if replica.process is None or not self._is_here(replica):
            # It reports when it hears this. If it has died while its host was cut off, its watch
            # was told only that it could not be reached; what is sent now finds that it is gone.
            self._send(self._stop(tag, 0.0))

    def _end(self, replica: _Replica, process: m.Process) -> None:
        if self._is_here(replica):
            self._loop.machine.send_signal(process, signal.SIGKILL)
        else:
            self._members.kill(process, replica.host)

    def _send(self, order: cm.StartReplica | fx.Order) -> None:
        replica = self._replica(order.replica)
        if replica is None:
            return  # it is gone
        if replica.address is None and not self._is_here(replica):
            if not replica.waiting:
                self._loop.start(self._seek(replica))
            replica.waiting[type(order)] = order
            return
        if replica.address is None:
            replica.address = self._find(replica.tag)
        self._send_to(replica, order)

    async def _seek(self, replica: _Replica) -> None:
        """Find a replica's actor on another host, and send it the orders that wait for that."""
        address = await self._members.locate(replica.tag, replica.host)
        orders, replica.waiting = replica.waiting, {}
        if address is None or not orders:
            return  # the core asks again, or it is gone
        if replica.address is None:
            self._watch(replica, address)
        for order in orders.values():
            self._send_to(replica, order)

    def _send_to(self, replica: _Replica, order: cm.StartReplica | fx.Order) -> None:
        address = replica.address

        def failed() -> None:
            """Look for the replica anew next time: the admin may have named one that just died."""
            if replica.process is None and replica.address == address:
                replica.address = None

        if isinstance(order, cm.StartReplica):
            self._starts.send(address, order, failed)
        else:
            self._loop.send(address, order, on_failed=failed)


def log_report(message: cm.ReplicaReported) -> None:
    """Log a replica's start, or why it could not."""
    if message.state == "running":
        logger.info("replica %s (pid %d) runs", message.replica, message.process.pid)
    elif message.state == "failed":
        what, reason = (message.replica, message.process.pid), last_line(message.error)
        logger.error("replica %s (pid %d) could not start: %s", *what, reason)
