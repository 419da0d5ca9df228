"""One seed's run and what came of it, as plain values."""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter

from tests.simulation.simulation import Simulation

LIES = 0.02  # of the saves are lost where a lying disk is asked for


def outcome(
    seed: int, hosts: int = 0, lying_disk: bool = False, store: str = ""
) -> tuple[int, str, str, Counter[str]]:
    """Run a seed; return it, how it failed ("" if it did not), a digest, counts of what happened.

    The digest is that of the last steps: the same for the same code, seed and Python.
    """
    simulation = Simulation(seed, hosts, store)
    simulation.disk.lies = LIES if lying_disk else 0.0
    failure = ""
    try:
        simulation.run()
    except Exception as error:
        where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        message = f"{type(error).__name__}: {error}"
        failure = "\n".join([*simulation.world.trace(), where, message])
    counts = simulation.checks.counts
    counts["steps"] = simulation.world.steps
    counts["turn made to fail"] = simulation.world.raised
    steps = "\n".join(simulation.world.trace())
    return seed, failure, hashlib.sha256(steps.encode()).hexdigest(), counts
