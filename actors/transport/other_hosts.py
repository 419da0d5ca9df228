"""The ways to and from processes of other hosts: who is let in, and to which process.

Theory of operation. A host has one TCP port, its admin's, and many processes. The admin is its
*gate*. A dialer and the gate shake hands by TLS (tls.py), so nothing but OpenSSL reads what a
stranger sends. Inside, the dialer says which process it wants and what for, and the gate answers
with one byte: whether there is such a process. If there is, the gate hands the connection, the
descriptor itself, over to that process through a Unix socket for that. The dialer and that
process begin a TLS session of their own on it; the gate relays nothing.

Between the gate's answer and the second handshake only the dialer sends, so the gate never holds
bytes that are for the process.

What becomes of a connection is for those who use it: the links, for messages (links.py), and links
for beats (beats.py). A connection that was begun with a cluster file that is no longer accepted is
ended here within ``KEY_CHECK_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress, bound_host
from greenroom.actors.transport.admission import Admission, Listener, TokenBucket, listen_here
from greenroom.actors.transport.beats import BeatLink, answer_beats
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.sockets import (
    credentials_of,
    discard,
    established,
    local_listener,
    local_socket,
    prepare_tcp,
    tcp_listener,
    tcp_socket,
)
from greenroom.actors.transport.tls import TlsStream, describe

MESSAGES, BEATS = 1, 2  # what a connection is for
_WANTED = struct.Struct(">QB")  # number of the process, what for
_READ_SIZE = 1024  # more than the record of either; nothing follows it
MAX_STRANGERS = 256  # descriptors; a process may have 1024 as a rule
PATIENCE_S = 5.0  # from the connection to the proof
ACCEPTS_PER_PASS = 32
# Half a processor at most, however many connect: a TLS handshake costs some 300 us. But a burst is
# taken without pauses, because an honest peer may be the last in it.
ACCEPTS_AT_ONCE, ACCEPTS_PER_S = 512, 1_500.0

# Together with SILENCE_S this is how long it takes until a host that vanished counts as dead.
DIAL_TIMEOUT_S = 1.5
# At one gate, by one process. A gate can serve many, but not before the first of them are late.
DIALS_AT_ONCE = 16
# A process that is busy may take its time, and one that stands still is ended by its host. That the
# host is there is the kernel's to find out (sockets.py): the dialer waits, and may have sent all.
SECURE_TIMEOUT_S = 30.0
# The kernel sends a lost SYN again after a second: on a bad link two of them are too few.
DIAL_AGAIN_S = 0.4
KEY_CHECK_S = 1.0


# --- In -------------------------------------------------------------------------------------------


class Handshakes:
    """Connections from other hosts that have not shown the cluster's certificate yet.

    When there are too many, the *oldest* one of the busiest host is turned away. If the newest were
    refused instead, a few hundred idle connections could keep every peer out for as long as they
    are renewed. An honest handshake takes milliseconds, so the oldest connections are not honest
    ones, and a host that opens many connections closes its own first.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, keys: KeyFiles, admission: Admission
    ) -> None:
        self.limit, self.patience_s = MAX_STRANGERS, PATIENCE_S
        self._loop = loop
        self._keys = keys
        self._admission = admission
        self._tasks: dict[TlsStream, tuple[str, asyncio.Task[None]]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._tasks)

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        return [stream.fileno() for stream in self._tasks]

    def close(self) -> None:
        """Drop all of them."""
        for stream in list(self._tasks):
            self._drop(stream)

    def take(
        self, sock: socket.socket, source: str, welcome: Callable[[TlsStream, str], Awaitable[None]]
    ) -> None:
        """Shake hands; then ``welcome(stream, source)``, all within the time of a stranger.

        What raises OSError is refused.
        """
        if len(self._tasks) >= self.limit:
            hosts = Counter(_host_of(each) for each, _ in self._tasks.values())
            ((busiest, _),) = hosts.most_common(1)
            oldest = next(s for s, (each, _) in self._tasks.items() if _host_of(each) == busiest)
            self._admission.refused(
                self._drop(oldest),
                f"more than {self.limit} connections are not authenticated, and this is the oldest",
            )
        stream = TlsStream(self._loop, sock, self._keys.tls(), accepts=True)
        task = self._loop.create_task(self._let_in(stream, source, welcome))
        self._tasks[stream] = source, task

    async def _let_in(
        self, stream: TlsStream, source: str, welcome: Callable[[TlsStream, str], Awaitable[None]]
    ) -> None:
        try:
            async with asyncio.timeout(self.patience_s):
                await stream.secure()
                await welcome(stream, source)
        except OSError as error:
            stream.close()
            if isinstance(error, ssl.SSLEOFError | ConnectionError):  # as of a process that ended
                self._admission.disconnected(source, describe(error))
            elif isinstance(error, TimeoutError) and error.errno is None:  # not the kernel's
                reason = f"it was not authenticated within {self.patience_s:g} s"
                self._admission.refused(source, reason)
            else:
                self._admission.refused(source, describe(error))
        finally:
            self._tasks.pop(stream, None)

    def _drop(self, stream: TlsStream) -> str:
        """Abandon one; return its source."""
        source, task = self._tasks.pop(stream)
        task.cancel()
        stream.close()
        return source


