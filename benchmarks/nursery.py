"""Run one command so that nothing it leaves behind gets away.

`python -m benchmarks.nursery FOLDER COMMAND...` runs the command in the folder.

Ray and Greenroom leave daemons that outlive the command, change session and overwrite the memory
in which /proc shows their environment, so neither sessions nor markers find all of them. This
process makes itself a child subreaper instead: whatever is orphaned below it becomes its child, and
the tree under it is the whole system. It reaps what dies at once, so nobody waits for a zombie.

It prints one line of JSON with the command's start time (`time.monotonic()`, which all processes of
a machine share), then waits until its standard input ends, which also happens when the benchmark
itself is killed. Then: SIGTERM to the command, time to end, SIGKILL to each pid that is left.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

from benchmarks.processes import descendants, title

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0
KILL_S = 5.0


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def reap() -> bool:
    """Reap what has died; return whether anything still lives, which for a subreaper is exact."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def serve_until_stopped() -> None:
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.02)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            return
        reap()


def wait_until_empty(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while reap():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def signal_each(pids: set[int], number: signal.Signals) -> None:
    for pid in pids & descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(command_pid: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this must not be cut short
    signal_each({command_pid}, signal.SIGTERM)
    if wait_until_empty(GRACE_S):
        return
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        left = descendants(os.getpid())
        for pid in left:
            print(f"nursery: had to kill {pid}: {title(pid)}", file=sys.stderr, flush=True)
        signal_each(left, signal.SIGKILL)
        if wait_until_empty(0.2):
            return
    sys.exit("nursery: some processes did not even end by SIGKILL")


def main() -> None:
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder, *arguments = sys.argv[1:]
    started_at = time.monotonic()
    command = subprocess.Popen(
        arguments,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # what it signals to its process group is not for the nursery
    )
    print(json.dumps({"started_at": started_at}), flush=True)
    try:
        serve_until_stopped()
    finally:
        end_all(command.pid)


if __name__ == "__main__":
    main()
