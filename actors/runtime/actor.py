"""The base of our actors: one handler per message class, and no exception escapes to Thespian.

Theory of operation. :meth:`LoopActor.turn_failed` decides what follows a turn that fails, for
messages, timers and the ends of other processes alike. The turn may have been carried out in part,
so the actor's memory can no longer be trusted. The actor answers the processes that wait for it,
and ends. Processes that need it ask for its name, which makes a new actor with the state on disk,
and repeat their unanswered requests.

Because asking for the name makes a new actor at once, the back-off after repeated failures is in
the failed actor: it waits before it ends. A file holds the number of failures, because each process
fails only once.

The module also prepares the process of an actor for native code, forks and large messages: see
:func:`be_as_usual` and :func:`keep_freed_memory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from thespian.actors import Actor, ActorExitRequest

from greenroom.actors.messages.control import Identify, IdentifyReply
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.loop import Loop, end_where_starved
from greenroom.actors.runtime.machine import MACHINE
from greenroom.actors.runtime.processes import INCARNATION
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import write_private
from greenroom.actors.transport.thespian_base import hand_over
from greenroom.core.backoff import pause_s

logger = logging.getLogger(__name__)

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def be_as_usual() -> None:
    """Undo what Thespian does with signals: this process ends at its first fault, forks by SIGTERM.

    Thespian has a handler in Python for each signal of an actor, which only records that it came.
    """
    _die_of_faults()
    os.register_at_fork(before=_block, after_in_child=_be_nobodys_actor, after_in_parent=_unblock)


def _die_of_faults() -> None:
    """End this process at its first fault, after the tracebacks of its threads, on stderr.

    Otherwise the same instruction would run and fault again, for ever.
    """
    for fault in FAULTS:
        signal.signal(fault, signal.SIG_DFL)
    faulthandler.enable(2)  # whatever becomes of sys.stderr


_before = threading.local()  # the signals that were blocked before the thread's fork


def _block() -> None:
    """Hold signals back until the child has dropped the handlers; they would be lost."""
    _before.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.blocked)


def _be_nobodys_actor() -> None:
    """Drop Thespian's handlers: ``multiprocessing`` ends its workers by SIGTERM, and waits."""
    for number in signal.valid_signals():
        module = getattr(signal.getsignal(number), "__module__", None) or ""
        if module.startswith("thespian."):
            signal.signal(number, signal.SIG_DFL)
    _unblock()


KEPT_BYTES = 32 * 1024 * 1024
MALLOPT = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}  # see mallopt(3)


