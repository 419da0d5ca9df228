"""Tuning: the settings that meet an objective with the least CPU, found by measuring.

Theory of operation. Each trial gives the application some settings in place, lets it settle, and
measures under the same traffic, in an open loop: requests leave at their times, whether or not
earlier ones are answered, and a latency counts from the time at which the request was due. So a
trial that cannot keep up shows it, instead of slowing its own load down.

The search goes along one setting after the other, from what it has found so far: replicas doubled
until the objective is met, then each other setting's values, then fewer replicas again, as better
batches may need fewer. Each step is kept if it is better: by the objective first, then by CPU. That
finds a good neighbour of the start and not always the best of all, in some twenty trials instead of
thousands.

One trial proves little, and the best of many is the best by luck, too. So the finals measure the
best and those next to it anew, in turns, since a host's other work comes and goes. Medians count,
and one setting is clearly better where each of its trials beats each of the other's: with three of
each, chance alone does that once in 20 times (the rank sum test of Mann and Whitney, "On a test of
whether one of two random variables is stochastically larger than the other", 1947).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from greenroom.core.comparing.latencies import percentile
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.measuring.recording import REDACTED, read

MAX_ONGOING = (1, 4, 16, 64, 256)
BATCH_SIZES = (1, 4, 8, 16, 32, 64)
BATCH_WAITS_S = (0.0, 0.002, 0.005, 0.01, 0.02)
SIZE_KEY, WAIT_KEY = "max_batch_size", "batch_wait_timeout_s"  # of a user_config
LESS_CPU = 0.97  # of the CPU: what is nearer is noise
MAX_ERRORS = 0.001
AT_ONCE = 1_000
REQUEST_TIMEOUT_S = 10.0
WARM_UP = 0.25  # of a trial's time, before it counts
FINALISTS = 3
LEAST_ROUNDS, MOST_ROUNDS = 3, 7
NEARLY = 1.25  # of the limit: what is below it may have had bad luck


class Objective(NamedTuple):
    """What a latency percentile may be at most."""

    percent: float
    limit_s: float

    def __str__(self) -> str:
        return f"p{self.percent:g}={self.limit_s * 1000:g}ms"


def read_objective(text: str) -> Objective:
    """Read ``p99=200ms``; InvalidRequestError for what is none."""
    found = re.fullmatch(r"p(\d+(?:\.\d+)?)=(\d+(?:\.\d+)?)(ms|s)", text.strip())
    percent, number = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    if not found or not 0 < percent < 100 or not number:
        raise InvalidRequestError(
            f"slo={text!r}: must be a percentile and a time, such as p99=200ms or p95=1s"
        )
    return Objective(percent, number / (1000 if found[3] == "ms" else 1))


@dataclass(frozen=True, slots=True)
class Setting:
    """What one trial sets; None for a batch whose deployment has no such setting."""

    replicas: int
    max_ongoing: int
    batch_size: int | None = None
    batch_wait_s: float | None = None

    def __str__(self) -> str:
        text = f"replicas {self.replicas}, max_ongoing_requests {self.max_ongoing}"
        if self.batch_size is not None:
            text += f", batch {self.batch_size}"
        return (
            text if self.batch_wait_s is None else f"{text}, wait {self.batch_wait_s * 1000:g} ms"
        )

    def options(self, user_config: Any) -> dict[str, Any]:
        """Return the options of a deployment with these settings."""
        options = {"num_replicas": self.replicas, "max_ongoing_requests": self.max_ongoing}
        batch = {SIZE_KEY: self.batch_size, WAIT_KEY: self.batch_wait_s}
        given = {name: value for name, value in batch.items() if value is not None}
        return {**options, "user_config": {**user_config, **given}} if given else options


class Load(NamedTuple):
    """What clients saw in a trial, and what CPU the system took for it."""

    latencies_s: list[float]
    failed: int
    cpus: float  # in use on average


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting, measured; the medians where it was measured several times."""

    setting: Setting
    latency_s: float
    errors: float  # share
    cpus: float
    is_met: bool
    runs: tuple[Trial, ...] = ()  # those whose medians these are

    def beats(self, other: Trial) -> bool:
        """Return whether this one is to be preferred."""
        if self.is_met != other.is_met:
            return self.is_met
        if self.is_met:
            return self.cpus < other.cpus * LESS_CPU
        return (self.errors, self.latency_s) < (other.errors, other.latency_s)

    def clearly_beats(self, other: Trial) -> bool:
        """Return whether each of its trials beats each of the other's, and they are enough."""
        fewest = min(len(self.runs), len(other.runs))
        return fewest >= LEAST_ROUNDS and all(
            one.beats(another) for one in self.runs for another in other.runs
        )


def judged(setting: Setting, load: Load, objective: Objective) -> Trial:
    """Return what a trial comes to; a request without an answer is beyond any limit."""
    sent = len(load.latencies_s) + load.failed
    errors = load.failed / sent if sent else 1.0
    seconds = [*load.latencies_s, *[math.inf] * load.failed]
    latency_s = percentile(seconds, objective.percent / 100) if seconds else math.inf
    is_met = errors <= MAX_ERRORS and latency_s <= objective.limit_s
    return Trial(setting, latency_s, errors, load.cpus, is_met)


