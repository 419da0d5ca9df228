"""What a host says of itself: the message of its host process, as the core knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Process = Any  # of actors, which are not known here


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What a host is, and what runs there.

    ``process`` is its host process. ``replicas`` are (tag, address of the actor) of those that have
    a process there.
    """

    host: str
    process: Process
    id: str  # of its state dir
    address: str  # HOST:PORT of its actor system
    capacity: dict[str, float]
    labels: dict[str, str]
    replicas: tuple[tuple[str, str], ...]
    report: dict[str, Any]  # for status
    keys: tuple[str, str, str] = ("", "", "")  # core.cluster.key_rotation.KeyIds of what it holds
    may_lead: bool = False
