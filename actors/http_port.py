"""The HTTP front's port, as the host process sees it: bound, asked for its health, named."""

from __future__ import annotations

import http.client
import socket
import ssl

from greenroom.actors.processes import command_line
from greenroom.actors.settings import HostSettings
from greenroom.core.errors import StartError


def bind_http(settings: HostSettings) -> socket.socket:
    """Bind the HTTP front's port; StartError names the process that has it."""
    http_options = settings.http
    family = socket.AF_INET6 if ":" in http_options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((http_options.host, http_options.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        holder = describe_holder(http_options.port)
        reason = f"is in use by {holder}" if holder else f"cannot be had: {error.strerror}"
        raise StartError(
            f"HTTP port {http_options.port} on {http_options.host} {reason}; choose another with "
            "--http-port or GREENROOM_HTTP_PORT"
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
