"""The HTTP front's port, as the host process sees it: bound, asked for its health, named."""

from __future__ import annotations

import http.client
import socket
import ssl

from greenroom.actors.processes import command_line
from greenroom.actors.settings import HostSettings
from greenroom.core.errors import StartError

PAGES_BACKLOG = 128


def bind_http(settings: HostSettings) -> socket.socket:
    """Bind the HTTP front's port; StartError names the process that has it.

    The same for the port of our own pages, if they have one; that is for the workers to bind.
    """
    http = settings.http
    listener = _bound(http.host, http.port, "port")
    if http.pages_address is not None:
        try:
            _bound(*http.pages_address, "pages-port").close()
        except StartError:
            listener.close()
            raise
    return listener


def bind_pages(host: str, port: int) -> socket.socket:
    """Bind the port for our own pages, which all workers of this user share; OSError.

    So a worker has it while those of a dead master are still there.
    """
    listener = _make_socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(PAGES_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _make_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bound(host: str, port: int, flag: str) -> socket.socket:
    listener = _make_socket(host)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        holder = describe_holder(port)
        reason = f"is in use by {holder}" if holder else f"cannot be had: {error.strerror}"
        variable = f"GREENROOM_HTTP_{flag.upper().replace('-', '_')}"
        raise StartError(
            f"HTTP port {port} on {host} {reason}; choose another with --http-{flag} or {variable}"
        ) from None
    return listener


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
            return f"pid {connection.pid} ({command_line(connection.pid)[:80]})"
    return None


def url_of(settings: HostSettings) -> str:
    """Return the front's URL as a client on this host reaches it."""
    http_options = settings.http
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(http_options.host, http_options.host)
    scheme = "https" if http_options.ssl_certfile else "http"
    return f"{scheme}://{host}:{http_options.port}"


def answers_http(settings: HostSettings) -> bool:
    """Tell whether the front answers its health page with 200."""
    host, _, port = url_of(settings).partition("://")[2].rpartition(":")
    connection: http.client.HTTPConnection
    if settings.http.ssl_certfile:
        context = ssl._create_unverified_context()  # our own front, asked only for its health
        connection = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=2, context=context
        )
    else:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2)
    try:
        connection.request("GET", f"{settings.http.root_path}/-/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
