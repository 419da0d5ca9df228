"""The replicas of a cluster as processes: where they are, and the orders of the core for them."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from greenroom.actors.cluster.members import Members
from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.replica.user_code import lost_code
from greenroom.actors.runtime.loop import Callback, Loop, Repeats
from greenroom.actors.runtime.records import RunRecords
from greenroom.core import effects as fx
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.config import config_of_replica
from greenroom.core.errors import last_line
from greenroom.core.lifecycle.releases import numbered
from greenroom.core.lifecycle.replicas import LIVE
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import StoreError, StoreNotReadableError

logger = logging.getLogger(__name__)

READ_AGAIN_S = 1.0  # code that a file system does not give at present
MAX_ENDS = 100  # that are remembered for proxies which ask later


@dataclass(slots=True)
class _Known:
    """A replica that was asked for, or has reported."""

    address: m.Address | None = None  # where to send to, also before the first report
    process: m.Process | None = None  # that has reported
    unwatch: Callback = lambda: None
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
        self._replicas: dict[str, _Known] = {}  # by tag
        self._ends: dict[str, str] = {}  # why the last replicas ended
        self._code: tuple[str, bytes] = ("", b"")  # the code last read
        self._starts = Repeats(loop)
        cluster.state.replica_gone.append(self._forget)

    # --- What is observed -----------------------------------------------------------------------

    def reported(self, message: cm.ReplicaReported, sender: m.Address) -> None:
        """Take a replica's report; ask the replica to go if it is not wanted."""
        tag, process = message.replica, message.process
        known = self._replicas.setdefault(tag, _Known()) if tag else None
        if known is not None and known.process != process:
            known.address, known.process = sender, process
            known.unwatch()
            known.unwatch = self._loop.watch_process(
                process,
                lambda: self._exited(tag, process),
                sender,
                on_unreachable=lambda: None,  # whether its host is lost is judged by other signs
            )
        if known is not None:
            self._log(message, known)
        is_wanted = self._cluster.replica_reported(message, time.monotonic())
        if not is_wanted and message.state != "draining":
            self._loop.send(sender, self._stop(tag, 0.0))
        self._changed()

    def _log(self, message: cm.ReplicaReported, known: _Known) -> None:
        """Log a replica's start, or why it could not: once, as reports are repeated."""
        tag, process = message.replica, message.process
        if known.shown == (process, message.state):
            return
        known.shown = (process, message.state)
        if message.state == "running":
            logger.info("replica %s (pid %d) runs", tag, process.pid)
        elif message.state == "failed":
            reason = last_line(message.error)
            logger.error("replica %s (pid %d) could not start: %s", tag, process.pid, reason)

    def child_exited(self, address: m.Address) -> None:
        """Record a replica that ended before it reported; the others are watched by pid."""
        for tag, known in list(self._replicas.items()):
            if known.address == address and known.process is None:
                known.address = None
                self._loop.start(self._died_unreported(tag, address, self._host_of(tag)))

    async def _died_unreported(self, tag: str, address: m.Address, host: str) -> None:
        cause = await self._members.cause_of_end(tag, address, host)
        if self._process_of(tag) is None:
            self._cluster.replica_exited(tag, time.monotonic(), cause)
            self._changed()

    def replica_gone(self, message: cm.ReplicaLost) -> None:
        """Kill a replica that a proxy calls gone: dead, or so stuck that it takes no message."""
        process = self._process_of(message.replica)
        if process is not None and process.incarnation == message.incarnation:
            self._end(message.replica, process)  # its exit is what counts

    def describe_end(self, message: cm.DescribeEnd, sender: m.Address) -> None:
        """Tell a proxy why a replica ended, as soon as that is known."""
        tag = message.replica
        if tag in self._ends:
            cause = self._ends[tag]
            self._loop.send(sender, cm.EndDescribed(request_id=message.request_id, cause=cause))
        elif tag in self._replicas:
            self._replicas[tag].asked_by[str(sender)] = sender, message

    def _exited(self, tag: str, process: m.Process) -> None:
        if self._process_of(tag) != process:
            return
        if self._stopping or not self._may_be_asked_for(tag):
            self._gone(tag, process)
        else:
            at, host = self._replicas[tag].address, self._host_of(tag)
            self._loop.start(self._died(tag, process, at, host))

    async def _died(self, tag: str, process: m.Process, at: m.Address, host: str) -> None:
        self._gone(tag, process, await self._members.cause_of_end(tag, at, host))

    def _may_be_asked_for(self, tag: str) -> bool:
        """Return whether a replica was to go on, or may have run out of memory while it drained."""
        backend = self._cluster.backend_of(tag)
        replica = None if backend is None else backend.replicas[tag]
        return replica is not None and (replica.state in LIVE or bool(replica.worn))

    def _gone(self, tag: str, process: m.Process, cause: str = "") -> None:
        if self._process_of(tag) != process:
            return
        logger.info("replica %s (pid %d) is gone%s", tag, process.pid, cause and f": {cause}")
        if self._is_here(tag):
            self._records.remove(process)
        self._record_end(tag, cause)
        self._forget(tag)
        if not self._stopping:
            self._cluster.replica_exited(tag, time.monotonic(), cause)
        self._changed()

    def _record_end(self, tag: str, cause: str) -> None:
        backend = self._cluster.backend_of(tag)
        self._ends.pop(tag, None)
        self._ends[tag] = cause if backend is None else backend.replicas[tag].why_ended(cause)
        if len(self._ends) > MAX_ENDS:
            del self._ends[next(iter(self._ends))]
        for proxy, question in self._replicas[tag].asked_by.values():
            self.describe_end(question, proxy)

    # --- The end of the system ------------------------------------------------------------------

    def stop_all(self) -> None:
        """Make all replicas drain and exit, without a word to the core: they are to come back."""
        self._stopping = True
        for tag, known in self._replicas.items():
            backend = self._cluster.backend_of(tag)
            drain_s = backend.config.graceful_shutdown_timeout_s if backend else 0.0
            if known.address is not None and self._is_here(tag):  # others go on
                self._loop.send(known.address, self._stop(tag, drain_s))

    def _stop(self, tag: str, drain_s: float) -> fx.StopReplica:
        return fx.StopReplica(replica=tag, drain_s=drain_s, epoch=self._epoch)

    def any_alive(self) -> bool:
        """Return whether the process of any replica of this host is still there."""
        return any(
            self._loop.machine.is_alive(known.process)
            for tag, known in self._replicas.items()
            if known.process is not None and self._is_here(tag)
        )

    def _is_here(self, tag: str) -> bool:
        return self._members.is_here(self._host_of(tag))

    def _host_of(self, tag: str) -> str:
        backend = self._cluster.backend_of(tag)
        return "" if backend is None else backend.replicas[tag].host

    def _process_of(self, tag: str) -> m.Process | None:
        return self._replicas[tag].process if tag in self._replicas else None

    def _forget(self, tag: str) -> None:
        known = self._replicas.pop(tag, None)
        if known is not None:
            known.unwatch()
            known.waiting.clear()

    # --- Effects --------------------------------------------------------------------------------

    def perform(self, effect: fx.Effect) -> None:
        """Do what the core asks for; what it rests on is saved."""
        if isinstance(effect, fx.Start):
            self._start(effect)
        elif isinstance(effect, fx.Kill):
            self._kill(effect.replica)
        elif not isinstance(effect, fx.AskPolicy):
            self._send(effect.replica, replace(effect, epoch=self._epoch))

    def _start(self, effect: fx.Start) -> None:
        backend = self._cluster.state.backends.get(effect.backend)
        if backend is None or effect.replica not in backend.replicas:
            return  # it is not wanted any more, since its code could not be read
        record = backend.record
        release = numbered(record, backend.replicas[effect.replica].release)
        try:
            code = self._code_or_reason(release.code_digest)
        except StoreNotReadableError as error:
            logger.warning("replica %s has to wait for its code: %s", effect.replica, error)
            self._loop.call_later(READ_AGAIN_S, lambda: self._start(effect))
            return
        self._send(
            effect.replica,
            cm.StartReplica(
                replica=effect.replica,
                backend=record.tag,
                deployment=record.deployment or record.tag,
                application=record.application,
                version=release.version,
                code=code,
                code_hash=release.code_hash,
                config=config_of_replica(release.config),
                config_id=release.config_id,
                runtime_env=release.actor_options.get("runtime_env", {}),
                devices=dict(backend.replicas[effect.replica].devices),
                rank=backend.replicas[effect.replica].known_rank,
                epoch=self._epoch,
                num_cpus=release.actor_options.get("num_cpus", 0.0),
            ),
        )

    def fetch(self, message: cm.FetchFolder, sender: m.Address) -> None:
        """Send a replica the zip of the folder that it works in."""
        logger.info("sending folder %s to replica %s", message.digest, message.replica)
        try:
            content = m.LargeBytes(self._checkpoints.load_code(message.digest))
            answer = cm.FolderFetched(digest=message.digest, content=content)
        except StoreNotReadableError as error:  # the replica asks again
            logger.warning("replica %s has to wait for its folder: %s", message.replica, error)
            return
        except StoreError as error:
            logger.exception("a folder is lost")
            self._cluster.state.code_use.lost.add(message.digest)
            answer = cm.FolderFetched(digest=message.digest, content=None, error=str(error))
        self._loop.send(sender, answer)

    def _code_or_reason(self, digest: str) -> bytes:
        """Return the code, or where it is lost what makes a replica fail with that as the reason.

        One that runs already has no need of it. What cannot be read now is not lost, and raises
        StoreNotReadableError.
        """
        try:
            return self._load_code(digest)
        except StoreNotReadableError:
            raise
        except StoreError as error:
            logger.exception("code is lost")
            self._cluster.state.code_use.lost.add(digest)
            return lost_code(str(error))

    def _load_code(self, digest: str) -> bytes:
        if self._code[0] != digest:
            self._code = (digest, self._checkpoints.load_code(digest))
        return self._code[1]

    def _kill(self, tag: str) -> None:
        process = self._process_of(tag)
        if process is not None:
            logger.warning("killing replica %s (pid %d)", tag, process.pid)
            self._end(tag, process)
        if process is None or not self._is_here(tag):
            # It reports when it hears this. If it has died while its host was cut off, its watch
            # was told only that it could not be reached; what is sent now finds that it is gone.
            self._send(tag, self._stop(tag, 0.0))

    def _end(self, tag: str, process: m.Process) -> None:
        if self._is_here(tag):
            self._loop.machine.send_signal(process, signal.SIGKILL)
        else:
            self._members.kill(process, self._host_of(tag))

    def _send(self, tag: str, message: cm.StartReplica | fx.Order) -> None:
        known = self._replicas.get(tag)
        if known is None:
            if self._cluster.backend_of(tag) is None:
                return  # it is gone
            known = self._replicas[tag] = _Known()
        if known.address is None:
            if not self._is_here(tag):
                if not known.waiting:
                    self._loop.start(self._seek(tag, known))
                known.waiting[type(message)] = message
                return
            known.address = self._find(tag)
        self._send_to(known.address, tag, message)

    async def _seek(self, tag: str, known: _Known) -> None:
        """Find a replica's actor on another host, and send it the orders that wait for that."""
        address = await self._members.locate(tag, self._host_of(tag))
        orders, known.waiting = known.waiting, {}
        if address is None:
            return  # the core asks again
        if known.address is None:
            known.address = address
        for order in orders.values():
            self._send_to(known.address, tag, order)

    def _send_to(self, address: m.Address, tag: str, message: cm.StartReplica | fx.Order) -> None:
        failed = partial(self._unreachable, tag, address)
        if isinstance(message, cm.StartReplica):
            self._starts.send(address, message, failed)
        else:
            self._loop.send(address, message, on_failed=failed)

    def _unreachable(self, tag: str, address: m.Address) -> None:
        """Look for the replica anew next time: the admin may have named one that just died."""
        known = self._replicas.get(tag)
        if known is not None and known.process is None and known.address == address:
            known.address = None
