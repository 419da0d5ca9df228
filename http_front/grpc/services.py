"""Services that come with every gRPC server: health, reflection, and Ray Serve's API."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from greenroom.core.errors import GreenroomError
from greenroom.http_front.grpc.calls import Applications, Servicers, metadata_of

API = "ray.serve.RayServeAPIService"  # the name that Ray Serve's clients know
_MESSAGES = {  # with their fields, all of them strings: number, name, repeated
    "ListApplicationsRequest": (),
    "ListApplicationsResponse": ((1, "application_names", True),),
    "HealthzRequest": (),
    "HealthzResponse": ((1, "message", False),),
}


def _message_classes() -> dict[str, Any]:
    """Make the messages of RayServeAPIService, and its description for reflection."""
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
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ray.serve.{name}"))
        for name in _MESSAGES
    }


class Services:
    """The services of one server."""

    def __init__(self, server: Any, servicers: Servicers, applications: Applications) -> None:
        self._applications = applications
        self._classes = _message_classes()
        self._health = health.aio.HealthServicer()
        self._names = [*servicers.names, API]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
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
