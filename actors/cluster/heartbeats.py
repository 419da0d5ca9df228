"""Heartbeats between hosts: small datagrams that prove both ways of a link.

Theory of operation. A host's processes send a *beat* to the controller every ``BEAT_S``; the
controller answers each at once, and the next beat names the newest answer received. A beat that
names a recent answer thus proves that the host hears the controller, too. Other beats do not count,
because a link that works in one direction only is useless. TCP would be too slow for this: one lost
segment delays all that follow, by seconds at 30% loss.

    beat    magic, incarnation of the sender 8, its number u64, newest number heard u64, MAC 16
    answer  the same, of the controller

The MAC is HMAC-SHA256 under a key of its own for each direction, derived from the cluster file.
Numbers only grow, so that a recorded beat is worth nothing. Who has the incarnation is said
elsewhere, over authenticated connections; nothing but these 48 bytes is ever read from here.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable

from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.settings import LOCAL_NAMES as LOOPBACK
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.core.cluster.hosts import BEAT_S, LOST_AFTER_S

logger = logging.getLogger(__name__)

_MAGIC = b"\x89USBEAT\1"
_PACKET = struct.Struct(">8s8sQQ")
_MAC_SIZE = 16
SIZE = _PACKET.size + _MAC_SIZE
PER_PASS = 256  # datagrams that are read at once
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0  # until the address is free
KEPT = 64  # answers whose times are known; more than fit into LOST_AFTER_S

Clock = Callable[[], float]


class Sealed:
    """Writes and reads one direction's datagrams."""

    def __init__(self, keys: KeyFiles, direction: bytes) -> None:
        self._keys = keys
        self._label = b"greenroom beats of " + direction
        self._of: list[bytes] = []  # the cluster's keys, and what is derived from them
        self._derived: list[bytes] = []

    def write(self, incarnation: str, number: int, heard: int) -> bytes:
        """Return a datagram."""
        packet = _PACKET.pack(_MAGIC, bytes.fromhex(incarnation), number, heard)
        return packet + _mac(self._own_keys()[0], packet)

    def read(self, datagram: bytes) -> tuple[str, int, int] | None:
        """Return who sent it, its number, and the number it has heard; None if it is not right."""
        packet, mac = datagram[: _PACKET.size], datagram[_PACKET.size :]
        if len(datagram) != SIZE or not any(
            hmac.compare_digest(_mac(key, packet), mac) for key in self._own_keys()
        ):
            return None
        magic, incarnation, number, heard = _PACKET.unpack(packet)
        return (incarnation.hex(), number, heard) if magic == _MAGIC else None

    def _own_keys(self) -> list[bytes]:
        keys = list(self._keys())
        if keys != self._of:
            self._of = keys
            self._derived = [hmac.digest(key, self._label, "sha256") for key in keys]
        return self._derived


def _mac(key: bytes, packet: bytes) -> bytes:
    return hmac.digest(key, packet, "sha256")[:_MAC_SIZE]


class _Member:
    """What the controller knows of one process that beats."""

    __slots__ = ("answered_at", "newest", "number")

    def __init__(self) -> None:
        self.newest = 0  # number of the last beat
        self.number = 0  # of the last answer
        self.answered_at: dict[int, float] = {}


