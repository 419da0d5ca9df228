"""What the controller's core asks its shell to do, after the changes are saved."""

from __future__ import annotations

from typing import Any, NamedTuple


class Start(NamedTuple):
    """Make sure that the replica has a process, and tell it to start; repeated until it reports."""

    replica: str
    backend: str


class Reconfigure(NamedTuple):
    """Tell a running replica the backend's newest config."""

    replica: str
    backend: str


class Check(NamedTuple):
    """Ask a running replica for its health; the answer carries ``check_id``."""

    replica: str
    check_id: int


class Stop(NamedTuple):
    """Tell a replica to finish what it has within ``drain_s`` seconds and exit."""

    replica: str
    drain_s: float


class Kill(NamedTuple):
    """SIGKILL a replica's process."""

    replica: str


class AskPolicy(NamedTuple):
    """Ask a backend's own autoscaling policy; the answer carries ``ask_id``."""

    backend: str
    ask_id: int
    question: dict[str, Any]  # plain values


Effect = Start | Reconfigure | Check | Stop | Kill | AskPolicy