def keep_freed_memory() -> None:
    """Make the C allocator keep up to KEPT_BYTES of free memory, where it can.

    By default it returns memory after each body of megabytes and asks for it with the next one: at
    10 MB some 400 page faults per megabyte, a third of the CPU time. Settings of the environment
    come first. Forked children inherit this; other C libraries have no mallopt().
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, variable in MALLOPT.items():
            if variable not in os.environ:
                mallopt(parameter, KEPT_BYTES)


STABLE_S = 30.0  # a process that lived this long did not fail for what it began with
FIRST_S, MOST_S = 0.1, 10.0
UNKNOWN_S = 1.0  # where the count cannot be kept


class CrashLoop:
    """The failures in a row of one role on this host."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self._path = run_dir / f"{role}.failures"

    def failed(self, lived_s: float) -> float:
        """Count the end of a process; return the seconds to wait: 0 for the first in a row."""
        count = 1 if lived_s > STABLE_S else self._count() + 1
        try:
            write_private(self._path, str(count))
        except OSError:
            logger.exception("%s cannot be written", self._path)
            return UNKNOWN_S
        return pause_s(count - 1, FIRST_S, MOST_S) if count > 1 else 0.0

    def _count(self) -> int:
        try:
            return int(self._path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0


UNASKED_S = 60.0
ANSWER_S = 0.2  # for the last answers of an actor that failed to leave


class LoopActor(Actor):  # type: ignore[misc]  # Thespian ships no types
    """An actor with a :class:`~greenroom.actors.runtime.loop.Loop`.

    A message of class X goes to ``receiveMsg_X(message, sender)``. An exception there never reaches
    Thespian, which would run the handler a second time; see :meth:`turn_failed`. Settings come from
    the environment that the host process left to all its children.
    """

    role: ClassVar[str] = "actor"
    epoch = 0  # of a controller that has one

    carries_bodies = False  # of requests and answers, megabytes at a time
    runs_user_code = False
    is_paced = True  # whether the next one of its name has to wait where one after the other fails
    ends_unasked = False  # where it is sent nothing at first

    def __init__(self) -> None:
        super().__init__()
        self.machine = MACHINE  # a simulator sets its own before the first message
        self._loop: Loop | None = None
        self._has_failed = False
        self._begun_at: float | None = None

    @property
    def loop(self) -> Loop:
        """The loop of this process."""
        assert self._loop is not None, "set with the first message"
        return self._loop

    def created(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the process's loop, before any message; with ``ends_unasked``, wait not for ever.

        A controller that is cut off, or dies, just after it has asked for a replica's process has
        another started elsewhere. Nothing would ever reach this one.
        """
        if self.ends_unasked:
            loop.call_later(UNASKED_S, self._end_unasked)

    def _end_unasked(self) -> None:
        if self._loop is None:
            logger.warning("a %s ends that was never told which it is to be", self.role)
            os._exit(1)

    def started(self) -> None:
        """Prepare, before the first message is handled."""

    def survives(self, message: Any, sender: Address, error: Exception) -> bool:
        """Return whether a failed message has changed nothing here, once its sender is informed."""
        del message, sender, error
        return False

    def owed(self, message: Any, sender: Address, error: Exception) -> Iterable[Any]:
        """Return (address, answer) for those that a failed turn owes one; None is a timer's turn.

        Other senders must send again, to the next actor of this name.
        """
        del message, sender, error
        return ()

    def receiveMessage(self, message: Any, sender: Address) -> None:
        """Thespian's entry: handle one message."""
        try:
            if self._loop is None:
                self._begin()
            if not self._has_failed:
                self._dispatch(message, sender)
            elif isinstance(message, ActorExitRequest):
                os._exit(1)
        except Exception as error:
            self.turn_failed(error, message, sender)

    def turn_failed(self, error: Exception, message: Any = None, sender: Address = None) -> None:
        """End after an unexpected exception, unless nothing was changed; see the module.

        No callback runs from then on. Where one process after the other fails, each keeps the name
        for longer, so that a repeated message, or a bad record, does not occupy the host.
        """
        what = "in a turn" if message is None else f"on {message}"
        logger.error("%s failed %s", type(self).__name__, what, exc_info=error)
        has_begun = self._begun_at is not None
        try:
            if has_begun and message is not None and self.survives(message, sender, error):
                return
            owed = list(self.owed(message, sender, error)) if has_begun else []
            self._end(owed)
        except Exception:
            logger.exception("%s could not even end", type(self).__name__)
            time.sleep(UNKNOWN_S)
            os._exit(1)

    def _end(self, owed: list[tuple[Address, Any]]) -> None:
        """Send the last answers, and end the process; later, if others have failed before it."""
        self._has_failed = True
        for address, answer in owed:
            self.loop.send(address, answer)
        self.loop.stop()
        pause_s = 0.0
        if self.is_paced:
            lived_s = 0.0 if self._begun_at is None else time.monotonic() - self._begun_at
            pause_s = self._crash_loop.failed(lived_s)
        if pause_s:
            logger.warning("the next %s begins in %.1f s", self.role, pause_s)
        # It is deaf on purpose. Its last turn may have been long, and its answers are to leave.
        self.pulse.keep_beating(self.loop.asyncio)
        self.loop.asyncio.call_later(max(pause_s, ANSWER_S if owed else 0.0), os._exit, 1)

    def may_beat(self) -> bool:
        """Return, once a second, whether this process can do its work."""
        return end_where_starved(self.loop)

    def receiveMsg_Identify(self, message: Identify, sender: Address) -> None:
        """Tell who this is."""
        reply = IdentifyReply(
            request_id=message.request_id,
            process=self.process,
            title=self.role,
            epoch=self.epoch,
        )
        self.loop.send(sender, reply)

    def _begin(self) -> None:
        be_as_usual()
        if self.carries_bodies:
            keep_freed_memory()
        manager = self._myRef
        machine = self.machine
        self.process: Process = machine.this_process()
        self.settings: HostSettings = machine.read_settings()
        self.pulse = machine.pulse(runs_user_code=self.runs_user_code)
        self._crash_loop = CrashLoop(self.settings.run_dir, self.role)
        self._loop = Loop(manager.transport.mailbox, self.turn_failed, machine)
        machine.configure_logging(self.settings, self.role)
        self.records = machine.run_records(self.settings.run_dir, call_later=self._loop.call_later)
        self.records.add(self.process, self.role, self.role)
        self.started()
        self._loop.keep_beating(self.pulse, self.settings.silence_timeout_s, self.may_beat)
        self._begun_at = time.monotonic()

    def _dispatch(self, message: Any, sender: Address) -> None:
        if isinstance(message, ActorExitRequest):
            self.exiting()
        else:
            name = type(message).__name__
            handler = getattr(self, f"receiveMsg_{name}", None)
            if handler is None:
                logger.warning("%s ignored an unknown message %s", type(self).__name__, name)
            else:
                handler(message, sender)

    def continue_in(self, python: str, message: Any, sender: Address) -> NoReturn:
        """Go on as another interpreter's program, which handles ``message`` first.

        OSError when there is no such program.
        """
        os.environ[INCARNATION] = self.process.incarnation
        hand_over(self._myRef, python, message, sender)

    def exiting(self) -> None:
        """Leave: the last thing that runs before Thespian ends the process."""
        self.records.remove(self.process)
