"""Links to other processes: dialed, accepted, lost and dialed again.

Theory of operation. Every process listens under its address and dials a peer when it first has
something for it. Messages then flow both ways over the same connection.

Within a host, only a hello precedes the first message: the kernel vouches for the user at the other
end, and connects to the one process that listens at an address. When the last connection with a
peer ends, the peer is *dead*, and what it had not acknowledged is handed back.

A connection to another host may be cut. The peer is then dialed again at once, and what was not
acknowledged is written again (session.py). The peer is dead when its host says that it has no such
process, when the kernel there says that nothing listens at the port, when it takes no connection
for ``DIAL_TIMEOUT_S``, or when connections have failed for ``UNREACHABLE_AFTER_S``. A host that
vanishes is noticed by the kernel's probes (sockets.py), and then dialed once more.

A *turn* is what the process does for one arrival: messages are acknowledged and handed to the
shell, handlers run, and only then everything that was sent meanwhile is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from greenroom.actors.transport.addresses import (
    LOOPBACK,
    ProcessAddress,
    bound_host,
    fits,
    own_format,
    own_release,
    parse_address,
)
from greenroom.actors.transport.admission import Admission, Listener, Trouble, listen_here
from greenroom.actors.transport.beats import BeatLink, answer_beats
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.frames import (
    ACK,
    CHUNK,
    DATA,
    DELAYED,
    HELLO,
    LOOSE,
    SMALL_MESSAGE,
    START,
    Buffer,
    FrameReader,
    Hello,
    RefusedError,
    begin_assembly,
    read_hello,
    split_body,
)
from greenroom.actors.transport.gate import (
    BEATS,
    MESSAGES,
    Arrivals,
    Gate,
    UnreachableError,
    connect,
    dial,
)
from greenroom.actors.transport.session import MESSAGE_COST, Connection, Session, Stream, Unsent
from greenroom.actors.transport.sockets import (
    Credentials,
    discard,
    local_listener,
    own_connection,
    own_listener,
    tcp_socket,
)
from greenroom.actors.transport.tls import TlsStream, describe, is_refusal
from greenroom.core import formats
from greenroom.core.backoff import pause_s

logger = logging.getLogger(__name__)

FLUSH_BYTES = 256 * 1024  # what may gather in a long turn before it is written
MOST_AT_ONCE = 64  # messages that are handled as they come, before the loop goes on
BACKLOG_RETRY_S = 0.005
SHORTAGE_RETRY_S = 1.0
ACK_DELAY_S = 0.01  # how long an acknowledgement that is not urgent waits for a message to ride on
UNREACHABLE_AFTER_S = 1.5  # after the first failure to reach a peer of another host
FIRST_RETRY_S, LAST_RETRY_S = 0.04, 0.5
KEY_CHECK_S = 1.0


class Cancelable(Protocol):
    """Something under way that can be abandoned."""

    def cancel(self) -> object:
        """Give it up."""


class Peer:
    """What this process has with one address."""

    __slots__ = (
        "address",
        "connection",
        "connections",
        "failing_since",
        "failures",
        "has_our_format",
        "has_progressed",
        "process",
        "retry",
        "sender",
        "session",
        "unflushed",
    )

    def __init__(self, address: ProcessAddress) -> None:
        self.address = address
        self.session = Session()
        self.process = 0  # drawn by the process at the address; 0 until it has said hello
        self.connection: Connection | None = None  # the one that messages are written to
        self.connections: dict[Connection, bool] = {}  # and whether the peer has said hello there
        self.failures = 0  # connections that ended before a message arrived, one after the other
        self.has_our_format = True  # its messages have the fields that ours have
        self.has_progressed = False  # a message arrived over the present connection
        self.failing_since = 0.0  # the loop's time at the first failure
        self.retry: Cancelable | None = None  # what will lead to the next connection
        self.unflushed = 0
        self.sender: object = None  # the shell's own


class Shell(Protocol):
    """What the links call; all on the loop, in a turn."""

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """Take a message, to be handled in :meth:`deliver`."""

    def take(self, sender: Peer, body: bytes) -> bool:
        """Handle a message of this host now; False if others wait to be handled before it."""

    def deliver(self) -> None:
        """Handle what was received."""

    def callback_failed(self, error: Exception, callback: object) -> None:
        """Report what a callback at a turn's end has raised."""

    def sent(self, tags: Sequence[object]) -> None:
        """Note that these messages have arrived."""

    def undeliverable(self, messages: Sequence[Unsent]) -> None:
        """Take back messages whose target is dead."""

    def refused(self, tag: object, reason: str) -> None:
        """Take back a message that cannot be sent."""

    def peer_down(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """Note that the process at ``address`` is dead, or cannot be reached, and may be dead."""

    def peer_reset(self, address: ProcessAddress) -> None:
        """Note that the process at ``address`` had given this one up, and can be reached again."""


def _message_in(
    session: Session, reader: FrameReader, kind: int, buffers: int, number: int, body: bytes
) -> list[Buffer] | None:
    """Return the message that a frame completes, if it does and the message is new."""
    if kind in {DATA, DELAYED}:
        reader.assembly = None  # of a message that was begun here and then sent elsewhere
        parts: list[Buffer] = [body] if buffers == 1 else split_body(buffers, body)
        is_new = session.receive(number, len(body), delays_ack=kind == DELAYED)
        return parts if is_new else None
    assembly = reader.assembly
    if kind == CHUNK and assembly is not None:
        if assembly.left:
            return None
        reader.assembly = None
        is_new = session.receive(assembly.number, assembly.size, delays_ack=False)
        return [*assembly.buffers] if is_new else None
    if kind == START:
        session.check_order(number)
        reader.assembly = begin_assembly(number, buffers, body)
    elif kind != ACK or body:
        raise RefusedError(f"a frame of kind {kind} with {len(body)} bytes, out of place")
    return None


class Links:
    """All peers of one process; used on the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: ProcessAddress,
        shell: Shell,
        keys: KeyFiles | None = None,
        gate: socket.socket | None = None,
    ) -> None:
        self.loop = loop
        self.address = address
        self._release = own_format() if keys is None else own_release()
        self._shell = shell
        self._process = 1 + secrets.randbits(63)
        self._peers: dict[str, Peer] = {}
        self._by_connection: dict[Connection, Peer | None] = {}  # None until it has said hello
        self._dirty: dict[Peer, None] = {}
        self._heard: dict[Peer, None] = {}
        self._delayed: dict[Peer, None] = {}  # to be acknowledged when the timer is due
        self._at_end: list[Callable[[], None]] = []
        self._in_turn = False
        self._turn_due = False
        self.admission = Admission(loop)
        self.shortage = Shortage()
        listen = own_listener if address.is_admin else local_listener
        self._listener = listen_here(
            loop, listen(address.socket_name), self.admission, self._accepted, self.shortage
        )
        self._remote: Remote | None = None
        if keys is not None:
            try:
                self._remote = Remote(self, keys, gate)
            except OSError:
                self._listener.close()
                raise

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        numbers = [connection.fileno() for connection in self._by_connection]
        if self._remote is not None:
            numbers += self._remote.descriptors()
        return [fd for fd in {*numbers, self._listener.fileno()} if fd >= 0]

    def listeners(self) -> dict[bytes, int]:
        """Return the numbers of the sockets that listen on this host, by their names."""
        listening = {self.address.socket_name: self._listener.fileno()}
        if self._remote is not None:
            listening |= self._remote.listeners()
        return listening

    def connections(self, address: ProcessAddress | None = None) -> list[Connection]:
        """Return all connections, or those with the process at ``address``."""
        if address is None:
            return list(self._by_connection)
        peer = self._peers.get(address.text)
        return [] if peer is None else list(peer.connections)

    @property
    def peers(self) -> int:
        """Return how many other processes are known."""
        return len(self._peers)

    def close(self) -> None:
        """Close everything without a word."""
        self._listener.close()
        if self._remote is not None:
            self._remote.close()
        self.admission.close()
        for connection in self._by_connection:
            connection.close()
        for peer in self._peers.values():
            if peer.retry is not None:
                peer.retry.cancel()
        for each in (self._by_connection, self._peers, self._dirty, self._heard, self._delayed):
            each.clear()

    def trouble_with(self, address: ProcessAddress) -> Trouble:
        """Return why the host of ``address`` could not be reached the last time."""
        return self.admission.trouble_with(address)

    # --- Sending ------------------------------------------------------------------------------

    def send(
        self,
        address: ProcessAddress,
        buffers: list[Buffer],
        tag: object,
        *,
        delays_ack: bool = False,
    ) -> None:
        """Send a message; ``tag`` comes back through the shell, once, later if ``delays_ack``."""
        peer = self._peers.get(address.text) or self._make(address)
        try:
            peer.session.send(buffers, tag, delays_ack=delays_ack)
        except ValueError as error:
            self._shell.refused(tag, str(error))
            return
        self._dirty[peer] = None
        peer.unflushed += MESSAGE_COST + len(buffers[0])
        if peer.unflushed > FLUSH_BYTES:
            self._write(peer)
        if not self._in_turn:
            self._need_turn()

    def send_loosely(self, address: ProcessAddress, buffers: list[Buffer]) -> bool:
        """Write a message at once whose outcome is of no interest; False where that cannot be.

        Within a host, what is written arrives if its receiver lives, so nothing is kept for it.
        """
        peer = self._peers.get(address.text)
        if peer is None or len(buffers) != 1 or len(buffers[0]) > SMALL_MESSAGE:
            return False
        connection = peer.connection
        return (
            connection is not None and not connection.source and connection.write_loose(buffers[0])
        )

    def reach(self, address: ProcessAddress) -> None:
        """Connect to ``address`` if that is not done yet, so that its end is noticed."""
        peer = self._peers.get(address.text) or self._make(address)
        if peer.connection is None:
            self._dirty[peer] = None
            if not self._in_turn:
                self._need_turn()

    def try_host(self, gate: ProcessAddress) -> None:
        """Have the kernel end what is connected with a host, unless that acknowledges something.

        Else nothing might be sent there for long, and no connection would be noticed as broken.
        """
        for peer in list(self._peers.values()):
            if _gate_of(peer.address) == _gate_of(gate):
                self._write_ack(peer)

    def write(self, address: ProcessAddress) -> None:
        """Write what was sent to ``address`` now, if it is connected, not at the turn's end."""
        peer = self._peers.get(address.text)
        if peer is not None:
            self._write(peer)

    def beat_link(
        self, address: ProcessAddress, on_answer: Callable[[bytes], None]
    ) -> BeatLink | None:
        """Return a link for beats to a process of another host; None where there is no way."""
        remote = self._remote
        if remote is None or address.host in {self.address.host, LOOPBACK}:
            return None
        return BeatLink(self.loop, lambda: remote.dial_for_beats(address), on_answer)

    def answer_beats(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer beats so from now on; until then each beat is its own answer."""
        if self._remote is not None:
            self._remote.answer_beat = answer

    def _write(self, peer: Peer) -> None:
        if peer.connection is not None:
            peer.unflushed = 0
            peer.connection.flush()

    def _make(self, address: ProcessAddress) -> Peer:
        peer = self._peers[address.text] = Peer(address)
        return peer

    # --- Turns --------------------------------------------------------------------------------

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Call back, once, before what this turn sends is written."""
        self._at_end.append(callback)
        if not (self._in_turn or self._turn_due):
            self._turn_due = True
            self.loop.call_soon(self.end_turn)

    def end_turn(self) -> None:
        """Write what was sent, then acknowledge what no message acknowledged."""
        self._in_turn = True
        self._turn_due = False
        while self._at_end:
            callbacks, self._at_end = self._at_end, []
            for callback in callbacks:
                try:
                    callback()
                except Exception as error:
                    self._shell.callback_failed(error, callback)
        dirty, self._dirty = self._dirty, {}
        for peer in dirty:
            if peer.connection is not None:
                peer.unflushed = 0
                peer.connection.flush()
            elif not peer.connections and peer.retry is None:
                self.dial(peer)
        if self._heard:
            self._acknowledge()
        self._in_turn = False
        if self._dirty or self._at_end:
            self._need_turn()

    def finish_turn(self) -> None:
        """Write what would be written in the next pass of the loop, which is about to pause."""
        if self._turn_due:
            self.end_turn()

    def _need_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.loop.call_soon(self.end_turn)

    def _acknowledge(self) -> None:
        heard, self._heard = self._heard, {}
        for peer in heard:
            session = peer.session
            if session.own_ack == session.received:
                continue
            if session.ack_is_urgent:
                self._write_ack(peer)
            else:
                if not self._delayed:
                    self.loop.call_later(ACK_DELAY_S, self._acknowledge_delayed)
                self._delayed[peer] = None

    def _acknowledge_delayed(self) -> None:
        patient, self._delayed = self._delayed, {}
        for peer in patient:
            if peer.session.own_ack != peer.session.received:
                self._write_ack(peer)

    def _write_ack(self, peer: Peer) -> None:
        connection, session = peer.connection, peer.session
        if connection is not None:
            connection.put(connection.writer.ack(session.received))
            session.ack_written()
            connection.flush()

    # --- Arrivals -----------------------------------------------------------------------------

    def _received(self, connection: Connection, received: bytes) -> None:
        """Take what a connection has read, nothing at its end: one turn."""
        self._in_turn = True
        waits = False
        try:
            if received:
                waits = self._take(connection, received)
            else:
                self._ended(connection)
        except RefusedError as refusal:
            waits = True  # perhaps, before what was wrong
            self.turned_away(connection, str(refusal))
        if waits:
            # Before handlers, which may take long; with what they send it was no faster: measured.
            if self._heard:
                self._acknowledge()
            try:
                self._shell.deliver()
            finally:  # a handler may raise what ends the loop's run, and the loop may run again
                self.end_turn()
        elif self._at_end or self._dirty or self._heard:
            self.end_turn()
        else:
            self._in_turn = False

    def _take(self, connection: Connection, received: bytes) -> bool:
        """Do what frames ask for; return whether a message waits to be handled."""
        waits = heard = False
        peer, reader = self._by_connection[connection], connection.reader
        at_once = MOST_AT_ONCE
        for kind, buffers, number, acknowledged, body in reader.frames(received):
            if peer is None or not peer.connections[connection]:
                if kind != HELLO:
                    raise RefusedError(f"a frame of kind {kind} before the hello")
                peer = self._greeted(connection, read_hello(number, acknowledged, body))
                heard = True
                continue
            if kind == LOOSE and not connection.source:
                if waits or at_once == 0 or not self._shell.take(peer, body):
                    waits = True
                    self._shell.received(peer, [body])
                at_once -= 1
                continue
            heard = True
            if acknowledged > peer.session.acknowledged:
                self._acknowledged(peer, acknowledged)
            parts = _message_in(peer.session, reader, kind, buffers, number, body)
            if parts is None:
                continue
            waits = peer.has_progressed = True
            peer.failures = 0
            self._shell.received(peer, parts)
        if heard and peer is not None and not connection.is_closed:
            self._heard[peer] = None
        return waits

    def _acknowledged(self, peer: Peer, up_to: int) -> None:
        tags = peer.session.acknowledge(up_to)
        peer.failures, peer.has_progressed = 0, True
        if peer.session.is_waiting:
            self._dirty[peer] = None
        self._shell.sent(tags)

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
            peer.retry = self.loop.call_later(SHORTAGE_RETRY_S, self.dial, peer)

    def _dial_here(self, peer: Peer) -> None:
        strangers: list[Credentials] = []
        try:
            sock = own_connection(
                peer.address.socket_name, strangers, or_alternative=peer.address.is_admin
            )
        except BlockingIOError:  # its backlog is full
            peer.retry = self.loop.call_later(BACKLOG_RETRY_S, self.dial, peer)
        except ConnectionRefusedError:
            self.died(peer)
        else:
            connection = self._add(sock, peer, "")
            self._greet(connection, peer)
            self._use(peer, connection)
            connection.open()
            connection.flush()
        for pid, uid in strangers:
            self.admission.refused_here(uid, pid, peer.address)

    def _accepted(self, sock: socket.socket) -> None:
        self._add(sock, None, "").open()

    def start(self, stream: TlsStream, peer: Peer | None, source: str) -> Connection:
        """Talk to a process of another host, which is ``peer`` if it was dialed."""
        connection = self._add(stream, peer, source)
        connection.open()
        if peer is not None:
            self._greet(connection, peer)
            connection.flush()
        else:
            self.admission.came(
                connection, source, lambda reason: self.turned_away(connection, reason)
            )
        return connection

    def _add(self, sock: Stream, peer: Peer | None, source: str) -> Connection:
        self.shortage.over()
        connection = Connection(self.loop, sock, self._received, source)
        self._by_connection[connection] = peer
        if peer is not None:
            peer.connections[connection] = False
        return connection

    def _greet(self, connection: Connection, peer: Peer) -> None:
        session = peer.session
        hello = Hello(
            self.address.text,
            self._release,
            self._process,
            session.number,
            session.other,
            session.received,
        )
        connection.put(hello.frame())
        session.ack_written()

    def _find(self, name: str) -> Peer:
        try:
            return self._peers.get(name) or self._make(parse_address(name))
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _greeted(self, connection: Connection, hello: Hello) -> Peer:
        """Take the first frame of a connection."""
        known = self._by_connection[connection]
        peer = known or self._find(hello.address)
        if peer.address.text != hello.address:
            raise RefusedError(f"{hello.address} answers where {peer.address} should")
        self._by_connection[connection] = peer
        peer.connections[connection] = True
        session = peer.session
        if session.other not in {0, hello.session}:
            self._restart(peer, connection, is_same_process=hello.process == peer.process)
        peer.process, session.other = hello.process, hello.session
        self.admission.left(connection)
        if known is None:
            self._greet(connection, peer)
            connection.flush()
        if connection.source and not fits(hello.release):
            raise RefusedError(
                f"it runs {hello.release}, this end {self._release}; all hosts must run the same "
                "Python, and formats that differ by 1 at most"
            )
        peer.has_our_format = formats.named_in(hello.release) == formats.FORMAT
        if hello.about == session.number and hello.received > session.acknowledged:
            self._acknowledged(peer, hello.received)
        if peer.connection is None or (connection.source and peer.connection is not connection):
            self._use(peer, connection)  # the newest: the one before may be dead unnoticed
        return peer

    def _use(self, peer: Peer, connection: Connection) -> None:
        """Write the peer's messages to this connection from now on."""
        if peer.connection is not None:
            peer.connection.carry(None)
        peer.connection, peer.has_progressed = connection, False
        peer.session.rewind()
        connection.carry(peer.session)
        self._dirty[peer] = None

    def _restart(self, peer: Peer, connection: Connection, *, is_same_process: bool) -> None:
        """Start again with a peer that has given this process up, or was replaced by another."""
        for older, has_greeted in list(peer.connections.items()):
            if has_greeted and older is not connection:
                self._forget(older)
        unsent = peer.session.restart(keep_unwritten=is_same_process)
        if unsent:
            self._shell.undeliverable(unsent)
        self._shell.peer_reset(peer.address)

    def turned_away(self, connection: Connection, reason: str) -> None:
        """End a connection whose peer broke the rules, or did not authenticate in time."""
        if connection.source:
            self.admission.refused(connection.source, reason)
        else:
            logger.warning("refused a connection: %s", reason)
        self._ended(connection)

    def renew(self, connection: Connection) -> None:
        """End a connection that was in order; the session goes on over the next one."""
        peer = self._by_connection.get(connection)
        if peer is not None and peer.connection is connection:
            peer.has_progressed = True  # so that it is dialed at once
        self._ended(connection)
        if self._dirty and not self._in_turn:
            self._need_turn()

    def _forget(self, connection: Connection) -> Peer | None:
        peer = self._by_connection.pop(connection, None)
        connection.close()
        if connection.source:
            self.admission.left(connection)
        if peer is not None:
            peer.connections.pop(connection, None)
            if peer.connection is connection:
                peer.connection = None
        return peer

    def _ended(self, connection: Connection) -> None:
        """Forget a connection; after its last one a peer is dead, or dialed again."""
        if connection not in self._by_connection:
            return  # ended already
        peer = self._by_connection[connection]
        if (
            peer is not None
            and connection.source
            and (peer.connection is not connection or not peer.has_progressed)
        ):
            peer.failures += 1  # also when it was open: what we send may be what ends it
        was_used = peer is not None and peer.connection is connection
        self._forget(connection)
        if peer is None or self._peers.get(peer.address.text) is not peer:
            return
        if was_used:
            open_ones = [each for each, has_greeted in peer.connections.items() if has_greeted]
            if open_ones:
                self._use(peer, open_ones[-1])
        if peer.connections or peer.retry is not None:
            return
        if not connection.source:
            self.died(peer)
        elif not peer.failures:
            self._dirty[peer] = None  # dialed at the end of this turn
        elif self._remote is not None:
            self._remote.ended_early(peer)

    def died(self, peer: Peer, *, is_certain: bool = True) -> None:
        """Count a peer as dead; hand back what it has not acknowledged."""
        self._peers.pop(peer.address.text, None)
        self._dirty.pop(peer, None)
        self._heard.pop(peer, None)
        if peer.retry is not None:
            peer.retry.cancel()
        for connection in list(peer.connections):
            self._forget(connection)
        unsent = peer.session.unsent()
        if unsent:
            self._shell.undeliverable(unsent)
        self._shell.peer_down(peer.address, is_certain=is_certain)


class Remote:
    """The ways to and from processes of other hosts."""

    def __init__(self, links: Links, keys: KeyFiles, listener: socket.socket | None = None) -> None:
        self.answer_beat: Callable[[bytes], bytes] = lambda beat: beat
        self._links = links
        self._loop = links.loop
        self._own = links.address
        self._keys = keys
        self._admission = links.admission
        self._arrivals = Arrivals(self._loop, keys, self._admission)
        self._handed: dict[int, socket.socket] = {}  # from the gate, not read yet
        self._dialing: set[socket.socket] = set()
        self._begun: dict[TlsStream, Callable[[], object]] = {}  # and what ends each
        self._key_check: asyncio.TimerHandle | None = None
        self._gate: Gate | None = None
        self._fd_listener: Listener | None = None
        if self._own.is_admin or listener is not None:
            self._gate = Gate(self._loop, self._own, keys, self._admission, self._take, listener)
        else:
            listener = local_listener(self._own.fd_socket_name, socket.SOCK_SEQPACKET)
            self._fd_listener = listen_here(
                self._loop, listener, self._admission, self._handed_over, links.shortage
            )

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets, of which some may be connections' too."""
        numbers = [sock.fileno() for sock in self._dialing if sock.fileno() >= 0]
        numbers += [stream.fileno() for stream in self._begun]
        numbers += [*self._handed, *self._arrivals.descriptors()]
        if self._gate is not None:
            numbers += self._gate.descriptors()
        if self._fd_listener is not None:
            numbers.append(self._fd_listener.fileno())
        return numbers

    def listeners(self) -> dict[bytes, int]:
        """See :meth:`Links.listeners`."""
        listener = self._fd_listener
        return {} if listener is None else {self._own.fd_socket_name: listener.fileno()}

    def close(self) -> None:
        """Let go of everything."""
        if self._gate is not None:
            self._gate.close()
        if self._fd_listener is not None:
            self._fd_listener.close()
        self._arrivals.close()
        for sock in (*self._handed.values(), *self._dialing):
            discard(self._loop, sock)
        for stream in self._begun:
            stream.close()
        if self._key_check is not None:
            self._key_check.cancel()

    # --- In -----------------------------------------------------------------------------------

    def _handed_over(self, gate: socket.socket) -> None:
        self._handed[gate.fileno()] = gate
        self._loop.add_reader(gate.fileno(), self._read_handed, gate)

    def _read_handed(self, gate: socket.socket) -> None:
        try:
            purpose, numbers, _, _ = socket.recv_fds(gate, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            purpose, numbers = b"", []
        del self._handed[gate.fileno()]
        discard(self._loop, gate)
        for number in numbers:
            os.set_inheritable(number, False)  # recv_fds does not pass its flags on
            self._take(socket.socket(fileno=number), purpose[0])

    def _take(self, sock: socket.socket, purpose: int) -> None:
        """Take a connection that the gate has let in."""
        sock.setblocking(False)
        try:
            host, port = sock.getpeername()
        except OSError:  # gone already
            sock.close()
            return
        welcome = self._welcome_beats if purpose == BEATS else self._welcome
        self._arrivals.take(sock, f"{host}:{port}", welcome)

    async def _welcome(self, stream: TlsStream, source: str) -> None:
        self._begin(stream, None, source)

    async def _welcome_beats(self, stream: TlsStream, _source: str) -> None:
        task = self._loop.create_task(answer_beats(stream, self._answered))
        self._add_begun(stream, task.cancel)

    def _answered(self, beat: bytes) -> bytes:
        return self.answer_beat(beat)  # of now: a link may have begun earlier

    # --- Out ----------------------------------------------------------------------------------

    def dial(self, peer: Peer) -> None:
        """Reach for a peer of another host; its ``retry`` is what is under way.

        OSError when there is no socket to be had.
        """
        peer.retry = self._loop.create_task(self._dial(peer, self._socket()))

    async def _dial(self, peer: Peer, sock: socket.socket) -> None:
        try:
            stream = await self._reach(sock, peer.address, MESSAGES)
        except UnreachableError as error:
            peer.retry = None
            self._dead(peer, error.reason, is_certain=error.is_certain)
        except OSError as error:
            peer.retry = None
            self._failed(peer, describe(error), is_refusal=is_refusal(error))
        else:
            peer.retry = None
            self._begin(stream, peer, _gate_of(peer.address))

    async def dial_for_beats(self, address: ProcessAddress) -> TlsStream:
        """Reach a process that is to answer beats; see :func:`.gate.dial`."""
        stream = await self._reach(self._socket(), address, BEATS)
        task = asyncio.current_task()
        assert task is not None
        self._add_begun(stream, task.cancel)
        return stream

    def _socket(self) -> socket.socket:
        sock = tcp_socket(bound_host(self._own))
        self._dialing.add(sock)
        return sock

    async def _reach(self, sock: socket.socket, to: ProcessAddress, purpose: int) -> TlsStream:
        sockets = [sock]

        def another() -> socket.socket:
            sockets.append(self._socket())
            return sockets[-1]

        try:
            sock = await connect(self._loop, sock, another, to)
            stream = await dial(self._loop, sock, to, purpose, self._keys)
            sockets.remove(sock)
        finally:  # also when it is canceled
            for each in sockets:
                discard(self._loop, each)
            self._dialing.difference_update(sockets, {sock})
        return stream

    def _dead(self, peer: Peer, reason: str, *, is_certain: bool) -> None:
        if reason:
            self._admission.unreachable(_gate_of(peer.address), reason)
        self._links.died(peer, is_certain=is_certain)

    def _failed(self, peer: Peer, reason: str, *, is_refusal: bool) -> None:
        peer.failures += 1
        if is_refusal:
            self._admission.refused(_gate_of(peer.address), reason)
        self._retry(peer, "" if is_refusal else reason)

    def ended_early(self, peer: Peer) -> None:
        """Dial a peer again whose connection ended before a message came, or abandon it."""
        is_reported = self._admission.trouble_with(peer.address).is_refusal
        self._retry(peer, "" if is_reported else "it ended the connection before it said anything")

    def _retry(self, peer: Peer, reason: str) -> None:
        now = self._loop.time()
        if peer.failures <= 1:
            peer.failing_since = now
        if now - peer.failing_since >= UNREACHABLE_AFTER_S:
            self._dead(peer, reason, is_certain=False)
            return
        delay_s = pause_s(peer.failures, FIRST_RETRY_S, LAST_RETRY_S)
        peer.retry = self._loop.call_later(delay_s, self._links.dial, peer)

    # --- Both ways ----------------------------------------------------------------------------

    def _begin(self, stream: TlsStream, peer: Peer | None, source: str) -> None:
        """Talk to a process that has proven to belong to the cluster."""
        connection = self._links.start(stream, peer, source)
        self._add_begun(stream, lambda: self._links.renew(connection))
        # What came behind the TLS handshake has been taken off the socket. Not now: handlers of
        # messages run as callbacks of the loop, not in the task that dialed.
        self._loop.call_soon(connection.read)

    def _add_begun(self, stream: TlsStream, end: Callable[[], object]) -> None:
        self._begun = {each: end for each, end in self._begun.items() if not each.is_closed}
        self._begun[stream] = end
        if self._key_check is None:
            self._key_check = self._loop.call_later(KEY_CHECK_S, self._check_keys)

    def _check_keys(self) -> None:
        """End what was begun with a cluster file that was replaced; it is dialed again."""
        self._key_check = None
        taken = self._keys.tls().taken
        self._begun = {each: end for each, end in self._begun.items() if not each.is_closed}
        for stream, end in list(self._begun.items()):
            if not stream.certificates <= taken:
                end()
        if self._begun:
            self._key_check = self._loop.call_later(KEY_CHECK_S, self._check_keys)


def _gate_of(address: ProcessAddress) -> str:
    return f"{address.host}:{address.port}"
