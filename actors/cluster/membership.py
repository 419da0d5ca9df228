"""A host's end of its membership in a cluster: who leads it, reports, beats, orders, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
from collections.abc import Callable
from typing import Any

from greenroom.actors.cluster.epoch_fence import EpochFence
from greenroom.actors.cluster.heartbeats import Beater
from greenroom.actors.cluster.key_rotation import KeyHolder
from greenroom.actors.cluster.leader_lease import LeaderElection
from greenroom.actors.messages.admin import request_of
from greenroom.actors.messages.control import HostAnswered, HostReported, KillReplica
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime import draining
from greenroom.actors.runtime.capacity import capacity_of
from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings, host_id, resolved_gates
from greenroom.core.cluster.leader_lease import BEATS_S
from greenroom.core.operations import DrainHost
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0
RESOLVE_EVERY_S = 1.0
ASK_TIMEOUT_S = 1.0
LISTEN_S = 0.5  # how often to see whether beats are answered


class Membership:
    """This host's end of its membership."""

    def __init__(
        self,
        settings: HostSettings,
        records: RunRecords,
        port: Port,
        describe: Callable[[], dict[str, Any]],
        on_found: Callback,
    ) -> None:
        self.has_joined = False
        self.refusal = ""  # why the controller does not let this host join
        self.hosts: tuple[str, ...] = ()  # addresses of all where this host may lead, else of those
        self._settings = settings
        self._records = records
        self._port = port
        self._describe = describe
        self._id = host_id(settings)
        self._keys = KeyHolder(settings, port, self.report)
        self._capacity = capacity_of(settings)
        self._on_found = on_found
        self._gates = Gates(settings, port.loop)
        self._election: LeaderElection | None = None
        if settings.may_lead:
            self._election = LeaderElection(
                port, settings, self._found, self.silent_s, lambda: self.hosts
            )
        self.controller = self._election or Finder(
            port, CONTROLLER, self._found, gates=self._may_know
        )
        self._beater: Beater | None = None
        self._has_left = False
        self._answer_arrived = asyncio.Event()  # by an answer to a report
        self.obeys = EpochFence(port.loop).accepts
        port.on(HostAnswered, self._answered)
        port.on(KillReplica, self._kill)

    def begin(self) -> None:
        """Look for the controller, and go on reporting to it and listening."""
        self.controller.start()
        self._report_again()
        self._listen()

    @property
    def leads(self) -> bool:
        """Whether the controller belongs on this host at present."""
        return self._settings.join is None if self._election is None else self._election.leads

    @property
    def store_trouble(self) -> str:
        """Why this host, which may lead, cannot use the store; "" where nothing is known."""
        return "" if self._election is None else self._election.trouble

    def obstacle(self) -> tuple[str, bool]:
        """Return why this host will not join or lead, "" while it may; and whether that lasts."""
        if self._election is not None and self._election.refusal:
            return self._election.refusal, True
        reason, lasts = self.refusal, False
        gates = self._may_know()
        if gates and self._address is None:
            reason, is_refusal = self._port.trouble(gates[0])
            lasts = is_refusal and len(self._settings.gates) == 1
        return reason and f"cannot join {self.others}: {reason}", lasts

    @property
    def others(self) -> str:
        """Which hosts this one joins, as a message names them."""
        if self._settings.may_lead:
            return f"the hosts that share {location_at(self._settings.store_name)}"
        return ", ".join(self._settings.gates)

    @property
    def _address(self) -> Address | None:
        """The controller's address, while there is one."""
        return None if self.controller.found is None else self.controller.found[0]

    def _may_know(self) -> list[Address]:
        """Return the admins that may know the controller; none for a host that joins none."""
        every = dict.fromkeys((*self._gates.found(), *self.hosts)) if self._settings.gates else ()
        return [self._port.loop.machine.address_of(gate) for gate in every]

    def _found(self, address: Address, _process: Process) -> None:
        """Report and beat to this controller from now on."""
        self._on_found()
        self.report()
        if self._beater is not None:
            self._beater.close()
        self._beater = Beater(self._port.loop, address, self._port.process.incarnation)

    def silent_s(self) -> float:
        """Return for how long the controller of another host has not answered beats."""
        return float("inf") if self._beater is None else self._beater.silent_s

    def _listen(self) -> None:
        if self._address is not None and BEATS_S < self.silent_s() < float("inf"):
            self.controller.doubt()
        self._port.loop.call_later(LISTEN_S, self._listen)

    def report(self) -> None:
        """Tell the controller what this host is, and what runs here."""
        if self._address is None or self._has_left:
            return
        replicas = self._records.details("replica")
        report = HostReported(
            host=self._settings.host_name,
            process=self._port.process,
            id=self._id,
            address=self._settings.own_address,
            capacity=self._capacity,
            labels=dict(self._settings.labels),
            replicas=tuple((each["tag"], each["address"]) for each in replicas if "tag" in each),
            report=self._describe(),
            keys=self._keys.ids(),
            may_lead=self._settings.may_lead,
        )
        self._port.loop.send(self._address, report)

    async def ask(self) -> None:
        """Report, and wait for the answer, but not for long."""
        self._answer_arrived.clear()
        self.report()
        if self._address is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answer_arrived.wait(), ASK_TIMEOUT_S)

    async def drain(self, timeout_s: float, *, leave: bool) -> bool:
        """Ask for replacements elsewhere; return whether that was answered in time.

        Nothing happens where no controller is known, or where this host's name is another's.
        """
        if self._address is None or self.refusal:
            return False
        self.report()  # that it is stopping, so that this counts until then alone
        request_id = f"{self._port.process.incarnation}-{'leave' if leave else 'drain'}"
        operation = DrainHost(host=self._settings.host_name, leave=leave)
        request = request_of(operation, request_id)
        self._has_left = leave
        return await self._port.ask(lambda: self._address, request, timeout_s) is not None

    def _report_again(self) -> None:
        self.report()
        self._port.loop.call_later(REPORT_EVERY_S, self._report_again)

    def _answered(self, message: HostAnswered, sender: Address) -> None:
        if not self.obeys(message.epoch, sender):
            return
        if message.refusal and message.refusal != self.refusal:
            logger.error("cannot join %s: %s", self.others, message.refusal)
        self.refusal, self.has_joined = message.refusal, not message.refusal
        self.hosts = message.hosts
        self._answer_arrived.set()
        try:
            draining.record_drain_s(self._settings, message.drain_s)
        except OSError as error:
            logger.warning("the time limit of a stop is not kept: %s", error)

    def _kill(self, message: KillReplica, sender: Address) -> None:
        process = message.process
        if self.obeys(message.epoch, sender) and process in self._records.with_role("replica"):
            logger.warning("killing replica process %d, as the controller asks", process.pid)
            self._port.loop.machine.send_signal(process, signal.SIGKILL)


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
