"""The gRPC server's process: ``python -m greenroom.http_front.grpc.serving``.

Its settings are those of the environment. SIGTERM drains: health says NOT_SERVING, and RPCs in
flight are finished, for as long as actors/runtime/draining.py says. Exit codes: 0, 1 (failed), 2
(bad settings).
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from greenroom.actors.runtime import draining
from greenroom.actors.runtime.actor import keep_freed_memory
from greenroom.actors.runtime.processes import raise_limit
from greenroom.actors.runtime.records import GRPC_ROLE, show_title
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.http_front.clients import ClientCounts, TrustedProxies
from greenroom.http_front.grpc.calls import Applications, Places, Servicers, metadata_of
from greenroom.http_front.link import Link

WATCHES = 10  # of health, for one connection
MAX_WATCHES = 1_000
CONNECTION = [  # so that one client, or one that is forgotten, holds no more than its share
    ("grpc.max_concurrent_streams", 250),
    ("grpc.max_connection_idle_ms", 5 * 60 * 1000),
    ("grpc.max_connection_age_ms", 60 * 60 * 1000),  # calls under way are finished
]

# --- Services that come with the server -----------------------------------------------------------

API = "ray.serve.RayServeAPIService"  # the name that Ray Serve's clients know
_MESSAGES = {  # with their fields, all of them strings: number, name, repeated
    "ListApplicationsRequest": (),
    "ListApplicationsResponse": ((1, "application_names", True),),
    "HealthzRequest": (),
    "HealthzResponse": ((1, "message", False),),
}


def _message_classes() -> dict[str, Any]:
    """Return the messages of RayServeAPIService, with its description for reflection.

    A process has each name once: where servicers have imported Ray's own serve_pb2, it is there.
    """
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(API)
    except KeyError:
        pool.AddSerializedFile(_described().SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ray.serve.{name}"))
        for name in _MESSAGES
    }


def _described() -> descriptor_pb2.FileDescriptorProto:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="greenroom/ray_serve_api.proto", package="ray.serve", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field_name, is_repeated in fields:
            label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            message.field.add(name=field_name, number=number, type=field.TYPE_STRING, label=label)
    service = file.service.add(name=API.rpartition(".")[2])
    for method in ("ListApplications", "Healthz"):
        of = f".ray.serve.{method}"
        service.method.add(name=method, input_type=f"{of}Request", output_type=f"{of}Response")
    return file


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # grpc ships no types
    """Lets a connection watch WATCHES services at a time: a watch has no end."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places
        self._watches = ClientCounts(WATCHES)  # of each connection

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  # the service's name
        """Send the state of a service, now and whenever it changes."""
        peer = context.peer()
        if not self._watches.has_room_for(peer):
            text = f"a connection may have {WATCHES} watches at a time"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        async with self._places.place(context, "watches"):
            self._watches.add(peer)
            try:
                await super().Watch(request, context)
            finally:
                self._watches.remove(peer)


class Services:
    """Services that come with every server: health, reflection, and Ray Serve's API."""

    def __init__(
        self,
        server: Any,
        servicers: Servicers,
        applications: Applications,
        watches: Places,
        *,
        has_reflection: bool,
    ) -> None:
        self._applications = applications
        self._classes = _message_classes()
        self._health = _Health(watches)
        self._names = [*servicers.names, API]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if has_reflection:
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, server)
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=self._classes[f"{method}Request"].FromString,
                response_serializer=self._classes[f"{method}Response"].SerializeToString,
            )
            for method, answer in (("ListApplications", self._list), ("Healthz", self._healthz))
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(API, handlers),))

    async def serving(self) -> None:
        """Say that all services are there."""
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def draining(self) -> None:
        """Say that none takes any more calls."""
        await self._health.enter_graceful_shutdown()

    async def _list(self, _request: Any, context: Any) -> Any:
        try:
            names = sorted(await self._applications.endpoints())
        except GreenroomError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return self._classes["ListApplicationsResponse"](application_names=names)

    async def _healthz(self, _request: Any, context: Any) -> Any:
        await metadata_of(context, "request_id")
        return self._classes["HealthzResponse"](message="success")


# --- The process ----------------------------------------------------------------------------------


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
    proxies = TrustedProxies(settings.http.trusted_proxies)
    servicers = Servicers(
        link,
        applications,
        settings.grpc_request_timeout_s,
        Places(settings.grpc_maximum_concurrent_rpcs, proxies),
    )
    for path in settings.grpc_servicer_functions:
        servicers.add(servicer_function(path))
    server = grpc.aio.server(
        options=[
            *CONNECTION,
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", settings.grpc_max_receive_message_length),
        ],
    )
    server.add_generic_rpc_handlers((servicers,))
    services = Services(
        server,
        servicers,
        applications,
        Places(MAX_WATCHES, proxies),
        has_reflection=settings.grpc_reflection,
    )
    host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
    address, certificate = f"{host}:{settings.grpc_port}", credentials(settings)
    try:
        if certificate is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, certificate)
    except RuntimeError as error:
        raise InvalidRequestError(f"grpc_port: cannot listen on {address}: {error}") from None
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await link.start()
    await server.start()
    await services.serving()
    show_title(GRPC_ROLE)  # it means that the server is ready
    metrics = SharedMetrics(lambda: [({}, servicers.metrics())])
    metrics.keep_showing(asyncio.get_running_loop().call_later)
    await stopping.wait()
    await services.draining()
    await server.stop(draining.drain_s(settings))
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
