"""The gRPC server's process: ``python -m greenroom.http_front.grpc.server``.

Its settings are those of the environment. SIGTERM drains: health says NOT_SERVING, and RPCs in
flight are finished, for at most DRAIN_S. Exit codes: 0, 1 (failed), 2 (bad settings).
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import grpc

from greenroom.actors.host.records import GRPC_ROLE, show_title
from greenroom.actors.runtime.actor import keep_freed_memory
from greenroom.actors.runtime.processes import raise_limit
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.errors import InvalidRequestError
from greenroom.http_front.grpc.calls import Applications, Servicers
from greenroom.http_front.grpc.services import Services
from greenroom.http_front.link import Link

DRAIN_S = 20


def servicer_function(path: str) -> Any:
    """Import ``module.add_XServicer_to_server``; InvalidRequestError where that is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # it is the user's module
        raise InvalidRequestError(
            f"grpc_servicer_functions={path!r}: cannot be imported: {type(error).__name__}: {error}"
        ) from None


def credentials(settings: HostSettings) -> Any:
    """Return the certificate that HTTPS has; None without."""
    http = settings.http
    if http.ssl_certfile is None or http.ssl_keyfile is None:
        return None
    pair = Path(http.ssl_keyfile).read_bytes(), Path(http.ssl_certfile).read_bytes()
    if settings.grpc_ssl_ca_certs is None:
        return grpc.ssl_server_credentials([pair])
    try:
        authorities = Path(settings.grpc_ssl_ca_certs).read_bytes()
    except OSError as error:
        path = settings.grpc_ssl_ca_certs
        raise InvalidRequestError(f"grpc_ssl_ca_certs={path!r}: cannot be read: {error}") from None
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=True)


async def serve(settings: HostSettings) -> None:
    """Serve until SIGTERM or SIGINT; InvalidRequestError where that cannot begin."""
    link = Link(settings, GRPC_ROLE)
    applications = Applications(link)
    servicers = Servicers(link, applications, settings.grpc_request_timeout_s)
    for path in settings.grpc_servicer_functions:
        servicers.add(servicer_function(path))
    server = grpc.aio.server(
        maximum_concurrent_rpcs=settings.grpc_maximum_concurrent_rpcs,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", settings.grpc_max_receive_message_length),
        ],
    )
    server.add_generic_rpc_handlers((servicers,))
    services = Services(server, servicers, applications)
    host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
    address, certificate = f"{host}:{settings.grpc_port}", credentials(settings)
    try:
        if certificate is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, certificate)
    except RuntimeError as error:
        raise InvalidRequestError(f"grpc_port: cannot listen on {address}: {error}") from None
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await link.start()
    await server.start()
    await services.serving()
    show_title(GRPC_ROLE)  # it means that the server is ready
    metrics = SharedMetrics(lambda: [({}, servicers.metrics())])
    metrics.keep_showing(asyncio.get_running_loop().call_later)
    await told.wait()
    await services.draining()
    await server.stop(DRAIN_S)
    await link.stop()


def main() -> None:
    """Run the gRPC server of this host, as the environment says."""
    keep_freed_memory()
    raise_limit()
    try:
        settings = read_settings()
        sys.path.insert(0, settings.grpc_dir or "")
        asyncio.run(serve(settings))
    except InvalidRequestError as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
