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
shell, handlers run, and then what they have put off is done (:class:`TurnEnd`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from greenroom.actors.transport.addresses import (
    LOOPBACK,
    ProcessAddress,
    fits,
    own_format,
    own_release,
    parse_address,
)
from greenroom.actors.transport.admission import Admission, listen_here
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.frames import (
    DELAYED,
    HELLO,
    LOOSE,
    SMALL_MESSAGE,
    START,
    Buffer,
    FrameReader,
    Hello,
    RefusedError,
    read_hello,
)
from greenroom.actors.transport.other_hosts import MESSAGES, OtherHosts, UnreachableError
from greenroom.actors.transport.session import Connection, Session, Stream
from greenroom.actors.transport.sockets import AnotherUsersError, local_listener, own_connection
from greenroom.actors.transport.tls import TlsStream, describe, is_refusal
from greenroom.core import formats
from greenroom.core.backoff import pause_s

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 64  # messages that are handled as they come, before the loop goes on
BACKLOG_RETRY_S = 0.005
SHORTAGE_RETRY_S = 1.0
ACK_DELAY_S = 0.01  # how long an acknowledgement that is not urgent waits for a message to ride on
UNREACHABLE_AFTER_S = 1.5  # after the first failure to reach a peer of another host
HELD_S = 4.0  # a connection that lasted as long is no failure after the ones before it
FIRST_RETRY_S, LAST_RETRY_S = 0.04, 0.5


class Peer:
    """What this process has with one address: a connection, or ``retry``, which leads to one."""

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
        "write_due",
    )

    def __init__(self, address: ProcessAddress) -> None:
        self.address = address
        self.session = Session()
        self.process = 0  # drawn by the process at the address; 0 until it has said hello
        self.connection: Connection | None = None  # the one that messages are written to
        self.connections: dict[Connection, bool] = {}  # and whether the peer has said hello there
        self.failures = 0  # times that it could not be talked to, one after the other
        self.has_our_format = True  # its messages have the fields that ours have
        self.has_progressed = False  # a message arrived over the present connection
        self.failing_since = 0.0  # the loop's time at the first failure
        self.retry: asyncio.Handle | asyncio.Task[None] | None = None
        self.write_due = False  # at the turn's end
        self.sender: object = None  # the shell's own

    def greet(self, connection: Connection, own: tuple[str, str, int]) -> None:
        """Say who this process is, by its address, release and number."""
        session = self.session
        hello = Hello(*own, session.number, session.other, session.received)
        connection.put(hello.frame())
        session.ack_written()

    def use(self, connection: Connection) -> None:
        """Write messages to this connection from now on."""
        if self.connection is not None:
            self.connection.carry(None)
        self.connection, self.has_progressed = connection, False
        self.session.rewind()
        connection.carry(self.session)
        connection.flush()

    def write(self) -> None:
        """Write what waits, as far as there is a connection that takes it."""
        self.write_due = False
        if self.connection is not None:
            self.connection.flush()

    def receive(
        self, reader: FrameReader, kind: int, buffers: int, number: int, body: bytes
    ) -> list[Buffer] | None:
        """Return the message that a frame completes, if it does and the message is new."""
        if kind == START:
            self.session.check_order(number)  # before memory is set aside
        parts = reader.message(kind, buffers, number, body)
        if parts is None or not self.session.receive(
            number, sum(map(len, parts)), delays_ack=kind == DELAYED
        ):
            return None
        self.failures, self.has_progressed = 0, True
        return parts

    def write_ack(self) -> None:
        """Acknowledge what has arrived."""
        if self.connection is not None:
            self.connection.put(self.connection.writer.ack(self.session.received))
            self.session.ack_written()
            self.connection.flush()


