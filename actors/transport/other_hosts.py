"""The ways to and from processes of other hosts: connections that have proven themselves.

A process dials another host's gate, and is handed what its own host's gate has let in (gate.py).
What becomes of a connection is for those who use it: the links, for messages (links.py), and links
for beats (beats.py). A connection that was begun with a cluster file that is no longer accepted is
ended here within ``KEY_CHECK_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress, bound_host
from greenroom.actors.transport.admission import Admission, Listener, listen_here
from greenroom.actors.transport.beats import BeatLink, answer_beats
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.gate import (
    BEATS,
    DIAL_TIMEOUT_S,
    Gate,
    Handshakes,
    UnreachableError,
    dial,
    no_longer_than,
)
from greenroom.actors.transport.sockets import discard, local_listener, tcp_socket
from greenroom.actors.transport.tls import TlsStream

# The kernel sends a lost SYN again after a second: on a bad link two of them are too few.
DIAL_AGAIN_S = 0.4
KEY_CHECK_S = 1.0


class OtherHosts:
    """``welcome(stream, source)`` gets what arrives for messages; OSError makes a refusal of it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        keys: KeyFiles,
        admission: Admission,
        shortage: Shortage,
        welcome: Callable[[TlsStream, str], Awaitable[None]],
        listener: socket.socket | None = None,
    ) -> None:
        self.answer_beat: Callable[[bytes], bytes] = lambda beat: beat
        self.handshakes = Handshakes(loop, keys, admission)
        self._loop = loop
        self._own = own
        self._keys = keys
        self._welcome = welcome
        self._handed: dict[int, socket.socket] = {}  # from the gate, not read yet
        self._dialing: set[socket.socket] = set()
        self._begun: dict[TlsStream, Callable[[], object]] = {}  # and what ends each
        self._key_check: asyncio.TimerHandle | None = None
        self._listener: Gate | Listener
        if own.is_admin or listener is not None:
            self._listener = Gate(loop, own, self.handshakes, self._take, listener)
        else:
            listener = local_listener(own.fd_socket_name, socket.SOCK_SEQPACKET)
            self._listener = listen_here(loop, listener, admission, self._handed_over, shortage)

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets, of which some may be connections' too."""
        numbers = [sock.fileno() for sock in self._dialing if sock.fileno() >= 0]
        numbers += [stream.fileno() for stream in self._begun]
        return [*numbers, *self._handed, *self.handshakes.descriptors(), self._listener.fileno()]

    def listeners(self) -> dict[bytes, int]:
        """Return the numbers of the Unix sockets that listen here, by their names."""
        is_gate = isinstance(self._listener, Gate)
        return {} if is_gate else {self._own.fd_socket_name: self._listener.fileno()}

    def close(self) -> None:
        """Let go of everything."""
        self._listener.close()
        self.handshakes.close()
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
        self.handshakes.take(sock, f"{host}:{port}", welcome)

    async def _welcome_beats(self, stream: TlsStream, _source: str) -> None:
        task = self._loop.create_task(answer_beats(stream, self._answered))
        self.keep(stream, task.cancel)

    def _answered(self, beat: bytes) -> bytes:
        return self.answer_beat(beat)  # of now: a link may have begun earlier

    # --- Out ----------------------------------------------------------------------------------

    def new_socket(self) -> socket.socket:
        """Return a socket for :meth:`reach`; OSError when there is none to be had."""
        sock = tcp_socket(bound_host(self._own))
        self._dialing.add(sock)
        return sock

    async def reach(self, sock: socket.socket, to: ProcessAddress, purpose: int) -> TlsStream:
        """Reach a process. UnreachableError; or OSError when what was begun has failed."""
        sock = await self._connect(sock, to)
        try:
            return await dial(self._loop, sock, to, purpose, self._keys)
        except BaseException:
            discard(self._loop, sock)
            raise
        finally:
            self._dialing.discard(sock)

    async def _connect(self, sock: socket.socket, to: ProcessAddress) -> socket.socket:
        """Return the first socket that reaches the port: ``sock``, or another one after a while."""

        def begin(sock: socket.socket) -> None:
            task = self._loop.create_task(self._loop.sock_connect(sock, (to.host, to.port)))
            task.add_done_callback(_retrieve)
            tries[task] = sock

        tries: dict[asyncio.Task[None], socket.socket] = {}
        begin(sock)
        try:
            async with no_longer_than(DIAL_TIMEOUT_S):
                over: set[asyncio.Task[None]] = set()
                while not over:
                    over, _ = await asyncio.wait(
                        tries, timeout=DIAL_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not over:
                        with contextlib.suppress(OSError):  # out of descriptors: the others go on
                            begin(self.new_socket())
            first = over.pop()
            first.result()
            return tries.pop(first)
        except ConnectionRefusedError:
            raise UnreachableError("nothing listens at its port", is_certain=True) from None
        finally:
            for task, each in tries.items():
                task.cancel()
                discard(self._loop, each)
                self._dialing.discard(each)

    def beat_link(
        self, address: ProcessAddress, on_answer: Callable[[bytes], None]
    ) -> BeatLink | None:
        """Return a link for beats to a process; None for one of this host."""
        if address.host in {self._own.host, LOOPBACK}:
            return None

        async def dial() -> TlsStream:
            stream = await self.reach(self.new_socket(), address, BEATS)
            task = asyncio.current_task()
            assert task is not None
            self.keep(stream, task.cancel)
            return stream

        return BeatLink(self._loop, dial, on_answer)

    # --- Both ways ----------------------------------------------------------------------------

    def keep(self, stream: TlsStream, end: Callable[[], object]) -> None:
        """Call ``end`` when this connection's cluster file was replaced; it is dialed again."""
        self._begun = {each: end for each, end in self._begun.items() if not each.is_closed}
        self._begun[stream] = end
        if self._key_check is None:
            self._key_check = self._loop.call_later(KEY_CHECK_S, self._check_keys)

    def _check_keys(self) -> None:
        self._key_check = None
        taken = self._keys.tls().taken
        self._begun = {each: end for each, end in self._begun.items() if not each.is_closed}
        for stream, end in list(self._begun.items()):
            if not stream.certificates <= taken:
                end()
        if self._begun:
            self._key_check = self._loop.call_later(KEY_CHECK_S, self._check_keys)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Look at what it raised, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()
