"""``greenroom record`` and ``replay``: what they print of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.comparing.comparing import Compare, check_compare
from greenroom.core.comparing.latencies import MIN_PAIRS, Interval, percentile
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.admin import applications
from greenroom.serve.admin.client import Client
from greenroom.serve.cli.commands import connected, differences, print_lines
from greenroom.serve.cli.starting import interrupt_on_terminate
from greenroom.serve.measuring import recording, replaying

MB = 1_000_000
NO_BASELINE = "none"


def record(
    settings: HostSettings,
    endpoint: str,
    file: Path,
    *,
    sample: float,
    max_mb: float,
    seconds: float | None,
    redact: tuple[str, ...],
) -> None:
    """Record until a limit or Ctrl-C."""
    interrupt_on_terminate()
    click.echo(f"recording {sample:g} of {endpoint!r} in {file}; Ctrl-C ends it", err=True)
    with connected(settings) as connection:
        client = Client(connection, settings)
        done = recording.record(
            client,
            applications.endpoint_named(connection, endpoint),
            file,
            sample=sample,
            max_bytes=int(max_mb * MB),
            seconds=seconds,
            redact=redact,
        )
    dropped = f", {done.dropped} dropped" if done.dropped else ""
    click.echo(
        f"{done.queries} queries, {done.size / MB:.3g} MB{dropped}; it ended because {done.reason}"
    )


def stop_recording(settings: HostSettings, endpoint: str) -> None:
    """Remove the recorder of a program that was killed."""
    with connected(settings) as connection:
        named = applications.endpoint_named(connection, endpoint)
        recording.stop(Client(connection, settings), named)
    click.echo(f"nothing of {endpoint!r} is recorded")


def replay(
    settings: HostSettings,
    file: Path,
    *,
    to: str,
    baseline: str | None,
    compare: Compare,
    speed: float,
    max_different: float,
    as_json: bool,
) -> bool:
    """Replay a recording and print what was found; return whether ``to`` may go on."""
    with connected(settings) as connection:
        client = Client(connection, settings)
        to = applications.endpoint_named(connection, to)  # and of an application, its backend
        if baseline is None:
            baseline = replaying.serving(client, recording.endpoint_of(file), to)
        elif baseline == NO_BASELINE:
            baseline = None
        else:
            baseline = applications.endpoint_named(connection, baseline)
        found = replaying.replay(
            client, connection.queries, file, to=to, baseline=baseline, how=compare, speed=speed
        )
    problem = found.problem(max_different)
    if as_json:
        click.echo(json.dumps({**found.plain(), "problem": problem}, indent=2))
    else:
        print_lines(_told(found, to, baseline))
        if problem:
            click.echo(problem)
    return not problem


def pass_gate(
    settings: HostSettings, file: Path, *, endpoint: str, to: str, compare: Compare, most: float
) -> None:
    """Replay before a rollout; raises where the new backend may not begin."""
    with connected(settings) as connection:
        client = Client(connection, settings)
        found = replaying.gate(
            client,
            connection.queries,
            file,
            endpoint=applications.endpoint_named(connection, endpoint),
            to=to,
            how=compare,
            max_different=most,
        )
    print_lines(_told(found, to, replaying.PRESENT))


def read_compare(how: str, tolerance: float, ignore: tuple[str, ...]) -> Compare:
    """Read the flags of a comparison."""
    if how not in ("json", "status"):
        raise InvalidRequestError(f"--compare {how!r}: must be json or status")
    return check_compare({"how": how, "relative_tolerance": tolerance, "ignore": ignore})


def _told(found: replaying.Replayed, to: str, baseline: str | None) -> Iterator[str]:
    late = f", {found.late} later than they should" if found.late else ""
    yield f"{found.queries} queries{late}; {found.failed} without an answer of {to!r}"
    yield from differences(to, {"by": "recorded answers", **found.found.plain()})
    low, high = found.different.low, found.different.high
    yield f"different: {found.different.value:.3%} (95 % confidence: {low:.3%} to {high:.3%})"
    if baseline is None:
        return
    for name, values in ((baseline, found.old_s), (to, found.new_s)):
        if values:
            parts = ((part, percentile(values, part / 100)) for part in (50, 95, 99))
            yield f"{name}: " + ", ".join(f"p{part} {value * 1000:.3g} ms" for part, value in parts)
    yield _compared(found.ratio)


def _compared(ratio: Interval | None) -> str:
    if ratio is None:
        return f"fewer than {MIN_PAIRS} queries that both have answered say nothing of latencies"
    verdict = "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "as fast, or too alike"
    return (
        f"takes {ratio.value:.3f} times as long (95 % confidence: {ratio.low:.3f} to "
        f"{ratio.high:.3f}): {verdict}"
    )
