"""What two processes have sent each other, across every connection between them.

Theory of operation. Each side numbers its messages from 1 as they are first handed out, and keeps
each until the peer acknowledges it. After a reconnect both say what they have received, so exactly
the rest is handed out again: nothing is lost, repeated or reordered while both processes live and
neither has given the other up.

Which connection counts, when both dial at once or one has not noticed that the last one died? One
side decides: the one with the smaller incarnation. It takes every newly authenticated connection
in place of the one before, and sends WELCOME first, with an epoch that grows each time. The other
takes a connection when that WELCOME arrives and is newer than the last, and answers with its own.
Both end up on the same connection because one side's order decides.

A session can be given up on one side only (``Sessions.forget``). Its successor has a greater
*life*, a number that the WELCOME carries; the peer that sees a greater life than it knew starts
again from 1, and reports what it had handed out and nobody acknowledged, for it may or may not have
arrived.

    WELCOME  number = epoch, acknowledged = received up to,
             body = own life u64, the peer's life that "received" is about u64 (0: none yet),
                    longest chunk to send here u32, longest message to send here u64
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from greenroom.actors.transport.events import Unsent
from greenroom.actors.transport.frames import MAX_BUFFERS, MIN_MAX_FRAME, Buffer
from greenroom.actors.transport.identity import Identity, RefusedError
from greenroom.actors.transport.states import SESSION, SessionEvent, SessionState, next_state

if TYPE_CHECKING:
    from greenroom.actors.transport.protocol import Connection

WELCOME_BODY = struct.Struct(">QQIQ")
MESSAGE_COST = 256  # what keeping a message costs beside its bytes, about


class WindowFullError(Exception):
    """The session holds as many unacknowledged bytes as it may; wait for WindowOpened."""


@dataclass(frozen=True)
class Limits:
    """Bounds that both the sending and the receiving side keep, in bytes.

    ``window`` bounds what one session keeps unacknowledged: while less than that is kept one more
    message is taken, however large. ``max_frame`` bounds one chunk, ``max_message`` one message.
    """

    window: int = 16 * 1024 * 1024
    max_frame: int = 1024 * 1024
    max_message: int = 2 * 1024**3

    def __post_init__(self) -> None:
        if self.max_frame < MIN_MAX_FRAME:
            raise ValueError(f"max_frame {self.max_frame} is under {MIN_MAX_FRAME}")
        if self.window < 1 or self.max_message < 1:
            raise ValueError("window and max_message must be positive")


class Welcome(NamedTuple):
    """What a WELCOME frame says."""

    epoch: int
    received: int
    life: int
    about: int
    max_frame: int
    max_message: int


def read_welcome(epoch: int, received: int, body: bytes) -> Welcome:
    """Read a WELCOME frame; RefusedError when it is malformed."""
    if len(body) != WELCOME_BODY.size:
        raise RefusedError(f"a welcome of {len(body)} bytes, not {WELCOME_BODY.size}")
    welcome = Welcome(epoch, received, *WELCOME_BODY.unpack(body))
    if not welcome.life or welcome.max_frame < MIN_MAX_FRAME:
        raise RefusedError(
            f"a welcome of life {welcome.life}, chunks of {welcome.max_frame} bytes; at least 1 "
            f"and {MIN_MAX_FRAME} are due"
        )
    return welcome


class Outgoing:
    """A message until it is acknowledged."""

    __slots__ = ("buffers", "handed_out", "is_patient", "size", "tag")

    def __init__(self, buffers: list[Buffer], size: int, tag: object, *, is_patient: bool) -> None:
        self.buffers = buffers
        self.size = size
        self.tag = tag
        self.is_patient = is_patient
        self.handed_out = False


class Session:
    """This process's side of the pair; made by ``Sessions``.

    ``received`` and ``acknowledged`` are numbers of messages, kept by the connection.
    """

    def __init__(self, own: Identity, life: int, limits: Limits) -> None:
        self.own = own
        self.life = life
        self.limits = limits
        self.max_message = limits.max_message  # the smaller of both sides', once known
        self.peer: Identity | None = None
        self.state = SessionState.DETACHED
        self.connection: Connection | None = None
        self.received = 0
        self.acknowledged = 0
        self.sent_up_to = 0
        self.kept_bytes = 0
        self.done_tags: list[object] = []
        self._peer_life = 0
        self._epoch = 0
        self.is_forgotten = False  # by the peer, as its last WELCOME told
        self._waiting: deque[Outgoing] = deque()
        self._sent: deque[Outgoing] = deque()  # numbers acknowledged + 1 to sent_up_to
        self._said_full = False

    def __len__(self) -> int:
        """Return how many messages are not acknowledged."""
        return len(self._waiting) + len(self._sent)

    def __bool__(self) -> bool:
        return True

    @property
    def can_send(self) -> bool:
        """Return whether ``send`` takes a message now; if not, WindowOpened will be emitted."""
        if self.kept_bytes < self.limits.window:
            return True
        self._said_full = True
        return False

    def send(
        self, buffers: Sequence[Buffer], tag: object = None, *, is_patient: bool = False
    ) -> None:
        """Take a message, to be handed out by the connection's ``data_to_send``.

        The buffers are kept, not copied, and must not change until acknowledged. ``tag`` comes back
        in Acknowledged or Unsent; for a small message that ``is_patient`` some milliseconds later,
        with others. WindowFullError when not ``can_send``; ValueError when there are too many
        buffers or bytes.
        """
        if self.state is SessionState.ENDED:
            next_state(SESSION, self.state, SessionEvent.SEND)
        if self.kept_bytes >= self.limits.window:
            self._said_full = True
            raise WindowFullError(f"{self.kept_bytes} bytes are not acknowledged")
        kept = list(buffers)
        size = 0
        for index, buffer in enumerate(kept):
            if type(buffer) is memoryview:
                kept[index] = buffer = buffer.cast("B")  # noqa: PLW2901
            size += len(buffer)
        if size > self.max_message or not 0 < len(kept) <= MAX_BUFFERS:
            raise ValueError(
                f"a message of {size} bytes in {len(kept)} buffers; at most "
                f"{self.max_message} bytes in 1 to {MAX_BUFFERS} buffers can be sent"
            )
        self.kept_bytes += size + MESSAGE_COST
        self._waiting.append(Outgoing(kept, size, tag, is_patient=is_patient))

    def take(self) -> Outgoing | None:
        """Hand out the next message, which gets the number ``sent_up_to``; None when all are."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        message.handed_out = True
        self._sent.append(message)
        self.sent_up_to += 1
        return message

    def acknowledge(self, up_to: int) -> None:
        """Forget what the peer has received; RefusedError when that cannot be."""
        if not self.acknowledged <= up_to <= self.sent_up_to:
            raise RefusedError(
                f"the peer acknowledges message {up_to}; {self.acknowledged} to "
                f"{self.sent_up_to} can be: another session's"
            )
        for _ in range(up_to - self.acknowledged):
            message = self._sent.popleft()
            self.kept_bytes -= message.size + MESSAGE_COST
            if message.tag is not None:
                self.done_tags.append(message.tag)
        self.acknowledged = up_to

    def window_opened(self) -> bool:
        """Return, once, that half the window is free after it was found full."""
        if not self._said_full or self.kept_bytes > self.limits.window // 2:
            return False
        self._said_full = False
        return True

    @property
    def is_decider(self) -> bool:
        """Return whether this side says which connection counts."""
        return self.peer is not None and self.own.incarnation < self.peer.incarnation

    def attach(self, connection: Connection) -> Connection | None:
        """Move to ``connection``; return the one that it supersedes, which is dead from now on."""
        self._become(SessionEvent.ATTACH)
        older, self.connection = self.connection, connection
        if self.is_decider:
            self._epoch += 1
        return older

    def detach(self, connection: Connection) -> None:
        """Note that ``connection`` is dead, if it still counts."""
        if self.connection is connection:
            self.connection = None
            self._become(SessionEvent.DETACH)

    def welcome(self) -> tuple[int, int, bytes]:
        """Return number, acknowledged and body of this side's WELCOME."""
        limits = self.limits
        body = WELCOME_BODY.pack(self.life, self._peer_life, limits.max_frame, limits.max_message)
        return self._epoch, self.received, body

    def check(self, welcome: Welcome) -> None:
        """Refuse a WELCOME that is older than the connection in use, or comes too late."""
        epoch, life = welcome.epoch, welcome.life
        if self.state is SessionState.ENDED:
            raise RefusedError("this end gave the session up meanwhile")
        if self.is_decider:
            if epoch != self._epoch or life < self._peer_life:
                raise RefusedError(f"a welcome of epoch {epoch}, life {life}: another session's")
        elif (life, epoch) <= (self._peer_life, self._epoch):
            raise RefusedError("a newer connection of the same session has taken over")
        else:
            self._epoch = epoch

    def welcomed(self, welcome: Welcome) -> tuple[int, list[Unsent]]:
        """Take the peer's WELCOME; return how many messages go out again, and what is lost."""
        lost: list[Unsent] = []
        self.is_forgotten = welcome.life != self._peer_life > 0
        if welcome.life != self._peer_life:
            if self.is_forgotten:
                lost = self._restart()
            self._peer_life = welcome.life
        if welcome.about == self.life:
            self.acknowledge(welcome.received)
        elif self.is_decider or self.acknowledged:
            raise RefusedError(f"a welcome about life {welcome.about} in life {self.life}")
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self.sent_up_to = self.acknowledged
        self.max_message = min(self.limits.max_message, welcome.max_message)
        lost += self._drop(lambda each: each.size > self.max_message)
        self._become(SessionEvent.WELCOME)
        return sum(each.handed_out for each in self._waiting), lost

    def end(self) -> list[Unsent]:
        """Give the peer up: refuse further messages, return those not acknowledged."""
        self._become(SessionEvent.END)
        self.connection = None
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        return self._drop(lambda _: True)

    def _restart(self) -> list[Unsent]:
        """Start again from 1 with a peer that forgot this session."""
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self.received = self.acknowledged = self.sent_up_to = 0
        return self._drop(lambda each: each.handed_out)

    def _drop(self, unwanted: Callable[[Outgoing], bool]) -> list[Unsent]:
        """Take what is unwanted out of what waits."""
        lost = [each for each in self._waiting if unwanted(each)]
        if lost:
            self._waiting = deque(each for each in self._waiting if not unwanted(each))
            self.kept_bytes -= sum(each.size + MESSAGE_COST for each in lost)
        return [Unsent(each.buffers, each.tag, each.handed_out) for each in lost]

    def _become(self, event: SessionEvent) -> None:
        self.state = next_state(SESSION, self.state, event)
