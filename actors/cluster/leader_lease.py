"""Which of several hosts leads, at both ends: the host processes', and the controller's.

core/cluster/leader_lease.py has the rules of the lease in the store, which all of these hosts see.

A host process that may lead (:class:`LeaderElection`) checks the lease on a thread, because a
file system that hangs must not stop it. After each check the rules decide:

    this host    what it does (actors/cluster/controller_seeker.py)
    leads        writes down the epoch and the renewal that it saw, and asks its admin for the
                 controller; when that ends, the next check decides again
    follows      seeks the controller on the other hosts that may lead

A host that cannot see the lease asks all hosts that it knows of. Where one that led finds a later
controller, it follows that.

The controller (:class:`LeaderLease`) takes the store over only if what its host process has written
down is unchanged, so a leader that was only slow, and has renewed meanwhile, goes on. From then on
the controller does nothing while its term may be over, and ends when the store refuses a renewal,
or has taken none when the term is over. Where no other host leads then, the next controller of this
one does, or says why the store cannot be used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from greenroom.actors.runtime.loop import Callback, Loop
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import write_private
from greenroom.core.cluster.leader_lease import (
    CHECK_S,
    MIN_TENURE_S,
    OVER_S,
    RENEW_S,
    Lease,
    Succession,
    Tenure,
)
from greenroom.persistence.kv import LeasedStore, StaleWriterError, StoreError, StoreLocation
from greenroom.persistence.locations import location_at

logger = logging.getLogger(__name__)

STEPPED_DOWN = 0  # the exit status: nothing is wrong with this process
RELEASE_S = 2.0  # that releasing the lease may take


class SeenLease(NamedTuple):
    """The lease in the store, its bytes there, and whether it is over by the store's clock."""

    lease: Lease
    written: bytes
    is_over: bool | None = None


def read_lease(location: StoreLocation) -> SeenLease:
    """Return the lease in the store; raises StoreError. Blocks."""
    epoch, _, written, is_over, _ = location.read_claim()
    lease = json.loads(written) if written else {}
    if lease.get("epoch") != epoch:  # taken over, and not renewed yet
        return SeenLease(Lease(epoch), written, is_over)
    own = {name: lease[name] for name in Lease._fields if name in lease}  # of any release
    return SeenLease(Lease(**own), written, is_over)


def remember_store(settings: HostSettings, location: StoreLocation) -> None:
    """Remember that there is a state in this store; raises OSError. Blocks."""
    if _known_store(settings) != str(location):
        write_private(settings.known_store_file, str(location))


def is_known(settings: HostSettings, location: StoreLocation) -> bool:
    """Return whether this host has seen a state in this store. Blocks.

    It has where the file is damaged: whoever knows better can delete it.
    """
    known = _known_store(settings)
    return known is not None and (
        known in {str(location), ""} or "\N{REPLACEMENT CHARACTER}" in known
    )


def _known_store(settings: HostSettings) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return settings.known_store_file.read_text(encoding="utf-8", errors="replace")
    return None


def expected_lease_file(settings: HostSettings) -> Path:
    """Return the file with the epoch and the lease that this host's controller may follow on."""
    return settings.run_dir / "leads.from"


