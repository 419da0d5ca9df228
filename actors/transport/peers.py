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
from collections.abc import Callable
from typing import Any

from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress, parse_address
from greenroom.actors.transport.admission import Admission, Trouble
from greenroom.actors.transport.channel import Channel, Stream
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.dialing import Dialing
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
    Unsent,
    WindowOpened,
)
from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.handshake import Role
from greenroom.actors.transport.identity import Identity
from greenroom.actors.transport.listener import listen_here
from greenroom.actors.transport.network import Network
from greenroom.actors.transport.peer import Peer, Shell
from greenroom.actors.transport.protocol import Connection
from greenroom.actors.transport.remote import Remote
from greenroom.actors.transport.session import MESSAGE_COST, Limits, Session
from greenroom.actors.transport.sessions import Sessions
from greenroom.actors.transport.sockets import (
    Credentials,
    local_listener,
    own_connection,
    own_listener,
)
from greenroom.actors.transport.tls import Securing
from greenroom.core.backoff import pause_s

logger = logging.getLogger(__name__)

FLUSH_BYTES = 256 * 1024  # what may gather in a long turn before it is written
MAX_OVERFLOW = 256 * 1024 * 1024  # what may wait for one peer behind its window
BACKLOG_RETRY_S = 0.005
PATIENCE_S = 0.01  # how long an acknowledgement that is not urgent waits for a message to ride on
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 1.0


