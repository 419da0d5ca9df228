"""What the controller's core asks its shell to do, after the changes are saved.

The orders that need nothing of the shell's but the controller's ``epoch`` are the messages to the
replica; see :mod:`greenroom.actors.messages.control`, whose names they travel under.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from greenroom.core.formats import travels

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _order(cls: type[T]) -> type[T]:
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    made.__module__ = "greenroom.actors.messages.control"
    return travels(made)


class Start(NamedTuple):
    """Make sure that the replica has a process, and tell it to start; repeated until it reports."""

    replica: str
    backend: str


@_order
class ReconfigureReplica:
    """Controller to replica: newer settings; answered by ReplicaReported with that config_id."""

    replica: str
    config: dict[str, Any]
    config_id: int
    epoch: int = 0


@_order
class CheckReplica:
    """Controller to replica: run check_health; answered by ReplicaReported with check_id.

    ``rank`` is its present one.
    """

    replica: str
    check_id: int
    rank: tuple[int, int, int, int] | None = None
    epoch: int = 0


@_order
class StopReplica:
    """Controller to replica: finish what you have within ``drain_s``, then exit; may repeat.

    ``replica`` names the receiver, which may not have been started yet.
    """

    replica: str
    drain_s: float
    epoch: int = 0


class Kill(NamedTuple):
    """SIGKILL a replica's process."""

    replica: str


class AskPolicy(NamedTuple):
    """Ask a backend's own autoscaling policy; the answer carries ``ask_id``."""

    backend: str
    ask_id: int
    question: dict[str, Any]  # plain values


Order = ReconfigureReplica | CheckReplica | StopReplica
Effect = Start | Order | Kill | AskPolicy
