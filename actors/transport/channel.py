"""One socket and the connection over it: bytes between the kernel and the protocol.

Why not asyncio's streams: before Python 3.12 their ``writelines`` joins all buffers into one, which
copies a large message once more, and their write buffer hides from us how much a slow peer owes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, TypeAlias

from greenroom.actors.transport.frames import HEADER, Buffer
from greenroom.actors.transport.protocol import Connection
from greenroom.actors.transport.tls import TlsSocket

if TYPE_CHECKING:
    from greenroom.actors.transport.peer import Peer
    from greenroom.actors.transport.peers import Peers

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
