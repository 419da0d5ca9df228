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
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from greenroom.actors.transport.addresses import (
    LOOPBACK,
    Identity,
    ProcessAddress,
    RefusedError,
    parse_address,
)
from greenroom.actors.transport.admission import Admission, Listener, Trouble, listen_here
from greenroom.actors.transport.connection import (
    MESSAGE_COST,
    Acknowledged,
    Authenticated,
    Closed,
    Connection,
    Event,
    Limits,
    MessageReceived,
    Opened,
    Refused,
    Session,
    Sessions,
    Superseded,
    Undeliverable,
    Unsent,
    WindowOpened,
)
from greenroom.actors.transport.endpoints import Shortage
from greenroom.actors.transport.frames import HEADER, Buffer
from greenroom.actors.transport.gate import ROUTE_SIZE, Dialing, Gate, read_route
from greenroom.actors.transport.handshake import NONCE_SIZE, Role
from greenroom.actors.transport.network import Network, Securing, TlsSocket
from greenroom.actors.transport.sockets import (
    Credentials,
    local_listener,
    own_connection,
    own_listener,
    tcp_socket,
)
from greenroom.core.backoff import pause_s

# One socket and the connection over it: bytes between the kernel and the protocol.
#
# Why not asyncio's streams: before Python 3.12 their ``writelines`` joins all buffers into one,
# which copies a large message once more, and their write buffer hides from us how much a slow
# peer owes.

READ_SIZE = 64 * 1024
LARGE_READ_SIZE = 1024 * 1024
CHUNK_HEADER = HEADER.size + 1  # after the last byte of the chunk before
WRITE_SIZE = 512 * 1024  # per pass of the loop, so that a large message delays nobody
MAX_BUFFERS = 512  # the kernel takes 1024 at once


Stream: TypeAlias = socket.socket | TlsSocket


