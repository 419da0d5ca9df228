"""The commands on traffic: rollouts, differences of shadows, recordings."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core import operations as ops
from greenroom.core.comparing.comparing import check_compare
from greenroom.core.comparing.latencies import MIN_PAIRS, Interval, percentile
from greenroom.core.validation import validated
from greenroom.serve.admin import reports
from greenroom.serve.admin.client import Client
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.cli.commands import connected, going_on, print_json, print_lines
from greenroom.serve.cli.display import Progress
from greenroom.serve.cli.flags import (
    ABOVE_0,
    ANYWHERE,
    EXISTING,
    NEW,
    Number,
    as_json,
    command,
    fields_of,
    reading,
)
from greenroom.serve.cli.starting import interrupt_on_terminate
from greenroom.serve.measuring import recording, replaying

MB = 1_000_000
NO_BASELINE = "none"
MIN_MB = 0.001
_max_different = click.option(
    "--max-different",
    type=Number(0, 1, max_open=True),
    default=0.0,
    help="Share of its answers that may differ [0].",
)
_SHOWN_EXAMPLES = 3  # of each cause of a difference


@command(*ANYWHERE)
@click.argument("endpoint")
@fields_of(ops.StartRollout, "endpoint")
@click.option("--replay", type=EXISTING, metavar="FILE", help="First replay a recording.")
@_max_different
@click.option("--wait", is_flag=True, help="Wait for its end; exit code 1 if it goes back.")
@click.option("--abort", is_flag=True, help="Go back now.")
@click.option("--promote", is_flag=True, help="Give the new backend all traffic now.")
def rollout(
    *,
    endpoint: str,
    fields: dict[str, Any],
    replay: Path | None,
    max_different: float,
    wait: bool,
    abort: bool,
    promote: bool,
    settings: HostSettings,
) -> None:
    """Move ENDPOINT's traffic to a backend step by step, and back if that does worse.

    ENDPOINT can be an application. With --replay it does not begin where the backend answers
    recorded queries otherwise.
    """
    if sum(("to" in fields, abort, promote)) != 1:
        raise click.UsageError("give one of --to BACKEND, --abort, --promote")
    with reading():
        begin = ops.StartRollout.of(endpoint=endpoint, **fields) if "to" in fields else None
    with connected(settings) as connection:
        named = reports.endpoint_named(connection, endpoint)
        if begin is None:
            kind = ops.PromoteRollout if promote else ops.AbortRollout
            connection.request(kind(endpoint=named))
            click.echo(f"{'promoted' if promote else 'went back'} at {endpoint!r}")
            return
        if replay is not None:
            found = replaying.gate(
                Client(connection, settings),
                connection.queries,
                replay,
                endpoint=named,
                to=begin.to,
                how=check_compare("json"),
                max_different=max_different,
            )
            print_lines(_described(found, begin.to, replaying.PRESENT))
        goal = connection.request(begin.model_copy(update={"endpoint": named}))
        if goal is not None and not wait:
            click.echo(f"began, with goal {goal}; see it with: greenroom status")
            return
        if goal is not None:
            what = f"rolling out {begin.to!r} at {endpoint!r}"
            with going_on(what), Progress(what):
                wait_for_goal(connection, goal)
    already = " already" if goal is None else ""
    click.echo(f"{begin.to!r} has all traffic of {endpoint!r}{already}")


@command(*ANYWHERE)
@click.argument("endpoint")
@as_json
def diff(endpoint: str, as_json: bool, settings: HostSettings) -> None:
    """Show how the answers of ENDPOINT's shadows differ from those that clients get.

    ENDPOINT can be an application.
    """
    with connected(settings) as connection:
        named = reports.endpoint_named(connection, endpoint)
        found: dict[str, Any] = connection.request(ops.GetDifferences(endpoint=named))
        report = {} if found or as_json else reports.read_report(connection)
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo(f"no shadow of {endpoint!r} is compared; see Client.shadow_traffic")
        if last := reports.canary_of(report, endpoint):
            click.echo(f"the last canary was {last['state']}: {last['why']}")
    for shadow, of_shadow in found.items():
        print_lines(_differences(shadow, of_shadow))


def _differences(shadow: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Return lines of what comparing a backend's answers has found."""
    yield (
        f"{shadow} ({found['by']}): {found['compared']} compared, {found['different']} different, "
        f"{found['not_compared']} not compared"
    )
    for cause in found["causes"]:
        mark = "" if cause["comparable"] else " (not compared)"
        yield f"{cause['count']:>8}  {cause['cause']}{mark}"
        for example in cause["examples"][-_SHOWN_EXAMPLES:]:
            yield f"          {example['request_id']}  {_example(example)}"


