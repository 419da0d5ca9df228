"""A system of the Greenroom that this interpreter has, for one benchmark; ended with it."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

from greenroom import serve


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextlib.contextmanager
def own_system() -> Iterator[int]:
    """Start a system with a state dir and ports of its own; yield its HTTP port."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= {
            "GREENROOM_STATE_DIR": folder,
            "GREENROOM_HTTP_PORT": str(port),
            "GREENROOM_ADMIN_PORT": str(_free_port()),
        }
        try:
            serve.start()
            yield port
        finally:
            serve.shutdown()
