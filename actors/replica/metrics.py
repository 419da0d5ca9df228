"""What a replica counts of itself, and the metrics of user code.

One set per process, like the process's actor. What user code makes with :mod:`greenroom.serve`'s
``metrics`` counts from any thread, so :data:`of_users` has a lock; our own count on user code's
loop alone. Without a replica, in a script or in local testing mode, all the same is counted, and
shown nowhere.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from greenroom.actors.replica.context import replica_context
from greenroom.core.metrics import Group, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_USERS_SAMPLES = 1_000  # a histogram's counts for one set of labels are one
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def warn_full(name: str) -> None:
    """Warn that there is no room for more samples of users."""
    logging.getLogger("greenroom.serve").warning(
        "metric %r has too many values of its tags: this replica keeps %d sets of them, over all "
        "metrics, and drops the others; greenroom_metrics_dropped_total counts them",
        name,
        MAX_USERS_SAMPLES,
    )


_own = Registry()
of_users = Registry(MAX_USERS_SAMPLES, warn_full)
# Of of_users and its metrics; a finalizer of user code may count while this thread has it.
lock = threading.RLock()
# Or a child that user code forks while another thread has it, such as the message loop's, which
# shows what was counted once a second, would wait for ever when it counts.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

_requests = _own.counter(
    "greenroom_replica_requests_total", "Queries that user code has ended, by HTTP status", "status"
)
_seconds = _own.histogram(
    "greenroom_replica_request_seconds", "Queries: from the replica's taking one to its answer"
)
_ongoing = _own.gauge("greenroom_replica_ongoing_requests", "Queries that user code is running")
_start = _own.gauge(
    "greenroom_replica_start_seconds", "How long it took to load the code and construct it"
)
_batch_size = _own.histogram(
    "greenroom_batch_size",
    "Items of a batch, or of a step of serve.continuous_batch",
    "function",
    bounds=_SIZES,
)
_batch_wait = _own.histogram(
    "greenroom_batch_wait_seconds", "How long an item waited for its batch to begin", "function"
)
_model_loads = _own.counter(
    "greenroom_model_loads_total", "Models that serve.multiplexed has loaded, or failed to", "ok"
)
_model_seconds = _own.histogram("greenroom_model_load_seconds", "How long it took to load a model")
_models = _own.gauge("greenroom_models", "Models that are loaded, or being loaded")
_dropped = _own.counter(
    "greenroom_metrics_dropped_total", "Observations of user code that were dropped for their tags"
)


def ended(status: int, seconds: float) -> None:
    """Count a query that has ended; status 0 is one that was cancelled."""
    _requests.add(1, str(status or 499))
    _seconds.observe(seconds)


def started(seconds: float) -> None:
    """Note how long user code took to come up."""
    _start.set(seconds)


def batch_begun(function: str, size: int, waits_s: Sequence[float]) -> None:
    """Count a batch or a step, and how long each of the items that join with it has waited."""
    _batch_size.observe(size, function)
    _batch_wait.observe_all(waits_s, function)


def model_loaded(seconds: float, *, ok: bool) -> None:
    """Count a model that was loaded, or could not be."""
    _model_loads.add(1, str(ok).lower())
    _model_seconds.observe(seconds)


def collect(ongoing: int, models: int) -> list[Group]:
    """Return all that was counted, given what is there at the moment."""
    context = replica_context()
    if context is None:
        return []
    _ongoing.set(ongoing)
    _models.set(models)
    _dropped.set(of_users.dropped)
    labels = {
        "application": context.app_name,
        "deployment": context.deployment,
        "replica": context.replica_tag,
    }
    with lock:
        users = of_users.families()
    return [(labels, _own.families()), ({}, users)]
