"""How long a host may take to stop: one limit, from which all others follow.

What is in flight may take as long as the longest ``graceful_shutdown_timeout_s`` of all deployments
says. The controller tells every host that limit. The host process keeps it in a file, because the
HTTP front, the gRPC server and the command that stops the host need it when there may be no
controller any more.
"""

from __future__ import annotations

import math

from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import write_private

LEAST_S = 20.0  # also where nothing is deployed, or no controller has told yet
MARGIN_S = 5.0  # in which what has not finished is cut
STAGES = 3  # replicas move to other hosts; the front and gRPC finish; the replicas that stay finish
END_S = 10.0  # to kill what is left, and to delete the state


def drain_s(settings: HostSettings) -> float:
    """Return how long what is in flight on this host may take to finish."""
    try:
        told = float(settings.drain_file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # nothing was told yet, or the disk fails
        return LEAST_S
    return max(told, LEAST_S) if math.isfinite(told) else LEAST_S


def stage_s(settings: HostSettings) -> float:
    """Return how long one stage of this host's stop may take."""
    return drain_s(settings) + MARGIN_S


def stop_s(longest_drain_s: float) -> float:
    """Return how long the stop of a host may take in all."""
    return STAGES * (max(longest_drain_s, LEAST_S) + MARGIN_S) + END_S


def note_drain_s(settings: HostSettings, told_s: float) -> None:
    """Keep what the controller told; OSError where the disk does not take it."""
    if max(told_s, LEAST_S) != drain_s(settings):
        write_private(settings.drain_file, f"{told_s:g}")
