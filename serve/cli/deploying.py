"""The commands that deploy, from modules and files to the controller, and that write files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from greenroom.actors.caller.connection import Connection
from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.settings import HostSettings, differences
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.operations import EXIT_CHANGES, DeployFlags
from greenroom.core.validation import problems_in, with_place
from greenroom.serve.admin import applications, declarative, reports
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.build import Built
from greenroom.serve.cli import commands
from greenroom.serve.cli.display import Progress
from greenroom.serve.cli.flags import ABOVE_0, ANYWHERE, FOLDER, NEW, command, fields_of, reading
from greenroom.serve.cli.logs import Logs
from greenroom.serve.cli.starting import Starting, interrupt_on_terminate
from greenroom.serve.code import importing
from greenroom.serve.schema import InvalidDocumentError, ServeDeploySchema, read_document

FILE_SUFFIXES = (".yaml", ".yml", ".json")


class Source:
    """What a command deploys: the applications of a configuration file, or the one it names."""

    def __init__(
        self,
        target: str,
        *,
        arguments: Sequence[str],
        app_dir: Path | None,
        working_dir: Path | None,
        name: str,
        route_prefix: str,
    ) -> None:
        self.file = Path(target) if is_file(target) else None
        self.watched = app_dir or working_dir or Path()
        self._app_dir = app_dir
        self._name = name
        if self.file is None:
            importing.check_module(target, self.watched)  # before run starts a system for it
        with reading():
            module, _, attribute = target.partition(":")
            self._named = {
                "name": name,
                "route_prefix": None if route_prefix.lower() in ("", "none") else route_prefix,
                "import_path": f"{module}:{attribute or importing.DEFAULT_ATTRIBUTE}",
                "args": importing.read_arguments(arguments),
                "runtime_env": None if working_dir is None else {"working_dir": working_dir},
            }
            self.read_again()

    def read_again(self) -> None:
        """Read the file, which may have changed; a module is imported anew each time."""
        if self.file is None:
            document, self._located = {"applications": [self._named]}, _without_places
        else:
            from greenroom.serve.config_file import ConfigFile  # noqa: PLC0415  # 25 ms for YAML

            file = ConfigFile(self.file)
            document, self._located = file.document, file.located
        with self._located():
            self.document = read_document(document)

    def build(self) -> Built:
        """Import and build it; tracebacks of the user's code are shown."""
        base = Path() if self.file is None else self.file.parent
        with _showing_tracebacks(), self._located():
            return declarative.build_document(self.document, base, self._app_dir)

    def __str__(self) -> str:
        return repr(self._name) if self.file is None else str(self.file)


def is_file(target: str) -> bool:
    """Return whether what is to be deployed is a configuration file."""
    return target.endswith(FILE_SUFFIXES)


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    """Name what is wrong with the one application that a command names, and no place of it."""
    try:
        yield
    except InvalidDocumentError as error:
        texts = (
            with_place(place[-1:], text) if text.startswith("=") else text
            for place, text in error.problems
        )
        raise InvalidRequestError("; ".join(texts)) from error.__cause__


@contextlib.contextmanager
def _showing_tracebacks() -> Iterator[None]:
    """Show the traceback of the user's code where its import has failed."""
    try:
        yield
    except GreenroomError as error:
        for failed in (error, error.__cause__):
            if isinstance(failed, importing.ImportFailedError):
                click.echo(failed.traceback, err=True)
        raise


ENGINE = "greenroom.serve.engines.engine:build"
_OF_FILES = {  # what a configuration file says itself
    "arguments": "KEY=VALUE",
    "name": "--name",
    "route_prefix": "--route-prefix",
    "working_dir": "--working-dir",
}


