"""The replicas of a cluster as processes: where they are, and the orders of the core for them."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.actors.cluster.members import Members
from greenroom.actors.host.records import RunRecords
from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.replica.user_code import lost_code
from greenroom.actors.runtime.loop import Loop, Repeats
from greenroom.core import effects as fx
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.config import config_of_replica
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import StoreError, StoreNotReadableError

logger = logging.getLogger(__name__)

READ_AGAIN_S = 1.0  # code that a file system does not give at present


KEPT_GONE = 50  # replicas that are gone, before they are looked for


class Supervisor:
    """Performs the core's effects, and tells the core what becomes of the replicas.

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
        self._addresses: dict[str, m.Address] = {}  # where to send to, also before the first report
        self._processes: dict[str, m.Process] = {}
        self._hosts: dict[str, str] = {}  # by tag, of those that were asked for
        self._unwatch: dict[str, Callable[[], None]] = {}
        self._shown: dict[str, tuple[m.Process, str]] = {}  # what the log has of each replica
        self._code: tuple[str, bytes] = ("", b"")  # the code last read
        self._starts = Repeats(loop)
        self._perform: dict[type[fx.Effect], Callable[[Any], None]] = {
            fx.Start: self._start,
            fx.Reconfigure: self._reconfigure,
            fx.Check: self._check,
            fx.Stop: self._stop,
            fx.Kill: self._kill,
        }

    # --- What is observed -----------------------------------------------------------------------

    def reported(self, message: cm.ReplicaReported, sender: m.Address) -> None:
        """Take a replica's report; tell the replica to go if it is not wanted."""
        tag, process = message.replica, message.process
        if tag and self._processes.get(tag) != process:
            self._addresses[tag] = sender
            self._processes[tag] = process
            self._unwatch.pop(tag, lambda: None)()
            self._unwatch[tag] = self._loop.watch_process(
                process,
                lambda: self._exited(tag, process),
                sender,
                on_unreachable=lambda: None,  # whether its host is lost is judged by other signs
            )
        self._log(message)
        known = self._cluster.replica_reported(
            tag,
            time.monotonic(),
            state=message.state,
            address=message.queries_at,
            process=process,
            config_id=message.config_id,
            check_id=message.check_id,
            ongoing=message.ongoing,
            error=message.error,
            exception=message.exception,
            trouble=message.trouble,
            lasts=message.lasts,
            stats=message.stats,
        )
        if not known and message.state != "draining":
            self._loop.send(sender, cm.StopReplica(replica=tag, drain_s=0.0, epoch=self._epoch))
        self._changed()

    def _log(self, message: cm.ReplicaReported) -> None:
        """Log a replica's start, or why it could not: once, as reports are repeated."""
        tag, process = message.replica, message.process
        if not tag or self._shown.get(tag) == (process, message.state):
            return
        self._shown[tag] = (process, message.state)
        if message.state == "running":
            logger.info("replica %s (pid %d) runs", tag, process.pid)
        elif message.state == "failed":
            reason = message.error.strip().rpartition("\n")[2]
            logger.error("replica %s (pid %d) could not start: %s", tag, process.pid, reason)

    def child_exited(self, address: m.Address) -> None:
        """Take note of a replica that ended before it reported; the others are watched by pid."""
        for tag, known in list(self._addresses.items()):
            if known == address and tag not in self._processes:
                del self._addresses[tag]
                self._cluster.replica_exited(tag, time.monotonic())
                self._changed()

    def lost(self, message: cm.ReplicaLost) -> None:
        """Kill a replica that a proxy gave up: gone, or so stuck that it takes no message."""
        process = self._processes.get(message.replica)
        if process is not None and process.incarnation == message.incarnation:
            self._end(message.replica, process)  # its exit is what counts

    def _exited(self, tag: str, process: m.Process) -> None:
        if self._processes.get(tag) != process:
            return
        logger.info("replica %s (pid %d) is gone", tag, process.pid)
        self._unwatch.pop(tag, lambda: None)()
        del self._processes[tag], self._addresses[tag]
        self._shown.pop(tag, None)
        if self._is_here(tag):
            self._records.remove(process)
        if not self._stopping:
            self._cluster.replica_exited(tag, time.monotonic())
        self._changed()

    # --- The end of the system ------------------------------------------------------------------

    def stop_all(self) -> None:
        """Make all replicas drain and exit, without a word to the core: they are to come back."""
        self._stopping = True
        for tag, address in self._addresses.items():
            backend = self._cluster.backend_of(tag)
            drain_s = backend.config.graceful_shutdown_timeout_s if backend else 0.0
            if self._is_here(tag):  # what is on other hosts goes on
                self._loop.send(
                    address, cm.StopReplica(replica=tag, drain_s=drain_s, epoch=self._epoch)
                )

    def any_alive(self) -> bool:
        """Return whether the process of any replica of this host is still there."""
        return any(
            self._loop.machine.is_alive(each)
            for tag, each in self._processes.items()
            if self._is_here(tag)
        )

    def _is_here(self, tag: str) -> bool:
        return self._members.is_here(self._host_of(tag))

    def _host_of(self, tag: str) -> str:
        backend = self._cluster.backend_of(tag)
        return self._hosts.get(tag, "") if backend is None else backend.host_of(tag)

    # --- Effects --------------------------------------------------------------------------------

    def perform(self, effect: fx.Effect) -> None:
        """Do what the core asks for; what it rests on is saved."""
        self._perform[type(effect)](effect)

    def _forget_gone(self) -> None:
        """Forget replicas of before, some of which were never heard of, nor of their end."""
        if len(self._hosts) > 2 * len(self._processes) + KEPT_GONE:
            for tag in list(self._hosts):
                if tag not in self._processes and self._cluster.backend_of(tag) is None:
                    del self._hosts[tag]
                    self._addresses.pop(tag, None)

    def _start(self, effect: fx.Start) -> None:
        self._forget_gone()
        backend = self._cluster.backends.get(effect.backend)
        if backend is None or effect.replica not in backend.replicas:
            return  # it is not wanted any more, since its code could not be read
        record, release = backend.record, backend.release_of(effect.replica)
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
                rank=self._rank_of(effect.replica),
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

    def _reconfigure(self, effect: fx.Reconfigure) -> None:
        newest = self._cluster.backends[effect.backend].record.newest
        order = cm.ReconfigureReplica(
            replica=effect.replica,
            config=config_of_replica(newest.config),
            config_id=newest.config_id,
            epoch=self._epoch,
        )
        self._send(effect.replica, order)

    def _check(self, effect: fx.Check) -> None:
        rank = self._rank_of(effect.replica)
        order = cm.CheckReplica(**effect._asdict(), rank=rank, epoch=self._epoch)
        self._send(effect.replica, order)

    def _rank_of(self, tag: str) -> tuple[int, int, int, int] | None:
        backend = self._cluster.backend_of(tag)
        replica = None if backend is None else backend.replicas.get(tag)
        rank = None if replica is None else replica.known_rank
        return None if rank is None else (rank[0], rank[1], rank[2], rank[3])

    def _stop(self, effect: fx.Stop) -> None:
        self._send(effect.replica, cm.StopReplica(**effect._asdict(), epoch=self._epoch))

    def _kill(self, effect: fx.Kill) -> None:
        process = self._processes.get(effect.replica)
        if process is not None:
            logger.warning("killing replica %s (pid %d)", effect.replica, process.pid)
            self._end(effect.replica, process)
        else:  # it has not reported to this controller; it will when it hears this
            self._stop(fx.Stop(effect.replica, 0.0))

    def _end(self, tag: str, process: m.Process) -> None:
        if self._is_here(tag):
            self._loop.machine.send_signal(process, signal.SIGKILL)
        else:
            self._members.kill(process, self._host_of(tag))

    def _send(self, tag: str, message: m.Message) -> None:
        if tag in self._addresses:
            self._send_to(self._addresses[tag], tag, message)
            return
        host = self._hosts[tag] = self._host_of(tag)
        if self._members.is_here(host):
            self._addresses[tag] = self._find(tag)
            self._send_to(self._addresses[tag], tag, message)
        else:
            self._members.locate(tag, host, lambda address: self._located(tag, address, message))

    def _located(self, tag: str, address: m.Address, message: m.Message) -> None:
        self._send_to(self._addresses.setdefault(tag, address), tag, message)

    def _send_to(self, address: m.Address, tag: str, message: m.Message) -> None:
        failed = partial(self._unreachable, tag, address)
        if isinstance(message, cm.StartReplica):
            self._starts.send(tag, address, message, failed)
        else:
            self._loop.send(address, message, on_failed=failed)

    def _unreachable(self, tag: str, address: m.Address) -> None:
        """Look for the replica anew next time: the admin may have named one that just died."""
        if tag not in self._processes and self._addresses.get(tag) == address:
            del self._addresses[tag]
