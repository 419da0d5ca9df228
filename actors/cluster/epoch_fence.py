"""Which controller a process obeys: one, and never an earlier one again.

If several hosts may lead, each controller has an *epoch*, which its orders carry. A process refuses
orders of an earlier epoch than the latest it knows. Epoch 0 belongs to a controller that no other
host can succeed; it is always obeyed.
"""

from __future__ import annotations

from greenroom.actors.messages.control import Changed, MeetController, Superseded
from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.loop import Loop
from greenroom.core.long_poll import NOTHING_SEEN


class EpochFence:
    """Refuses orders of controllers that have been succeeded, and tells them so."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.epoch = 0  # the latest that was heard of

    def accepts(self, epoch: int, sender: Address) -> bool:
        """Return whether to obey an order; tell its sender if it has been succeeded."""
        if 0 < epoch < self.epoch:
            self._loop.send(sender, Superseded(epoch=self.epoch))
            return False
        self.epoch = max(self.epoch, epoch)
        return True


class Following:
    """The controller that a proxy listens to, and how much of its tables the proxy holds."""

    def __init__(self, loop: Loop) -> None:
        self._fence = EpochFence(loop)
        self._tables_of: Process | None = None  # the controller that the tables are of
        self._met: tuple[Address, Process] | None = None  # perhaps without tables as yet
        self._introduced_by: Process | None = None
        self.seen = NOTHING_SEEN  # the proxy holds everything up to this snapshot id
        self.store = ""  # the id of the store that this is from

    @property
    def controller(self) -> Address | None:
        """The controller to listen to, while there is one."""
        return None if self._met is None else self._met[0]

    def meets(self, message: MeetController) -> bool:
        """Listen to this controller from now on; False when it is an earlier one.

        A host process knows which of two controllers is the later one. An earlier host process may
        have known only a dead one; its start time tells the two apart, for they ran on one host.
        """
        if not self._fence.accepts(message.epoch, message.controller):
            return False
        last = self._introduced_by
        if message.by is not None:
            if last is not None and message.by.start_ticks < last.start_ticks:
                return False  # a late message of a host process that has died since
            self._introduced_by = message.by
        self._met = (message.controller, message.process)
        return True

    def takes(self, message: Changed, sender: Address) -> bool:
        """Return whether to take these tables, and follow their sender if so."""
        if not self._fence.accepts(message.epoch, sender):
            return False
        if message.controller == self._tables_of:
            if message.upto < self.seen:
                return False  # a newer one has overtaken it
        elif not message.complete:
            return False  # of a controller that is gone: each begins with all that there is
        elif message.upto < self.seen and (self._met is None or self._met[1] != message.controller):
            # Late, of an earlier one; a proxy that listened to it would be stuck. The one that was
            # met last may have lower ids than before, after a restore.
            return False
        self._tables_of = message.controller
        self.store = message.store
        self._met = (sender, message.controller)
        return True

    def known(self) -> tuple[Address, Process, int] | None:
        """Return the controller, and the latest epoch that was heard of."""
        return None if self._met is None else (*self._met, self._fence.epoch)
