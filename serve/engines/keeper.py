"""Keeps an engine's process: it ends with the replica, whatever ends that, and with all of its own.

Run as a program, by its path, so that it imports nothing of ours: GRACE_S COMMAND... Its standard
input is a pipe of the replica's, whose end is the replica's. The engine has a session of its own,
and ends by SIGTERM, or by SIGKILL after GRACE_S; then whatever is left of its process group does.
The exit code is the engine's, 128 + n after signal n, and 127 where it could not be started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys


def main() -> int:
    """Run the engine until it, or the replica, has ended."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    try:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"the engine cannot be started: {error}\n")
        return 127
    ended = os.pidfd_open(engine.pid)
    if not select.select([ended, sys.stdin.fileno()], [], [])[0].count(ended):
        _signal(engine.pid, signal.SIGTERM)
        select.select([ended], [], [], grace_s)
    _signal(engine.pid, signal.SIGKILL)  # before it is reaped: nobody else has its number yet
    code = engine.wait()
    return code if code >= 0 else 128 - code


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