class BeatListener:
    """The controller's end: ``on_beat(incarnation)`` for each beat of a process that hears us."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        at: tuple[str, int],
        keys: KeyFiles,
        incarnation: str,
        clock: Clock,
        on_beat: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._incarnation = incarnation
        self._clock = clock
        self._on_beat = on_beat
        self._beats, self._answers = Sealed(keys, b"hosts"), Sealed(keys, b"the controller")
        self._members: dict[str, _Member] = {}
        self._at = at
        # No SO_REUSEADDR: on UDP it would let a process of any user take the same address, and what
        # arrives there. It is for the TIME_WAIT of TCP, which there is none of here.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._retry: asyncio.TimerHandle | None = None
        self._bind(FIRST_RETRY_S)

    def _bind(self, retry_s: float) -> None:
        self._retry = None
        try:
            self._socket.bind(self._at)
        except OSError as error:
            # Not fatal: the controller serves its own host all the same.
            if retry_s == FIRST_RETRY_S:
                logger.error("%s; trying again", _taken(self._at, error))  # noqa: TRY400  # no bug
            next_s = min(retry_s * 2, LAST_RETRY_S)
            self._retry = self._loop.call_later(retry_s, self._bind, next_s)
        else:
            self._loop.add_reader(self._socket.fileno(), self._read)

    def expect(self, incarnation: str) -> None:
        """Listen to this process from now on; harmless when that is done already."""
        self._members.setdefault(incarnation, _Member())

    def forget(self, incarnation: str) -> None:
        """Listen to a process no more."""
        self._members.pop(incarnation, None)

    def close(self) -> None:
        """Listen no more."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        for _ in range(PER_PASS):
            try:
                datagram, source = self._socket.recvfrom(SIZE + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # an answer could not be delivered; its host is gone
                continue
            beat = self._beats.read(datagram)
            if beat is not None:
                self._take(*beat, source)

    def _take(self, incarnation: str, number: int, heard: int, source: tuple[str, int]) -> None:
        member = self._members.get(incarnation)
        if member is None or number <= member.newest:
            return
        now = self._clock()
        is_heard = now - member.answered_at.get(heard, float("-inf")) < LOST_AFTER_S
        member.newest = number
        member.number += 1
        member.answered_at[member.number] = now
        member.answered_at.pop(member.number - KEPT, None)
        _send(self._socket, self._answers.write(self._incarnation, member.number, number), source)
        if is_heard:
            self._on_beat(incarnation)


class Beater:
    """A host's end: beats to one controller, from now on."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: str,
        keys: KeyFiles,
        incarnation: str,
        target: tuple[str, int],
        controller: str,
    ) -> None:
        self._loop = loop
        self._incarnation = incarnation
        self._beats, self._answers = Sealed(keys, b"hosts"), Sealed(keys, b"the controller")
        self._number = 0
        self._heard = 0
        self._heard_at = loop.time()
        self._controller = controller  # whose answers count
        self._target = target
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind((own, 0))
        loop.add_reader(self._socket.fileno(), self._read)
        self._beat()

    @property
    def silent_s(self) -> float:
        """For how long the controller has not answered."""
        return self._loop.time() - self._heard_at

    def close(self) -> None:
        """Beat no more."""
        self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        # The clock, not a count: a later Beater of this process must not begin below this one.
        self._number = max(self._number + 1, time.monotonic_ns())
        beat = self._beats.write(self._incarnation, self._number, self._heard)
        _send(self._socket, beat, self._target)

    def _read(self) -> None:
        for _ in range(PER_PASS):
            try:
                datagram = self._socket.recv(SIZE + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # nothing listens there at present
                continue
            answer = self._answers.read(datagram)
            if answer is not None and answer[0] == self._controller:
                self._heard = max(self._heard, answer[1])
                self._heard_at = self._loop.time()


def beater_towards(
    controller: Address,
    incarnation: str,
    settings: HostSettings,
    loop: asyncio.AbstractEventLoop,
    own: str,
) -> Beater | None:
    """Return what beats for the process ``own`` to a controller on another host.

    None for one on this host.
    """
    at = controller.addressDetails
    bind = settings.bind
    if bind is None or bind in LOOPBACK or getattr(at, "host", bind) == bind:
        return None
    keys = KeyFiles(settings.cluster_key)
    return Beater(loop, bind, keys, own, (at.host, at.port), incarnation)


def _send(sock: socket.socket, datagram: bytes, target: tuple[str, int]) -> None:
    try:
        sock.sendto(datagram, target)
    except OSError as error:  # no way there at present: that is what beats are to show
        logger.debug("no beat to %s: %s", target, error)


def _taken(at: tuple[str, int], error: OSError) -> str:
    holder = "" if error.errno != errno.EADDRINUSE else f", by user {_user_of(at)}"
    return (
        f"cannot listen at UDP {at[0]}:{at[1]}, where other hosts' beats arrive: "
        f"{error.strerror}{holder}; end what has it, for these hosts count as lost until then"
    )


def _user_of(at: tuple[str, int]) -> str:
    """Return the uid of whose socket has a UDP address; the kernel tells everybody."""
    number = int.from_bytes(socket.inet_aton(at[0]), sys.byteorder)
    taken = {f"{host:08X}:{at[1]:04X}" for host in (number, 0)}
    with open("/proc/net/udp", encoding="ascii") as table:
        rows = [line.split() for line in table]
    return next((row[7] for row in rows if row[1] in taken), "unknown")