def application(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that name an application; the command gets its ``source``."""

    @functools.wraps(function)
    def gathered(
        *args: Any, engine: str | None, target: str | None, app_dir: Path | None, **given: Any
    ) -> None:
        named = {name: given.pop(name) for name in _OF_FILES}
        if engine is not None:
            arguments = filter(None, (target, *named["arguments"], f"command={engine}"))
            target, named["arguments"] = ENGINE, tuple(arguments)
        if target is None:
            raise click.UsageError("name a MODULE[:ATTRIBUTE] or a FILE, or give --command")
        source_of = click.get_current_context().get_parameter_source
        for name, flag in _OF_FILES.items() if is_file(target) else ():
            if named[name] and source_of(name) is click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{flag}: a configuration file says that itself")
        function(*args, source=Source(target, app_dir=app_dir, **named), **given)

    command = gathered
    for parameter in (
        click.argument("arguments", metavar="[KEY=VALUE]...", nargs=-1),
        click.argument("target", metavar="MODULE[:ATTRIBUTE]|FILE", required=False),
        click.option(
            "--command",
            "engine",
            metavar="COMMAND",
            help="Instead of a MODULE: an engine that listens at {port}, with options KEY=VALUE.",
        ),
        click.option(
            "--working-dir",
            type=FOLDER,
            metavar="DIR",
            help="A folder that replicas get a copy of [none].",
        ),
        click.option(
            "--app-dir",
            type=FOLDER,
            metavar="DIR",
            help="Where to import from [--working-dir, else .].",
        ),
        click.option("--route-prefix", default="/", help="Its URL path, or 'none' [/]."),
        click.option("--name", default="default", help="The application's name [default]."),
    ):
        command = parameter(command)
    return command


@command(*ANYWHERE)
@application
@fields_of(DeployFlags)
@click.option("--timeout", type=ABOVE_0, help="Seconds to wait [none].")
def deploy(
    source: Source,
    fields: dict[str, Any],
    timeout: float | None,
    settings: HostSettings,
) -> None:
    """Deploy an application, or all that a FILE names, on a system that runs.

    FILE is YAML or JSON with Ray Serve's schema. What earlier files have deployed and this one does
    not name is deleted; what scripts and other commands deployed stays. With --plan, the exit code
    is 3 if anything would change.
    """
    try:
        flags = DeployFlags.model_validate(fields)
    except ValidationError as error:
        raise click.UsageError("; ".join(problems_in(error))) from None
    built = source.build()
    _show_options(settings, source.document)
    began_at = time.monotonic()
    with commands.connected(settings) as connection:
        answer = applications.apply(
            connection, built, flags, from_file=source.file is not None, timeout_s=timeout
        )
        if flags.plan:
            changes, version = answer["changes"], answer["version"]
            commands.print_lines(commands.lines_of(changes))
            effect = "; nothing was changed yet" if changes else " would change nothing"
            click.echo(f"deploying {source}{effect} (version {version})")
            if changes:
                sys.exit(EXIT_CHANGES)
            return
        is_canary = flags.canary is not None
        goals = answer["goals"]
        with commands.going_on("deploying"):
            _wait_for_all(connection, built, goals, timeout, began_at, is_canary=is_canary)
    if not answer["changed"]:
        click.echo(f"no change (version {answer['version']})")


def _show_options(settings: HostSettings, document: ServeDeploySchema) -> None:
    """Say which options of a file the system that runs does not have."""
    running = None if settings.address is not None else system.running_environ(settings)
    wanted, names = settings.with_options(document.http_options, document.grpc_options)
    if running is not None and (found := differences(wanted, running, names)):
        click.echo(
            f"options of the file are not taken, for the system runs already: {'; '.join(found)}. "
            "To change them, stop it first with `greenroom stop`",
            err=True,
        )


def _wait_for_all(
    connection: Connection,
    built: Built,
    goals: Mapping[str, str | None],
    timeout_s: float | None = None,
    began_at: float | None = None,
    *,
    is_canary: bool = False,
) -> None:
    """Wait for every application; the errors of all that fail are shown."""
    began_at = time.monotonic() if began_at is None else began_at
    routes = {spec.name: spec.route_prefix for spec in built.applications}
    url = reports.front_url(reports.read_report(connection, commands.STATUS_TIMEOUT_S)) or ""
    failed: list[str] = []
    for name, goal in goals.items():
        does, did = ("deploy", "deployed") if name in routes else ("delet", "deleted")
        text, problem = f"{does}ing {name!r}", f"{name!r} could not be {did}"
        try:
            with commands.constructor_errors(problem), Progress(text) as progress:
                on_wait = _notifier(progress, text)
                wait_for_goal(connection, goal, timeout_s, on_wait, began_at)
        except (GreenroomError, TimeoutError) as error:
            failed.append(str(error))
        else:
            where = _where(url, routes[name]) if name in routes else ""
            found = _of_canary(connection, name) if is_canary else ""
            click.echo(f"{did} {name!r}{where}{found}")
    if failed:
        raise GreenroomError("\n".join(failed))


def _of_canary(connection: Connection, name: str) -> str:
    report = reports.read_report(connection, commands.STATUS_TIMEOUT_S)
    canary = reports.canary_of(report, name)
    return f"; {canary['why']}" if canary.get("why") else ""


def _notifier(progress: Progress, text: str) -> Any:
    return lambda reason: progress.say(f"{text}: {reason}" if reason else text)


def _where(url: str, route_prefix: str | None) -> str:
    return " without a route" if route_prefix is None else f" at {url.rstrip('/')}{route_prefix}"


def bring_up(connection: Connection, built: Built) -> None:
    """Deploy applications beside the others, and say where they are."""
    goals = applications.apply(connection, built)["goals"]
    all_goals = {spec.name: goals.get(spec.name) for spec in built.applications}
    _wait_for_all(connection, built, all_goals)


# --- Running: deploy, follow the logs, and undo it at the end -------------------------------------


@command(leaves_out=("log_format",))
@click.pass_obj
@application
@click.option("--reload", is_flag=True, help="Deploy again when a .py file under DIR changes.")
@click.option("--non-blocking", is_flag=True, help="Deploy and leave it running.")
def run(
    given: Collection[str],
    source: Source,
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
    interrupt_on_terminate()
    with contextlib.ExitStack() as undo:
        options = source.document.http_options, source.document.grpc_options
        starting = Starting(settings.with_options(*options)[0])
        undo.callback(starting.undo)
        if reload:
            sys.dont_write_bytecode = True  # two edits within a second would look the same to it
        built = source.build()
        starting.wait(given)
        _show_options(settings, source.document)
        connection = Connection.open(settings)
        undo.callback(connection.close)
        names = [spec.name for spec in built.applications]
        of = _file_name(names[0]) if len(names) == 1 else "*"
        logs = Logs(settings.logs_dir, f"replica-{of}#*.log")
        logs.skip()
        there = set(reports.read_report(connection).get("applications") or ())

        def deploy_it(built: Built) -> None:
            for spec in built.applications:
                if spec.name not in there:
                    there.add(spec.name)
                    undo.callback(_delete, connection, spec.name)
            bring_up(connection, built)

        deploy_it(built)
        if non_blocking:
            undo.pop_all()
            connection.close()
            return
        _follow(source, logs, deploy_it, reload=reload)


def _follow(
    source: Source, logs: Logs, deploy_it: Callable[[Built], None], *, reload: bool
) -> None:
    over = threading.Event()
    printer = threading.Thread(target=_print, args=(logs, over), name="logs", daemon=True)
    printer.start()
    click.echo("Ctrl-C ends it")
    try:
        if reload:
            for _ in Watcher(source.watched, over.wait).changes():
                redeploy(source, deploy_it)
        else:
            _wait_for_interrupt()
    except KeyboardInterrupt:
        click.echo()
    finally:
        over.set()
        printer.join()


def redeploy(source: Source, deploy_it: Callable[[Built], None]) -> None:
    """Import and deploy again; what fails is shown, and the earlier version serves on."""
    click.echo("files have changed; deploying again")
    importing.forget_modules(source.watched)
    try:
        source.read_again()
        deploy_it(source.build())
    except (GreenroomError, TimeoutError) as error:
        click.echo(f"{error}; the earlier version serves on", err=True)


def _wait_for_interrupt() -> None:
    threading.Event().wait()


def _print(logs: Logs, over: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError):  # what reads this has ended
        for line in logs.follow(over.wait):
            commands.print_line(line)


def _delete(connection: Connection, name: str) -> None:
    with contextlib.suppress(GreenroomError, TimeoutError), Progress(f"deleting {name!r}"):
        applications.delete(connection, name)


def _file_name(name: Any) -> str:
    return "".join(char if char.isalnum() else "?" for char in name)


SCAN_INTERVAL_S = 0.5
STILL_S = 0.2  # how long files must have been still
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}


class Watcher:
    """Watches the ``.py`` files under a folder, by polling: it works on every file system.

    ``wait(seconds)`` waits and says True when watching is over.
    """

    def __init__(self, folder: Path, wait: Callable[[float], bool]) -> None:
        self._folder = folder
        self._wait = wait

    def changes(self) -> Iterator[None]:
        """Return once for each change, after the files have been still for a moment."""
        seen = self._scan()
        while not self._wait(SCAN_INTERVAL_S):
            now = self._scan()
            if now == seen:
                continue
            # An editor or a checkout writes several files, or one file in several steps.
            while not self._wait(STILL_S) and (newer := self._scan()) != now:
                now = newer
            seen = now
            yield

    def _scan(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [f for f in folders if f not in _SKIPPED and not f.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)  # ten times as fast as Path
                    try:
                        stat = os.stat(path)
                    except FileNotFoundError:
                        continue  # editors replace files; the next scan sees the new one
                    found[path] = (stat.st_mtime_ns, stat.st_size)
        return found


# --- Writing configuration files ------------------------------------------------------------------


@click.command()
@click.argument("arguments", metavar="MODULE[:ATTRIBUTE] [KEY=VALUE]...", nargs=-1, required=True)
@click.option(
    "--output", "-o", type=NEW, metavar="FILE", help="Where to write it [standard output]."
)
@click.option(
    "--app-dir", type=FOLDER, default=".", metavar="DIR", help="Where to import from [.]."
)
def build(arguments: tuple[str, ...], output: Path | None, app_dir: Path) -> None:
    """Write a configuration file of applications, for greenroom deploy FILE."""
    from greenroom.serve.config_file import written  # noqa: PLC0415  # only this needs it

    with reading():
        targets = declarative.read_targets(arguments)
        if output is not None and output.exists():
            raise InvalidRequestError(f"-o {output}: it exists; remove it, or name another file")
    with _showing_tracebacks():
        text = written(declarative.described(targets, app_dir))
    if output is None:
        click.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    click.echo(f"wrote {output}; deploy it with: greenroom deploy {output}")


@click.command()
def schema() -> None:
    """Print the JSON schema of configuration files, for editors."""
    click.echo(json.dumps(ServeDeploySchema.model_json_schema(), indent=2))
