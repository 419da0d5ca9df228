"""What slow replicas do to latencies: `python -m benchmarks.unequal_replicas`.

The router itself, in virtual time: no process is started, and it takes five minutes. Half of the
replicas take longer for every query. Beside them are replicas that are equal, with the same room in
all and the same load: 1.00 is as good as those. Each case is shown by count alone, and with
`learn_weights`. In the last cases all queries of a replica share one processor, or four.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from benchmarks.options import positive, run_main
from benchmarks.report import machine, table
from tests.core.routing.crowds import Crowd, quantile

DRAWS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda chance: chance.expovariate(1.0),
    "uniform": lambda chance: chance.uniform(0.5, 1.5),
}
# Slots, and the processors that they share.
CASES = [(1, None), (2, None), (5, None), (10, None), (30, None), (100, None), (100, 4), (100, 1)]


def p99_and_cost(
    paces: list[float],
    slots: int,
    processors: int | None,
    draw: str,
    arguments: argparse.Namespace,
    *,
    learn: bool,
) -> tuple[float, float]:
    """Return the 99th percentile of all latencies, and the CPU time of each query."""
    chance = random.Random(2)
    crowd = Crowd(
        slots * len(paces),
        lambda _: DRAWS[draw](chance),
        paces=paces,
        processors=processors,
        learn_weights=learn,
    )
    rate = arguments.load * (processors or slots) * sum(1.0 / pace for pace in paces)
    began_at = time.process_time()
    crowd.asks("e", rate)
    crowd.run(arguments.queries / rate)
    cost_s = (time.process_time() - began_at) / arguments.queries
    learned = crowd.outcomes["e"][arguments.queries // 5 :]
    return quantile(sorted(each.seconds for each in learned), 0.99), cost_s


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--queries", type=positive, default=100_000, help="of each run [100000]")
    parser.add_argument("--replicas", type=positive, default=4, help="of which half are slow [4]")
    parser.add_argument("--times", type=float, default=3.0, help="as long as the others [3]")
    parser.add_argument("--load", type=float, default=0.6, help="share of all room [0.6]")
    arguments = parser.parse_args()
    count, times = arguments.replicas, arguments.times
    mixed = [1.0, times] * (count // 2)
    even = [len(mixed) / sum(1.0 / pace for pace in mixed)] * len(mixed)
    rows = []
    for draw in DRAWS:
        for case in CASES:
            equal_s, cost_s = p99_and_cost(even, *case, draw, arguments, learn=False)
            alike_s, learned_cost_s = p99_and_cost(even, *case, draw, arguments, learn=True)
            counted_s, _ = p99_and_cost(mixed, *case, draw, arguments, learn=False)
            weighed_s, _ = p99_and_cost(mixed, *case, draw, arguments, learn=True)
            ratios = [f"{each / equal_s:.2f}" for each in (counted_s, weighed_s, alike_s)]
            cost = f"{cost_s * 1e6:.1f}, {learned_cost_s * 1e6:.1f} us"
            room = [str(each or "-") for each in case]
            rows.append([draw, *room, f"{equal_s:.2f} s", *ratios, cost])
    print(machine())
    heads = ["times", "slots", "processors", "p99 of equal ones", "half slow", "with weights"]
    print(table([*heads, "equal ones with weights", "a query without, with"], rows))


if __name__ == "__main__":
    run_main(main)
