"""The command ``greenroom``: its commands and flags.

Only click is imported here, and everything else when a command runs, so that ``--help`` and shell
completion answer at once.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from greenroom.core.errors import GreenroomError

if TYPE_CHECKING:
    from greenroom.actors.runtime.settings import HostSettings

F = TypeVar("F", bound=Callable[..., Any])


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


def _settings(flags: dict[str, Any]) -> HostSettings:
    from greenroom.serve.cli.starting import settings_from

    return settings_from(flags)


def _where(function: F) -> F:
    """Add the flags that say which system is meant."""
    for flag in (
        click.option("--admin-port", type=int, help="Port of the actor system [1900]."),
        click.option("--state-dir", metavar="DIR", help="Where state and logs are."),
    ):
        function = flag(function)
    return function


def _address(function: F) -> F:
    """Add the flags that name a system on another host."""
    for flag in (
        click.option("--key-file", metavar="PATH", help="The cluster's key, for another host's."),
        click.option(
            "--address", metavar="HOST:PORT,...", help="Hosts of the system to talk to [this one]."
        ),
    ):
        function = flag(function)
    return function


def _http(function: F) -> F:
    """Add the flags of a system that may have to be started."""
    for flag in (
        click.option(
            "--http-cors", metavar="ORIGINS", help="Whose pages may call: a,b, * or JSON."
        ),
        click.option(
            "--http-middlewares", metavar="PATHS", help="ASGI middlewares: module:Name, or JSON."
        ),
        click.option("--http-workers", type=int, help="Processes that take requests [1]."),
        click.option("--http-port", type=int, help="Port for HTTP [8000]."),
        click.option("--http-host", help="Address for HTTP [127.0.0.1]."),
    ):
        function = flag(function)
    return function


def _http_more(function: F) -> F:
    """Add the flags for the rest of the HTTP options, which are seldom needed."""
    for name, kind, metavar, text in (
        ("ssl-certfile", str, "PATH", "PEM: a certificate, for HTTPS."),
        ("ssl-keyfile", str, "PATH", "PEM: its private key."),
        ("middlewares-dir", str, "DIR", "Where middlewares that are not installed are [.]."),
        ("max-websocket-message-bytes", int, "BYTES", "Larger messages are refused [16 MiB]."),
        ("max-waiting-body-bytes", int, "BYTES", "Bodies that wait in a worker [256 MiB]."),
        ("send-timeout-s", float, "S", "How long a client may take nothing [30]."),
        ("body-timeout-s", float, "S", "How long a body may keep us waiting [30]."),
        ("max-body-bytes", str, "BYTES", "Larger bodies are refused; or 'none' [100 MiB]."),
        ("header-timeout-s", float, "S", "How long a request's headers may take [30]."),
        ("keep-alive-timeout-s", float, "S", "How long idle connections are kept [90]."),
        ("request-timeout-s", float, "S", "How long an answer may take [no limit]."),
        ("pages-port", int, "PORT", "Port for the pages under /-/ alone [with the rest]."),
        ("pages-host", str, "HOST", "Address for them, if given one [127.0.0.1]."),
        ("root-path", str, "PATH", "The prefix that a proxy shows this server under [none]."),
    ):
        function = click.option(f"--http-{name}", type=kind, metavar=metavar, help=text)(function)
    return function


def _capacity(function: F) -> F:
    """Add the flags that say what replicas may take of the host."""
    for flag in (
        click.option(
            "--resources", metavar="NAME=VALUE,...", help="Your own, and labels: disk=2,zone=a."
        ),
        click.option("--memory", type=float, metavar="BYTES", help="Memory [what there is]."),
        click.option(
            "--num-gpus", type=float, help="GPUs, which are only counted [what there is]."
        ),
        click.option("--num-cpus", type=float, help="CPUs that replicas may take [what there is]."),
    ):
        function = flag(function)
    return function


def _cluster(function: F) -> F:
    """Add the flags of a host that others reach."""
    for flag in (
        click.option("--tls-ca", metavar="PATH", help="PEM: whose certificates to believe."),
        click.option("--tls-key", metavar="PATH", help="PEM: its private key."),
        click.option("--tls-cert", metavar="PATH", help="PEM: a certificate, for TLS with hosts."),
        click.option(
            "--key-file", metavar="PATH", help="The cluster's key, from a host that runs."
        ),
        click.option("--host-name", help="This host's name in the cluster [its own]."),
        click.option(
            "--join",
            metavar="HOST:PORT,...",
            help="The leaders of a cluster to join; needs --bind.",
        ),
        click.option(
            "--leaders",
            metavar="IP:PORT,...",
            help="All hosts that may lead, in order; they share --state-dir.",
        ),
        click.option(
            "--bind", metavar="A.B.C.D", help="This host's address for other hosts [none]."
        ),
    ):
        function = flag(function)
    return function


_NAMING = ("target", "arguments", "app_dir", "working_dir", "name", "route_prefix")


def _application(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that name an application; the command gets them as ``named``."""

    @functools.wraps(function)
    def gathered(**given: Any) -> None:
        function(named={name: given.pop(name) for name in _NAMING}, **given)

    command = gathered
    for parameter in (
        click.argument("arguments", metavar="[KEY=VALUE]...", nargs=-1),
        click.argument("target", metavar="MODULE[:ATTRIBUTE]"),
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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="greenroom")
def main() -> None:
    """Serve Python functions and classes over HTTP."""


