"""One connection between two processes: bytes in, events and buffers out, and no I/O.

Theory of operation: see states.py for the states, handshake.py for how the peer is authenticated,
frames.py for the bytes after that, session.py for what outlives a connection.

The shell feeds ``receive_data`` whatever arrives and acts on the events; it calls
``data_to_send`` after that, after ``Session.send``, and whenever its socket takes more, until it
returns nothing. The shell owns the clock: it closes a connection that is not ``is_open`` in
time, calls ``acknowledge`` at once when ``ack_is_urgent``, within some milliseconds when
``ack_due``, and now and then as a sign of life.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from greenroom.actors.transport.addresses import Identity, RefusedError
from greenroom.actors.transport.frames import (
    CHUNK,
    DATA,
    HEADER,
    MAX_BUFFERS,
    MIN_MAX_FRAME,
    PATIENT,
    SMALL_MESSAGE,
    START,
    Buffer,
    FrameKind,
    FrameReader,
    Sealer,
    begin_assembly,
    check_order,
    split_body,
)
from greenroom.actors.transport.handshake import (
    CONNECTION,
    SESSION,
    ConnectionEvent,
    ConnectionState,
    Handshake,
    Role,
    SessionEvent,
    SessionState,
    next_state,
)

# What a connection tells the shell that feeds it bytes, in the order it happened.
#
# Plain slotted dataclasses, not frozen ones: those cost three times as much to make, per message.


@dataclass(slots=True)
class Authenticated:
    """The peer is who it says; ``session`` will carry its messages."""

    peer: Identity
    session: Session


@dataclass(slots=True)
class Opened:
    """Messages flow from now on; ``resent`` of them were sent before on an earlier connection.

    ``is_forgotten`` when the peer had given this end up meanwhile, and with it what it had sent.
    """

    session: Session
    resent: int
    is_forgotten: bool = False


@dataclass(slots=True)
class MessageReceived:
    """A message, delivered this once; all but the first of its buffers are writable."""

    buffers: list[Buffer]


@dataclass(slots=True)
class Acknowledged:
    """The peer has received these messages, by the ``tag`` each was sent with (None left out)."""

    tags: list[object]


@dataclass(slots=True)
class WindowOpened:
    """A session that had refused a message, or said that it would, takes messages again."""

    session: Session


@dataclass(slots=True)
class Unsent:
    """A message that was not acknowledged before its session ended.

    ``may_have_arrived`` is false when no byte of it was handed out, so that sending it elsewhere
    cannot repeat it.
    """

    buffers: list[Buffer]
    tag: object
    may_have_arrived: bool


@dataclass(slots=True)
class Undeliverable:
    """These messages will never be delivered: the process they were for is gone, or forgot us."""

    messages: list[Unsent]


@dataclass(slots=True)
class Superseded:
    """This older connection of the same session is dead; close its socket."""

    connection: Connection


@dataclass(slots=True)
class Refused:
    """The peer broke the rules; the connection is dead. Send what is left, log, close."""

    reason: str


@dataclass(slots=True)
class Closed:
    """The stream ended after authentication; inside a frame that says so. The session lives on."""

    reason: str


Event: TypeAlias = (
    Authenticated
    | Opened
    | MessageReceived
    | Acknowledged
    | WindowOpened
    | Undeliverable
    | Superseded
    | Refused
    | Closed
)


# What two processes have sent each other, across every connection between them.
#
# Theory of operation. Each side numbers its messages from 1 as they are first handed out, and
# keeps each until the peer acknowledges it. After a reconnect both say what they have received,
# so exactly the rest is handed out again: nothing is lost, repeated or reordered while both
# processes live and neither has given the other up.
#
# Which connection counts, when both dial at once or one has not noticed that the last one died?
# One side decides: the one with the smaller incarnation. It takes every newly authenticated
# connection in place of the one before, and sends WELCOME first, with an epoch that grows each
# time. The other takes a connection when that WELCOME arrives and is newer than the last, and
# answers with its own. Both end up on the same connection because one side's order decides.
#
# A session can be given up on one side only (``Sessions.forget``). Its successor has a greater
# *life*, a number that the WELCOME carries; the peer that sees a greater life than it knew starts
# again from 1, and reports what it had handed out and nobody acknowledged, for it may or may not
# have arrived.
#
#     WELCOME  number = epoch, acknowledged = received up to,
#              body = own life u64, the peer's life that "received" is about u64 (0: none yet),
#                     longest chunk to send here u32, longest message to send here u64

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


# All sessions of one process, by the address of the other.

MAX_ENDED = 4096


class Sessions:
    """Finds the session that a message or an authenticated connection belongs to.

    Not thread-safe: one loop owns it, its sessions and their connections.
    """

    def __init__(self, own: Identity, limits: Limits | None = None) -> None:
        self.own = own
        self.limits = limits or Limits()
        self._by_address: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # incarnations that were replaced, oldest first
        self._lives = 0

    def __len__(self) -> int:
        return len(self._by_address)

    def to(self, address: str) -> Session:
        """Return the session with the process at ``address``, made on first use."""
        session = self._by_address.get(address)
        if session is None:
            self._lives += 1
            session = self._by_address[address] = Session(self.own, self._lives, self.limits)
        return session

    def connection_to(self, address: str) -> Connection | None:
        """Return the connection that counts for the session with ``address``, if there is one."""
        session = self._by_address.get(address)
        return None if session is None else session.connection

    def meet(self, peer: Identity) -> tuple[Session, list[Unsent]]:
        """Return the session with ``peer``, who is authenticated, and what its predecessor leaves.

        A new incarnation at the same address ends the old one's session. RefusedError when ``peer``
        is itself an incarnation that was replaced.
        """
        if peer.incarnation in self._ended:
            raise RefusedError(f"{peer} was replaced by a later incarnation")
        session = self.to(peer.address)
        lost: list[Unsent] = []
        if session.peer is not None and session.peer.incarnation != peer.incarnation:
            self._ended[session.peer.incarnation] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            lost = self.forget(peer.address)
            session = self.to(peer.address)
        session.peer = peer
        return session, lost

    def forget(self, address: str) -> list[Unsent]:
        """End the session with ``address`` and its connection; return what was not acknowledged."""
        session = self._by_address.pop(address, None)
        if session is None:
            return []
        connection = session.connection
        lost = session.end()
        if connection is not None:
            connection.close()
        return lost


# Turns a session's messages into the frames of one connection; frames.py describes them.


class FrameWriter:
    """Writes frames; what it returns must be sent in that order, for the tags count."""

    def __init__(self, sealer: Sealer | None, max_frame: int) -> None:
        self.max_frame = max_frame
        self._sealer = sealer
        self._chunks: Iterator[list[memoryview]] | None = None  # of the message under way

    def control(self, kind: int, number: int, acknowledged: int, body: bytes = b"") -> bytes:
        """Return a frame that is no part of a message."""
        frame = HEADER.pack(kind, 0, len(body), number, acknowledged) + body
        return frame if self._sealer is None else frame + self._sealer.tag(frame)

    def write(self, session: Session, limit: int, out: list[Buffer]) -> bool:
        """Append about ``limit`` bytes of what ``session`` has; return whether there was any."""
        budget, acknowledged = limit, session.received
        joined: list[bytes] = []  # small ones leave as one buffer: a copy is cheaper than a vector
        while budget > 0:
            if self._chunks is not None:
                budget -= self._chunk(session.sent_up_to, acknowledged, joined, out)
                continue
            message = session.take()
            if message is None:
                break
            frame = self._first_frame(message, session.sent_up_to, acknowledged)
            joined.append(frame)
            budget -= len(frame)
        if joined:
            out.append(b"".join(joined))
        return budget != limit

    def _first_frame(self, message: Outgoing, number: int, acknowledged: int) -> bytes:
        buffers, size = message.buffers, message.size
        count = len(buffers)
        kind = PATIENT if message.is_patient else DATA
        if size + 8 * count > SMALL_MESSAGE:
            sizes = _sizes(buffers)
            frame = HEADER.pack(START, count, len(sizes), number, acknowledged) + sizes
            self._chunks = cut(buffers, self.max_frame)
        elif count == 1:
            frame = HEADER.pack(kind, 1, size, number, acknowledged) + buffers[0]
        else:
            sizes = _sizes(buffers)
            header = HEADER.pack(kind, count, len(sizes) + size, number, acknowledged)
            frame = b"".join((header, sizes, *buffers))
        return frame if self._sealer is None else frame + self._sealer.tag(frame)

    def _chunk(self, number: int, acknowledged: int, joined: list[bytes], out: list[Buffer]) -> int:
        pieces = next(self._chunks, None) if self._chunks is not None else None
        if pieces is None:
            self._chunks = None
            return 0
        size = sum(map(len, pieces))
        header = HEADER.pack(CHUNK, 0, size, number, acknowledged)
        out.append(b"".join((*joined, header)))
        joined.clear()
        out.extend(pieces)
        if self._sealer is not None:
            state = self._sealer.begin()
            state.update(header)
            for piece in pieces:
                state.update(piece)
            joined.append(state.digest())
        return size + HEADER.size


def cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of ``buffers`` in runs of ``size``, the last one shorter; copy nothing."""
    pieces: list[memoryview] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            piece, rest = rest[:room], rest[room:]
            pieces.append(piece)
            room -= len(piece)
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def _sizes(buffers: Sequence[Buffer]) -> bytes:
    return struct.pack(f">{len(buffers)}Q", *map(len, buffers))


