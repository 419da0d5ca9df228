"""The commands that start and stop this host's system.

Apart from the others, for they need little: what else the other commands import would be a third of
the time that a start takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

import click

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime import tracing
from greenroom.actors.runtime.liveness import SilenceWatch
from greenroom.actors.runtime.records import records_of
from greenroom.actors.runtime.settings import HostSettings, differences
from greenroom.core.errors import GreenroomError
from greenroom.core.silence import TICK_S
from greenroom.serve.cli.display import Progress
from greenroom.serve.cli.flags import HERE, command
from greenroom.serve.cli.logs import Event, event, print_event, show_events

STOP_MARGIN_S = 5.0  # for what this command does besides


def interrupt_on_terminate() -> None:
    """Make SIGTERM end the command as Ctrl-C does, so that it undoes what it did."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class Starting:
    """The start of this host's system, which goes on while this process does something else."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._progress = Progress("starting")
        self._started: Future[bool] = Future()
        if settings.address is not None:  # another host's is not ours to start
            self._started.set_result(False)
            return
        # Before there is a thread, so that it can be forked.
        wait = system.begin(settings, on_progress=self._progress.say, is_command=True)
        executor = ThreadPoolExecutor(1, "start")
        self._started = executor.submit(wait)
        executor.shutdown(wait=False)

    def wait(self, given: Collection[str]) -> None:
        """Wait until the system is ready; StartError, or GreenroomError as of check_same."""
        with self._progress:
            started = self._started.result()
        if not started and self._settings.address is None:
            check_same(self._settings, given)

    def undo(self) -> None:
        """Stop the system if this has started it."""
        with contextlib.suppress(GreenroomError):
            if self._started.result():
                with Progress("stopping"):
                    system.stop(self._settings)


@command(leaves_out=("address",))
@click.option("--block", is_flag=True, help="Stay until Ctrl-C, and print what happens.")
@click.pass_obj
def start(given: Collection[str], block: bool, settings: HostSettings) -> None:
    """Start this host's system, unless it runs.

    One that runs already with other settings than those asked for is an error.
    """
    notify = notifier()
    if not block:
        click.echo(_start(settings, given)[1])
        return
    interrupt_on_terminate()
    last: Event | None = None
    with show_events(settings) as show:
        started, text = _start(settings, given)
        show(event("host", text))
        try:
            _wait_while_running(settings, notify)
        except KeyboardInterrupt:
            if started:
                microseconds = int((system.stop_s(settings) + STOP_MARGIN_S) * 1e6)
                notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={microseconds}")
                show(event("host", "stopping"))
                last = event("host", _stop(settings))
    if last is not None:  # when all that led to it is printed
        print_event(last, settings)


def _start(settings: HostSettings, given: Collection[str]) -> tuple[bool, str]:
    """Start this host's system unless it runs; return whether that was needed, and what to say."""
    with Progress() as progress:  # no thread before the host process was forked
        started = system.start(settings, on_progress=progress.say, is_command=True)
    if not started:
        check_same(settings, given)
        return False, "already running"
    if problem := tracing.problem_with(os.environ):
        click.echo(problem, err=True)
    where = f"HTTP at {settings.http.host}:{settings.http.port}, state in {settings.state_dir}"
    return True, f"started: {where}"


def check_same(settings: HostSettings, given: Collection[str]) -> None:
    """Raise GreenroomError where this host's system runs with other settings than ``given``."""
    running = system.running_environ(settings)
    if running and (unlike := differences(settings, running, given)):
        raise GreenroomError(
            f"already running with other settings: {'; '.join(unlike)} as asked for. To change "
            "them, stop it first with `greenroom stop`"
        )


@command(*HERE)
def stop(settings: HostSettings) -> None:
    """Drain and stop this host's system; "start" resumes it."""
    with Progress("stopping"):
        outcome = _stop(settings)
    click.echo(outcome)


def _stop(settings: HostSettings) -> str:
    kept = f"its state stays in {settings.state_dir}"
    return f"stopped; {kept}" if system.stop(settings) else "nothing was running"


def notifier() -> Callable[[str], None]:
    """Return what notifies systemd of this command's state; see sd_notify(3).

    The variable is for this process alone: gunicorn's master would take it for its own.
    """
    path = os.environ.pop("NOTIFY_SOCKET", "")

    def notify(text: str) -> None:
        if not path:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        # What is not heard its watchdog is there for.
        with socket.socket(socket.AF_UNIX, kind) as sender, contextlib.suppress(OSError):
            sender.sendto(text.encode(), path.replace("@", "\0", 1))

    return notify


def _wait_while_running(settings: HostSettings, notify: Callable[[str], None]) -> None:
    """Wait for the end of the host process; one that stands still is ended here too."""
    never = threading.Event()
    limit_s = settings.silence_timeout_s
    watch = SilenceWatch(limit_s) if limit_s else None
    notify("READY=1")
    while not never.wait(TICK_S):
        hosts = records_of(settings).hosts()
        if not hosts:
            raise GreenroomError(f"the system has ended; see the logs in {settings.logs_dir}")
        if watch is not None:
            watch.check(hosts)
        notify("WATCHDOG=1")
