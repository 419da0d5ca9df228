"""The base of our actors: one handler per message class, and nothing escapes to Thespian.

What becomes of a turn that fails is decided here, in :meth:`LoopActor.turn_failed`, for messages,
timers and the ends of other processes alike. Half of what the turn was to do is done in memory, and
nobody knows which half; so the actor answers who waits for it, and ends. Whoever needs it asks for
another, which knows what is on disk, and sends again what was not answered.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from thespian.actors import Actor, ActorExitRequest

from greenroom.actors.control_messages import Identify, IdentifyReply
from greenroom.actors.crash_loop import UNKNOWN_S, CrashLoop
from greenroom.actors.logs import configure_logging
from greenroom.actors.loop import Loop, end_where_starved
from greenroom.actors.memory import keep_freed_memory
from greenroom.actors.messages import Address, Process
from greenroom.actors.processes import RunRecords, this_process
from greenroom.actors.pulse import Pulse
from greenroom.actors.settings import HostSettings, read_settings
from greenroom.actors.signals import be_as_usual

logger = logging.getLogger(__name__)

ANSWER_S = 0.2  # for the last answers of an actor that failed to leave


class LoopActor(Actor):  # type: ignore[misc]  # Thespian ships no types
    """An actor with a :class:`~greenroom.actors.loop.Loop`.

    A message of class X goes to ``receiveMsg_X(message, sender)``. An exception there never reaches
    Thespian, which would run the handler a second time; see :meth:`turn_failed`. Settings come from
    the environment that the host process left to all its children.
    """

    role: ClassVar[str] = "actor"
    epoch = 0  # of a controller that has one

    carries_bodies = False  # of requests and answers, megabytes at a time
    runs_user_code = False
    is_paced = True  # whether the next one of its name has to wait where one after the other fails

    def __init__(self) -> None:
        super().__init__()
        self._loop: Loop | None = None
        self._has_failed = False
        self._begun_at: float | None = None

    @property
    def loop(self) -> Loop:
        """The loop of this process."""
        assert self._loop is not None, "set with the first message"
        return self._loop

    def started(self) -> None:
        """Prepare, before the first message is handled."""

    def survives(self, message: Any, sender: Address, error: Exception) -> bool:
        """Return whether a failed message has changed nothing here, once its sender is told."""
        del message, sender, error
        return False

    def owed(self, message: Any, sender: Address, error: Exception) -> Iterable[Any]:
        """Return whom to answer that a turn has failed, with what; ``message`` None is a timer's.

        Whoever is not answered has to send again what it sent, to the next actor of this name.
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

        Nothing more is done here from then on. Where one process after the other fails, each keeps
        the name for longer, so that a message that is repeated, or a record that cannot be dealt
        with, does not occupy the host.
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
            self.pulse.keep_beating(self.loop.asyncio)  # it is deaf on purpose
        self.loop.asyncio.call_later(max(pause_s, ANSWER_S if owed else 0.0), os._exit, 1)

    def may_beat(self) -> bool:
        """Look, once a second, whether this process can do its work."""
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
        self.process: Process = this_process()
        self.settings: HostSettings = read_settings()
        self.pulse = Pulse(runs_user_code=self.runs_user_code)
        self._crash_loop = CrashLoop(self.settings.run_dir, self.role)
        self._loop = Loop(manager.transport, manager._send_intent, self.turn_failed)
        configure_logging(self.settings, self.role)
        self.records = RunRecords(self.settings.run_dir, call_later=self._loop.call_later)
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

    def exiting(self) -> None:
        """Leave: the last thing that runs before Thespian ends the process."""
        self.records.remove(self.process)