class Peers:
    """All peers of one process; used on the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: Identity,
        address: ProcessAddress,
        shell: Shell,
        limits: Limits | None = None,
        network: Network | None = None,
        gate: socket.socket | None = None,
    ) -> None:
        self.loop = loop
        self.address = address
        self._shell = shell
        self._sessions = Sessions(own, limits)
        self._peers: dict[str, Peer] = {}
        self._channels: dict[Connection, Channel] = {}
        self._dirty: dict[Peer, None] = {}
        self._heard: dict[Channel, None] = {}
        self._patient: dict[Channel, None] = {}  # to be acknowledged when the timer is due
        self._at_end: list[Callable[[], None]] = []
        self._in_turn = False
        self._turn_due = False
        self.admission = Admission(loop)
        listen = own_listener if address.is_admin else local_listener
        listener = listen(address.socket_name)
        self.shortage = Shortage()
        self._listener = listen_here(loop, listener, self.admission, self._accepted, self.shortage)
        self._remote: Remote | None = None
        if network is not None:
            try:
                self._remote = Remote(self, network, gate)
            except OSError:
                self._listener.close()
                raise

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        numbers = [channel.fileno() for channel in self._channels.values()]
        reaching = [peer.retry for peer in self._peers.values()]
        numbers += [each.fileno() for each in reaching if isinstance(each, Dialing | Securing)]
        if self._remote is not None:
            numbers += self._remote.descriptors()
        return [fd for fd in (*numbers, self._listener.fileno()) if fd >= 0]

    def send(
        self,
        address: ProcessAddress,
        buffers: list[Buffer],
        tag: object,
        *,
        is_patient: bool = False,
    ) -> None:
        """Send a message; ``tag`` comes back through the shell, once, later if ``is_patient``."""
        peer = self._peers.get(address.text) or self._make(address)
        session = peer.session
        if peer.overflow or not session.can_send:
            self._put_behind(peer, buffers, tag)
            return
        try:
            session.send(buffers, tag, is_patient=is_patient)
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

    def reach(self, address: ProcessAddress) -> None:
        """Connect to ``address`` if that is not done yet, so that its end is noticed."""
        peer = self._peers.get(address.text) or self._make(address)
        if peer.channel is None:
            self._dirty[peer] = None
            if not self._in_turn:
                self._need_turn()

    def trouble_with(self, address: ProcessAddress) -> Trouble:
        """Return why the host of ``address`` could not be reached the last time."""
        return self.admission.trouble_with(address)

    def write(self, address: ProcessAddress) -> None:
        """Write what was sent to ``address`` now, if it is connected, not at the turn's end."""
        peer = self._peers.get(address.text)
        if peer is not None and peer.channel is not None:
            peer.unflushed = 0
            peer.channel.flush()

    def received(self, channel: Channel, received: bytes) -> None:
        """Take what a channel has read, nothing at its end: one turn."""
        self._in_turn = True
        connection = channel.connection
        channel.has_ended = not received
        events = connection.receive_data(received) if received else connection.receive_eof()
        arrived = self._take(channel, events)
        events.clear()  # a handler need not have its message's bytes in memory too
        if not received:
            self._ended(channel)
        elif not channel.is_closed:
            self._heard[channel] = None
        if arrived:
            # Before handlers, which may take long; with what they send it was no faster: measured.
            self._acknowledge()
            try:
                self._shell.deliver()
            finally:  # a handler may raise what ends the loop's run, and the loop may run again
                self.end_turn()
        else:
            self.end_turn()

    def _take(self, channel: Channel, events: list[Event]) -> bool:
        """Do what events ask for; return whether one was a message."""
        arrived = False
        for event in events:
            if type(event) is MessageReceived and channel.peer is not None:
                arrived = channel.peer.has_progressed = True
                channel.peer.failures = 0
                self._shell.received(channel.peer, event.buffers)
            else:
                self._happened(channel, event)
        return arrived

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
                self.dial(peer)
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
        self._listener.close()
        if self._remote is not None:
            self._remote.close()
        self.admission.close()
        for channel in list(self._channels.values()):
            channel.close()
        for peer in self._peers.values():
            if peer.retry is not None:
                peer.retry.cancel()
        self._channels.clear()
        self._peers.clear()
        self._dirty.clear()
        self._heard.clear()
        self._patient.clear()

    def _make(self, address: ProcessAddress) -> Peer:
        peer = Peer(address, self._sessions.to(address.text))
        self._peers[address.text] = peer
        return peer

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing else runs in this pass of the loop, as far as can be known."""
        # asyncio's own queue, which uvloop does not show: at its end a batch is complete.
        return not (self._in_turn or getattr(self.loop, "_ready", True))

    def _need_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.loop.call_soon(self.end_turn)

    def _acknowledge(self) -> None:
        heard, self._heard = self._heard, {}
        for channel in heard:
            connection = channel.connection
            if connection.ack_is_urgent:
                connection.acknowledge()
            elif connection.ack_due:
                if not self._patient:
                    self.loop.call_later(PATIENCE_S, self._acknowledge_patient)
                self._patient[channel] = None
            channel.flush()

    def _acknowledge_patient(self) -> None:
        patient, self._patient = self._patient, {}
        for channel in patient:
            if channel.connection.ack_due:
                channel.connection.acknowledge()
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

    def dial(self, peer: Peer) -> None:
        """Connect to a peer; a local one is connected, or dead, when this returns."""
        peer.retry = None
        try:
            if peer.address.host == self.address.host:
                self._dial_here(peer)
            elif self._remote is not None and peer.address.host != LOOPBACK:
                self._remote.dial(peer)
            else:
                logger.error("%s is on another host; this one is not bound: --bind", peer.address)
                self.died(peer)
        except OSError as error:  # out of descriptors: let others end first
            logger.warning("cannot dial %s: %s", peer.address, error)
            self.shortage.failed(error, self.loop.time())
            peer.retry = self.loop.call_later(LAST_RETRY_S, self.dial, peer)

    def _dial_here(self, peer: Peer) -> None:
        strangers: list[Credentials] = []
        try:
            sock = own_connection(
                peer.address.socket_name, strangers, may_be_beside=peer.address.is_admin
            )
        except BlockingIOError:  # its backlog is full
            peer.retry = self.loop.call_later(BACKLOG_RETRY_S, self.dial, peer)
        except ConnectionRefusedError:
            self.died(peer)
        else:
            self._start(sock, Role.DIALER, peer)
        for pid, uid in strangers:
            self.admission.refused_here(uid, pid, peer.address)

    def _accepted(self, sock: socket.socket) -> None:
        self._start(sock, Role.ACCEPTOR, None)

    def _start(self, sock: socket.socket, role: Role, peer: Peer | None) -> None:
        self.start(sock, role, peer).open()

    def start(self, sock: Stream, role: Role, peer: Peer | None, **remote: Any) -> Channel:
        """Make a channel, which the caller opens; ``remote`` is what the remote kind needs."""
        self.shortage.over()
        expect = None if peer is None else peer.address.text
        connection = Connection(role, self._sessions, expect=expect, **remote)
        channel = self._channels[connection] = Channel(self, sock, connection, peer)
        if peer is not None:
            peer.channels.add(channel)
        return channel

    def turned_away(self, channel: Channel, reason: str) -> None:
        """End a channel whose peer broke the rules, or did not authenticate in time; say why."""
        if channel.source and self._remote is not None and not channel.has_ended:
            self.admission.refused(channel.source, reason)
        else:
            # A probe, or one of two that were dialed at once; whoever is left without says so.
            level = logging.DEBUG if channel.has_ended else logging.WARNING
            logger.log(level, "refused a connection: %s", reason)
        channel.flush()  # a farewell, if there is one
        self._ended(channel)

    def renew(self, channel: Channel) -> None:
        """End a channel that was in order; the session goes on over the next one."""
        if channel.peer is not None and channel.peer.channel is channel:
            channel.peer.has_progressed = True  # so that it is dialed at once
        self._ended(channel)
        if self._dirty and not self._in_turn:
            self._need_turn()

    def _ended(self, channel: Channel) -> None:
        """Forget a channel; when it was the peer's last, dial the peer to see if it lives."""
        if self._channels.pop(channel.connection, None) is None:
            return  # ended already
        self._heard.pop(channel, None)
        channel.close()
        if channel.source:
            self.admission.left(channel)
        peer = channel.peer
        if peer is None or self._peers.get(peer.address.text) is not peer:
            return
        peer.channels.discard(channel)
        if peer.channel is not channel or not peer.has_progressed:
            peer.failures += 1  # also when it was open: what we send may be what ends it
        if peer.channel is channel:
            peer.channel, peer.has_progressed = None, False
        if peer.channels or peer.retry is not None:
            return
        if not peer.failures:
            self._dirty[peer] = None  # dialed at the end of this turn
            return
        if channel.source and self._remote is not None:
            self._remote.ended_early(peer)
            return
        delay_s = pause_s(peer.failures, FIRST_RETRY_S, LAST_RETRY_S)
        peer.retry = self.loop.call_later(delay_s, self.dial, peer)

    def died(self, peer: Peer, *, is_certain: bool = True) -> None:
        """Count a peer as dead; hand back what it has not acknowledged."""
        self._peers.pop(peer.address.text, None)
        if peer.retry is not None:
            peer.retry.cancel()
        unsent = self._sessions.forget(peer.address.text)
        unsent += [Unsent(buffers, tag, False) for buffers, tag in peer.overflow]
        for channel in list(peer.channels):
            self._channels.pop(channel.connection, None)
            channel.close()
        if unsent:
            self._shell.undeliverable(unsent)
        self._shell.lost(peer.address, is_certain=is_certain)

    # --- Events -------------------------------------------------------------------------------

    def _happened(self, channel: Channel, event: Event) -> None:
        match event:
            case Acknowledged(tags):
                self._acknowledged(channel, tags)
            case Authenticated(identity, session):
                self._authenticated(channel, identity, session)
            case Opened() if channel.peer is not None:
                self._opened(channel, channel.peer, event)
            case WindowOpened() if channel.peer is not None:
                self._take_overflow(channel.peer)
            case Undeliverable(messages):
                self._shell.undeliverable(messages)
            case Superseded(connection):
                older = self._channels.get(connection)
                if older is not None:
                    self._ended(older)
            case Refused(reason):
                self.turned_away(channel, reason)
            case Closed(reason):
                logger.debug("%s: %s", channel.peer and channel.peer.address, reason)

    def _opened(self, channel: Channel, peer: Peer, opened: Opened) -> None:
        peer.channel, peer.has_progressed = channel, False
        self._take_overflow(peer)
        if opened.is_forgotten:
            self._shell.forgotten(peer.address)

    def _acknowledged(self, channel: Channel, tags: list[object]) -> None:
        if channel.peer is not None:
            channel.peer.failures, channel.peer.has_progressed = 0, True
        self._shell.sent(tags)

    def _authenticated(self, channel: Channel, identity: Identity, session: Session) -> None:
        peer = self._peers.get(identity.address)
        if peer is None:
            try:
                peer = self._make(parse_address(identity.address))
            except ValueError as error:
                logger.warning("refused a connection: %s", error)
                self._ended(channel)
                return
        if channel.source:
            self.admission.left(channel)
        peer.session = session
        peer.channels.add(channel)
        channel.peer = peer