class LeaderElection:
    """Decides whether this host leads, by what it sees of the lease; on the host process's loop.

    ``silent_s`` is for how long the controller has not answered beats. ``decided`` is called after
    each check: of those that failed, only where this host led.
    """

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        silent_s: Callable[[], float],
        decided: Callback,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._silent_s = silent_s
        self._decided = decided
        self._location = location_at(settings.store_name)
        self._succession = Succession(settings.host_name)
        self._stopped = threading.Event()
        self._ended_at = float("-inf")  # when the last controller here did
        self._trouble = ""  # why the lease to follow on could not be written
        self.seen = SeenLease(Lease(), b"")
        self.unseen = ""  # why the lease could not be seen
        self.refusal = ""  # why this host begins nothing where there is no state
        self.leads = False

    @property
    def trouble(self) -> str:
        """Why this host cannot see who leads, and so could not lead; "" where it can."""
        return self.unseen or self.refusal

    def start(self) -> None:
        """Begin to check."""
        threading.Thread(target=self._watch, name="greenroom-lease", daemon=True).start()

    def stop(self) -> None:
        """Decide nothing any more; from any thread."""
        self._stopped.set()

    def turn(self, *, leads: bool) -> None:
        """Lead from now on, or no more."""
        if leads != self.leads:
            logger.warning("this host leads" if leads else "this host leads no more")
        self.leads = leads

    def let_lead(self) -> bool:
        """Let this host's controller take the store over, if nothing has happened since.

        Return False where that cannot be written down; the next check tries again.
        """
        expected, trouble = f"{self.seen.lease.epoch}\n{self.seen.written.decode()}", ""
        try:
            write_private(expected_lease_file(self._settings), expected)
        except OSError as error:
            trouble = str(error)
            if trouble != self._trouble:
                logger.error("this host cannot lead: %s", trouble)  # noqa: TRY400  # no bug
        self._trouble = trouble
        return not trouble

    def controller_ended(self) -> None:
        """Decide nothing by what was seen before this: it may have released the lease."""
        self._ended_at = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(CHECK_S):
            self._check()

    def _check(self) -> None:
        begun_at = time.monotonic()
        try:
            seen = read_lease(self._location)
            self._compare_with_known(seen.lease)
        except Exception as error:  # whatever it is, the next check must come
            if str(error) != self.unseen:
                is_expected = isinstance(error, StoreError | ValueError)
                logger.warning("cannot see who leads: %s", error, exc_info=not is_expected)
            self.unseen = str(error)
            self._loop.post(self._could_not_check)
        else:
            self.unseen = ""
            self._loop.post(partial(self._checked, seen, begun_at, time.monotonic()))

    def _compare_with_known(self, lease: Lease) -> None:
        """Begin nothing where this host has seen a state: the folder may not be mounted."""
        if lease.epoch == self._succession.seen.epoch and lease.epoch:
            return
        refusal = ""
        try:
            if lease.epoch:
                remember_store(self._settings, self._location)
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

    def _could_not_check(self) -> None:
        if self.leads and not self._stopped.is_set():
            self._decided()

    def _checked(self, seen: SeenLease, begun_at: float, at: float) -> None:
        if self._stopped.is_set() or begun_at < self._ended_at:
            return
        self.seen = seen
        leads = self._succession.check(seen.lease, at, self._silent_s(), is_over=seen.is_over)
        self.turn(leads=leads and not self.refusal)
        self._decided()


