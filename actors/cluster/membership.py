"""A host's end of its membership in a cluster: reports, orders, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any

from greenroom.actors.cluster.controller_seeker import ControllerSeeker
from greenroom.actors.cluster.epoch_fence import EpochFence
from greenroom.actors.cluster.key_rotation import KeyHolder
from greenroom.actors.messages.admin import request_of
from greenroom.actors.messages.control import (
    HostAnswered,
    HostReported,
    KillReplica,
    MeetController,
)
from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime import draining
from greenroom.actors.runtime.capacity import capacity_of
from greenroom.actors.runtime.port import PROXY, Finder, Port
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings, host_id
from greenroom.core.operations import DrainHost
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0
ASK_TIMEOUT_S = 1.0


class Membership:
    """This host's end of its membership; it introduces the controller to the proxy."""

    def __init__(
        self,
        settings: HostSettings,
        records: RunRecords,
        port: Port,
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self.has_joined = False
        self.refusal = ""  # why the controller does not let this host join
        self.controller = ControllerSeeker(port, settings, self._found)
        self.proxy = Finder(port, PROXY, lambda *_: self._found())
        self.obeys = EpochFence(port.loop).accepts
        self._settings = settings
        self._records = records
        self._port = port
        self._describe = describe
        self._keys = KeyHolder(settings, port, self.report, self.obeys)
        self._constant: dict[str, Any] = {
            "host": settings.host_name,
            "process": port.process,
            "id": host_id(settings),
            "address": settings.own_address,
            "capacity": capacity_of(settings),
            "labels": dict(settings.labels),
            "may_lead": settings.may_lead,
        }
        self._has_left = False
        self._answer_arrived = asyncio.Event()  # by an answer to a report
        port.on(HostAnswered, self._answered)
        port.on(KillReplica, self._kill)

    def begin(self) -> None:
        """Look for controller and proxy, and go on reporting."""
        self.controller.start()
        self.proxy.start()
        self._report_again()

    def stop(self) -> None:
        """Follow controller and proxy no more."""
        self.controller.stop()
        self.proxy.stop()

    def obstacle(self) -> tuple[str, bool]:
        """Return why this host will not join or lead, "" while it may; and whether that lasts."""
        election = self.controller.election
        if election is not None and election.refusal:
            return election.refusal, True
        reason, lasts = self.refusal, False
        gates = self.controller.gates() if self._settings.gates else []
        if gates and self.controller.found is None:
            reason, is_refusal = self._port.trouble(gates[0])
            lasts = is_refusal and len(self._settings.gates) == 1
        return reason and f"cannot join {self.others}: {reason}", lasts

    @property
    def others(self) -> str:
        """Which hosts this one joins, as a message names them."""
        if self._settings.may_lead:
            return f"the hosts that share {location_at(self._settings.store_name)}"
        return ", ".join(self._settings.gates)

    def _found(self) -> None:
        """Introduce the controller to the proxy, and report to it, from now on."""
        if self.controller.found is not None and self.proxy.found is not None:
            address, process = self.controller.found
            meet = MeetController(
                controller=address,
                process=process,
                by=self._port.process,
                epoch=self.controller.epoch,
            )
            self._port.loop.send(self.proxy.found[0], meet)
        self.report()

    def report(self) -> None:
        """Tell the controller what this host is, and what runs here."""
        if self.controller.address is None or self._has_left:
            return
        replicas = self._records.details("replica")
        report = HostReported(
            **self._constant,
            replicas=tuple((each["tag"], each["address"]) for each in replicas if "tag" in each),
            report=self._describe(),
            keys=self._keys.ids(),
        )
        self._port.loop.send(self.controller.address, report)

    async def ask(self) -> None:
        """Report, and wait for the answer, but not for long."""
        self._answer_arrived.clear()
        self.report()
        if self.controller.address is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answer_arrived.wait(), ASK_TIMEOUT_S)

    async def drain(self, timeout_s: float, *, leave: bool) -> bool:
        """Ask for replacements elsewhere; return whether that was answered in time.

        Nothing happens where no controller is known, or where this host's name is another's.
        """
        if self.controller.address is None or self.refusal:
            return False
        self.report()  # that it is stopping, so that this counts until then alone
        request_id = f"{self._port.process.incarnation}-{'leave' if leave else 'drain'}"
        operation = DrainHost(host=self._settings.host_name, leave=leave)
        request = request_of(operation, request_id)
        self._has_left = leave
        return await self._port.ask(lambda: self.controller.address, request, timeout_s) is not None

    def _report_again(self) -> None:
        self.report()
        self._port.loop.call_later(REPORT_EVERY_S, self._report_again)

    def _answered(self, message: HostAnswered, sender: Address) -> None:
        if not self.obeys(message.epoch, sender):
            return
        if message.refusal and message.refusal != self.refusal:
            logger.error("cannot join %s: %s", self.others, message.refusal)
        self.refusal, self.has_joined = message.refusal, not message.refusal
        self.controller.hosts = message.hosts
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