class Channel:
    """A socket of the loop, watched for reading from :meth:`open` on."""

    source = ""  # where it comes from, or goes: the TCP address, of another host's

    def __init__(
        self, peers: Peers, sock: Stream, connection: Connection, peer: Peer | None
    ) -> None:
        self.connection = connection
        self.peer = peer  # known from the start when dialed, else once authenticated
        self.has_ended = False  # by the other side
        self.is_closed = False
        self._peers = peers
        self._loop: asyncio.AbstractEventLoop = peers.loop
        self._socket = sock
        self._fd = sock.fileno()
        self._read_size = READ_SIZE
        self._unwritten: list[Buffer] = []
        self._waits_for_room = False

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._fd

    def open(self) -> None:
        """Begin to read, and say hello where this end speaks first."""
        self._loop.add_reader(self._fd, self.read)
        self.flush()

    def close(self) -> None:
        """Let go of the socket and the connection; the session lives on."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._fd)
        if self._waits_for_room:
            self._loop.remove_writer(self._fd)
        self._socket.close()
        self.connection.close()
        self._unwritten.clear()

    def turn_away(self, reason: str) -> None:
        """See :class:`~greenroom.actors.transport.admission.Stranger`."""
        self._peers.turned_away(self, reason)

    def flush(self) -> None:
        """Write what the connection has, as far as the socket takes it; the rest when it can."""
        if not self._waits_for_room and not self.is_closed:
            self._write()

    def read(self) -> None:
        """Take what there is to read now; also called when something may be."""
        try:
            if not self._fill_chunk():
                return
            received = self._socket.recv(self._size_to_read())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""  # reset: as good as the end
        # A full read means more is there; 64 KiB is what the allocator gives without page faults.
        full = len(received) == self._read_size
        self._read_size = LARGE_READ_SIZE if full else READ_SIZE
        self._peers.received(self, received)

    def _fill_chunk(self) -> bool:
        """Read to where the bytes of a large message belong; return whether to read on."""
        rooms = self.connection.rooms()
        if not rooms:
            return True
        assert isinstance(self._socket, socket.socket), "TLS is for connections with tags"
        size = self._socket.recvmsg_into(rooms)[0]
        self.connection.filled(size)
        return size in {0, sum(map(len, rooms))}

    def _size_to_read(self) -> int:
        """Return how much to read that has to be copied; of a large message that is not much."""
        return CHUNK_HEADER if self.connection.is_between_chunks else self._read_size

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        self._waits_for_room = False
        self._write()

    def _write(self) -> None:
        room = WRITE_SIZE
        try:
            while room > 0:
                if not self._unwritten:
                    self._unwritten = self.connection.data_to_send(WRITE_SIZE)
                    if not self._unwritten:
                        return
                room -= self._write_some()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unwritten.clear()  # reading tells the end, after what still can be read
            return
        self._waits_for_room = True
        self._loop.add_writer(self._fd, self._writable)

    def _write_some(self) -> int:
        unwritten = self._unwritten
        if len(unwritten) == 1:
            written = self._socket.send(unwritten[0])
        else:
            written = self._socket.sendmsg(unwritten[:MAX_BUFFERS])
        left, done = written, 0
        for buffer in unwritten:
            if len(buffer) > left:
                break
            left -= len(buffer)
            done += 1
        del unwritten[:done]
        if left:
            unwritten[0] = memoryview(unwritten[0])[left:]
        return written


# One other process, and who is told what becomes of it.


class Cancelable(Protocol):
    """Something under way that can be given up."""

    def cancel(self) -> None:
        """Give it up."""


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

    def lost(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """Note that the process at ``address`` is dead, or cannot be reached, and may be dead."""

    def forgotten(self, address: ProcessAddress) -> None:
        """Note that the process at ``address`` had given this one up, and can be reached again."""


class Peer:
    """What this process has with one address."""

    __slots__ = (
        "address",
        "channel",
        "channels",
        "failing_since",
        "failures",
        "has_progressed",
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
        self.failures = 0  # connections that ended before a message arrived, one after the other
        self.has_progressed = False  # a message arrived over the present connection
        self.failing_since = 0.0  # the loop's time at the first of them, of another host's
        self.retry: Cancelable | None = None  # what will lead to the next connection
        self.overflow: deque[tuple[list[Buffer], object]] = deque()  # behind the window
        self.overflow_bytes = 0
        self.unflushed = 0
        self.sender: object = None  # the shell's own


# To and from processes of other hosts, over TCP.
#
# Theory of operation. Every host has one port, and a gate there (gate.py). A process dials the
# gate of the other host, says which process it wants, and from then on talks to that process
# directly; it gets the connections that are for itself through its *door*, a Unix socket where
# the gate hands descriptors over. Both ends then prove that they hold the cluster key
# (handshake.py), inside TLS where the hosts have certificates (tls.py).
#
# A peer of another host is dead when its host says that there is no such process, when the kernel
# there says that nothing listens at the port, when nobody answers for ``DIAL_TIMEOUT_S``, or when
# connections have failed for ``GIVE_UP_S``. A host that vanishes without a word is noticed by the
# kernel's probes (sockets.py), and then dialed once more.
#
# When the cluster's key was replaced, connections that were begun under the one before are ended,
# and dialed again under the new one; sessions go on. So a host that has not got that is out,
# although nothing of its connections had failed.

GIVE_UP_S = 1.5  # after the first failure to reach a peer
FIRST_RETRY_S, LAST_RETRY_S = 0.04, 0.5
LOOK_AT_KEYS_S = 1.0
ENDED_EARLY = "the connection ended during the handshake; do both hosts use TLS, or neither?"


class Remote:
    """What one process has to do with other hosts; owned by its peers."""

    def __init__(
        self, peers: Peers, network: Network, listener: socket.socket | None = None
    ) -> None:
        self._peers = peers
        self._loop: asyncio.AbstractEventLoop = peers.loop
        self._own = peers.address
        self._network = network
        self.admission = peers.admission
        self._securing: set[Securing] = set()  # those who dialed us
        self._handed: dict[int, socket.socket] = {}  # from the gate, not read yet
        self._begun: dict[Channel, bytes] = {}  # under which key
        self._look: asyncio.TimerHandle | None = None
        self._gate: Gate | None = None
        self._door: Listener | None = None
        if self._own.is_admin or listener is not None:
            self._gate = Gate(
                self._loop, self._own, network.keys, self.admission, self._take, listener
            )
        else:
            door = local_listener(self._own.door_name, socket.SOCK_SEQPACKET)
            self._door = listen_here(
                self._loop, door, self.admission, self._handed_over, peers.shortage
            )

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets that are no channel's."""
        numbers = [each.fileno() for each in self._securing] + list(self._handed)
        if self._gate is not None:
            numbers += self._gate.descriptors()
        if self._door is not None:
            numbers.append(self._door.fileno())
        return [fd for fd in numbers if fd >= 0]

    def close(self) -> None:
        """Let go of everything but the channels."""
        if self._gate is not None:
            self._gate.close()
        if self._door is not None:
            self._door.close()
        for fd in list(self._handed):
            self._close_handed(fd)
        for each in self._securing:
            each.cancel()
        if self._look is not None:
            self._look.cancel()

    # --- In -----------------------------------------------------------------------------------

    def _handed_over(self, gate: socket.socket) -> None:
        self._handed[gate.fileno()] = gate
        self._loop.add_reader(gate.fileno(), self._read_handed, gate)

    def _read_handed(self, gate: socket.socket) -> None:
        try:
            route, numbers, _, _ = socket.recv_fds(gate, ROUTE_SIZE, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            route, numbers = b"", []
        self._close_handed(gate.fileno())
        for number in numbers:
            os.set_inheritable(number, False)  # recv_fds does not pass its flags on
            self._take(socket.socket(fileno=number), route)

    def _close_handed(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._handed.pop(fd).close()

    def _take(self, sock: socket.socket, route: bytes) -> None:
        """Take a connection whose ROUTE was right."""
        sock.setblocking(False)
        try:
            host, port = sock.getpeername()
        except OSError:  # gone already
            sock.close()
            return
        self._begin(sock, Role.ACCEPTOR, None, route, f"{host}:{port}")

    # --- Out ----------------------------------------------------------------------------------

    def dial(self, peer: Peer) -> None:
        """Reach for a peer of another host; its ``retry`` is what is under way.

        OSError when there is no socket to be had.
        """
        sock = tcp_socket(self._own.host)
        peer.retry = Dialing(
            self._loop,
            sock,
            peer.address,
            self._network.keys()[0],
            on_found=lambda sock, route: self._found(peer, sock, route),
            on_dead=lambda reason, is_certain: self._dead(peer, reason, is_certain=is_certain),
            on_failed=lambda reason, is_refusal: self._failed(peer, reason, is_refusal=is_refusal),
        )

    def _found(self, peer: Peer, sock: socket.socket, route: bytes) -> None:
        peer.retry = None
        self._begin(sock, Role.DIALER, peer, route, _gate_of(peer))

    def _dead(self, peer: Peer, reason: str, *, is_certain: bool) -> None:
        peer.retry = None
        if reason:
            self.admission.gave_up(_gate_of(peer), reason)
        self._peers.died(peer, is_certain=is_certain)

    def _failed(self, peer: Peer, reason: str, *, is_refusal: bool) -> None:
        peer.retry = None
        peer.failures += 1
        if is_refusal:
            self.admission.refused(_gate_of(peer), reason)
        self.retry(peer, "" if is_refusal else reason)

    def ended_early(self, peer: Peer) -> None:
        """Dial a peer again whose connection ended during the handshake, or give it up."""
        is_told = self.admission.trouble_with(peer.address).is_refusal
        self.retry(peer, "" if is_told else ENDED_EARLY)

    def retry(self, peer: Peer, reason: str) -> None:
        """Dial a peer again after a failure, or give it up; ``reason`` is said then, if any."""
        now = self._loop.time()
        if peer.failures <= 1:
            peer.failing_since = now
        if now - peer.failing_since >= GIVE_UP_S:
            self._dead(peer, reason, is_certain=False)
            return
        delay_s = pause_s(peer.failures, FIRST_RETRY_S, LAST_RETRY_S)
        peer.retry = self._loop.call_later(delay_s, self._peers.dial, peer)

    # --- Both ways ----------------------------------------------------------------------------

    def _begin(
        self, sock: socket.socket, role: Role, peer: Peer | None, route: bytes, source: str
    ) -> None:
        """Talk over a connection that the gate has let through, inside TLS where there is any."""
        try:
            wanted = read_route(route, self._network.keys())
        except RefusedError as refusal:  # its key has been replaced just now
            sock.close()
            self._turn_away(peer, source, refusal.reason)
            return
        assert wanted is not None  # the gate has read all of it
        key, tls = wanted[1], self._network.tls
        if tls is None:
            self._talk(sock, role, peer, key, route, source)
            return
        inside = TlsSocket(sock, tls, role, lambda reason: self.admission.refused(source, reason))

        def leave() -> None:
            self._securing.discard(securing)
            self.admission.left(securing)
            if peer is not None:
                peer.retry = None

        def talk() -> None:
            leave()
            self._talk(inside, role, peer, key, route + inside.binding, source)

        def refuse(reason: str) -> None:
            leave()
            self._turn_away(peer, source, reason)

        securing = Securing(self._loop, inside, on_secured=talk, on_refused=refuse)
        if peer is None:
            self._securing.add(securing)
            self.admission.came(securing, source)
        else:
            peer.retry = securing

    def _turn_away(self, peer: Peer | None, source: str, reason: str) -> None:
        if peer is None:
            self.admission.refused(source, reason)
        else:
            self._failed(peer, reason, is_refusal=True)

    def _talk(
        self,
        sock: Stream,
        role: Role,
        peer: Peer | None,
        key: bytes,
        context: bytes,
        source: str,
    ) -> None:
        channel = self._peers.start(
            sock,
            role,
            peer,
            key=key,
            nonce=secrets.token_bytes(NONCE_SIZE),
            context=context,
        )
        channel.source = source
        if role is Role.ACCEPTOR:
            self.admission.came(channel, source)
        channel.open()
        if isinstance(sock, TlsSocket) and not channel.is_closed:
            channel.read()  # what came behind the TLS handshake has been taken off the socket
        self._begun[channel] = key
        if self._look is None:
            self._look = self._loop.call_later(LOOK_AT_KEYS_S, self._look_at_keys)

    def _look_at_keys(self) -> None:
        """End what was begun under a key that was replaced."""
        self._look = None
        keys = self._network.keys()
        self._begun = {each: key for each, key in self._begun.items() if not each.is_closed}
        for channel, key in list(self._begun.items()):
            if key not in keys:
                self._peers.renew(channel)
        if self._begun:
            self._look = self._loop.call_later(LOOK_AT_KEYS_S, self._look_at_keys)


def _gate_of(peer: Peer) -> str:
    return f"{peer.address.host}:{peer.address.port}"


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
