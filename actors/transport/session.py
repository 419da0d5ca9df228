"""One connection to another process, and what outlives it: the session of the two processes.

Theory of operation. Each process numbers its messages to another one from 1 as it first writes
them, and keeps each until the other acknowledges it. When a connection to another host is cut, the
next one writes again what was not acknowledged. The receiver drops what it has already, by the
numbers. So nothing is lost, repeated or reordered while both processes live and neither has
abandoned the other, whatever number of connections there are between them: when both dial at once
each may write over another one.

A process that gives the other up forgets the session, and has a new one with a new number if they
meet again. HELLO carries that number, so the other end starts again from 1, too, and reports what
it had written and what was not acknowledged, for it may or may not have arrived.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from greenroom.actors.transport.frames import (
    HEADER,
    LOOSE,
    MAX_BUFFERS,
    MAX_MESSAGE,
    Buffer,
    FrameReader,
    FrameWriter,
    Outgoing,
    RefusedError,
)
from greenroom.actors.transport.tls import TlsStream

MAX_KEPT = 256 * 1024 * 1024  # bytes that may wait for one peer, the unacknowledged ones included
MESSAGE_COST = 256  # what keeping a message costs beside its bytes, about
DELAYED_MESSAGES = 64
DELAYED_BYTES = 256 * 1024


class Session:
    """What this process and one other have sent each other and not acknowledged."""

    __slots__ = (
        "_highest",
        "_sent",
        "acknowledged",
        "bytes_to_ack",
        "has_urgent",
        "kept_bytes",
        "number",
        "other",
        "own_ack",
        "received",
        "sent_up_to",
        "waiting",
    )

    def __init__(self) -> None:
        self.number = 1 + secrets.randbits(63)
        self.other = 0  # the other end's number; 0 until it is known
        self.received = 0  # how many messages
        self.own_ack = 0  # up to which message the other end was sent that it has arrived
        self.bytes_to_ack = 0
        self.has_urgent = False  # a message whose sender waits for its acknowledgement
        self.acknowledged = 0  # up to which message
        self.sent_up_to = 0  # the last message written to the present connection
        self._highest = 0  # the last one written to any
        self.kept_bytes = 0
        self.waiting: deque[Outgoing] = deque()  # to be written
        self._sent: deque[Outgoing] = deque()  # numbers acknowledged + 1 to sent_up_to

    def send(self, buffers: list[Buffer], tag: object, *, delays_ack: bool) -> None:
        """Take a message, whose buffers must not change until it is acknowledged.

        ValueError when it is too large, or too much waits already.
        """
        size = sum(map(len, buffers))
        if size > MAX_MESSAGE or not 0 < len(buffers) <= MAX_BUFFERS:
            raise ValueError(
                f"a message of {size} bytes in {len(buffers)} buffers; at most {MAX_MESSAGE} bytes "
                f"in 1 to {MAX_BUFFERS} buffers can be sent"
            )
        if self.kept_bytes and self.kept_bytes + size > MAX_KEPT:
            raise ValueError(f"{self.kept_bytes} bytes wait for its target already")
        self.kept_bytes += size + MESSAGE_COST
        self.waiting.append(Outgoing(buffers, size, tag, delays_ack=delays_ack))

    def take(self) -> Outgoing:
        """Return the next message to write, number ``sent_up_to``; while any are ``waiting``."""
        message = self.waiting.popleft()
        self._sent.append(message)
        self.sent_up_to += 1
        self._highest = max(self._highest, self.sent_up_to)
        return message

    def acknowledge(self, up_to: int) -> list[object]:
        """Forget what the other end has received; return its tags. RefusedError if it cannot be."""
        if up_to > self._highest:
            raise RefusedError(f"it acknowledges message {up_to} of {self._highest}")
        tags = []
        for _ in range(up_to - self.acknowledged):
            if self._sent:
                message = self._sent.popleft()
            else:  # written to an earlier connection, and not yet to this one
                message = self.waiting.popleft()
                self.sent_up_to += 1
            self.kept_bytes -= message.size + MESSAGE_COST
            if message.tag is not None:
                tags.append(message.tag)
        self.acknowledged = up_to
        return tags

    def rewind(self) -> None:
        """Go back to the first message that is not acknowledged, for another connection."""
        self.waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self.sent_up_to = self.acknowledged
        self.own_ack = -1 if self.received else 0  # what was sent may be lost with the connection

    def restart(self, *, keep_unwritten: bool) -> list[object]:
        """Start again from 1 with a peer that has a new session; return tags of what may be lost.

        Messages that were never written go to the peer's new session if ``keep_unwritten``.
        """
        self.rewind()
        count = self._highest - self.acknowledged if keep_unwritten else len(self.waiting)
        unsent = [self.waiting.popleft() for _ in range(count)]
        self.kept_bytes -= sum(each.size + MESSAGE_COST for each in unsent)
        self.received = self.own_ack = self.acknowledged = self.sent_up_to = self._highest = 0
        return [each.tag for each in unsent]

    def unsent(self) -> list[object]:
        """Return the tags of all that is not acknowledged."""
        return [each.tag for each in (*self._sent, *self.waiting)]

    def receive(self, number: int, size: int, *, delays_ack: bool) -> bool:
        """Count a message that arrived; return False for one that had arrived before."""
        if number != self.received + 1:
            self.check_order(number)
            return False
        self.received = number
        self.bytes_to_ack += size
        if not delays_ack:
            self.has_urgent = True
        return True

    def check_order(self, number: int) -> None:
        """Refuse a message that is beyond the next one."""
        if not 0 < number <= self.received + 1:
            raise RefusedError(f"message {number} where {self.received + 1} is due")

    @property
    def ack_is_urgent(self) -> bool:
        """Return whether it waits to know, or much has come."""
        return (
            self.has_urgent
            or self.received - self.own_ack >= DELAYED_MESSAGES
            or self.bytes_to_ack >= DELAYED_BYTES
        )

    def ack_written(self) -> None:
        """Note that a frame with the present ``received`` goes to the other end."""
        self.own_ack, self.bytes_to_ack, self.has_urgent = self.received, 0, False


# --- Reading and writing --------------------------------------------------------------------------
#
# asyncio's transports are not used here. With a Protocol, a small message and its answer took 72 us
# of CPU instead of 20, because each read allocates 256 KiB; with a BufferedProtocol 22. Before
# Python 3.12, their ``writelines`` joins all buffers into one, which copies a large message once
# more, and their write buffer hides how much a slow peer has not read yet.

READ_SIZE = 64 * 1024
LARGE_READ_SIZE = 1024 * 1024
CHUNK_HEADER = HEADER.size + 1  # after the last byte of the chunk before
WRITE_SIZE = 512 * 1024  # per pass of the loop, so that a large message delays no other
BUFFERS_AT_ONCE = 512  # the kernel takes 1024

Stream: TypeAlias = socket.socket | TlsStream


class Connection:
    """A socket of the loop, and the frames on it.

    ``on_read(connection, received)`` gets what arrives, b"" at the end. ``source`` is the TCP
    address of the other end, "" on this host.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: Stream,
        on_read: Callable[[Connection, bytes], None],
        source: str = "",
    ) -> None:
        self.source = source
        self.reader = FrameReader()
        self.writer = FrameWriter()
        self.session: Session | None = None  # whose messages are written here, while they are
        self.is_closed = False
        self.begun_at = loop.time()
        self._loop = loop
        self._socket = sock
        self._fd = sock.fileno()
        self._on_read = on_read
        self._read_size = READ_SIZE
        self._control: list[Buffer] = []  # to be written before messages
        self._unwritten: list[Buffer] = []
        self._waits_for_room = False

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._fd

    def open(self) -> None:
        """Begin to read."""
        self._loop.add_reader(self._fd, self.read)

    def close(self) -> None:
        """Let go of the socket; the session lives on."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._socket.fileno() >= 0:  # else it was let go of, and its number may be another's
            self._loop.remove_reader(self._fd)
            if self._waits_for_room:
                self._loop.remove_writer(self._fd)
        self._socket.close()
        self.session = None
        self._unwritten.clear()
        self._control.clear()

    def carry(self, session: Session | None) -> None:
        """Write the messages of ``session`` from now on; None to write no more of them."""
        self.session = session
        self.writer.abandon()

    def put(self, frame: bytes) -> None:
        """Write a frame that is no part of a message with the next :meth:`flush`."""
        self._control.append(frame)

    def write_loose(self, body: Buffer) -> bool:
        """Write a message that is kept nowhere, behind all others; False where it has to wait."""
        session = self.session
        if session is None or session.waiting or self.writer.chunks is not None:
            return False
        if self._waits_for_room or self._control:
            return False
        frame = HEADER.pack(LOOSE, 1, len(body), 0, 0) + body
        try:
            written = self._socket.send(frame)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True  # it is lost; reading tells the end, after what still can be read
        if written < len(frame):
            self._unwritten = [memoryview(frame)[written:]]
            self._wait_for_room()
        return True

    def flush(self) -> None:
        """Write what there is, as far as the socket takes it; the rest when it can."""
        if not self._waits_for_room and not self.is_closed:
            self._write()

    def read(self) -> None:
        """Take what there is to read now; also called when something may be."""
        reader = self.reader
        try:
            if reader.chunk is not None and not self._fill_chunk():
                return
            between = reader.assembly is not None and not self.source  # chunks: a header is next
            received = self._socket.recv(CHUNK_HEADER if between else self._read_size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""  # reset: as good as the end
        # A full read means more is there; 64 KiB is what the allocator gives without page faults.
        full = len(received) == self._read_size
        self._read_size = LARGE_READ_SIZE if full else READ_SIZE
        self._on_read(self, received)

    def _fill_chunk(self) -> bool:
        """Read to where the bytes of a large message belong; return whether to read on."""
        if not isinstance(self._socket, socket.socket):
            return True  # OpenSSL has its own memory
        rooms = self.reader.rooms()
        if not rooms:
            return True
        size = self._socket.recvmsg_into(rooms)[0]
        self.reader.filled(size)
        return size in {0, sum(map(len, rooms))}

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        self._waits_for_room = False
        self._write()

    def _write(self) -> None:
        room, session = WRITE_SIZE, self.session
        try:
            while room > 0:
                if not self._unwritten:
                    self._unwritten = self._frames(WRITE_SIZE)
                    if not self._unwritten:
                        return
                room -= self._write_some()
                if not (self._unwritten or (session and session.waiting) or self.writer.chunks):
                    return  # nothing follows, as nearly always
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unwritten.clear()  # reading tells the end, after what still can be read
            return
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        self._waits_for_room = True
        self._loop.add_writer(self._fd, self._writable)

    def _frames(self, budget: int) -> list[Buffer]:
        """Return the next frames to write, of about ``budget`` bytes."""
        out, self._control = self._control, []
        session = self.session
        if session is None:
            return out
        writer, acknowledged, waiting = self.writer, session.received, session.waiting
        joined: list[bytes] = []  # small ones leave as one buffer: a copy is cheaper than a vector
        limit = budget
        while budget > 0 and (waiting or writer.chunks is not None):
            if writer.chunks is not None:
                budget -= writer.chunk(acknowledged, joined, out)
                continue
            message = session.take()
            frame = writer.begin(message, session.sent_up_to, acknowledged)
            joined.append(frame)
            budget -= len(frame)
        if joined:
            out.append(b"".join(joined))
        if budget != limit:
            session.ack_written()
        return out

    def _write_some(self) -> int:
        unwritten = self._unwritten
        if len(unwritten) == 1:
            written = self._socket.send(unwritten[0])
        else:
            written = self._socket.sendmsg(unwritten[:BUFFERS_AT_ONCE])
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
