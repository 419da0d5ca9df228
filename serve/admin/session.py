"""This process's system and connection, which the functions of ``serve`` share.

Theory of operation. A process talks to one system, named by its environment (or by
``serve.start``). The connection opens at first need and stays. What this process started or
deployed, it undoes when it ends: a script leaves nothing running that was not there before. A
forked child starts without.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from greenroom.actors.caller.connection import Connection
from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.draining import DEFAULT_S, stop_s
from greenroom.actors.runtime.settings import HostSettings, differences, read_settings, variable
from greenroom.core.errors import DeployFailedError, GreenroomError, NotRunningError
from greenroom.core.operations import (
    DeleteApplication,
    DeleteEverything,
    GetStatus,
    StopCluster,
    WaitForGoal,
)

_UNDO_TIMEOUT_S = 10.0
_STATUS_TIMEOUT_S = 30.0
CHECK_EVERY_S = 2.0  # what a goal waits for
LEAST_S = 0.1  # for an answer, also past the time limit: what was reached meanwhile is no failure
_lock = threading.Lock()
_current: Session | None = None


class Session:
    """One process's dealings with one system. Thread-safe."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self._connection: Connection | None = None
        self._started = False
        self._deployed: dict[str, None] = {}  # the applications, in their order
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, rather than inherited it by a fork."""
        return self._pid == os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether the system runs; one at an address is never this process's to start."""
        return self.settings.address is not None or system.is_running(self.settings)

    def lacks(self, wanted: HostSettings, names: Collection[str]) -> list[str]:
        """Say which of these, named as in FIELDS, the system lacks, as far as is known here."""
        address = self.settings.address
        running = None if address is not None else system.running_environ(self.settings)
        if running is None:
            environ = wanted.to_environ()
            return [f"{name.removeprefix('http_')}={environ.get(variable(name))}" for name in names]
        return differences(wanted, running, names)

    def connect(self) -> Connection:
        """Return the connection, opened if need be; NotRunningError when nothing runs."""
        with self._lock:
            if self._connection is None:
                self._connection = Connection.open(self.settings)
            return self._connection

    def ensure_running(self) -> Connection:
        """Return the connection to a system that runs, starting one on this host if none does.

        A system named by an address is never started from here.
        """
        with self._lock:
            if not self.is_running:
                self.disconnect()  # it belonged to a system that is gone
                if system.start(self.settings):
                    self._started = True
                    atexit.register(self.undo)
            return self.connect()

    def deployed(self, application: str) -> None:
        """Remember that this process deployed an application."""
        self._deployed[application] = None

    def disconnect(self) -> None:
        """Close the connection; the next use opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def shutdown(self) -> list[str]:
        """Do as :func:`destroy` does, also where nothing runs; return the deletions' goals."""
        with self._lock:
            self._started = False
            atexit.unregister(self.undo)
            try:
                return destroy(self.settings, self.connect).goals
            finally:
                self._connection = None

    def undo(self) -> None:
        """Delete what this process deployed and stop the system, if this process started it."""
        with self._lock:
            if not (self._started and self.is_ours):
                return
            self._started = False
            # Without this, the state that stays on disk would bring them up with the next start.
            with contextlib.suppress(GreenroomError, TimeoutError):
                for application in self._deployed:
                    self._request(DeleteApplication(application=application))
            self.disconnect()
            system.stop(self.settings)

    def _request(self, request: Any) -> None:
        if self._connection is None:  # opening one takes a thread, too late at a process's end
            raise NotRunningError("not connected")
        self._connection.request(request, timeout_s=_UNDO_TIMEOUT_S)


