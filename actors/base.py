"""The base of our actors: one handler per message class, and nothing escapes to Thespian."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, ClassVar

from thespian.actors import Actor, ActorExitRequest, ThespianWatch, WakeupMessage, WatchMessage

from understudy.actors import thespian_repairs
from understudy.actors.async_loop import AsyncLoop
from understudy.actors.loop import ActorLoop, Loop
from understudy.actors.messages import Address, Identify, IdentifyReply, Process
from understudy.actors.processes import RunRecords, this_process
from understudy.actors.settings import HostSettings, read_settings
from understudy.actors.transport.thespian_transport import Transport

logger = logging.getLogger(__name__)
# Taken at import: inside an actor Thespian has replaced the logging module's manager, and asking it
# would give another logger than the one that our modules' loggers are under.
OUR_LOGGER = logging.getLogger("understudy")
thespian_repairs.apply()


class LoopActor(Actor):  # type: ignore[misc]  # Thespian ships no types
    """An actor with a :class:`~understudy.actors.loop.Loop`.

    A message of class X goes to ``receiveMsg_X(message, sender)``. An exception there is logged and
    given to :meth:`handler_failed`; it never reaches Thespian, which would run the handler a second
    time. Settings come from the environment that the host process left to all its children.
    """

    role: ClassVar[str] = "actor"

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

    def receiveMessage(self, message: Any, sender: Address) -> ThespianWatch | None:
        """Thespian's entry: handle one message, then finish the turn."""
        if self._loop is None:
            try:
                self._begin()
            except Exception:
                logger.exception("%s could not begin", type(self).__name__)
                os._exit(1)  # half an actor is worse than none: who needs it asks for another
        self.loop.begin_turn()
        try:
            self._dispatch(message, sender)
        except Exception as error:
            logger.exception("%s failed on %s", type(self).__name__, message)
            self.handler_failed(message, sender, error)
        self.loop.finish_turn()
        if isinstance(self.loop, ActorLoop):
            return ThespianWatch([self.loop.fileno()])
        return None

    def receiveMsg_Identify(self, message: Identify, sender: Address) -> None:
        """Tell who this is."""
        reply = IdentifyReply(request_id=message.request_id, process=self.process, title=self.role)
        self.loop.send(sender, reply)

    def _begin(self) -> None:
        manager = self._myRef
        if isinstance(manager.transport, Transport):
            self._loop = AsyncLoop(manager.transport, manager._send_intent)
        else:
            self._loop = ActorLoop(manager)
        self.process: Process = this_process()
        self.settings: HostSettings = read_settings()
        configure_logging(self.settings, self.role)
        self.records = RunRecords(self.settings.run_dir)
        self.records.add(self.process, self.role, self.role)
        self.started()

    def _dispatch(self, message: Any, sender: Address) -> None:
        if isinstance(message, WatchMessage):
            self.loop.run_ready()
        elif isinstance(message, WakeupMessage) and isinstance(self.loop, ActorLoop):
            self.loop.woken()
        elif isinstance(message, ActorExitRequest):
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


def configure_logging(settings: HostSettings, role: str) -> None:
    """Send this process's log records to ``logs/<role>.log`` of the state dir, and nowhere else.

    Thespian replaces the root logger by one that mails each record to its logger process, at 200 us
    each, and from whatever thread logs, which its transport does not survive. The one from before
    is put back as Python makes it, so that user code's records go to stderr, or to the handlers
    that it adds.
    """
    logging.root = logging.Logger.root = OUR_LOGGER.manager.root
    logging.Logger.manager = OUR_LOGGER.manager
    logging.root.handlers.clear()
    settings.logs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    OUR_LOGGER.propagate = False
    OUR_LOGGER.setLevel(logging.INFO)
    handler = logging.FileHandler(settings.logs_dir / f"{role}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    OUR_LOGGER.handlers[:] = [handler]


def redirect_output(settings: HostSettings, name: str) -> None:
    """Append what this process and its C code print to ``logs/<name>.log`` of the state dir."""
    settings.logs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = settings.logs_dir / f"{name}.log"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # no plain TextIO
