"""The lease by which one of several hosts leads: the controller's end of it, and the bids for it.

core/cluster/leader_lease.py has the rules. When a host process decides that its host should lead
(election.py), it writes down the epoch and the renewal that it saw. The controller takes the store
over only if both are unchanged, so a leader that was only slow, and has renewed meanwhile, goes on.
From then on the controller does nothing while its term may be over, and ends when the store refuses
a renewal.

A *bid* is a note in the store that the hosts share, so it reaches even a leader that no message
reaches. It contains the number of other hosts whose proxies have answered lately. They are asked
only while there is a bid.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # its own class until 3.11
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.port import PROXY, Port
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import write_private
from greenroom.core.cluster.leader_lease import OVER_S, RENEW_S, Bid, Contest, Lease, Tenure
from greenroom.core.formats import fit
from greenroom.persistence.kv import LeasedStore, StaleWriterError, StoreError, StoreLocation
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

NOBODY_ELSE_S = 10.0  # longer than another host would take to lead
STEPPED_DOWN = 0  # the exit status: nothing is wrong with this process
ASK_S = 0.5
HEARD_S = 2.0  # since a host has answered: it is reached
GIVE_UP_S = 2.0  # that giving the lease up may take


class Bidding:
    """What this host bids; all but ``write`` and ``withdraw`` on the port's loop."""

    def __init__(self, port: Port, settings: HostSettings) -> None:
        self._port = port
        self._host = settings.host_name
        self._own = settings.own_address
        self._location = location_at(settings.store_name)
        self._number = 0
        self._is_written = False
        self._asked: dict[str, float] = {}  # since when a host owes an answer
        self._answered: dict[str, float] = {}

    def bid(self, hosts: Iterable[str], leader: str) -> Bid | None:
        """Ask hosts, by address, whether they can be reached; return what is known of that.

        None where the leader is one of those that can: then its beats are what fails.
        """
        now = time.monotonic()
        for host in {*hosts, leader} - {self._own}:
            since = max(self._asked.get(host, 0.0), self._answered.get(host, 0.0))
            if now - since > (HEARD_S if host in self._asked else ASK_S):
                self._asked[host] = now
                self._ask(host)
        reached = {host for host, at in self._answered.items() if now - at <= HEARD_S}
        self._number += 1
        return None if leader in reached else Bid(self._number, len(reached))

    def write(self, bid: Bid) -> None:
        """Show a bid to the leader; raises OSError or StoreError. Blocks."""
        self._location.note(self._host, json.dumps(bid))
        self._is_written = True

    def withdraw(self) -> None:
        """Bid no more; raises OSError or StoreError. Blocks."""
        if self._is_written:
            self._location.note(self._host, "")
            self._is_written = False

    def _ask(self, host: str) -> None:
        def located(proxy: Address | None) -> None:
            if proxy is None:
                self._asked.pop(host, None)
            else:
                self._port.ask_proxy(proxy, "controller", partial(self._heard, host))

        self._port.locate(*PROXY, located, self._port.loop.machine.address_of(host))

    def _heard(self, host: str, _known: Any) -> None:
        self._asked.pop(host, None)
        self._answered[host] = time.monotonic()


def read_bids(location: StoreLocation) -> dict[str, Bid]:
    """Return all bids, by host; one that cannot be read is none. Blocks."""
    bids = {}
    with contextlib.suppress(OSError, StoreError):
        for host, note in location.notes().items():
            with contextlib.suppress(ValueError, TypeError):
                bids[host] = fit(Bid, json.loads(note))
    return bids


class SeenLease(NamedTuple):
    """The lease in the store, its bytes there, and whether it is over by the store's clock."""

    lease: Lease
    written: bytes
    is_over: bool | None = None


def read_lease(location: StoreLocation) -> SeenLease:
    """Return the lease in the store; raises StoreError. Blocks."""
    epoch, _, written, is_over = location.look()
    lease = json.loads(written) if written else {}
    if lease.get("epoch") != epoch:  # taken over, and not renewed yet
        return SeenLease(Lease(epoch), written, is_over)
    own = {name: lease[name] for name in Lease._fields if name in lease}  # of any release
    return SeenLease(Lease(**own), written, is_over)


def note_store(settings: HostSettings, location: StoreLocation) -> None:
    """Remember that there is a state in this store; raises OSError. Blocks."""
    if not is_known(settings, location):
        write_private(settings.known_store_file, str(location))


def is_known(settings: HostSettings, location: StoreLocation) -> bool:
    """Return whether this host has seen a state in this store. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        return settings.known_store_file.read_text(encoding="utf-8") == str(location)
    return False


def word_file(settings: HostSettings) -> Path:
    """Return the file with the epoch and the lease that this host's controller may follow on."""
    return settings.run_dir / "leads.from"


def leave_word(settings: HostSettings, seen: SeenLease) -> None:
    """Let this host's controller take the store over, if nothing has happened since; OSError."""
    word = f"{seen.lease.epoch}\n{seen.written.decode()}"
    write_private(word_file(settings), word)


