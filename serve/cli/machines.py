"""The commands that bring machines up over SSH, as a file says, and down again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from greenroom.core.operations import EXIT_CHANGES
from greenroom.serve.cli.flags import ABOVE_0, EXISTING, confirm, reading
from greenroom.serve.cli.starting import interrupt_on_terminate
from greenroom.serve.up.hosts_file import HostsFile
from greenroom.serve.up.run import HEALTHY_TIMEOUT_S, Run
from greenroom.serve.up.ssh import Ssh

_file = click.argument("file", type=EXISTING)


@click.command()
@_file
@click.option("--plan", is_flag=True, help="Only print what would be done.")
@click.option(
    "--timeout",
    type=ABOVE_0,
    default=HEALTHY_TIMEOUT_S,
    help=f"Seconds in which a host must be healthy [{HEALTHY_TIMEOUT_S:g}].",
)
def up(file: Path, plan: bool, timeout: float) -> None:
    """Make the hosts of FILE one cluster, over SSH, and deploy its applications.

    What differs is changed: releases and settings host by host under traffic, and back where a host
    does not become healthy. Hosts that left FILE are drained and removed. Where it was interrupted,
    run it again. With --plan, the exit code is 3 if anything would change.
    """
    interrupt_on_terminate()
    with reading():
        hosts = HostsFile(file)
        version = hosts.wheels.version
    with Ssh() as ssh:
        run = Run(hosts, ssh, click.echo, timeout)
        if not plan:
            is_changed = run.up()
            count = len(hosts.targets)
            state = f"{count} hosts run" if count > 1 else "1 host runs"
            state += f" greenroom {version}"
            click.echo(state if is_changed else f"nothing to change: {state}")
        elif steps := run.plan():
            for step in steps:
                click.echo(str(step))
            sys.exit(EXIT_CHANGES)
        else:
            click.echo("nothing would change")


@click.command()
@_file
@click.option("--delete", is_flag=True, help="Delete what is on them, state and logs too.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask, with --delete.")
def down(file: Path, delete: bool, is_sure: bool) -> None:
    """Stop the hosts of FILE; "up" starts them again with the state that they have."""
    interrupt_on_terminate()
    with reading():
        hosts = HostsFile(file)
    if delete:
        loss = f"all that {', '.join(hosts.targets)} have is deleted, with the applications' state"
        confirm(loss, is_sure=is_sure)
    with Ssh() as ssh:
        Run(hosts, ssh, click.echo).down(delete=delete)
