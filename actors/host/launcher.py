"""Start and stop this host's system from outside, and see whether it runs.

The host process (:mod:`greenroom.actors.host.process`) has a session of its own and shares nothing
with its starter, so that none of the starter's descriptors or threads reach the actors. A command
has imported little more than the host process needs, so it forks it. Any other caller starts a
program.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from io import RawIOBase

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime import draining, forking
from greenroom.actors.runtime.liveness import silent_among
from greenroom.actors.runtime.logs import open_log
from greenroom.actors.runtime.processes import is_alive, kill_all, send_signal, wait_gone
from greenroom.actors.runtime.records import (
    HOST_ROLE,
    MARK,
    can_mark,
    forget_state,
    is_ready,
    mark_of,
    records_of,
)
from greenroom.actors.runtime.settings import DEFAULT_SILENCE_TIMEOUT_S, HostSettings
from greenroom.actors.runtime.state_dir import check_state_dir, make_private
from greenroom.core.errors import GreenroomError, StartError

START_TIMEOUT_S = 30.0  # without progress
LONGEST_START_S = 150.0  # with it
READY_FD = "GREENROOM_READY_FD"  # where the host process says how its start goes
WAITING = "waiting for "  # begins each of its lines but the last
CHECK_EVERY_S = 1.0
HOST_PROCESS = "greenroom.actors.host.process:main"


def start(
    settings: HostSettings,
    *,
    on_progress: Callable[[str], None] = lambda _text: None,
    is_command: bool = False,
) -> bool:
    """Start this host's system and wait until it answers HTTP; False when it was running.

    ``is_command`` where this process is one of ours alone, and starts quicker for that.
    ``on_progress`` is called when there is something to wait for. Raises StartError with the
    reason. The system goes on when the caller ends.
    """
    return begin(settings, on_progress=on_progress, is_command=is_command)()


def begin(
    settings: HostSettings,
    *,
    on_progress: Callable[[str], None] = lambda _text: None,
    is_command: bool = False,
) -> Callable[[], bool]:
    """Begin to start as :func:`start` does; return what waits for it, on any thread, once."""
    check_state_dir(settings.state_dir)
    if settings.shared_dir is not None:
        if not settings.shared_dir.is_dir():  # perhaps not mounted, so it is not made here
            raise StartError(
                f"store={settings.store}: there is no such folder; make it, or mount it, where all "
                "hosts that may lead share it"
            )
        check_state_dir(settings.shared_dir)
    ready_fd = _attempt(settings, on_progress, is_command=is_command)

    def wait() -> bool:
        nonlocal ready_fd
        while ready_fd is not None:
            line = _read_outcome(ready_fd, on_progress)
            if line == "ready":
                return True
            if line != "running":
                raise StartError(line)
            ready_fd = _attempt(settings, on_progress)
        return False

    return wait


def _attempt(
    settings: HostSettings, on_progress: Callable[[str], None], *, is_command: bool = False
) -> int | None:
    """Start a host process; return the descriptor of its line, None where another one runs.

    See _read_outcome.
    """
    if _wait_for_another_start(settings, on_progress):
        return None
    _prepare_folders(settings)
    read_fd, write_fd = os.pipe()
    output = open_log(settings, "host")
    try:
        environ = {**settings.to_environ(), READY_FD: str(write_fd)}
        environ[MARK] = mark_of(settings.state_dir)  # last, where no long title reaches
        forking.launch(
            HOST_PROCESS,
            output=output,
            keep=[write_fd],
            environ=environ,
            by_fork=is_command and forking.can_fork() and can_mark(settings.state_dir),
            detached=True,
        )
    finally:
        os.close(output)
        os.close(write_fd)
    on_progress("starting the actor system and the HTTP front")
    return read_fd


def running_environ(settings: HostSettings) -> dict[str, str] | None:
    """Return the settings that this host's system was started with, as variables.

    None when none runs.
    """
    found = records_of(settings).details(HOST_ROLE)
    return found[0] if found else None


def _wait_for_another_start(settings: HostSettings, on_progress: Callable[[str], None]) -> bool:
    """Wait while a host process starts or stops; return whether one runs then, and answers."""
    records = records_of(settings)
    deadline = time.monotonic() + max(LONGEST_START_S, stop_s(settings))
    while hosts := records.find(HOST_ROLE):
        is_silent = _end_silent(hosts, settings)
        # It may have been ended as silent while that was checked.
        if not is_silent and any(is_ready(host) and is_alive(host) for host in hosts):
            return True
        does = "stands still" if is_silent else "starts or stops"
        on_progress(f"waiting for host process {hosts[0].pid}, which {does}")
        if time.monotonic() > deadline:
            raise StartError(
                f"host process {hosts[0].pid} neither answers nor ends; see logs/host.log in "
                f"{settings.state_dir}, or end it with `greenroom stop`"
            )
        time.sleep(0.02)
    return False


def _end_silent(hosts: list[Process], settings: HostSettings) -> bool:
    """Kill host processes that stand still; return whether any do."""
    limit_s = settings.silence_timeout_s or DEFAULT_SILENCE_TIMEOUT_S
    silent = silent_among(dict.fromkeys(hosts, HOST_ROLE))
    hung = {each["pid"] for each in silent if each["silent_s"] >= limit_s}
    kill_all([host for host in hosts if host.pid in hung])
    return bool(silent)


def stop(settings: HostSettings, *, forget: bool = False) -> bool:
    """Drain and stop this host's system, then kill what is left of it; True if something ran.

    With ``forget`` the state on disk is deleted too, after everything has ended. Raises
    GreenroomError where that, or a process, cannot be ended.
    """
    check_state_dir(settings.state_dir)  # whose records say which processes to end
    records = records_of(settings)
    hosts = records.find(HOST_ROLE)
    _end_silent(hosts, settings)  # it would not hear
    for host in hosts:
        send_signal(host, signal.SIGTERM)
    begun_at = time.monotonic()
    # The host process may learn only now how long a stop takes.
    while wait_gone(hosts, CHECK_EVERY_S):
        if time.monotonic() - begun_at > stop_s(settings):
            break
    left = records.kill()
    if outlived := [str(each.pid) for each in left if is_alive(each)]:
        raise GreenroomError(
            f"processes {', '.join(outlived)} of this host's system outlive SIGKILL; they are "
            "stuck in the kernel, perhaps by a file system that does not answer: repeat it later"
        )
    with contextlib.suppress(OSError):  # a read-only disk; its age tells that it is old
        settings.status_file.unlink(missing_ok=True)
    if forget:
        forget_state(settings)
        if settings.store_dir.exists():
            raise GreenroomError(
                f"the system is stopped, but its state in {settings.store_dir} cannot be deleted: "
                "delete it once it can be written"
            )
    return bool(hosts or left)


def stop_s(settings: HostSettings) -> float:
    """Return how long the stop of this host may take."""
    return draining.stop_s(draining.drain_s(settings))


def is_running(settings: HostSettings) -> bool:
    """Return whether this host's host process is alive."""
    return bool(records_of(settings).hosts())


