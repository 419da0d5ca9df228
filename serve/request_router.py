"""Request routers of your own, under Ray Serve's names: see docs/routing.md."""

from greenroom.actors.plugins.routing import (
    FIFOMixin as FIFOMixin,
    LocalityMixin as LocalityMixin,
    MultiplexMixin as MultiplexMixin,
    PendingRequest as PendingRequest,
    RequestMetadata as RequestMetadata,
    RequestRouter as RequestRouter,
    RunningReplica as RunningReplica,
)
from greenroom.actors.replica.context import ReplicaID as ReplicaID
