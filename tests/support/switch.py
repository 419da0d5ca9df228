"""A network switch in a process, whose links lose, delay and cut frames as a test asks, each way.

Theory of operation. Each host's cable ends in a veth of a namespace of its own, where this process
reads and writes raw frames. So a test needs no bridge, netem or firewall of the kernel, which not
every kernel has, and a cut can be of one direction only.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from tests.support.template import enter_namespace

PACKET_OUTGOING = 4  # packet(7)
ETH_P_ALL = 0x0003
BROADCAST_BIT = 1
SIOCETHTOOL = 0x8946
# Frames must be as they would be on a wire: with checksums, and no longer than the MTU.
ETHTOOL_OFF = (0x17, 0x1F, 0x24, 0x2C)  # checksums, TSO, GSO, GRO


@dataclass
class Direction:
    """One direction of one link."""

    is_cut: bool = False
    loss: float = 0.0  # of a frame, 0 to 1
    delay_s: float = 0.0


@dataclass
class Port:
    """One link; ``sent`` is from the host, ``received`` to it."""

    sock: socket.socket
    number: int
    parted: set[int] = field(default_factory=set)  # from ports that get nothing of this one
    sent: Direction = field(default_factory=Direction)
    received: Direction = field(default_factory=Direction)
    bytes: int = 0  # that have passed, both ways


class Switch:
    """Forwards frames by their addresses, which it learns."""

    def __init__(self, interfaces: list[str]) -> None:
        self._ports = [Port(_raw(name), number) for number, name in enumerate(interfaces)]
        self._by_fd = {port.sock.fileno(): port for port in self._ports}
        self._at: dict[bytes, Port] = {}
        self._later: list[tuple[float, int, Port, bytes]] = []
        self._order = itertools.count()
        self._rng = random.Random(1)
        self._heard: list[bytes] | None = None

    def listen_in(self) -> None:
        """Keep all frames from now on, as a tap on the wire would."""
        self._heard = []

    def heard(self) -> bytes:
        """Return what was kept; ends :meth:`listen_in`."""
        heard, self._heard = self._heard or [], None
        return b"".join(heard)

    def change(self, port: int, way: str, changes: dict[str, Any]) -> None:
        """Change one direction of a port."""
        for name, value in changes.items():
            setattr(getattr(self._ports[port], way), name, value)

    def part(self, sender: int, receiver: int, is_cut: bool) -> None:
        """Drop what one port sends to another, or let it pass again."""
        parted = self._ports[sender].parted
        (parted.add if is_cut else parted.discard)(receiver)

    def counted(self) -> list[int]:
        """Return how many bytes have passed at each port."""
        return [port.bytes for port in self._ports]

    def run(self, pipe: Any) -> None:
        """Forward until the pipe is closed; it carries calls of the methods above."""
        poll = select.poll()
        for fd in (pipe.fileno(), *self._by_fd):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._timeout_ms()):
                if fd != pipe.fileno():
                    self._read(self._by_fd[fd])
                elif not self._call(pipe):
                    return
            self._send_due()

    def _call(self, pipe: Any) -> bool:
        try:
            method, args = pipe.recv()
        except EOFError:
            return False
        pipe.send(getattr(self, method)(*args))
        return True

    def _timeout_ms(self) -> float | None:
        if not self._later:
            return None
        return max((self._later[0][0] - time.monotonic()) * 1000, 0)

    def _read(self, port: Port) -> None:
        for _ in range(256):
            try:
                frame, (_, _, kind, *_rest) = port.sock.recvfrom(65536)
            except (BlockingIOError, OSError):
                return
            if kind != PACKET_OUTGOING:
                self._take(port, frame)

    def _take(self, port: Port, frame: bytes) -> None:
        target, source = frame[:6], frame[6:12]
        self._at[source] = port
        if self._heard is not None:
            self._heard.append(frame)
        known = self._at.get(target)
        is_for_all = target[0] & BROADCAST_BIT or known is None
        for other in self._ports if is_for_all else [known]:
            if other is not port and other is not None:
                self._forward(port, other, frame)

    def _forward(self, port: Port, other: Port, frame: bytes) -> None:
        if other.number in port.parted:
            return
        delay_s = 0.0
        for way in (port.sent, other.received):
            if way.is_cut or (way.loss and self._rng.random() < way.loss):
                return
            delay_s += way.delay_s
        port.bytes += len(frame)
        other.bytes += len(frame)
        if delay_s:
            due_at = time.monotonic() + delay_s
            heapq.heappush(self._later, (due_at, next(self._order), other, frame))
        else:
            _send(other, frame)

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._later)
            _send(port, frame)


def _send(port: Port, frame: bytes) -> None:
    try:
        port.sock.send(frame)
    except OSError:  # its cable is out, or full: lost, as on a wire
        return


def _raw(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    sock.bind((interface, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
    sock.setblocking(False)
    return sock


def send_plain_frames(interface: str) -> None:
    """Let the kernel send frames as on a wire; called in the interface's namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in ETHTOOL_OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            name = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(sock, SIOCETHTOOL, name + bytes(8))


def serve(pipe: Any, namespace: str, interfaces: list[str]) -> None:
    """Be the switch, in a process of its own."""
    enter_namespace(namespace)
    switch = Switch(interfaces)
    pipe.send(None)
    switch.run(pipe)
