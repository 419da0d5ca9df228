"""Replacing the cluster file: the controller's end, and each host's.

core/cluster/key_rotation.py has the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from greenroom.actors.messages.control import HoldKeys
from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport.cluster_key import ClusterKeyError, KeyFiles, ensure_key
from greenroom.actors.transport.other_hosts import KEY_CHECK_S
from greenroom.core.cluster.hosts import Host, Hosts, HostState
from greenroom.core.cluster.key_rotation import KeyIds, next_step
from greenroom.core.errors import GreenroomError

logger = logging.getLogger(__name__)

UNKNOWN = KeyIds("")


class KeyRotation:
    """The controller's end; its state is its host's files, and what hosts report."""

    def __init__(self, loop: Loop, hosts: Hosts, settings: HostSettings, epoch: int) -> None:
        self._loop = loop
        self._hosts = hosts
        self._epoch = epoch
        self._path = settings.cluster_key
        self._files: KeyFiles | None = None  # read when there is another host, or a rotation
        self._begun_by = ""  # id of the request
        self._done_at: float | None = None  # since when all that run hold one key

    def begin(self, request_id: str) -> None:
        """Begin a rotation, or join the one under way; a repeat of a request begins no other."""
        if request_id != self._begun_by:
            try:
                ensure_key(self._path)  # a host that is not bound need not have one
                self._opened().begin()
            except ClusterKeyError as error:
                raise GreenroomError(str(error)) from None
            self._begun_by, self._done_at = request_id, None
        self._advance()

    def rotated(self) -> dict[str, list[str]] | None:
        """Return which hosts have the new key once all that run hold it, and take no other.

        Connections that were made with an earlier key are closed within KEY_CHECK_S. Until then an
        evicted host could use one, and would be on record again.
        """
        own = self._opened().ids()
        counted = self._counted()
        if own != KeyIds(own.current) or any(_held_by(each) != own for each in counted):
            self._done_at = None
            return None
        now = self._loop.machine.monotonic()
        self._done_at = self._done_at or now
        if now < self._done_at + KEY_CHECK_S:
            return None
        names = sorted(each.name for each in counted)
        away = sorted(self._hosts.records.keys() - {*names})
        return {"hosts": [self._hosts.own.name, *names], "away": away}

    def reported(self, host: str) -> None:
        """Ask a host that has reported to hold what this one does."""
        if host == self._hosts.own.name and self._files is None:
            return  # there is no other host, and no rotation
        if not self._advance():
            self._send(host)

    def _opened(self) -> KeyFiles:
        if self._files is None:
            self._files = KeyFiles(self._path)
        return self._files

    def _counted(self) -> list[Host]:
        """Return the other hosts to wait for: all that are not lost."""
        others = map(self._hosts.all.__getitem__, self._hosts.records)
        return [each for each in others if each.state is not HostState.LOST]

    def _advance(self) -> bool:
        """Take the steps that can be taken; send them to all hosts, and return True, if any was."""
        files, took = self._opened(), False
        try:
            while (wanted := self._next()) != (own := files.ids()):
                logger.info("the cluster file: %s follows %s", wanted, own)
                files.hold(wanted)
                took = True
        except ClusterKeyError as error:  # it is tried again with the next report
            logger.error("%s; the cluster file stays as it is", error)  # noqa: TRY400  # no bug
        if took:
            for host in self._hosts.records:
                self._send(host)
        return took

    def _next(self) -> KeyIds:
        return next_step(self._opened().ids(), [*map(_held_by, self._counted())])

    def _send(self, name: str) -> None:
        files, own = self._opened(), self._opened().ids()
        host = self._hosts.all[name]
        if host is not self._hosts.own and host.said is not None and _held_by(host) != own:
            order = HoldKeys(keys=own, files=tuple(files()), epoch=self._epoch)
            self._loop.send(host.at, order)


def _held_by(host: Host) -> KeyIds:
    return UNKNOWN if host.said is None else KeyIds(*host.said.keys)


class KeyHolder:
    """A host's end, in its host process, on the port's thread."""

    def __init__(
        self,
        settings: HostSettings,
        port: Port,
        report: Callback,
        obeys: Callable[[int, Address], bool],
    ) -> None:
        self._obeys = obeys
        self._path = settings.cluster_key
        self._files: KeyFiles | None = None
        self._report = report
        port.on(HoldKeys, self._hold)

    def ids(self) -> KeyIds:
        """Return what this host holds; a host that is not bound may hold nothing."""
        if self._files is None and self._path.exists():
            self._files = KeyFiles(self._path)
        return UNKNOWN if self._files is None else self._files.ids()

    def _hold(self, message: HoldKeys, controller: Address) -> None:
        wanted = KeyIds(*message.keys)
        is_news = self._obeys(message.epoch, controller) and self.ids() != wanted
        if not is_news or self._files is None:
            return
        try:
            self._files.hold(wanted, message.files)
        except ClusterKeyError as error:
            logger.error("%s; the file that is there stays in use", error)  # noqa: TRY400  # no bug
        else:
            self._report()
