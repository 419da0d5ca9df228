"""A proxy's link to the controller: finds it, gets its tables, and sends it heartbeats.

The host process introduces the controller. If it does not, the proxy looks for the controller
itself, as host processes do, because its host process may be dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.actors.cluster.controller_seeker import Gates
from greenroom.actors.cluster.epoch_fence import Following
from greenroom.actors.cluster.heartbeats import Beater
from greenroom.actors.messages.control import Changed, Listen, MeetController
from greenroom.actors.messages.queries import Address, Message, Process
from greenroom.actors.runtime.loop import Loop, Timer, nothing
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.routing.tables import order_of_taking

LISTEN_AGAIN_S = 2.0  # the question, or the update, may be lost
SEEK_AFTER_S = 0.2  # in which a host process that lives introduces the controller


class ControllerLink:
    """Follows one controller; ``met`` is called for each new one."""

    def __init__(
        self, loop: Loop, settings: HostSettings, process: Process, met: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._process = process
        self._met = met
        self._following = Following(loop)
        self._held: set[str] = set()  # the keys of the tables
        self._held_upto = self._following.seen  # what nothing can begin against any more
        self._beater: Beater | None = None
        self._unwatch_host: Callable[[], None] = nothing
        self._finder: Finder | None = None  # while no host process names a controller
        self._port: Port | None = None
        self._timer: Timer = loop.call_later(SEEK_AFTER_S, self.listen)

    @property
    def known(self) -> tuple[Address, Process, int] | None:
        """The controller, and the latest epoch that was heard of."""
        return self._following.known()

    @property
    def seen(self) -> int:
        """Up to which snapshot id the tables are held."""
        return self._following.seen

    def send(self, message: Message) -> bool:
        """Send to the controller; return False while none is known."""
        if self._following.controller is None:
            return False
        self._loop.send(self._following.controller, message)
        return True

    def meet(self, message: MeetController) -> None:
        """Listen to this controller from now on, and beat for this host."""
        if not self._following.meets(message):
            return
        if message.by is not None:
            self.seek_no_more()
            self._unwatch_host()  # a hanging host process is watched so that it can be ended
            self._unwatch_host = self._loop.watch_process(message.by, nothing)
        if self._beater is not None:
            self._beater.close()
        self._beater = Beater(self._loop, message.controller, self._process.incarnation)
        self.listen()
        self._met()

    def take(self, message: Changed, sender: Address) -> list[tuple[str, Any]] | None:
        """Return (key, table) of newer tables, in the order to take them; None for an old one."""
        if not self._following.takes(message, sender):
            return None
        snapshots = dict(message.snapshots)
        if message.complete:
            gone = self._held - snapshots.keys()
            snapshots.update(dict.fromkeys(gone, (message.upto, None)))
        for key, (_, table) in snapshots.items():
            (self._held.discard if table is None else self._held.add)(key)
        self._following.seen = message.upto
        self._held_upto = min(self._held_upto, message.upto)
        return [(key, item[1]) for key, item in sorted(snapshots.items(), key=order_of_taking)]

    def acknowledge(self) -> None:
        """Let the controller know that all tables that have come are held."""
        self._held_upto = self._following.seen
        self.listen()

    def listen(self) -> None:
        """Ask for newer tables, and so report to the controller which ones are held."""
        self._timer.cancel()
        self._timer = self._loop.call_later(LISTEN_AGAIN_S, self.listen)
        if self._following.controller is None:
            self._seek()
            return
        listen = Listen(
            listener=self._process,
            host=self._settings.host_name,
            seen=self._held_upto,
            store=self._following.store,
            at=self._settings.own_address,
        )
        self._loop.send(self._following.controller, listen, on_failed=self._seek)

    def _seek(self) -> None:
        if self._finder is not None:
            return
        settings = self._settings
        self._port = Port(
            settings.admin_port,
            self._process,
            self._loop.asyncio,
            machine=self._loop.machine,
        )
        own = [settings.own_address] if settings.may_lead else []
        given = Gates(settings, self._loop, must_not_wait=True)

        def gates() -> list[Address]:
            return [self._loop.machine.address_of(gate) for gate in (*own, *given.found())]

        self._finder = Finder(self._port, CONTROLLER, self._found, gates=gates)
        self._finder.start()

    def seek_no_more(self) -> None:
        """Stop looking for the controller."""
        if self._finder is not None and self._port is not None:
            self._finder.stop()
            self._port.detach()
            self._finder = self._port = None

    def _found(self, controller: Address, process: Process) -> None:
        if self._finder is not None:
            epoch = self._finder.epoch
            self.meet(MeetController(controller=controller, process=process, by=None, epoch=epoch))