def _prepare_folders(settings: HostSettings) -> None:
    for folder in (settings.state_dir, settings.logs_dir, settings.run_dir):
        try:
            make_private(folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise StartError(
                f"the state dir {settings.state_dir} cannot be used: {folder}: {error.strerror}; "
                "choose another with --state-dir or GREENROOM_STATE_DIR"
            ) from None


def _read_outcome(fd: int, on_progress: Callable[[str], None]) -> str:
    """Read the host process's last line: "ready", "running", or what went wrong; close ``fd``."""
    waits = f"{WAITING}the host process"
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        try:
            for line in _lines(pipe):
                if not line.startswith(WAITING):
                    return line
                waits = line
                on_progress(line)
        except TimeoutError:
            return f"no progress within {START_TIMEOUT_S:g} s, {waits}; see logs/host.log"
    return "the host process died at its start; see logs/host.log in the state dir"


def _lines(pipe: RawIOBase) -> Iterator[str]:
    """Yield whole lines; TimeoutError where nothing comes for START_TIMEOUT_S."""
    text = b""
    while True:
        if not select.select([pipe], [], [], START_TIMEOUT_S)[0]:
            raise TimeoutError
        chunk = pipe.read(65536)
        if not chunk:
            return
        *lines, text = (text + chunk).split(b"\n")
        yield from map(bytes.decode, lines)
