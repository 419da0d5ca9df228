"""Leader election on a host that may lead: it makes a controller, or follows another host's.

Theory of operation. A thread reads the lease in the store, because a file system that hangs must
not stop the host process. After each look, core/cluster/leader_lease.py decides:

    this host    what it does
    leads        writes down the lease that it saw (leader_lease.py), and asks its admin for the
                 controller; when that ends, the next look decides again
    follows      looks for the controller on the other hosts that may lead; bids for the lease
                 while that does not answer

A host that cannot see the lease asks all hosts that it knows of. Where one that led finds a later
controller, it follows that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from greenroom.actors.cluster.leader_lease import (
    Bidding,
    SeenLease,
    is_known,
    leave_word,
    note_store,
    read_lease,
)
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.cluster.leader_lease import BEATS_S, LOOK_S, Bid, Lease, Succession
from greenroom.persistence.kv import StoreError
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

LEADING_CONTROLLER = ("greenroom.actors.controller.actor.LeadingController", CONTROLLER[1])
ELSEWHERE_S = 0.5  # how often to ask the hosts for a later controller


class LeaderElection:
    """Finds or makes the controller, with the interface of a Finder; on the port's loop."""

    def __init__(
        self,
        port: Port,
        settings: HostSettings,
        on_found: Callable[[Address, Process], None],
        on_lost: Callable[[], None],
        silent_s: Callable[[], float],
        hosts: Callable[[], Iterable[str]],
    ) -> None:
        self._port = port
        self._settings = settings
        self._on_found = on_found
        self._on_lost = on_lost
        self._silent_s = silent_s
        self._hosts = hosts  # the addresses of all others that were heard of
        self._location = location_at(settings.store_name)
        self._succession = Succession(settings.host_name)
        self._bidding = Bidding(port, settings)
        self._bid: Bid | None = None
        self._seen = SeenLease(Lease(), b"")
        self._leader: tuple[str, ...] = ()  # its address, as the lease says
        self._finder: Finder | None = None
        self._elsewhere: Finder | None = None  # of a later controller, while this host is to lead
        self._stopped = threading.Event()
        self._ended_at = float("-inf")  # when the last controller here did
        self._trouble = ""  # why word could not be left
        self._unseen = ""  # why the lease could not be seen
        self.refusal = ""  # why this host begins nothing where there is no state
        self.leads = False

    @property
    def found(self) -> tuple[Address, Process] | None:
        """The controller, and None while there is none."""
        return None if self._finder is None else self._finder.found

    @property
    def epoch(self) -> int:
        """The epoch of the controller that was found, 0 where it is not known."""
        return 0 if self._finder is None else self._finder.epoch

    @property
    def never_led(self) -> bool:
        """Whether there never was a leader in this store, as far as is known."""
        return self._succession.seen.epoch == 0

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._watch, name="greenroom-lease", daemon=True).start()

    def stop(self) -> None:
        """Decide nothing any more; from any thread."""
        self._stopped.set()
        for finder in (self._finder, self._elsewhere):
            if finder is not None:
                finder.stop()

    def doubt(self) -> None:
        """Look whether others know of a later controller than the one that was found."""
        if self._finder is not None and not self.leads:
            self._finder.doubt()

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        begun_at = time.monotonic()
        try:
            seen = read_lease(self._location)
        except (StoreError, ValueError) as error:
            if str(error) != self._unseen:
                logger.warning("cannot see who leads: %s", error)
            self._unseen = str(error)
            self._port.loop.post(self._could_not_look)
            return
        self._unseen = ""
        self._compare_with_known(seen.lease)
        self._port.loop.post(partial(self._looked, seen, begun_at, time.monotonic()))
        self._show_bid()

    def _compare_with_known(self, lease: Lease) -> None:
        """Begin nothing where this host has seen a state: the folder may not be mounted."""
        if lease.epoch == self._succession.seen.epoch and lease.epoch:
            return
        refusal = ""
        try:
            if lease.epoch:
                note_store(self._settings, self._location)
            elif is_known(self._settings, self._location):
                refusal = (
                    f"the store {self._location} is empty, and this host has seen a state in it. "
                    "Mount it or restore it; to begin anew, delete "
                    f"{self._settings.known_store_file}"
                )
        except OSError as error:
            logger.warning("cannot remember the store: %s", error)
        if refusal and refusal != self.refusal:
            logger.error(refusal)
        self.refusal = refusal

    def _show_bid(self) -> None:
        try:
            if self._bid is None:
                self._bidding.withdraw()
            else:
                self._bidding.write(self._bid)
        except (OSError, StoreError) as error:
            logger.warning("cannot bid for the lease: %s", error)

    def _could_not_look(self) -> None:
        """Start a controller that says why nothing can be done where the leading one has ended."""
        if self._stopped.is_set() or not self.leads:
            return
        if self._finder is None:
            self._begin(self._seen)
        if self._elsewhere is None:
            self._elsewhere = Finder(
                self._port, CONTROLLER, self._found_elsewhere, gates=self._may_know
            )
            self._elsewhere.start()
            self._look_elsewhere()

    def _look_elsewhere(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.doubt()
            self._port.loop.call_later(ELSEWHERE_S, self._look_elsewhere)

    def _found_elsewhere(self, *_: object) -> None:
        """Follow a later controller."""
        if self._elsewhere is not None and self._elsewhere.epoch > self._seen.lease.epoch:
            self._turn(leads=False)
            self._begin(self._seen)

    def _look_nowhere_else(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.stop()
            self._elsewhere = None

    def _looked(self, seen: SeenLease, begun_at: float, at: float) -> None:
        if self._stopped.is_set() or begun_at < self._ended_at:
            return  # it may have been read before the controller here gave the lease up
        self._look_nowhere_else()
        lease, self._seen = seen.lease, seen
        if lease.address and lease.address != self._settings.own_address:
            self._leader = (lease.address,)
        leads = self._succession.look(lease, at, self._silent_s(), is_over=seen.is_over)
        leads = leads and not self.refusal
        if leads != self.leads or self._finder is None:
            self._turn(leads=leads)
        if self._finder is None:
            self._begin(seen)
        if lease.epoch > self.epoch:  # a former leader that reaches only the hosts still answers
            self.doubt()
        self._bid = None
        if not leads and lease.address and self._silent_s() > BEATS_S:
            self._bid = self._bidding.bid(self._hosts(), lease.address)

    def _turn(self, *, leads: bool) -> None:
        if leads != self.leads:
            logger.warning("this host leads" if leads else "this host leads no more")
        self.leads = leads
        self._look_nowhere_else()
        self._let_go()

    def _let_go(self) -> None:
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.stop()
            if finder.found is not None:
                self._on_lost()

    def _begin(self, seen: SeenLease) -> None:
        if self.leads:
            if not self._leave_word(seen):
                return  # the next look tries again
            self._finder = Finder(
                self._port, LEADING_CONTROLLER, self._on_found, self._let_go_of_lost
            )
        else:
            self._finder = Finder(
                self._port, CONTROLLER, self._on_found, self._on_lost, self._may_know
            )
        self._finder.start()

    def _may_know(self) -> list[Address]:
        """Return where the controller may be: anywhere, as long as the lease is not seen."""
        hosts = self._hosts() if self._unseen else ()
        known = dict.fromkeys((*self._leader, *hosts))
        known.pop(self._settings.own_address, None)
        return [self._port.loop.machine.address_of(each) for each in known]

    def _leave_word(self, seen: SeenLease) -> bool:
        trouble = ""
        try:
            leave_word(self._settings, seen)
        except OSError as error:
            trouble = str(error)
            if trouble != self._trouble:
                logger.error("this host cannot lead: %s", trouble)  # noqa: TRY400  # no bug
        self._trouble = trouble
        return not trouble

    def _let_go_of_lost(self) -> None:
        """Let the next look decide whether there is to be another controller here."""
        self._ended_at = time.monotonic()
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.stop()
            self._on_lost()
