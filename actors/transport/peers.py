"""The other processes: reached, accepted, lost and reached again.

Theory of operation. Every process listens under its address and dials a peer when it first has
something for it. Messages then flow both ways over the same connection, and the session
(session.py) carries what is not acknowledged over to the next one. When a connection ends, the peer
is dialed again at once: the kernel refuses a local address that nobody listens at, and only then is
the peer *dead*, and what was not acknowledged is handed back. A peer that accepts but does not get
further is dialed again later and later.

A *turn* is what the process does for one arrival: messages are acknowledged and handed to the
shell, handlers run, and only then everything that was sent meanwhile is written.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from understudy.actors.transport.addresses import ProcessAddress, parse_address
from understudy.actors.transport.channel import Channel
from understudy.actors.transport.events import (
    Acknowledged,
    Authenticated,
    Closed,
    Event,
    MessageReceived,
    Opened,
    Refused,
    Superseded,
    Undeliverable,
    Unsent,
    WindowOpened,
)
from understudy.actors.transport.frames import Buffer
from understudy.actors.transport.handshake import Role
from understudy.actors.transport.identity import Identity
from understudy.actors.transport.protocol import Connection
from understudy.actors.transport.session import MESSAGE_COST, Limits, Session
from understudy.actors.transport.sessions import Sessions
from understudy.actors.transport.sockets import is_ours, local_socket

logger = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPTS_PER_PASS = 64
FLUSH_BYTES = 256 * 1024  # what may gather in a long turn before it is written
MAX_OVERFLOW = 256 * 1024 * 1024  # what may wait for one peer behind its window
BACKLOG_RETRY_S = 0.005
FIRST_RETRY_S, LAST_RETRY_S = 0.01, 1.0


class Shell(Protocol):
    """Who the peers work for; everything is called on the loop, in a turn."""

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """Take a message, to be handled in :meth:`deliver`."""

    def deliver(self) -> None:
        """Handle what was received."""

    def sent(self, tags: Sequence[object]) -> None:
        """Note that these messages have arrived."""

    def undeliverable(self, messages: Sequence[Unsent]) -> None:
        """Take back messages whose target is dead."""

    def refused(self, tag: object, reason: str) -> None:
        """Take back a message that cannot be sent."""

    def lost(self, address: ProcessAddress) -> None:
        """Note that the process at ``address`` is dead."""


class Peer:
    """What this process has with one address."""

    __slots__ = (
        "address",
        "channel",
        "channels",
        "failures",
        "overflow",
        "overflow_bytes",
        "retry",
        "sender",
        "session",
        "unflushed",
    )

    def __init__(self, address: ProcessAddress, session: Session) -> None:
        self.address = address
        self.session = session
        self.channel: Channel | None = None  # the one that messages flow over
        self.channels: set[Channel] = set()  # it, and those that are not that far
        self.failures = 0  # connections that ended before messages flowed
        self.retry: asyncio.TimerHandle | None = None
        self.overflow: deque[tuple[list[Buffer], object]] = deque()  # behind the window
        self.overflow_bytes = 0
        self.unflushed = 0
        self.sender: object = None  # the shell's own


class Peers:
    """All peers of one process; used on the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: Identity,
        address: ProcessAddress,
        shell: Shell,
        limits: Limits | None = None,
    ) -> None:
        self.loop = loop
        self.address = address
        self._shell = shell
        self._sessions = Sessions(own, limits)
        self._peers: dict[str, Peer] = {}
        self._channels: dict[Connection, Channel] = {}
        self._dirty: dict[Peer, None] = {}
        self._heard: dict[Channel, None] = {}
        self._at_end: list[Callable[[], None]] = []
        self._in_turn = False
        self._turn_due = False
        self._listener = local_socket()
        try:
            self._listener.bind(address.socket_name)
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        loop.add_reader(self._listener.fileno(), self._accept)

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        numbers = [channel.fileno() for channel in self._channels.values()]
        return [fd for fd in (*numbers, self._listener.fileno()) if fd >= 0]

    def send(self, address: ProcessAddress, buffers: list[Buffer], tag: object) -> None:
        """Send a message; ``tag`` comes back through the shell, once."""
        peer = self._peers.get(address.text) or self._make(address)
        session = peer.session
        if peer.overflow or not session.can_send:
            self._put_behind(peer, buffers, tag)
            return
        try:
            session.send(buffers, tag)
        except ValueError as error:
            self._shell.refused(tag, str(error))
            return
        self._dirty[peer] = None
        peer.unflushed += MESSAGE_COST + len(buffers[0])
        if peer.unflushed > FLUSH_BYTES and peer.channel is not None:
            peer.unflushed = 0
            peer.channel.flush()
        if not self._in_turn:
            self._need_turn()

    def received(self, channel: Channel, received: bytes) -> None:
        """Take what a channel has read, nothing at its end: one turn."""
        self._in_turn = True
        connection = channel.connection
        channel.has_ended = not received
        events = connection.receive_data(received) if received else connection.receive_eof()
        arrived = False
        for event in events:
            if type(event) is MessageReceived and channel.peer is not None:
                arrived = True
                self._shell.received(channel.peer, event.buffers)
            else:
                self._happened(channel, event)
        if not received:
            self._ended(channel)
        elif not channel.is_closed:
            self._heard[channel] = None
        if arrived:
            # Before handlers, which may take long; with what they send it was no faster: measured.
            self._acknowledge()
            self._shell.deliver()
        self.end_turn()

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Call back, once, before what this turn sends is written."""
        self._at_end.append(callback)
        if not self._in_turn:
            self._need_turn()

    def end_turn(self) -> None:
        """Write what was sent, then acknowledge what no message acknowledged."""
        self._in_turn = True
        self._turn_due = False
        while self._at_end:
            callbacks, self._at_end = self._at_end, []
            for callback in callbacks:
                callback()
        dirty, self._dirty = self._dirty, {}
        for peer in dirty:
            peer.unflushed = 0
            if peer.channel is not None:
                peer.channel.flush()
            elif not peer.channels and peer.retry is None:
                self._dial(peer)
        self._acknowledge()
        self._in_turn = False
        if self._dirty or self._at_end:
            self._need_turn()

    def finish_turn(self) -> None:
        """Write what would be written in the next pass of the loop, which is about to pause."""
        if self._turn_due:
            self.end_turn()

    def close(self) -> None:
        """Close everything without a word."""
        if self._listener.fileno() >= 0:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for channel in list(self._channels.values()):
            channel.close()
        for peer in self._peers.values():
            if peer.retry is not None:
                peer.retry.cancel()
        self._channels.clear()
        self._peers.clear()
        self._dirty.clear()
        self._heard.clear()

    def _make(self, address: ProcessAddress) -> Peer:
        peer = Peer(address, self._sessions.to(address.text))
        self._peers[address.text] = peer
        return peer

    def _need_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.loop.call_soon(self.end_turn)

    def _acknowledge(self) -> None:
        heard, self._heard = self._heard, {}
        for channel in heard:
            connection = channel.connection
            if connection.ack_due:
                connection.acknowledge()
            channel.flush()

    # --- A full window ------------------------------------------------------------------------

    def _put_behind(self, peer: Peer, buffers: list[Buffer], tag: object) -> None:
        size = sum(map(len, buffers)) + MESSAGE_COST
        if peer.overflow_bytes + size > MAX_OVERFLOW and peer.overflow:
            self._shell.refused(tag, f"{peer.overflow_bytes} bytes wait for {peer.address}")
            return
        peer.overflow.append((buffers, tag))
        peer.overflow_bytes += size

    def _take_overflow(self, peer: Peer) -> None:
        while peer.overflow and peer.session.can_send:
            buffers, tag = peer.overflow.popleft()
            peer.overflow_bytes -= sum(map(len, buffers)) + MESSAGE_COST
            try:
                peer.session.send(buffers, tag)
            except ValueError as error:
                self._shell.refused(tag, str(error))
        self._dirty[peer] = None

    # --- Connections --------------------------------------------------------------------------

    def _dial(self, peer: Peer) -> None:
        """Connect to a peer; a local one is connected, or dead, when this returns."""
        peer.retry = None
        if peer.address.host != self.address.host:
            logger.error("no way to another host yet: %s", peer.address)
            self._died(peer)
            return
        sock = local_socket()
        try:
            sock.connect(peer.address.socket_name)
        except BlockingIOError:  # its backlog is full
            sock.close()
            peer.retry = self.loop.call_later(BACKLOG_RETRY_S, self._dial, peer)
            return
        except OSError:
            sock.close()
            self._died(peer)
            return
        if not is_ours(sock):
            sock.close()
            self._died(peer)
            return
        self._start(sock, Role.DIALER, peer)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_PASS):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: let others end first
                logger.warning("cannot accept a connection: %s", error)
                fd = self._listener.fileno()
                self.loop.remove_reader(fd)
                self.loop.call_later(LAST_RETRY_S, self.loop.add_reader, fd, self._accept)
                return
            sock.setblocking(False)
            if is_ours(sock):
                self._start(sock, Role.ACCEPTOR, None)
            else:
                sock.close()

    def _start(self, sock: socket.socket, role: Role, peer: Peer | None) -> None:
        expect = None if peer is None else peer.address.text
        connection = Connection(role, self._sessions, expect=expect)
        channel = self._channels[connection] = Channel(self, sock, connection, peer)
        if peer is not None:
            peer.channels.add(channel)
        channel.open()

    def _ended(self, channel: Channel) -> None:
        """Forget a channel; when it was the peer's last, dial the peer to see if it lives."""
        self._channels.pop(channel.connection, None)
        self._heard.pop(channel, None)
        channel.close()
        peer = channel.peer
        if peer is None or self._peers.get(peer.address.text) is not peer:
            return
        peer.channels.discard(channel)
        if peer.channel is channel:
            peer.channel = None
        else:
            peer.failures += 1
        if peer.channels or peer.retry is not None:
            return
        if not peer.failures:
            self._dirty[peer] = None  # dialed at the end of this turn
            return
        delay_s = min(FIRST_RETRY_S * 2**peer.failures, LAST_RETRY_S)
        peer.retry = self.loop.call_later(delay_s, self._dial, peer)

    def _died(self, peer: Peer) -> None:
        self._peers.pop(peer.address.text, None)
        unsent = self._sessions.forget(peer.address.text)
        unsent += [Unsent(buffers, tag, False) for buffers, tag in peer.overflow]
        for channel in list(peer.channels):
            self._channels.pop(channel.connection, None)
            channel.close()
        if unsent:
            self._shell.undeliverable(unsent)
        self._shell.lost(peer.address)

    # --- Events -------------------------------------------------------------------------------

    def _happened(self, channel: Channel, event: Event) -> None:
        match event:
            case Acknowledged(tags):
                self._shell.sent(tags)
            case Authenticated(identity, session):
                self._authenticated(channel, identity, session)
            case Opened() if channel.peer is not None:
                channel.peer.channel = channel
                channel.peer.failures = 0
                self._take_overflow(channel.peer)
            case WindowOpened() if channel.peer is not None:
                self._take_overflow(channel.peer)
            case Undeliverable(messages):
                self._shell.undeliverable(messages)
            case Superseded(connection):
                older = self._channels.get(connection)
                if older is not None:
                    self._ended(older)
            case Refused(reason):
                level = logging.DEBUG if channel.has_ended else logging.WARNING  # a probe
                logger.log(level, "refused a connection: %s", reason)
                channel.flush()  # a farewell, if there is one
                self._ended(channel)
            case Closed(reason):
                logger.debug("%s: %s", channel.peer and channel.peer.address, reason)

    def _authenticated(self, channel: Channel, identity: Identity, session: Session) -> None:
        peer = self._peers.get(identity.address)
        if peer is None:
            try:
                peer = self._make(parse_address(identity.address))
            except ValueError as error:
                logger.warning("refused a connection: %s", error)
                self._ended(channel)
                return
        peer.session = session
        peer.channels.add(channel)
        channel.peer = peer
