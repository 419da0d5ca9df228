"""``greenroom run``: start what is missing, deploy, follow, and undo it all at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import click

from greenroom.actors.runtime.connection import Connection
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import GreenroomError
from greenroom.serve.admin import applications
from greenroom.serve.cli.commands import print_line
from greenroom.serve.cli.deploying import Source, bring_up
from greenroom.serve.cli.display import Progress
from greenroom.serve.cli.logs import Logs
from greenroom.serve.cli.starting import Starting, interrupt_on_terminate
from greenroom.serve.code.importing import forget_modules

# --- Watching source files, for ``greenroom run --reload`` ----------------------------------------

INTERVAL_S = 0.5
SETTLE_S = 0.2
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
        while not self._wait(INTERVAL_S):
            now = self._scan()
            if now == seen:
                continue
            # An editor or a checkout writes several files, or one file in several steps.
            while not self._wait(SETTLE_S) and (newer := self._scan()) != now:
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


def run(
    settings: HostSettings,
    source: Source,
    *,
    reload: bool,
    non_blocking: bool,
    given: Collection[str] = (),
) -> None:
    """Deploy an application and follow its logs until Ctrl-C; undo then what this has started.

    ``given`` are the settings of the system that were asked for.
    """
    interrupt_on_terminate()
    with contextlib.ExitStack() as undo:
        starting = Starting(settings)
        undo.callback(starting.undo)
        if reload:
            sys.dont_write_bytecode = True  # two edits within a second would look the same to it
        built = source.build()
        starting.wait(given)
        connection = Connection.open(settings)
        undo.callback(connection.close)
        logs = Logs(settings.logs_dir, f"replica-{_file_name(source.name)}#*.log")
        logs.skip()
        if not _exists(connection, source.name):
            undo.callback(_delete, connection, source.name)
        bring_up(connection, built)
        if non_blocking:
            undo.pop_all()
            connection.close()
            return
        _follow(connection, source, logs, reload=reload)


def _follow(connection: Connection, source: Source, logs: Logs, *, reload: bool) -> None:
    over = threading.Event()
    printer = threading.Thread(target=_print, args=(logs, over), name="logs", daemon=True)
    printer.start()
    click.echo("Ctrl-C ends it")
    try:
        if reload:
            for _ in Watcher(source.app_dir, over.wait).changes():
                redeploy(connection, source)
        else:
            _wait_for_interrupt()
    except KeyboardInterrupt:
        click.echo()
    finally:
        over.set()
        printer.join()


def redeploy(connection: Connection, source: Source) -> None:
    """Import and deploy again; what fails is shown, and the earlier version serves on."""
    click.echo("files have changed; deploying again")
    forget_modules(source.app_dir)
    try:
        bring_up(connection, source.build())
    except (GreenroomError, TimeoutError) as error:
        click.echo(f"{error}; the earlier version serves on", err=True)


def _wait_for_interrupt() -> None:
    threading.Event().wait()


def _print(logs: Logs, over: threading.Event) -> None:
    for line in logs.follow(over.wait):
        print_line(line)


def _exists(connection: Connection, name: str) -> bool:
    return name in (applications.read_report(connection).get("applications") or {})


def _delete(connection: Connection, name: str) -> None:
    with contextlib.suppress(GreenroomError, TimeoutError), Progress(f"deleting {name!r}"):
        applications.delete(connection, name)


def _file_name(name: Any) -> str:
    return "".join(char if char.isalnum() else "?" for char in name)