@main.command()
@_where
@_http
@_http_more
@_cluster
@_capacity
@click.option(
    "--silence-timeout-s",
    type=float,
    metavar="S",
    help="How long a process may stand still before it is replaced; 0 for ever [5].",
)
@click.option("--block", is_flag=True, help="Stay until Ctrl-C, and print what happens.")
@click.option("--log-format", metavar="text|json", help="How --block prints that [text].")
def start(block: bool, **flags: Any) -> None:
    """Start this host's system, unless it runs."""
    from greenroom.actors.runtime.forking import uncollected

    with uncollected():
        from greenroom.actors.runtime.settings import given_fields
        from greenroom.serve.cli import starting

    starting.start(_settings(flags), block=block, given=given_fields(**flags))


@main.command()
@_where
@_address
@_http
@_capacity
@_application
@click.option("--reload", is_flag=True, help="Deploy again when a .py file under DIR changes.")
@click.option("--non-blocking", is_flag=True, help="Deploy and leave it running.")
def run(
    named: dict[str, Any],
    reload: bool,
    non_blocking: bool,
    **flags: Any,
) -> None:
    """Run an application: start what is missing, deploy, follow the logs.

    MODULE:ATTRIBUTE names what Deployment.bind() returned, or a function that returns it and gets
    the KEY=VALUE arguments; ATTRIBUTE is "app" if not given. Ctrl-C undoes what this has started.
    """
    from greenroom.actors.runtime.settings import given_fields
    from greenroom.serve.cli import commands, running

    if reload and non_blocking:
        raise click.UsageError("--reload watches until Ctrl-C, so it excludes --non-blocking")
    settings = _settings(flags)
    source = commands.Source(**named)
    given = given_fields(**flags)
    running.run(settings, source, reload=reload, non_blocking=non_blocking, given=given)


@main.command()
@_where
@_address
@_application
@click.option("--plan", is_flag=True, help="Show what would change, and change nothing.")
def deploy(
    named: dict[str, Any],
    plan: bool,
    **flags: Any,
) -> None:
    """Deploy an application on a system that runs."""
    from greenroom.serve.cli import commands

    settings = _settings(flags)
    source = commands.Source(**named)
    commands.deploy(settings, source, plan=plan)


@main.command()
@_where
@_address
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with every field.")
@click.option("-n", "most", type=click.IntRange(1), default=20, help="How many changes [20].")
def history(as_json: bool, most: int, **flags: Any) -> None:
    """Show the last changes: when, by whom, and what they changed."""
    from greenroom.serve.cli import commands

    commands.history(_settings(flags), as_json=as_json, most=most)


@main.command()
@_where
@_address
@click.argument("change_id", metavar="[ID]", type=int, required=False)
def undo(change_id: int | None, **flags: Any) -> None:
    """Restore what was before a change, by default the last one.

    This is a change of its own, which can be undone too. ID is what history shows.
    """
    from greenroom.serve.cli import commands

    commands.undo(_settings(flags), change_id)


@main.command()
@_where
@_address
@click.argument("name")
def delete(name: str, **flags: Any) -> None:
    """Delete an application."""
    from greenroom.serve.cli import commands

    commands.delete(_settings(flags), name)


@main.command()
@_where
@_address
@click.argument("endpoint")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff(endpoint: str, as_json: bool, **flags: Any) -> None:
    """Show how the answers of ENDPOINT's shadows differ from those that clients get."""
    from greenroom.serve.cli import commands

    commands.diff(_settings(flags), endpoint, as_json=as_json)