class LeaderLease:
    """The lease of one controller, from ``open`` to the end of its process."""

    def __init__(self, settings: HostSettings, loop: Loop) -> None:
        self._settings = settings
        self._loop = loop
        self._tenure = Tenure()
        self._contest = Contest(time.monotonic())
        self._lease = Lease()
        self._location = location_at(settings.store_name)
        self._apart: ThreadPoolExecutor | None = None  # where the store renews apart
        self._is_given_up = False
        self._trouble: tuple[float, str] | None = None  # since when it cannot be written, and why
        self.former = Lease()  # of who led before
        self.reach: Callable[[], tuple[int, int]] = lambda: (0, 0)  # see Members.reach

    def open(self) -> LeasedStore:
        """Take the store over, or end this process. Raises StoreError."""
        self.former = read_lease(self._location).lease
        try:
            after, _, lease = word_file(self._settings).read_text(encoding="utf-8").partition("\n")
            self._store = self._location.open(after=int(after), lease=lease.encode())
        except FileNotFoundError:
            self._step_down("this host has not been told to lead")
        except StaleWriterError as error:
            self._step_down(str(error))
        self._lease = Lease(
            self._store.epoch, self._settings.host_name, address=self._settings.own_address
        )
        self.renew()
        if self._store.renews_apart:
            self._apart = ThreadPoolExecutor(1, "greenroom-lease")
        self._loop.call_later(RENEW_S, self._renew_again)
        return self._store

    def may_act(self) -> bool:
        """Return whether this controller may act; where another one does, its process ends."""
        if self._tenure.is_over(time.monotonic()) and self._apart is None:
            self.renew()
        return not self._tenure.is_over(time.monotonic())

    def is_confirmed(self) -> bool:
        """Return whether the store takes this controller for the last one; may block for a fsync.

        Where it renews apart, a renewal that was accepted lately says so.
        """
        return self.renew() if self._apart is None else self.may_act()

    def trouble(self) -> str:
        """Return why nothing can be done, where no other host takes over either; else ""."""
        if self._trouble is None or time.monotonic() - self._trouble[0] < NOBODY_ELSE_S:
            return ""
        return f"nothing can be changed, or looked up, at present: {self._trouble[1]}"

    def renew(self) -> bool:
        """Renew the lease, or end this process where that is refused. Blocks for a fsync."""
        if self._is_given_up:
            return False
        begun_at = time.monotonic()
        self._lease = self._lease._replace(number=self._lease.number + 1)
        has_renewed = self._write()
        if has_renewed:
            self._tenure.renewed(begun_at)
        return has_renewed

    def abandon(self) -> None:
        """Neither act nor renew any more: the store is not the one that was led from."""
        self._is_given_up = True
        self._tenure.end()

    def give_up(self, heir: str, *, leaves: bool) -> None:
        """Let another host lead, and act no more; ``leaves`` where this one is being stopped."""
        logger.warning("this controller gives the lease up for host %s", heir)
        self._is_given_up = True
        self._tenure.end()
        self._lease = self._lease._replace(heir=heir, leaves=leaves)
        if self._apart is None:
            self._write()  # where that fails, the others see it end
        else:  # after the renewal that may be under way, which it must not come before
            with contextlib.suppress(FutureTimeoutError, StoreError):
                self._apart.submit(self._store.renew, self._written(), 0.0).result(GIVE_UP_S)

    def _write(self) -> bool:
        return self._has_written(lambda: self._store.renew(self._written(), OVER_S))

    def _written(self) -> bytes:
        return json.dumps(self._lease._asdict()).encode()

    def _has_written(self, outcome: Callable[[], None]) -> bool:
        """Take what became of a renewal: ``outcome`` raises its error."""
        try:
            outcome()
        except StaleWriterError as error:
            self._step_down(str(error))
        except StoreError as error:
            if self._trouble is None:
                logger.exception("the lease could not be written")
            since = time.monotonic() if self._trouble is None else self._trouble[0]
            self._trouble = (since, str(error))
            return False
        if self._trouble is not None:
            logger.warning("the lease could be written again")
        self._trouble = None
        return True

    def _renew_again(self) -> None:
        reach, known = self.reach()
        if self._apart is None:
            self.renew()
            self._give_way({} if reach == known else read_bids(self._location))
            self._loop.call_later(RENEW_S, self._renew_again)
        elif not self._is_given_up:
            begun_at = time.monotonic()
            self._lease = self._lease._replace(number=self._lease.number + 1)
            renewing = self._apart.submit(self._renew_apart, self._written(), reach < known)
            renewing.add_done_callback(
                lambda done: self._loop.post(partial(self._renewed, begun_at, done))
            )

    def _renew_apart(self, written: bytes, is_alone: bool) -> dict[str, Bid]:
        self._store.renew(written, OVER_S)
        return read_bids(self._location) if is_alone else {}

    def _renewed(self, begun_at: float, done: Future[dict[str, Bid]]) -> None:
        bids: dict[str, Bid] = {}
        if self._has_written(lambda: bids.update(done.result())):
            if not self._is_given_up:
                self._tenure.renewed(begun_at)
            self._give_way(bids)
        took_s = time.monotonic() - begun_at
        self._loop.call_later(max(RENEW_S - took_s, 0.0), self._renew_again)

    def _give_way(self, bids: dict[str, Bid]) -> None:
        reach, known = self.reach()
        if reach < known and not self._is_given_up:
            heir = self._contest.heir(bids, reach, time.monotonic())
            if heir:
                self.give_up(heir, leaves=False)
                self._step_down(f"host {heir} reaches more than {reach} of {known} other hosts")

    def _step_down(self, reason: str) -> None:
        logger.warning("this controller steps down: %s", reason)
        os._exit(STEPPED_DOWN)
