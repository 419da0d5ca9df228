"""The command ``greenroom``: its commands and flags.

Only click is imported here, and everything else when a command runs, so that ``--help`` and shell
completion answer at once. ``cli.commands`` and the like are imported when they are first used.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.core.errors import GreenroomError
from greenroom.serve import cli

if TYPE_CHECKING:
    from greenroom.actors.runtime.settings import HostSettings


EXIT_CHANGES = 3  # of a plan or a replay with differences, and of tuning that reached no goal


class _Group(click.Group):
    """Turns the errors that users can mend into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (GreenroomError, TimeoutError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            text = str(error) or type(error).__name__
            if isinstance(error, PermissionError):
                text += f"; user {os.geteuid()} may not do that: run this as the system's user"
            raise click.ClickException(text) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="greenroom")
def main() -> None:
    """Serve Python functions and classes over HTTP."""


_HERE = ("state_dir", "admin_port")
_ANYWHERE = (*_HERE, "address", "key_file")


class _Command(click.Command):
    """A command with settings among its flags; its function gets them as ``settings``.

    Of all settings it takes those in ``takes``, or all but ``leaves_out``. The flags are made when
    click asks for them: to import the model takes longer than all that ``greenroom --help`` does.
    """

    def __init__(
        self,
        *args: Any,
        takes: Collection[str] = (),
        leaves_out: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._takes = takes
        self._leaves_out = leaves_out

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, then the settings."""
        return [*super().get_params(ctx), *map(_flag, self._names())]

    def invoke(self, ctx: click.Context) -> Any:
        """Read the settings; in ``ctx.obj`` are the names of those that are given."""
        from greenroom.actors.runtime.settings import given_fields

        flags = {name: ctx.params.pop(name) for name in self._names()}
        ctx.params["settings"] = cli.starting.settings_from(flags)
        ctx.obj = given_fields(**flags)
        return super().invoke(ctx)

    def _names(self) -> list[str]:
        from greenroom.actors.runtime.forking import uncollected

        with uncollected():
            from greenroom.actors.runtime.settings import FIELDS

        return [name for name in self._takes or FIELDS if name not in self._leaves_out]


def _flag(name: str) -> click.Option:
    from greenroom.actors.runtime.settings import FIELDS, described

    flag = name.replace("_", "-")
    if FIELDS[name].annotation is bool and FIELDS[name].default is False:
        return click.Option([f"--{flag}", name], flag_value="true", help=described(name))
    metavar = flag.rpartition("-")[2].upper()
    return click.Option([f"--{flag}", name], metavar=metavar, help=described(name))


def _command(
    *takes: str, leaves_out: Collection[str] = (), **kwargs: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    return main.command(cls=_Command, takes=takes, leaves_out=leaves_out, **kwargs)


def _names(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an application that runs on the system of the environment."""
    try:
        names = cli.commands.application_names(cli.starting.settings_from({}))
    except (GreenroomError, TimeoutError, OSError):
        return []  # none runs
    return [name for name in names if name.startswith(incomplete)]


_NAMING = ("target", "arguments", "app_dir", "working_dir", "name", "route_prefix")


def _application(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that name an application; the command gets them as ``named``."""

    @functools.wraps(function)
    def gathered(*args: Any, **given: Any) -> None:
        function(*args, named={name: given.pop(name) for name in _NAMING}, **given)

    command = gathered
    for parameter in (
        click.argument("arguments", metavar="[KEY=VALUE]...", nargs=-1),
        click.argument("target", metavar="MODULE[:ATTRIBUTE]|FILE"),
        click.option(
            "--working-dir", metavar="DIR", help="A folder that replicas get a copy of [none]."
        ),
        click.option(
            "--app-dir", metavar="DIR", help="Where to import from [--working-dir, else .]."
        ),
        click.option("--route-prefix", default="/", help="Its URL path, or 'none' [/]."),
        click.option("--name", default="default", help="The application's name [default]."),
    ):
        command = parameter(command)
    return command


@_command(leaves_out=("address",))
@click.option("--block", is_flag=True, help="Stay until Ctrl-C, and print what happens.")
@click.pass_obj
def start(given: Collection[str], block: bool, settings: HostSettings) -> None:
    """Start this host's system, unless it runs."""
    cli.starting.start(settings, block=block, given=given)


@_command(leaves_out=("log_format",))
@click.pass_obj
@_application
@click.option("--reload", is_flag=True, help="Deploy again when a .py file under DIR changes.")
@click.option("--non-blocking", is_flag=True, help="Deploy and leave it running.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    given: Collection[str],
    named: dict[str, Any],
    reload: bool,
    non_blocking: bool,
    settings: HostSettings,
) -> None:
    """Run an application, or all of a FILE: start what is missing, deploy, follow the logs.

    MODULE:ATTRIBUTE names what Deployment.bind() returned, or a function that returns it and gets
    the KEY=VALUE arguments; ATTRIBUTE is "app" if not given. Ctrl-C undoes what this has started.
    """
    if reload and non_blocking:
        raise click.UsageError("--reload watches until Ctrl-C, so it excludes --non-blocking")
    source: cli.deploying.Source | cli.deploying.FileSource
    if cli.deploying.is_file(named["target"]):
        _refuse_with_file(ctx)
        source = cli.deploying.FileSource(Path(named["target"]), Path(named["app_dir"] or "."))
    else:
        source = cli.deploying.Source(**named)
    cli.deploying.run(settings, source, reload=reload, non_blocking=non_blocking, given=given)


@_command(*_ANYWHERE)
@_application
@click.option("--plan", is_flag=True, help="Show what would change; exit code 3 if anything.")
@click.option("--keep-others", is_flag=True, help="Keep what earlier files have named, too.")
@click.option("--prune", is_flag=True, help="Delete what scripts and commands deployed, too.")
@click.option("--if-version", type=int, help="Fail unless the state has this version.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds to wait [none].")
@click.option(
    "--canary",
    metavar="SHARES",
    help="New versions take over step by step, from this share; or all shares: 0.05,0.5,1.",
)
@click.option("--compare", help="Also mirror queries, and compare answers: status or json.")
@click.option("--tolerance", type=float, help="Relative difference of equal numbers in JSON [0].")
@click.option("--ignore", multiple=True, metavar="POINTER", help="What of JSON is not compared.")
@click.option("--hold-s", type=float, help="Seconds that a step stands at least [300].")
@click.option(
    "--abort-if", multiple=True, metavar="RULE=NUMBER", help="When to go back, as of rollout."
)
@click.option("--min-samples", type=int, help="Queries that a step needs [100].")
@click.pass_context
def deploy(
    ctx: click.Context,
    /,
    named: dict[str, Any],
    plan: bool,
    keep_others: bool,
    prune: bool,
    if_version: int | None,
    timeout: float | None,
    canary: str | None,
    settings: HostSettings,
    **rules: Any,
) -> None:
    """Deploy an application, or all that a FILE names, on a system that runs.

    FILE is YAML or JSON with Ray Serve's schema. What earlier files have deployed and this one does
    not name is deleted; what scripts and other commands deployed stays.
    """
    if keep_others and prune:
        raise click.UsageError("--keep-others deletes nothing, so it excludes --prune")
    if canary is None and any(rules.values()):
        names = "--compare, --tolerance, --ignore, --hold-s, --abort-if, --min-samples"
        raise click.UsageError(f"{names} are for --canary")
    with cli.starting.usage():
        flags = cli.deploying.DeployFlags(
            plan=plan,
            keep_others=keep_others,
            prune=prune,
            if_version=if_version,
            timeout_s=timeout,
            canary=None if canary is None else cli.deploying.read_canary(canary, **rules),
        )
    if cli.deploying.is_file(named["target"]):
        _refuse_with_file(ctx)
        app_dir = Path(named["app_dir"] or ".")
        has_changes = cli.deploying.deploy_file(settings, Path(named["target"]), app_dir, flags)
    else:
        has_changes = cli.deploying.deploy(settings, cli.deploying.Source(**named), flags)
    if has_changes:
        sys.exit(EXIT_CHANGES)


def _refuse_with_file(ctx: click.Context) -> None:
    """Refuse flags that say what a configuration file says itself."""
    for name in ("name", "route_prefix", "working_dir", "arguments"):
        source = ctx.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE and ctx.params[name]:
            what = "KEY=VALUE" if name == "arguments" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{what}: a configuration file says that itself")


@main.command()
@click.argument("words", metavar="MODULE[:ATTRIBUTE] [KEY=VALUE]...", nargs=-1, required=True)
@click.option("--output", "-o", metavar="FILE", help="Where to write it [standard output].")
@click.option("--app-dir", default=".", metavar="DIR", help="Where to import from [.].")
def build(words: tuple[str, ...], output: str | None, app_dir: str) -> None:
    """Write a configuration file of applications, for greenroom deploy FILE."""
    cli.deploying.build(words, Path(app_dir), None if output is None else Path(output))


@main.command()
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
@click.option("--app-dir", default=".", metavar="DIR", help="Where to import from [.].")
@click.option("--output", "-o", default="tuned.yaml", metavar="FILE", help="[tuned.yaml].")
@click.option("--picture", default="tuned.svg", metavar="FILE", help="[tuned.svg].")
def tune(*, slo: str, app_dir: str, output: str, picture: str, **flags: Any) -> None:
    """Find settings that meet an objective with the least CPU, by measuring on this host.

    Exit code 3 when no setting has met it; the best found is written all the same.
    """
    with cli.starting.usage():
        asked = cli.tuning.TuneFlags(
            objective=cli.tuning.read_objective(slo),
            app_dir=Path(app_dir),
            output=Path(output),
            picture=Path(picture),
            **flags,
        )
    if not cli.tuning.tune(asked):
        sys.exit(EXIT_CHANGES)


@main.command()
def schema() -> None:
    """Print the JSON schema of configuration files, for editors."""
    cli.deploying.schema()


@_command(*_ANYWHERE)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with every field.")
@click.option("-n", "most", type=click.IntRange(1), default=20, help="How many changes [20].")
def history(as_json: bool, most: int, settings: HostSettings) -> None:
    """Show the last changes: when, which user, and what they changed."""
    cli.commands.history(settings, as_json=as_json, most=most)


@_command(*_ANYWHERE)
@click.argument("change_id", metavar="[ID]", type=int, required=False)
def undo(change_id: int | None, settings: HostSettings) -> None:
    """Restore what was before a change, by default the last one.

    This is a change of its own, which can be undone too. ID is what history shows.
    """
    cli.commands.undo(settings, change_id)


@_command(*_ANYWHERE)
@click.argument("name", shell_complete=_names)
def delete(name: str, settings: HostSettings) -> None:
    """Delete an application."""
    cli.commands.delete(settings, name)


@_command(*_ANYWHERE)
@click.argument("endpoint")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff(endpoint: str, as_json: bool, settings: HostSettings) -> None:
    """Show how the answers of ENDPOINT's shadows differ from those that clients get."""
    cli.commands.diff(settings, endpoint, as_json=as_json)


@_command(*_ANYWHERE)
@click.argument("endpoint")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--sample", default=1.0, help="Share of the queries that is recorded [1].")
@click.option("--max-mb", default=200.0, help="Size at which it ends [200].")
@click.option("--seconds", type=float, help="Time after which it ends [none].")
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

    Credentials in headers are not recorded. FILE is ENDPOINT.jsonl if not given.
    """
    if stop:
        cli.measuring.stop_recording(settings, endpoint)
        return
    file = file or Path(endpoint.replace("/", "_") + ".jsonl")
    cli.measuring.record(
        settings, endpoint, file, sample=sample, max_mb=max_mb, seconds=seconds, redact=redact
    )


_RECORDING = click.Path(path_type=Path, dir_okay=False, exists=True)


@_command(*_ANYWHERE)
@click.argument("file", type=_RECORDING)
@click.option("--to", required=True, metavar="BACKEND", help="The backend that is to answer.")
@click.option(
    "--baseline",
    metavar="BACKEND",
    help="Whose latencies are compared with; none for none [the recorded endpoint's].",
)
@click.option("--compare", default="json", help="How answers are compared: json or status [json].")
@click.option("--tolerance", default=0.0, help="Relative difference of equal numbers [0].")
@click.option("--ignore", multiple=True, metavar="POINTER", help="What is not compared.")
@click.option("--speed", default=1.0, help="How many times as fast as recorded [1].")
@click.option("--max-different", default=0.0, help="Share of answers that may differ [0].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    file: Path,
    to: str,
    baseline: str | None,
    compare: str,
    tolerance: float,
    ignore: tuple[str, ...],
    speed: float,
    max_different: float,
    as_json: bool,
    settings: HostSettings,
) -> None:
    """Run the queries recorded in FILE at a backend, and compare answers and latencies.

    Exit code 3 when more answers differ than may, or none could be compared.
    """
    with cli.starting.usage():
        how = cli.measuring.read_compare(compare, tolerance, ignore)
    if not cli.measuring.replay(
        settings,
        file,
        to=to,
        baseline=baseline,
        compare=how,
        speed=speed,
        max_different=max_different,
        as_json=as_json,
    ):
        sys.exit(EXIT_CHANGES)


@_command(*_ANYWHERE)
@click.argument("endpoint")
@click.option("--to", metavar="BACKEND", help="The backend that is to get the traffic.")
@click.option("--steps", default="0.01,0.1,0.5,1", help="Its shares [0.01,0.1,0.5,1].")
@click.option("--hold-s", default=300.0, help="Seconds that a step stands at least [300].")
@click.option(
    "--abort-if",
    multiple=True,
    metavar="RULE=NUMBER",
    help="error_rate, error_rate_increase, p95_latency_s, p95_latency_ratio or difference_rate; "
    "more than once for several [error_rate_increase=0.005 p95_latency_ratio=1.5].",
)
@click.option("--alpha", default=0.01, help="Chance of going back without cause [0.01].")
@click.option("--min-samples", default=100, help="Queries that a step needs [100].")
@click.option("--ready-timeout-s", default=60.0, help="Seconds without a replica [60].")
@click.option("--replay", type=_RECORDING, metavar="FILE", help="First replay a recording.")
@click.option("--max-different", default=0.0, help="Share of its answers that may differ [0].")
@click.option("--wait", is_flag=True, help="Wait for its end; exit code 1 if it goes back.")
@click.option("--abort", is_flag=True, help="Go back now.")
@click.option("--promote", is_flag=True, help="Give the new backend all traffic now.")
def rollout(
    *,
    endpoint: str,
    to: str | None,
    steps: str,
    abort_if: tuple[str, ...],
    hold_s: float,
    alpha: float,
    min_samples: int,
    ready_timeout_s: float,
    replay: Path | None,
    max_different: float,
    wait: bool,
    abort: bool,
    promote: bool,
    settings: HostSettings,
) -> None:
    """Move ENDPOINT's traffic to a backend step by step, and back if that does worse.

    With --replay it does not begin where the backend answers recorded queries otherwise.
    """
    if sum((to is not None, abort, promote)) != 1:
        raise click.UsageError("give one of --to BACKEND, --abort, --promote")
    if to is None:
        cli.commands.end_rollout(settings, endpoint, promote=promote)
        return
    with cli.starting.usage():
        asked = cli.commands.rollout_from(
            endpoint,
            to,
            steps,
            abort_if,
            hold_s=hold_s,
            alpha=alpha,
            min_samples=min_samples,
            ready_timeout_s=ready_timeout_s,
        )
    if replay is not None:
        how = cli.measuring.read_compare("json", 0.0, ())
        cli.measuring.pass_gate(
            settings, replay, endpoint=endpoint, to=to, compare=how, most=max_different
        )
    cli.commands.start_rollout(settings, asked, wait=wait)


@_command(*_ANYWHERE)
@click.argument("name", required=False, shell_complete=_names)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--autoscaling", is_flag=True, help="Show what autoscaling decided, and why.")
@click.option("-w", "--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
def status(
    name: str | None, as_json: bool, autoscaling: bool, watch: bool, settings: HostSettings
) -> None:
    """Show hosts, applications, deployments and replicas; or the application NAME alone.

    The exit code is 0 only when all that is shown is healthy; always, with --autoscaling.
    """
    if autoscaling:
        if name or watch:
            raise click.UsageError("--autoscaling shows all backends, once")
        cli.commands.autoscaling(settings, as_json=as_json)
        return
    if watch:
        cli.commands.watch_status(settings, name, as_json=as_json)
    elif not cli.commands.status(settings, name, as_json=as_json):
        sys.exit(1)


@_command(*_ANYWHERE)
@click.argument("host")
@click.option("--force", is_flag=True, help="Do so to the last host that takes replicas, too.")
def drain(host: str, force: bool, settings: HostSettings) -> None:
    """Move the replicas on HOST to others, and place none there until it is undrained.

    Each goes when another runs in its place.
    """
    cli.commands.drain(settings, host, force=force)


@_command(*_ANYWHERE)
@click.argument("host")
def undrain(host: str, settings: HostSettings) -> None:
    """Let HOST take replicas again, which was drained."""
    cli.commands.undrain(settings, host)


@_command(*_ANYWHERE)
@click.argument("host")
def evict(host: str, settings: HostSettings) -> None:
    """Forget HOST, which is lost and does not come back."""
    cli.commands.evict(settings, host)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def keygen(file: Path) -> None:
    """Make FILE, the cluster file that all hosts of a cluster need: see --key-file."""
    cli.commands.keygen(file)


@_command(*_ANYWHERE, name="rotate-key")
def rotate_key(settings: HostSettings) -> None:
    """Replace the cluster file on all hosts, while they serve.

    A host that is away needs the new one by hand; one that was evicted cannot come back.
    """
    cli.commands.rotate_key(settings)


@main.group()
def token() -> None:
    """Make, list and revoke tokens for the admin API over HTTP and the dashboard."""


_token_command = functools.partial(token.command, cls=_Command, takes=_ANYWHERE, leaves_out=())


@_token_command(name="create")
@click.argument("name", required=False)
@click.option(
    "--role",
    type=click.Choice(["viewer", "deployer", "admin"]),
    required=True,
    help="What it allows: to look; to deploy as well; or all, hosts included.",
)
@click.option(
    "--expires",
    metavar="TIME",
    default="30d",
    help="When it ends: 12h, 30d, 8w, or never [30d].",
)
def create_token(name: str | None, role: Any, expires: str, settings: HostSettings) -> None:
    """Make a token and print it, once. NAME is what the history shows [one by its role].

    Only its hash is kept. A deployer's runs code as the system's user.
    """
    cli.commands.create_token(settings, name, role, expires)


@_token_command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_tokens(as_json: bool, settings: HostSettings) -> None:
    """Show the tokens: names, roles and when they end."""
    cli.commands.list_tokens(settings, as_json=as_json)


@_token_command(name="revoke")
@click.argument("name")
def revoke_token(name: str, settings: HostSettings) -> None:
    """Forget the token NAME: requests with it are refused from now on."""
    cli.commands.revoke_token(settings, name)


@_command(*_ANYWHERE)
def rebalance(settings: HostSettings) -> None:
    """Move replicas from hosts that have more of a deployment to those that have fewer.

    Each goes when another runs in its place.
    """
    cli.commands.rebalance(settings)


@_command(*_HERE)
@click.argument("name", required=False, shell_complete=_names)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=100,
    help="Lines of each log to begin with [100].",
)
def logs(name: str | None, follow: bool, lines: int, settings: HostSettings) -> None:
    """Show logs: those whose name contains NAME, or all.

    NAME can be an application, a deployment, a replica, or "controller".
    """
    cli.commands.logs(settings, name, follow=follow, lines=lines)


@_command(*_HERE, "store")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(file: Path, settings: HostSettings) -> None:
    """Write the cluster's state to a new FILE, also while it runs."""
    cli.stores.backup(settings, file)


@_command(*_HERE, "store")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def restore(file: Path, settings: HostSettings) -> None:
    """Put the state of FILE into an empty store; then start the hosts."""
    cli.stores.restore(settings, file)


@main.group()
def store() -> None:
    """Move a cluster's state between stores."""


@store.command("copy")
@click.argument("source")
@click.argument("target")
def copy_store(source: str, target: str) -> None:
    """Copy a cluster's state from SOURCE to TARGET, which must be empty.

    Each is a state dir, or postgresql://USER@HOST/DATABASE. Stop all hosts first: what changes
    later is not copied.
    """
    cli.stores.copy(source, target)


@_command(*_HERE)
def stop(settings: HostSettings) -> None:
    """Drain and stop this host's system; "start" resumes it."""
    cli.starting.stop(settings)


@_command(*_HERE)
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask; needed where nobody can answer.")
def destroy(settings: HostSettings, *, is_sure: bool) -> None:
    """Stop the whole cluster, every host of it, and delete its state."""
    cli.commands.destroy(settings, is_sure=is_sure)


@_command(*_HERE, hidden=True)
@click.option("--yes", "is_sure", is_flag=True)
def shutdown(settings: HostSettings, *, is_sure: bool) -> None:
    """Do what "destroy" does, under its name of before."""
    click.echo(
        "`greenroom shutdown` is now `greenroom destroy`; `greenroom stop` keeps the state",
        err=True,
    )
    cli.commands.destroy(settings, is_sure=is_sure)


if __name__ == "__main__":
    main()