@main.command()
@_where
@_address
@click.argument("endpoint")
@click.option("--to", metavar="BACKEND", help="The backend that is to get the traffic.")
@click.option("--steps", default="0.01,0.1,0.5,1", help="Its shares [0.01,0.1,0.5,1].")
@click.option("--hold-s", default=300.0, help="Seconds that a step stands at least [300].")
@click.option(
    "--abort-if",
    multiple=True,
    metavar="RULE=NUMBER",
    help="error_rate, error_rate_increase, p95_latency_s or p95_latency_ratio; more than once "
    "for several [error_rate_increase=0.005 p95_latency_ratio=1.5].",
)
@click.option("--alpha", default=0.01, help="Chance of going back without cause [0.01].")
@click.option("--min-samples", default=100, help="Queries that a step needs [100].")
@click.option("--ready-timeout-s", default=60.0, help="Seconds without a replica [60].")
@click.option("--wait", is_flag=True, help="Wait for its end; exit code 1 if it goes back.")
@click.option("--abort", is_flag=True, help="Go back now.")
@click.option("--promote", is_flag=True, help="Give the new backend all traffic now.")
def rollout(
    endpoint: str,
    to: str | None,
    steps: str,
    abort_if: tuple[str, ...],
    hold_s: float,
    alpha: float,
    min_samples: int,
    ready_timeout_s: float,
    wait: bool,
    abort: bool,
    promote: bool,
    **flags: Any,
) -> None:
    """Move ENDPOINT's traffic to a backend step by step, and back if that does worse."""
    from greenroom.serve.cli import commands
    from greenroom.serve.cli import display as rollouts
    from greenroom.serve.cli.starting import usage

    if sum((to is not None, abort, promote)) != 1:
        raise click.UsageError("give one of --to BACKEND, --abort, --promote")
    settings = _settings(flags)
    if to is None:
        commands.end_rollout(settings, endpoint, promote=promote)
        return
    with usage():
        asked = rollouts.settings_from(
            to,
            steps,
            abort_if,
            hold_s=hold_s,
            alpha=alpha,
            min_samples=min_samples,
            ready_timeout_s=ready_timeout_s,
        )
    commands.start_rollout(settings, endpoint, asked, wait=wait)


@main.command()
@_where
@_address
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--autoscaling", is_flag=True, help="Show what autoscaling decided, and why.")
def status(as_json: bool, autoscaling: bool, **flags: Any) -> None:
    """Show hosts, applications, deployments and replicas.

    The exit code is 0 only when all of them are healthy; always, with --autoscaling.
    """
    from greenroom.serve.cli import commands

    if autoscaling:
        commands.autoscaling(_settings(flags), as_json=as_json)
        return
    if not commands.status(_settings(flags), as_json=as_json):
        sys.exit(1)


@main.command()
@_where
@_address
@click.argument("host")
def evict(host: str, **flags: Any) -> None:
    """Forget HOST, which is lost and does not come back."""
    from greenroom.serve.cli import commands

    commands.evict(_settings(flags), host)


@main.command(name="rotate-key")
@_where
@_address
def rotate_key(**flags: Any) -> None:
    """Replace the key that makes hosts one cluster, on all hosts, while they serve.

    A host that is away needs the new one by hand; one that was evicted cannot come back.
    """
    from greenroom.serve.cli import commands

    commands.rotate_key(_settings(flags))


@main.command()
@_where
@_address
def rebalance(**flags: Any) -> None:
    """Move replicas from hosts that have more of a deployment to those that have fewer.

    Each goes when another runs in its place.
    """
    from greenroom.serve.cli import commands

    commands.rebalance(_settings(flags))


@main.command()
@_where
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=100,
    help="Lines of each log to begin with [100].",
)
def logs(name: str | None, follow: bool, lines: int, **flags: Any) -> None:
    """Show logs: those whose name contains NAME, or all.

    NAME can be an application, a deployment, a replica, or "controller".
    """
    from greenroom.serve.cli import commands

    commands.logs(_settings(flags), name, follow=follow, lines=lines)


@main.command()
@_where
def stop(**flags: Any) -> None:
    """Drain and stop this host's system; "start" resumes it."""
    from greenroom.serve.cli import starting

    starting.stop(_settings(flags))


@main.command()
@_where
def shutdown(**flags: Any) -> None:
    """Stop the whole cluster, every host of it, and delete its state."""
    from greenroom.serve.cli import commands

    commands.shutdown(_settings(flags))


if __name__ == "__main__":
    main()
