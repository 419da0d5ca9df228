"""How long a host may take to stop: one limit, from which all others follow.

What is in flight may take as long as the longest ``graceful_shutdown_timeout_s`` of all deployments
says, and no longer. The controller sends every host that limit. The host process keeps it in a
file, because the HTTP front, the gRPC server and the command that stops the host need it when there
may be no controller any more.
"""

from __future__ import annotations

import math

from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import write_private

DEFAULT_S = 20.0  # where nothing is deployed, or no controller has sent one yet
LEAST_MOVE_S = 20.0  # for replicas to move: others start first, whatever the limit is
MARGIN_S = 5.0  # in which what has not finished is cut
END_S = 10.0  # to kill what is left, and to delete the state


def drain_s(settings: HostSettings) -> float:
    """Return how long what is in flight on this host may take to finish."""
    try:
        limit_s = float(settings.drain_file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # nothing was sent yet, or the disk fails
        return DEFAULT_S
    return limit_s if math.isfinite(limit_s) and limit_s >= 0 else DEFAULT_S


def finish_s(longest_drain_s: float) -> float:
    """Return how long the front and gRPC may take to finish, and after them replicas that stay."""
    return longest_drain_s + MARGIN_S


def move_s(longest_drain_s: float) -> float:
    """Return how long replicas may take before that to move to other hosts."""
    return max(longest_drain_s, LEAST_MOVE_S) + MARGIN_S


def stop_s(longest_drain_s: float) -> float:
    """Return how long the stop of a host may take in all."""
    return move_s(longest_drain_s) + 2 * finish_s(longest_drain_s) + END_S


def record_drain_s(settings: HostSettings, new_s: float) -> None:
    """Keep what the controller sent; OSError where the disk does not take it."""
    if new_s != drain_s(settings):
        write_private(settings.drain_file, f"{new_s:g}")
