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

from greenroom.actors.transport.bodies import begin_assembly, check_order, split_body
from greenroom.actors.transport.events import (
    Acknowledged,
    Authenticated,
    Closed,
    Event,
    MessageReceived,
    Opened,
    Refused,
    Superseded,
    Undeliverable,
    WindowOpened,
)
from greenroom.actors.transport.frames import (
    CHUNK,
    DATA,
    PATIENT,
    START,
    Buffer,
    FrameKind,
    FrameReader,
    Sealer,
)
from greenroom.actors.transport.handshake import Handshake, Role
from greenroom.actors.transport.identity import Identity, RefusedError
from greenroom.actors.transport.session import Session, read_welcome
from greenroom.actors.transport.sessions import Sessions
from greenroom.actors.transport.states import (
    CONNECTION,
    ConnectionEvent,
    ConnectionState,
    next_state,
)
from greenroom.actors.transport.writer import FrameWriter

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
