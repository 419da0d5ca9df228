"""``greenroom tune``: a system of its own, the trials in it, and the files that tell of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import psutil

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.records import records_of
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.serve.admin import declarative
from greenroom.serve.admin.client import Client
from greenroom.serve.cli import config_file
from greenroom.serve.cli.commands import connected, print_lines
from greenroom.serve.cli.deploying import Source, bring_up
from greenroom.serve.cli.flags import EXIT_CHANGES, PATH, reading
from greenroom.serve.cli.starting import interrupt_on_terminate
from greenroom.serve.measuring import tuning
from greenroom.serve.measuring.tuning import Objective, Setting, Trial, read_objective

SETTLE_TIMEOUT_S = 60.0
SEARCH = 0.6  # of the time; the rest is for the finals
PROBES = 5  # requests, one of which must be answered
SHOWN_LINES = 12  # of logs
_NAME = "default"


@dataclass(frozen=True, kw_only=True)
class TuneFlags:
    """How ``greenroom tune`` goes about it."""

    target: str
    app_dir: Path
    objective: Objective
    traffic: str
    path: str
    deployment: str | None
    seconds: float
    max_minutes: float
    max_replicas: int | None
    output: Path
    picture: Path

    def check(self) -> None:
        """Raise InvalidRequestError for what cannot be."""
        for file in (self.output, self.picture):
            if file.exists():
                raise InvalidRequestError(f"{file}: it exists; remove it, or name another file")
        if not 0 < self.max_minutes <= 24 * 60 or not 1 <= self.seconds <= 600:
            raise InvalidRequestError("--max-minutes must be above 0, --seconds from 1 to 600")
        if not self.path.startswith("/") or not self.path.isascii() or " " in self.path:
            raise InvalidRequestError(f"--path {self.path!r}: must be such as /predict?x=1")
        next(self.timed())

    def timed(self) -> Iterator[tuple[float, bytes]]:
        """Return the requests at their times."""
        if Path(self.traffic).is_file():
            return tuning.recorded(Path(self.traffic))
        try:
            rate = float(self.traffic.removesuffix("/s"))
        except ValueError:
            rate = 0.0
        if not 0 < rate <= 100_000:
            raise InvalidRequestError(
                f"--traffic {self.traffic!r}: must be requests a second, such as 50, or a recording"
            )
        return tuning.steady(rate, tuning.request_bytes("GET", self.path))


@click.command()
@click.argument("target", metavar="MODULE[:ATTRIBUTE]")
@click.option("--slo", required=True, metavar="pN=TIME", help="What is to be met: p99=200ms.")
@click.option(
    "--traffic",
    required=True,
    metavar="RATE|FILE",
    help="Requests a second, or a recording of greenroom record.",
)
@click.option("--path", default="/", help="What requests at a rate ask for [/].")
@click.option("--deployment", metavar="NAME", help="The one to be tuned [the ingress].")
@click.option("--seconds", default=5.0, help="How long a trial is measured [5].")
@click.option("--max-minutes", default=5.0, help="After which no trial begins [5].")
@click.option("--max-replicas", type=click.IntRange(1), help="Of a trial [twice the CPUs].")
@click.option("--app-dir", type=PATH, default=".", metavar="DIR", help="Where to import from [.].")
@click.option(
    "--output", "-o", type=PATH, default="tuned.yaml", metavar="FILE", help="[tuned.yaml]."
)
@click.option("--picture", type=PATH, default="tuned.svg", metavar="FILE", help="[tuned.svg].")
def tune(slo: str, **given: Any) -> None:
    """Find settings that meet an objective with the least CPU, by measuring on this host.

    Exit code 3 when no setting has met it; the best found is written all the same.
    """
    with reading():
        flags = TuneFlags(objective=read_objective(slo), **given)
        flags.check()
    interrupt_on_terminate()
    source = Source(
        flags.target,
        arguments=(),
        app_dir=str(flags.app_dir),
        working_dir=None,
        name=_NAME,
        route_prefix="/",
    )
    built = source.build()
    deployment = flags.deployment or built.applications[0].ingress
    specs = {spec.name: spec for spec in built.applications[0].deployments}
    if deployment not in specs:
        raise InvalidRequestError(
            f"--deployment {deployment!r}: the application has {', '.join(specs)}"
        )
    config = specs[deployment].config
    user_config = config.user_config if isinstance(config.user_config, dict) else {}
    begin = Setting(
        replicas=1,
        max_ongoing=config.max_ongoing_requests,
        batch_size=user_config.get(tuning.SIZE_KEY),
        batch_wait_s=user_config.get(tuning.WAIT_KEY),
    )
    with _own_system() as settings, connected(settings) as connection:
        bring_up(connection, built)
        client = Client(connection, settings)
        _probe(settings, flags)

        def change(setting: Setting) -> None:
            options = setting.options(user_config)
            goal = client.update_backend_config(f"{_NAME}#{deployment}", options)
            client.wait_for_goal(goal, SETTLE_TIMEOUT_S)

        measure = partial(_measured, settings, change, flags)
        began_at, seconds = time.monotonic(), 60 * flags.max_minutes
        found = tuning.search(
            measure,
            begin,
            most_replicas=flags.max_replicas or 2 * (os.cpu_count() or 1),
            ends_at=began_at + SEARCH * seconds,
        )
        click.echo("again, in turns:", err=True)
        trials = tuning.finals(measure, found, flags.objective, ends_at=began_at + seconds)
    print_lines(_told(trials, flags.objective))
    flags.picture.write_text(tuning.drawn(trials, flags.objective), encoding="utf-8")
    options = trials[0].setting.options(user_config)
    flags.output.write_text(_document(flags, deployment, options), encoding="utf-8")
    click.echo(f"wrote {flags.output} and {flags.picture}")
    if not trials[0].is_met:
        sys.exit(EXIT_CHANGES)


@contextlib.contextmanager
def _own_system() -> Iterator[HostSettings]:
    """Start a system of its own on free ports, and end it with all that it has left."""
    with tempfile.TemporaryDirectory(prefix="greenroom-tune-") as folder:
        with contextlib.ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(2)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            http_port, admin_port = (probe.getsockname()[1] for probe in probes)
        settings = read_settings({}, state_dir=folder, http_port=http_port, admin_port=admin_port)
        try:
            system.start(settings)
            yield settings
        finally:
            system.stop(settings, forget=True)


def _probe(settings: HostSettings, flags: TuneFlags) -> None:
    """Raise GreenroomError where the first requests all fail: there is nothing to tune then."""
    requests = (request for _, request in islice(flags.timed(), PROBES))
    found = asyncio.run(tuning.statuses(settings.http.port, requests))
    if found and (found[-1] == 0 or found[-1] >= 500):
        logs = sorted(settings.logs_dir.glob("replica-*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        raise GreenroomError(
            f"nothing was measured: the first {len(found)} requests failed, the last one with "
            f"{found[-1] or 'no answer'}; the replicas' logs end with:\n"
            + "\n".join(f"  {line}" for line in lines[-SHOWN_LINES:])
        )


def _measured(
    settings: HostSettings, change: Callable[[Setting], None], flags: TuneFlags, setting: Setting
) -> Trial:
    change(setting)
    before, began_at = _cpu_s(settings), time.monotonic()
    latencies, failed = asyncio.run(tuning.load(settings.http.port, flags.timed(), flags.seconds))
    cpu_s = sum(seconds - before.get(pid, 0.0) for pid, seconds in _cpu_s(settings).items())
    cpus = cpu_s / (time.monotonic() - began_at)
    trial = tuning.judged(setting, tuning.Load(latencies, failed, cpus), flags.objective)
    click.echo(_row(trial), err=True)
    return trial


def _cpu_s(settings: HostSettings) -> dict[int, float]:
    """Return by pid the seconds of CPU that the processes of a system have taken so far."""
    seconds = {}
    for process in records_of(settings).alive():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(process.pid).cpu_times()
            seconds[process.pid] = times.user + times.system
    return seconds


def _row(trial: Trial) -> str:
    errors = f", {trial.errors:.1%} without an answer" if trial.errors else ""
    mark = "meets" if trial.is_met else "fails"
    shown = f"{trial.latency_s * 1000:9.1f} ms  {trial.cpus:6.2f} CPUs"
    row = f"  {mark}  {shown}  {trial.setting}{errors}"
    if not trial.runs:
        return row
    low_s, high_s = tuning.span(run.latency_s for run in trial.runs)
    low, high = tuning.span(run.cpus for run in trial.runs)
    return (
        f"{row}; median of {len(trial.runs)}: {low_s * 1000:.1f} to {high_s * 1000:.1f} ms, "
        f"{low:.2f} to {high:.2f} CPUs"
    )


def _told(trials: list[Trial], objective: Objective) -> Iterator[str]:
    best, *others = trials
    yield f"p{objective.percent:g} and CPUs in use, the best first:"
    yield from map(_row, trials)
    if best.is_met:
        yield f"{objective} is met by: {best.setting}"
    else:
        yield f"{objective} was not met; the best found: {best.setting}"
    for trial in others:
        if trial.runs and trial.is_met == best.is_met and not best.clearly_beats(trial):
            yield f"perhaps as good: {trial.setting}"


def _document(flags: TuneFlags, deployment: str, options: dict[str, Any]) -> str:
    document = declarative.described(declarative.read_targets([flags.target]), flags.app_dir)
    for each in document["applications"][0]["deployments"]:
        if each["name"] == deployment:
            each.pop("autoscaling_config", None)
            each.update(options)
    return config_file.written(document)
