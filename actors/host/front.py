"""The HTTP front's gunicorn master, as the host process starts it.

The first one is forked, with what has been imported; a later one is a program of its own, for by
then the host process has threads.
"""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import sys
from functools import partial

from greenroom.actors.host.records import FRONT_ROLE, RunRecords
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime import forking
from greenroom.actors.runtime.logs import open_log_or_stderr
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.settings import HostSettings

_PROGRAM = """
import sys
from greenroom.actors.host.front import be_front
be_front(int(sys.argv[1]))
"""


def start_front(settings: HostSettings, records: RunRecords, listener: int) -> Process | None:
    """Start a front on a duplicate of this listening socket; None where it has ended already."""
    output, held = open_log_or_stderr(settings, "front"), os.dup(listener)
    try:
        start = _fork if forking.can_fork() else _spawn
        front = identify(start(output, held))
    finally:
        os.close(output)
        os.close(held)
    if front is not None:
        records.add(front, FRONT_ROLE)
    return front


def be_front(listener: int) -> None:
    """Be the front, on this listening socket."""
    with forking.uncollected():
        from greenroom.http_front import server  # noqa: PLC0415  # only here
    os.environ[server.FD_VARIABLE] = str(listener)
    server.main()


def _fork(output: int, listener: int) -> int:
    return forking.fork(partial(be_front, listener), output, keep=[listener])


def _spawn(output: int, listener: int) -> int:
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(listener)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[listener],
    )
    return child.pid


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
