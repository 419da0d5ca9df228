"""To and from processes of other hosts, over TCP.

Theory of operation. Every host has one port, and a gate there (gate.py). A process dials the gate
of the other host, says which process it wants, and from then on talks to that process directly; it
gets the connections that are for itself through its *door*, a Unix socket where the gate hands
descriptors over. Both ends then prove that they hold the cluster key (handshake.py), inside TLS
where the hosts have certificates (tls.py).

A peer of another host is dead when its host says that there is no such process, when the kernel
there says that nothing listens at the port, when nobody answers for ``DIAL_TIMEOUT_S``, or when
connections have failed for ``GIVE_UP_S``. A host that vanishes without a word is noticed by the
kernel's probes (sockets.py), and then dialed once more.

When the cluster's key was replaced, connections that were begun under the one before are ended, and
dialed again under the new one; sessions go on. So a host that has not got that is out, although
nothing of its connections had failed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from typing import TYPE_CHECKING

from greenroom.actors.transport.channel import Channel, Stream
from greenroom.actors.transport.dialing import Dialing
from greenroom.actors.transport.gate import Gate
from greenroom.actors.transport.handshake import NONCE_SIZE, Role
from greenroom.actors.transport.identity import RefusedError
from greenroom.actors.transport.listener import Listener, listen_here
from greenroom.actors.transport.network import Network
from greenroom.actors.transport.routes import ROUTE_SIZE, read_route
from greenroom.actors.transport.sockets import local_listener, tcp_socket
from greenroom.actors.transport.tls import Securing, TlsSocket
from greenroom.core.backoff import pause_s

if TYPE_CHECKING:
    from greenroom.actors.transport.peer import Peer
    from greenroom.actors.transport.peers import Peers

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