class LeaderLease:
    """The lease of one controller, from ``open`` to the end of its process."""

    def __init__(self, settings: HostSettings, loop: Loop) -> None:
        self._settings = settings
        self._loop = loop
        self._tenure = Tenure()
        self._lease = Lease()
        self._location = location_at(settings.store_name)
        self._apart: ThreadPoolExecutor | None = None  # where the store renews apart
        self._is_released = False
        self._trouble = ""  # why the last renewal failed
        self.former = Lease()  # of who led before
        self.away: Callable[[], str] = lambda: ""  # see core.cluster.hosts.away

    def open(self) -> LeasedStore:
        """Take the store over, or end this process. Raises StoreError."""
        self.former = read_lease(self._location).lease
        self._begun_at = time.monotonic()
        try:
            after, _, lease = (
                expected_lease_file(self._settings).read_text(encoding="utf-8").partition("\n")
            )
            self._store = self._location.open(after=int(after), lease=lease.encode())
            own, begun_at = self._settings, time.monotonic()
            self._lease = Lease(self._store.epoch, own.host_name, address=own.own_address)
            self._write()
        except FileNotFoundError:
            self._step_down("this host has not been told to lead")
        except StaleWriterError as error:
            self._step_down(str(error))
        self._tenure.renewed(begun_at)
        if self._store.renews_apart:
            self._apart = ThreadPoolExecutor(1, "greenroom-lease")
        self._loop.call_later(RENEW_S, self._renew_again)
        return self._store

    def may_act(self) -> bool:
        """Return whether this controller may act; where another one does, its process ends."""
        if self._tenure.is_over(time.monotonic()) and self._apart is None:
            self.renew()
        return not (self._is_released or self._tenure.is_over(time.monotonic()))

    def is_confirmed(self) -> bool:
        """Return whether the store takes this controller for the last one; may block for a fsync.

        Where it renews apart, a renewal that was accepted lately says so.
        """
        return self.renew() if self._apart is None else self.may_act()

    def renew(self) -> bool:
        """Renew the lease, or end this process where that cannot be. Blocks for a fsync."""
        if self._is_released:
            return False
        begun_at = time.monotonic()
        self._lease = self._lease._replace(number=self._lease.number + 1)
        has_renewed = self._has_written(self._write)
        if has_renewed:
            self._tenure.renewed(begun_at)
        return has_renewed

    def abandon(self) -> None:
        """Neither act nor renew any more: the store is not the one that was led from."""
        self._is_released = True

    def release(self, heir: str, *, leaves: bool) -> None:
        """Let another host lead, and act no more; ``leaves`` where this one is being stopped."""
        logger.warning("this controller releases the lease to host %s", heir)
        self._is_released = True
        self._lease = self._lease._replace(heir=heir, leaves=leaves)
        if self._apart is None:
            self._has_written(self._write)  # where that fails, the others see it end
        else:  # after the renewal that may be under way, which it must not come before
            with contextlib.suppress(TimeoutError, StoreError):
                self._apart.submit(self._store.renew, self._written(), 0.0).result(RELEASE_S)

    def _write(self) -> None:
        self._store.renew(self._written(), OVER_S)

    def _written(self) -> bytes:
        return json.dumps(self._lease._asdict()).encode()

    def _has_written(self, outcome: Callable[[], None]) -> bool:
        """Take what became of a renewal: ``outcome`` raises its error."""
        try:
            outcome()
        except StaleWriterError as error:
            self._step_down(str(error))
        except StoreError as error:
            if str(error) != self._trouble:
                logger.warning("the lease could not be written: %s", error)
            self._trouble = str(error)
            if self._tenure.is_over(time.monotonic()) and not self._is_released:
                self._step_down("its term is over")
            return False
        self._trouble = ""
        return True

    def _renew_again(self) -> None:
        if self._apart is None:
            self.renew()
            self._release_where_alone()
            self._loop.call_later(RENEW_S, self._renew_again)
        elif not self._is_released:
            begun_at = time.monotonic()
            self._lease = self._lease._replace(number=self._lease.number + 1)
            renewing = self._apart.submit(self._store.renew, self._written(), OVER_S)
            renewing.add_done_callback(
                lambda done: self._loop.post(partial(self._renewed, begun_at, done))
            )

    def _renewed(self, begun_at: float, done: Future[None]) -> None:
        if self._has_written(done.result):
            self._tenure.renewed(begun_at)
            self._release_where_alone()
        took_s = time.monotonic() - begun_at
        self._loop.call_later(max(RENEW_S - took_s, 0.0), self._renew_again)

    def _release_where_alone(self) -> None:
        heir = self.away()
        has_led = time.monotonic() - self._begun_at >= MIN_TENURE_S
        if heir and has_led and not self._is_released:
            self.release(heir, leaves=False)
            self._step_down("it hears none of the other hosts, which may hear each other")

    def _step_down(self, reason: str) -> None:
        logger.warning("this controller steps down: %s", reason)
        os._exit(STEPPED_DOWN)
