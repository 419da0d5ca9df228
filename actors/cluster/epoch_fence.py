"""Whom a proxy or a replica obeys: one controller, and never an earlier one again."""

from __future__ import annotations

from greenroom.actors.messages.control import Changed, MeetController, Superseded
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.loop import Loop
from greenroom.core.cluster.leader_lease import Allegiance
from greenroom.core.cluster.long_poll import NOTHING_SEEN


class EpochFence:
    """Refuses orders of controllers that have been succeeded, and tells them so."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._allegiance = Allegiance()

    @property
    def epoch(self) -> int:
        """The latest epoch that was heard of; 0 before, and where there is but one leader."""
        return self._allegiance.epoch

    def accepts(self, epoch: int, sender: Address) -> bool:
        """Tell whether an order is to be obeyed; who gave one that is not hears of it."""
        if self._allegiance.accepts(epoch):
            return True
        self._loop.send(sender, Superseded(epoch=self.epoch))
        return False


class Following:
    """The controller that a proxy listens to, and up to what it holds that one's tables."""

    def __init__(self, loop: Loop) -> None:
        self._obedience = EpochFence(loop)
        self._told_by: Process | None = None  # the controller that the tables are of
        self._met: tuple[Address, Process] | None = None  # perhaps without tables as yet
        self._introduced_by: Process | None = None
        self.seen = NOTHING_SEEN  # it holds everything up to this snapshot id
        self.store = ""  # the id of the store that this is from
        self.controller: Address | None = None

    def meets(self, message: MeetController) -> bool:
        """Listen to this controller from now on; False when it is one of before.

        A host process knows which of two controllers is the later one, and one of before, which may
        have known only a dead controller, is told by its start: it ran on this host, too.
        """
        if not self._obedience.accepts(message.epoch, message.controller):
            return False
        last = self._introduced_by
        if message.by is not None:
            if last is not None and message.by.start_ticks < last.start_ticks:
                return False  # late, of a host process that has died since
            self._introduced_by = message.by
        self.controller = message.controller
        self._met = (message.controller, message.process)
        return True

    def takes(self, message: Changed, sender: Address) -> bool:
        """Tell whether these tables are to be taken, and follow whoever sent them if so."""
        if not self._obedience.accepts(message.epoch, sender):
            return False
        if message.controller == self._told_by:
            if message.upto < self.seen:
                return False  # a newer one has overtaken it
        elif not message.complete:
            return False  # of a controller that is gone: each begins with all that there is
        elif message.upto < self.seen and not self._is_met(message.controller):
            return False  # late, of one that was gone before; who listened to it would be stuck
        self.controller, self._told_by = sender, message.controller
        self.store = message.store
        self._met = (sender, message.controller)
        return True

    def _is_met(self, controller: Process) -> bool:
        """Tell who was met last: after a restored backup its ids may be lower than those before."""
        return self._met is not None and self._met[1] == controller

    def known(self) -> tuple[Address, Process, int] | None:
        """Return the controller, and the latest epoch that was heard of, for who looks for it."""
        return None if self._met is None else (*self._met, self._obedience.epoch)
