"""The base of our actors: one handler per message class, and nothing escapes to Thespian."""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

from thespian.actors import Actor, ActorExitRequest

from greenroom.actors.control_messages import Identify, IdentifyReply
from greenroom.actors.logs import configure_logging
from greenroom.actors.loop import Loop
from greenroom.actors.memory import keep_freed_memory
from greenroom.actors.messages import Address, Process
from greenroom.actors.processes import RunRecords, this_process
from greenroom.actors.pulse import Pulse
from greenroom.actors.settings import HostSettings, read_settings
from greenroom.actors.signals import be_as_usual

logger = logging.getLogger(__name__)


class LoopActor(Actor):  # type: ignore[misc]  # Thespian ships no types
    """An actor with a :class:`~greenroom.actors.loop.Loop`.

    A message of class X goes to ``receiveMsg_X(message, sender)``. An exception there is logged and
    given to :meth:`handler_failed`; it never reaches Thespian, which would run the handler a second
    time. Settings come from the environment that the host process left to all its children.
    """

    role: ClassVar[str] = "actor"
    epoch = 0  # of a controller that has one

    carries_bodies = False  # of requests and answers, megabytes at a time
    runs_user_code = False

    def __init__(self) -> None:
        super().__init__()
        self._loop: Loop | None = None

    @property
    def loop(self) -> Loop:
        """The loop of this process."""
        assert self._loop is not None, "set with the first message"
        return self._loop

    def started(self) -> None:
        """Prepare, before the first message is handled."""

    def handler_failed(self, message: Any, sender: Address, error: Exception) -> None:
        """React to an exception of a handler, for example by telling the sender."""

    def receiveMessage(self, message: Any, sender: Address) -> None:
        """Thespian's entry: handle one message."""
        if self._loop is None:
            try:
                self._begin()
            except Exception:
                logger.exception("%s could not begin", type(self).__name__)
                os._exit(1)  # half an actor is worse than none: who needs it asks for another
        try:
            self._dispatch(message, sender)
        except Exception as error:
            logger.exception("%s failed on %s", type(self).__name__, message)
            self.handler_failed(message, sender, error)

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
        self._loop = Loop(manager.transport, manager._send_intent)
        self.process: Process = this_process()
        self.settings: HostSettings = read_settings()
        configure_logging(self.settings, self.role)
        self.records = RunRecords(self.settings.run_dir)
        try:
            self.records.add(self.process, self.role, self.role)
        except OSError:  # the disk is full, perhaps; without it whoever asks would hear nothing
            logger.exception("%s is not on record", self.role)
        self.pulse = Pulse(runs_user_code=self.runs_user_code)
        self.started()
        self._loop.keep_beating(self.pulse, self.settings.silence_timeout_s)

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