def search(
    measure: Callable[[Setting], Trial], begin: Setting, *, most_replicas: int, ends_at: float
) -> list[Trial]:
    """Return the trials, the best one first and the others as they were made.

    None begins after ``ends_at``, in time.monotonic() seconds, but for the first.
    """
    trials: dict[Setting, Trial] = {}

    def better(best: Trial, settings: Iterator[Setting], *, until_met: bool = False) -> Trial:
        for setting in settings:
            if (until_met and best.is_met) or time.monotonic() >= ends_at:
                break
            trial = trials[setting] = trials.get(setting) or measure(setting)
            best = trial if trial.beats(best) else best
        return best

    ladder = [2**n for n in range(most_replicas.bit_length()) if 2**n <= most_replicas]
    best = trials[begin] = measure(begin)
    best = better(best, (replace(begin, replicas=n) for n in ladder), until_met=True)
    at = best.setting
    best = better(best, (replace(at, max_ongoing=n) for n in MAX_ONGOING))
    at = best.setting
    if begin.batch_size is not None:
        best = better(best, (replace(at, batch_size=n) for n in BATCH_SIZES))
    at = best.setting
    if begin.batch_wait_s is not None:
        best = better(best, (replace(at, batch_wait_s=s) for s in BATCH_WAITS_S))
    at = best.setting
    best = better(best, (replace(at, replicas=n) for n in ladder if n < at.replicas))
    return [best, *(each for each in trials.values() if each is not best)]


def finals(
    measure: Callable[[Setting], Trial],
    trials: Sequence[Trial],
    objective: Objective,
    *,
    ends_at: float,
) -> list[Trial]:
    """Measure the best of a search again until the choice is clear; return all, these first.

    Where those fail the objective now, the next ones follow. No trial begins after ``ends_at``.
    """
    within_s = objective.limit_s * NEARLY

    def promise(trial: Trial) -> tuple[float, ...]:
        if trial.errors <= MAX_ERRORS and trial.latency_s <= within_s:
            return (0, trial.cpus)
        return (1, trial.errors, trial.latency_s)

    best, waiting = trials[0], [trials[0], *sorted(trials[1:], key=promise)]
    results = {trial.setting: trial for trial in trials}
    while waiting and time.monotonic() < ends_at:
        left, waiting = waiting[:FINALISTS], waiting[FINALISTS:]
        for number in range(1, MOST_ROUNDS + 1):
            for setting in [trial.setting for trial in left]:
                if time.monotonic() < ends_at:
                    runs = (*results[setting].runs, measure(setting))
                    results[setting] = _medians(runs)
            left = [results[trial.setting] for trial in left]
            best = _best(left)
            left = [trial for trial in left if not best.clearly_beats(trial)]
            if number >= LEAST_ROUNDS and len(left) == 1:
                break
        if best.is_met:
            break
    again = [trial for trial in results.values() if trial.runs]
    best = _best(again or [best])
    rest = [trial for trial in results.values() if trial is not best]
    return [best, *sorted(rest, key=lambda trial: not trial.runs)]


def _medians(runs: tuple[Trial, ...]) -> Trial:
    return Trial(
        setting=runs[0].setting,
        latency_s=median(run.latency_s for run in runs),
        errors=median(run.errors for run in runs),
        cpus=median(run.cpus for run in runs),
        is_met=2 * sum(run.is_met for run in runs) > len(runs),
        runs=runs,
    )


def _best(trials: Sequence[Trial]) -> Trial:
    best = trials[0]
    for trial in trials[1:]:
        best = trial if trial.beats(best) else best
    return best


# --- Traffic --------------------------------------------------------------------------------------


def steady(rate: float, request: bytes) -> Iterator[tuple[float, bytes]]:
    """Yield the same request at even times, so many a second, without end."""
    number = 0
    while True:
        yield number / rate, request
        number += 1


def recorded(file: Path) -> Iterator[tuple[float, bytes]]:
    """Yield a recording's requests at their times, again and again; InvalidRequestError for none.

    Their paths are those below the recorded endpoint's route.
    """
    begin = 0.0
    while True:
        first_at, last, count = None, 0.0, 0
        for row in read(file):
            if row["method"] == "HEAD":
                continue  # whose answer says a length that does not come
            first_at = row["at"] if first_at is None else first_at
            last, count = max(row["at"] - first_at, 0.0), count + 1
            prefix = row["root_path"].encode().decode("latin-1")
            target = row["raw_path"].removeprefix(prefix) or "/"
            target += f"?{row['query']}" if row["query"] else ""
            headers = [(name, value) for name, value in row["headers"] if value != REDACTED]
            body = base64.b64decode(row["body"])
            yield begin + last, request_bytes(row["method"], target, headers, body)
        if not count:
            raise InvalidRequestError(f"{file} has no queries")
        begin += last + max(last / count, 0.001)


