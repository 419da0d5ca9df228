"""The HTTP front's port: bound, lent by a worker to a new host process, and whose it is if taken.

The listening socket is never closed while anything serves: the kernel would reset all connections
that wait in its queue, and a second socket on the port, by SO_REUSEPORT, has a queue of its own.
So the host process, the gunicorn master and each worker hold the one socket. A worker lends it to a
new host process over a Unix socket whose name has the worker's pid. When the host stops, those who
still wait in the queue are turned away (:func:`turn_away`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Iterable

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.processes import describe_process
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport.admission import Admission, listen_here
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.sockets import credentials_of, local_listener, tcp_listener
from greenroom.core.errors import StartError

logger = logging.getLogger(__name__)

LEND_TIMEOUT_S = 1.0
LEAVE_S = 0.5  # how long those who are turned away may take to read why
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)
_AT_ONCE = 64 * 1024  # bytes


def lend(listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    """Give this listening socket to processes of this user that ask, while the loop runs."""

    def give(borrower: socket.socket) -> None:
        with borrower:
            try:
                socket.send_fds(borrower, [b"."], [listener.fileno()])
            except OSError as error:  # that one has left
                logger.warning("the HTTP port was not lent: %s", error)

    try:
        asked = local_listener(_lender(os.getpid()))
    except OSError as error:
        logger.warning("the HTTP port could not be lent to a new host process: %s", error)
    else:
        listen_here(loop, asked, Admission(loop), give, Shortage())


def borrow(workers: Iterable[Process], settings: HostSettings) -> socket.socket | None:
    """Return the listening socket of the HTTP port from a worker that has it; None without one."""
    for worker in workers:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lender:
            lender.settimeout(LEND_TIMEOUT_S)
            try:
                lender.connect(_lender(worker.pid))
                if credentials_of(lender) != (worker.pid, os.geteuid()):
                    continue
                _, fds, _, _ = socket.recv_fds(lender, 1, 1)
            except OSError:  # it has ended meanwhile, or is of a version that lends nothing
                continue
        for fd in fds:
            listener = socket.socket(fileno=fd)
            if _is_for(listener, settings):
                return listener
            listener.close()
    return None


def _lender(pid: int) -> bytes:
    return b"\0greenroom-http-%d" % pid


def _is_for(listener: socket.socket, settings: HostSettings) -> bool:
    """Return whether a socket listens where these settings say: they may be new ones."""
    wanted = socket.getaddrinfo(settings.http.host, settings.http.port, type=socket.SOCK_STREAM)
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and listener.getsockname()[:2] in [each[4][:2] for each in wanted]


def turn_away(listener: socket.socket, *, is_tls: bool) -> None:
    """Close a listening socket for good, and tell those who wait in its queue; may take LEAVE_S.

    To close it would reset them, and a client could not know that its request never ran.
    """
    listener.setblocking(False)
    waiting = []
    with contextlib.suppress(OSError):  # that there are no more is one
        while True:
            waiting.append(listener.accept()[0])
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # whoever has it, too
    listener.close()
    reading = select.poll()
    for each in waiting:
        with contextlib.suppress(OSError):  # it has left
            each.setblocking(False)
            if not is_tls:
                each.send(UNAVAILABLE)
            each.shutdown(socket.SHUT_WR)
        reading.register(each, select.POLLIN)
    left, deadline = {each.fileno(): each for each in waiting}, time.monotonic() + LEAVE_S
    while left and (left_s := deadline - time.monotonic()) > 0:
        for number, _ in reading.poll(left_s * 1000):
            # Unread bytes would make a reset of the end, which may overtake the answer.
            with contextlib.suppress(OSError):
                if left[number].recv(_AT_ONCE):
                    continue
            reading.unregister(number)
            left.pop(number).close()
    for each in left.values():
        each.close()


def bind_http(settings: HostSettings) -> socket.socket:
    """Bind the HTTP front's port; StartError names the process that has it.

    The same for the port of our own pages, if they have one; that is for the workers to bind.
    """
    http = settings.http
    listener = _bound(http.host, http.port, "http-port")
    if http.pages_address is not None:
        try:
            _bound(*http.pages_address, "http-pages-port").close()
        except StartError:
            listener.close()
            raise
    return listener


def check_grpc(settings: HostSettings) -> None:
    """Raise StartError where the port for gRPC, if there is to be one, cannot be had."""
    if settings.grpc_port is not None:
        _bound(settings.http.host, settings.grpc_port, "grpc-port").close()


def _bound(host: str, port: int, flag: str) -> socket.socket:
    try:
        return tcp_listener(host, port)
    except OSError as error:
        holder = describe_holder(port)
        reason = f"is in use by {holder}" if holder else f"cannot be had: {error.strerror}"
        kind = "gRPC" if flag == "grpc-port" else "HTTP"
        other = f"--{flag} or GREENROOM_{flag.upper().replace('-', '_')}"
        raise StartError(
            f"{kind} port {port} on {host} {reason}; choose another with {other}"
        ) from None


def describe_holder(port: int, address: str | None = None) -> str | None:
    """Return "pid N (command)" of the process that listens on the port, None when it is free.

    With ``address``, of what listens there or everywhere.
    """
    addresses = None if address is None else (address, "0.0.0.0", "::")
    import psutil  # noqa: PLC0415  # only for this

    for connection in psutil.net_connections("inet"):
        listens = connection.status == psutil.CONN_LISTEN
        if not (listens and connection.laddr and connection.laddr.port == port):
            continue
        if addresses is None or connection.laddr.ip in addresses:
            if connection.pid is None:
                return "a process of another user"
            return describe_process(connection.pid)
    return None