def wait_for_goal(
    connection: Connection,
    goal: str | None,
    timeout_s: float | None = None,
    on_wait: Callable[[str], None] | None = None,
    began_at: float | None = None,
) -> None:
    """Wait until a change is done, ``timeout_s`` from now or ``began_at`` on.

    None is the goal of a change that was none. ``on_wait`` gets what is waited for, when that is
    another thing than before; the TimeoutError says it, too. Raises DeployFailedError, with what a
    constructor raised as its cause: a TimeoutError or OSError of the user's code is not one of
    ours.
    """
    if goal is None:
        return
    began_at = time.monotonic() if began_at is None else began_at
    deadline = math.inf if timeout_s is None else began_at + timeout_s
    reason = ""
    while True:
        left_s = max(deadline - time.monotonic(), LEAST_S)
        wait_s = left_s if on_wait is None else min(left_s, CHECK_EVERY_S)
        try:
            operation = WaitForGoal(goal_id=goal)
            connection.request(operation, timeout_s=None if wait_s == math.inf else wait_s)
        except TimeoutError:
            what, message = _goal(connection, goal)
        else:
            return
        if message and message != reason and on_wait is not None:
            on_wait(message)
        reason = message
        if time.monotonic() >= deadline:
            shown = f" ({': '.join(filter(None, (what, reason)))})" if what else ""
            raise TimeoutError(
                f"goal {goal}{shown} was not reached within {timeout_s:g} s; it goes on, "
                "`greenroom status` shows how far it is"
            )


def _goal(connection: Connection, goal: str) -> tuple[str, str]:
    """Return what a goal is, and what it waits for; nothing of one that is not kept."""
    report = connection.request(GetStatus())
    for each in report.get("goals") or []:
        if each["id"] == goal:
            kind, _, name = each["subject"].partition(" ")
            subject = (report.get(f"{kind}s") or {}).get(name) or {}
            return f"{each['what']}, {each['subject']}", str(subject.get("message") or "")
    return "", ""


@contextlib.contextmanager
def raising_users_own() -> Iterator[None]:
    """Raise what a constructor raised, with its traceback as a note, for Python callers."""
    try:
        yield
    except DeployFailedError as error:
        if error.__cause__ is None:
            raise
        error.__cause__.add_note(str(error))
        raise error.__cause__ from None


class Destroyed(NamedTuple):
    """What :func:`destroy` has done."""

    goals: list[str]  # of the deletions, once reached
    did_run: bool  # whether there was anything to stop


def destroy(settings: HostSettings, connect: Callable[[], Connection]) -> Destroyed:
    """Delete all there is, stop the system, every host of it, and delete its state.

    Before the stop every replica finishes what it has, or is ended after its time limit. A
    controller that does not answer is not waited for: this host's processes are killed then. A
    GreenroomError where a system elsewhere, at an address, does not answer or end. The connection
    is closed.
    """
    goals: list[str] = []
    try:
        with contextlib.closing(connect()) as connection:
            goals = _destroy_by_controller(connection, settings.address)
    except GreenroomError:
        if settings.address is not None:
            raise
    if settings.address is not None:
        return Destroyed(goals, did_run=True)
    return Destroyed(goals, did_run=system.stop(settings, forget=True))


def _destroy_by_controller(connection: Connection, address: str | None) -> list[str]:
    """Delete all there is, and stop what cannot be stopped from here; return the goals."""
    goals: list[str] = []
    limit_s, is_alone = stop_s(DEFAULT_S), True
    with contextlib.suppress(GreenroomError, TimeoutError):
        report = connection.request(GetStatus(), timeout_s=_STATUS_TIMEOUT_S)
        limit_s = stop_s(report.get("longest_drain_s", DEFAULT_S))
        is_alone = len(report.get("hosts") or ()) <= 1
        deadline = time.monotonic() + limit_s
        goals = connection.request(DeleteEverything(), timeout_s=limit_s)
        for goal in goals:
            wait_for_goal(connection, goal, deadline - time.monotonic())
    if address is not None:
        connection.request(StopCluster(forget=True), timeout_s=limit_s)
        if not connection.wait_gone(limit_s):
            raise GreenroomError(
                f"the system at {address} did not end within {limit_s:g} s; see its logs/host.log"
            )
    elif not is_alone:  # the other hosts
        with contextlib.suppress(GreenroomError, TimeoutError):
            connection.request(StopCluster(forget=True), timeout_s=_STATUS_TIMEOUT_S)
    return goals


def current() -> Session:
    """Return this process's session, made from its environment at first use."""
    global _current  # noqa: PLW0603  # one per process, as the environment is
    with _lock:
        if _current is None or not _current.is_ours:
            _current = Session(read_settings())
        return _current


def use(settings: HostSettings) -> Session:
    """Return this process's session after making ``settings`` its own; closes the earlier one."""
    global _current
    with _lock:
        earlier, _current = _current, Session(settings)
        if earlier is not None and earlier.is_ours:
            earlier.undo()
            earlier.disconnect()
        return _current