def request_bytes(
    method: str, target: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b""
) -> bytes:
    """Return an HTTP request as it travels."""
    own = {"host", "content-length", "connection", "transfer-encoding"}
    lines = [f"{method} {target} HTTP/1.1", "host: tuning", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers if name not in own]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def statuses(port: int, requests: Iterable[bytes]) -> list[int]:
    """Send requests one by one until one is answered well; return all statuses, 0 for none."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    found: list[int] = []
    for request in requests:
        found.append(await _status(port, idle, request))
        if _is_well(found[-1]):
            break
    for _, writer in idle:
        await _closed(writer)
    return found


def _is_well(status: int) -> bool:
    return 200 <= status < 500


async def _status(
    port: int, idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]], request: bytes
) -> int:
    try:
        return await asyncio.wait_for(_ask(port, idle, request), REQUEST_TIMEOUT_S)
    except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError):
        return 0


async def load(
    port: int, timed: Iterator[tuple[float, bytes]], seconds: float
) -> tuple[list[float], int]:
    """Send requests at their times; return the latencies after the warm-up, and how many failed."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    latencies: list[float] = []
    failed = 0
    began_at = asyncio.get_running_loop().time()

    async def ask(request: bytes, at: float) -> None:
        nonlocal failed
        status = await _status(port, idle, request)
        if at < seconds * WARM_UP:
            return
        if _is_well(status):
            latencies.append(asyncio.get_running_loop().time() - began_at - at)
        else:
            failed += 1

    under_way: set[asyncio.Task[None]] = set()
    for at, request in timed:
        if at >= seconds:
            break
        await asyncio.sleep(max(began_at + at - asyncio.get_running_loop().time(), 0))
        if len(under_way) >= AT_ONCE:
            failed += 1
            continue
        task = asyncio.create_task(ask(request, at))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)
    for _, writer in idle:
        await _closed(writer)
    return latencies, failed


async def _ask(
    port: int, idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]], request: bytes
) -> int:
    reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        if length:
            await reader.readexactly(int(length[1]))
        elif b"\r\ntransfer-encoding: chunked" in head:
            while size := int((await reader.readline()).split(b";")[0], 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        is_kept = b"\r\nconnection: close" not in head
    except BaseException:
        await _closed(writer)
        raise
    if is_kept:
        idle.append((reader, writer))
    else:
        await _closed(writer)
    return int(head[9:12])


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def span(values: Iterator[float]) -> tuple[float, float]:
    """Return the least and the most."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]


# --- The curve ------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 900, 420, 70, 30, 50, 30


def drawn(trials: Sequence[Trial], objective: Objective) -> str:
    """Return a drawing of latency by CPU, the best trial first and marked, the limit as a line.

    Settings of the finals are crosses from the least to the most of what was measured.
    """
    shown = [trial for trial in trials if trial.latency_s < math.inf]
    most_cpus = max((trial.cpus for trial in shown), default=1.0) * 1.05 or 1.0
    values = [objective.limit_s, *(max(trial.latency_s, 1e-4) for trial in shown)]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def across(cpus: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * cpus / most_cpus

    def up(seconds: float) -> float:
        part = (high - math.log10(min(max(seconds, 1e-4), 10**high))) / (high - low)
        return TOP + (HEIGHT - TOP - BOTTOM) * part

    limit = up(objective.limit_s)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{LEFT} {limit:.1f}H{WIDTH - RIGHT}" stroke="#d55e00" stroke-dasharray="4"/>',
        f'<text x="{LEFT + 4}" y="{limit - 5:.1f}" fill="#d55e00">{objective}</text>',
        f'<text x="{LEFT}" y="18">p{objective.percent:g}, ms (logarithmic)</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">CPUs in use</text>',
    ]
    for number in range(6):
        cpus = most_cpus * number / 5
        text = f'<text x="{across(cpus):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{cpus:.2f}'
        parts.append(f"{text}</text>")
    for milliseconds in (n * 10**power for power in range(-1, 5) for n in (1, 2, 5)):
        if low < math.log10(milliseconds / 1000) < high:
            place = f'x="{LEFT - 8}" y="{up(milliseconds / 1000) + 4:.1f}" text-anchor="end"'
            parts.append(f"<text {place}>{milliseconds:g}</text>")
    for trial in reversed(shown):
        colour = "#009e73" if trial.is_met else "#999999"
        radius = 7 if trial is trials[0] else 4
        x, y = across(trial.cpus), up(trial.latency_s)
        if trial.runs:
            left, right = (across(cpus) for cpus in span(run.cpus for run in trial.runs))
            bottom, top = (up(seconds) for seconds in span(run.latency_s for run in trial.runs))
            parts.append(
                f'<path d="M{left:.1f} {y:.1f}H{right:.1f}M{x:.1f} {bottom:.1f}V{top:.1f}" '
                f'stroke="{colour}"/>'
            )
        told = f"{trial.setting}: {trial.latency_s * 1000:.1f} ms, {trial.cpus:.2f} CPUs"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{told}</title>'
            "</circle>"
        )
        if trial is trials[0]:
            anchor = "start" if x < WIDTH / 2 else "end"
            place = f'x="{x:.1f}" y="{y - 10:.1f}" text-anchor="{anchor}"'
            parts.append(f"<text {place}>{trial.setting}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"