def _example(example: Mapping[str, Any]) -> str:
    if example["detail"]:
        return str(example["detail"])
    sides = []
    for side in ("primary", "shadow"):
        answer = example[side]
        said = "no answer" if answer is None else answer["missing"] or repr(answer["body"][:60])
        sides.append(f"{side} {said}")
    return ", ".join(sides)


# --- Recordings -----------------------------------------------------------------------------------


@command(*ANYWHERE)
@click.argument("endpoint")
@click.argument("file", required=False, type=NEW)
@click.option(
    "--sample",
    type=Number(0, 1, min_open=True),
    default=1.0,
    help="Share of the queries that is recorded [1].",
)
@click.option("--max-mb", type=Number(MIN_MB), default=200.0, help="Size at which it ends [200].")
@click.option("--seconds", type=ABOVE_0, help="Time after which it ends [none].")
@click.option(
    "--redact", multiple=True, metavar="HEADER", help="A header whose value is not recorded."
)
@click.option("--stop", is_flag=True, help="Only end a recording whose command was killed.")
def record(
    endpoint: str,
    file: Path | None,
    sample: float,
    max_mb: float,
    seconds: float | None,
    redact: tuple[str, ...],
    stop: bool,
    settings: HostSettings,
) -> None:
    """Record queries and answers of ENDPOINT in FILE, until Ctrl-C or a limit.

    ENDPOINT can be an application. Credentials in headers are not recorded. FILE is
    ENDPOINT.jsonl if not given.
    """
    if stop:
        with connected(settings) as connection:
            named = reports.endpoint_named(connection, endpoint)
            recording.stop(Client(connection, settings), named)
        click.echo(f"nothing of {endpoint!r} is recorded")
        return
    file = file or Path(endpoint.replace("/", "_") + ".jsonl")
    interrupt_on_terminate()

    def on_begin() -> None:
        part = "" if sample == 1 else f"{sample:.4g} of "
        click.echo(f"recording {part}{endpoint!r} in {file}; Ctrl-C ends it", err=True)

    with connected(settings) as connection:
        client = Client(connection, settings)
        done = recording.record(
            client,
            reports.endpoint_named(connection, endpoint),
            file,
            sample=sample,
            max_bytes=int(max_mb * MB),
            seconds=seconds,
            redact=redact,
            on_begin=on_begin,
        )
    dropped = f", {done.dropped} dropped" if done.dropped else ""
    click.echo(
        f"{done.queries} queries, {done.size / MB:.3g} MB{dropped}; it ended because {done.reason}"
    )


@command(*ANYWHERE)
@click.argument("file", type=EXISTING)
@click.option("--to", required=True, metavar="BACKEND", help="The backend that is to answer.")
@click.option(
    "--baseline",
    metavar="BACKEND",
    help="Whose latencies are compared with; none for none [the recorded endpoint's].",
)
@fields_of(ops.CompareFlags)
@click.option("--speed", type=ABOVE_0, default=1.0, help="How many times as fast as recorded [1].")
@_max_different
@as_json
def replay(
    file: Path,
    to: str,
    baseline: str | None,
    fields: dict[str, Any],
    speed: float,
    max_different: float,
    as_json: bool,
    settings: HostSettings,
) -> None:
    """Run the queries recorded in FILE at a backend, and compare answers and latencies.

    Exit code 3 when more answers differ than may, or none could be compared.
    """
    with reading():
        how = validated(ops.CompareFlags, fields).how or check_compare("json")
    with connected(settings) as connection:
        client = Client(connection, settings)
        to = reports.endpoint_named(connection, to)  # and of an application, its backend
        if baseline is None:
            baseline = replaying.serving(client, recording.endpoint_of(file), to)
        elif baseline == NO_BASELINE:
            baseline = None
        else:
            baseline = reports.endpoint_named(connection, baseline)
        found = replaying.replay(
            client, connection.queries, file, to=to, baseline=baseline, how=how, speed=speed
        )
    problem = found.problem(max_different)
    if as_json:
        print_json({**found.plain(), "problem": problem})
    else:
        print_lines(_described(found, to, baseline))
        if problem:
            click.echo(problem)
    if problem:
        sys.exit(ops.EXIT_CHANGES)


def _described(found: replaying.Replayed, to: str, baseline: str | None) -> Iterator[str]:
    late = f", {found.late} later than they should" if found.late else ""
    yield f"{found.queries} queries{late}; {found.failed} without an answer of {to!r}"
    yield from _differences(to, {"by": "recorded answers", **found.found.plain()})
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
