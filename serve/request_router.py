"""Request routers of your own, under Ray Serve's names: see docs/routing.md."""

from greenroom.actors.plugins.routing import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    RequestMetadata,
    RequestRouter,
    RunningReplica,
)
from greenroom.actors.replica.context import ReplicaID

__all__ = [
    "FIFOMixin",
    "LocalityMixin",
    "MultiplexMixin",
    "PendingRequest",
    "ReplicaID",
    "RequestMetadata",
    "RequestRouter",
    "RunningReplica",
]