PATIENT_MESSAGES = 64
PATIENT_BYTES = 256 * 1024
ACK, WELCOME = int(FrameKind.ACK), int(FrameKind.WELCOME)
_ALIVE_AND_AUTHENTICATED = frozenset({ConnectionState.WELCOMING, ConnectionState.OPEN})


class Connection:
    """One byte stream to one peer.

    With ``key`` and ``nonce`` (32 bytes each, the nonce never used before) it is of the remote
    kind, without them of the local kind, for sockets whose peer the kernel has named. ``context``
    is what both ends must have in common, on the remote kind. A dialer says with ``expect`` which
    address must answer.
    """

    def __init__(
        self,
        role: Role,
        sessions: Sessions,
        *,
        key: bytes | None = None,
        nonce: bytes | None = None,
        context: bytes = b"",
        expect: str | None = None,
    ) -> None:
        self.state = ConnectionState.GREETING
        self.role = role
        self.session: Session | None = None
        self._sessions = sessions
        self._expect = expect
        self._handshake = Handshake(role, sessions.own, key=key, nonce=nonce, context=context)
        self._received = bytearray()  # of the handshake
        self._out: list[Buffer] = [hello] if (hello := self._handshake.start()) else []
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._acknowledged = 0  # what the peer was last told
        self._unacknowledged_bytes = 0
        self._has_impatient = False  # a message whose sender waits for its acknowledgement

    @property
    def peer(self) -> Identity | None:
        """Return who the peer is; None until it is authenticated."""
        return None if self.session is None else self.session.peer

    @property
    def is_authenticated(self) -> bool:
        """Return whether the peer is known and the connection alive."""
        return self.state in _ALIVE_AND_AUTHENTICATED

    @property
    def is_open(self) -> bool:
        """Return whether messages flow; until then the shell should allow seconds, not more."""
        return self.state is ConnectionState.OPEN

    @property
    def ack_due(self) -> int:
        """Return how many messages the peer does not yet know to have arrived."""
        if self.session is None or self.state is not ConnectionState.OPEN:
            return 0
        return self.session.received - self._acknowledged

    @property
    def ack_is_urgent(self) -> bool:
        """Return whether the peer waits to hear what arrived, or its window may run full."""
        due = self.ack_due
        return bool(due) and (
            self._has_impatient
            or due >= PATIENT_MESSAGES
            or self._unacknowledged_bytes >= PATIENT_BYTES
        )

    def receive_data(self, received: Buffer) -> list[Event]:
        """Take the next bytes of the stream; return what they make happen. Never raises for them.

        After Refused or Closed nothing is ever returned. A buffer may be reused after the call.
        """
        events: list[Event] = []
        if self.state is ConnectionState.DEAD:
            return events
        try:
            if self._reader is None:
                received = self._shake_hands(received, events)
            if self._reader is not None and self.session is not None and received:
                self._read(self.session, self._reader, received, events)
            self._report_acknowledged(events)
        except RefusedError as refusal:
            self._refuse(refusal, events)
        return events

    def rooms(self) -> list[memoryview]:
        """Return where the next bytes may be read to, past ``receive_data``; call ``filled`` then.

        Nowhere, where they may not. It spares a large message a copy.
        """
        return [] if self._reader is None else self._reader.rooms()

    def filled(self, size: int) -> None:
        """Note that so much of ``rooms`` was read; nothing follows from it."""
        if self._reader is not None:
            self._reader.filled(size)

    @property
    def is_between_chunks(self) -> bool:
        """Return whether a message of which more is to be read to ``rooms`` is under way."""
        return self._reader is not None and self._reader.is_between_chunks

    def receive_eof(self) -> list[Event]:
        """Take the end of the stream: Refused during the handshake, Closed after it."""
        if self.state is ConnectionState.DEAD:
            return []
        if self.is_authenticated:
            inside = self._reader is not None and self._reader.is_inside
            self.close()
            where = "inside a message" if inside else "between messages"
            return [Closed(f"the peer closed the connection {where}")]
        proving = self.state is ConnectionState.PROVING
        doubt = "; it may hold another cluster's key" if proving else ""
        self.close()
        return [Refused(f"the peer closed the connection during the handshake{doubt}")]

    def data_to_send(self, limit: int = 1024 * 1024) -> list[Buffer]:
        """Return the next buffers to write, in order, about ``limit`` bytes; empty when none is.

        Call again until empty when the socket takes more. What was returned must be written, or the
        connection closed. Buffers of large messages are the caller's own, not copies.
        """
        out, self._out = self._out, []
        if self.state is ConnectionState.OPEN and self.session is not None and self._writer:
            acknowledged = self.session.received
            if self._writer.write(self.session, limit, out):
                self._told(acknowledged)
        return out

    def acknowledge(self) -> None:
        """Tell the peer, by ``data_to_send``, what was received; IllegalEventError unless open."""
        self._become(ConnectionEvent.ACKNOWLEDGE)
        if self.session is not None and self._writer is not None:
            self._out.append(self._writer.control(ACK, 0, self.session.received))
            self._told(self.session.received)

    def close(self) -> None:
        """Die without a word; the session waits for another connection."""
        self._become(ConnectionEvent.CLOSE)
        self._die()

    def _told(self, acknowledged: int) -> None:
        self._acknowledged, self._unacknowledged_bytes = acknowledged, 0
        self._has_impatient = False

    def _become(self, event: ConnectionEvent) -> None:
        self.state = next_state(CONNECTION, self.state, event)

    def _die(self) -> None:
        self._out.clear()
        self._received.clear()
        self._reader = self._writer = None
        if self.session is not None:
            self.session.detach(self)

    def _refuse(self, refusal: RefusedError, events: list[Event]) -> None:
        self._report_acknowledged(events)
        self._become(ConnectionEvent.REFUSE)
        self._die()
        if refusal.farewell:
            self._out.append(refusal.farewell)
        events.append(Refused(refusal.reason))

    def _report_acknowledged(self, events: list[Event]) -> None:
        session = self.session
        if session is None or session.connection is not self:
            return
        if session.done_tags:
            events.append(Acknowledged(session.done_tags))
            session.done_tags = []
        if session.window_opened():
            events.append(WindowOpened(session))

    def _shake_hands(self, received: Buffer, events: list[Event]) -> bytes:
        """Run the handshake on what has arrived; return what lies behind it."""
        self._received += received
        while not self.is_authenticated:
            step = self._handshake.step(self._received)
            if step is None:
                return b""
            event, answer, size = step
            del self._received[:size]
            if event is ConnectionEvent.IDENTITY:
                self._authenticated(events, answer)
            elif answer:
                self._out.append(answer)
            self._become(event)
        rest = bytes(self._received)
        self._received.clear()
        return rest

    def _authenticated(self, events: list[Event], answer: bytes) -> None:
        peer = self._handshake.known_peer
        if self._expect is not None and peer.address != self._expect:
            raise RefusedError(f"{peer} answers where {self._expect} should")
        older = self._sessions.connection_to(peer.address)
        session, lost = self._sessions.meet(peer)
        self.session = session
        events.append(Authenticated(peer, session))
        if older is not None and older.state is ConnectionState.DEAD:
            events.append(Superseded(older))
        if lost:
            events.append(Undeliverable(lost))
        if answer:
            self._out.append(answer)
        keys = self._handshake.frame_keys
        own, other = (None, None) if keys is None else (Sealer(keys[0]), Sealer(keys[1]))
        max_frame = session.limits.max_frame
        self._writer, self._reader = FrameWriter(own, max_frame), FrameReader(other, max_frame)
        if session.is_decider:
            self._take_over(session, events)
            self._send_welcome(session, self._writer)

    def _take_over(self, session: Session, events: list[Event]) -> None:
        older = session.attach(self)
        if older is not None:
            older.close()
            events.append(Superseded(older))

    def _send_welcome(self, session: Session, writer: FrameWriter) -> None:
        self._out.append(writer.control(WELCOME, *session.welcome()))

    def _read(
        self, session: Session, reader: FrameReader, received: Buffer, events: list[Event]
    ) -> None:
        for kind, buffers, number, acknowledged, body in reader.frames(received):
            if self.state is not ConnectionState.OPEN:
                if kind != WELCOME:
                    raise RefusedError(f"a frame of kind {kind} before the welcome")
                self._welcomed(session, number, acknowledged, body, events)
                continue
            if acknowledged != session.acknowledged:
                session.acknowledge(acknowledged)
            if kind in {DATA, PATIENT}:
                check_order(number, session.received + 1, reader.assembly)
                message = MessageReceived([body] if buffers == 1 else split_body(buffers, body))
                session.received = number
                self._unacknowledged_bytes += len(body)
                self._has_impatient |= kind == DATA
                events.append(message)
            elif kind == CHUNK:
                self._chunk_arrived(session, reader, events)
            elif kind == START:
                check_order(number, session.received + 1, reader.assembly)
                reader.assembly = begin_assembly(number, buffers, body, session.limits.max_message)
            elif kind != ACK or body:
                raise RefusedError(f"a frame of kind {kind} with {len(body)} bytes, out of place")

    def _chunk_arrived(self, session: Session, reader: FrameReader, events: list[Event]) -> None:
        assembly = reader.assembly
        if assembly is None or assembly.left:
            return
        reader.assembly = None
        session.received = assembly.number
        self._unacknowledged_bytes += sum(map(len, assembly.buffers))
        self._has_impatient = True
        events.append(MessageReceived([*assembly.buffers]))

    def _welcomed(
        self, session: Session, epoch: int, received: int, body: bytes, events: list[Event]
    ) -> None:
        welcome = read_welcome(epoch, received, body)
        session.check(welcome)
        if not session.is_decider:
            self._take_over(session, events)
        resent, lost = session.welcomed(welcome)
        self._told(session.received)
        if self._writer is not None:
            self._writer.max_frame = min(self._writer.max_frame, welcome.max_frame)
            if not session.is_decider:
                self._send_welcome(session, self._writer)
        self._become(ConnectionEvent.WELCOME)
        if lost:
            events.append(Undeliverable(lost))
        events.append(Opened(session, resent, session.is_forgotten))
