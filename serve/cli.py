"""The command ``understudy``: its commands and flags.

Only click is imported here, and everything else when a command runs, so that ``--help`` and shell
completion answer at once.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from understudy.core.errors import UnderstudyError

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns the errors that users can mend into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (UnderstudyError, TimeoutError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise click.ClickException(str(error) or type(error).__name__) from error


def _where(function: F) -> F:
    """Add the flags that say which system is meant."""
    for flag in (
        click.option("--admin-port", type=int, help="Port of the actor system [1900]."),
        click.option("--state-dir", metavar="DIR", help="Where state and logs are."),
    ):
        function = flag(function)
    return function


def _address(function: F) -> F:
    return click.option("--address", metavar="HOST:PORT", help="System to talk to [this host's].")(
        function
    )


def _http(function: F) -> F:
    """Add the flags of a system that may have to be started."""
    for flag in (
        click.option("--http-workers", type=int, help="Processes that take requests [1]."),
        click.option("--http-port", type=int, help="Port for HTTP [8000]."),
        click.option("--http-host", help="Address for HTTP [127.0.0.1]."),
    ):
        function = flag(function)
    return function


def _application(function: F) -> F:
    """Add the arguments that name an application."""
    for parameter in (
        click.argument("arguments", metavar="[KEY=VALUE]...", nargs=-1),
        click.argument("target", metavar="MODULE[:ATTRIBUTE]"),
        click.option("--app-dir", default=".", metavar="DIR", help="Where to import from [.]."),
        click.option("--route-prefix", default="/", help="Its URL path, or 'none' [/]."),
        click.option("--name", default="default", help="The application's name [default]."),
    ):
        function = parameter(function)
    return function


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="understudy")
def main() -> None:
    """Serve Python functions and classes over HTTP."""


@main.command()
@_where
@_http
@click.option("--block", is_flag=True, help="Stay in the foreground until Ctrl-C.")
def start(block: bool, **flags: Any) -> None:
    """Start this host's system, unless it runs."""
    from understudy.serve import commands

    commands.start(commands.settings_from(flags), block=block)


@main.command()
@_where
@_address
@_http
@_application
@click.option("--reload", is_flag=True, help="Deploy again when a .py file under DIR changes.")
@click.option("--non-blocking", is_flag=True, help="Deploy and leave it running.")
def run(
    target: str,
    arguments: tuple[str, ...],
    name: str,
    route_prefix: str,
    app_dir: str,
    reload: bool,
    non_blocking: bool,
    **flags: Any,
) -> None:
    """Run an application: start what is missing, deploy, follow the logs.

    MODULE:ATTRIBUTE names what Deployment.bind() returned, or a function that returns it and gets
    the KEY=VALUE arguments; ATTRIBUTE is "app" if not given. Ctrl-C undoes what this has started.
    """
    from understudy.serve import commands, running

    if reload and non_blocking:
        raise click.UsageError("--reload watches until Ctrl-C, so it excludes --non-blocking")
    settings = commands.settings_from(flags)
    source = commands.Source(
        target, arguments=arguments, app_dir=app_dir, name=name, route_prefix=route_prefix
    )
    running.run(settings, source, reload=reload, non_blocking=non_blocking)


@main.command()
@_where
@_address
@_application
def deploy(
    target: str,
    arguments: tuple[str, ...],
    name: str,
    route_prefix: str,
    app_dir: str,
    **flags: Any,
) -> None:
    """Deploy an application on a system that runs."""
    from understudy.serve import commands

    settings = commands.settings_from(flags)
    source = commands.Source(
        target, arguments=arguments, app_dir=app_dir, name=name, route_prefix=route_prefix
    )
    commands.deploy(settings, source)


@main.command()
@_where
@_address
@click.argument("name")
def delete(name: str, **flags: Any) -> None:
    """Delete an application."""
    from understudy.serve import commands

    commands.delete(commands.settings_from(flags), name)


@main.command()
@_where
@_address
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool, **flags: Any) -> None:
    """Show hosts, applications, deployments and replicas.

    The exit code is 0 only when all of them are healthy.
    """
    from understudy.serve import commands

    if not commands.status(commands.settings_from(flags), as_json=as_json):
        sys.exit(1)


@main.command()
@_where
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@click.option("-n", "--lines", default=100, help="Lines of each log to begin with [100].")
def logs(name: str | None, follow: bool, lines: int, **flags: Any) -> None:
    """Show logs: those whose name contains NAME, or all.

    NAME can be an application, a deployment, a replica, or "controller".
    """
    from understudy.serve import commands

    commands.logs(commands.settings_from(flags), name, follow=follow, lines=lines)


@main.command()
@_where
def stop(**flags: Any) -> None:
    """Drain and stop this host's system; "start" resumes it."""
    from understudy.serve import commands

    commands.stop(commands.settings_from(flags), forget=False)


@main.command()
@_where
def shutdown(**flags: Any) -> None:
    """Stop the system and delete its state."""
    from understudy.serve import commands

    commands.stop(commands.settings_from(flags), forget=True)


if __name__ == "__main__":
    main()