def _host_of(source: str) -> str:
    return source.rpartition(":")[0]


class Gate:
    """Listens at its process's own host and port; ``take(sock, purpose)`` gets what is for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        handshakes: Handshakes,
        take: Callable[[socket.socket, int], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._own = own
        self._take = take
        self._handshakes = handshakes
        self._listener = Listener(
            loop,
            listener or tcp_listener(bound_host(own), own.port),
            self._accept,
            per_pass=ACCEPTS_PER_PASS,
            allowance=TokenBucket(ACCEPTS_AT_ONCE, ACCEPTS_PER_S),
        )

    def fileno(self) -> int:
        """Return the number of the socket that it listens with."""
        return self._listener.fileno()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _accept(self, sock: socket.socket, name: object) -> bool:
        assert isinstance(name, tuple), name
        try:
            prepare_tcp(sock)
        except OSError:  # gone already
            sock.close()
        else:
            self._handshakes.take(sock, f"{name[0]}:{name[1]}", self._ask)
        return True

    async def _ask(self, stream: TlsStream, _source: str) -> None:
        said = await stream.receive(_READ_SIZE)
        if not said:
            raise ConnectionResetError("it ended the connection")
        if len(said) != _WANTED.size:
            raise OSError(f"it said {len(said)} bytes instead of which process it wants")
        self._hand_over(stream, *_WANTED.unpack(said))
        stream.close()

    def _hand_over(self, stream: TlsStream, number: int, purpose: int) -> None:
        """Give the connection to the process of that number.

        OSError when that process exists and cannot take it now, or the dialer is gone. What the
        dialer's stream raises is passed on as it is, since its end is no refusal.
        """
        target = ProcessAddress(self._own.host, number)
        if target == self._own:
            stream.send(b"\1")
            self._take(socket.socket(fileno=os.dup(stream.fileno())), purpose)
            return
        with local_socket(socket.SOCK_SEQPACKET) as passing:
            with _handing_over_to(number):
                try:
                    passing.connect(target.fd_socket_name)
                    found = credentials_of(passing).is_ours
                except ConnectionRefusedError:
                    found = False
            stream.send(bytes([found]))
            if found:
                with _handing_over_to(number):
                    socket.send_fds(passing, [bytes([purpose])], [stream.fileno()])


@contextlib.contextmanager
def _handing_over_to(number: int) -> Iterator[None]:
    """Say of what fails here that it is this host's, not the dialer's."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"it could not be handed over to process {number}: {describe(error)}"
        ) from None


# --- Out ------------------------------------------------------------------------------------------


