"""The controller as a host process knows it: sought, on this host or another, and beaten to."""

from __future__ import annotations

import asyncio
import ipaddress

from greenroom.actors.cluster.heartbeats import Beater
from greenroom.actors.cluster.leader_lease import LeaderElection
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.actors.runtime.settings import HostSettings, resolved_gates
from greenroom.core.cluster.leader_lease import BEATS_S

LEADING_CONTROLLER = ("greenroom.actors.controller.actor.LeadingController", CONTROLLER[1])
RESOLVE_EVERY_S = 1.0
LISTEN_S = 0.5  # how often to see whether beats are answered


class ControllerSeeker:
    """Follows the controller through its deaths, and to other hosts; on the port's loop.

    Where hosts take turns in leading, the election says whether this one seeks it here, and so
    makes it, or elsewhere. ``on_found`` is called for each new one.
    """

    def __init__(self, port: Port, settings: HostSettings, on_found: Callback) -> None:
        self.hosts: tuple[str, ...] = ()  # addresses of all where this host may lead, else of those
        self._port = port
        self._settings = settings
        self._on_found = on_found
        self._gates = Gates(settings, port.loop)
        self._beater: Beater | None = None
        self._finder: Finder | None = None
        self._seeks_here = False  # which makes it
        self._leader: tuple[str, ...] = ()  # the address of the last other one, as the lease says
        self.election: LeaderElection | None = None
        if settings.may_lead:
            self.election = LeaderElection(port.loop, settings, self._silent_s, self._decided)

    @property
    def found(self) -> tuple[Address, Process] | None:
        """The controller, and None while there is none."""
        return None if self._finder is None else self._finder.found

    @property
    def address(self) -> Address | None:
        """Its address, while there is one."""
        return None if self.found is None else self.found[0]

    @property
    def epoch(self) -> int:
        """The epoch of the controller that was found, 0 where it is not known."""
        return 0 if self._finder is None else self._finder.epoch

    @property
    def leads(self) -> bool:
        """Whether the controller belongs on this host at present."""
        return self._settings.join is None if self.election is None else self.election.leads

    def start(self) -> None:
        """Seek it from now on, and listen whether it answers."""
        if self.election is not None:
            self.election.start()
        else:
            self._seek()
        self._listen()

    def stop(self) -> None:
        """Follow it no more."""
        if self.election is not None:
            self.election.stop()
        if self._finder is not None:
            self._finder.stop()

    def gates(self) -> list[Address]:
        """Return the admins that may know it; none for a host that joins none.

        Of hosts that may lead the last that led, as long as the lease is seen.
        """
        if self.election is None:
            gates = (*self._gates.found(), *self.hosts) if self._settings.gates else ()
        else:
            gates = (*self._leader, *(self.hosts if self.election.unseen else ()))
        others = [each for each in dict.fromkeys(gates) if each != self._settings.own_address]
        return [*map(self._port.loop.machine.address_of, others)]

    def _decided(self) -> None:
        """Seek it where it belongs by now, and a later one where there may be one."""
        election = self.election
        assert election is not None, "which has decided"
        lease = election.seen.lease
        if lease.address not in ("", self._settings.own_address):
            self._leader = (lease.address,)
        if election.leads is not self._seeks_here:
            self._let_go()
        if self._finder is None:
            self._seek()
        if self._finder is not None and election.unseen:
            self._finder.doubt(self.gates())
        elif lease.epoch > self.epoch:  # a former leader that reaches only the hosts still answers
            self._doubt()

    def _seek(self) -> None:
        election, self._seeks_here = self.election, False
        if election is None or not election.leads:
            self._finder = Finder(self._port, CONTROLLER, self._found, gates=self.gates)
        elif election.let_lead():
            self._seeks_here, after = True, election.seen.lease.epoch
            names, found, ended = LEADING_CONTROLLER, self._found, self._ended
            self._finder = Finder(self._port, names, found, ended, after=after)
        if self._finder is not None:
            self._finder.start()

    def _let_go(self) -> None:
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.stop()

    def _ended(self) -> None:
        """Let the next check decide whether there is to be another controller here."""
        assert self.election is not None, "which had it sought here"
        self.election.controller_ended()
        self._let_go()

    def _found(self, address: Address, process: Process) -> None:
        election = self.election
        if election is not None and self._seeks_here and not self._port.loop.is_here(address):
            election.turn(leads=False)  # a later one, while the lease cannot be seen
            self._let_go()
            self._seek()
            return
        self._on_found()
        if self._beater is not None:
            self._beater.close()
        self._beater = Beater(self._port.loop, address, self._port.process.incarnation)

    def _silent_s(self) -> float:
        """Return for how long the controller of another host has not answered beats."""
        return float("inf") if self._beater is None else self._beater.silent_s

    def _listen(self) -> None:
        if self.found is not None and BEATS_S < self._silent_s() < float("inf"):
            self._doubt()
        self._port.loop.call_later(LISTEN_S, self._listen)

    def _doubt(self) -> None:
        """Check whether others know of a later controller than the one that was found."""
        if self._finder is not None and not self._seeks_here:
            self._finder.doubt()


class Gates:
    """The addresses of the hosts that a host joins by, which are resolved again by name.

    The leader may come back with another address, as pods do. To look a name up may take seconds,
    so a thread does it, and only while the leader is sought; the first time this does, which then
    raises StartError for an unknown name, but not on a loop that ``must_not_wait``.
    """

    def __init__(self, settings: HostSettings, loop: Loop, *, must_not_wait: bool = False) -> None:
        self._settings = settings
        self._loop = loop.asyncio
        self._is_by_name = not all(map(_is_address, settings.gates))
        begins_empty = must_not_wait and self._is_by_name
        self._found = [] if begins_empty else resolved_gates(settings)
        self._again_at = self._loop.time() + (0.0 if begins_empty else RESOLVE_EVERY_S)

    def found(self) -> list[str]:
        """Return IP:PORT of each, as last resolved."""
        if self._is_by_name and self._loop.time() >= self._again_at:
            self._again_at = float("inf")
            resolving = self._loop.run_in_executor(None, resolved_gates, self._settings)
            resolving.add_done_callback(self._resolved)
        return self._found

    def _resolved(self, resolving: asyncio.Future[list[str]]) -> None:
        self._again_at = self._loop.time() + RESOLVE_EVERY_S
        if not resolving.cancelled() and resolving.exception() is None:  # else it is not up yet
            self._found = resolving.result()


def _is_address(gate: str) -> bool:
    try:
        ipaddress.ip_address(gate.rpartition(":")[0])
    except ValueError:
        return False
    return True