class Shell(Protocol):
    """What the links call; all on the loop."""

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """Take a message, to be handled in :meth:`deliver`."""

    def take(self, sender: Peer, body: bytes) -> bool:
        """Handle a message of this host now; False if others wait to be handled before it."""

    def deliver(self) -> None:
        """Handle what was received."""

    def sent(self, tags: Sequence[object]) -> None:
        """Note that these messages have arrived."""

    def undeliverable(self, tags: Sequence[object]) -> None:
        """Take back messages whose target is dead."""

    def refused(self, tag: object, reason: str) -> None:
        """Take back a message that cannot be sent."""

    def peer_gone(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """Note that the process at ``address`` is dead; or else was, or had given this one up."""


class TurnEnd:
    """What is put off to the end of a turn, so that all that the turn produces leaves together.

    ``on_error(error, callback)``, for whoever puts something off to set, gets what that raises.
    """

    on_error: Callable[[Exception, object], None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_due = False  # :meth:`run` will be called
        self._loop = loop
        self._callbacks: deque[Callable[[], None]] = deque()

    def add(self, callback: Callable[[], None]) -> None:
        """Call back, once, at the end of this turn."""
        self._callbacks.append(callback)
        if not self.is_due:
            self.is_due = True
            self._loop.call_soon(self.run)

    def run(self) -> None:
        """End the turn; what is left where a callback ends the loop's run is done with the next."""
        try:
            while self._callbacks:
                callback = self._callbacks.popleft()
                try:
                    callback()
                except Exception as error:
                    self.on_error(error, callback)
        finally:
            self.is_due = bool(self._callbacks)
            if self.is_due:
                self._loop.call_soon(self.run)


class DelayedAcks:
    """Acknowledgements that can wait for a message to ride on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._peers: dict[Peer, None] = {}

    def owe(self, peer: Peer) -> None:
        """Have a peer hear what has arrived: soon, or at once where that is urgent."""
        session = peer.session
        if session.own_ack == session.received:
            return
        if session.ack_is_urgent:
            peer.write_ack()
            return
        if not self._peers:
            self._loop.call_later(ACK_DELAY_S, self._write)
        self._peers[peer] = None

    def _write(self) -> None:
        peers, self._peers = self._peers, {}
        for peer in peers:
            if peer.session.own_ack != peer.session.received:
                peer.write_ack()


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
        self.address = address
        self.turn_end = TurnEnd(loop)
        self.admission = Admission(loop)
        self.shortage = Shortage()
        self.other_hosts: OtherHosts | None = None
        self._loop = loop
        release = own_format() if keys is None else own_release()
        self._own = (address.text, release, 1 + secrets.randbits(63))
        self._shell = shell
        self._peers: dict[str, Peer] = {}
        self._by_connection: dict[Connection, Peer | None] = {}  # None until it has said hello
        self._acks = DelayedAcks(loop)
        self._listener = listen_here(
            loop,
            local_listener(address.socket_name),
            self.admission,
            lambda sock: self._add(sock, None, "").open(),
            self.shortage,
        )
        if keys is not None:
            try:
                self.other_hosts = OtherHosts(
                    loop, address, keys, self.admission, self.shortage, self._welcome, gate
                )
            except OSError:
                self._listener.close()
                raise

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        numbers = [connection.fileno() for connection in self._by_connection]
        if self.other_hosts is not None:
            numbers += self.other_hosts.descriptors()
        return [fd for fd in {*numbers, self._listener.fileno()} if fd >= 0]

    def listeners(self) -> dict[bytes, int]:
        """Return the numbers of the sockets that listen on this host, by their names."""
        others = {} if self.other_hosts is None else self.other_hosts.listeners()
        return {self.address.socket_name: self._listener.fileno(), **others}

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
        if self.other_hosts is not None:
            self.other_hosts.close()
        self.admission.close()
        for connection in self._by_connection:
            connection.close()
        for peer in self._peers.values():
            if peer.retry is not None:
                peer.retry.cancel()
        self._by_connection.clear()
        self._peers.clear()

    # --- Sending ------------------------------------------------------------------------------

    def send(
        self,
        address: ProcessAddress,
        buffers: list[Buffer],
        tag: object,
        *,
        delays_ack: bool = False,
    ) -> None:
        """Send a message; ``tag`` comes back through the shell, once, later if ``delays_ack``.

        The latter is for our own code, which joins messages itself: they are written at once.
        """
        peer = self._peers.get(address.text) or self.reach(address)
        try:
            peer.session.send(buffers, tag, delays_ack=delays_ack)
        except ValueError as error:
            self._shell.refused(tag, str(error))
            return
        if delays_ack:
            if peer.connection is not None:
                peer.connection.flush()
        elif not peer.write_due:
            peer.write_due = True
            self.turn_end.add(peer.write)

    def send_loosely(self, address: ProcessAddress, buffers: list[Buffer]) -> bool:
        """Write a message whose outcome is of no interest; False where that cannot be done now.

        Within a host, what is written arrives if its receiver lives, so nothing is kept for it.
        """
        peer = self._peers.get(address.text)
        if peer is None or len(buffers) != 1 or len(buffers[0]) > SMALL_MESSAGE:
            return False
        connection = peer.connection
        return (
            connection is not None and not connection.source and connection.write_loose(buffers[0])
        )

    def reach(self, address: ProcessAddress) -> Peer:
        """Connect to ``address`` if that is not done yet, so that its end is noticed."""
        peer = self._peers.get(address.text)
        if peer is None:
            peer = self._peers[address.text] = Peer(address)
            peer.retry = self._loop.call_soon(self._dial, peer)
        return peer

    def try_host(self, gate: ProcessAddress) -> None:
        """Have the kernel end what is connected with a host, unless that acknowledges something.

        Else nothing might be sent there for long, and no connection would be noticed as broken.
        """
        for peer in list(self._peers.values()):
            if peer.address.gate == gate.gate:
                peer.write_ack()

    # --- Arrivals -----------------------------------------------------------------------------

    def _received(self, connection: Connection, received: bytes) -> None:
        """Take what a connection has read, nothing at its end: one turn."""
        self.turn_end.is_due = True
        try:
            try:
                waits = bool(received) and self._take(connection, received)
                if not received:
                    self._ended(connection)
            except RefusedError as refusal:
                waits = True  # perhaps, before what was wrong
                if connection.source:
                    self.admission.refused(connection.source, str(refusal))
                else:
                    logger.warning("refused a connection: %s", refusal)
                self._ended(connection)
            if waits:
                self._shell.deliver()
        finally:  # a handler may raise what ends the loop's run, and the loop may run again
            self.turn_end.run()

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
                tags = peer.session.acknowledge(acknowledged)
                peer.failures, peer.has_progressed = 0, True
                self._shell.sent(tags)
            parts = peer.receive(reader, kind, buffers, number, body)
            if parts is not None:
                waits = True
                self._shell.received(peer, parts)
        if heard and peer is not None and not connection.is_closed:
            # Before handlers, which may take long; with what they send it was no faster: measured.
            self._acks.owe(peer)
        return waits

    # --- Connections --------------------------------------------------------------------------

    def _dial(self, peer: Peer) -> None:
        """Connect to a peer; a local one is connected, or dead, when this returns."""
        peer.retry = None
        others = self.other_hosts
        try:
            if peer.address.host == self.address.host:
                self._dial_here(peer)
            elif others is not None and peer.address.host != LOOPBACK:
                reaching = self._dial_there(peer, others, others.new_socket())
                peer.retry = self._loop.create_task(reaching)
            else:
                logger.error("%s is on another host; this one is not bound: --bind", peer.address)
                self._died(peer)
        except OSError as error:  # out of descriptors: let others end first
            logger.warning("cannot dial %s: %s", peer.address, error)
            self.shortage.failed(error, self._loop.time())
            peer.retry = self._loop.call_later(SHORTAGE_RETRY_S, self._dial, peer)

    def _dial_here(self, peer: Peer) -> None:
        try:
            sock = own_connection(peer.address.socket_name)
        except BlockingIOError:  # its backlog is full
            peer.retry = self._loop.call_later(BACKLOG_RETRY_S, self._dial, peer)
        except ConnectionRefusedError as error:
            if isinstance(error, AnotherUsersError):
                self.admission.refused_here(error.holder, peer.address)
            self._died(peer)
        else:
            connection = self._add(sock, peer, "")
            peer.greet(connection, self._own)
            peer.use(connection)
            connection.open()

    async def _dial_there(self, peer: Peer, others: OtherHosts, sock: socket.socket) -> None:
        gate = peer.address.gate
        try:
            stream = await others.reach(sock, peer.address, MESSAGES)
        except OSError as error:
            peer.retry = None
            if peer.connection is not None:
                return  # it has dialed this process meanwhile, and is dialed when that ends
            if isinstance(error, UnreachableError):
                if error.reason:
                    self.admission.unreachable(gate, error.reason)
                self._died(peer, is_certain=error.is_certain)
                return
            if is_refusal(error):
                self.admission.refused(gate, describe(error))
            self._dial_again(peer, "" if is_refusal(error) else describe(error))
        else:
            peer.retry = None
            connection = self._begin(others, stream, peer, gate)
            peer.greet(connection, self._own)
            connection.flush()

    def _dial_again(self, peer: Peer, reason: str) -> None:
        """Dial a peer of another host after a while, or abandon it: for a reason, to be logged."""
        now = self._loop.time()
        if not peer.failures:
            peer.failing_since = now
        peer.failures += 1
        if now - peer.failing_since < UNREACHABLE_AFTER_S:
            delay_s = pause_s(peer.failures, FIRST_RETRY_S, LAST_RETRY_S)
            peer.retry = self._loop.call_later(delay_s, self._dial, peer)
            return
        if reason:
            self.admission.unreachable(peer.address.gate, reason)
        self._died(peer, is_certain=False)

    async def _welcome(self, stream: TlsStream, source: str) -> None:
        """Take a connection with a process of another host, which is to say hello."""
        assert self.other_hosts is not None
        self._begin(self.other_hosts, stream, None, source)

    def _begin(
        self, others: OtherHosts, stream: TlsStream, peer: Peer | None, source: str
    ) -> Connection:
        """Talk to a process that has proven to belong to the cluster."""
        connection = self._add(stream, peer, source)
        connection.open()
        others.keep(stream, lambda: self._renew(connection))
        # What came behind the TLS handshake has been taken off the socket. Not now: handlers of
        # messages run as callbacks of the loop, not in the task that dialed.
        self._loop.call_soon(connection.read)
        return connection

    def _add(self, sock: Stream, peer: Peer | None, source: str) -> Connection:
        self.shortage.over()
        connection = Connection(self._loop, sock, self._received, source)
        self._by_connection[connection] = peer
        if peer is not None:
            peer.connections[connection] = False
        return connection

    def _greeted(self, connection: Connection, hello: Hello) -> Peer:
        """Take the first frame of a connection."""
        known = self._by_connection[connection]
        peer = known or self._peers.get(hello.address)
        if peer is None:
            try:
                peer = self._peers[hello.address] = Peer(parse_address(hello.address))
            except ValueError as error:
                raise RefusedError(str(error)) from None
        if peer.address.text != hello.address:
            raise RefusedError(f"{hello.address} answers where {peer.address} should")
        self._by_connection[connection] = peer
        peer.connections[connection] = True
        session = peer.session
        if session.other not in {0, hello.session}:
            self._restart(peer, connection, is_same_process=hello.process == peer.process)
        peer.process, session.other = hello.process, hello.session
        if known is None:
            peer.greet(connection, self._own)
            connection.flush()
        if connection.source and not fits(hello.release):
            raise RefusedError(
                f"it runs {hello.release}, this end {self._own[1]}; all hosts must run the same "
                "Python, and formats that differ by 1 at most"
            )
        peer.has_our_format = formats.named_in(hello.release) == formats.FORMAT
        if hello.about == session.number and hello.received > session.acknowledged:
            peer.failures = 0
            self._shell.sent(session.acknowledge(hello.received))
        if peer.connection is None or (connection.source and peer.connection is not connection):
            peer.use(connection)  # the newest: the one before may be dead unnoticed
        return peer

    def _restart(self, peer: Peer, connection: Connection, *, is_same_process: bool) -> None:
        """Start again with a peer that has given this process up, or was replaced by another."""
        for older, has_greeted in list(peer.connections.items()):
            if has_greeted and older is not connection:
                self._forget(older)
        self._shell.undeliverable(peer.session.restart(keep_unwritten=is_same_process))
        self._shell.peer_gone(peer.address, is_certain=False)

    def _renew(self, connection: Connection) -> None:
        """End a connection that was in order; the session goes on over the next one."""
        peer = self._by_connection.get(connection)
        if peer is not None and peer.connection is connection:
            peer.has_progressed = True  # so that it is dialed at once
        self._ended(connection)

    def _forget(self, connection: Connection) -> Peer | None:
        peer = self._by_connection.pop(connection, None)
        connection.close()
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
        was_used = peer is not None and peer.connection is connection
        self._forget(connection)
        if peer is None or self._peers.get(peer.address.text) is not peer:
            return
        open_ones = [each for each, has_greeted in peer.connections.items() if has_greeted]
        if was_used and open_ones:
            peer.use(open_ones[-1])
        if peer.connections or peer.retry is not None:
            return
        if self._loop.time() - connection.begun_at > HELD_S:
            peer.failures = 0
        if not connection.source:
            self._died(peer)
        elif was_used and peer.has_progressed:
            peer.retry = self._loop.call_soon(self._dial, peer)
        else:  # also when it was open: what we send may be what ends it
            is_reported = self.admission.trouble_with(peer.address).is_refusal
            reason = "" if is_reported else "it ended the connection before it said anything"
            self._dial_again(peer, reason)

    def _died(self, peer: Peer, *, is_certain: bool = True) -> None:
        """Count a peer as dead; hand back what it has not acknowledged."""
        self._peers.pop(peer.address.text, None)
        if peer.retry is not None:
            peer.retry.cancel()
        for connection in list(peer.connections):
            self._forget(connection)
        self._shell.undeliverable(peer.session.unsent())
        self._shell.peer_gone(peer.address, is_certain=is_certain)
