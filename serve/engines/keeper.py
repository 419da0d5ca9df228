"""Keeps an engine's process: it ends with the replica, whatever ends that, and with all of its own.

Run as a program, by its path, so that it imports nothing of ours: GRACE_S COMMAND... Its standard
input is a socket, whose end is the replica's; what is said there is the engine's exit code: 128 + n
after signal n, and 127 where it could not be started.

The engine has a session of its own, and ends by SIGTERM, or by SIGKILL after GRACE_S; then whatever
is left of its process group does. The keeper is no child of the replica's, which at its end kills
those it has without asking, and goes on at signals to all processes of a service or a terminal. If
it is killed itself, so is the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from functools import partial

PR_SET_PDEATHSIG = 1  # prctl(2)
PASSED_OVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the engine until it, or the replica, has ended."""
    if os.fork():
        return
    for each in PASSED_OVER:
        signal.signal(each, lambda *_: None)  # the engine would inherit that it is ignored
    code = _run(float(sys.argv[1]), sys.argv[2:])
    with contextlib.suppress(OSError):  # the replica has gone
        os.write(sys.stdin.fileno(), b"%d" % code)


def _run(grace_s: float, command: list[str]) -> int:
    try:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509  # there are no threads
        )
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"the engine cannot be started: {error}\n")
        return 127
    ended = os.pidfd_open(engine.pid)
    if not select.select([ended, sys.stdin.fileno()], [], [])[0].count(ended):
        _signal(engine.pid, signal.SIGTERM)
        select.select([ended], [], [], grace_s)
    _signal(engine.pid, signal.SIGKILL)  # before it is reaped: nobody else has its number yet
    code = engine.wait()
    return code if code >= 0 else 128 - code


def end_with(parent: int) -> None:
    """Have the kernel kill this process with its parent; end where that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
