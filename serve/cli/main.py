"""The command ``greenroom``: the table of its commands.

Only click is imported here, so that ``--help`` and shell completion answer at once. A command is
one function, with its flags before it, in the module that the table names; that is imported when
the command is used.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from greenroom.core.errors import GreenroomError

_NAMED = {"help_option_names": ["-h", "--help"]}


class _Place(NamedTuple):
    module: str  # of greenroom.serve.cli
    does: str  # in the list of commands


def _in(module: str, **commands: str) -> dict[str, _Place]:
    return {name.replace("_", "-"): _Place(module, does) for name, does in commands.items()}


SECTIONS: dict[str, dict[str, _Place]] = {
    "This host": {
        **_in("starting", start="start its system", stop="drain and stop it; the state stays"),
        **_in("commands", status="hosts, applications and replicas", logs="what they have logged"),
    },
    "Applications": {
        **_in(
            "deploying",
            run="start what is missing, deploy, follow the logs",
            deploy="deploy an application, or all of a file",
            build="write a configuration file of applications",
            schema="the JSON schema of such files",
        ),
        **_in(
            "commands",
            delete="delete an application",
            history="the last changes",
            undo="restore what was before a change",
            ask="ask for any operation of the admin API",
        ),
    },
    "Traffic": _in(
        "traffic",
        rollout="move traffic to a backend step by step",
        diff="how answers of shadows differ",
        record="record queries and answers",
        replay="run recorded queries at a backend",
    ),
    "Machines": _in(
        "machines",
        up="make the machines of a file one cluster, over SSH",
        down="stop them",
    ),
    "Hosts": _in(
        "hosts",
        drain="move a host's replicas to others",
        undrain="let it take replicas again",
        rebalance="move replicas to hosts with fewer",
        evict="forget a host that is lost",
        keygen="make the file that all hosts need",
        rotate_key="replace it on all hosts",
    ),
    "State": {
        **_in(
            "state",
            token="tokens of the admin API: create, list, revoke",
            backup="write the state to a file",
            restore="put it into an empty store",
            store="copy it between stores",
        ),
        **_in("hosts", destroy="stop the whole cluster and delete its state"),
    },
}
COMMANDS = {name: place for section in SECTIONS.values() for name, place in section.items()}
_HIDDEN = _in("hosts", shutdown="destroy, under its name of before")


class Commands(click.Group):
    """Imports a command when it is used, and turns errors that users can mend into exit code 1."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names of all commands that are shown."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; UsageError with the one that may be meant."""
        place = COMMANDS.get(cmd_name) or _HIDDEN.get(cmd_name)
        if place is None:
            if ctx.resilient_parsing:  # a shell asks how the line may go on
                return None
            from greenroom.core.validation import suggestion  # noqa: PLC0415  # see below

            ctx.fail(f"no such command: {cmd_name!r}{suggestion(cmd_name, COMMANDS)}")
        # Here, as it imports more than all that is needed for the list.
        from greenroom.actors.runtime.forking import uncollected  # noqa: PLC0415

        with uncollected():
            module = importlib.import_module(f"greenroom.serve.cli.{place.module}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a name from the table: click's own way would import every command for it."""
        found = [
            CompletionItem(name, help=COMMANDS[name].does)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, by what they are about."""
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, place.does) for name, place in section.items()], 12)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (GreenroomError, TimeoutError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            text = str(error) or type(error).__name__
            if isinstance(error, PermissionError):
                text += f"; user {os.geteuid()} may not do that: run this as the system's user"
            raise click.ClickException(text) from error


@click.group(cls=Commands, context_settings=_NAMED)
@click.version_option(package_name="greenroom")
def main() -> None:
    """Serve Python functions and classes over HTTP."""


if __name__ == "__main__":
    main()