class UnreachableError(OSError):
    """A process cannot be reached.

    It is *certainly* dead when its host says that it has none of that number, for which there is no
    ``reason`` to be told, or its kernel that nothing listens at the port. When nothing answers in
    time, that may be the network's fault.
    """

    def __init__(self, reason: str, *, is_certain: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_certain = is_certain


class Dials:
    """What a process dials at one gate: so many at once, and none is late while others get through.

    A gate shakes hands with one after the other. After a cut, what may be a thousand connections
    are dialed at once, and on a busy host most of them would be late: abandoned amid a handshake
    that has cost the gate as much as any, and begun anew, for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._turns = asyncio.Semaphore(DIALS_AT_ONCE)
        self._connected_at = self._answered_at = float("-inf")  # the last time
        self._limits: dict[asyncio.Timeout, float] = {}  # and since when; oldest first
        self._look: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is dialed."""
        return not self._limits

    @contextlib.asynccontextmanager
    async def turn(self, *, is_urgent: bool) -> AsyncIterator[None]:
        """Wait for a turn, unless it is urgent, and dial.

        Where the gate answers nobody for ``DIAL_TIMEOUT_S``, waited or dialed: UnreachableError, or
        TimeoutError if it has a host, since a link may lose much.
        """
        begun_at, limit = self._loop.time(), asyncio.timeout(None)
        try:
            async with limit:
                self._limits[limit] = begun_at
                if self._look is None:
                    self._look = self._loop.call_later(DIAL_TIMEOUT_S, self._end_late)
                async with contextlib.nullcontext() if is_urgent else self._turns:
                    yield
        except TimeoutError:
            if not limit.expired():  # the kernel's
                raise
            reason = f"no answer within {DIAL_TIMEOUT_S:g} s"
            if self._connected_at >= begun_at:
                raise TimeoutError(reason) from None
            raise UnreachableError(reason, is_certain=False) from None
        finally:
            self._limits.pop(limit, None)

    def connected(self) -> None:
        """Note that the gate's kernel has answered one."""
        self._connected_at = self._loop.time()

    def answered(self) -> None:
        """Note that the gate has answered one."""
        self._answered_at = self._loop.time()

    def _end_late(self) -> None:
        self._look = None
        now = self._loop.time()
        for limit, begun_at in list(self._limits.items()):
            late_at = max(begun_at, self._answered_at) + DIAL_TIMEOUT_S
            if late_at > now:
                self._look = self._loop.call_at(late_at, self._end_late)
                break
            del self._limits[limit]
            limit.reschedule(now)


async def ask_gate(stream: TlsStream, target: ProcessAddress, purpose: int, dials: Dials) -> None:
    """Have a gate hand a connection over to a process.

    UnreachableError where there is no such process; OSError when what was begun has failed.
    """
    await stream.secure()
    # A new connection has room for it.
    stream.send(_WANTED.pack(target.number, purpose))
    answer = await stream.receive(_READ_SIZE)
    if answer not in {b"\0", b"\1"}:
        raise ConnectionResetError("it closed the connection")
    dials.answered()
    if answer == b"\0":
        raise UnreachableError("", is_certain=True)


# --- Both -----------------------------------------------------------------------------------------


class OtherHosts:
    """``welcome(stream, source)`` gets connections for messages that have proven themselves."""

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
        self._dials: dict[str, Dials] = {}  # by gate
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
        dials = self._dials_at(to.gate)
        try:
            async with dials.turn(is_urgent=purpose == BEATS):
                sock = await self._connect(sock, to)
                dials.connected()
                stream = TlsStream(self._loop, sock, self._keys.tls(), accepts=False)
                await ask_gate(stream, to, purpose, dials)
            stream = TlsStream(self._loop, sock, self._keys.tls(), accepts=False)
            limit = asyncio.timeout(SECURE_TIMEOUT_S)
            try:
                async with limit:
                    await stream.secure()
            except TimeoutError:
                if not limit.expired():  # the kernel's
                    raise
                reason = f"no answer within {SECURE_TIMEOUT_S:g} s"
                raise UnreachableError(reason, is_certain=False) from None
            established(sock)
        except BaseException:
            discard(self._loop, sock)
            raise
        finally:
            self._dialing.discard(sock)
        return stream

    def _dials_at(self, gate: str) -> Dials:
        if gate not in self._dials:
            self._dials = {each: at for each, at in self._dials.items() if not at.is_idle}
            self._dials[gate] = Dials(self._loop)
        return self._dials[gate]

    async def _connect(self, sock: socket.socket, to: ProcessAddress) -> socket.socket:
        """Return the first socket that reaches the port: ``sock``, or another one after a while."""

        def begin(sock: socket.socket) -> None:
            task = self._loop.create_task(self._loop.sock_connect(sock, (to.host, to.port)))
            task.add_done_callback(_retrieve)
            tries[task] = sock

        tries: dict[asyncio.Task[None], socket.socket] = {}
        begin(sock)
        try:
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
